//! A site: the images that are here, the matcher, the sequence cache, and the transfers on their
//! way in. Sessions share one [`Site`].

mod adopt;
mod catch_up;
mod give_way;
mod recover;
mod shared;
mod sources;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use drover_core::{Digest, ImageName};
use drover_image::{Conversion, Layout, Stamp, open_for_sending};
use drover_index::{ImageId, Matcher, MatcherConfig, MatcherStats};
use drover_net::Code;
use drover_storage::{Disk, HostDirectory};
use drover_store::naming::{self, Named};
use drover_store::sequences::{Sequences, segments_of};
use drover_store::{BlockMap, Catalog, ImageMap, ImageRecord, Images};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use crate::TeleportError;
use crate::log::RecordKind;
use crate::matching::{Matching, RemoteTeleporter};
use crate::partials::Partials;
use crate::session::SessionShared;
use crate::teleporter::{Event, ImageEvent, Teleporter};
use crate::transfer::{Active, Closing, Leftover};
pub(crate) use give_way::{Matched, Waiting};

/// Where a site keeps what, and its limits.
#[derive(Debug, Clone)]
pub struct SiteConfig {
    /// Delivered images.
    pub images_dir: PathBuf,
    /// Transfers and the sequence cache's data; on the file system of `images_dir`, so that
    /// files can be renamed and extents shared.
    pub work_dir: PathBuf,
    /// Hash files, caches and maps.
    pub state_dir: PathBuf,
    /// A teleporter on another machine, instead of the one inside.
    pub teleporter: Option<RemoteTeleporter>,
    /// Bytes of the file system that are to stay free.
    pub reserve_bytes: u64,
    /// Sessions at once.
    pub max_sessions: usize,
    /// Bytes that the sequence cache's data may take; less than a segment of 1.3 MiB counts as one.
    pub sequence_data_bytes: u64,
    /// The disk of `work_dir`.
    pub disk: Arc<dyn Disk>,
}

/// What a site is doing.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SiteStatus {
    /// Transfers on their way in.
    pub transfers: Vec<TransferStatus>,
    /// Images here.
    pub images: u64,
    /// Sessions open.
    pub sessions: u64,
    /// Images delivered since the site started.
    pub delivered_images: u64,
    /// Blocks reused since the site started.
    pub matched_blocks: u64,
    /// Blocks that came over the link since the site started.
    pub sent_blocks: u64,
    /// Sequences that wait to be copied.
    pub pending_sequences: u64,
    /// The matcher is being told what it lacks of what is here, or will be when it can be reached.
    pub catching_up: bool,
    /// The matcher's counts by name, when it is here.
    pub matcher: Vec<(String, u64)>,
}

/// One transfer.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TransferStatus {
    /// The image's name.
    pub name: String,
    /// Who sends it.
    pub peer: String,
    /// Blocks that are complete.
    pub done_blocks: u64,
    /// Blocks in all.
    pub total_blocks: u64,
}

/// Counts since the site started.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) delivered: AtomicU64,
    pub(crate) matched_blocks: AtomicU64,
    pub(crate) sent_blocks: AtomicU64,
}

/// A site. See the module.
pub struct Site {
    pub(crate) config: SiteConfig,
    pub(crate) catalog: Arc<dyn Catalog>,
    pub(crate) images: Images,
    pub(crate) partials: Arc<Partials>,
    pub(crate) sequences: Sequences,
    pub(crate) matching: Matching,
    /// What of the transfers waits for it.
    pub(crate) matched: Arc<Matched>,
    pub(crate) active: Arc<Active>,
    pub(crate) sessions: Mutex<HashMap<[u8; 16], Arc<SessionShared>>>,
    pub(crate) session_opened: tokio::sync::Notify,
    pub(crate) totals: Totals,
    closing: AtomicBool,
    copier: Mutex<Option<std::thread::JoinHandle<()>>>,
    copier_wakes: crossbeam_channel::Sender<()>,
    catch_up_wakes: crossbeam_channel::Sender<()>,
    /// The matcher lacks something, as far as is known.
    behind: AtomicBool,
    /// Images that the matcher is told of before they are entered.
    indexing: Mutex<HashSet<ImageId>>,
    /// An image went since sequence data was last brought down to what the others are worth.
    images_went: AtomicBool,
    /// How many trimmings have begun; held for each step of one.
    trimmings: Mutex<u64>,
    holds: RwLock<Option<Arc<Holder>>>,
}

