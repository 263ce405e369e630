//! What the nodes of a site agree on, that share its catalog and the directory of its images.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_net::Refusal;

use crate::flock::hints::Claimed;
use crate::services::{ClaimBlocks, LookAt, Looks};

/// What the name of a work directory ends with whose node was taken for dead.
pub const FENCED: &str = "fenced";

/// How often what another node holds is asked for again.
pub const ASK_EVERY: Duration = Duration::from_millis(200);

/// Why a node cannot have what it asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotHeld {
    /// Another node has it for the same purpose: it will be free soon, or that node is gone.
    Wait(String),
    /// Another node has it for something else.
    Taken(String),
    /// It cannot be had.
    Refused(Refusal),
}

/// What the nodes of a site agree on. Calls block.
pub trait Others: Send + Sync {
    /// Keeps other nodes from receiving an image of that name, other than for the transfer `key` of this node.
    ///
    /// # Errors
    /// Another node does, or has mounts or changes of the image; this node may change nothing now.
    fn hold(&self, name: &ImageName, key: &str) -> Result<(), NotHeld>;

    /// Ends what [`Others::hold`] began.
    fn free(&self, name: &ImageName);

    /// Keeps other nodes from changing the record of the image, or, if it `goes`, its file.
    ///
    /// # Errors
    /// As [`Others::hold`].
    fn lock(&self, name: &ImageName, goes: bool) -> Result<(), NotHeld>;

    /// Ends what [`Others::lock`] began.
    fn unlock(&self, name: &ImageName);

    /// The name of this node.
    fn name(&self) -> String;

    /// The images that are being received now, at any node.
    fn receiving(&self) -> Vec<String>;

    /// The nodes that have ranges of the index of blocks, in an order on which all agree; none if there is no such index.
    fn owners(&self) -> Vec<String> {
        Vec::new()
    }

    /// Has a node look blocks up in its range; none without an answer within a few seconds.
    fn claim(&self, _node: &str, _claim: &ClaimBlocks) -> Option<Claimed> {
        None
    }

    /// Asks a node how blocks of images stand that it receives; none without an answer within a few seconds.
    fn look(&self, _node: &str, _look: &LookAt) -> Option<Looks> {
        None
    }

    /// Whether this node may begin to receive something: its term is not over, and it does not drain.
    fn may_begin(&self) -> bool;
}

/// What a site shares with other nodes.
#[derive(Clone)]
pub struct Shared {
    /// Maps of all images.
    pub maps_dir: PathBuf,
    /// The directory of the work directories of all nodes; this node's is one of them.
    pub work_dirs: PathBuf,
    /// The other nodes.
    pub others: Arc<dyn Others>,
}
