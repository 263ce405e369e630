//! Errors of mounts.

use std::path::Path;

use drover_net::{NetError, Refusal};
use drover_store::StoreError;

/// Why a mount, or a connection of one, ended or could not begin.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The connection failed.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The site refused the mount, the lease or a request.
    #[error("{0}")]
    Refused(Refusal),
    /// No connection can be made, and a retry cannot help: a wrong key, or a site that does not speak the protocol.
    #[error("{0}")]
    CannotConnect(String),
    /// The other side broke the protocol.
    #[error("{peer} broke the mount protocol: {what}")]
    Protocol {
        /// The other end.
        peer: String,
        /// What it did.
        what: String,
    },
    /// The site could not be reached in time; a retry may help.
    #[error("{0}")]
    Unreachable(String),
    /// A file of the site's state cannot be used.
    #[error("{path}: {reason}", path = path.display())]
    StateFile {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The site's state cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// This machine lacks threads or memory.
    #[error("cannot start a mount: {0}")]
    System(#[from] std::io::Error),
}

impl From<Refusal> for MountError {
    fn from(refusal: Refusal) -> Self {
        MountError::Refused(refusal)
    }
}

impl MountError {
    /// A file of the site's state cannot be used.
    pub(crate) fn state(path: &Path, reason: impl Into<String>) -> Self {
        Self::StateFile {
            path: path.to_owned(),
            reason: reason.into(),
        }
    }
}