/// Says of an image who needs it as it is, as in `web is mounted by lyon`; none when nobody does.
pub type Holder = dyn Fn(&ImageName) -> Option<String> + Send + Sync;

impl Site {
    /// Opens a site of whose images nobody needs one as it is. What had to be repaired is said, a line each.
    ///
    /// # Errors
    /// When a directory, the catalog or the matcher's files cannot be used.
    pub fn open(
        config: SiteConfig,
        catalog: Arc<dyn Catalog>,
    ) -> Result<(Arc<Self>, Vec<String>), TeleportError> {
        Self::open_with(config, catalog, None)
    }

    /// The same, but `holder` is asked before an image is replaced or removed, from the start: a delivery that was cut
    /// off, or failed at its last step, is finished when the site opens.
    ///
    /// # Errors
    /// As [`Site::open`].
    pub fn open_held_by(
        config: SiteConfig,
        catalog: Arc<dyn Catalog>,
        holder: Arc<Holder>,
    ) -> Result<(Arc<Self>, Vec<String>), TeleportError> {
        Self::open_with(config, catalog, Some(holder))
    }

    fn open_with(
        config: SiteConfig,
        catalog: Arc<dyn Catalog>,
        holder: Option<Arc<Holder>>,
    ) -> Result<(Arc<Self>, Vec<String>), TeleportError> {
        let mut repairs = Vec::new();
        for dir in [&config.images_dir, &config.work_dir, &config.state_dir] {
            std::fs::create_dir_all(dir).map_err(TeleportError::file("create", dir))?;
        }
        let recover::Found { whole, stopped } =
            recover::transfers_found(&config.work_dir.join("transfers"), &mut repairs)?;
        let awaited = whole.iter().map(|a| ImageId(a.opening.image)).collect();
        let maps = config.state_dir.join("maps");
        let images = Images::open(catalog.clone(), maps, &awaited, &mut repairs)?;
        let sequences = Sequences::open(&config.work_dir, config.sequence_data_bytes)?;
        let matching = match &config.teleporter {
            Some(remote) => Matching::Remote(remote.clone()),
            None => Matching::Local(open_teleporter(
                &config.state_dir.join("index"),
                config.sequence_data_bytes,
                &mut repairs,
            )?),
        };
        let (wake, wakes) = crossbeam_channel::bounded(1);
        let (catch_up_wakes, lacks) = crossbeam_channel::bounded(1);
        let site = Arc::new(Site {
            config,
            catalog,
            images,
            partials: Arc::default(),
            sequences,
            matching,
            matched: Arc::default(),
            active: Arc::default(),
            sessions: Mutex::default(),
            session_opened: tokio::sync::Notify::new(),
            totals: Totals::default(),
            closing: AtomicBool::new(false),
            copier: Mutex::new(None),
            copier_wakes: wake,
            catch_up_wakes,
            behind: AtomicBool::new(true),
            indexing: Mutex::default(),
            images_went: AtomicBool::new(true),
            trimmings: Mutex::new(0),
            holds: RwLock::new(holder),
        });
        for (image, part, left) in stopped {
            let mut blocks = BlockMap::default();
            left.data.iter().for_each(|d| blocks.push(d));
            site.partials.add_stopped(image, &part, left.layout, blocks);
        }
        site.recover(whole, &mut repairs);
        site.forget_strays();
        site.name_the_lost(&mut repairs);
        let copier = shared::start_copier(&site, wakes);
        *site.copier.lock() = copier.ok();
        site.wake_copier();
        // Without it nothing is lost but what the matcher would have found.
        if let Err(e) = catch_up::start(&site, lacks) {
            tracing::warn!(error = %e, "no thread to tell the matcher what it lacks");
        }
        Ok((site, repairs))
    }

