//! Doubles for tests: a storage that loses what was not synced and fails on demand, a destination
//! that carries out plans, and an exact deduplicator to compare the matcher with. And a cache by itself, for benches.

mod cache;
mod destination;
mod exact;
mod sim;

pub use cache::Cache;
pub use destination::{Applied, Destination};
pub use exact::ExactDedup;
pub use sim::{SimFile, SimStorage};
