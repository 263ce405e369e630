//! The receiving site: its images, matcher, sequence cache and incoming transfers. All sessions share one [`Site`].

mod adopt;
mod arrived;
mod candidates;
mod catch_up;
mod elsewhere;
mod flocks;
mod give_way;
mod known;
mod launching;
mod nodes;
mod old_copies;
mod open;
mod profiles;
mod queue;
mod records;
mod recover;
mod shared;
mod sources;
mod status;
mod supplies;
mod unfinished;
mod watch;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::{Digest, ImageName};
use drover_index::{ImageId, Sketch};
use drover_net::{Code, PeerKey, Refusal, Rights};
use drover_storage::Disk;
use drover_store::generations::Summary;
use drover_store::sequences::Sequences;
use drover_store::{Catalog, ImageRecord, Images, KnownFiles};
use parking_lot::{Mutex, RwLock};

use crate::TeleportError;
use crate::active::Active;
use crate::flock::hints::Elsewhere;
use crate::flock::live::Flocks;
use crate::launch::Launches;
use crate::matching::{Matching, RemoteTeleporter};
use crate::others::Shared;
use crate::partials::Partials;
use crate::protocol::Delivered;
use crate::session::SessionShared;
use crate::teleporter::{Event, ImageEvent};

pub use adopt::Origin;
pub(crate) use arrived::{Arrived, unix_now};
pub(crate) use elsewhere::{Found, RunOf, There};
pub(crate) use give_way::{Matched, Waiting};
pub use old_copies::{OldCopies, OldCopy};
pub use status::{SiteStatus, TransferStatus};
pub use supplies::{MAX_IDLE, MAX_LAYOUT_MEMORY, MAX_PEER_SESSIONS, Supplies};
pub use watch::{SendEvent, SendStep, Watcher};

/// How long closing a site waits for its threads: one may wait for a remote teleporter.
const THREADS_END: Duration = Duration::from_secs(20);

/// Directories and limits of a site.
#[derive(Clone)]
pub struct SiteConfig {
    /// Delivered images.
    pub images_dir: PathBuf,
    /// Partial files of transfers and the sequence cache's data. Must be on the same file system as `images_dir`, so
    /// that files can be renamed and extents shared (reflinked).
    pub work_dir: PathBuf,
    /// Hash files, caches and maps.
    pub state_dir: PathBuf,
    /// A teleporter on another machine; `None` runs one in this process.
    pub teleporter: Option<RemoteTeleporter>,
    /// Bytes of the file system to keep free.
    pub reserve_bytes: u64,
    /// What its sessions take from. Sites of one process should have the same.
    pub supplies: Supplies,
    /// Size limit of the sequence cache's data in bytes; at least one segment (1.3 MiB) is used.
    pub sequence_data_bytes: u64,
    /// Permissions of delivered images.
    pub image_mode: u32,
    /// The disk that holds `work_dir`.
    pub disk: Arc<dyn Disk>,
    /// What it shares with other nodes of the site, if it may have any.
    pub shared: Option<Shared>,
}

/// Counters since the site started.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    delivered: AtomicU64,
    matched_blocks: AtomicU64,
    sent_blocks: AtomicU64,
}

impl Totals {
    /// Counts a delivered image.
    pub(crate) fn delivered(&self, image: &Delivered) {
        self.delivered.fetch_add(1, Ordering::Relaxed);
        self.matched_blocks
            .fetch_add(image.matched_blocks, Ordering::Relaxed);
        self.sent_blocks
            .fetch_add(image.sent_blocks, Ordering::Relaxed);
    }
}

