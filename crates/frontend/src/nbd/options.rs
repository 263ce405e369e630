//! Exports and options of a server.

use std::sync::Arc;
use std::time::Duration;

use drover_core::BlockDevice;

use super::counters::Counters;
use super::negotiate::Offer;
use super::tls::Tls;

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

/// What every connection of a server needs.
pub(super) struct Served {
    pub(super) exports: Vec<Export>,
    pub(super) offers: Vec<Offer>,
    pub(super) options: ServerOptions,
    pub(super) counters: Arc<Counters>,
}