    /// The directory of a transfer.
    pub(crate) fn transfer_dir(&self, key: &str) -> PathBuf {
        self.config.work_dir.join("transfers").join(key)
    }

    /// Hash files of images that are neither here nor on their way are of no use.
    fn forget_strays(&self) {
        let Matching::Local(teleporter) = &self.matching else {
            return;
        };
        let strays: Vec<ImageId> = teleporter
            .lock()
            .images()
            .into_iter()
            .filter(|i| !self.images.knows(*i) && !self.partials.knows(*i))
            .collect();
        for image in strays {
            let _ = crate::matching::handle(teleporter, Event::Image(image, ImageEvent::Forget));
        }
    }

    /// Says which images' blocks can no longer be found or read for reuse, and the way out.
    fn name_the_lost(&self, repairs: &mut Vec<String>) {
        let Matching::Local(teleporter) = &self.matching else {
            return;
        };
        let found: HashSet<ImageId> = teleporter.lock().images().into_iter().collect();
        for image in self.images.list() {
            if !self.images.map_path(image.id).exists() {
                repairs.push(format!(
                    "{}: its map is lost, so its blocks are not reused; `drover index {}` makes it again",
                    image.name,
                    image.path.display()
                ));
            } else if !found.contains(&image.id) {
                repairs.push(format!(
                    "{}: its hash file is lost; it is made again from the image, until then its blocks are not reused",
                    image.name
                ));
            }
        }
    }

    /// Gives a whole file its name and enters it. Every step can be repeated; where it cannot be entered, what had the
    /// name has it again. `false` when the file has gone meanwhile.
    pub(crate) fn settle(&self, arrived: &Arrived) -> Result<bool, TeleportError> {
        let offer = &arrived.opening.offer;
        let target = self.config.images_dir.join(offer.name.as_str());
        let part = arrived.part();
        let id = ImageId(arrived.opening.image);
        let old = self.images.by_name(&offer.name);
        let mut named = None;
        if part.exists() {
            let all_known = arrived.blocks.walk_blocks() == arrived.layout.walk_blocks();
            if all_known && !self.images.map_path(id).exists() {
                self.save_map(arrived)?;
            }
            if let Some(old) = &old {
                self.copy_sequences_of(old.id);
            }
            named = Some(Named::new(&part, &target, false)?);
        } else if !self.images.map_path(id).exists() || !self.is_in_place(arrived, old.as_ref()) {
            self.discard(&arrived.dir, id);
            let _ = std::fs::remove_file(self.images.map_path(id));
            return Ok(false);
        }
        let record = ImageRecord {
            id,
            name: offer.name.clone(),
            stamp: Stamp::of_path(&target).ok(),
            path: target,
            format: offer.format.clone(),
            size_bytes: offer.file_bytes,
            data_bytes: arrived.layout.covered_bytes(),
            virtual_bytes: offer.virtual_bytes,
            digest: arrived.closing.digest,
            added_unix: arrived.closing.added_unix,
            from: arrived.opening.peer_name.clone(),
            external: false,
        };
        let old = self.enter(&record, named)?;
        self.partials.remove(id);
        remove_dir(&arrived.dir);
        if let Some(old) = old {
            self.sequences.drop_image(old.id);
            self.tell(old.id, ImageEvent::Forget);
            self.tell(id, ImageEvent::Reindex);
            self.images_went.store(true, Ordering::Relaxed);
        }
        self.wake_copier();
        Ok(true)
    }

    /// Enters an image whose file has just got its name, or had it already. When that fails, what had the name before
    /// gets it back.
    fn enter(
        &self,
        record: &ImageRecord,
        named: Option<Named>,
    ) -> Result<Option<ImageRecord>, TeleportError> {
        match self.images.put(record) {
            Ok(old) => {
                if let Some(named) = named {
                    named.entered();
                }
                Ok(old)
            }
            Err(e) => {
                if let Some(named) = named.filter(|_| !self.is_entered(record)) {
                    named.undo();
                }
                Err(e.into())
            }
        }
    }

