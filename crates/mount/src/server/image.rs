//! An image as the site serves it.

use std::sync::Arc;

use drover_core::{BlockDevice, DeviceError, Digest, ImageName};
use drover_device::remote::Change;

use crate::protocol::{Code, Refusal};

/// Where the site's images come from.
pub trait Images: Send + Sync {
    /// The image of that name as a device that is not written. Called on a thread that may block.
    ///
    /// # Errors
    /// [`Refusal`]: no such image, or one that cannot be read now.
    fn open(&self, name: &ImageName) -> Result<Base, Refusal>;
}

/// An image that nobody has written.
#[derive(Clone)]
pub struct Base {
    /// Its bytes.
    pub device: Arc<dyn BlockDevice>,
    /// The image's digest.
    pub digest: Digest,
}

/// A device that also takes writes as epochs: `device`'s overlay.
pub trait Epochs: BlockDevice {
    /// The last epoch that counts.
    fn committed(&self) -> u64;

    /// Keeps changes as part of an epoch, the one after [`Epochs::committed`], which does not count yet.
    ///
    /// # Errors
    /// [`DeviceError`]; the epoch must then be abandoned.
    fn stage(&self, epoch: u64, changes: &[Change]) -> Result<(), DeviceError>;

    /// Makes an epoch count, durably and as a whole.
    ///
    /// # Errors
    /// [`DeviceError`]; it is then not known whether it counts, [`Epochs::committed`] says.
    fn commit(&self, epoch: u64) -> Result<(), DeviceError>;

    /// Forgets what was staged and not committed.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn abandon(&self) -> Result<(), DeviceError>;
}

/// An image that mounts read, and one of them perhaps writes.
pub struct Image {
    name: ImageName,
    base: Base,
    /// What was written over it.
    writable: Option<Arc<dyn Epochs>>,
}

impl Image {
    /// An image that is only read.
    pub fn read_only(name: ImageName, base: Base) -> Self {
        Self {
            name,
            base,
            writable: None,
        }
    }

    /// Its name.
    pub fn name(&self) -> &ImageName {
        &self.name
    }

    /// What is read.
    pub fn device(&self) -> &dyn BlockDevice {
        match &self.writable {
            Some(device) => device.as_ref(),
            None => self.base.device.as_ref(),
        }
    }

    /// The digest of what nobody has written.
    pub fn digest(&self) -> Digest {
        self.base.digest
    }

    /// The last epoch that counts.
    pub fn committed(&self) -> u64 {
        self.writable
            .as_ref()
            .map_or(0, |device| device.committed())
    }

    /// Keeps a part of the next epoch.
    pub fn stage(&self, epoch: u64, changes: &[Change]) -> Result<(), Refusal> {
        Ok(self.next(epoch)?.stage(epoch, changes)?)
    }

    /// Makes the next epoch count.
    pub fn commit(&self, epoch: u64) -> Result<(), Refusal> {
        Ok(self.next(epoch)?.commit(epoch)?)
    }

    fn next(&self, epoch: u64) -> Result<&dyn Epochs, Refusal> {
        let device = self.writable.as_deref().ok_or(DeviceError::ReadOnly)?;
        let committed = device.committed();
        if epoch != committed + 1 {
            let text = format!("epoch {epoch} cannot follow epoch {committed}");
            return Err(Refusal::new(Code::Epoch, text));
        }
        Ok(device)
    }
}
