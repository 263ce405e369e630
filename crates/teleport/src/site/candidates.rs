//! Chooses the images of a site that are probably similar to one that is offered, by what is noted of each: those that are indexed are
//! found by their blocks again, whatever came since; some that are not indexed are indexed, on a thread of their own.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use drover_image::Stamp;
use drover_index::ImageId;
use drover_store::{KnownFile, Likeness, MIN_SIMILARITY, look_at_file};
use tokio::sync::watch;

use super::Site;
use super::known::known_file;
use super::queue::BeingIndexed;
use crate::TeleportError;
use crate::teleporter::ImageEvent;

/// Upper bound on the images that are called back for one that is offered; the caches hold 32.
const MAX_RECALLED: usize = 8;

/// Upper bound on the files that are indexed for one image.
const MAX_INDEXED: usize = 3;

/// Upper bound on the bytes of their disks that are read, as a multiple of the image's own; and what is always allowed.
const MAX_INDEXED_BYTES: (u64, u64) = (4, 1 << 30);

/// Upper bound on the files that wait to be indexed.
const MAX_QUEUED: usize = 64;

/// A file that is not indexed must be more similar by this much than any that is.
const MARGIN: f64 = 0.05;

/// Of two files that are as similar as this, one is indexed.
const ALIKE: f64 = 0.9;

impl Site {
    /// Prepares the matcher for an image of about so many bytes, and returns what is indexed for it. Blocks for a moment.
    pub(crate) fn prepare_similar(
        self: &Arc<Self>,
        offered: &Likeness,
        bytes: u64,
    ) -> BeingIndexed {
        let images: HashMap<PathBuf, ImageId> = self
            .images
            .list()
            .into_iter()
            .map(|image| (image.path, image.id))
            .collect();
        let (mut indexed, mut others) = (Vec::new(), Vec::new());
        for file in self.known.list() {
            let similarity = offered.similarity(&file.likeness);
            if similarity < MIN_SIMILARITY {
                continue;
            }
            match images.get(&file.path) {
                Some(id) => indexed.push((similarity, *id)),
                None if file.offered => others.push((similarity, file)),
                None => {}
            }
        }
        indexed.sort_by(|a, b| b.0.total_cmp(&a.0));
        indexed.truncate(MAX_RECALLED);
        // The most similar one last: it keeps its place longest.
        for (similarity, image) in indexed.iter().rev() {
            tracing::debug!(image = image.0, similarity, "probably similar");
            self.tell(*image, ImageEvent::Recall);
        }
        let best = indexed.first().map_or(0.0, |(similarity, _)| *similarity);
        let enough = if best > 0.0 {
            best + MARGIN
        } else {
            MIN_SIMILARITY
        };
        others.retain(|(similarity, _)| *similarity >= enough);
        others.sort_by(|a, b| b.0.total_cmp(&a.0));
        let waiting = self
            .choose(offered, &others, enough, bytes)
            .into_iter()
            .filter_map(|path| self.index_soon(path))
            .collect();
        BeingIndexed(waiting)
    }

    /// Those of the files, the most similar first, that are worth to be indexed.
    fn choose(
        &self,
        offered: &Likeness,
        files: &[(f64, Arc<KnownFile>)],
        enough: f64,
        bytes: u64,
    ) -> Vec<PathBuf> {
        let (times, always) = MAX_INDEXED_BYTES;
        let mut left = bytes.saturating_mul(times).max(always);
        let mut chosen: Vec<Arc<KnownFile>> = Vec::new();
        for (similarity, file) in files {
            if chosen.len() >= MAX_INDEXED {
                break;
            }
            if chosen
                .iter()
                .any(|c| c.likeness.similarity(&file.likeness) >= ALIKE)
            {
                continue;
            }
            let Some(file) = self.as_it_is_now(file) else {
                continue;
            };
            // Holes are not read.
            let data = std::fs::metadata(&file.path).map_or(0, |about| about.blocks() * 512);
            if offered.similarity(&file.likeness) < enough || data > left {
                continue;
            }
            left -= data;
            tracing::info!(path = %file.path.display(), similarity, "indexing a file that is probably similar");
            chosen.push(file);
        }
        chosen.into_iter().map(|file| file.path.clone()).collect()
    }

    /// A known file, looked at again if it has changed; `None` when it is gone or cannot be read.
    fn as_it_is_now(&self, file: &Arc<KnownFile>) -> Option<Arc<KnownFile>> {
        let stamp = Stamp::of_path(&file.path);
        if stamp.as_ref().is_ok_and(|stamp| *stamp == file.stamp) {
            return Some(Arc::clone(file));
        }
        let now = stamp.ok().and_then(|_| look_at_file(&file.path).ok());
        let Some(now) = now else {
            self.forget_known(&file.path);
            return None;
        };
        let now = known_file(&file.path, now, file.offered);
        if let Err(e) = self.known.put(vec![now.clone()]) {
            tracing::warn!(error = %e, "cannot note what is known of a file");
        }
        Some(Arc::new(now))
    }

    /// Queues a file to be indexed; `None` when too many are queued.
    fn index_soon(self: &Arc<Self>, path: PathBuf) -> Option<watch::Receiver<bool>> {
        let mut state = self.candidates.0.lock();
        if let Some((_, done)) = state.waiting.iter().find(|(queued, _)| *queued == path) {
            return Some(done.subscribe());
        }
        if state.waiting.len() >= MAX_QUEUED {
            return None;
        }
        let (done, waits) = watch::channel(false);
        state.waiting.push_back((path, done));
        if state.running {
            return Some(waits);
        }
        let (site, runtime) = (Arc::clone(self), tokio::runtime::Handle::try_current());
        let work = move || {
            let _entered = runtime.as_ref().map(|r| r.enter());
            site.index_queued();
        };
        let thread = std::thread::Builder::new()
            .name("candidates".into())
            .spawn(work);
        match thread {
            Ok(thread) => {
                state.running = true;
                drop(state);
                let mut threads = self.threads.lock();
                threads.retain(|thread| !thread.is_finished());
                threads.push(thread);
                Some(waits)
            }
            Err(e) => {
                tracing::warn!(error = %e, "cannot start the thread that indexes similar files");
                state.waiting.clear();
                None
            }
        }
    }

    /// Indexes the queued files, until there are none.
    fn index_queued(&self) {
        loop {
            let next = {
                let mut state = self.candidates.0.lock();
                if self.closing.load(Ordering::Relaxed) {
                    state.waiting.clear();
                }
                state.running = !state.waiting.is_empty();
                state.waiting.front().map(|(path, _)| path.clone())
            };
            let Some(path) = next else { return };
            let progress = &mut |_, _| match self.closing.load(Ordering::Relaxed) {
                true => Err(TeleportError::Stopped),
                false => Ok(()),
            };
            match self.index_file(&path, progress) {
                Ok(record) => tracing::info!(image = %record.name, "indexed"),
                Err(TeleportError::Stopped) => {}
                Err(e) => {
                    tracing::warn!(path = %path.display(), error = %e, "cannot index a file that is probably similar");
                    // Until it is named again.
                    self.forget_known(&path);
                }
            }
            let done = self.candidates.0.lock().waiting.pop_front();
            if let Some((_, done)) = done {
                done.send_replace(true);
            }
        }
    }
}
