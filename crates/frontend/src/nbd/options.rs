//! Exports and options of a server.

use std::sync::Arc;
use std::time::Duration;

use drover_core::BlockDevice;

use super::counters::Counters;
use super::negotiate::Offer;
use super::tls::Tls;

/// A device as it is exported to clients.
#[derive(Clone)]
pub struct Export {
    /// Export name; a client that gives none gets the export with an empty name, or the only one.
    pub name: String,
    /// One-line description; may be empty.
    pub description: String,
    /// The device.
    pub device: Arc<dyn BlockDevice>,
    /// Read-only, even if the device is writable.
    pub read_only: bool,
}

/// Options of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// TLS certificate. With one, nothing is served unencrypted (but see `plain_unix`).
    pub tls: Option<Tls>,
    /// TLS is optional on a Unix socket.
    pub plain_unix: bool,
    /// Maximum connections; more are closed when accepted.
    pub max_connections: usize,
    /// Maximum requests in flight on a connection.
    pub requests: usize,
    /// Maximum bytes of their data.
    pub request_bytes: usize,
    /// Maximum threads of a connection for requests that wait for a network.
    pub threads: usize,
    /// How long a handshake may take.
    pub handshake: Duration,
    /// How long a client may stall in the middle of a request, or accept no replies.
    pub stall: Duration,
    /// How long requests in flight may take when the server stops.
    pub drain: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            tls: None,
            plain_unix: false,
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

/// State shared by the connections of a server.
pub(super) struct Served {
    pub(super) exports: Vec<Export>,
    pub(super) offers: Vec<Offer>,
    pub(super) options: ServerOptions,
    pub(super) counters: Arc<Counters>,
}
