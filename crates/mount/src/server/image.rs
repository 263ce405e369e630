//! An image as the site serves it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use drover_core::{BlockDevice, DeviceError, Digest, ImageName};
use drover_device::remote::Change;
use drover_net::PeerKey;
use parking_lot::Mutex;

use super::lease::{Desk, Holder, Who};
use crate::protocol::{Access, Code, Identity, MountId, Refusal};

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

/// Opens what is written over an image: `device`'s overlay.
pub trait Overlays: Send + Sync {
    /// The overlay in `directory` over `base`; a new one where there is none.
    ///
    /// # Errors
    /// [`DeviceError`]: one of another image, a damaged one, a full disk.
    fn open(&self, directory: &Path, base: &Base) -> Result<Arc<dyn Epochs>, DeviceError>;
}

/// An image that mounts read, and one of them perhaps writes.
pub struct Image {
    name: ImageName,
    base: Base,
    /// Where its overlay and its lease are.
    directory: PathBuf,
    /// What was written over it.
    overlay: OnceLock<Arc<dyn Epochs>>,
    /// Held over a disk's sync, so only locked by threads that may block.
    desk: Mutex<Desk>,
}

impl Image {
    /// Opens an image and what was written over it.
    ///
    /// # Errors
    /// No such image, a damaged overlay or lease.
    pub fn open(
        name: &ImageName,
        images: &dyn Images,
        overlays: &dyn Overlays,
        state: &Path,
    ) -> Result<Self, Refusal> {
        let base = images.open(name)?;
        let directory = state.join("overlays").join(name.as_str());
        let image = Self {
            desk: Mutex::new(Desk::open(name.clone(), directory.clone())?),
            name: name.clone(),
            base,
            directory,
            overlay: OnceLock::new(),
        };
        // Whoever once had the writer's lease may have written.
        if image.desk.lock().was_written() {
            image.overlay(overlays)?;
        }
        Ok(image)
    }

    fn overlay(&self, overlays: &dyn Overlays) -> Result<&Arc<dyn Epochs>, Refusal> {
        if let Some(overlay) = self.overlay.get() {
            return Ok(overlay);
        }
        std::fs::create_dir_all(&self.directory).map_err(|e| {
            let text = format!("cannot make {}: {e}", self.directory.display());
            Refusal::new(Code::Io, text)
        })?;
        let opened = overlays.open(&self.directory, &self.base)?;
        Ok(self.overlay.get_or_init(|| opened))
    }

    /// Lets a mount in. What it gets: the state, and whether that is the expected one.
    ///
    /// # Errors
    /// Somebody is in its way, or a disk fails.
    pub fn enter(
        &self,
        who: &Who,
        access: Access,
        expected: Option<Identity>,
        now: Duration,
        overlays: &dyn Overlays,
        connected: &dyn Fn(&(PeerKey, MountId)) -> bool,
    ) -> Result<(Identity, bool), Refusal> {
        let mut desk = self.desk.lock();
        let state = |edition| Identity {
            digest: self.base.digest,
            edition,
            epoch: self.committed(),
        };
        // A lease that is granted changes the edition and nothing else.
        let (_, fresh_before) = desk.edition(who, expected, state(0));
        desk.enter(who, access, now, connected)?;
        if access == Access::ReadWrite {
            self.overlay(overlays)?;
        }
        let (edition, fresh) = desk.edition(who, expected, state(0));
        Ok((state(edition), fresh || fresh_before))
    }

    /// Whether nobody would miss it if it were opened anew.
    pub fn is_idle(&self, now: Duration) -> bool {
        self.desk
            .try_lock()
            .is_some_and(|mut desk| desk.is_idle(now))
    }

    /// A mount's last lane has ended.
    pub fn left(&self, peer: PeerKey, mount: MountId, now: Duration) {
        self.desk.lock().left(peer, mount, now);
    }

    /// A mount gives back what it has.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn close(&self, peer: PeerKey, mount: MountId, link: u64) -> Result<(), Refusal> {
        self.desk.lock().close(peer, mount, link)
    }

    /// The owner takes the writer's lease away.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn break_lease(&self) -> Result<Option<Holder>, Refusal> {
        self.desk.lock().break_lease()
    }

    /// Its name.
    pub fn name(&self) -> &ImageName {
        &self.name
    }

    /// What is read.
    pub fn device(&self) -> &dyn BlockDevice {
        match self.overlay.get() {
            Some(device) => device.as_ref(),
            None => self.base.device.as_ref(),
        }
    }

    /// The last epoch that counts.
    pub fn committed(&self) -> u64 {
        self.overlay.get().map_or(0, |device| device.committed())
    }

    /// Keeps a part of the next epoch.
    ///
    /// # Errors
    /// Another epoch than the next, or a disk that fails.
    pub fn stage(&self, epoch: u64, changes: &[Change]) -> Result<(), Refusal> {
        Ok(self.next(epoch)?.stage(epoch, changes)?)
    }

    /// Makes the next epoch count. One that counts already is not an error: its answer may have been lost.
    ///
    /// # Errors
    /// Another epoch than the next, or a disk that fails.
    pub fn commit(&self, epoch: u64) -> Result<(), Refusal> {
        if epoch == self.committed() && epoch > 0 {
            return Ok(());
        }
        Ok(self.next(epoch)?.commit(epoch)?)
    }

    /// Forgets what an earlier link staged.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn abandon(&self) -> Result<(), Refusal> {
        match self.overlay.get() {
            Some(device) => Ok(device.abandon()?),
            None => Ok(()),
        }
    }

    fn next(&self, epoch: u64) -> Result<&dyn Epochs, Refusal> {
        let device = self.overlay.get().ok_or(DeviceError::ReadOnly)?.as_ref();
        let committed = device.committed();
        if epoch != committed + 1 {
            let text = format!("epoch {epoch} cannot follow epoch {committed}");
            return Err(Refusal::new(Code::Epoch, text));
        }
        Ok(device)
    }
}
