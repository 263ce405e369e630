//! Stages that stand for a link or a bad disk, for tests: they delay, fail, cut, and make demands.

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
