//! Replies of the site: validated, and passed to the requesters.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use drover_core::DeviceError;
use drover_device::remote::{Chunks, Epoch, PresenceDone, Staged};
use drover_net::{Code, Frame, Refusal};

use super::backlog::ChunksTask;
use super::inner::{Inner, ReplyTo};
use super::presence::Pages;
use super::scheduler::{ChunksReply, Job};
use crate::protocol::{MAX_RUNS, Reply, Request, decode_message, device_error, kind, pieces};

impl Inner {
    /// Handles a frame.
    pub fn take(self: &Arc<Self>, connection: usize, frame: Frame) -> Result<(), Refusal> {
        if frame.kind != kind::REPLY {
            return Err(Refusal::new(Code::Protocol, "a frame that is not a reply"));
        }
        let wire = frame.payload.len() as u64;
        let message = decode_message::<Reply>(&frame.payload)?;
        let now = self.now();
        if let Reply::Chunks {
            id,
            first,
            count,
            zeros,
            coding,
            echo,
            last,
        } = message.head
        {
            let about = ChunksReply {
                id,
                first,
                count,
                wire,
                echo,
                last,
            };
            // Validated before use. Replies waiting for verification take no more memory than what was requested.
            let shape = self.opened.shape();
            let (_, length) = pieces(shape, first, count, &zeros)?;
            if message.body.len() > length {
                return Err(Refusal::new(
                    Code::Protocol,
                    "chunks whose body is longer than their data",
                ));
            }
            let mut state = self.state.lock();
            let background = state.scheduler.is_background(id);
            state.scheduler.received(connection, wire);
            let taken = state.scheduler.chunks(connection, &about, now)?;
            state.credit(now);
            if let Some(taken) = taken {
                let task = ChunksTask {
                    first,
                    count,
                    zeros,
                    coding,
                    body: message.body,
                    again: taken.again,
                };
                // Under the lock, so that a later requester finds them.
                self.completions.chunks(task, background);
            }
            // The threads may be held up by their disk while the link has room.
            let room = state.scheduler.room().is_some();
            drop(state);
            if room && !self.pumping.swap(true, Ordering::AcqRel) {
                let inner = self.clone();
                self.completions.call(move || {
                    inner.pumping.store(false, Ordering::Release);
                    inner.pump();
                });
            }
            return Ok(());
        }
        {
            let mut state = self.state.lock();
            state.scheduler.received(connection, wire);
            state.credit(now);
            if let Reply::Arrived { bytes, at } = message.head {
                state.scheduler.arrived(connection, bytes, at, now)?;
                drop(state);
                self.issue();
                return Ok(());
            }
        }
        if let Reply::Error { id: 0, refusal } = message.head {
            if !refusal.retry {
                // Concerns the whole connection: the mount will not be served any more.
                let error = device_error(refusal.tidy(), 0, 0, self.opened.size);
                self.end(error);
                return Ok(());
            }
            return Err(refusal);
        }
        let ended = {
            let mut state = self.state.lock();
            let ended = state.scheduler.end(connection, message.head.id(), now)?;
            if let Some((job, _)) = &ended
                && matches!(job.request, Request::Write { .. } | Request::Zero { .. })
            {
                state.scheduler.pushed(now + self.options.give_up);
            }
            if let (Some((job, _)), Reply::Done { .. }) = (&ended, &message.head) {
                state.scheduler.done(job, now);
            }
            ended
        };
        if let Some((job, _)) = &ended
            && job.repeats
        {
            self.repeated(message.head)?;
        } else if let Some((job, runs)) = ended {
            self.answered(job, &runs, message.head, message.body);
        }
        self.issue();
        Ok(())
    }

    /// The reply to a change that the site may have forgotten. Nothing else is sent before it is made again: the next
    /// link begins anew with all of them.
    fn repeated(&self, head: Reply) -> Result<(), Refusal> {
        match head {
            Reply::Done { .. } => Ok(()),
            // The site is there, but not its disk, say.
            Reply::Error { refusal, .. }
                if refusal.retry && matches!(refusal.code, Code::Unavailable | Code::Busy) =>
            {
                Err(refusal)
            }
            Reply::Error { refusal, .. } => {
                let why = refusal.tidy().message;
                let text = format!(
                    "the link was lost before a flush, and the site refuses writes that it had accepted: {why}; unmount it and mount it again"
                );
                let image = self.options.image.as_str();
                tracing::error!(image, "{text}");
                self.end(DeviceError::Io(Arc::new(std::io::Error::other(text))));
                Ok(())
            }
            _ => Err(Refusal::new(Code::Protocol, "the wrong kind of reply")),
        }
    }

