use std::io;

use drover_core::{DeviceError, Digest};

use crate::remote::Epoch;
use drover_storage::chunk_log::ChunkLogError;

/// Why an overlay could not be opened or changed. Each variant names the file or the image, and the way out.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    /// Another process, or another part of this one, has it open.
    #[error(
        "the overlay {directory} is in use by another process; wait until it has finished, or end it"
    )]
    Busy {
        /// Directory of the overlay.
        directory: String,
    },
    /// A read-only open of an overlay that does not exist.
    #[error("there is no overlay in {directory}: the image has no changes; read the image itself")]
    Missing {
        /// Directory of the overlay.
        directory: String,
    },
    /// It was created for another image.
    #[error(
        "{directory} is an overlay of {found} (digest {found_digest}), not of {wanted} (digest {wanted_digest}); open \
         it with its own image, or give this one another directory"
    )]
    AnotherBase {
        /// Directory of the overlay.
        directory: String,
        /// The image that it was created for.
        found: String,
        /// Prefix of that image's digest.
        found_digest: String,
        /// The image that was given.
        wanted: String,
        /// Prefix of that image's digest.
        wanted_digest: String,
    },
    /// The given image does not match its identity, or cannot be a base.
    #[error("{name} cannot be the base of an overlay: {why}")]
    UnfitBase {
        /// The image.
        name: String,
        /// Why.
        why: String,
    },
    /// A file of the overlay is damaged.
    #[error(
        "{file} is damaged ({what}); restore it, or remove the overlay's directory to go back to the image"
    )]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A committed but not copied epoch of an earlier version of drover.
    #[error(
        "{file} is a committed epoch of drover before mounts of version 2: let that version open the image once (mount it), \
         then upgrade; or remove the file to lose what it holds"
    )]
    OldRedo {
        /// The file.
        file: String,
    },
    /// The block map's log could not be read or written.
    #[error(transparent)]
    Log(#[from] ChunkLogError),
    /// An epoch out of order.
    #[error("epoch {} is refused: epoch {} is committed already, or is being staged", asked.0, committed.0)]
    WrongEpoch {
        /// The epoch of the request.
        asked: Epoch,
        /// The last committed epoch.
        committed: Epoch,
    },
    /// A commit of an epoch of which nothing is staged.
    #[error("nothing is staged for epoch {}: send all of it again", .0.0)]
    NothingStaged(Epoch),
    /// A commit of an epoch whose staged size differs from the expected one.
    #[error(
        "epoch {} has {staged} bytes staged, but the commit names {asked}: send what is missing",
        epoch.0
    )]
    NotWhole {
        /// The epoch.
        epoch: Epoch,
        /// Bytes of the device that it should cover.
        asked: u64,
        /// Bytes that it covers.
        staged: u64,
    },
    /// An epoch exceeds the size limit.
    #[error("epoch {} is larger than {limit} bytes; commit smaller epochs", epoch.0)]
    TooLarge {
        /// The epoch.
        epoch: Epoch,
        /// The limit in bytes.
        limit: u64,
    },
    /// A change that does not consist of whole blocks inside the device.
    #[error(
        "a change of {length} bytes at {offset} is not of whole blocks inside a device of {size} bytes"
    )]
    BadChange {
        /// Its offset.
        offset: u64,
        /// Its length.
        length: u64,
        /// Size of the device.
        size: u64,
    },
    /// The overlay was opened read-only.
    #[error("the overlay is open for reading only")]
    ReadOnly,
    /// An earlier sync failed.
    #[error(
        "the overlay {directory} could not be made durable earlier ({why}); open it again once its disk is in order"
    )]
    Broken {
        /// Directory of the overlay.
        directory: String,
        /// The error of that sync.
        why: String,
    },
    /// An error of the base.
    #[error("{0}")]
    Base(DeviceError),
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

impl OverlayError {
    pub(super) fn io(doing: &'static str, file: &str) -> impl Fn(io::Error) -> Self + use<> {
        let file = file.to_owned();
        move |source| Self::Io {
            doing,
            file: file.clone(),
            source,
        }
    }

    pub(super) fn another_base(
        directory: String,
        found: (&str, &Digest),
        wanted: (&str, &Digest),
    ) -> Self {
        Self::AnotherBase {
            directory,
            found: found.0.to_owned(),
            found_digest: beginning(found.1),
            wanted: wanted.0.to_owned(),
            wanted_digest: beginning(wanted.1),
        }
    }
}

/// A prefix of a digest, long enough to tell two apart.
fn beginning(digest: &Digest) -> String {
    let mut hex = digest.to_string();
    hex.truncate(16);
    hex
}

impl From<OverlayError> for DeviceError {
    fn from(error: OverlayError) -> Self {
        let said = error.to_string();
        match error {
            OverlayError::Io { source, .. } => io::Error::new(source.kind(), said).into(),
            OverlayError::Log(error) => error.into(),
            OverlayError::Base(error) => error,
            OverlayError::ReadOnly => Self::ReadOnly,
            OverlayError::TooLarge { .. } => Self::NoSpace(said),
            OverlayError::Busy { .. } | OverlayError::NotWhole { .. } => Self::Unavailable(said),
            OverlayError::BadChange {
                offset,
                length,
                size,
            } => Self::OutOfRange {
                offset,
                length,
                size,
            },
            OverlayError::Broken { .. } => io::Error::other(said).into(),
            _ => Self::Corrupt(said),
        }
    }
}
