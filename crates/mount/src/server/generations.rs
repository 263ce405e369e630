//! The generations of images that nobody writes: looked at, frozen, thawed, kept when changes become part of the image.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use drover_core::{BlockDevice, Digest, ImageName};
use drover_device::backend::overlay;
use drover_net::{Code, Refusal};
use drover_storage::{Directory, HostDirectory};
use drover_store::changes;
use drover_store::generations::{
    self, About, Comparison, Contents, Generation, Generations, GenerationsError, Summary,
};
use drover_store::lease::{Identity, LeaseTable};

use super::Server;
use super::recording::{io, is_damaged, refuse};
use crate::MountError;

/// The contents of an image with this digest, as its directory has them.
fn contents(
    directory: &Arc<dyn Directory>,
    leases: &LeaseTable,
    digest: Digest,
) -> Result<Identity, Refusal> {
    let summary = overlay::summary(directory).map_err(super::overlays::refuse)?;
    Ok(Identity {
        digest,
        edition: leases.last_edition(),
        epoch: summary.map_or(0, |summary| summary.committed.0),
    })
}

/// What is known of the generations of an image with this digest, in a site's state (see [`super::Config::state`]): works
/// without a running server. None for one that was not mounted for writing since it was made.
///
/// # Errors
/// [`MountError::StateFile`]: they cannot be read, or are damaged.
pub fn generations_on_disk(
    state: &Path,
    name: &ImageName,
    digest: Digest,
) -> Result<Option<About>, MountError> {
    let path = changes::directory(state, name);
    if !path.join(generations::FILE_NAME).exists() {
        return Ok(None);
    }
    let failed = |e: &dyn std::fmt::Display| MountError::state(&path, e.to_string());
    let directory: Arc<dyn Directory> = match HostDirectory::open(&path) {
        Ok(directory) => Arc::new(directory),
        Err(e) => return Err(failed(&e)),
    };
    let leases = LeaseTable::open(name.clone(), path.clone()).map_err(|e| failed(&e))?;
    let now = contents(&directory, &leases, digest).map_err(|e| failed(&e))?;
    generations::look(directory, now.into()).map_err(|e| failed(&e))
}

/// Begins the generations of an image with this digest and size that a machine has left, and freezes it: what it had. Works
/// without a running server.
///
/// # Errors
/// [`MountError::StateFile`]: they cannot be written, or are damaged.
pub fn freeze_on_disk(
    state: &Path,
    name: &ImageName,
    size: u64,
    digest: Digest,
) -> Result<Option<Summary>, MountError> {
    let path = changes::directory(state, name);
    let failed = |e: &dyn std::fmt::Display| MountError::state(&path, e.to_string());
    let directory = HostDirectory::open_or_create(&path).map_err(|e| failed(&e))?;
    let directory: Arc<dyn Directory> = Arc::new(directory);
    let leases = LeaseTable::open(name.clone(), path.clone()).map_err(|e| failed(&e))?;
    let now = contents(&directory, &leases, digest).map_err(|e| failed(&e))?;
    let opened = Generations::open(directory, size, now.into()).map_err(|e| failed(&e))?;
    if !opened.is_frozen() {
        opened.freeze(now.into()).map_err(|e| failed(&e))?;
    }
    Ok(opened.summary())
}

/// An image with this digest and size is the copy of a disk whose generations are `of`, and which is frozen; unless more is known
/// of it, it has changes, or a person has thawed it. Works without a running server.
///
/// # Errors
/// [`MountError::StateFile`]: they cannot be written, or the image is in use.
pub fn keep_on_disk(
    state: &Path,
    name: &ImageName,
    size: u64,
    digest: Digest,
    of: &Summary,
) -> Result<(), MountError> {
    let path = changes::directory(state, name);
    if generations::was_thawed(&path, of.seed, of.generation()) {
        return Ok(());
    }
    let failed = |e: &dyn std::fmt::Display| MountError::state(&path, e.to_string());
    let directory = HostDirectory::open_or_create(&path).map_err(|e| failed(&e))?;
    let directory: Arc<dyn Directory> = Arc::new(directory);
    let changes = overlay::summary(&directory).map_err(|e| failed(&e))?;
    if changes.is_some_and(|changes| changes.changed > 0) {
        return Ok(());
    }
    let leases = LeaseTable::open(name.clone(), path.clone()).map_err(|e| failed(&e))?;
    let now = contents(&directory, &leases, digest).map_err(|e| failed(&e))?;
    let known = generations::look(Arc::clone(&directory), now.into()).map_err(|e| failed(&e))?;
    if known.is_none() {
        Generations::keep(directory, size, of, now.into()).map_err(|e| failed(&e))?;
    }
    Ok(())
}

