//! Doubles for tests: a storage that loses what was not synced and fails on demand, and an exact
//! deduplicator to compare the matcher with.

mod exact;
mod sim;

pub use exact::ExactDedup;
pub use sim::{SimFile, SimStorage};
