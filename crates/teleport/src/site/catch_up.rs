//! Keeps the matcher up to date in the background. Sends it the digests of images that it lacks (a remote teleporter
//! was unreachable or lost its files, hash files of this site were lost, the matching of an image failed, a crash
//! interrupted transfers) and has it forget removed images.
//!
//! A pass runs soon after the start, after a failure, and every ten minutes with a remote teleporter. Images already
//! sent are skipped: after a failure the next pass restarts with the image that failed.
//!
//! Transfers have priority: before each batch, this thread waits up to [`GIVE_WAY`] until none of their batches is
//! pending.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError};
use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64};
use drover_image::ImageFile;
use drover_index::{ImageId, Scanner, digest_blocks};
use drover_store::{DataBits, OpenImage};

use super::Site;
use crate::TeleportError;
use crate::active::{ANYBODY, OLDEST};
use crate::codec::Batch;
use crate::matching::{Link, Matching};
use crate::protocol::BATCH_BLOCKS;
use crate::teleporter::{Event, ImageEvent};
use crate::transfer::{each_batch, opening_of};

/// Delay before the first pass.
const AFTER_START: Duration = Duration::from_secs(2);

/// Interval between passes with a remote teleporter.
const EVERY: Duration = Duration::from_secs(600);

/// Only this many of the latest images are sent: the matcher finds blocks in no more, so reading older ones would be
/// wasted.
const LATEST: usize = 32;

/// Longest delay of one batch in favor of transfers' batches that wait to be matched.
const GIVE_WAY: Duration = Duration::from_secs(1);

/// Delay before the next pass after a failure; doubles with each failure, up to [`EVERY`].
const AFTER_FAILURE: Duration = Duration::from_secs(1);

/// Starts the thread that runs the passes. It exits with the site.
pub(super) fn start(site: &Arc<Site>, wakes: Receiver<()>) -> std::io::Result<JoinHandle<()>> {
    let weak = Arc::downgrade(site);
    let runtime = tokio::runtime::Handle::try_current();
    let lone = matches!(site.matching, Matching::Remote(_));
    let work = move || {
        let _entered = runtime.as_ref().map(|r| r.enter());
        let mut failed = AFTER_FAILURE;
        let mut wait = AFTER_START;
        let mut unfit = HashSet::new();
        loop {
            let woken = wakes.recv_timeout(wait);
            let closes = |site: &Arc<Site>| site.closing.load(Ordering::Relaxed);
            if woken == Err(RecvTimeoutError::Disconnected)
                || weak.upgrade().is_none_or(|site| closes(&site))
            {
                return;
            }
            if woken.is_ok() {
                // Do not retry at once what has just failed.
                std::thread::sleep(AFTER_FAILURE.min(wait));
            }
            let Some(site) = weak.upgrade() else { return };
            if closes(&site) || (lone && runtime.is_err()) {
                return;
            }
            wait = match site.catch_up(&mut unfit) {
                Ok(()) => {
                    site.behind.store(false, Ordering::Relaxed);
                    // A remote teleporter judges what its cache is worth by the images that it knows, so trim after
                    // it knows them.
                    site.wake_copier();
                    failed = AFTER_FAILURE;
                    EVERY
                }
                Err(e) => {
                    tracing::debug!(error = %e, "cannot bring the matcher up to date");
                    failed = (failed * 2).min(EVERY);
                    failed
                }
            };
        }
    };
    std::thread::Builder::new()
        .name("catch-up".into())
        .spawn(work)
}

impl Site {
    /// Notes that the matcher lacks something, and wakes the thread.
    pub(crate) fn matcher_is_behind(&self) {
        self.behind.store(true, Ordering::Relaxed);
        let _ = self.catch_up_wakes.try_send(());
    }

    /// Runs one pass. Images whose files no longer match what was delivered are added to `unfit`.
    fn catch_up(&self, unfit: &mut HashSet<ImageId>) -> Result<(), TeleportError> {
        self.note_images();
        // List first: images delivered later have already been sent to the matcher.
        let mut lacking = self.images.list();
        let have: HashSet<ImageId> = self.matching.images()?.into_iter().collect();
        let mut link = self.matching.link()?;
        let mut forgotten = false;
        for &image in &have {
            // An image that is being indexed is known to the matcher before it is in the catalog.
            let indexing = self.indexing.lock().contains_key(&image);
            if !indexing && !self.images.knows(image) && !self.partials.knows(image) {
                link.ask(Event::Image(image, ImageEvent::Forget))?;
                forgotten = true;
            }
        }
        if forgotten {
            // The caches may have dropped entries of the remaining images in favor of the forgotten ones.
            for &image in have.iter().filter(|i| self.images.knows(**i)) {
                let _ = link.ask(Event::Image(image, ImageEvent::Reindex));
            }
        }
        // Oldest first, because the matcher keeps the latest.
        lacking.sort_by_key(|r| (r.added_unix, r.id));
        lacking.drain(..lacking.len().saturating_sub(LATEST));
        lacking.retain(|r| !have.contains(&r.id) && !unfit.contains(&r.id));
        let partials = self.stopped_without(&have);
        if lacking.is_empty() && partials.is_empty() {
            return Ok(());
        }
        tracing::info!(
            images = lacking.len(),
            unfinished = partials.len(),
            "bringing the matcher up to date"
        );
        for (image, dir) in partials {
            self.send_partial(&mut link, image, &dir)?;
        }
        for record in lacking {
            if !self.send_image(&mut link, record.id, &record.path, GIVE_WAY)? {
                unfit.insert(record.id);
            }
        }
        Ok(())
    }

