//! Errors of a teleport, and whether a retry can help.

use std::io;
use std::path::PathBuf;

use drover_core::is_disk_full;
use drover_image::ImageError;
use drover_index::IndexError;
use drover_net::{Code, NetError, Refusal};
use drover_store::{CatalogError, StoreError};

/// An error of the teleport layer.
#[derive(Debug, thiserror::Error)]
pub enum TeleportError {
    /// The connection failed.
    #[error(transparent)]
    Net(NetError),
    /// The image file cannot be read as an image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The matcher's files failed.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// A file operation failed.
    #[error("cannot {doing} {}: {error}", path.display())]
    File {
        /// The operation, as in "cannot *read* x".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        error: io::Error,
    },
    /// The image changed while it was being sent.
    #[error("{} changed while it was being sent; stop what writes to it (or send a snapshot of it) and send it again", .0.display())]
    SourceChanged(PathBuf),
    /// A received block does not match its announced digest.
    #[error("block {0} is not what was announced: the image changed")]
    NotAnnounced(u64),
    /// The peer violated the protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),
    /// The peer or this site refuses the request, or the peer cannot fulfill it.
    #[error("{0}")]
    Refused(Refusal),
    /// A separate teleporter refused a request, or failed at it.
    #[error("the teleporter: {0}")]
    Teleporter(Refusal),
    /// The connection to the named role was lost.
    #[error("the connection to the {0} was lost")]
    Lost(&'static str),
    /// The named role did not reply in time.
    #[error("the {0} took too long to reply")]
    Timeout(&'static str),
    /// This process failed, or ended the operation.
    #[error("{0}")]
    Failed(String),
    /// The site's stored state cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The assembled file is not the one that was sent.
    #[error(
        "the assembled file's digest {found} is not the source's {expected}; nothing was delivered"
    )]
    WrongDigest {
        /// The digest announced by the source.
        expected: drover_core::Digest,
        /// The digest of the assembled file.
        found: drover_core::Digest,
    },
    /// Some of several images were not delivered.
    #[error("{failed} of {of} images were not delivered; {name}: {first}")]
    Images {
        /// Number of failed images.
        failed: usize,
        /// Total number of images.
        of: usize,
        /// Name of the first failed image.
        name: String,
        /// Its error.
        first: Box<TeleportError>,
    },
    /// Stopped on request; durable data is kept for a resume.
    #[error("stopped; the transfer can be resumed by sending again")]
    Stopped,
}

impl From<crate::codec::Malformed> for TeleportError {
    fn from(m: crate::codec::Malformed) -> Self {
        TeleportError::Protocol(m.to_string())
    }
}

impl From<crate::teleporter::Failure> for TeleportError {
    fn from(failure: crate::teleporter::Failure) -> Self {
        match failure {
            crate::teleporter::Failure::Violation(v) => TeleportError::Protocol(v.into()),
            crate::teleporter::Failure::Index(e) => e.into(),
        }
    }
}

impl From<NetError> for TeleportError {
    fn from(error: NetError) -> Self {
        match error {
            NetError::Refused(refusal) => TeleportError::Refused(refusal),
            error => TeleportError::Net(error),
        }
    }
}

impl From<TeleportError> for Refusal {
    fn from(error: TeleportError) -> Self {
        match error {
            TeleportError::Refused(refusal) => refusal,
            error => Refusal::new(error.refusal().unwrap_or(Code::Failed), error.to_string()),
        }
    }
}

impl TeleportError {
    /// Creates a refusal.
    pub(crate) fn refused(code: Code, message: impl Into<String>) -> Self {
        TeleportError::Refused(Refusal::new(code, message))
    }

    /// The refusal to send to a peer: without files of this site, whose log has them.
    #[must_use]
    pub fn for_peer(&self) -> Refusal {
        let code = match self {
            TeleportError::Refused(refusal) => refusal.code,
            _ => self.refusal().unwrap_or(Code::Failed),
        };
        let message = match self {
            TeleportError::File { .. } | TeleportError::Store(_) if code == Code::NoSpace => {
                "the destination ran out of space; free some there and send it again; the transfer resumes".into()
            }
            TeleportError::File { doing, error, .. }
            | TeleportError::Store(StoreError::File { doing, error, .. }) => {
                format!("the site cannot {doing} a file ({error}): its log says which")
            }
            TeleportError::Image(ImageError::In { source, .. }) => source.to_string(),
            // What a person is told of the catalog's content.
            TeleportError::Store(StoreError::Catalog(CatalogError::Conflict(_))) => self.to_string(),
            TeleportError::Index(IndexError::Io { .. })
            | TeleportError::SourceChanged(_)
            | TeleportError::Store(_) => "the site cannot use its files: its log says why".into(),
            _ => self.to_string(),
        };
        Refusal::new(code, message)
    }

    /// Adds the file and the action to an I/O error.
    pub fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| TeleportError::File { doing, path, error }
    }

    /// Whether reconnecting and resuming can help.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            TeleportError::Net(e) => e.retryable(),
            _ => false,
        }
    }

    /// Whether this site cannot look something up now, as a rule since the server of its catalog is away: a source that is cut
    /// off tries again by itself.
    #[must_use]
    pub fn is_for_now(&self) -> bool {
        match self {
            TeleportError::Store(StoreError::Catalog(e)) => e.may_pass(),
            TeleportError::Refused(refusal) => refusal.code == Code::Unavailable,
            _ => false,
        }
    }

    /// Whether a disk of this machine was full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        match self {
            TeleportError::File { error, .. }
            | TeleportError::Store(StoreError::File { error, .. }) => is_disk_full(error),
            TeleportError::Index(IndexError::Io { cause, .. }) => is_disk_full(cause),
            _ => false,
        }
    }

    /// The code if this is a refusal rather than a failure.
    #[must_use]
    pub fn refusal(&self) -> Option<Code> {
        match self {
            TeleportError::Refused(refusal) => Some(refusal.code).filter(|c| c.is_decision()),
            TeleportError::Images { first, .. } => first.refusal(),
            TeleportError::Net(e) if e.refused() => Some(Code::Untrusted),
            TeleportError::File { error, .. }
            | TeleportError::Store(StoreError::File { error, .. })
                if is_disk_full(error) =>
            {
                Some(Code::NoSpace)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_told_no_path_of_this_site() {
        let path = PathBuf::from("/srv/drover/images/theirs.img");
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        let errors = [
            TeleportError::file("write", &path)(denied()),
            StoreError::file("write", &path)(denied()).into(),
            StoreError::Catalog(CatalogError::Newer {
                path: path.clone(),
                found: 9,
            })
            .into(),
            ImageError::In {
                path: path.clone(),
                source: Box::new(ImageError::NotAFile),
            }
            .into(),
            TeleportError::SourceChanged(path),
        ];
        for error in errors {
            assert!(error.to_string().contains("/srv"), "{error}");
            let told = error.for_peer();
            assert_eq!(told.code, Code::Failed);
            assert!(!told.message.contains('/'), "{told}");
        }
        let own = TeleportError::refused(Code::Busy, "try again later");
        assert_eq!(own.for_peer(), Refusal::new(Code::Busy, "try again later"));
    }
}
