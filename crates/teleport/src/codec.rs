//! The binary frames: batches, plans, needs and literals (`docs/format/wire.md`). Decoders are total: they check
//! every length before allocating, and reject anything that an encoder would not write.

mod batch;
mod literal;
mod need;
mod plan;
mod reader;

#[cfg(test)]
pub(crate) use batch::tests::any_batch;
pub use batch::{Batch, PROOF_BLOCKS, proofs_of};
pub use literal::{Literal, LiteralHeader, Packing};
pub use need::{Have, Need, Runs, Want};
pub use plan::{decode_plan, encode_plan};
pub(crate) use reader::Reader;

/// The payload of a frame is not valid for its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0}")]
pub struct Malformed(pub &'static str);

#[cfg(test)]
mod tests;
