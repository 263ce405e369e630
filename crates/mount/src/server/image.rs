//! An image as the site serves it.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use drover_core::{BlockDevice, DeviceError, Digest, ImageName};
use drover_device::backend::Overlay;
use drover_device::backend::overlay::{self, OverlayError};
use drover_device::remote::{Change, Epoch};
use drover_net::{Code, Peer, PeerKey, Refusal};
use drover_storage::{Directory, HostDirectory};
use drover_store::changes;
use drover_store::generations::{Generations, Recorded};
use drover_store::lease::{Access, Holder, Identity, LeaseTable, Loss, MountId, Who};
use parking_lot::{Mutex, MutexGuard};

mod hand_over;

use super::arriving::{Arrival, Arriving, arrival};
use super::overlays::{finish_discarding, refuse};
use super::points::Points;
use super::pool::Pool;
use super::recording;
use super::settler::{RunningGuard, Settler};
use super::through::{Through, WriteThrough};
use super::unit::Unit;
use crate::protocol::{MAX_RUNS, refusal_of};

/// How long a lease request waits for a commit, holding a thread, before the mount is told to retry.
const LEASE_WAIT: Duration = Duration::from_secs(5);

/// Space that a change may take, from when it was asked for until it is made: then the disk shows what it took, and this is
/// dropped.
pub type Room = Box<dyn Any + Send>;

/// The source of the site's images.
pub trait Images: Send + Sync {
    /// Opens the image with that name as a read-only device. Called on a thread that may block.
    ///
    /// # Errors
    /// [`Refusal`]: no such image, or one that cannot be read now.
    fn open(&self, name: &ImageName) -> Result<Base, Refusal>;

    /// The current digest of the image with that name: an open one may have been replaced since. Called like
    /// [`Images::open`], whenever a mount connects.
    ///
    /// # Errors
    /// As [`Images::open`]'s.
    fn digest(&self, name: &ImageName) -> Result<Digest, Refusal> {
        Ok(self.open(name)?.digest)
    }

    /// Checks that a peer, which has the right to read, may open this image. Called like [`Images::open`], for every
    /// connection.
    ///
    /// # Errors
    /// [`Refusal`].
    fn allow(&self, name: &ImageName, peer: &Peer, access: Access) -> Result<(), Refusal>;

    /// Checks that a peer may write this image by the rights that it has now, which may be other than in `peer`: those are of when
    /// it connected. Called like [`Images::open`].
    ///
    /// # Errors
    /// [`Refusal`].
    fn allow_now(&self, name: &ImageName, peer: &Peer) -> Result<(), Refusal> {
        self.allow(name, peer, Access::ReadWrite)
    }

    /// Checks that an image may be written here, by a mount that does not hold its write lease: one that has moved to another
    /// site may not. Called like [`Images::open`].
    ///
    /// # Errors
    /// [`Refusal`].
    fn may_be_written(&self, name: &ImageName, mount: MountId) -> Result<(), Refusal> {
        let _ = (name, mount);
        Ok(())
    }

    /// Checks that a peer may take so many more bytes of the site's disks. Called before every change that takes any, on
    /// a thread that may block for a moment.
    ///
    /// # Errors
    /// [`Code::NoSpace`].
    fn room(&self, peer: &PeerKey, bytes: u64) -> Result<Room, Refusal>;

    /// Told what has happened to an image. Called like [`Images::open`].
    fn happened(&self, name: &ImageName, what: &Happened) {
        let _ = (name, what);
    }

    /// The directory of an image's overlay, created if missing. Called like [`Images::open`].
    ///
    /// # Errors
    /// Errors of the file system.
    fn overlay(&self, path: &Path) -> std::io::Result<Arc<dyn Directory>> {
        Ok(Arc::new(HostDirectory::open_or_create(path)?))
    }
}

