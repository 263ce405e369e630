//! An NBD server: block devices for QEMU, `nbdcopy`, the kernel and whoever else speaks the NBD protocol (r3map
//! §1.4.4.2; the NBD project's `doc/proto.md`).
//!
//! - Fixed newstyle negotiation with several exports, `INFO`, `GO`, `LIST` and TLS; structured replies with holes,
//!   `base:allocation`, flush, FUA, trim, zeroes with `NO_HOLE` and `FAST_ZERO`, cache, several connections to one
//!   export.
//! - A connection has one thread that reads requests. It answers by itself what waits for nothing; the rest goes to
//!   threads that come and go with the work (`pool`). So does a long write that waits for nothing, when the client has
//!   sent more already: one thread copies it to the device while the other receives what follows. Whoever has a reply
//!   ready sends everybody's (`outbox`).
//! - Everything that a client can make grow has a limit: connections, options, requests and bytes under way, the
//!   time of the handshake, the time in which it must take what it asked for.
//!
//! What must not live here: sockets to anything but NBD clients, and what a device is made of.
//!
//! Locks: the list of connections, a connection's budget, pool, outbox and threads. None is held while another is taken,
//! nor over a device or a socket. Only TLS nests: the sender's, or the receiver's, buffer before the TLS state; those
//! buffers are held over the socket, each by the one thread that sends or receives.

mod buffer;
mod check;
mod connection;
mod counters;
mod execute;
#[cfg(fuzzing)]
pub mod fuzzing;
mod input;
mod negotiate;
mod outbox;
mod server;
mod socket;
mod tls;
mod unix;
pub mod wire;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drover_core::BlockDevice;

pub use check::Facts;
pub use counters::Counts;
pub use server::{Address, Connection, Listening, Negotiated, Server};
pub use tls::Tls;

/// A device as clients find it.
#[derive(Clone)]
pub struct Export {
    /// What clients ask for; a client that gives no name gets the export with none, or the only one.
    pub name: String,
    /// One line for people; may be empty.
    pub description: String,
    /// What is served.
    pub device: Arc<dyn BlockDevice>,
    /// No writes, even where the device takes them.
    pub read_only: bool,
}

/// How a server serves.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Its certificate. With one, nothing is served in the clear (but see `plain_unix`).
    pub tls: Option<Tls>,
    /// Clients on a unix socket may go without TLS.
    pub plain_unix: bool,
    /// TCP beyond this machine although clients do not prove who they are: everybody can read and write.
    pub open_tcp: bool,
    /// Permissions of a socket file.
    pub unix_mode: u32,
    /// Connections at once; more are closed as they come.
    pub max_connections: usize,
    /// Requests under way on a connection.
    pub requests: usize,
    /// Their data (bytes).
    pub request_bytes: usize,
    /// Threads of a connection for requests that wait for a network.
    pub threads: usize,
    /// How long a handshake may take.
    pub handshake: Duration,
    /// How long a client may stop in the middle of a request, or take none of its replies.
    pub stall: Duration,
    /// How long requests that are under way may take when the server stops.
    pub drain: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            tls: None,
            plain_unix: false,
            open_tcp: false,
            unix_mode: 0o600,
            max_connections: 256,
            requests: 128,
            request_bytes: 64 << 20,
            threads: 64,
            handshake: Duration::from_secs(10),
            stall: Duration::from_secs(120),
            drain: Duration::from_secs(10),
        }
    }
}

/// Why a server does not begin, or a connection is not taken.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// An export that cannot be served.
    #[error("export {name:?}: {why}")]
    Export {
        /// Its name.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// Another server has the socket.
    #[error("{}: another server is listening there; stop it, or give another path", .0.display())]
    InUse(PathBuf),
    /// It cannot be listened there.
    #[error("cannot listen at {address}: {source}")]
    Bind {
        /// Where.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// Everybody could read and write.
    #[error(
        "{0} can be reached from other machines: give a certificate and an authority for clients, or listen on \
         127.0.0.1 or a unix socket"
    )]
    Open(SocketAddr),
    /// A certificate or key that is of no use.
    #[error("{}: {why}", .path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A connection that cannot be served.
    #[error("cannot serve the connection: {0}")]
    Connection(std::io::Error),
}
