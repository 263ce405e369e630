//! Accepting connections from other sites.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_rustls::{TlsAcceptor, TlsStream};
use tracing::{debug, warn};

use crate::connect::{agreed, handshake_failure, prepare};
use crate::connection::Connection;
use crate::frame::MAX_FRAME_BEFORE_TRUST;
use crate::stream::{Counted, WireCounters};
use crate::{Identity, NetError, tls};

/// Maximum connections with an unfinished handshake; more are dropped at once, so that strangers cannot exhaust memory
/// or file descriptors.
pub const MAX_PENDING: usize = 256;

/// Timeout of a client's handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause when the process has run out of file descriptors.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// A socket on which a site accepts connections.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    address: SocketAddr,
    config: Arc<ServerConfig>,
    pending: Arc<Semaphore>,
}

impl Listener {
    /// Listens on `address`; port 0 lets the system choose.
    ///
    /// # Errors
    /// [`NetError::Listen`].
    pub async fn bind(address: SocketAddr, identity: &Identity) -> Result<Self, NetError> {
        let failed = |source| NetError::Listen { address, source };
        let config = tls::server_config(identity).map_err(|e| failed(io::Error::other(e)))?;
        let tcp = TcpListener::bind(address).await.map_err(failed)?;
        Ok(Listener {
            address: tcp.local_addr().map_err(failed)?,
            tcp,
            config,
            pending: Arc::new(Semaphore::new(MAX_PENDING)),
        })
    }

    /// The address, with the port that was chosen.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The next client, before any of its bytes were read. Never waits for a slow client: run [`Pending::handshake`] in
    /// a task of its own. Errors that concern one client, or a temporary lack of file descriptors, are retried. Cancel
    /// safe.
    ///
    /// # Errors
    /// [`NetError::Listen`] when the socket itself is broken.
    pub async fn accept(&self) -> Result<Pending, NetError> {
        loop {
            let (tcp, remote) = match self.tcp.accept().await {
                Ok(accepted) => accepted,
                Err(e) if passes(&e) => {
                    warn!(address = %self.address, error = %e, "cannot take a connection now");
                    sleep(EXHAUSTED_PAUSE).await;
                    continue;
                }
                Err(source) => {
                    let address = self.address;
                    return Err(NetError::Listen { address, source });
                }
            };
            let Ok(permit) = self.pending.clone().try_acquire_owned() else {
                debug!(%remote, "dropped: {MAX_PENDING} connections are in their handshake");
                continue;
            };
            if prepare(&tcp).is_ok() {
                return Ok(Pending {
                    tcp,
                    remote,
                    config: self.config.clone(),
                    _permit: permit,
                });
            }
        }
    }
}

/// Whether a failed accept leaves the listening socket usable (accept(2)).
fn passes(e: &io::Error) -> bool {
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const EPROTO: i32 = 71;
    const ENOBUFS: i32 = 105;
    matches!(
        e.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::NetworkDown
            | io::ErrorKind::PermissionDenied
    ) || matches!(
        e.raw_os_error(),
        Some(ENOMEM | ENFILE | EMFILE | EPROTO | ENOBUFS)
    )
}

/// A client that has connected and sent nothing yet.
#[derive(Debug)]
pub struct Pending {
    tcp: TcpStream,
    remote: SocketAddr,
    config: Arc<ServerConfig>,
    _permit: OwnedSemaphorePermit,
}

impl Pending {
    /// The client's address.
    #[must_use]
    pub fn remote(&self) -> SocketAddr {
        self.remote
    }

    /// Performs the TLS handshake within [`HANDSHAKE_TIMEOUT`]. The connection's [`Connection::peer`] is a key whose
    /// possession the client proved; whether it is trusted is up to the caller, and until
    /// [`crate::FrameReader::set_max_frame`] only small frames are accepted.
    ///
    /// # Errors
    /// [`NetError::Handshake`], [`NetError::TimedOut`], or that the connection broke.
    pub async fn handshake(self) -> Result<Connection, NetError> {
        self.handshake_within(HANDSHAKE_TIMEOUT).await
    }

    /// The same with another timeout.
    ///
    /// # Errors
    /// As [`Pending::handshake`].
    pub async fn handshake_within(self, limit: Duration) -> Result<Connection, NetError> {
        let peer = self.remote.to_string();
        let io = Counted::new(self.tcp, Arc::new(WireCounters::default()));
        let stream = match timeout(limit, TlsAcceptor::from(self.config).accept(io)).await {
            Ok(Ok(stream)) => TlsStream::from(stream),
            Ok(Err(e)) => return Err(handshake_failure(peer, e)),
            Err(_) => {
                return Err(NetError::TimedOut {
                    peer,
                    what: "the handshake",
                    after: limit,
                });
            }
        };
        let key = agreed(&stream, &peer)?;
        Ok(Connection::tls(stream, key, peer, MAX_FRAME_BEFORE_TRUST))
    }
}