/// A site; see the module documentation.
pub struct Site {
    pub(crate) config: SiteConfig,
    pub(crate) catalog: Arc<dyn Catalog>,
    pub(crate) images: Images,
    pub(crate) partials: Arc<Partials>,
    pub(crate) launches: Arc<Launches>,
    pub(crate) sequences: Sequences,
    pub(crate) matching: Matching,
    /// Batches of transfers that wait to be matched; background work yields to them.
    pub(crate) matched: Arc<Matched>,
    pub(crate) active: Arc<Active>,
    pub(crate) sessions: Mutex<HashMap<[u8; 16], Arc<SessionShared>>>,
    pub(crate) flocks: Flocks,
    pub(crate) elsewhere: Elsewhere,
    pub(crate) session_opened: tokio::sync::Notify,
    pub(crate) totals: Totals,
    closing: AtomicBool,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    copier_wakes: crossbeam_channel::Sender<()>,
    catch_up_wakes: crossbeam_channel::Sender<()>,
    /// Whether the matcher may lack some images.
    behind: AtomicBool,
    /// Images whose digests are being sent to the matcher and that are not in the catalog yet, with sketches of their blocks
    /// once all were sent.
    indexing: Mutex<HashMap<ImageId, Sketch>>,
    /// What is noted of image files to choose similar ones.
    known: KnownFiles,
    candidates: queue::Queue,
    /// Whether an image was removed since sequence data was last trimmed.
    images_went: AtomicBool,
    /// Number of trims begun so far; locked during each step of a trim.
    trimmings: Mutex<u64>,
    /// Locked from when the space for a new transfer is checked until its log exists.
    pub(crate) admitting: Mutex<()>,
    /// Locked from when the record of an image is read until another takes its place.
    changing: Mutex<()>,
    rights: Option<Arc<RightsOf>>,
    holds: RwLock<Option<Arc<Holder>>>,
    launched: RwLock<Option<Arc<Holder>>>,
    quota: RwLock<Option<Arc<Quota>>>,
    watcher: Option<Arc<Watcher>>,
    old_copies: RwLock<Option<Arc<OldCopies>>>,
}

/// What a site asks and tells its owner from the start on, because opening it finishes deliveries that were interrupted or
/// failed at their last step.
#[derive(Clone)]
pub struct Callbacks {
    /// Called before an image is replaced or removed.
    pub holder: Arc<Holder>,
    /// Called before an image of a peer is accepted, and again before it gets its name.
    pub rights: Arc<RightsOf>,
    /// Told about the images that peers send.
    pub watcher: Arc<Watcher>,
}

/// Returns why an image must not change, for example `web is mounted by lyon`; `None` when it may be replaced or
/// removed.
pub type Holder = dyn Fn(&ImageName) -> Option<String> + Send + Sync;

/// Returns what a peer may do now; no rights if it is none.
pub type RightsOf = dyn Fn(&PeerKey) -> Result<Rights, Refusal> + Send + Sync;

/// Fails if a peer may not deliver so many more bytes as an image of that name.
pub type Quota = dyn Fn(&PeerKey, &ImageName, u64) -> Result<(), Refusal> + Send + Sync;

impl Site {
    /// The directory of a transfer.
    pub(crate) fn transfer_dir(&self, key: &str) -> PathBuf {
        self.config.work_dir.join("transfers").join(key)
    }

    /// Sends the teleporter an event about an image that has already taken effect. A failure only costs matches:
    /// every match with that image is looked up and verified before it is used.
    fn tell(&self, image: ImageId, what: ImageEvent) {
        if let Err(e) = self.matching.tell(Event::Image(image, what)) {
            tracing::warn!(image = image.0, ?what, error = %e, "cannot notify the teleporter");
            self.matcher_is_behind();
        }
    }

    pub(crate) fn wake_copier(&self) {
        let _ = self.copier_wakes.try_send(());
    }

