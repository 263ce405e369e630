//! Serializes writers of the map.

use std::sync::atomic::{AtomicU64, Ordering};

use drover_core::DeviceError;
use parking_lot::{Condvar, Mutex};

use super::super::cache::Log;
use crate::remote::{Epoch, Remote};

/// Pulled bytes that trigger making them durable at once.
pub(super) const PULLED: u64 = 256 << 20;
/// Pulled bytes that trigger entering them in the map at once.
pub(super) const PULLED_EARLY: u64 = 8 << 20;

#[derive(Default)]
pub(super) struct Turn {
    pub(super) started: u64,
    pub(super) finished: u64,
    pub(super) running: bool,
    /// The next run includes pulled chunks.
    pub(super) all: bool,
    /// Some pulled chunks are in the map but not durable.
    pub(super) early: bool,
    pub(super) error: Option<DeviceError>,
}

/// What a run does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Depth {
    /// Enters pulled chunks in the map, without making them durable.
    Early,
    /// Makes written data durable.
    Written,
    /// Also pulled data, some of which may have been saved early.
    All { early: bool },
}

pub struct Saver {
    pub(super) log: Mutex<Log>,
    pub(super) turn: Mutex<Turn>,
    pub(super) changed: Condvar,
    /// Pulled bytes that are not durable, and those of them not in the map.
    pub(super) pulled: AtomicU64,
    pub(super) fresh: AtomicU64,
    /// A sync of the data failed: what it covered may be lost although it can still be read.
    pub(super) broken: Mutex<Option<DeviceError>>,
}

impl Saver {
    pub fn new(log: Log) -> Self {
        Self {
            log: Mutex::new(log),
            turn: Mutex::default(),
            changed: Condvar::new(),
            pulled: AtomicU64::new(0),
            fresh: AtomicU64::new(0),
            broken: Mutex::default(),
        }
    }

    /// Counts pulled bytes.
    pub fn pulled(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let pulled = self.pulled.fetch_add(bytes, Ordering::Relaxed);
        let fresh = self.fresh.fetch_add(bytes, Ordering::Relaxed);
        let reached = |limit, before| before < limit && before + bytes >= limit;
        if reached(PULLED, pulled) || reached(PULLED_EARLY, fresh) || fresh == 0 {
            self.wake();
        }
    }

    pub fn wake(&self) {
        let _turn = self.turn.lock();
        self.changed.notify_all();
    }

    /// Compares the remote's committed epoch with the one the cache agrees with.
    pub fn meet(&self, remote: &dyn Remote) -> Result<(), DeviceError> {
        let mut log = self.log.lock();
        // Queried under the lock: the pusher may be recording a commit.
        let theirs = remote.committed();
        match log.knows(theirs) {
            // A commit whose reply was lost: record it now, since after a later epoch it would not be recognised.
            true => {
                if log.committed != Some(theirs)
                    && let Err(error) = log.agree(theirs)
                {
                    tracing::warn!(%error, "the cache's map cannot be written");
                }
                Ok(())
            }
            false => Err(DeviceError::Corrupt(
                "the image was changed elsewhere while the link was down; unmount it and mount it again"
                    .into(),
            )),
        }
    }

    pub fn intend(&self, epoch: Epoch) -> Result<(), DeviceError> {
        self.log.lock().intend(epoch)
    }

    pub fn agree(&self, epoch: Epoch) -> Result<(), DeviceError> {
        self.log.lock().agree(epoch)
    }

    pub fn close(&self) -> Result<(), DeviceError> {
        self.log.lock().close()
    }

    /// Whether the map records anything to push.
    pub fn is_dirty(&self) -> bool {
        self.log.lock().is_dirty()
    }

    pub(super) fn sound(&self) -> Result<(), DeviceError> {
        match &*self.broken.lock() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}
