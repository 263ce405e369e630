//! The mount's two ends against each other.

mod direct;
mod util;