    /// Stopped transfers that the matcher lacks, with their directories.
    fn stopped_without(&self, have: &HashSet<ImageId>) -> Vec<(ImageId, std::path::PathBuf)> {
        let Ok(entries) = std::fs::read_dir(self.config.work_dir.join("transfers")) else {
            return Vec::new();
        };
        let dirs = entries.filter_map(|e| Some(e.ok()?.path()));
        let openings = dirs.filter_map(|dir| Some((ImageId(opening_of(&dir)?.image), dir)));
        openings
            .filter(|(i, _)| !have.contains(i) && self.partials.knows(*i))
            .filter(|(i, _)| !self.partials.is_live(*i))
            .collect()
    }

    /// Sends the digests of a stopped transfer's blocks, from its log. Yields to a session that resumes it.
    fn send_partial(
        &self,
        link: &mut Link,
        image: ImageId,
        dir: &Path,
    ) -> Result<(), TeleportError> {
        let Some(opening) = opening_of(dir) else {
            return Ok(());
        };
        let held = self
            .active
            .take(&opening.offer.name, ANYBODY, OLDEST, Duration::ZERO);
        let Ok(hold) = held else { return Ok(()) };
        if opening_of(dir).map(|o| o.image) != Some(image.0) || self.partials.is_live(image) {
            return Ok(());
        }
        let stopped = || *hold.stop.borrow() || self.closing.load(Ordering::Relaxed);
        self.record_image(link, image, |link| {
            let mut whole = true;
            each_batch(dir, |batch| {
                self.matched.give_way(GIVE_WAY);
                whole = !stopped();
                if whole && !batch.digests.is_empty() {
                    link.ask(Event::Record(image, Arc::new(batch)))?;
                }
                Ok(whole)
            })?;
            Ok(whole)
        })
    }

    /// Sends the digests of a local image, read from its file. Returns `false` when the file is not what was
    /// delivered.
    pub(super) fn send_image(
        &self,
        link: &mut Link,
        image: ImageId,
        path: &Path,
        give_way: Duration,
    ) -> Result<bool, TeleportError> {
        let (Some(source), Ok(file)) = (self.images.open_image(image), ImageFile::open(path))
        else {
            return Ok(false);
        };
        let mut fit = true;
        self.record_image(link, image, |link| {
            let mut scanner = Scanner::new();
            for index in 0..source.map.blocks.batches() {
                self.matched.give_way(give_way);
                if self.closing.load(Ordering::Relaxed) || !self.images.knows(image) {
                    return Ok(false);
                }
                match read_batch(&source, &file, &mut scanner, index) {
                    Ok(Some(batch)) if batch.digests.is_empty() => {}
                    Ok(Some(batch)) => drop(link.ask(Event::Record(image, Arc::new(batch)))?),
                    other => {
                        let why = other.err().map(|e| e.to_string());
                        let why = why.unwrap_or_else(|| "it is not what was delivered".into());
                        tracing::warn!(path = %path.display(), why, "its blocks are not reused");
                        fit = false;
                        return Ok(false);
                    }
                }
            }
            Ok(true)
        })?;
        Ok(fit)
    }

    /// Begins an image at the matcher, lets `batches` send its digests, and ends it; aborts it unless `batches`
    /// returns `true`.
    fn record_image(
        &self,
        link: &mut Link,
        image: ImageId,
        batches: impl FnOnce(&mut Link) -> Result<bool, TeleportError>,
    ) -> Result<(), TeleportError> {
        link.ask(Event::Image(image, ImageEvent::Begin))?;
        let ended = batches(link).and_then(|whole| match whole {
            true => link.ask(Event::Image(image, ImageEvent::Finish)),
            false => link.ask(Event::Image(image, ImageEvent::Abort)),
        });
        if ended.is_err() {
            let _ = link.ask(Event::Image(image, ImageEvent::Abort));
        }
        ended?;
        // The image may have been removed, and its forget event sent, while it was still incomplete.
        if !self.images.knows(image) && !self.partials.knows(image) {
            link.ask(Event::Image(image, ImageEvent::Forget))?;
        }
        Ok(())
    }
}

/// Reads a batch of a local image; `None` when its data blocks are not those recorded.
fn read_batch(
    image: &OpenImage,
    file: &ImageFile,
    scanner: &mut Scanner,
    index: u64,
) -> std::io::Result<Option<Batch>> {
    let Some(expected) = image.map.blocks.batch(index) else {
        return Ok(None);
    };
    let mut bytes = vec![0; expected.blocks() as usize * BLOCK_SIZE];
    let at = index * BATCH_BLOCKS * BLOCK_SIZE_U64;
    image.map.layout.read(file, at, &mut bytes)?;
    let scan = scanner.scan(&bytes);
    let mut data = DataBits::new(expected.blocks());
    for (i, _) in scan.zero.iter().enumerate().filter(|(_, zero)| !*zero) {
        data.set(i as u64);
    }
    if data != expected {
        return Ok(None);
    }
    for (to, from) in data.iter().enumerate() {
        let from = from as usize * BLOCK_SIZE;
        bytes.copy_within(from..from + BLOCK_SIZE, to * BLOCK_SIZE);
    }
    bytes.truncate(scan.heads.len() * BLOCK_SIZE);
    let mut digests = Vec::with_capacity(scan.heads.len());
    digest_blocks(&bytes, &mut digests);
    Ok(Some(Batch::new(index, data, scan.heads, &digests)))
}
