//! The teleporter: matches the digests of images in transit to one destination. It holds the caches and hash files
//! and never sees block data.
//!
//! Each event gets one answer. In a destination's site it is called directly; on a third machine a session carries
//! the same events and answers.

use std::collections::HashMap;

use drover_index::{
    Cursor, DeferredSync, Finishing, ImageId, IndexError, Matcher, MatcherStats, Plan, Probe, Trim,
    Trimmed,
};
use serde::{Deserialize, Serialize};

use crate::codec::Batch;

/// Maximum number of images in transit to one destination at once.
const MAX_CURSORS: usize = 256;

/// A request of a destination to its teleporter.
#[derive(Debug)]
pub enum Event {
    /// A change in the state of an image.
    Image(ImageId, ImageEvent),
    /// Match a batch of an image in transit, and record it.
    Match(ImageId, std::sync::Arc<Batch>),
    /// Record a batch without matching it: the destination has its blocks.
    Record(ImageId, std::sync::Arc<Batch>),
    /// List the complete images that have hash files.
    List,
    /// Report which data blocks of a batch would be matched now; nothing is recorded. The batches of an image come in
    /// order, from number 0 on, and one image at a time.
    Probe(std::sync::Arc<Batch>),
    /// Begin to trim the sequence cache to `keep` segments; empty ones among the first `have` are freed again.
    /// Cancels any trim in progress.
    BeginTrim {
        /// Number of segments to keep.
        keep: u32,
        /// Number of segments in the destination's data file.
        have: u32,
    },
    /// Continue the trim. Confirms that the data of the segments in the last answer was freed, and that the plans in
    /// flight at that time were applied.
    Trim,
}

impl Event {
    /// Number of data blocks that the event covers.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        match self {
            Event::Match(_, batch) | Event::Record(_, batch) | Event::Probe(batch) => {
                batch.digests.len() as u64
            }
            Event::Image(..) | Event::List | Event::BeginTrim { .. } | Event::Trim => 0,
        }
    }
}

/// Events in the life of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageEvent {
    /// Its transfer starts.
    Begin,
    /// It has been delivered, or its transfer has stopped: the blocks received can be reused.
    Finish,
    /// Its transfer was aborted.
    Abort,
    /// Its file was removed.
    Forget,
    /// Another image was removed: enter this one's heads into the caches again.
    Reindex,
    /// It is probably similar to the one that comes next: enter its heads into the caches, in the place of those of another.
    Recall,
}

/// The reply of a teleporter to an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// To [`Event::Match`].
    Plan(Plan),
    /// To [`Event::List`].
    Images(Vec<ImageId>),
    /// To [`Event::Probe`]: whether each data block would be matched.
    Known(Vec<bool>),
    /// To [`Event::BeginTrim`]: how many segments are in use.
    Holding(u32),
    /// To [`Event::Trim`], while there is more to do: these segments, possibly none, are now empty, and nothing is
    /// stored in them before the next request.
    Freed(Vec<u32>),
    /// To everything else, and to [`Event::Trim`] when there is no more to do.
    Done,
}

/// Why an event failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The destination violated the protocol.
    #[error("{0}")]
    Violation(&'static str),
    /// The matcher's files failed.
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// The matcher of one destination and the images in transit to it.
pub struct Teleporter {
    matcher: Matcher,
    cursors: HashMap<ImageId, Cursor>,
    trimming: Option<Trim>,
}

impl std::fmt::Debug for Teleporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Teleporter")
            .field("in_transit", &self.cursors.len())
            .finish_non_exhaustive()
    }
}

impl Teleporter {
    /// Wraps a matcher.
    #[must_use]
    pub fn new(matcher: Matcher) -> Self {
        Teleporter {
            matcher,
            cursors: HashMap::new(),
            trimming: None,
        }
    }

    /// The matcher's statistics so far.
    #[must_use]
    pub fn stats(&self) -> MatcherStats {
        self.matcher.stats()
    }

    /// Images that have hash files.
    #[must_use]
    pub fn images(&self) -> Vec<ImageId> {
        self.matcher.images().into_iter().map(|i| i.image).collect()
    }

    /// Those of them that have ended: each is complete, or its transfer has stopped.
    #[must_use]
    pub fn whole_images(&self) -> Vec<ImageId> {
        let all = self.matcher.images().into_iter();
        all.filter(|i| i.complete).map(|i| i.image).collect()
    }

    /// Damage found since the last call, one line each.
    pub fn take_repairs(&mut self) -> Vec<String> {
        self.matcher
            .take_repairs()
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    /// Saves the caches so that the next start need not rebuild them.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub fn persist(&mut self) -> Result<(), Failure> {
        Ok(self.matcher.persist()?)
    }

