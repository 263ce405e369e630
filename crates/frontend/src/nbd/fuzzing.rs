//! The protocol without I/O, for the fuzzer.

pub use super::check::{Refusal, check};
pub use super::negotiate::{Negotiation, Offer, Security, Session, Step};
