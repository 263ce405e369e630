//! Requests to the mount daemon, over the mount's control socket.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use drover_net::service::{CallEvent, IncomingCall, OutgoingCall, Request, Services};
use drover_net::{LocalListener, NetError, Peer, connect_unix, request};
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::left::Left;
use super::status::Status;
use crate::error::Result;
use crate::remote::SocketPath;

/// Called with the bytes pushed so far and the total to push.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Timeout for sending to a client that does not read its reply.
const STALL_LIMIT: Duration = Duration::from_secs(5);

/// Timeout for the first message of a reply and for each further one.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Upper bound on concurrent clients; further connections are closed.
const MAX_CLIENTS: usize = 32;

/// Request: the status of the mount.
#[derive(Debug, Serialize, Deserialize)]
pub struct GetStatus;
request!(GetStatus: "mount.status", Manage, () => Status);

/// Request: unmount. Progress messages carry the mount's status, the reply what is left behind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopHow {
    /// Do not push dirty data.
    pub offline: bool,
    /// Discard dirty data.
    pub discard: bool,
    /// Keep the cache.
    pub keep_cache: bool,
    /// Detach the front end even while it is in use (lazy unmount).
    pub lazy: bool,
    /// Hand the write lease over once everything is pushed.
    pub hand_over: Option<HandTo>,
}

/// Who gets a write lease that is handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandTo {
    /// The only mount that stands by.
    Any,
    /// The one of the site with this key.
    Site([u8; 32]),
    /// This one, for a machine that has moved.
    Heir(Heir),
}

/// A mount that stands by as the disk of a machine, and the hand-over to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heir {
    /// The key of its site.
    pub site: [u8; 32],
    /// The mount.
    pub mount: [u8; 16],
    /// Names the hand-over, in whichever process: the same again has the same outcome.
    pub token: [u8; 16],
}

/// Request: check that the write lease of the mount can be handed over, and push what was written so far. The mount goes on. The
/// reply is how many bytes were written meanwhile.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct PrepareHandOver {
    /// To whom.
    pub to: HandTo,
}
request!(PrepareHandOver: "mount.prepare-hand-over", Manage, () => u64);

request!(StopHow: "mount.end", Manage, Status => Left);

/// Listens on `path` until the process exits, or the task is aborted; every client is served with the rights of `peer`.
///
/// # Errors
/// When the socket cannot be created.
pub fn listen(path: &Path, peer: Peer, services: Services) -> Result<JoinHandle<()>> {
    let short = SocketPath::of(path)?;
    let listener = LocalListener::bind(short.path())?;
    let services = Arc::new(services);
    let places = Arc::new(Semaphore::new(MAX_CLIENTS));
    Ok(tokio::spawn(async move {
        // Keeps the directory handle open through which the listener's path leads.
        let _short = short;
        // Never set: replies are always completed.
        let (_go, stop) = watch::channel(false);
        while let Ok(connection) = listener.accept().await {
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                continue;
            };
            let (services, peer, stop) = (Arc::clone(&services), peer.clone(), stop.clone());
            tokio::spawn(async move {
                let _place = place;
                let served = async {
                    let mut call = IncomingCall::receive(connection, stop).await?;
                    call.writer.set_stall_timeout(Some(STALL_LIMIT));
                    services.serve(peer, call).await
                };
                if let Err(e) = served.await {
                    tracing::debug!("control connection: {e}");
                }
            });
        }
    }))
}

/// Sends a request to the process that listens on `path`, with the timeout `limit` between messages; calls
/// `progress` with every message before the reply.
///
/// # Errors
/// When no process listens there, the reply is cut off, or the request is refused.
pub async fn ask<R: Request>(
    path: &Path,
    request: &R,
    limit: Duration,
    mut progress: impl FnMut(R::Progress),
) -> Result<R::Reply> {
    let short = SocketPath::of(path)?;
    let begin = async { OutgoingCall::start(connect_unix(short.path()).await?, request).await };
    let mut calling = within(limit, begin).await?;
    loop {
        match within(limit, calling.next()).await? {
            CallEvent::Progress(message) => progress(message),
            CallEvent::Reply(reply) => {
                calling.close().await;
                return Ok(reply);
            }
        }
    }
}

async fn within<T>(
    limit: Duration,
    what: impl Future<Output = std::result::Result<T, NetError>>,
) -> std::result::Result<T, NetError> {
    timeout(limit, what).await.unwrap_or_else(|_| {
        Err(NetError::TimedOut {
            peer: "the mount daemon".into(),
            what: "its reply",
            after: limit,
        })
    })
}

#[cfg(test)]
mod tests {
    use drover_net::service::{Exchange, Handler};
    use drover_net::{Code, Identity, Refusal};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    struct Busy;

    impl Handler<StopHow> for Busy {
        async fn handle(
            &self,
            _: &Peer,
            how: StopHow,
            exchange: &mut Exchange<'_, StopHow>,
        ) -> std::result::Result<Left, Refusal> {
            let busy = Status {
                name: "busy".into(),
                ..Status::default()
            };
            exchange.report(&busy).await?;
            Ok(Left::here(how.keep_cache.to_string()))
        }
    }

    #[tokio::test]
    async fn requests_are_answered_and_garbage_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let mut services = Services::new(Refusal::new(Code::Unsupported, "unsupported"));
        services.handle::<StopHow>(Busy);
        services.handle::<GetStatus>(Refusal::new(Code::Failed, "no"));
        let peer = crate::mounts::own(Identity::generate().key(), "default");
        listen(&path, peer, services).unwrap();
        let mut reported = Vec::new();
        let how = StopHow {
            keep_cache: true,
            ..StopHow::default()
        };
        let report = |status: Status| reported.push(status.name);
        let left = ask(&path, &how, ANSWER_LIMIT, report).await.unwrap();
        assert_eq!(
            (reported, left.here.as_str()),
            (vec!["busy".into()], "true")
        );
        let refused = ask(&path, &GetStatus, ANSWER_LIMIT, |()| {}).await;
        assert_eq!(refused.unwrap_err().to_string(), "no");
        let mut client = tokio::net::UnixStream::connect(&path).await.unwrap();
        client.write_all(b"hello\nGET / HTTP/1.1\n").await.unwrap();
        let mut rest = Vec::new();
        // A reset or end of file; nothing arrives but the daemon's hello.
        let _ = client.read_to_end(&mut rest).await;
        assert!(rest.len() < 100, "{rest:?}");
    }
}
