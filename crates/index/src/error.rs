//! Errors of the matcher.

use std::io;

use crate::matcher::ImageId;

/// A result with this crate's error.
pub type Result<T, E = IndexError> = std::result::Result<T, E>;

/// Why the matcher could not do what was asked.
///
/// Damaged files are never an error: what they held is dropped and [reported](crate::Repair).
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The storage failed.
    #[error("{doing} {file}: {cause}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file of the index.
        file: String,
        /// What the storage said.
        #[source]
        cause: io::Error,
    },
    /// The configuration cannot work.
    #[error("index configuration: {0}")]
    Config(String),
    /// The image has a transfer open already.
    #[error("image {} is already being indexed", .0.0)]
    Busy(ImageId),
    /// The index knows no such image.
    #[error("image {} is not in the index", .0.0)]
    Unknown(ImageId),
    /// As many images are open as a cache entry's file bits can tell apart.
    #[error("{0} images are being indexed at once, which is the limit")]
    TooManyOpen(usize),
    /// The caller broke a rule of the interface.
    #[error("bad batch: {0}")]
    BadBatch(&'static str),
}

impl IndexError {
    pub(crate) fn io(
        doing: &'static str,
        file: impl Into<String>,
    ) -> impl FnOnce(io::Error) -> Self {
        let file = file.into();
        move |cause| IndexError::Io { doing, file, cause }
    }

    /// Whether the same call can succeed later without anything else being changed here.
    #[must_use]
    pub fn retry_can_help(&self) -> bool {
        match self {
            IndexError::Io { cause, .. } => matches!(
                cause.kind(),
                io::ErrorKind::StorageFull
                    | io::ErrorKind::QuotaExceeded
                    | io::ErrorKind::Interrupted
                    | io::ErrorKind::TimedOut
            ),
            IndexError::TooManyOpen(_) | IndexError::Busy(_) => true,
            IndexError::Config(_) | IndexError::Unknown(_) | IndexError::BadBatch(_) => false,
        }
    }
}