    /// Segments of the sequence cache in use.
    #[must_use]
    pub fn sequence_segments(&self) -> u32 {
        self.matcher.sequence_segments()
    }

    /// One step of the trim in progress; reports the end when there is none.
    pub fn trim(&mut self) -> Trimmed {
        let trimming = self.trimming.as_mut();
        let step = trimming.map_or(Trimmed::Done, |t| self.matcher.trim(t));
        if step == Trimmed::Done {
            self.trimming = None;
        }
        step
    }

    /// Which data blocks of the batch would be matched now; nothing is recorded. `probe` keeps the position between
    /// the batches of one image.
    ///
    /// # Errors
    /// When the files cannot be read.
    pub fn probe(&mut self, probe: &mut Probe, batch: &Batch) -> Result<Vec<bool>, Failure> {
        Ok(self.matcher.probe(probe, &batch.digests, &batch.heads)?)
    }

    /// The first of the three steps of `ImageEvent::Finish`, described at [`Matcher::begin_finish`]. They are
    /// separate so that others need not wait during disk syncs.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn begin_finish(&mut self, image: ImageId) -> Result<Finishing, Failure> {
        let cursor = self.cursors.remove(&image);
        let cursor = cursor.ok_or(Failure::Violation("finish without begin"))?;
        Ok(self.matcher.begin_finish(cursor)?)
    }

    /// The second step, once the output of the first is synced.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn mark_complete(&mut self, finishing: &mut Finishing) -> Result<(), Failure> {
        Ok(self.matcher.mark_complete(finishing)?)
    }

    /// The last step, once the second is synced.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn end_finish(&mut self, finishing: Finishing) -> Result<(), Failure> {
        Ok(self.matcher.end_finish(finishing)?)
    }

    /// `ImageEvent::Forget`, durable once the returned sync has run.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn begin_forget(&mut self, image: ImageId) -> Result<Option<DeferredSync>, Failure> {
        Ok(self.matcher.begin_forget(image)?)
    }

    /// `ImageEvent::Abort`: its disk space is freed when the returned value is dropped, which may take long.
    pub fn begin_abort(&mut self, image: ImageId) -> Option<DeferredSync> {
        let cursor = self.cursors.remove(&image)?;
        self.matcher.begin_abort(cursor)
    }

    /// Handles an event.
    ///
    /// # Errors
    /// A violation when the event is invalid in the current state, else the matcher's error.
    pub fn handle(&mut self, event: Event) -> Result<Answer, Failure> {
        match event {
            Event::Image(image, ImageEvent::Begin) => {
                if self.cursors.len() >= MAX_CURSORS {
                    return Err(Failure::Violation("too many images in transit"));
                }
                // It may still be in transit, or being finished (syncing) for a connection that is gone.
                self.cursors.remove(&image);
                self.matcher.begin_forget(image)?;
                let cursor = self.matcher.begin(image)?;
                self.cursors.insert(image, cursor);
            }
            Event::Image(image, ImageEvent::Finish) => {
                let cursor = self.cursors.remove(&image);
                let cursor = cursor.ok_or(Failure::Violation("finish without begin"))?;
                self.matcher.finish(cursor)?;
            }
            Event::Image(image, ImageEvent::Abort) => {
                drop(self.begin_abort(image));
            }
            Event::Image(image, ImageEvent::Forget) => self.matcher.forget(image)?,
            Event::Image(image, ImageEvent::Reindex) => self.matcher.reindex(image)?,
            Event::Image(image, ImageEvent::Recall) => self.matcher.recall(image)?,
            Event::Record(image, batch) => {
                let cursor = self.cursors.get_mut(&image);
                let cursor = cursor.ok_or(Failure::Violation("record without begin"))?;
                self.matcher.record(cursor, &batch.digests, &batch.heads)?;
            }
            Event::BeginTrim { keep, have } => {
                self.trimming = Some(self.matcher.begin_trim(keep, have));
                return Ok(Answer::Holding(self.sequence_segments()));
            }
            Event::Trim => match self.trim() {
                Trimmed::Looked => return Ok(Answer::Freed(Vec::new())),
                Trimmed::Freed(segments) => return Ok(Answer::Freed(segments)),
                Trimmed::Done => {}
            },
            Event::List => return Ok(Answer::Images(self.whole_images())),
            Event::Probe(batch) => {
                let known = self.probe(&mut Probe::default(), &batch)?;
                return Ok(Answer::Known(known));
            }
            Event::Match(image, batch) => {
                let cursor = self.cursors.get_mut(&image);
                let cursor = cursor.ok_or(Failure::Violation("batch without begin"))?;
                return Ok(Answer::Plan(self.matcher.batch(
                    cursor,
                    &batch.digests,
                    &batch.heads,
                )?));
            }
        }
        Ok(Answer::Done)
    }
}
