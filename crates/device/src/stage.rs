//! Stages: devices that wrap another device.

mod arriving;
mod awaited;
mod chunked;
mod gated;
mod holding;
mod journaled;
mod lockable;
mod profiled;
mod tracked;

pub use arriving::{ArrivalHandle, Arriving, MAX_ARRIVING};
pub use awaited::{Awaited, AwaitedHandle, Later};
pub use chunked::Chunked;
pub use gated::{Entry, Gate, Gated, Operation, Request};
pub use holding::{Held, HoldHandle, Holding};
pub use journaled::Journaled;
pub use lockable::{Latch, LockGuard, LockHandle, Lockable, UnderWay};
pub use profiled::{FirstRead, MAX_FIRST_READS, ProfileGate, ProfileHandle, Profiled, Recording};
pub use tracked::{Dirty, TrackHandle, Tracked};

/// The maximum timeout of a stage: every wait ends, and a deadline never overflows.
pub(crate) const MAX_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(24 * 60 * 60);

#[cfg(test)]
mod tests;
