//! The matcher's results.

use drover_core::CompactIndex;
use serde::{Deserialize, Serialize};

/// The site's ID of an image: assigned once, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ImageId(pub u64);

/// How the destination can assemble a batch.
///
/// Apply the runs first, then the stores: a store may overwrite slots that a run of the same plan reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Runs that cover the batch's digests in order, exactly.
    pub runs: Vec<PlanRun>,
    /// Copies from the image being delivered into the sequence data file.
    pub stores: Vec<SequenceStore>,
}

/// Consecutive blocks with one origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanRun {
    /// Blocks in the run; at least one.
    pub count: u32,
    /// Where they are.
    pub origin: Origin,
    /// How they were matched.
    pub via: Via,
}

/// Where the destination gets blocks from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// From the source.
    Literal,
    /// From an image at the destination, possibly the one being delivered; then the whole origin range lies before
    /// the first block of this run.
    Image {
        /// The image.
        image: ImageId,
        /// The first block.
        first: CompactIndex,
    },
    /// From the sequence data file.
    Sequence {
        /// Slot of the first block.
        first: u64,
    },
}

/// How a run's first match was found. (Backward extension may have moved the run's start.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Via {
    /// Nothing: the blocks are literal.
    Literal,
    /// A weak head in C0, or a strong one evicted from C1.
    C0,
    /// A strong head, or the block after a sequence, in C1.
    C1,
    /// A sequence in C2.
    C2,
    /// A block in C0 that is no head.
    Anchor,
    /// The page in memory, after the previous match ended.
    Aligned,
    /// An earlier block of the same batch.
    Repeat,
}

/// Copy these blocks of the image being delivered to the sequence data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceStore {
    /// First slot in the sequence data file. The slots share one [segment](crate::SEGMENT_SLOTS).
    pub first: u64,
    /// The first block in the image being delivered.
    pub from: CompactIndex,
    /// Number of blocks; at least one.
    pub count: u32,
}