/// What happens to an image by mounts.
#[derive(Clone, Debug)]
pub enum Happened {
    /// A mount was opened: it had no connection before.
    Opened {
        /// Who mounts it.
        peer: Peer,
        /// The other end of the connection, for messages.
        from: String,
        /// What for.
        access: Access,
    },
    /// A connection of a mount was refused.
    Refused {
        /// Whose.
        peer: Peer,
        /// The other end of the connection, for messages.
        from: String,
        /// What it was for.
        access: Access,
        /// Why.
        refusal: Refusal,
    },
    /// A mount has no connection any more: it was closed, or its link was lost.
    Closed {
        /// Who mounted it.
        peer: Peer,
        /// What for.
        access: Access,
        /// Bytes that it wrote, without zeros.
        written: u64,
        /// How long it was open.
        time: Duration,
    },
    /// A write lease was handed over by its holder.
    HandedOver {
        /// The mount that held it.
        from: Peer,
        /// The site that has it now.
        to: Peer,
    },
    /// A write lease was broken.
    LeaseBroken {
        /// The mount that held it.
        holder: Holder,
        /// Why.
        why: WhyBroken,
    },
}

/// Why a write lease is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyBroken {
    /// The site's user said so.
    ByUser,
    /// The holder may not write any more.
    RightLost,
    /// The holder had no connection for longer than the lease's term, and another mount wanted the image.
    TermOver,
}

/// An image without its overlay.
#[derive(Clone)]
pub struct Base {
    /// Its contents.
    pub device: Arc<dyn BlockDevice>,
    /// The image's digest, or what stands for it.
    pub digest: Digest,
    /// Of an image that is still arriving: waits for parts of it.
    pub arriving: Option<Arc<dyn Arriving>>,
    /// Of a disk that takes its writes itself: how. Others have an overlay.
    pub through: Option<WriteThrough>,
}

/// An image opened for mounts: any number of readers, and at most one writer.
pub struct Image {
    name: ImageName,
    images: Arc<dyn Images>,
    base: Base,
    /// The directory of its overlay and lease.
    directory: PathBuf,
    /// What mounts wrote over it.
    overlay: OnceLock<Recorded<Overlay>>,
    /// Of a disk that takes its writes itself, in the place of an overlay.
    through: Option<Through>,
    /// Held during a disk sync, so only locked by threads that may block.
    leases: Mutex<LeaseTable>,
    /// The lease edition whose writer staged the current epoch. Locked inside the leases.
    staged_by: Mutex<u64>,
    settler: Settler,
    points: Points,
}

/// The boot ID of the machine; zeros if the kernel does not provide one.
fn boot() -> [u8; 16] {
    static BOOT: OnceLock<[u8; 16]> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let said = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = said.chars().filter(char::is_ascii_hexdigit).collect();
        let number = u128::from_str_radix(&digits, 16).unwrap_or(0);
        number.to_be_bytes()
    })
}

impl Image {
    /// Opens an image with its overlay.
    ///
    /// # Errors
    /// No such image, or a damaged overlay or lease.
    pub fn open(name: &ImageName, images: &Arc<dyn Images>, state: &Path) -> Result<Self, Refusal> {
        let base = images.open(name)?;
        let directory = changes::directory(state, name);
        let leases = LeaseTable::open(name.clone(), directory.clone())?;
        let size = base.device.size();
        let through = base.through.as_ref();
        let through = through.map(|how| Through::open(how, size)).transpose()?;
        let image = Self {
            through,
            staged_by: Mutex::new(leases.last_edition()),
            leases: Mutex::new(leases),
            name: name.clone(),
            images: Arc::clone(images),
            base,
            directory,
            overlay: OnceLock::new(),
            settler: Settler::default(),
            points: Points::default(),
        };
        // Any past holder of the writer's lease may have written.
        if image.through.is_some() || !image.leases.lock().was_written() {
            return Ok(image);
        }
        image.finish_discarding()?;
        match image.open_overlay() {
            Ok(_) => Ok(image),
            // The image was replaced, or removed and its name reused.
            Err(OverlayError::AnotherBase { .. }) if image.leases.lock().holder().is_none() => {
                image.set_aside()?;
                Self::open(name, images, state)
            }
            Err(e) => Err(refuse(e)),
        }
    }

    /// Completes a discard that a crash interrupted, before anything new is written.
    fn finish_discarding(&self) -> Result<(), Refusal> {
        match HostDirectory::open(&self.directory) {
            Ok(directory) => finish_discarding(&directory, &mut self.leases.lock()),
            Err(e) => {
                let text = format!("cannot open {}: {e}", self.directory.display());
                Err(Refusal::new(Code::Io, text))
            }
        }
    }

