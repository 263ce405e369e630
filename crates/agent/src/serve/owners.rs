//! The Unix sockets of domains, by which the site's own user reaches them.

use std::collections::HashMap;
use std::sync::Arc;

use drover_net::{Connection, LocalListener};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::error::Result;
use crate::home::Home;
use crate::remote::SocketPath;

/// Callers that wait to be served; more wait in the sockets' own queues.
const MAX_WAITING: usize = 16;

/// Accepts callers of all domains but the default one.
pub struct Owners {
    sockets: Sockets,
    callers: mpsc::Receiver<(Connection, String)>,
}

/// The sockets that are listened on: domains are added and removed while the site runs.
#[derive(Clone)]
pub struct Sockets {
    open: Arc<Mutex<HashMap<String, AbortHandle>>>,
    to: mpsc::Sender<(Connection, String)>,
}

impl Sockets {
    /// Listens on the socket of a domain.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn listen(&self, home: &Home) -> Result<()> {
        let name = home.domain_name().to_owned();
        let socket = SocketPath::of(&home.socket())?;
        let listener = LocalListener::bind(socket.path())?;
        let (to, domain) = (self.to.clone(), name.clone());
        let task = tokio::spawn(async move {
            // The path is valid as long as this lives.
            let _socket = socket;
            loop {
                match listener.accept().await {
                    Ok(caller) => {
                        if to.send((caller, domain.clone())).await.is_err() {
                            return;
                        }
                    }
                    Err(e) => {
                        tracing::warn!(domain, "its socket is closed: {e}");
                        return;
                    }
                }
            }
        });
        if let Some(old) = self.open.lock().insert(name, task.abort_handle()) {
            old.abort();
        }
        Ok(())
    }

    /// Closes the socket of a domain.
    pub fn close(&self, domain: &str) {
        if let Some(task) = self.open.lock().remove(domain) {
            task.abort();
        }
    }

    fn close_all(&self) {
        self.open.lock().drain().for_each(|(_, task)| task.abort());
    }
}

impl Owners {
    /// No sockets yet.
    pub fn new() -> Owners {
        let (to, callers) = mpsc::channel(MAX_WAITING);
        let open = Arc::default();
        Owners {
            sockets: Sockets { open, to },
            callers,
        }
    }

    /// Where domains are added and removed.
    pub fn sockets(&self) -> Sockets {
        self.sockets.clone()
    }

    /// The next caller, and its domain. Cancel safe.
    pub async fn accept(&mut self) -> (Connection, String) {
        match self.callers.recv().await {
            Some(caller) => caller,
            // Never: this has a sender itself.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Owners {
    fn drop(&mut self) {
        self.sockets.close_all();
    }
}
