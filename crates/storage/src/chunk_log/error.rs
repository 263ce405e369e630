use std::io;

use drover_core::DeviceError;

/// Why a log could not be read or written. Each variant names the file and the way out.
#[derive(Debug, thiserror::Error)]
pub enum ChunkLogError {
    /// The file is not a chunk log.
    #[error("{file} is not a chunk log; move it away, or name the directory that was meant")]
    NotALog {
        /// The file.
        file: String,
    },
    /// The file has another version of the format.
    #[error(
        "{file} is a chunk log of version {found}, this drover reads {ours}; use the drover that wrote it"
    )]
    Version {
        /// The file.
        file: String,
        /// Its version.
        found: u32,
        /// The supported version.
        ours: u32,
    },
    /// Durable bytes have changed: not a torn tail, which is cut off without an error.
    #[error(
        "{file} is damaged at byte {offset} ({what}) although all of it was on disk; restore the file, or remove it \
         with the data that it describes"
    )]
    Corrupt {
        /// The file.
        file: String,
        /// Offset of the damage.
        offset: u64,
        /// What is wrong there.
        what: String,
    },
    /// The caller's header is too long.
    #[error("a header of {length} bytes does not fit into {file}")]
    HeaderTooLong {
        /// The file.
        file: String,
        /// Length of the header in bytes.
        length: usize,
    },
    /// An earlier sync failed, so the contents of the file are unknown.
    #[error("{file} could not be made durable earlier; open it again once its disk is in order")]
    Broken {
        /// The file.
        file: String,
    },
    /// An error of the file system.
    #[error("cannot {doing} {file}: {source}")]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file.
        file: String,
        /// The cause.
        source: io::Error,
    },
}

impl ChunkLogError {
    pub(super) fn io(doing: &'static str, file: &str) -> impl Fn(io::Error) -> Self + use<> {
        let file = file.to_owned();
        move |source| Self::Io {
            doing,
            file: file.clone(),
            source,
        }
    }

    /// Whether the file does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

impl From<ChunkLogError> for DeviceError {
    fn from(error: ChunkLogError) -> Self {
        let said = error.to_string();
        match error {
            ChunkLogError::Io { source, .. } => io::Error::new(source.kind(), said).into(),
            ChunkLogError::Broken { .. } => io::Error::other(said).into(),
            _ => Self::Corrupt(said),
        }
    }
}