    /// Whether the catalog took an image in although it said that it failed.
    fn is_entered(&self, record: &ImageRecord) -> bool {
        let now = self.catalog.by_name(&record.name);
        now.is_ok_and(|now| now.is_some_and(|now| now.id == record.id))
    }

    /// A site that stopped while it undid a naming has left the new file under both names: what had the name before
    /// gets it back, since nothing may be written to the other then.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn finish_undoing(&self, dir: &Path, name: &ImageName) -> Result<(), TeleportError> {
        let (part, target) = (dir.join("image.part"), self.image_path(name));
        Ok(naming::finish_undoing(&part, &target)?)
    }

    /// Whether the file of that name is the one that arrived. Another image may have taken the name before
    /// the catalog took this one.
    fn is_in_place(&self, arrived: &Arrived, entered: Option<&ImageRecord>) -> bool {
        let target = self.image_path(&arrived.opening.offer.name);
        let size = std::fs::metadata(&target).map_or(0, |about| about.len());
        let digest = || crate::walk::digest_file(&target, &mut |_, _| {});
        target.exists()
            && (entered.is_some_and(|e| e.id.0 == arrived.opening.image)
                || (size == arrived.opening.offer.file_bytes
                    && digest().is_ok_and(|found| found == arrived.closing.digest)))
    }

    /// Tells the teleporter what has happened already. That it cannot be told costs matches at
    /// most: whatever it says of the image is looked up and verified.
    fn tell(&self, image: ImageId, what: ImageEvent) {
        if let Err(e) = self.matching.tell(Event::Image(image, what)) {
            tracing::warn!(image = image.0, ?what, error = %e, "cannot tell the teleporter");
            self.matcher_lacks();
        }
    }

    /// What will be remembered of a file that is whole and synced, before it gets its name.
    pub(crate) fn save_map(&self, arrived: &Arrived) -> Result<(), TeleportError> {
        let offer = &arrived.opening.offer;
        let id = ImageId(arrived.opening.image);
        let record = ImageRecord {
            id,
            name: offer.name.clone(),
            path: self.config.images_dir.join(offer.name.as_str()),
            format: offer.format.clone(),
            size_bytes: offer.file_bytes,
            data_bytes: arrived.layout.covered_bytes(),
            virtual_bytes: offer.virtual_bytes,
            digest: arrived.closing.digest,
            stamp: None,
            added_unix: arrived.closing.added_unix,
            from: arrived.opening.peer_name.clone(),
            external: false,
        };
        let map = ImageMap {
            layout: arrived.layout.clone(),
            blocks: arrived.blocks.clone(),
        };
        Ok(map.save(&record, &self.images.map_path(id))?)
    }

    pub(crate) fn wake_copier(&self) {
        let _ = self.copier_wakes.try_send(());
    }

    /// Whether the file system of the images has so much room beyond the reserve.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.free_bytes().is_none_or(|free| bytes <= free)
    }

    /// Bytes that may be used; `None` when the system does not say.
    pub fn free_bytes(&self) -> Option<u64> {
        Some(
            self.available_bytes()?
                .saturating_sub(self.config.reserve_bytes),
        )
    }

    /// The same with the reserve.
    fn available_bytes(&self) -> Option<u64> {
        let fs = rustix::fs::statvfs(&self.config.images_dir).ok()?;
        Some(fs.f_bavail.saturating_mul(fs.f_frsize))
    }

    /// Digests an image again: what the catalog has, what the file has. Blocks the thread.
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

    /// Asks `holder` from now on before an image is replaced or removed, instead of whoever was asked before.
    pub fn hold_by(&self, holder: Arc<Holder>) {
        *self.holds.write() = Some(holder);
    }

    /// Why an image must stay as it is; none when it may be replaced or removed.
    fn why_held(&self, name: &ImageName) -> Option<String> {
        // Whoever is asked may take its time.
        let holder = self.holds.read().clone();
        holder.and_then(|holder| holder(name))
    }

    /// Refuses what would change an image that somebody needs as it is.
    pub(crate) fn check_held(&self, name: &ImageName) -> Result<(), TeleportError> {
        match self.why_held(name) {
            Some(why) => {
                let message = format!("{name} cannot be replaced or removed: {why}");
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

    /// Lets an image file of this machine serve as a source of blocks, where it is. Blocks the
    /// thread.
    ///
    /// # Errors
    /// When the file cannot be read as an image, changes while it is read, or its name is taken.
    pub fn index_image(
        &self,
        path: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<ImageRecord, TeleportError> {
        let path = path
            .canonicalize()
            .map_err(TeleportError::file("find", path))?;
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        let name = ImageName::new(name).map_err(|e| TeleportError::Remote(e.to_string()))?;
        if let Some(old) = self.images.by_name(&name)
            && old.path != path
        {
            let there = old.path.display();
            return Err(TeleportError::Remote(format!(
                "{}: an image of that name is at {there}; rename one of them",
                path.display()
            )));
        }
        let outgoing = open_for_sending(&path, Conversion::AsIs)?;
        let mut progress = |done, total| {
            progress(done, total);
            Ok(())
        };
        let (id, blocks, digest) = self.read_in(&outgoing, &mut progress, |digest| {
            // As it was, it may be indexed again; as another it would take the place of one that somebody needs.
            match self.images.by_name(&name) {
                Some(old) if old.digest != digest => self.check_held(&name),
                _ => Ok(()),
            }
        })?;
        // A file under the site's own directory is the site's; any other stays its owner's.
        let external = path.parent() != self.config.images_dir.canonicalize().ok().as_deref();
        let record = ImageRecord {
            id,
            name,
            // As it was opened, and still was when all of it had been read.
            stamp: outgoing.stamps.first().map(|(_, stamp)| *stamp),
            path,
            format: outgoing.format.as_str().into(),
            size_bytes: outgoing.layout.file_len(),
            data_bytes: outgoing.layout.covered_bytes(),
            virtual_bytes: outgoing.virtual_size,
            digest,
            added_unix: unix_now(),
            from: String::new(),
            external,
        };
        let map = ImageMap {
            layout: Arc::new(outgoing.layout),
            blocks: Arc::new(blocks),
        };
        let entered = map
            .save(&record, &self.images.map_path(id))
            .and_then(|()| self.images.put(&record));
        self.indexing.lock().remove(&id);
        let old = match entered {
            Ok(old) => old,
            Err(e) => {
                self.tell(id, ImageEvent::Forget);
                return Err(e.into());
            }
        };
        if let Some(old) = old {
            self.sequences.drop_image(old.id);
            self.tell(old.id, ImageEvent::Forget);
            // What the old one had in the caches was not entered for this one.
            self.tell(id, ImageEvent::Reindex);
            self.images_went.store(true, Ordering::Relaxed);
            self.wake_copier();
        }
        Ok(record)
    }

    /// Removes an image, and its file unless it was indexed in place. Sequences that other images
    /// share with it are kept.
    ///
    /// # Errors
    /// When there is no such image, it is held, or its file cannot be removed.
    pub fn remove(&self, name: &ImageName) -> Result<ImageRecord, TeleportError> {
        let record = self.find(name)?;
        self.check_held(name)?;
        self.copy_sequences_of(record.id);
        if !record.external {
            match std::fs::remove_file(&record.path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(TeleportError::file("remove", &record.path)(e));
                }
                _ => {}
            }
        }
        self.images.remove(name)?;
        self.sequences.drop_image(record.id);
        self.tell(record.id, ImageEvent::Forget);
        self.images_went.store(true, Ordering::Relaxed);
        self.wake_copier();
        Ok(record)
    }

    /// All images, by name.
    #[must_use]
    pub fn list(&self) -> Vec<ImageRecord> {
        self.images.list()
    }

    /// What the site is doing.
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
                .map(|s| matcher_counts(&s))
                .unwrap_or_default(),
        }
    }

    /// Writes everything down that makes the next start quick. Call it when no session is left.
    ///
    /// # Errors
    /// When a file cannot be written; nothing that was delivered is at risk.
    pub fn close(&self) -> Result<(), TeleportError> {
        self.trim_sequences();
        self.closing.store(true, Ordering::Relaxed);
        self.sequences.settle();
        if let Matching::Local(teleporter) = &self.matching {
            let mut teleporter = teleporter.lock();
            teleporter.persist()?;
        }
        Ok(())
    }
}

