//! Overlays of mounts over images: listed, dropped, and claimed in order to become part of the image.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use drover_core::{Digest, Extent, ImageName, ReadAt};
use drover_device::backend::overlay;
use drover_net::{Code, Peer, PeerKey, Refusal};
use drover_storage::{Directory, HostDirectory};
use drover_store::lease::{Holder, LeaseTable, MountId, Who};

use super::Server;
use super::image::Image;
use super::overlays::discard;
use crate::MountError;

/// How long refused mounts may take to release an image.
const LET_GO: Duration = Duration::from_secs(10);

/// The longest read of a device when new content is built from it.
const LONGEST: usize = 1 << 20;

/// The overlay of an image: what mounts wrote.
#[derive(Clone, Debug)]
pub struct Changes {
    /// The image.
    pub image: String,
    /// The overlay's directory.
    pub directory: PathBuf,
    /// It belongs to an earlier image of that name, and was set aside.
    pub earlier: bool,
    /// The digest of its base image, if that can be read.
    pub base: Option<Digest>,
    /// Bytes of the disk that differ from the image.
    pub changed: u64,
    /// Disk space used, in bytes.
    pub room: u64,
    /// Time of the last write, in seconds since 1970.
    pub written_unix: Option<i64>,
    /// The last writer.
    pub writer: Option<Holder>,
    /// The current holder of the writer's lease.
    pub holder: Option<Holder>,
    /// Why it cannot be read completely.
    pub problem: Option<String>,
}

/// The overlays of all images in a site's state (see [`super::Config::state`]), by name. Blocks on the disk.
///
/// # Errors
/// [`MountError::StateFile`] when the directory cannot be read. A damaged overlay is listed with its problem.
pub fn changes_on_disk(state: &Path) -> Result<Vec<Changes>, MountError> {
    let overlays = state.join("overlays");
    let entries = match std::fs::read_dir(&overlays) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        result => result.map_err(|e| MountError::state(&overlays, e.to_string()))?,
    };
    let mut out = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| MountError::state(&overlays, e.to_string()))?;
        let name = entry.file_name().into_string().unwrap_or_default();
        let (image, earlier) = match earlier_name(&name) {
            Some(image) => (image, true),
            None => (name.as_str(), false),
        };
        if let Ok(image) = ImageName::new(image) {
            out.push(look(&image, entry.path(), earlier));
        }
    }
    out.retain(|c| c.changed > 0 || c.problem.is_some());
    out.sort_by(|a, b| {
        (&a.image, a.earlier, &a.directory).cmp(&(&b.image, b.earlier, &b.directory))
    });
    Ok(out)
}

/// The overlay of one image; none if there is none. Blocks on the disk.
#[must_use]
pub fn changes_of(state: &Path, name: &ImageName) -> Option<Changes> {
    let directory = state.join("overlays").join(name.as_str());
    let found = directory.is_dir().then(|| look(name, directory, false))?;
    (found.changed > 0 || found.problem.is_some()).then_some(found)
}

/// The image whose overlay was set aside under this name.
fn earlier_name(name: &str) -> Option<&str> {
    let (image, when) = name.strip_prefix('.')?.rsplit_once('-')?;
    let number = !when.is_empty() && when.bytes().all(|b| b.is_ascii_digit());
    number.then_some(image)
}

fn look(image: &ImageName, directory: PathBuf, earlier: bool) -> Changes {
    let mut found = Changes {
        image: image.as_str().to_owned(),
        earlier,
        base: None,
        changed: 0,
        room: room(&directory),
        written_unix: written(&directory),
        writer: None,
        holder: None,
        problem: None,
        directory,
    };
    match summary(&found.directory) {
        Ok(Some(summary)) => {
            found.base = Some(summary.identity.base);
            found.changed = summary.changed;
        }
        Ok(None) => {}
        Err(e) => found.problem = Some(e),
    }
    match LeaseTable::open(image.clone(), found.directory.clone()) {
        Ok(leases) => {
            found.writer = leases.last_writer().cloned();
            found.holder = leases.holder().cloned();
        }
        Err(e) => found.problem = Some(e.message),
    }
    found
}

fn summary(directory: &Path) -> Result<Option<overlay::Summary>, String> {
    let open = HostDirectory::open(directory)
        .map_err(|e| format!("cannot open {}: {e}", directory.display()))?;
    let open: Arc<dyn Directory> = Arc::new(open);
    overlay::summary(&open).map_err(|e| e.to_string())
}

/// Disk space used by the files of a directory, in bytes.
fn room(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir(directory) else {
        return 0;
    };
    let files = entries.flatten().filter_map(|entry| entry.metadata().ok());
    files
        .filter(|m| m.is_file())
        .map(|m| m.blocks() * 512)
        .sum()
}

/// Time of the last write to the data.
fn written(directory: &Path) -> Option<i64> {
    let when = std::fs::metadata(directory.join("data"))
        .ok()?
        .modified()
        .ok()?;
    let since = when.duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}

