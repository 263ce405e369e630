//! Stages that simulate a slow link or a bad disk, for tests: delays, errors, outages, rate limits.

mod cut;
mod delay;
mod errors;
mod rate;
mod strict;

pub use cut::{Cut, CutHandle, CutHow, Wire};
pub use delay::{Delay, Latency};
pub use errors::{Errors, ErrorsHandle, Fault, When};
pub use rate::{Bucket, Rate};
pub use strict::Strict;
