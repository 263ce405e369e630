//! Errors of images.

use std::io;
use std::path::{Path, PathBuf};

use crate::Format;

/// Why an image cannot be read, or not in the way that was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The system could not do it.
    #[error("cannot {doing}: {source}")]
    Io {
        /// What was being done, to complete "cannot ...".
        doing: String,
        /// What the system said.
        source: io::Error,
    },
    /// The container contradicts itself, ends early or points where it must not.
    #[error("damaged {format} image: {field}: {detail}")]
    Damaged {
        /// What the file claims to be.
        format: Format,
        /// Which of its fields or tables is wrong.
        field: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// A feature that this program does not read.
    #[error("this {format} image {detail}")]
    Unsupported {
        /// What the file is.
        format: Format,
        /// Completes "this image ...".
        detail: String,
    },
    /// The guest's view of the image cannot be had, so it cannot be converted.
    #[error("cannot convert this image: {0}")]
    Unconvertible(String),
    /// A name inside the image leads out of the image's directory.
    #[error(
        "the image names the file {name:?}, which is not inside its own directory; it is not followed"
    )]
    OutsideDirectory {
        /// The name as the image has it.
        name: String,
    },
    /// An image is, through its backing files, its own backing file.
    #[error("the backing files form a loop")]
    BackingLoop,
    /// A chain of backing files longer than [`crate::limits::MAX_CHAIN_DEPTH`].
    #[error("the chain of backing files is longer than {0}")]
    ChainTooLong(usize),
    /// Not a regular file or block device.
    #[error("not a regular file or a block device")]
    NotAFile,
    /// The trouble is with this file.
    #[error("{}: {source}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<ImageError>,
    },
}

impl ImageError {
    /// Names the file that the error is about, unless it is named already.
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

    /// Whether the same call may succeed later with nothing changed in the image.
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

    /// Whether the file can be sent all the same as [`Conversion::Opaque`](crate::Conversion::Opaque), bytes without a format.
    #[must_use]
    pub fn opaque_helps(&self) -> bool {
        match self {
            ImageError::Damaged { .. }
            | ImageError::Unsupported { .. }
            | ImageError::OutsideDirectory { .. } => true,
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
