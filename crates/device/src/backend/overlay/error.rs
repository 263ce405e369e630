use std::io;

use drover_core::{DeviceError, Digest};

use crate::remote::Epoch;
use drover_storage::chunk_log::ChunkLogError;

/// Why an overlay could not be opened or changed. Each names the file or the image, and the way out.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    /// Another process, or another part of this one, has it open.
    #[error(
        "the overlay {directory} is in use by another process; wait until it has finished, or end it"
    )]
    Busy {
        /// Its directory.
        directory: String,
    },
    /// It was to be opened for reading only, and is not there.
    #[error("there is no overlay in {directory}: the image has no changes; read the image itself")]
    Missing {
        /// Its directory.
        directory: String,
    },
    /// It was made for another image.
    #[error(
        "{directory} is an overlay of {found} (digest {found_digest}), not of {wanted} (digest {wanted_digest}); open \
         it with its own image, or give this one another directory"
    )]
    AnotherBase {
        /// Its directory.
        directory: String,
        /// The image that it was made for.
        found: String,
        /// The beginning of that image's digest.
        found_digest: String,
        /// The image that was given.
        wanted: String,
        /// The beginning of that image's digest.
        wanted_digest: String,
    },
    /// The image that was given is not what its identity says, or cannot be a base.
    #[error("{name} cannot be the base of an overlay: {why}")]
    UnfitBase {
        /// The image.
        name: String,
        /// Why.
        why: String,
    },
    /// A file of the overlay is not what it was.
    #[error(
        "{file} is damaged ({what}); restore it, or remove the overlay's directory to go back to the image"
    )]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// An epoch that a former version of drover made count and did not copy.
    #[error(
        "{file} is a committed epoch of drover before mounts of version 2: let that version open the image once (mount it), \
         then upgrade; or remove the file to lose what it holds"
    )]
    OldRedo {
        /// The file.
        file: String,
    },
    /// The log of states could not be read or written.
    #[error(transparent)]
    Log(#[from] ChunkLogError),
    /// An epoch out of turn.
    #[error("epoch {} is refused: epoch {} is committed already, or is being staged", asked.0, committed.0)]
    WrongEpoch {
        /// What was asked for.
        asked: Epoch,
        /// The last that counts.
        committed: Epoch,
    },
    /// An epoch was to be committed of which nothing is here.
    #[error("nothing is staged for epoch {}: send all of it again", .0.0)]
    NothingStaged(Epoch),
    /// An epoch was to be committed of which other is here than was said.
    #[error(
        "epoch {} has {staged} bytes staged, but the commit names {asked}: send what is missing",
        epoch.0
    )]
    NotWhole {
        /// The epoch.
        epoch: Epoch,
        /// Bytes of the device that it should cover.
        asked: u64,
        /// Those that it does.
        staged: u64,
    },
    /// An epoch is larger than it may be.
    #[error("epoch {} is larger than {limit} bytes; commit smaller epochs", epoch.0)]
    TooLarge {
        /// The epoch.
        epoch: Epoch,
        /// The bytes that one may have.
        limit: u64,
    },
    /// A change that is not of whole blocks inside the device.
    #[error(
        "a change of {length} bytes at {offset} is not of whole blocks inside a device of {size} bytes"
    )]
    BadChange {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        length: u64,
        /// What there is.
        size: u64,
    },
    /// It was opened for reading only.
    #[error("the overlay is open for reading only")]
    ReadOnly,
    /// An earlier sync failed.
    #[error(
        "the overlay {directory} could not be made durable earlier ({why}); open it again once its disk is in order"
    )]
    Broken {
        /// Its directory.
        directory: String,
        /// What was reported then.
        why: String,
    },
    /// The base reports an error.
    #[error("{0}")]
    Base(DeviceError),
    /// The file system reports an error.
    #[error("cannot {doing} {file}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The file.
        file: String,
        /// What was reported.
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

/// Enough of a digest for a person to tell two apart.
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
