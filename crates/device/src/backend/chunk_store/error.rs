//! Why a disk in a store cannot be opened or made.

use drover_core::DeviceError;

use super::format::Holder;

/// Why a disk in a store cannot be opened or made.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OpenError {
    /// There is none.
    #[error("there is no disk at {0}")]
    Absent(String),
    /// There is one already.
    #[error("there is a disk at {0} already")]
    Exists(String),
    /// Its header is gone, and its content is there.
    #[error(
        "there is no disk at {0}, but parts of one: the store has lost its header, and the disk with it; restore it, or use another prefix"
    )]
    Remains(String),
    /// There is something else.
    #[error("{0} is not a disk: what it has under the key `disk` is something else")]
    Foreign(String),
    /// A newer version of drover made it.
    #[error("{0} was made by a newer version of drover; update drover on this host")]
    Newer(String),
    /// The store lost or damaged what it needs.
    #[error("{place} is damaged: {what}")]
    Lost {
        /// The store.
        place: String,
        /// What is wrong.
        what: &'static str,
    },
    /// There cannot be such a disk.
    #[error(
        "there cannot be a disk of {size} bytes in objects of {object}: it would have too many"
    )]
    Shape {
        /// Its size.
        size: u64,
        /// Bytes of an object.
        object: u32,
    },
    /// Another holds the write lease.
    #[error("{place} is in use: {} has held its write lease since {since}", .holder.text)]
    Held {
        /// The store.
        place: String,
        /// Who holds it.
        holder: Holder,
        /// For how long, as text.
        since: String,
    },
    /// The store writes although it is told not to.
    #[error(
        "{0} overwrites values although it is told not to: two mounts could write the disk at once; it needs a store with conditional writes"
    )]
    Careless(String),
    /// It was opened too often.
    #[error("{0} was opened for writing too often")]
    WornOut(String),
    /// What the store says.
    #[error(transparent)]
    Store(#[from] DeviceError),
}

impl OpenError {
    /// Whether the same may succeed later without intervention.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, OpenError::Store(error) if error.is_transient())
    }
}