/// An old copy of a disk.
pub struct OldCopy {
    /// Its content.
    pub device: Arc<dyn BlockDevice>,
    /// Where it may differ from the disk.
    pub differs: Vec<Range<u64>>,
}

/// An image that is not open, as its generations see it.
struct Unopened {
    directory: Arc<dyn Directory>,
    size: u64,
    now: Identity,
}

impl Unopened {
    fn open(&self) -> Result<Generations, GenerationsError> {
        Generations::open(Arc::clone(&self.directory), self.size, self.now.into())
    }
}

impl Server {
    /// Freezes an image: it cannot be mounted for writing until it is thawed. Returns what is known of its generations, the
    /// last of which is over. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: it is mounted or leased, or a disk error.
    pub fn freeze(&self, name: &ImageName) -> Result<About, MountError> {
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        self.let_go(name)?;
        let path = changes::directory(&self.config.state, name);
        LeaseTable::open(name.clone(), path)?.check_free(Duration::ZERO, &|_| false)?;
        let unopened = self.unopened(name)?;
        let freeze = || {
            let generations = unopened.open()?;
            if !generations.is_frozen() {
                generations.freeze(unopened.now.into())?;
            }
            Ok(generations.about())
        };
        freeze().map_err(|e| MountError::Refused(refuse(name, e)))
    }

    /// Thaws an image, or removes generations that are damaged. False if it was neither frozen nor damaged. Blocks on the
    /// disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: a disk error.
    pub fn thaw(&self, name: &ImageName) -> Result<bool, MountError> {
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        let path = changes::directory(&self.config.state, name);
        // If it is being written, it is not frozen.
        if !path.join(generations::FILE_NAME).exists() || self.is_recorded(name) {
            return Ok(false);
        }
        let thaw = |unopened: &Unopened| -> Result<bool, GenerationsError> {
            let opened = unopened.open()?;
            let about = opened.about();
            if about.frozen {
                // Its file may say for good that it is a copy of this generation.
                let remembered = generations::remember_thaw(&path, about.seed, about.generation);
                remembered.map_err(|source| GenerationsError::Io {
                    doing: "write in",
                    file: path.display().to_string(),
                    source,
                })?;
            }
            opened.thaw().map(|()| about.frozen)
        };
        match self.unopened(name).map(|unopened| thaw(&unopened)) {
            Ok(Ok(is_frozen)) => return Ok(is_frozen),
            Ok(Err(error)) if !is_damaged(&error) => return Err(refuse(name, error).into()),
            // The image itself may be what is missing.
            Ok(Err(_)) | Err(_) => {}
        }
        let directory = self
            .config
            .images
            .overlay(&path)
            .map_err(|e| io(name, &e))?;
        generations::forget(directory.as_ref()).map_err(|e| refuse(name, e))?;
        Ok(true)
    }

    /// An image that was just delivered is a copy of a disk with these generations: later ones are compared with them. Blocks
    /// on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: they do not fit, or a disk error.
    pub fn succeed_generations(&self, name: &ImageName, of: &Summary) -> Result<(), MountError> {
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        let unopened = self.unopened(name)?;
        let (directory, now) = (unopened.directory, unopened.now.into());
        let succeeded = Generations::succeed(directory, unopened.size, of, now);
        succeeded.map_err(|e| refuse(name, e))?;
        Ok(())
    }

    /// The generations of an image, as of now; none if they are not known. Blocks on the disk.
    pub fn generations(&self, name: &ImageName) -> Option<Summary> {
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        let open = self.open_generations(name);
        match open {
            Some(generations) => generations.summary(),
            None => {
                let unopened = self.unopened(name).ok()?;
                let found = generations::summary(unopened.directory, unopened.now.into());
                let damaged =
                    |error: &GenerationsError| tracing::warn!(image = %name, %error, "generations");
                found.inspect_err(damaged).ok()?
            }
        }
    }

    /// Continues the generations of the copy that an image which is open for writing came from, see [`Generations::adopt`].
    /// Does nothing to others. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: they do not fit, or a disk error.
    pub fn adopt_generations(&self, name: &ImageName, of: &Summary) -> Result<(), MountError> {
        let adopted = self.open_generations(name).map(|own| own.adopt(of));
        adopted
            .unwrap_or(Ok(()))
            .map_err(|e| refuse(name, e).into())
    }

