//! Accepting connections from other sites.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tokio_rustls::{TlsAcceptor, TlsStream};
use tracing::warn;

use crate::connect::{agreed, handshake_failure, prepare};
use crate::connection::Connection;
use crate::frame::MAX_FRAME_BEFORE_TRUST;
use crate::stream::{Counted, WireCounters};
use crate::{Identity, NetError, tls};

mod slots;

pub use slots::{Slot, network_of};

use slots::Slots;

/// Maximum connections whose peer is not known yet, so that strangers cannot exhaust memory or file descriptors. For one
/// more, the oldest of the network with most of them is dropped.
pub const MAX_PENDING: usize = 256;

/// Timeout from accepting a client to having its request: TLS, the hello and the request together.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause when the process has run out of file descriptors.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// A socket on which a site accepts connections.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    address: SocketAddr,
    config: Arc<ServerConfig>,
    slots: Slots,
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
            slots: Slots::new(MAX_PENDING),
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
            if prepare(&tcp).is_ok() {
                let peer = remote.to_string();
                return Ok(Pending {
                    tcp,
                    remote,
                    config: self.config.clone(),
                    slot: self.slots.enter(remote.ip(), peer, HANDSHAKE_TIMEOUT),
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

/// A client that has connected and sent nothing yet. It has a slot, which it may lose.
#[derive(Debug)]
pub struct Pending {
    tcp: TcpStream,
    remote: SocketAddr,
    config: Arc<ServerConfig>,
    slot: Slot,
}

impl Pending {
    /// The client's address.
    #[must_use]
    pub fn remote(&self) -> SocketAddr {
        self.remote
    }

    /// Performs the TLS handshake within [`HANDSHAKE_TIMEOUT`]. The connection's [`Connection::peer`] is a key whose
    /// possession the client proved; whether it is trusted is up to the caller, and until
    /// [`crate::FrameReader::set_max_frame`] only small frames are accepted. The connection keeps its slot until the
    /// caller knows the peer, and releases or drops it.
    ///
    /// # Errors
    /// [`NetError::Handshake`], [`NetError::TimedOut`], [`NetError::Displaced`], or that the connection broke.
    pub async fn authenticate(self) -> Result<(Connection, Slot), NetError> {
        let peer = self.remote.to_string();
        let io = Counted::new(self.tcp, Arc::new(WireCounters::default()));
        let handshake = TlsAcceptor::from(self.config).accept(io);
        let stream = match self.slot.hold("the handshake", handshake).await? {
            Ok(stream) => TlsStream::from(stream),
            Err(e) => return Err(handshake_failure(peer, e)),
        };
        let key = agreed(&stream, &peer)?;
        let connection = Connection::tls(stream, key, peer, MAX_FRAME_BEFORE_TRUST);
        Ok((connection, self.slot))
    }

    /// The same for a caller that takes any peer; the slot is released.
    ///
    /// # Errors
    /// As [`Pending::authenticate`].
    pub async fn handshake(self) -> Result<Connection, NetError> {
        Ok(self.authenticate().await?.0)
    }

    /// The same with another timeout.
    ///
    /// # Errors
    /// As [`Pending::authenticate`].
    pub async fn handshake_within(mut self, limit: Duration) -> Result<Connection, NetError> {
        self.slot.set_deadline(limit);
        self.handshake().await
    }
}
