//! Sends events to a teleporter and receives its answers in order, in this process or over a connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use drover_index::{ImageId, Trimmed};
use drover_net::Frame;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;

use super::wire::{decode_answer, encode_event};
use crate::TeleportError;
use crate::protocol::kind;
use crate::teleporter::{Answer, Event, Failure, ImageEvent, Teleporter};

/// Maximum number of trim steps answered together while they only examine images.
const LOOKS: usize = 64;

/// The teleporter inside a site.
pub type LocalTeleporter = Arc<Mutex<Teleporter>>;

/// Submits events and collects their answers in the same order.
pub enum Link {
    /// Answers immediately.
    Local(LocalTeleporter, VecDeque<Answer>),
    /// Answers after a round trip.
    Remote(RemoteLink),
}

/// A connection to a remote teleporter, with the number of data blocks that each pending answer covers.
pub struct RemoteLink {
    /// Outgoing frames.
    pub to: mpsc::Sender<Frame>,
    /// Incoming frames.
    pub from: mpsc::Receiver<Result<Frame, TeleportError>>,
    /// Data blocks of each event whose answer is pending.
    pub waiting: VecDeque<u64>,
}

impl Link {
    /// Maximum number of events in flight.
    #[must_use]
    pub fn depth(&self) -> usize {
        match self {
            Link::Local(..) => 1,
            Link::Remote(_) => 64,
        }
    }

    /// Submits an event.
    ///
    /// # Errors
    /// When the teleporter fails or is gone.
    pub fn submit(&mut self, event: Event) -> Result<(), TeleportError> {
        self.submit_then(event, |_| {})
    }

    /// Submits an event and waits for its answer; no other may be pending.
    ///
    /// # Errors
    /// When the teleporter fails or is gone.
    pub fn ask(&mut self, event: Event) -> Result<Answer, TeleportError> {
        self.submit(event)?;
        self.collect()
    }

    /// Submits an event. A teleporter in this process calls `then` with the answer before it handles any other event.
    ///
    /// # Errors
    /// When the teleporter fails or is gone.
    pub fn submit_then(
        &mut self,
        event: Event,
        then: impl FnOnce(&Answer),
    ) -> Result<(), TeleportError> {
        match self {
            Link::Local(teleporter, answers) => {
                answers.push_back(handle_then(teleporter, event, then)?);
            }
            Link::Remote(link) => {
                link.waiting.push_back(event.blocks());
                let frame = Frame::new(kind::MATCH, encode_event(&event));
                link.to.blocking_send(frame).map_err(|_| gone())?;
            }
        }
        Ok(())
    }

    /// Closes the link and aborts the image begun on it, which would otherwise keep its slot at the teleporter.
    pub fn give_up(self, image: ImageId) {
        match self {
            Link::Local(teleporter, _) => {
                // It cannot fail; and if it did, there would be nothing else to do.
                let _ = handle(&teleporter, Event::Image(image, ImageEvent::Abort));
            }
            // A remote teleporter aborts unfinished images when their connection ends.
            Link::Remote(_) => {}
        }
    }

    /// Waits for the answer to the oldest pending event.
    ///
    /// # Errors
    /// When the teleporter fails or is gone.
    pub fn collect(&mut self) -> Result<Answer, TeleportError> {
        match self {
            Link::Local(_, answers) => answers.pop_front().ok_or_else(gone),
            Link::Remote(link) => {
                let frame = link.from.blocking_recv();
                link.answered(frame)
            }
        }
    }

    /// Like [`collect`](Self::collect), with a timeout; after a timeout the link must not be used again.
    ///
    /// # Errors
    /// When the teleporter fails, is gone, or the timeout expires.
    pub(crate) fn collect_within(&mut self, at_most: Duration) -> Result<Answer, TeleportError> {
        let Link::Remote(link) = self else {
            return self.collect();
        };
        let until = Instant::now() + at_most;
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(frame) = link.from.poll_recv(&mut context) {
                return link.answered(frame);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TeleportError::Timeout("teleporter"));
            }
            std::thread::park_timeout(left);
        }
    }
}

/// Wakes a thread that waits for a frame.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl RemoteLink {
    /// Decodes the answer to the oldest pending event; `None` when the connection has ended.
    fn answered(
        &mut self,
        frame: Option<Result<Frame, TeleportError>>,
    ) -> Result<Answer, TeleportError> {
        let frame = frame.ok_or_else(gone)??;
        let blocks = self.waiting.pop_front().unwrap_or(0);
        if frame.kind != kind::PLAN {
            return Err(TeleportError::Protocol(
                "expected a reply of the teleporter".into(),
            ));
        }
        decode_answer(&frame.payload, blocks)?
            .map_err(|refusal| TeleportError::Teleporter(refusal.tidy()))
    }
}

