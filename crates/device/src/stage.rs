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

#[cfg(test)]
mod tests;
