//! Events for the driver of an image.

use bytes::Bytes;
use drover_index::Plan;
use drover_store::DataBits;

use crate::TeleportError;
use crate::destination::{Event, Run};
use crate::protocol::GiveUp;

/// Data blocks of a batch that are in place before it is matched, by order among its data blocks.
pub struct Kept {
    /// Those that the partial file had.
    pub there: DataBits,
    /// Those that an old copy of the disk had at the same place.
    pub old: DataBits,
}

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
    /// Result of comparing a batch with the partial file, and with an old copy of the disk.
    Compared {
        /// The batch.
        index: u64,
        /// What is in place now.
        kept: Kept,
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
