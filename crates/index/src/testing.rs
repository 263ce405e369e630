//! Test doubles: a destination that applies plans, and an exact deduplicator as a reference for the matcher. Also a
//! single cache and an on-disk page for benchmarks.

mod cache;
mod destination;
mod exact;

use drover_core::Digest;

use crate::page::{PAGE_BYTES, Page, seal};

pub use cache::Cache;
pub use destination::{Applied, Destination};
pub use exact::ExactDedup;

/// An on-disk page of an image's hash file, of at most [`SEGMENT_SLOTS`](crate::SEGMENT_SLOTS) digests.
#[must_use]
pub fn hash_page(no: u64, digests: &[Digest]) -> [u8; PAGE_BYTES] {
    let mut bytes = Page::of(digests).to_bytes();
    seal(&mut bytes, no);
    bytes
}
