//! The sequence data of a site: copied in the background, and freed when the images that use it are removed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError};
use drover_core::BLOCK_SIZE_U64;
use drover_index::ImageId;
use drover_store::sequences::{Copied, Copy, SEGMENT_BYTES, Sequences, segments_of};
use tokio::runtime::Handle;

use super::Site;
use crate::TeleportError;
use crate::files;
use crate::matching::{Link, Matching, wrong_answer};
use crate::teleporter::{Answer, Event};

/// Retry interval of failed copies, if nothing wakes the copier earlier.
const TRY_AGAIN: Duration = Duration::from_secs(30);

/// Failed copies after which the rest of the round is postponed.
const MAX_FAILED: u32 = 16;

/// Bytes freed before checking whether freeing gains any space.
const TRIAL: u64 = 256 << 20;

/// The sequence data may always take `1 / MIN_PART` of its limit, however small the images are.
const MIN_PART: u64 = 128;

/// Longest wait of a trim for plans in flight.
const SETTLE: Duration = Duration::from_secs(10);

/// Timeout of one answer during a trim; each is for a small amount of work.
const ANSWER: Duration = Duration::from_secs(60);

/// Longest wait, of an image that needs space, for a trim step or for another image that also needs space.
const TURN: Duration = Duration::from_secs(10);

/// Limit on the steps of a trim: more than any takes, so that a remote teleporter cannot prolong it.
const MAX_STEPS: u32 = 1 << 13;

/// Maximum number of passes over all images in which segments are freed to make room for one.
const PASSES: u32 = 8;

/// Segments requested at least in the first pass; doubles with each pass.
const MIN_ASKED: u64 = 32;

/// A trim of the sequence cache in progress.
struct Trimming {
    link: Link,
    /// Number of this trim, counted since the site opened.
    turn: u64,
    steps: u32,
}

impl Trimming {
    /// Begins a trim on this link; returns how many segments are in use.
    fn begin(&mut self, keep: u32, have: u32) -> Result<u32, TeleportError> {
        self.link.submit(Event::BeginTrim { keep, have })?;
        match self.link.collect_within(ANSWER)? {
            Answer::Holding(n) => Ok(n),
            _ => Err(wrong_answer()),
        }
    }
}

/// Begins a trim and returns how many segments are in use. Cancels any trim in progress.
fn begin_trimming(
    link: Link,
    turn: &mut u64,
    keep: u32,
    have: u32,
) -> Result<(Trimming, u32), TeleportError> {
    *turn += 1;
    let mut trim = Trimming {
        link,
        turn: *turn,
        steps: 0,
    };
    let holding = trim.begin(keep, have)?;
    Ok((trim, holding))
}