    /// Whether the images' file system has `bytes` free beyond the reserve.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.free_bytes().is_none_or(|free| bytes <= free)
    }

    /// Free bytes beyond the reserve; `None` when the operating system does not report it.
    pub fn free_bytes(&self) -> Option<u64> {
        Some(
            self.available_bytes()?
                .saturating_sub(self.config.reserve_bytes),
        )
    }

    /// Free bytes including the reserve.
    fn available_bytes(&self) -> Option<u64> {
        let fs = rustix::fs::statvfs(&self.config.images_dir).ok()?;
        Some(fs.f_bavail.saturating_mul(fs.f_frsize))
    }

    /// Digests an image again and returns two digests: the catalog's, and that of the file as it is now. Blocks the
    /// thread.
    ///
    /// # Errors
    /// When there is no such image or its file cannot be read.
    pub fn verify(
        &self,
        name: &ImageName,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Digest, Digest), TeleportError> {
        let record = self.find(name)?;
        let found = crate::walk::digest_file(&record.path, progress)?;
        Ok((record.digest, found))
    }

    /// Installs `quota`, which is called before an image is accepted. Replaces the previous one.
    pub fn limit_by(&self, quota: Arc<Quota>) {
        *self.quota.write() = Some(quota);
    }

    /// Installs `copies`, which is called when a disk is offered with its generations. Replaces the previous one.
    pub fn reuse_old_copies(&self, copies: Arc<OldCopies>) {
        *self.old_copies.write() = Some(copies);
    }

    pub(crate) fn old_copy(&self, peer: &PeerKey, of: &Summary) -> Option<OldCopy> {
        // Clone it first: the callback may be slow.
        let copies = self.old_copies.read().clone();
        copies?(peer, of)
    }

    /// Fails if the peer may not deliver so many more bytes.
    pub(crate) fn check_quota(
        &self,
        peer: &PeerKey,
        name: &ImageName,
        bytes: u64,
    ) -> Result<(), TeleportError> {
        // Clone it first: the callback may be slow.
        let quota = self.quota.read().clone();
        let allowed = quota.map_or(Ok(()), |quota| quota(peer, name, bytes));
        allowed.map_err(|refusal| TeleportError::refused(refusal.code, refusal.message))
    }

    /// Tells the watcher. Blocks.
    pub(crate) fn watched(&self, event: &SendEvent) {
        if let Some(watcher) = &self.watcher {
            watcher(event);
        }
    }

    /// Installs `holder`, which is called before an image is replaced or removed. Replaces the previous one.
    pub fn hold_by(&self, holder: Arc<Holder>) {
        *self.holds.write() = Some(holder);
    }

    /// Why an image must not change; `None` when it may be replaced or removed.
    fn why_held(&self, name: &ImageName) -> Option<String> {
        // Clone it first: the callback may be slow, and the lock must not be held meanwhile.
        let holder = self.holds.read().clone();
        holder.and_then(|holder| holder(name))
    }

    /// Fails if the image, which the error calls `it`, is held and must not be changed.
    pub(crate) fn check_held(&self, name: &ImageName, it: &str) -> Result<(), TeleportError> {
        match self.why_held(name) {
            Some(why) => {
                let message = format!("{it} cannot be replaced or removed: {why}");
                Err(TeleportError::refused(Code::Denied, message))
            }
            None => Ok(()),
        }
    }

    fn find(&self, name: &ImageName) -> Result<ImageRecord, TeleportError> {
        let found = self.images.by_name(name);
        found.ok_or_else(|| {
            let message =
                format!("this site has no image called {name}; `drover images` lists them");
            TeleportError::refused(Code::NotFound, message)
        })
    }

    /// All images, sorted by name.
    #[must_use]
    pub fn list(&self) -> Vec<ImageRecord> {
        self.images.list()
    }

    /// Current activity of the site.
    #[must_use]
    pub fn status(&self) -> SiteStatus {
        let sessions = self.sessions.lock();
        SiteStatus {
            transfers: sessions.values().filter_map(|s| s.status()).collect(),
            images: self.images.list().len() as u64,
            sessions: sessions.len() as u64,
            delivered_images: self.totals.delivered.load(Ordering::Relaxed),
            matched_blocks: self.totals.matched_blocks.load(Ordering::Relaxed),
            sent_blocks: self.totals.sent_blocks.load(Ordering::Relaxed),
            pending_sequences: self.sequences.pending() as u64,
            catching_up: self.behind.load(Ordering::Relaxed),
            matcher: self
                .matching
                .stats()
                .map(|s| status::matcher_counts(&s))
                .unwrap_or_default(),
        }
    }

    /// Saves the state that makes the next start fast. Call it when no session is open.
    ///
    /// # Errors
    /// When a file cannot be written; delivered images are not at risk.
    pub fn close(&self) -> Result<(), TeleportError> {
        self.trim_sequences();
        self.closing.store(true, Ordering::Relaxed);
        self.join_threads();
        self.sequences.settle();
        if let Matching::Local(teleporter) = &self.matching {
            let mut teleporter = teleporter.lock();
            teleporter.persist()?;
        }
        Ok(())
    }

    /// Waits for the background threads to end, so that nobody uses the site's files.
    fn join_threads(&self) {
        self.wake_copier();
        let _ = self.catch_up_wakes.try_send(());
        let until = Instant::now() + THREADS_END;
        for thread in self.threads.lock().drain(..) {
            while !thread.is_finished() {
                if Instant::now() > until {
                    tracing::warn!("a background thread did not end within {THREADS_END:?}");
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