    /// Moves the overlay of another image of this name out of the way, without destroying it.
    fn set_aside(&self) -> Result<(), Refusal> {
        let aside = changes::set_aside(&self.directory, &self.name).map_err(|e| {
            let text = format!("cannot move {}: {e}", self.directory.display());
            Refusal::new(Code::Io, text)
        })?;
        tracing::warn!(
            image = %self.name,
            "the changes of an earlier image of this name are kept in {}; `drover changes` lists them, and can drop them",
            aside.display()
        );
        Ok(())
    }

    /// The overlay, if there is one, below what records its changes.
    fn opened(&self) -> Option<&Overlay> {
        self.overlay.get().map(Recorded::inner)
    }

    /// Opens the image for writing, whose contents were `before` until its writer came, and are `now`.
    fn open_for_writing(&self, before: Identity, now: Identity) -> Result<(), Refusal> {
        let overlay = self.open_overlay().map_err(refuse)?;
        match overlay.generations() {
            Some(generations) => generations
                .begin(now.into())
                .map_err(|e| refusal_of(e.into())),
            None => {
                let directory = self.own_directory().map_err(refuse)?;
                let size = self.base.device.size();
                let opened = recording::open(directory, &self.name, size, before, now)?;
                opened.into_iter().for_each(|opened| overlay.record(opened));
                Ok(())
            }
        }
    }

    fn own_directory(&self) -> Result<Arc<dyn Directory>, OverlayError> {
        let opened = self.images.overlay(&self.directory);
        opened.map_err(|source| OverlayError::Io {
            doing: "make",
            file: self.directory.display().to_string(),
            source,
        })
    }

    fn open_overlay(&self) -> Result<&Recorded<Overlay>, OverlayError> {
        if let Some(overlay) = self.overlay.get() {
            return Ok(overlay);
        }
        let directory = self.own_directory()?;
        let identity = overlay::Identity {
            base: self.base.digest,
            size: self.base.device.size(),
            name: self.name.as_str().to_owned(),
        };
        let base = self.base.device.clone();
        let options = overlay::Options {
            boot: boot(),
            ..overlay::Options::default()
        };
        let opened = Overlay::open(directory, base, identity, options)?;
        Ok(self.overlay.get_or_init(|| Recorded::new(opened)))
    }

    /// Admits a mount. Returns the image's state, and whether that is the expected one. `granted` is called when it is
    /// admitted, before it can lose its lease.
    ///
    /// # Errors
    /// The lease table's refusal ([`Code::Held`], [`Code::Lost`], [`Code::Busy`]), or a disk error.
    pub fn enter(
        &self,
        who: &Who,
        access: Access,
        expected: Option<Identity>,
        now: Duration,
        connected: &dyn Fn(&(PeerKey, MountId)) -> bool,
        granted: &dyn Fn(),
    ) -> Result<(Identity, bool), Refusal> {
        let mut leases = self.leases_soon()?;
        let state = |edition| Identity {
            digest: self.base.digest,
            edition,
            epoch: self.committed(),
        };
        // Granting a lease changes only the edition.
        let (before, fresh_before) = leases.edition(who, expected, state(0));
        if access == Access::ReadWrite && !leases.is_held_by(who.peer.key, who.mount) {
            self.images.may_be_written(&self.name, who.mount)?;
        }
        let in_overlay = access == Access::ReadWrite && self.through.is_none();
        if in_overlay && self.generations().is_none() && self.directory.is_dir() {
            let directory = self.own_directory().map_err(refuse)?;
            recording::check(directory, &self.name, state(before))?;
        }
        leases.enter(who, access, now, connected)?;
        granted();
        let (edition, fresh) = leases.edition(who, expected, state(0));
        if in_overlay {
            let before = state(before);
            self.open_overlay().map_err(refuse)?;
            self.open_for_writing(before, state(edition))?;
        }
        Ok((state(edition), fresh || fresh_before))
    }

