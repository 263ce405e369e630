//! The matcher and its data structures: block digests, head recognition, hash files, cuckoo-LRU
//! caches and the sequence cache.
//!
//! Pure and synchronous. The only I/O goes through [`drover_storage::Directory`]; no sockets, no clocks,
//! no threads, and never a block's data on the matcher's side.
//!
//! ```
//! use drover_core::Head;
//! use drover_index::{ImageId, Matcher, MatcherConfig, Origin, digest_block};
//! use drover_storage::FakeDirectory;
//!
//! # fn main() -> Result<(), drover_index::IndexError> {
//! let (mut matcher, _) = Matcher::open(FakeDirectory::default(), MatcherConfig::default())?;
//! // A file of three blocks, the first of which looks like the start of a file.
//! let digests = [1, 2, 3].map(|byte| digest_block(&[byte; 4096]));
//! let heads = [Head::Strong, Head::No, Head::No];
//!
//! let mut first = matcher.begin(ImageId(1))?;
//! let plan = matcher.batch(&mut first, &digests, &heads)?;
//! assert!(plan.runs.iter().all(|run| run.origin == Origin::Literal));
//! matcher.finish(first)?;
//!
//! // Another image with the same file: none of its blocks need to be sent.
//! let mut second = matcher.begin(ImageId(2))?;
//! let plan = matcher.batch(&mut second, &digests, &heads)?;
//! assert!(plan.runs.iter().all(|run| run.origin != Origin::Literal));
//! # Ok(())
//! # }
//! ```

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
mod sketch;
pub mod testing;
mod zero;

pub use digest::{ImageDigest, ZERO_BLOCK, digest_block, digest_blocks, image_digest};
pub use error::{IndexError, Result};
pub use hash_file::{DeferredSync, digests_of};
pub use head::{HeadBitsError, is_strong_head, pack_heads, unpack_heads};
pub use matcher::{
    AnchorPolicy, CacheStats, Cursor, Finishing, ImageId, ImageInfo, Layout, MAX_FREED, Matcher,
    MatcherConfig, MatcherStats, OpenReport, Origin, Plan, PlanRun, Probe, Repair, SequenceStore,
    Trim, Trimmed, Via,
};
pub use scan::{Scan, Scanner};
pub use sketch::{BLOCK_SKETCH, Sketch};
pub use zero::{ZeroMap, ZeroMapError};

/// Slots in a segment of the sequence cache: no sequence spans two segments.
pub const SEGMENT_SLOTS: u64 = page::PER_PAGE as u64;
