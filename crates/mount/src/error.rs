//! What can go wrong with a mount.

use std::path::Path;

use drover_net::{NetError, Refusal};

/// Why a mount, or a connection of one, ended or could not begin.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The connection failed.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The site refused: the image, the lease, or what was asked.
    #[error("{0}")]
    Refused(Refusal),
    /// There is no connection, and trying again cannot help.
    #[error("{0}")]
    CannotConnect(String),
    /// The other side broke the protocol.
    #[error("{peer} broke the protocol of mounts: {what}")]
    Protocol {
        /// Who.
        peer: String,
        /// How.
        what: String,
    },
    /// The site cannot be reached, or not soon enough.
    #[error("{0}")]
    Unreachable(String),
    /// A file of the site's state cannot be used.
    #[error("{path}: {reason}", path = path.display())]
    StateFile {
        /// Which.
        path: std::path::PathBuf,
        /// Why not.
        reason: String,
    },
    /// This machine lacks threads or memory.
    #[error("cannot start a mount: {0}")]
    System(#[from] std::io::Error),
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