    /// Locks the leases, unless a long commit holds them beyond the timeout.
    fn leases_soon(&self) -> Result<MutexGuard<'_, LeaseTable>, Refusal> {
        self.leases.try_lock_for(LEASE_WAIT).ok_or_else(|| {
            let text = format!(
                "{} is busy: a commit is under way on a slow disk; try again",
                self.name
            );
            Refusal::new(Code::Unavailable, text)
        })
    }

    /// Grants the lease to the site itself, if no mount holds it or reads the image.
    ///
    /// # Errors
    /// [`Code::Held`]: another mount has the lease; or a disk error.
    pub fn claim(
        &self,
        who: &Who,
        now: Duration,
        connected: &dyn Fn(&(PeerKey, MountId)) -> bool,
    ) -> Result<(), Refusal> {
        self.leases_soon()?.claim(who, now, connected)?;
        // Epochs staged by a writer whose lease was broken.
        self.abandon()
    }

    /// Fails if a mount writes or reads the image.
    ///
    /// # Errors
    /// [`Code::Held`], naming that mount.
    pub fn check_free(&self, now: Duration) -> Result<(), Refusal> {
        self.leases_soon()?.check_free(now, &|_| false)
    }

    /// Whether a mount has the writer's lease.
    pub fn is_held_by(&self, peer: PeerKey, mount: MountId) -> bool {
        self.leases.lock().is_held_by(peer, mount)
    }

    /// Calls `what` while a mount holds the lease and cannot lose it; none if it does not hold it.
    pub fn while_held<T>(
        &self,
        peer: PeerKey,
        mount: MountId,
        what: impl FnOnce() -> T,
    ) -> Option<T> {
        let leases = self.leases.lock();
        leases.is_held_by(peer, mount).then(what)
    }

    /// Its generations, once it was opened for writing.
    pub fn generations(&self) -> Option<&Arc<Generations>> {
        self.overlay.get().and_then(Recorded::generations)
    }

    /// The parts of a range that mounts wrote, and whether they are zeros.
    pub fn changes_in(&self, range: std::ops::Range<u64>) -> Vec<(std::ops::Range<u64>, bool)> {
        let overlay = self.opened();
        overlay.map_or_else(Vec::new, |overlay| overlay.changes_in(range))
    }

    /// Whether no mount uses it or is expected to reconnect, so that it can be closed; false while its leases are
    /// locked.
    pub fn is_idle(&self, now: Duration) -> bool {
        self.leases
            .try_lock()
            .is_some_and(|mut leases| leases.is_idle(now))
    }

    /// A mount's last connection has ended.
    pub fn left(&self, peer: PeerKey, mount: MountId, now: Duration) {
        self.leases.lock().left(peer, mount, now);
    }

    /// A mount returns its lease. What it staged but did not commit is dropped.
    ///
    /// # Errors
    /// A disk error.
    pub fn close(&self, peer: PeerKey, mount: MountId, link: u64) -> Result<(), Refusal> {
        let mut leases = self.leases.lock();
        if leases.is_held_by(peer, mount)
            && let Err(refusal) = self.abandon()
        {
            // It is dropped all the same; only its file remains until the overlay is opened again.
            tracing::warn!(%refusal, image = %self.name, "cannot remove the staged epoch");
        }
        leases.close(peer, mount, link)
    }

    /// Checks that a mount may still write: its connections may outlive its lease.
    ///
    /// # Errors
    /// [`Code::Lost`].
    pub fn check_lease(&self, peer: PeerKey, mount: MountId) -> Result<(), Refusal> {
        self.lease_of(&self.leases.lock(), peer, mount)
    }

    fn lease_of(&self, leases: &LeaseTable, peer: PeerKey, mount: MountId) -> Result<(), Refusal> {
        if leases.is_held_by(peer, mount) {
            return Ok(());
        }
        let text = format!(
            "this mount no longer has the lease of {}",
            self.name.as_str()
        );
        Err(Refusal::new(Code::Lost, text))
    }

    /// Rewrites the lease's file after it was damaged.
    ///
    /// # Errors
    /// A long commit, or a disk error.
    pub fn store_lease(&self) -> Result<(), Refusal> {
        self.leases_soon()?.store_again()
    }

    /// Breaks the writer's lease if `how` says how its holder loses it.
    ///
    /// # Errors
    /// A long commit, or a disk error.
    pub fn break_lease(
        &self,
        how: &dyn Fn(&Holder) -> Option<Loss>,
    ) -> Result<Option<(Holder, Loss)>, Refusal> {
        self.leases_soon()?.break_lease(how)
    }

    /// Tells the site what has happened to it.
    pub fn happened(&self, what: &Happened) {
        self.images.happened(&self.name, what);
    }

    /// Its name.
    pub fn name(&self) -> &ImageName {
        &self.name
    }

    /// The digest of the image without its overlay.
    pub fn digest(&self) -> Digest {
        self.base.digest
    }

    /// The device that mounts read.
    pub fn device(&self) -> &dyn BlockDevice {
        match self.overlay.get() {
            Some(device) => device,
            None => self.base.device.as_ref(),
        }
    }

    /// Waits for what a unit reads of an image that is still arriving; `None` when that is here.
    pub fn arrival(&self, unit: &Unit, chunk: u32) -> Option<Arrival> {
        let arriving = self.base.arriving.as_deref()?;
        let size = self.base.device.size();
        arrival(arriving, size, unit.reads(chunk), |range| {
            self.changes_in(range)
        })
    }

    /// The threads for its requests; none for those of all images.
    pub fn pool(&self) -> Option<&Arc<Pool>> {
        self.through.as_ref().map(Through::pool)
    }

    /// The last committed epoch.
    pub fn committed(&self) -> u64 {
        if let Some(through) = &self.through {
            return through.committed();
        }
        self.opened().map_or(0, |device| device.committed().0)
    }

    /// Asks for the space that a peer's change takes, which is to be kept until the change is made.
    ///
    /// # Errors
    /// [`Code::NoSpace`].
    pub fn room(
        &self,
        peer: &PeerKey,
        takes: impl FnOnce(&Overlay) -> u64,
    ) -> Result<Option<Room>, Refusal> {
        let bytes = self.opened().map_or(0, takes);
        let room = (bytes > 0).then(|| self.images.room(peer, bytes));
        room.transpose()
    }

    /// Stages part of a peer's next epoch.
    ///
    /// # Errors
    /// Another epoch than the next, no space, or a disk error.
    pub fn stage(&self, peer: &PeerKey, epoch: u64, changes: &[Change]) -> Result<(), Refusal> {
        if let Some(through) = &self.through {
            self.follows(epoch)?;
            return through.stage(epoch, changes);
        }
        let overlay = self.next(epoch)?;
        let _room = self.room(peer, |_| Overlay::space_to_stage(changes))?;
        overlay.stage(Epoch(epoch), changes).map_err(refuse)
    }

    /// Commits the next epoch of a mount if it covers this many bytes; to be followed by [`Image::settle_aside`]. An
    /// epoch that is committed already is not an error: its reply may have been lost.
    ///
    /// # Errors
    /// The mount's lease has ended, it is another epoch than the next or incomplete, there is no space for the copy, or a
    /// disk error.
    pub fn commit(
        &self,
        epoch: u64,
        covers: u64,
        peer: PeerKey,
        mount: MountId,
    ) -> Result<(), Refusal> {
        self.check_lease(peer, mount)?;
        if epoch > self.committed()
            && let Some(overlay) = self.opened()
        {
            // The previous epoch must be copied first, which may take long: so not while holding the leases, for which
            // others wait. The seal reports any error again.
            let _ = overlay.settle();
        }
        // Held during the commit: no late commit follows the epoch reported to the next holder of the lease.
        let leases = self.leases.lock();
        self.lease_of(&leases, peer, mount)?;
        if epoch == self.committed() && epoch > 0 {
            return Ok(());
        }
        if let Some(through) = &self.through {
            self.follows(epoch)?;
            return through.commit(epoch, covers);
        }
        let overlay = self.next(epoch)?;
        let _room = self.room(&peer, |overlay| overlay.space_to_commit(Epoch(epoch)))?;
        let generations = self.generations();
        let sealed = overlay.seal_after(Epoch(epoch), covers, |runs| {
            let writing = generations.map(|generations| generations.before_writes(runs));
            Ok(writing.transpose()?)
        });
        sealed.map_err(|error| match error {
            OverlayError::NotWhole { .. } | OverlayError::NothingStaged(_) => {
                Refusal::new(Code::OutOfOrder, error.to_string())
            }
            other => refuse(other),
        })?;
        self.settler.wanted();
        Ok(())
    }

    /// Copies the last committed epoch into place; its reply need not wait for that. A failure is retried before the
    /// next change.
    pub fn settle(&self) {
        if let Some(Err(error)) = self.opened().map(Overlay::settle) {
            tracing::warn!(%error, image = %self.name, "a committed epoch is not copied into the overlay yet; it will be retried");
        }
    }

    /// Starts a link of the writer, when no earlier one can do anything any more: what the writer itself staged is
    /// kept, what another staged is dropped.
    ///
    /// # Errors
    /// A disk error.
    pub fn begin_link(&self) -> Result<(), Refusal> {
        let leases = self.leases.lock();
        let mut staged_by = self.staged_by.lock();
        if *staged_by != leases.last_edition() {
            self.abandon()?;
            *staged_by = leases.last_edition();
        }
        Ok(())
    }

    /// The staged epoch (0: none), what is staged of `epoch` from a byte on, and up to which byte that is complete.
    pub fn staged(&self, epoch: u64, from: u64) -> (u64, Vec<(u64, u64)>, u64) {
        if let Some(through) = &self.through {
            return through.staged(epoch, from, MAX_RUNS);
        }
        let Some(device) = self.opened() else {
            return (0, Vec::new(), self.base.device.size());
        };
        let now = device.staged_epoch().unwrap_or_default();
        let (runs, end) = device.staged_runs(Epoch(epoch), from, MAX_RUNS);
        (now.0, runs, end)
    }

    /// Drops the staged epoch.
    ///
    /// # Errors
    /// A disk error.
    pub fn abandon(&self) -> Result<(), Refusal> {
        match (&self.through, self.opened()) {
            (Some(through), _) => through.abandon(),
            (None, Some(device)) => device.abandon().map_err(refuse),
            (None, None) => Ok(()),
        }
    }

    /// Drops what a writer with a broken lease staged, unless another has taken the lease since: the next writer's
    /// epoch, if already begun, could then be committed without its first parts.
    ///
    /// # Errors
    /// A long commit, or a disk error.
    pub fn abandon_unheld(&self) -> Result<(), Refusal> {
        let leases = self.leases_soon()?;
        match leases.holder() {
            None => self.abandon(),
            Some(_) => Ok(()),
        }
    }

    fn next(&self, epoch: u64) -> Result<&Overlay, Refusal> {
        let read_only = || refusal_of(DeviceError::ReadOnly);
        let device = self.opened().ok_or_else(read_only)?;
        self.follows(epoch)?;
        Ok(device)
    }

    fn follows(&self, epoch: u64) -> Result<(), Refusal> {
        let committed = self.committed();
        if epoch <= committed {
            let text = format!("epoch {epoch} cannot follow epoch {committed}");
            return Err(Refusal::new(Code::OutOfOrder, text));
        }
        Ok(())
    }

    /// Copies the committed epoch into place on a thread of its own: the reply is being sent already, and a thread of
    /// the pool would be blocked for the mount's next epoch. At most one such thread per image.
    pub fn settle_aside(self: &Arc<Self>) {
        if !self.settler.begin() {
            return;
        }
        let image = Arc::clone(self);
        let settle = move || {
            let runs = RunningGuard(&image.settler);
            while runs.0.next() {
                image.settle();
            }
        };
        let thread = std::thread::Builder::new().name("mount-settle".into());
        if let Err(error) = thread.spawn(settle) {
            // It is retried before the next commit.
            tracing::warn!(%error, image = %self.name(), "a committed epoch is not copied into the overlay yet; it will be retried");
            self.settler.ended();
        }
    }

    /// Waits until no thread is copying a committed epoch; returns at once if another caller is waiting already. Cancel
    /// safe.
    pub async fn settled(&self) {
        self.settler.wait().await;
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let Some((overlay, Some(generations))) = self.overlay.take().map(Recorded::into_parts)
        else {
            return;
        };
        // The next process that opens the image finds it as it is recorded here.
        let flushed = overlay.flush();
        let now = Identity {
            digest: self.base.digest,
            edition: self.leases.get_mut().last_edition(),
            epoch: overlay.committed().0,
        };
        drop(overlay);
        let closed = flushed.and_then(|()| Ok(generations.close(now.into())?));
        if let Err(error) = closed {
            tracing::warn!(%error, image = %self.name, "the generations of an image were not closed cleanly");
        }
    }
}

#[cfg(test)]
mod crash_tests;

#[cfg(test)]
mod tests;
