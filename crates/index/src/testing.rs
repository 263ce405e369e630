//! Test doubles: a destination that applies plans, and an exact deduplicator as a reference for the matcher. Also a
//! single cache for benchmarks.

mod cache;
mod destination;
mod exact;

pub use cache::Cache;
pub use destination::{Applied, Destination};
pub use exact::ExactDedup;
