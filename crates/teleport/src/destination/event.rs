//! What the driver of a destination tells it, and what it answers.

use std::sync::Arc;

use drover_core::Digest;
use drover_index::Via;
use drover_store::DataBits;
use drover_store::sequences::From;

use crate::codec::{Batch, Need, Runs, Want};

/// A run of a plan with its location resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of data blocks.
    pub count: u32,
    /// Where to read them.
    pub from: From,
    /// How they were matched, for the statistics.
    pub via: Via,
}

/// Data blocks to be copied into place and then verified there.
#[derive(Debug, Clone)]
pub struct ReuseJob {
    /// The batch they belong to.
    pub batch: Arc<Batch>,
    /// First data block of each run (by order among the batch's data blocks), and its origin. `From::Own` only with
    /// verified blocks; never `From::Literal`.
    pub runs: Vec<(u32, Run)>,
}

/// Input events.
#[derive(Debug)]
pub enum Event {
    /// The source sent a batch.
    Batch(Arc<Batch>),
    /// These data blocks of a batch (by order among them) are in place already. Comes before its plan, if at all.
    Kept {
        /// Index of the batch.
        index: u64,
        /// The blocks.
        blocks: DataBits,
        /// How they got there.
        by: KeptBy,
    },
    /// The matcher's answer for a batch, resolved.
    Planned {
        /// Index of the batch.
        index: u64,
        /// Covers the batch's data blocks in order.
        runs: Vec<Run>,
    },
    /// A reuse job has ended. Its blocks in `failed` (by order among the batch's data blocks) failed verification;
    /// the others are in place.
    Reused {
        /// The job.
        job: ReuseJob,
        /// Ascending.
        failed: Vec<u32>,
    },
    /// The blocks for a reuse job are not coming, or waiting for them timed out.
    NotComing(ReuseJob),
    /// Literal blocks were verified and written.
    Written(Runs),
    /// The answer to [`Action::Prove`]: the groups of [`PROOF_BLOCKS`](crate::codec::PROOF_BLOCKS) data blocks whose proof
    /// is wrong.
    Proved {
        /// The batch.
        index: u64,
        /// Ascending.
        wrong: Vec<u32>,
    },
    /// A batch that the source did not send, with its data in place: read from an old copy of the disk.
    Taken(Arc<Batch>),
    /// These blocks should come before all others.
    Want(Want),
    /// Wanted blocks of batches that have not arrived were written, as the source has sent them.
    Ahead {
        /// Those that are not zeros.
        data: Runs,
        /// Those that are.
        zero: Runs,
    },
    /// The source has sent every batch; the digest, if it knows it.
    End(Option<Digest>),
}

/// How blocks got into place before their batch was matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptBy {
    /// The partial file had them.
    Session,
    /// An old copy of the disk has them at the same place.
    OldCopy,
}

/// What the driver must do.
#[derive(Debug)]
pub enum Action {
    /// Log the batch, make its digests available to the data connections, and have it matched.
    Match(Arc<Batch>),
    /// Copy and verify blocks.
    Reuse(ReuseJob),
    /// Request blocks from the source.
    Need(Need),
    /// Every block of the batch is in place by its short digest: check the proofs, and answer with [`Event::Proved`].
    Prove(u64),
    /// Acknowledge the batch to the source as complete, and drop its digests.
    Complete(u64),
    /// Every block is in place: compare digests, if the source has sent one, and deliver.
    Finish(Option<Digest>),
    /// Ask the source for blocks of batches that have not arrived: it sends each of them.
    Want(Want),
    /// Ask the source to send blocks that it was asked for ahead of all others, unless they are on their way.
    Hurry(Want),
    /// The source has sent this block ahead, and now announces another: the image has changed.
    Changed(u64),
}

/// The source violated the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

impl std::convert::From<Violation> for crate::TeleportError {
    fn from(v: Violation) -> Self {
        crate::TeleportError::Protocol(v.0)
    }
}
