//! Events for the driver of an image.

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
        /// Where that says the blocks are, looked up.
        runs: Vec<Run>,
    },
    /// Which data blocks of a batch (by order among them) are in the partial file already.
    Compared {
        /// The batch.
        index: u64,
        /// Which.
        blocks: DataBits,
    },
    /// A worker cannot go on.
    Failed(TeleportError),
    /// The source gives the image up.
    GiveUp(GiveUp),
    /// The session ends; the transfer is to be resumed later.
    Stop,
}
