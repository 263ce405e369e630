//! The matcher and its data structures: block digests, head recognition, hash files, cuckoo-LRU
//! caches and the sequence cache.
//!
//! Pure and synchronous. The only I/O goes through [`drover_storage::Directory`]; no sockets, no clocks,
//! no threads, and never a block's data on the matcher's side.

mod convert;
mod cuckoo;
mod digest;
mod error;
mod hash_file;
mod head;
mod matcher;
mod page;
mod recent;
mod scan;
mod sequence;
pub mod testing;
mod zero;

pub use digest::{ImageDigest, ZERO_BLOCK, digest_block, digest_blocks, image_digest};
pub use error::{BoxedCause, IndexError, Result};
pub use hash_file::DeferredSync;
pub use head::{HeadBitsError, is_strong_head, pack_heads, unpack_heads};
pub use matcher::{
    AnchorPolicy, CacheStats, Cursor, Finishing, ImageId, ImageInfo, Layout, MAX_FREED, Matcher,
    MatcherConfig, MatcherStats, OpenReport, Origin, Plan, PlanRun, Probe, Repair, SequenceStore,
    Trim, Trimmed, Via,
};
pub use scan::{Scan, Scanner};
pub use zero::{ZeroMap, ZeroMapError};

/// Slots of a segment of the sequence cache: no sequence lies in two.
pub const SEGMENT_SLOTS: u64 = page::PER_PAGE as u64;