    fn open_generations(&self, name: &ImageName) -> Option<Arc<Generations>> {
        self.state.lock().open.get(name)?.generations().cloned()
    }

    /// The best old copy of the disk with these generations among the images that nobody writes, and that have no changes.
    /// Blocks on the disk.
    pub fn old_copy(&self, of: &Summary) -> Option<OldCopy> {
        let names = changes::names(&self.config.state).ok()?;
        let copies = names.iter().filter_map(|name| {
            let (since, copy) = self.old_copy_in(name, of)?;
            Some((since, name, copy))
        });
        let (since, name, copy) = copies.max_by_key(|(since, ..)| *since)?;
        let generation = since.0;
        tracing::info!(image = %name, generation, "a disk that comes is compared with this old copy");
        Some(copy)
    }

    fn old_copy_in(&self, name: &ImageName, of: &Summary) -> Option<(Generation, OldCopy)> {
        let path = changes::directory(&self.config.state, name);
        if !path.join(generations::FILE_NAME).exists() {
            return None;
        }
        let directory = self.config.images.overlay(&path).ok()?;
        if generations::seed(Arc::clone(&directory))? != of.seed {
            return None;
        }
        let known = self.generations(name)?;
        let changes = overlay::summary(&directory).ok()?;
        if changes.is_some_and(|changes| changes.changed > 0) {
            return None;
        }
        let base = self.config.images.open(name).ok()?;
        let (since, differs) = match of.compare(&known) {
            Comparison::Newer { since, ranges }
            | Comparison::Older { since, ranges }
            | Comparison::Branch { since, ranges } => (since, ranges),
            Comparison::Unknown(why) => {
                tracing::info!(image = %name, %why, "it is no old copy of the disk");
                return None;
            }
        };
        let device = base.device;
        Some((since, OldCopy { device, differs }))
    }

    /// Whether an image is open for writing.
    fn is_recorded(&self, name: &ImageName) -> bool {
        let state = self.state.lock();
        let open = state.open.get(name);
        open.is_some_and(|image| image.generations().is_some())
    }

    /// An image that no mount has open for writing. The caller holds its [`Self::image_lock`].
    fn unopened(&self, name: &ImageName) -> Result<Unopened, Refusal> {
        let base = self.config.images.open(name)?;
        if base.through.is_some() {
            // Nothing here sees what is written to it.
            let text = format!("{name} is a disk in a store, which has no generations");
            return Err(Refusal::new(Code::Unsupported, text));
        }
        let path = changes::directory(&self.config.state, name);
        let leases = LeaseTable::open(name.clone(), path.clone())?;
        let directory = self
            .config
            .images
            .overlay(&path)
            .map_err(|e| io(name, &e))?;
        let now = contents(&directory, &leases, base.digest)?;
        let size = base.device.size();
        Ok(Unopened {
            directory,
            size,
            now,
        })
    }

    /// The contents of an image whose overlay is about to become part of it.
    pub(super) fn contents_before(
        &self,
        name: &ImageName,
        leases: &LeaseTable,
    ) -> Option<Contents> {
        let path = changes::directory(&self.config.state, name);
        let directory = self.config.images.overlay(&path).ok()?;
        let summary = overlay::summary(&directory).ok()??;
        let before = Identity {
            digest: summary.identity.base,
            edition: leases.last_edition(),
            epoch: summary.committed.0,
        };
        Some(before.into())
    }

    /// After that has happened, and the image got a digest: it is the same disk, so its generations are kept. If that fails,
    /// it is compared by digests.
    pub(super) fn keep_generations(&self, name: &ImageName, before: Contents, digest: Digest) {
        let keep = || -> Result<(), Refusal> {
            let unopened = self.unopened(name)?;
            if unopened.now.digest != digest {
                return Ok(());
            }
            let known = generations::look(Arc::clone(&unopened.directory), before);
            if known.map_err(|e| refuse(name, e))?.is_none() {
                return Ok(());
            }
            let opened = Generations::open(Arc::clone(&unopened.directory), unopened.size, before);
            let renamed = opened.and_then(|opened| opened.rename(unopened.now.into()));
            renamed.map_err(|e| refuse(name, e))
        };
        if let Err(refusal) = keep() {
            tracing::info!(image = %name, %refusal, "the generations of an image were not kept");
        }
    }
}
