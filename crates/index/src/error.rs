//! Errors of the matcher.

use std::io;

use crate::matcher::ImageId;

/// A result with this crate's error.
pub type Result<T, E = IndexError> = std::result::Result<T, E>;

/// Why a matcher operation failed.
///
/// Damaged files are never an error: their contents are dropped and [reported](crate::Repair).
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The storage failed.
    #[error("{doing} {file}: {cause}")]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file of the index.
        file: String,
        /// The storage's error.
        #[source]
        cause: io::Error,
    },
    /// The configuration is invalid.
    #[error("index configuration: {0}")]
    Config(String),
    /// The image already has an open transfer.
    #[error("image {} is already being indexed", .0.0)]
    Busy(ImageId),
    /// The index does not contain the image.
    #[error("image {} is not in the index", .0.0)]
    Unknown(ImageId),
    /// The maximum number of images is open: a cache entry's file bits can distinguish no more.
    #[error("{0} images are being indexed at once, which is the limit")]
    TooManyOpen(usize),
    /// The caller violated the interface's contract.
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

    /// Whether the same call can succeed later without any other change.
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