impl Server {
    /// Drops the overlay of an image, reverting it to its original contents. Returns the bytes of the disk affected;
    /// none if there was no overlay. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: the image is mounted or leased; or a disk error.
    pub fn drop_changes(&self, name: &ImageName) -> Result<Option<u64>, MountError> {
        // Prevents it from being opened meanwhile.
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        self.let_go(name)?;
        let path = self.overlay_of(name);
        if !path.is_dir() {
            return Ok(None);
        }
        let mut leases =
            LeaseTable::open(name.clone(), path.clone()).map_err(MountError::Refused)?;
        leases
            .check_free(Duration::ZERO, &|_| false)
            .map_err(MountError::Refused)?;
        let changed = changes_of(&self.config.state, name).map(|c| c.changed);
        self.discard(name, &mut leases)?;
        Ok(changed)
    }

    /// Removes the overlays of earlier images of a name, which were set aside when those were replaced. Returns how
    /// many there were. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::StateFile`] when one cannot be removed.
    pub fn drop_earlier(&self, name: &ImageName) -> Result<usize, MountError> {
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        let all = changes_on_disk(&self.config.state)?;
        let earlier = all.iter().filter(|c| c.earlier && c.image == name.as_str());
        let mut removed = 0;
        for changes in earlier {
            std::fs::remove_dir_all(&changes.directory)
                .map_err(|e| MountError::state(&changes.directory, e.to_string()))?;
            removed += 1;
        }
        Ok(removed)
    }

    fn overlay_of(&self, name: &ImageName) -> PathBuf {
        self.config.state.join("overlays").join(name.as_str())
    }

    /// Discards an overlay that is not open.
    fn discard(&self, name: &ImageName, leases: &mut LeaseTable) -> Result<(), MountError> {
        discard(&self.overlay_of(name), leases).map_err(MountError::Refused)
    }

    /// Closes an image that is open but unused, or reports who uses it. The caller holds its [`Self::image_lock`].
    fn let_go(&self, name: &ImageName) -> Result<(), MountError> {
        let mut since = None;
        loop {
            let image = {
                let state = self.state.lock();
                let here = state.mounts.values().filter(|m| m.image.name() == name);
                let mut connected: Vec<_> = here.map(|m| m.peer_name.clone()).collect();
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
                let text = format!("{name} is being mounted just now; try again");
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
        let image = self.open_image(name).map_err(MountError::Refused)?;
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
        };
        let image = {
            let image_lock = self.image_lock(name);
            let _opening = image_lock.lock();
            let stale = {
                let state = self.state.lock();
                state.open.get(name).map(|image| image.digest())
            };
            if let Some(digest) = stale
                && digest
                    != self
                        .config
                        .images
                        .digest(name)
                        .map_err(MountError::Refused)?
            {
                self.let_go(name)?;
            }
            let image = self.open_image_now(name).map_err(MountError::Refused)?;
            let connected = |key: &(PeerKey, MountId)| self.state.lock().mounts.contains_key(key);
            image
                .claim(&who, self.started.elapsed(), &connected)
                .map_err(MountError::Refused)?;
            image
        };
        Ok(Claim {
            server: Arc::clone(self),
            view: View { image },
            key: (who.peer.key, who.mount),
            held: true,
        })
    }

    /// Ends a recorded claim: with `discard` the overlay is dropped, as it is part of the image now. Returns false, and
    /// does nothing, if that claim no longer holds. Blocks on the disk.
    ///
    /// # Errors
    /// [`MountError::Refused`]: a disk error, or the image is still in use; the claim continues then.
    pub fn end_claim(
        &self,
        name: &ImageName,
        key: (PeerKey, MountId),
        discard: bool,
    ) -> Result<bool, MountError> {
        let image_lock = self.image_lock(name);
        let _opening = image_lock.lock();
        let open = self.state.lock().open.get(name).cloned();
        if let (Some(image), false) = (&open, discard) {
            let ours = image.is_held_by(key.0, key.1);
            image.close(key.0, key.1, 0).map_err(MountError::Refused)?;
            return Ok(ours);
        }
        drop(open);
        let path = self.overlay_of(name);
        let mut leases = LeaseTable::open(name.clone(), path).map_err(MountError::Refused)?;
        if !leases.is_held_by(key.0, key.1) {
            return Ok(false);
        }
        if discard {
            self.close_claimed(name)?;
            self.discard(name, &mut leases)?;
        }
        leases.close(key.0, key.1, 0).map_err(MountError::Refused)?;
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
        let leases =
            LeaseTable::open(name.clone(), self.overlay_of(name)).map_err(MountError::Refused)?;
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

    /// Ends the claim permanently: with `discard` the overlay is dropped, as it is part of the image now. Views of it
    /// must have been dropped.
    ///
    /// # Errors
    /// As [`Server::end_claim`]'s: the claim remains recorded then.
    pub fn end(self, discard: bool) -> Result<bool, MountError> {
        let (server, name, key) = (
            Arc::clone(&self.server),
            self.view.image.name().clone(),
            self.key,
        );
        let mut this = self;
        this.held = false;
        drop(this);
        server.end_claim(&name, key, discard)
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
