//! What the matcher answers.

use serde::{Deserialize, Serialize};

/// An image, as the site numbers it: given once, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ImageId(pub u64);

/// How a batch can be put together at the destination.
///
/// Apply the runs first, then the stores: a store may overwrite slots that a run of the same plan reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Runs that cover the batch's digests in order, exactly.
    pub runs: Vec<PlanRun>,
    /// Copies from the image being delivered into the sequence data file.
    pub stores: Vec<SequenceStore>,
}

/// Neighbouring blocks with one origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanRun {
    /// Blocks in the run; at least one.
    pub count: u32,
    /// Where they are.
    pub origin: Origin,
    /// How they were found.
    pub via: Via,
}

/// Where the destination gets blocks from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// From the source.
    Literal,
    /// From an image at the destination, perhaps the one being delivered; then the whole run lies
    /// before the first block of this run.
    Image {
        /// The image.
        image: ImageId,
        /// Compact index of the first block: only blocks that are not zero count, in walk order.
        first: u64,
    },
    /// From the sequence data file.
    Sequence {
        /// Slot of the first block.
        first: u64,
    },
}

/// What found a run's first match. (Backward extension may have moved the run's start.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Via {
    /// Nothing: the blocks are literal.
    Literal,
    /// A weak head in C0, or a strong one that C1 pushed out.
    C0,
    /// A strong head, or the block after a sequence, in C1.
    C1,
    /// A sequence in C2.
    C2,
    /// A block in C0 that is no head.
    Anchor,
    /// The page in memory, after the match before it ended.
    Aligned,
    /// An earlier block of the same batch.
    Repeat,
}

/// "Copy these blocks of the image being delivered to the sequence data file."
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceStore {
    /// First slot in the sequence data file. The slots share one [segment](crate::SEGMENT_SLOTS).
    pub first: u64,
    /// Compact index of the first block in the image being delivered.
    pub from: u64,
    /// Blocks; at least one.
    pub count: u32,
}
