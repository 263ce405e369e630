//! Events for the driver of an image.

use bytes::Bytes;
use drover_index::Plan;
use drover_store::DataBits;

use crate::TeleportError;
use crate::destination::{Event, Run};
use crate::protocol::GiveUp;

/// An event for the driver of an image.
pub enum DriverEvent {
    /// For the state machine.
    Machine(Event),
    /// The teleporter's answer for a batch.
    Plan {
        /// The batch.
        index: u64,
        /// The answer.
        plan: Plan,
        /// Where the plan's blocks are, resolved.
        runs: Vec<Run>,
    },
    /// Where the blocks of a batch are that an earlier session has logged.
    Planned {
        /// The batch.
        index: u64,
        /// Where the blocks of its plan are.
        runs: Vec<Run>,
    },
    /// Result of comparing a batch with the partial file.
    Compared {
        /// The batch.
        index: u64,
        /// Data blocks already in place, by order among the batch's data blocks.
        blocks: DataBits,
    },
    /// The source skips a batch that the destination has.
    Skipped(u64),
    /// Blocks that were wanted (the payload of a GIVEN).
    Given(Bytes),
    /// A worker failed.
    Failed(TeleportError),
    /// The source gave the image up.
    GiveUp(GiveUp),
    /// The session ends; the transfer can be resumed later.
    Stop,
}
