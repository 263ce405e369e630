//! Old copies of disks that come back: what was not written since need not be sent.

use std::ops::Range;
use std::sync::Arc;

use drover_core::ReadAt;
use drover_net::PeerKey;
use drover_store::generations::Summary;

/// An old copy of a disk.
pub struct OldCopy {
    /// Its content, as the guest sees it: as many bytes as the disk has.
    pub content: Arc<dyn ReadAt>,
    /// The ranges in which it may differ from the disk that comes, in order and disjoint.
    pub differs: Vec<Range<u64>>,
}

/// Finds the old copy of a disk that a peer offers, by its generations; called on a thread that may block.
///
/// Whoever knows a seed and the tag of a generation gets what the copy has: both are random, and known only to sites that have
/// had the disk.
pub type OldCopies = dyn Fn(&PeerKey, &Summary) -> Option<OldCopy> + Send + Sync;
