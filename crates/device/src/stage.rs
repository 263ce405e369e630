//! Devices that wrap a device.

mod chunked;
mod cut;
mod delay;
mod errors;
mod gated;
mod lockable;
mod rate;
mod strict;
mod tracked;

pub use chunked::Chunked;
pub use cut::{Cut, CutHandle, CutHow, Wire};
pub use delay::{Delay, Latency};
pub use errors::{Errors, ErrorsHandle, Fault, When};
pub use gated::{Entry, Gate, Gated, Operation, Request};
pub use lockable::{Latch, LockGuard, LockHandle, Lockable, UnderWay};
pub use rate::{Bucket, Rate};
pub use strict::Strict;
pub use tracked::{Dirty, TrackHandle, Tracked};

/// The most patience that a stage has: nothing waits without an end, and a deadline must be a time that there is.
const MOST_PATIENCE: std::time::Duration = std::time::Duration::from_secs(24 * 60 * 60);

#[cfg(test)]
mod tests;
