//! A connection that is told when another node has changed a catalog.

use std::future::poll_fn;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use tokio_postgres::{AsyncMessage, Client};

use super::link::{CONNECT_LIMIT, SET_UP, Server};
use super::waits::{CALL_LIMIT, wait};
use crate::site_catalog::table::RowError;

/// The channel of the changes of all catalogs of a database; what is sent is the schema.
pub const CHANNEL: &str = "drover_changes";

/// How long nothing is tried after a connection was lost.
const PAUSE: Duration = Duration::from_secs(1);

/// A connection that listens; without one, it is only waited.
#[derive(Default)]
pub struct Ear(Option<Listening>);

struct Listening {
    /// The connection ends with it.
    _client: Client,
    told: Receiver<()>,
}

impl Ear {
    /// Waits until some catalog has changed, at most for so long. Also returns after it has begun to listen, since something may
    /// have changed before.
    pub fn wait(&mut self, server: &Server, patience: Duration) {
        let Some(listening) = &self.0 else {
            match listen(server) {
                Ok(listening) => self.0 = Some(listening),
                Err(e) => {
                    tracing::debug!(?e, "cannot listen for changes of the catalog");
                    std::thread::sleep(patience.min(PAUSE));
                }
            }
            return;
        };
        if listening.told.recv_timeout(patience) == Err(RecvTimeoutError::Disconnected) {
            self.0 = None;
            std::thread::sleep(patience.min(PAUSE));
        }
    }
}

fn listen(server: &Server) -> Result<Listening, RowError> {
    let (config, tls) = (server.config.clone(), server.tls.clone());
    let set_up = format!("{SET_UP} LISTEN {CHANNEL};");
    wait(CONNECT_LIMIT + CALL_LIMIT, async move {
        let (client, mut connection) = config.connect(tls).await?;
        // Many changes are as good as one.
        let (tell, told) = sync_channel(1);
        tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(_) = message {
                    let _ = tell.try_send(());
                }
            }
        });
        client.batch_execute(&set_up).await?;
        Ok(Listening {
            _client: client,
            told,
        })
    })
}
