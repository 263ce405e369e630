//! Errors of loop devices.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::fuse::{User, listed};
use crate::retry::may_pass;

/// Why a loop device could not be attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// Invalid block size.
    #[error("block size {0}: a loop device has 512 or 4096")]
    BlockSize(u32),
    /// The kernel has no loop devices, or this process may not use them.
    #[error("no loop device is available: {0} (as root: modprobe loop)")]
    Missing(io::Error),
    /// The file cannot be attached.
    #[error("cannot attach {} to a loop device: {source}", file.display())]
    Attach {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Other processes took each free device first.
    #[error("cannot attach {}: other programs keep taking the free loop devices", file.display())]
    Contended {
        /// The file.
        file: PathBuf,
    },
    /// It is in use.
    #[error("{} is in use by {}: end these programs first", device.display(), listed(users))]
    Busy {
        /// The device.
        device: PathBuf,
        /// Its users, as far as visible.
        users: Vec<User>,
    },
    /// It cannot be flushed to the file; it stays attached.
    #[error("what was written to {} cannot be written back: {source}", device.display())]
    Unflushed {
        /// The device.
        device: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be detached.
    #[error("cannot detach {}: {source}", device.display())]
    Detach {
        /// The device.
        device: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The backing file does not respond; a thread keeps waiting.
    #[error("{} did not answer for {waited:?}: its backing file hangs", device.display())]
    Hung {
        /// The device or the file.
        device: PathBuf,
        /// For how long.
        waited: Duration,
    },
}

impl LoopError {
    /// Whether a retry may succeed: only processes use it.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self, Self::Busy { users, .. } if may_pass(users))
    }
}
