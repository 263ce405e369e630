//! The durable record of a lease.

use serde::{Deserialize, Serialize};

/// Identifies a mount: random, chosen by the mount, and kept as long as its cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MountId(pub [u8; 16]);

impl MountId {
    /// A new random identifier.
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

/// The holder of a write lease, as the site records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The key of the holder's site.
    pub peer: [u8; 32],
    /// The name of that site.
    pub peer_name: String,
    /// The mount.
    pub mount: MountId,
    /// When the lease was taken, in seconds since 1970.
    pub since_unix: u64,
    /// A note that describes the mount, for display.
    pub note: String,
    /// The lease's term: how many seconds without a connection the mount keeps it; `None` for ever.
    pub term: Option<u64>,
}

/// A write lease that its holder has lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Broken {
    /// The key of the holder's site.
    pub(super) peer: [u8; 32],
    /// The mount.
    pub(super) mount: MountId,
    /// How it was lost.
    pub(super) how: Loss,
}

/// How a holder loses its write lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Loss {
    /// The lease was revoked at the site.
    Revoked,
    /// The holder had no connection for longer than the term, and another mount took the lease.
    TermOver {
        /// The term in seconds.
        term: u64,
        /// When the lease was taken, in seconds since 1970.
        at_unix: u64,
        /// A description of the mount that took it.
        by: String,
    },
    /// The holder handed it over.
    HandedOver {
        /// Chosen by the holder: the same request again has the same outcome.
        token: HandOverToken,
        /// When, in seconds since 1970.
        at_unix: u64,
        /// A description of the mount that has got it.
        to: String,
    },
}

/// Names one hand-over of a lease: random, chosen by the mount that hands it over.
pub type HandOverToken = [u8; 16];

/// The content of the lease file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Incremented with each change of writer.
    pub(super) edition: u64,
    /// The last writer.
    pub(super) last_writer: Option<([u8; 32], MountId)>,
    pub(super) holder: Option<Holder>,
    /// Leases that were broken, newest last.
    pub(super) broken: Vec<Broken>,
    /// The last holder, for display; `None` when recorded by an earlier version or after changes were discarded.
    pub(super) last: Option<Holder>,
}
