//! Errors of this crate.

use std::io;
use std::path::{Path, PathBuf};

use crate::Format;

/// Why an image cannot be read, or not in the requested form.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// An I/O error.
    #[error("cannot {doing}: {source}")]
    Io {
        /// The operation, to complete "cannot ...".
        doing: String,
        /// The system's error.
        source: io::Error,
    },
    /// The container is inconsistent, truncated, or has invalid offsets.
    #[error("damaged {format} image: {field}: {detail}")]
    Damaged {
        /// The format that the file claims to have.
        format: Format,
        /// The invalid field or table.
        field: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// An unsupported feature.
    #[error("this {format} image {detail}")]
    Unsupported {
        /// The file's format.
        format: Format,
        /// Completes "this image ...".
        detail: String,
    },
    /// The guest's data cannot be read, so the image cannot be converted.
    #[error("cannot convert this image: {0}")]
    Unconvertible(String),
    /// A file name in the image points outside the image's directory.
    #[error(
        "the image names the file {name:?}, which is not inside its own directory; it is not followed"
    )]
    OutsideDirectory {
        /// The name as stored in the image.
        name: String,
    },
    /// A file named in the image is not opened.
    #[error("the image names the file {name:?}, which {why}; it is not followed")]
    NotFollowed {
        /// The name as stored in the image.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// The backing chain has a cycle.
    #[error("the backing files form a loop")]
    BackingLoop,
    /// The backing chain is longer than [`crate::limits::MAX_CHAIN_DEPTH`].
    #[error("the chain of backing files is longer than {0}")]
    ChainTooLong(usize),
    /// Not a regular file or block device.
    #[error("not a regular file or a block device")]
    NotAFile,
    /// An error in this file.
    #[error("{}: {source}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// The error.
        source: Box<ImageError>,
    },
}

impl ImageError {
    /// Adds the file that the error is about, unless it has one already.
    #[must_use]
    pub fn in_file(self, path: &Path) -> Self {
        match self {
            ImageError::In { .. } => self,
            other => ImageError::In {
                path: path.to_owned(),
                source: Box::new(other),
            },
        }
    }

    /// Whether the same call may succeed later without a change to the image.
    #[must_use]
    pub fn can_retry(&self) -> bool {
        match self {
            ImageError::Io { source, .. } => !matches!(
                source.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::UnexpectedEof
            ),
            ImageError::In { source, .. } => source.can_retry(),
            _ => false,
        }
    }

    /// Whether the file can still be sent as [`Conversion::Opaque`](crate::Conversion::Opaque), without its format.
    #[must_use]
    pub fn opaque_helps(&self) -> bool {
        match self {
            ImageError::Damaged { .. }
            | ImageError::Unsupported { .. }
            | ImageError::OutsideDirectory { .. }
            | ImageError::NotFollowed { .. } => true,
            ImageError::In { source, .. } => source.opaque_helps(),
            _ => false,
        }
    }

    pub(crate) fn io(doing: impl Into<String>, source: io::Error) -> Self {
        ImageError::Io {
            doing: doing.into(),
            source,
        }
    }

    pub(crate) fn damaged(format: Format, field: &'static str, detail: impl Into<String>) -> Self {
        ImageError::Damaged {
            format,
            field,
            detail: detail.into(),
        }
    }

    pub(crate) fn unsupported(format: Format, detail: impl Into<String>) -> Self {
        ImageError::Unsupported {
            format,
            detail: detail.into(),
        }
    }
}

impl From<ImageError> for io::Error {
    fn from(e: ImageError) -> io::Error {
        io::Error::other(e)
    }
}
