//! The sequence data of a site: copied in the background, and given back when the images that it serves go.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError};
use drover_core::BLOCK_SIZE_U64;
use drover_index::{ImageId, Trim, Trimmed};
use parking_lot::MutexGuard;

use super::Site;
use crate::files;
use crate::matching::{LocalTeleporter, Matching};
use crate::sequences::{Copied, Copy, SEGMENT_BYTES, Sequences, segments_of};

/// When copies that failed are tried again, if nothing else wakes the copier.
const TRY_AGAIN: Duration = Duration::from_secs(30);

/// Copies that may fail before the rest waits with them.
const MAX_FAILED: u32 = 16;

/// What is given back before it is asked whether that helps.
const TRIAL: u64 = 256 << 20;

/// What of its limit the sequence data may take however small the images are.
const LEAST_PART: u64 = 128;

/// Starts the thread that copies what is pending, and trims. It ends with the site.
pub(super) fn start_copier(
    site: &Arc<Site>,
    wakes: Receiver<()>,
) -> std::io::Result<JoinHandle<()>> {
    let weak = Arc::downgrade(site);
    let site = move || {
        weak.upgrade()
            .filter(|site| !site.closing.load(Ordering::Relaxed))
    };
    let work = move || {
        let (mut failed, mut said) = (0, false);
        loop {
            let woken = match failed {
                0 => wakes.recv().map_err(|_| RecvTimeoutError::Disconnected),
                _ => wakes.recv_timeout(TRY_AGAIN),
            };
            if woken == Err(RecvTimeoutError::Disconnected) {
                return;
            }
            let mut at = 0;
            failed = 0;
            while failed < MAX_FAILED
                && let Some(site) = site()
                && let Some(copied) = site.copy_next(&mut at)
            {
                failed += u32::from(copied == Copied::Later);
            }
            if failed > 0 && !said {
                tracing::warn!("sequences could not be copied now; they are tried again");
            }
            said = failed > 0;
            let mut trim = None;
            while let Some(site) = site()
                && site.trim_step(&mut trim, false)
            {}
            if let Some(site) = site() {
                site.sequences.settle();
            }
        }
    };
    std::thread::Builder::new()
        .name("sequences".into())
        .spawn(work)
}

impl Site {
    /// Copies the first pending sequence from slot `at` on that can be copied; none when there is none.
    pub(super) fn copy_next(&self, at: &mut u64) -> Option<Copied> {
        let whole = |i| self.images.knows(i);
        let live = |i| self.partials.is_live(i);
        let copy = self.sequences.next_copy(*at, whole, live)?;
        *at = copy.first + 1;
        Some(self.copy_sequence(copy))
    }

    /// Copies what is pending from an image that is about to go.
    pub(super) fn copy_sequences_of(&self, image: ImageId) {
        let mut at = 0;
        while let Some(copy) = self.sequences.next_copy(at, |i| i == image, |_| false) {
            at = copy.first + 1;
            self.copy_sequence(copy);
        }
    }

    fn copy_sequence(&self, copy: Copy) -> Copied {
        self.sequences.copy(copy, || {
            let length = u64::from(copy.count) * BLOCK_SIZE_U64;
            if !self.has_room(length) {
                return Copied::Later;
            }
            let Some(image) = self.images.open_image(copy.image) else {
                return Copied::Never;
            };
            let runs = image.map.blocks.walk_runs(copy.from, u64::from(copy.count));
            let Some(runs) = runs else {
                return Copied::Never;
            };
            let from = files::spans_of(&image.map.layout, &runs);
            let to = [(Some(Sequences::offset(copy.first)), length)];
            match files::copy_spans(&image.file, &from, self.sequences.data(), &to) {
                Ok(()) => Copied::Made,
                Err(e) => {
                    tracing::debug!(error = %e, "cannot copy a sequence");
                    Copied::Later
                }
            }
        })
    }

    /// What the sequence data may take, in segments: its limit, and no more than the images that are here, or a small
    /// part of the limit where those are smaller.
    fn sequence_budget(&self) -> u32 {
        let limit = self.config.sequence_data_bytes;
        let images: u64 = self.images.list().iter().map(|i| i.data_bytes).sum();
        let bytes = limit.min(images.max(limit / LEAST_PART));
        u32::try_from(segments_of(bytes)).unwrap_or(u32::MAX)
    }

    /// Gives sequence data back, all that is too much. The copier may have been at it when the site began to close.
    pub(super) fn trim_sequences(&self) {
        let mut trim = None;
        while self.trim_step(&mut trim, true) {}
    }

    /// One step of that, begun after an image went; `false` when there is nothing more to do. Transfers go on between
    /// steps.
    fn trim_step(&self, trim: &mut Option<Trim>, at_once: bool) -> bool {
        // A lone teleporter keeps the slots of all that it matches for.
        let Matching::Local(teleporter) = &self.matching else {
            return false;
        };
        if trim.is_none() && !self.images_went.swap(false, Ordering::Relaxed) && !at_once {
            return false;
        }
        match trim {
            None => {
                let budget = self.sequence_budget();
                *trim = teleporter.lock().begin_trim(budget);
                trim.is_some()
            }
            Some(trim) => self.trimmed(teleporter, trim).is_some(),
        }
    }

    /// Goes on with a trimming: how many segments that freed, none at its end.
    fn trimmed(&self, teleporter: &LocalTeleporter, trim: &mut Trim) -> Option<u64> {
        let mut teleporter = teleporter.lock();
        let freed = match teleporter.trim(trim) {
            Trimmed::Looked => Some(0),
            Trimmed::Freed(segments) => {
                // Before the matcher can fill them anew.
                self.sequences.free(&segments);
                Some(segments.len() as u64)
            }
            Trimmed::Done => None,
        };
        MutexGuard::unlock_fair(teleporter);
        freed
    }

    /// Gives sequence data back until so many bytes can be used. It stays when all of it would not be enough, and
    /// where that does not help: on file systems where it shares its room with the images.
    pub(crate) fn make_room(&self, bytes: u64) {
        let Matching::Local(teleporter) = &self.matching else {
            return;
        };
        let wanted = bytes.saturating_add(self.config.reserve_bytes);
        let Some(before) = self.available_bytes().filter(|b| *b < wanted) else {
            return;
        };
        let segments = (wanted - before).div_ceil(SEGMENT_BYTES);
        let (used, begun) = {
            let teleporter = teleporter.lock();
            let used = u64::from(teleporter.sequence_segments());
            let keep = used.saturating_sub(segments);
            (
                used,
                teleporter.begin_trim(u32::try_from(keep).unwrap_or(u32::MAX)),
            )
        };
        let Some(mut trim) = begun.filter(|_| used >= segments) else {
            return;
        };
        let mut freed = 0;
        while let Some(more) = self.trimmed(teleporter, &mut trim) {
            freed += more * SEGMENT_BYTES;
            let gained = self
                .available_bytes()
                .map_or(0, |now| now.saturating_sub(before));
            if before + gained >= wanted || (freed >= TRIAL && gained < freed / 4) {
                break;
            }
        }
        tracing::info!(freed, "sequence data gave room back for an image");
    }

    /// Bytes that the sequence data takes at most, by the matcher's count of segments; none with a lone teleporter.
    #[must_use]
    pub fn sequence_data_used(&self) -> Option<u64> {
        match &self.matching {
            Matching::Local(t) => Some(u64::from(t.lock().sequence_segments()) * SEGMENT_BYTES),
            Matching::Remote(_) => None,
        }
    }
}
