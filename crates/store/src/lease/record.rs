//! What is written down of a lease.

use serde::{Deserialize, Serialize};

/// Which mount: random, chosen by it, kept as long as its cache is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MountId(pub [u8; 16]);

impl MountId {
    /// A new one.
    #[must_use]
    pub fn random() -> Self {
        Self(drover_net::random_id())
    }
}

impl std::fmt::Display for MountId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl std::fmt::Debug for MountId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MountId({self})")
    }
}

/// A writer's lease, as the site keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The site that has it.
    pub peer: [u8; 32],
    /// What people call that site.
    pub peer_name: String,
    /// Which of its mounts.
    pub mount: MountId,
    /// Since when, in seconds since 1970.
    pub since_unix: u64,
    /// What the mount says about itself.
    pub note: String,
}

/// What is kept on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Grows with each writer that is not the one before.
    pub(super) edition: u64,
    /// The last writer.
    pub(super) last_writer: Option<([u8; 32], MountId)>,
    pub(super) holder: Option<Holder>,
    /// Mounts whose lease was broken, the newest last.
    pub(super) broken: Vec<([u8; 32], MountId)>,
    /// Who had the lease last, for people; none when that was in an earlier version or the changes were discarded.
    pub(super) last: Option<Holder>,
}
