//! Overlays of mounts over images: dropped, and claimed in order to become part of the image.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{Digest, Extent, ImageName, ReadAt};
use drover_net::{Code, Peer, PeerKey, Refusal};
use drover_store::changes::{self, Changes};
use drover_store::lease::{LeaseTable, MountId, Who};

use super::Server;
use super::image::Image;
use super::overlays::discard;
use crate::MountError;

/// How long refused mounts may take to release an image.
const LET_GO: Duration = Duration::from_secs(10);

/// The longest read of a device when new content is built from it.
const LONGEST: usize = 1 << 20;

impl Server {
    /// Drops the changes to an image, reverting it to its original contents. Returns what was dropped. Blocks on the
    /// disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: the image is mounted or leased; or a disk error.
    pub fn drop_changes(&self, name: &ImageName) -> Result<Option<Changes>, MountError> {
        self.while_unused(name, |leases| {
            let Some(leases) = leases else {
                return Ok(None);
            };
            let dropped = changes::of_image(&self.config.state, name);
            self.discard(name, leases)?;
            Ok(dropped)
        })?
    }

    /// Calls `what` while no mount can open an image, with its leases if it was ever mounted. Blocks on the disk.
    fn while_unused<T>(
        &self,
        name: &ImageName,
        what: impl FnOnce(Option<&mut LeaseTable>) -> T,
    ) -> Result<T, MountError> {
        // Prevents it from being opened meanwhile.
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        self.let_go(name)?;
        let path = self.overlay_of(name);
        if !path.is_dir() {
            return Ok(what(None));
        }
        let mut leases = LeaseTable::open(name.clone(), path)?;
        leases.check_free(Duration::ZERO, &|_| false)?;
        Ok(what(Some(&mut leases)))
    }

    /// Calls `what` while no mount can open an image that has no changes either. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: the image is mounted or leased, or has changes; or a disk error.
    pub fn while_unchanged<T>(
        &self,
        name: &ImageName,
        what: impl FnOnce() -> T,
    ) -> Result<T, MountError> {
        let done = self.while_unused(name, |_| {
            let changes = changes::of_image(&self.config.state, name);
            changes.is_none().then(what)
        })?;
        done.ok_or_else(|| {
            let text = format!("{name} has changes by mounts: merge or drop them first");
            MountError::Refused(Refusal::new(Code::Held, text))
        })
    }

    fn overlay_of(&self, name: &ImageName) -> PathBuf {
        changes::directory(&self.config.state, name)
    }

    /// Discards an overlay that is not open.
    fn discard(&self, name: &ImageName, leases: &mut LeaseTable) -> Result<(), MountError> {
        Ok(discard(&self.overlay_of(name), leases)?)
    }

    /// Removes changes to earlier images of this name.
    ///
    /// # Errors
    /// A disk error.
    pub fn drop_earlier(&self, name: &ImageName) -> Result<Vec<Changes>, MountError> {
        // None are set aside meanwhile.
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        Ok(changes::remove_earlier(&self.config.state, name)?)
    }

