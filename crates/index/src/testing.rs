//! Doubles for tests: a destination that carries out plans, and an exact deduplicator to compare the matcher with. And a
//! cache by itself, for benches, and a page as it is on disk.

mod cache;
mod destination;
mod exact;

use drover_core::Digest;

use crate::page::{PAGE_BYTES, Page, seal};

pub use cache::Cache;
pub use destination::{Applied, Destination};
pub use exact::ExactDedup;

/// A page of an image's hash file as it is on disk, of at most [`SEGMENT_SLOTS`](crate::SEGMENT_SLOTS) digests.
#[must_use]
pub fn hash_page(no: u64, digests: &[Digest]) -> [u8; PAGE_BYTES] {
    let mut bytes = Page::of(digests).to_bytes();
    seal(&mut bytes, no);
    bytes
}