/// A file that is whole and synced.
pub(crate) struct Arrived {
    pub(crate) dir: PathBuf,
    pub(crate) opening: crate::transfer::Opening,
    pub(crate) layout: Arc<Layout>,
    pub(crate) blocks: Arc<BlockMap>,
    pub(crate) closing: Closing,
}

impl Arrived {
    /// Its file, until that gets its name.
    pub(crate) fn part(&self) -> PathBuf {
        self.dir.join("image.part")
    }

    /// What a directory holds, if its file was whole.
    pub(crate) fn of(left: Leftover) -> Result<Self, Box<Leftover>> {
        let Some(closing) = left.closing else {
            return Err(Box::new(left));
        };
        let mut blocks = BlockMap::default();
        left.data.iter().for_each(|d| blocks.push(d));
        Ok(Arrived {
            dir: left.dir,
            opening: left.opening,
            layout: left.layout,
            blocks: Arc::new(blocks),
            closing,
        })
    }

    /// Logs that the file is whole; from here on a crash cannot lose it.
    pub(crate) fn log(&self, log: &mut crate::log::Log) -> Result<(), TeleportError> {
        log.append(RecordKind::Closing, &drover_net::encode(&self.closing))?;
        log.sync()
    }
}

/// Opens the matcher in `dir`, for so many bytes of sequence data.
///
/// # Errors
/// When its files cannot be used.
pub fn open_teleporter(
    dir: &Path,
    sequence_data_bytes: u64,
    repairs: &mut Vec<String>,
) -> Result<crate::matching::LocalTeleporter, TeleportError> {
    let storage = HostDirectory::open_or_create(dir).map_err(TeleportError::file("open", dir))?;
    let config = MatcherConfig {
        sequence_limit: segments_of(sequence_data_bytes) as u32,
        ..MatcherConfig::default()
    };
    let (matcher, report) = Matcher::open(storage, config)?;
    if report.converted {
        tracing::info!(dir = %dir.display(), "the index was converted from an earlier version");
    }
    repairs.extend(report.repairs.iter().map(ToString::to_string));
    Ok(Arc::new(Mutex::new(Teleporter::new(matcher))))
}