    /// Closes an image that is open but unused, or reports who uses it. The caller holds its [`Self::image_lock`].
    pub(super) fn let_go(&self, name: &ImageName) -> Result<(), MountError> {
        let mut since = None;
        loop {
            let image = {
                let state = self.state.lock();
                let here = state.mounts.values().filter(|m| m.image.name() == name);
                let mut connected: Vec<_> = here.map(|m| m.peer.name.clone()).collect();
                if !connected.is_empty() {
                    connected.dedup();
                    let who = connected.join(", ");
                    let text = format!("{name} is mounted by {who}; unmount it there");
                    return Err(MountError::Refused(Refusal::new(Code::Held, text)));
                }
                state.open.get(name).cloned()
            };
            let Some(image) = image else {
                return Ok(());
            };
            image.check_free(self.started.elapsed())?;
            let since = *since.get_or_insert_with(|| {
                // A thread that copies the last writer's commit may hold it for the duration of the copy.
                image.settle();
                Instant::now()
            });
            let closed = {
                let mut state = self.state.lock();
                // This reference and the server's: references are cloned under this lock only.
                let ours = Arc::strong_count(&image) == 2;
                ours.then(|| state.open.remove(name)).flatten()
            };
            if closed.is_some() {
                return Ok(());
            }
            drop(image);
            if since.elapsed() > LET_GO {
                let text = format!("{name} is being mounted; try again");
                return Err(MountError::Refused(Refusal::new(Code::Held, text)));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A view of an image as mounts see it; does not lock mounts out. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: it cannot be opened.
    pub fn view(&self, name: &ImageName) -> Result<View, MountError> {
        let image = self.open_image(name)?;
        Ok(View { image })
    }

    /// Locks mounts out of an image until the claim ends. It survives this process: [`Server::end_claim`] ends one left
    /// by a crash. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: it is mounted or leased, or cannot be opened.
    pub fn claim(
        self: &Arc<Self>,
        name: &ImageName,
        peer: Peer,
        mount: MountId,
        note: &str,
    ) -> Result<Claim, MountError> {
        let who = Who {
            peer,
            mount,
            link: 0,
            note: note.to_owned(),
            term: None,
        };
        let image = {
            let image_lock = self.image_lock(name);
            let _opening = image_lock.lock();
            let stale = {
                let state = self.state.lock();
                state.open.get(name).map(|image| image.digest())
            };
            if let Some(digest) = stale
                && digest != self.config.images.digest(name)?
            {
                self.let_go(name)?;
            }
            let image = self.open_image_now(name)?;
            let connected = |key: &(PeerKey, MountId)| self.state.lock().mounts.contains_key(key);
            image.claim(&who, self.started.elapsed(), &connected)?;
            image
        };
        Ok(Claim {
            server: Arc::clone(self),
            view: View { image },
            key: (who.peer.key, who.mount),
            held: true,
        })
    }

    /// Ends a recorded claim. Returns false, and does nothing, if that claim no longer holds. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: a disk error, or the image is still in use; the claim continues then.
    pub fn end_claim(
        &self,
        name: &ImageName,
        key: (PeerKey, MountId),
        how: ClaimEnd,
    ) -> Result<bool, MountError> {
        let discard = how != ClaimEnd::Kept;
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        let open = self.state.lock().open.get(name).cloned();
        if let (Some(image), false) = (&open, discard) {
            let ours = image.is_held_by(key.0, key.1);
            image.close(key.0, key.1, 0)?;
            return Ok(ours);
        }
        drop(open);
        let path = self.overlay_of(name);
        let mut leases = LeaseTable::open(name.clone(), path)?;
        if !leases.is_held_by(key.0, key.1) {
            return Ok(false);
        }
        if discard {
            self.close_claimed(name)?;
            let before = self.contents_before(name, &leases);
            self.discard(name, &mut leases)?;
            if let (ClaimEnd::Merged(digest), Some(before)) = (how, before) {
                self.keep_generations(name, before, digest);
            }
        }
        leases.close(key.0, key.1, 0)?;
        Ok(true)
    }

    /// Calls `what` while the claim holds and cannot be broken; `None` if it no longer holds. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: the lease cannot be read.
    pub fn while_claimed<T>(
        &self,
        name: &ImageName,
        key: (PeerKey, MountId),
        what: impl FnOnce() -> T,
    ) -> Result<Option<T>, MountError> {
        // Prevents it from being opened and the lease from being broken meanwhile.
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        let open = self.state.lock().open.get(name).cloned();
        if let Some(image) = open {
            return Ok(image.while_held(key.0, key.1, what));
        }
        let leases = LeaseTable::open(name.clone(), self.overlay_of(name))?;
        Ok(leases.is_held_by(key.0, key.1).then(what))
    }

    /// Closes a claimed image: mounts that still use it are being refused.
    fn close_claimed(&self, name: &ImageName) -> Result<(), MountError> {
        let open = self.state.lock().open.get(name).cloned();
        if let Some(image) = open {
            // A thread that copies the last writer's commit may hold it.
            image.settle();
        }
        let since = Instant::now();
        loop {
            let closed = {
                let mut state = self.state.lock();
                match state.open.get(name).map(Arc::strong_count) {
                    None => return Ok(()),
                    Some(1) => state.open.remove(name),
                    Some(_) => None,
                }
            };
            if closed.is_some() {
                return Ok(());
            }
            if since.elapsed() > LET_GO {
                let text = format!("{name} is still being read; try again");
                return Err(MountError::Refused(Refusal::new(Code::Unavailable, text)));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A readable view of an image with its overlay.
#[derive(Clone)]
pub struct View {
    image: Arc<Image>,
}

impl View {
    /// The digest of the image without its overlay.
    #[must_use]
    pub fn base(&self) -> Digest {
        self.image.digest()
    }

    /// The parts of a range that differ from the image, in order: bytes, and whether they are zeros.
    #[must_use]
    pub fn changes_in(&self, range: Range<u64>) -> Vec<(Range<u64>, bool)> {
        self.image.changes_in(range)
    }

    /// The extents from `offset` on: as [`drover_core::BlockDevice::extents`].
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn extents(&self, offset: u64, length: u64) -> std::io::Result<Vec<Extent>> {
        let found = self.image.device().extents(offset, length);
        found.map_err(std::io::Error::other)
    }
}

impl ReadAt for View {
    fn len(&self) -> u64 {
        self.image.device().size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let left = self.len().saturating_sub(offset);
        let n = usize::try_from(left)
            .unwrap_or(usize::MAX)
            .min(buffer.len())
            .min(LONGEST);
        let read = self.image.device().read(offset, &mut buffer[..n]);
        read.map_err(std::io::Error::other)?;
        Ok(n)
    }
}

/// What becomes of the changes to an image when a claim ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimEnd {
    /// They are kept.
    Kept,
    /// They are dropped: the image is what it was without them.
    Dropped,
    /// They are dropped, since they are part of the image, which has this digest now.
    Merged(Digest),
}

/// Locks mounts out of an image until dropped.
pub struct Claim {
    server: Arc<Server>,
    view: View,
    key: (PeerKey, MountId),
    held: bool,
}

impl Claim {
    /// The image.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Calls `what` while the claim cannot be broken; `None` if it has been.
    pub fn while_held<T>(&self, what: impl FnOnce() -> T) -> Option<T> {
        self.view.image.while_held(self.key.0, self.key.1, what)
    }

    /// Ends the claim permanently. Unless its changes are kept, views of it must have been dropped.
    ///
    /// # Errors
    /// As [`Server::end_claim`]'s: the claim remains recorded then.
    pub fn end(self, how: ClaimEnd) -> Result<bool, MountError> {
        let (server, name, key) = (
            Arc::clone(&self.server),
            self.view.image.name().clone(),
            self.key,
        );
        let mut this = self;
        this.held = false;
        drop(this);
        server.end_claim(&name, key, how)
    }

    /// Leaves the claim in place, to be ended by [`Server::end_claim`], possibly in a later process.
    pub fn leave(mut self) {
        self.held = false;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.held {
            return;
        }
        if let Err(refusal) = self.view.image.close(self.key.0, self.key.1, 0) {
            tracing::warn!(%refusal, image = %self.view.image.name(), "a claim could not be ended; `drover mounts break` ends it");
        }
    }
}
