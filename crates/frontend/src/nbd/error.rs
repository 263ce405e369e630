//! Errors of setting up a server.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Why a server cannot start, or a connection cannot be served.
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
    /// Cannot listen there.
    #[error("cannot listen at {address}: {source}")]
    Bind {
        /// Where.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// Anyone on the network could read and write.
    #[error(
        "{0} can be reached from other machines: give a certificate and an authority for clients, or listen on \
         127.0.0.1 or a unix socket"
    )]
    Open(SocketAddr),
    /// An unusable certificate or key.
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