/// The teleporter sent an answer of the wrong type.
pub(crate) fn wrong_answer() -> TeleportError {
    TeleportError::Protocol("the teleporter sent a reply of the wrong kind".into())
}

fn gone() -> TeleportError {
    TeleportError::Lost("teleporter")
}

/// Handles an event at the local teleporter. Its lock is not held during disk syncs, so others do not wait for them.
///
/// # Errors
/// Those of the teleporter.
pub fn handle(teleporter: &Mutex<Teleporter>, event: Event) -> Result<Answer, TeleportError> {
    handle_then(teleporter, event, |_| {})
}

fn handle_then(
    teleporter: &Mutex<Teleporter>,
    event: Event,
    then: impl FnOnce(&Answer),
) -> Result<Answer, TeleportError> {
    let answer = match event {
        Event::Image(image, ImageEvent::Finish) => {
            let mut finishing = held(teleporter, |t| t.begin_finish(image))?;
            finishing.sync();
            held(teleporter, |t| t.mark_complete(&mut finishing))?;
            finishing.sync();
            held(teleporter, |t| t.end_finish(finishing))?;
            Answer::Done
        }
        Event::Image(image, ImageEvent::Forget) => {
            if let Some(sync) = held(teleporter, |t| t.begin_forget(image))? {
                // If the sync fails, a file that reappears after a power loss is discarded when the site opens.
                let _ = sync();
            }
            Answer::Done
        }
        Event::Image(image, ImageEvent::Abort) => {
            // Dropped here, outside the lock, because it may take long.
            drop(held(teleporter, |t| Ok(t.begin_abort(image)))?);
            Answer::Done
        }
        Event::Trim => return Ok(trim_then(teleporter, then)),
        event => {
            return held(teleporter, |t| {
                let answer = t.handle(event)?;
                then(&answer);
                Ok(answer)
            });
        }
    };
    then(&answer);
    Ok(answer)
}

/// Runs either several trim steps that only examine images, releasing the lock between them so that others can match,
/// or one step that frees segments, before each of which the destination must be asked.
fn trim_then(teleporter: &Mutex<Teleporter>, then: impl FnOnce(&Answer)) -> Answer {
    for _ in 0..LOOKS {
        let mut teleporter = teleporter.lock();
        let answer = match teleporter.trim() {
            Trimmed::Looked => {
                MutexGuard::unlock_fair(teleporter);
                continue;
            }
            Trimmed::Freed(segments) => Answer::Freed(segments),
            Trimmed::Done => Answer::Done,
        };
        then(&answer);
        return answer;
    }
    Answer::Freed(Vec::new())
}

/// Calls a function with exclusive access to the teleporter.
fn held<T>(
    teleporter: &Mutex<Teleporter>,
    what: impl FnOnce(&mut Teleporter) -> Result<T, Failure>,
) -> Result<T, TeleportError> {
    let mut teleporter = teleporter.lock();
    let done = what(&mut teleporter);
    for repair in teleporter.take_repairs() {
        tracing::warn!(repair, "the matcher's files were damaged");
    }
    Ok(done?)
}

#[cfg(test)]
mod held_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matching::encode_answer;

    #[test]
    fn an_answer_is_waited_for_so_long_at_most() {
        let ((to, _events), (answers, from)) = (mpsc::channel(4), mpsc::channel(4));
        let mut link = Link::Remote(RemoteLink {
            to,
            from,
            waiting: VecDeque::new(),
        });
        link.submit(Event::Trim).unwrap();
        let late = link.collect_within(Duration::from_millis(20)).unwrap_err();
        assert!(late.to_string().contains("too long"), "{late}");
        let answering = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let frame = Frame::new(kind::PLAN, encode_answer(&Ok(Answer::Done)));
            answers.blocking_send(Ok(frame)).unwrap();
        });
        let long = Duration::from_secs(60);
        assert_eq!(link.collect_within(long).unwrap(), Answer::Done);
        answering.join().unwrap();
        let gone = link.collect_within(long).unwrap_err();
        assert!(gone.to_string().contains("was lost"), "{gone}");
    }
}
