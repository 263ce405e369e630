//! The teleporter: matches the digests of the images on their way to one destination. It holds
//! the caches and hash files and never sees a block.
//!
//! Events in, one answer out. In a destination's site it is called directly; alone on a third
//! machine a session carries the same events and answers.

use std::collections::HashMap;

use drover_index::{
    Cursor, DeferredSync, Finishing, ImageId, IndexError, Matcher, MatcherStats, Plan, Probe, Trim,
    Trimmed,
};
use serde::{Deserialize, Serialize};

use crate::codec::Batch;

/// Images that may be in transit to one destination at once.
const MAX_CURSORS: usize = 256;

/// A request of a destination to its teleporter.
#[derive(Debug)]
pub enum Event {
    /// About an image.
    Image(ImageId, ImageEvent),
    /// Match a batch of an image in transit, and remember it.
    Match(ImageId, std::sync::Arc<Batch>),
    /// Remember a batch without matching it: the destination has its blocks.
    Record(ImageId, std::sync::Arc<Batch>),
    /// Say which whole images there are hash files of.
    List,
    /// Say which data blocks of a batch would be matched now; nothing is remembered. The batches of
    /// an image come in order, from number 0 on, and one image at a time.
    Probe(std::sync::Arc<Batch>),
    /// Begin to bring the sequence cache down to `keep` segments; of the first `have` those that hold nothing are freed
    /// again. Ends the trimming before, if one is under way.
    BeginTrim {
        /// Segments that stay.
        keep: u32,
        /// Segments of the destination's data file.
        have: u32,
    },
    /// Go on with the trimming. What the last answer freed has been given back, and the plans that were under way when it
    /// came have been taken over.
    Trim,
}

impl Event {
    /// The data blocks that it is about.
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

/// What happens to an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageEvent {
    /// It is on its way.
    Begin,
    /// It has been delivered, or its transfer has stopped: what came of it is a source of blocks.
    Finish,
    /// It will not come.
    Abort,
    /// Its file is gone.
    Forget,
    /// Another image is gone: put this one's heads into the caches again.
    Reindex,
}

/// The reply of a teleporter to an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// To [`Event::Match`].
    Plan(Plan),
    /// To [`Event::List`].
    Images(Vec<ImageId>),
    /// To [`Event::Probe`]: for each data block whether it would be matched.
    Known(Vec<bool>),
    /// To [`Event::BeginTrim`]: how many segments hold something.
    Holding(u32),
    /// To [`Event::Trim`], while there is more to do: these segments, perhaps none, hold nothing now, and nothing is stored
    /// there before the next.
    Freed(Vec<u32>),
    /// To everything else, and to [`Event::Trim`] when there is no more to do.
    Done,
}

/// What cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The destination broke the rules.
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
    /// Around a matcher.
    #[must_use]
    pub fn new(matcher: Matcher) -> Self {
        Teleporter {
            matcher,
            cursors: HashMap::new(),
            trimming: None,
        }
    }

    /// What the matcher has done so far.
    #[must_use]
    pub fn stats(&self) -> MatcherStats {
        self.matcher.stats()
    }

    /// Images the matcher has hash files of.
    #[must_use]
    pub fn images(&self) -> Vec<ImageId> {
        self.matcher.images().into_iter().map(|i| i.image).collect()
    }

    /// Those of them that have ended: each is whole, or its transfer has stopped.
    #[must_use]
    pub fn whole_images(&self) -> Vec<ImageId> {
        let all = self.matcher.images().into_iter();
        all.filter(|i| i.complete).map(|i| i.image).collect()
    }

    /// What was found damaged since the last call, a line each.
    pub fn take_repairs(&mut self) -> Vec<String> {
        self.matcher
            .take_repairs()
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    /// Writes the caches down so that the next start need not rebuild them.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub fn persist(&mut self) -> Result<(), Failure> {
        Ok(self.matcher.persist()?)
    }

    /// Segments of the sequence cache that hold something.
    #[must_use]
    pub fn sequence_segments(&self) -> u32 {
        self.matcher.sequence_segments()
    }

    /// One step of the trimming that is under way; the end, when none is.
    pub fn trim(&mut self) -> Trimmed {
        let trimming = self.trimming.as_mut();
        let step = trimming.map_or(Trimmed::Done, |t| self.matcher.trim(t));
        if step == Trimmed::Done {
            self.trimming = None;
        }
        step
    }

    /// Which data blocks of the batch would be matched now; nothing is remembered. `probe` goes
    /// from batch to batch of one image.
    ///
    /// # Errors
    /// When the files cannot be read.
    pub fn probe(&mut self, probe: &mut Probe, batch: &Batch) -> Result<Vec<bool>, Failure> {
        Ok(self.matcher.probe(probe, &batch.digests, &batch.heads)?)
    }

    /// The first step of [`ImageEvent::Finish`], which has three, as [`Matcher::begin_finish`] says: so that others need not
    /// wait while the disk syncs.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn begin_finish(&mut self, image: ImageId) -> Result<Finishing, Failure> {
        let cursor = self.cursors.remove(&image);
        let cursor = cursor.ok_or(Failure::Violation("finish without begin"))?;
        Ok(self.matcher.begin_finish(cursor)?)
    }

    /// The second, once what the first wrote is synced.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn mark_complete(&mut self, finishing: &mut Finishing) -> Result<(), Failure> {
        Ok(self.matcher.mark_complete(finishing)?)
    }

    /// The last, once that is synced.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn end_finish(&mut self, finishing: Finishing) -> Result<(), Failure> {
        Ok(self.matcher.end_finish(finishing)?)
    }

    /// [`ImageEvent::Forget`], durable once what is returned has run.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn begin_forget(&mut self, image: ImageId) -> Result<Option<DeferredSync>, Failure> {
        Ok(self.matcher.begin_forget(image)?)
    }

    /// [`ImageEvent::Abort`]: its room is given back once what is returned is dropped, which may take long.
    pub fn begin_abort(&mut self, image: ImageId) -> Option<DeferredSync> {
        let cursor = self.cursors.remove(&image)?;
        self.matcher.begin_abort(cursor)
    }

    /// Takes an event in.
    ///
    /// # Errors
    /// [`Failure::Violation`] when the event makes no sense now, else what the matcher reports.
    pub fn handle(&mut self, event: Event) -> Result<Answer, Failure> {
        match event {
            Event::Image(image, ImageEvent::Begin) => {
                if self.cursors.len() >= MAX_CURSORS {
                    return Err(Failure::Violation("too many images in transit"));
                }
                // It may be on its way, or at its end still, while the disk syncs for a connection that is gone.
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
