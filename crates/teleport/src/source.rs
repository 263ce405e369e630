//! The source's side of one image, without I/O: how far to walk, what to send, when it is done.

use drover_core::Digest;

use crate::codec::{Need, Runs, Want};
use crate::protocol::{Accept, BATCH_BLOCKS, Delivered, WINDOW_BATCHES};

mod gives;
#[cfg(test)]
mod tests;

pub use gives::{Gives, take_out};

/// Limit on requests per block, on average. Requesting again a block that did not arrive intact is legitimate;
/// requesting without end is not.
const MAX_ASKS_PER_BLOCK: u64 = 4;

/// Limit on blocks that are to go ahead of others, for each that was requested: once when it is likely to be read soon, once when
/// a machine waits for it, and that again when its batch is announced. What is beyond it comes in its turn.
const MAX_HURRIES_PER_ASK: u64 = 4;

/// Batches sent before the first acknowledgement, and before the image is accepted. Sending all digests at once would
/// delay the first blocks.
pub const FIRST_WINDOW: u64 = 8;

/// Batches by which each acknowledgement extends the window: enough that the data connections still have blocks to
/// send while the digests of a fully matching part are sent.
const WINDOW_STEP: u64 = 8;

/// Input events.
#[derive(Debug)]
pub enum Event {
    /// The destination accepts the image.
    Accepted(Accept),
    /// A batch of the walk has been read and hashed; batches come in order, from zero, up to [`FIRST_WINDOW`] of them
    /// before the image is accepted.
    Walked {
        /// Index of the batch.
        index: u64,
        /// The encoded batch.
        frame: Vec<u8>,
    },
    /// A batch of the walk, the next one, that the destination has.
    Skipped(u64),
    /// The walk is over; the digest, unless batches were skipped.
    WalkEnded(Option<Digest>),
    /// The destination requests blocks.
    Need(Need),
    /// The destination asks for blocks ahead of all others, announced or not.
    Want(Want),
    /// The destination asks for blocks that it has requested or wanted ahead of the others.
    Hurry(Want),
    /// A batch is complete at the destination.
    Ack(u64),
    /// The destination has delivered the image.
    Delivered(Delivered),
}

/// What the driver must do.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Continue the walk up to this batch (exclusive).
    WalkTo(u64),
    /// Send a batch frame.
    Batch(Vec<u8>),
    /// Tell that a batch is not sent.
    Skip(u64),
    /// Have the data connections send these blocks.
    Literals(Runs),
    /// Send these blocks ahead of everything.
    Give(Want),
    /// Of these blocks, send those ahead of everything that still wait to be sent.
    GiveQueued(Want),
    /// Send END; without a digest, END_UNREAD.
    End(Option<Digest>),
    /// The image was delivered.
    Done(Delivered),
}

/// The destination violated the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

impl From<Violation> for crate::TeleportError {
    fn from(v: Violation) -> Self {
        crate::TeleportError::Protocol(v.0)
    }
}

/// An outgoing image.
#[derive(Debug)]
pub struct Source {
    walk_blocks: u64,
    resume: Option<u64>,
    walked: u64,
    /// Acknowledged batches from `resume` on, beyond the first unacknowledged one.
    acked: std::collections::BTreeSet<u64>,
    oldest_unacked: u64,
    /// Number of batches before `resume` that are incomplete at the destination.
    open: u64,
    asked_blocks: u64,
    hurried_blocks: u64,
    /// Once the walk is over.
    end: Option<Option<Digest>>,
    done: bool,
}

impl Source {
    /// For an image of `walk_blocks` blocks that is about to be offered.
    #[must_use]
    pub fn new(walk_blocks: u64) -> Self {
        Source {
            walk_blocks,
            resume: None,
            walked: 0,
            acked: std::collections::BTreeSet::new(),
            oldest_unacked: 0,
            open: 0,
            asked_blocks: 0,
            hurried_blocks: 0,
            end: None,
            done: false,
        }
    }

    fn batches(&self) -> u64 {
        self.walk_blocks.div_ceil(BATCH_BLOCKS)
    }

    /// Whether the destination has accepted the image.
    #[must_use]
    pub fn is_accepted(&self) -> bool {
        self.resume.is_some()
    }

    /// Blocks of the walk in batches known to be complete at the destination.
    #[must_use]
    pub fn done_blocks(&self) -> u64 {
        let done = self.oldest_unacked + self.acked.len() as u64;
        let done = done.saturating_sub(self.open);
        (done * BATCH_BLOCKS).min(self.walk_blocks)
    }