/// Starts the thread that copies pending sequences and trims. It exits with the site.
pub(super) fn start_copier(
    site: &Arc<Site>,
    wakes: Receiver<()>,
) -> std::io::Result<JoinHandle<()>> {
    let weak = Arc::downgrade(site);
    let site = move || {
        weak.upgrade()
            .filter(|site| !site.closing.load(Ordering::Relaxed))
    };
    let runtime = Handle::try_current();
    let work = move || {
        let _entered = runtime.as_ref().map(|r| r.enter());
        let (mut failed, mut said) = (0, false);
        loop {
            let woken = match failed {
                0 => wakes.recv().map_err(|_| RecvTimeoutError::Disconnected),
                _ => wakes.recv_timeout(TRY_AGAIN),
            };
            if woken == Err(RecvTimeoutError::Disconnected) || site().is_none() {
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
                tracing::warn!("sequences could not be copied; will retry");
            }
            said = failed > 0;
            let mut trim = None;
            while let Some(site) = site()
                && site.trim_step(&mut trim)
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
    /// Copies the first pending sequence at or after slot `at` that can be copied; `None` when there is none.
    pub(super) fn copy_next(&self, at: &mut u64) -> Option<Copied> {
        let whole = |i| self.images.knows(i);
        let live = |i| self.partials.is_live(i);
        let copy = self.sequences.next_copy(*at, whole, live)?;
        *at = copy.first + 1;
        Some(self.copy_sequence(copy))
    }

    /// Copies pending sequences from an image that is about to be removed.
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

    /// Size limit of the sequence data in segments: the configured limit or the total size of the images, whichever
    /// is less, but at least a small fraction of the configured limit.
    fn sequence_budget(&self) -> u32 {
        let limit = self.config.sequence_data_bytes;
        let images: u64 = self.images.list().iter().map(|i| i.data_bytes).sum();
        let bytes = limit.min(images.max(limit / MIN_PART));
        u32::try_from(segments_of(bytes)).unwrap_or(u32::MAX)
    }

    /// Frees all excess sequence data, if the matcher is local. The copier may have been interrupted in this when the
    /// site began to close.
    pub(super) fn trim_sequences(&self) {
        if matches!(self.matching, Matching::Local(_)) {
            self.images_went.store(true, Ordering::Relaxed);
            let mut trim = None;
            while self.trim_step(&mut trim) {}
        }
    }

    /// One step of a trim, which starts after an image was removed; returns `false` when there is nothing more to do
    /// now. Transfers continue between steps. After a failure, a new trim starts when the copier is next woken.
    fn trim_step(&self, trim: &mut Option<Trimming>) -> bool {
        if trim.is_none() && !self.images_went.swap(false, Ordering::Relaxed) {
            return false;
        }
        let more = match trim {
            None => self.begin_due(trim),
            Some(trim) => self.trimmed(trim).map(|freed| freed.is_some()),
        };
        more.unwrap_or_else(|e| {
            tracing::debug!(error = %e, "sequence data cannot be trimmed now");
            self.images_went.store(true, Ordering::Relaxed);
            false
        })
    }

    /// Begins a trim down to the budget. A remote teleporter must know all images first: it derives from them which
    /// segments are used.
    fn begin_due(&self, trim: &mut Option<Trimming>) -> Result<bool, TeleportError> {
        let lone = matches!(self.matching, Matching::Remote(_));
        if lone && (self.behind.load(Ordering::Relaxed) || Handle::try_current().is_err()) {
            let why = "the teleporter does not know all images of this site yet";
            return Err(TeleportError::Failed(why.into()));
        }
        let (budget, have) = (self.sequence_budget(), self.sequences.segments());
        let link = self.matching.link()?;
        let mut turn = self.trimmings.lock();
        *trim = Some(begin_trimming(link, &mut turn, budget, have)?.0);
        Ok(true)
    }

    /// Continues a trim unless another has begun; returns how many segments were freed, `None` at the end.
    fn trimmed(&self, trim: &mut Trimming) -> Result<Option<u64>, TeleportError> {
        self.plans_taken(trim)?;
        let turn = self.trimmings.lock();
        match *turn == trim.turn {
            true => self.free_next(trim),
            false => Err(TeleportError::Failed(
                "another trimming began, to make space for an image".into(),
            )),
        }
    }

    /// Waits until the plans in flight have been applied: their stores may go to segments that are freed next. Blocks
    /// that they only read from there fail verification and are requested. A local matcher issues no plan before the
    /// previous one is applied, so there is nothing to wait for.
    fn plans_taken(&self, trim: &Trimming) -> Result<(), TeleportError> {
        match trim.link {
            Link::Remote(_) if !self.matched.settled(SETTLE) => Err(TeleportError::Failed(
                "timed out waiting for plans in flight".into(),
            )),
            _ => Ok(()),
        }
    }

    /// Has the matcher free the next segments, then frees their data.
    fn free_next(&self, trim: &mut Trimming) -> Result<Option<u64>, TeleportError> {
        trim.steps += 1;
        trim.link.submit(Event::Trim)?;
        match trim.link.collect_within(ANSWER)? {
            Answer::Freed(segments) => {
                // The matcher does not reuse them before the next request.
                self.sequences.free(&segments);
                Ok((trim.steps < MAX_STEPS).then_some(segments.len() as u64))
            }
            Answer::Done => Ok(None),
            _ => Err(wrong_answer()),
        }
    }

    /// Frees sequence data until `bytes` are available. Frees nothing when even all of it would not be enough, and
    /// stops where it does not help: on file systems where the data shares extents with the images.
    pub(crate) fn make_room(&self, bytes: u64) {
        let wanted = bytes.saturating_add(self.config.reserve_bytes);
        let Some(before) = self.available_bytes().filter(|b| *b < wanted) else {
            return;
        };
        match self.give_up_sequences(before, wanted) {
            Ok(0) => {}
            Ok(freed) => tracing::info!(freed, "freed sequence data to make space for an image"),
            Err(e) => {
                tracing::warn!(error = %e, "cannot free sequence data to make space for an image")
            }
        }
    }

    /// Frees sequence data so that `wanted` bytes are available instead of `before`; returns how many bytes were
    /// freed.
    fn give_up_sequences(&self, before: u64, wanted: u64) -> Result<u64, TeleportError> {
        let link = self.matching.link()?;
        let turn = self.trimmings.try_lock_for(TURN);
        let mut turn = turn.ok_or_else(|| {
            TeleportError::Failed("timed out waiting for another trimming of sequence data".into())
        })?;
        let (mut trim, used) = begin_trimming(link, &mut turn, u32::MAX, 0)?;
        // Do not trust the count of a remote teleporter: cap it at the configured size.
        let mut keep = u64::from(used).min(segments_of(self.config.sequence_data_bytes));
        let (mut freed, mut gained, mut asked) = (0, 0, MIN_ASKED);
        // A segment may be partly empty, so each pass asks for more segments.
        for _ in 0..PASSES {
            if before + gained >= wanted || (freed >= TRIAL && gained < freed / 4) {
                break;
            }
            let missing = (wanted - before - gained).div_ceil(SEGMENT_BYTES);
            if keep < missing {
                break;
            }
            asked = asked.max(missing);
            keep = keep.saturating_sub(asked);
            asked = asked.saturating_mul(2);
            let freed_before = freed;
            trim.begin(keep as u32, 0)?;
            loop {
                self.plans_taken(&trim)?;
                let Some(more) = self.free_next(&mut trim)? else {
                    break;
                };
                freed += more * SEGMENT_BYTES;
                let now = self.available_bytes().unwrap_or(0);
                gained = now.saturating_sub(before);
                if before + gained >= wanted || (freed >= TRIAL && gained < freed / 4) {
                    // End the trim: from now on the matcher may use all segments again.
                    trim.begin(u32::MAX, 0)?;
                    break;
                }
            }
            if freed == freed_before {
                break;
            }
        }
        Ok(freed)
    }

    /// Upper bound on the bytes of sequence data, by the matcher's segment count; `None` with a remote teleporter.
    #[cfg(any(fuzzing, feature = "testing"))]
    #[must_use]
    pub fn sequence_data_used(&self) -> Option<u64> {
        match &self.matching {
            Matching::Local(t) => Some(u64::from(t.lock().sequence_segments()) * SEGMENT_BYTES),
            Matching::Remote(_) => None,
        }
    }
}
