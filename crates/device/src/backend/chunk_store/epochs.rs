//! What a managed device pushes to a disk in a store.

use std::sync::Arc;

use drover_core::{BlockDevice, DeviceError, Zeroes};
use parking_lot::Mutex;

use super::device::StoreDevice;
use crate::local_remote::Committer;
use crate::remote::{Change, Epoch};

/// What a managed device pushes to a disk in a store: an epoch is there as a whole, or not at all. Nothing else may write
/// to the disk meanwhile.
pub struct Epochs {
    device: Arc<StoreDevice>,
    /// The epoch that is being pushed.
    staged: Mutex<Option<Epoch>>,
}

impl Epochs {
    /// For a disk.
    #[must_use]
    pub fn new(device: Arc<StoreDevice>) -> Self {
        Epochs {
            device,
            staged: Mutex::new(None),
        }
    }
}

impl Committer for Epochs {
    fn committed(&self) -> Epoch {
        // A commit that is under way is waited for, and one that may not be durable does not count.
        let _committed = self.device.inner.committed.lock();
        self.device.epoch()
    }

    fn push(&self, epoch: Epoch, changes: &[Change]) -> Result<(), DeviceError> {
        {
            let mut staged = self.staged.lock();
            if *staged != Some(epoch) {
                // What there is of another one was given up.
                self.device.inner.revert()?;
                *staged = Some(epoch);
            }
        }
        for change in changes {
            match change {
                Change::Write(offset, bytes) => self.device.write(*offset, bytes)?,
                Change::Zero(offset, length) => {
                    self.device
                        .write_zeroes(*offset, *length, Zeroes::default())?;
                }
            }
        }
        Ok(())
    }

    fn commit(&self, epoch: Epoch, covers: u64) -> Result<(), DeviceError> {
        let mut staged = self.staged.lock();
        let inner = &self.device.inner;
        if *staged != Some(epoch) && covers > 0 && !inner.has_epoch(epoch)? {
            return Err(DeviceError::Unavailable(format!(
                "{}: what was pushed is not there any more",
                inner.store.describe()
            )));
        }
        if let Err(error) = inner.commit(Some(epoch)) {
            if inner.lost().is_some() {
                // It is not complete: all of it is pushed again.
                inner.revert()?;
                *staged = None;
            }
            return Err(error);
        }
        *staged = None;
        Ok(())
    }

    fn abandon(&self) -> Result<(), DeviceError> {
        let mut staged = self.staged.lock();
        if staged.is_some() {
            self.device.inner.revert()?;
            *staged = None;
        }
        Ok(())
    }
}
