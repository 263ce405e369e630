use std::io;

use drover_core::DeviceError;

use drover_storage::chunk_log::ChunkLogError;

/// Why a managed device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SyncedError {
    /// The directory is a cache of something else.
    #[error(
        "{file} belongs to a cache of another image, or of another size or chunk; name another cache directory, or \
         remove this one"
    )]
    OtherImage {
        /// The map file.
        file: String,
    },
    /// The directory holds some other log.
    #[error("{file} is not the map of a mount's cache; name another cache directory")]
    NotACache {
        /// The map file.
        file: String,
    },
    /// Written by another version of drover.
    #[error(
        "{file} is the map of a cache of another version of drover; use that one to push what it holds, or remove the cache"
    )]
    Version {
        /// The map file.
        file: String,
    },
    /// Another process has it open.
    #[error("{directory} is locked: another mount uses this cache; unmount it first")]
    InUse {
        /// The lock file.
        directory: String,
    },
    /// Both sides have changes.
    #[error(
        "the image was changed elsewhere since this cache was last in sync with it, and the cache holds changes that \
         were not pushed; copy what you need from one of them, then remove the cache"
    )]
    Conflict,
    /// The map is unusable.
    #[error(transparent)]
    Map(#[from] ChunkLogError),
    /// A file of the cache is unusable.
    #[error("cannot {doing} {file}: {source}")]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file.
        file: String,
        /// The cause.
        source: io::Error,
    },
    /// An error of the remote or of the device itself.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