/// The matcher's counts by name.
fn matcher_counts(s: &MatcherStats) -> Vec<(String, u64)> {
    let caches = [("c0", &s.c0), ("c1", &s.c1), ("c2", &s.c2)];
    let mut out: Vec<(String, u64)> = caches
        .iter()
        .flat_map(|(name, c)| {
            [
                ("capacity", c.capacity),
                ("entries", c.entries),
                ("lookups", c.lookups),
                ("hits", c.hits),
                ("false_matches", c.false_matches),
                ("evictions", c.evictions),
            ]
            .map(|(what, n)| (format!("{name}_{what}"), n))
        })
        .collect();
    out.extend(
        [
            ("blocks", s.blocks),
            ("heads", s.heads),
            ("matched", s.matched),
            ("via_c0", s.via_c0),
            ("via_c1", s.via_c1),
            ("via_c2", s.via_c2),
            ("via_anchor", s.via_anchor),
            ("via_aligned", s.via_aligned),
            ("via_repeat", s.via_repeat),
            ("backward", s.backward),
            ("runs", s.runs),
            ("pages_read", s.pages_read),
            ("bytes_read", s.bytes_read),
            ("bytes_written", s.bytes_written),
            ("memory", s.memory),
        ]
        .map(|(what, n)| (what.to_string(), n)),
    );
    out
}

/// Seconds since 1970.
pub(crate) fn unix_now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX))
}

pub(crate) fn remove_dir(path: &Path) {
    let removed = match path.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    };
    if let Err(e) = removed
        && e.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), error = %e, "cannot remove");
    }
}

#[cfg(test)]
pub(crate) mod tests;