    /// Handles an event; appends the resulting actions to `actions`.
    ///
    /// # Errors
    /// When the destination violated the protocol: the session must end.
    pub fn handle(&mut self, event: Event, actions: &mut Vec<Action>) -> Result<(), Violation> {
        match event {
            Event::Accepted(accept) => {
                if self.resume.is_some() || accept.resume_batch > self.batches() {
                    return Err(Violation("the destination resumes beyond the image".into()));
                }
                self.resume = Some(accept.resume_batch);
                self.oldest_unacked = accept.resume_batch;
                self.open = accept.open_batches.min(accept.resume_batch);
                actions.push(self.window());
            }
            Event::Walked { index, frame } => {
                debug_assert_eq!(index, self.walked);
                self.walked = index + 1;
                if self.resume.is_none_or(|r| index >= r) {
                    actions.push(Action::Batch(frame));
                }
            }
            Event::Need(_)
            | Event::Want(_)
            | Event::Hurry(_)
            | Event::Ack(_)
            | Event::Delivered(_)
                if self.resume.is_none() =>
            {
                return Err(Violation(
                    "the destination refers to an image that it has not accepted".into(),
                ));
            }
            Event::Skipped(index) => {
                debug_assert_eq!(index, self.walked);
                self.walked = index + 1;
                if self.resume.is_some_and(|r| index >= r) {
                    actions.push(Action::Skip(index));
                }
            }
            Event::WalkEnded(digest) => {
                self.end = Some(digest);
                actions.push(Action::End(digest));
            }
            Event::Need(need) => self.on_need(need, actions)?,
            Event::Want(want) => {
                self.count(&want.runs, self.walk_blocks)?;
                actions.push(Action::Give(want));
            }
            Event::Hurry(hurry) => {
                let hurried = self.hurried_blocks + hurry.runs.count();
                // Destinations of before repeat it, so it is no violation.
                if hurried <= self.asked_blocks.saturating_mul(MAX_HURRIES_PER_ASK) {
                    self.hurried_blocks = hurried;
                    actions.push(Action::GiveQueued(hurry));
                }
            }
            Event::Ack(index) => self.on_ack(index, actions)?,
            Event::Delivered(delivered) => self.on_delivered(delivered, actions)?,
        }
        Ok(())
    }

    fn window(&self) -> Action {
        let done = self.oldest_unacked - self.resume.unwrap_or(0) + self.acked.len() as u64;
        let window = (FIRST_WINDOW + WINDOW_STEP * done).min(WINDOW_BATCHES);
        Action::WalkTo((self.oldest_unacked + window).min(self.batches()))
    }

    /// Blocks in batches that the destination has: those it resumed with, and those walked and sent.
    fn known_blocks(&self) -> u64 {
        let batches = self.walked.max(self.resume.unwrap_or(0));
        (batches * BATCH_BLOCKS).min(self.walk_blocks)
    }

    fn on_need(&mut self, need: Need, actions: &mut Vec<Action>) -> Result<(), Violation> {
        self.count(&need.runs, self.known_blocks())?;
        actions.push(Action::Literals(need.runs));
        Ok(())
    }

    /// Counts requested blocks, of which there are so many to request.
    fn count(&mut self, runs: &Runs, known: u64) -> Result<(), Violation> {
        let end = runs.iter().last().map_or(0, |(f, n)| f + n);
        if end > known {
            return Err(Violation(format!(
                "the destination requested block {end}, which was not announced yet"
            )));
        }
        self.asked_blocks += runs.count();
        if self.asked_blocks > self.walk_blocks.saturating_mul(MAX_ASKS_PER_BLOCK) {
            return Err(Violation(
                "the destination requested the same blocks too often".into(),
            ));
        }
        Ok(())
    }

    fn on_ack(&mut self, index: u64, actions: &mut Vec<Action>) -> Result<(), Violation> {
        if self.resume.is_some_and(|r| index < r) {
            // A batch of an earlier session has become complete.
            self.open = self.open.saturating_sub(1);
            return Ok(());
        }
        if index >= self.walked || index < self.oldest_unacked || !self.acked.insert(index) {
            return Err(Violation(format!(
                "the destination acknowledges batch {index} out of turn"
            )));
        }
        while self.acked.remove(&self.oldest_unacked) {
            self.oldest_unacked += 1;
        }
        actions.push(self.window());
        Ok(())
    }

    fn on_delivered(
        &mut self,
        delivered: Delivered,
        actions: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let ready = !self.done && self.oldest_unacked == self.batches();
        let Some(digest) = self.end.filter(|_| ready) else {
            return Err(Violation(
                "the destination reported delivery of an image that is not complete".into(),
            ));
        };
        if digest.is_some_and(|digest| digest != delivered.digest) {
            return Err(Violation(
                "the destination delivered an image with another digest".into(),
            ));
        }
        self.done = true;
        actions.push(Action::Done(delivered));
        Ok(())
    }
}