    fn answered(self: &Arc<Self>, job: Job<ReplyTo>, runs: &[Chunks], head: Reply, body: Bytes) {
        if body.len() > most_body(&job.request) {
            let text = "the site sent a longer reply than was requested";
            self.fail(job, runs, &DeviceError::Corrupt(text.into()));
            return;
        }
        if let Reply::Error { refusal, .. } = head {
            // With its text truncated to the length that this side would write.
            let refusal = refusal.tidy();
            let (offset, length) = range(&job.request, self.opened.chunk);
            let error = device_error(refusal, offset, length, self.opened.size);
            self.fail(job, runs, &error);
            return;
        }
        let fits = match (&job.to, &head) {
            (ReplyTo::Direct(_), _) => true,
            (ReplyTo::Presence(..), Reply::Presence { .. }) => true,
            (ReplyTo::Staged(_), Reply::Staged { runs, end, .. }) => {
                are_runs(runs, *end, self.opened.size)
            }
            (ReplyTo::Done(_), Reply::Committed { epoch, .. }) if matches!(job.request, Request::Commit { epoch: asked, .. } if asked == *epoch) =>
            {
                self.committed.fetch_max(*epoch, Ordering::AcqRel);
                true
            }
            (ReplyTo::Done(_), Reply::Done { .. }) => {
                if matches!(job.request, Request::Close { .. }) {
                    self.released.store(true, Ordering::Release);
                }
                !matches!(job.request, Request::Commit { .. })
            }
            _ => false,
        };
        if !fits {
            let error = DeviceError::Corrupt("the site sent the wrong kind of reply".into());
            self.fail(job, runs, &error);
            return;
        }
        match (job.to, head) {
            (ReplyTo::Direct(say), head) => {
                let _ = say.send(Ok((head, body)));
            }
            (ReplyTo::Done(done), _) => self.completions.call(move || done(Ok(()))),
            (
                ReplyTo::Staged(done),
                Reply::Staged {
                    epoch, runs, end, ..
                },
            ) => {
                let staged = Staged {
                    epoch: Epoch(epoch),
                    runs,
                    end,
                };
                self.completions.call(move || done(Ok(staged)));
            }
            (ReplyTo::Presence(done, pages), Reply::Presence { runs, end, .. }) => {
                self.presence_page(done, pages, &runs, end);
            }
            _ => {}
        }
    }

    /// A page of a presence reply: requests the next, or completes the query.
    fn presence_page(
        self: &Arc<Self>,
        done: PresenceDone,
        mut pages: Pages,
        runs: &[(u64, u32)],
        end: u64,
    ) {
        let Some(rest) = pages.page(runs, end) else {
            self.completions.call(move || done(Ok(pages.found())));
            return;
        };
        let request = Request::Presence {
            id: 0,
            first: rest.first,
            count: rest.count,
        };
        self.send_request(request, Bytes::new(), ReplyTo::Presence(done, pages));
    }
}

/// The longest body allowed in the reply to a request: compressed it is shorter. ([`Request::Read`] is checked
/// separately.)
fn most_body(request: &Request) -> usize {
    match request {
        Request::DirectRead { length, .. } => *length as usize,
        _ => 0,
    }
}

/// Whether the runs of a reply are valid: in order, disjoint, up to `end`, inside the device.
fn are_runs(runs: &[(u64, u64)], end: u64, size: u64) -> bool {
    let mut at = 0;
    runs.len() <= MAX_RUNS
        && end <= size
        && runs.iter().all(|(offset, length)| {
            let fine = *offset >= at && *length > 0;
            at = offset.saturating_add(*length);
            fine && at <= end
        })
}

/// The byte range of a request.
fn range(request: &Request, chunk: u32) -> (u64, u64) {
    match *request {
        Request::Read { first, count, .. } => (
            first.saturating_mul(u64::from(chunk)),
            u64::from(count) * u64::from(chunk),
        ),
        Request::Write { offset, length, .. }
        | Request::DirectRead { offset, length, .. }
        | Request::DirectWrite { offset, length, .. } => (offset, u64::from(length)),
        Request::Zero { offset, length, .. }
        | Request::DirectZero { offset, length, .. }
        | Request::DirectTrim { offset, length, .. }
        | Request::DirectExtents { offset, length, .. } => (offset, length),
        _ => (0, 0),
    }
}
