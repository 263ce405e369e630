//! The parsers without sockets, for the fuzzer.

pub use super::error::{Failure, Fault};
pub use super::negotiate::{Session, negotiate};
pub use super::replies::{Content, Outcome, Replies, Status};
