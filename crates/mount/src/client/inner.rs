//! State shared by the parts of a client: options, the link's state, the request scheduler and the completion queue.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use drover_core::DeviceError;
use drover_device::remote::{Chunks, Done, Link, Local, PresenceDone, StagedDone};
use drover_net::WireCounters;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::completion::CompletionQueue;
use super::early::{Claimed, EarlyChunks};
use super::options::Options;
use super::presence::Pages;
use super::scheduler::{Job, Scheduler, split};
use crate::compress::Packer;
use crate::protocol::{Coding, MAX_READ, Opened, Reply, Request};

/// How long closing may wait for the site's confirmation.
pub const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// The receiver of the reply to a request.
#[derive(Default)]
pub enum ReplyTo {
    /// The [`Local`], for chunks.
    #[default]
    Chunks,
    /// A presence query, with the runs found so far.
    Presence(PresenceDone, Pages),
    /// A change: done or failed.
    Done(Done),
    /// A query of what is staged.
    Staged(StagedDone),
    /// A blocked thread.
    Direct(std::sync::mpsc::SyncSender<Result<(Reply, Bytes), DeviceError>>),
}

/// The state shared by a client's tasks and threads.
pub struct Inner {
    pub options: Options,
    pub opened: Opened,
    /// The site was reached when the mount began, rather than known from earlier.
    pub reached: bool,
    pub started: Instant,
    pub state: Mutex<ClientState>,
    /// The last epoch that the site has confirmed as committed.
    pub committed: AtomicU64,
    pub local: OnceLock<Weak<dyn Local>>,
    /// Locked with no other lock held.
    pub early: Mutex<EarlyChunks>,
    pub completions: CompletionQueue,
    /// Wire bytes of previous links.
    pub received: AtomicU64,
    pub sent: AtomicU64,
    pub closing: AtomicBool,
    /// The site has confirmed that the mount has ended.
    pub released: AtomicBool,
    pub stop: watch::Sender<bool>,
    /// The number of the latest link that was up; 0 if none was.
    pub latest: AtomicU64,
    /// Cuts the link with this number, as [`ClientState::ups`] counts: a request timed out.
    pub cut: watch::Sender<u64>,
    /// Set when the local side wants no more unsolicited notifications. Held while it is notified.
    pub silent: RwLock<bool>,
    pub packer: Mutex<Packer>,
    /// A thread is about to request more background work.
    pub pumping: AtomicBool,
    /// A request is waiting for its pacing time.
    pub paced: Arc<Notify>,
}

/// The state behind the client's lock.
pub struct ClientState {
    pub scheduler: Scheduler<ReplyTo>,
    /// Channels to the connections' writers.
    pub connections: Vec<Option<mpsc::UnboundedSender<(Request, Bytes)>>>,
    pub wires: Vec<Arc<WireCounters>>,
    pub link: Link,
    /// How often the link came up.
    pub ups: u64,
    pub rate: Rate,
}

/// Recent rate in bytes per second.
#[derive(Default)]
pub struct Rate {
    pub at: Duration,
    pub came: u64,
    pub rate: f64,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Wakes the pacing task to see that nothing is left to pace.
        self.paced.notify_one();
    }
}

impl Inner {
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The error of a request that got no reply in time.
    pub fn timeout_error(&self, request: &Request) -> DeviceError {
        let text = match &self.state.lock().link {
            Link::Up(_) => {
                let limit = self.options.limit(request);
                format!("the site did not reply within {limit:?}")
            }
            Link::Down(why) => why.clone(),
            Link::Gone(error) => return error.clone(),
        };
        DeviceError::Unavailable(text)
    }

    pub fn send_request(self: &Arc<Self>, request: Request, body: Bytes, to: ReplyTo) {
        let deadline = self.now() + self.options.limit(&request);
        self.put(Job::new(request, body, deadline, to));
        self.issue();
    }

    /// Schedules a request, or fails it at once if the link cannot take it.
    pub fn put(&self, job: Job<ReplyTo>) {
        let mut state = self.state.lock();
        let refused = match &state.link {
            Link::Gone(error) => Some((job, error.clone())),
            // Part of an epoch whose other parts were lost with an earlier link must not reach a later one.
            Link::Down(why) if !job.survives() => {
                Some((job, DeviceError::Unavailable(why.clone())))
            }
            _ => match state.scheduler.enqueue(job) {
                Ok(()) => None,
                Err(job) => Some((
                    job,
                    DeviceError::Unavailable("too many requests wait for the link".into()),
                )),
            },
        };
        drop(state);
        if let Some((job, error)) = refused {
            let runs: Vec<Chunks> = job.chunks().into_iter().collect();
            self.fail(job, &runs, &error);
        }
    }

    /// Sends the requests that may be sent now.
    pub fn issue(&self) {
        let now = self.now();
        let mut state = self.state.lock();
        while let Some((connection, request, body)) = state.scheduler.select(now) {
            state.send(connection, request, body);
        }
        let waits = state.scheduler.select_at().is_some();
        drop(state);
        if waits {
            self.paced.notify_one();
        }
    }

    /// Sends the requests that may be sent now, and requests background work while there is room for it.
    pub fn pump(&self) {
        self.issue();
        let Some(local) = self.local.get().and_then(Weak::upgrade) else {
            return;
        };
        loop {
            let room = self.state.lock().scheduler.room();
            // Not under the lock: the callee has locks of its own, and calls back.
            let Some(chunks) = room.and_then(|most| local.next(most)) else {
                return;
            };
            let most = (MAX_READ / self.opened.chunk).max(1);
            let missing = self.claim(chunks, &local).missing;
            for run in missing.into_iter().flat_map(|run| split(run, most)) {
                self.put(Job::read(run, true, self.now() + self.options.give_up));
            }
            self.issue();
        }
    }

    /// The local side requests a run: early chunks are delivered at once.
    pub fn claim(&self, run: Chunks, local: &Arc<dyn Local>) -> Claimed {
        let mut claimed = self.early.lock().claim(run);
        if !claimed.here.is_empty() {
            let (here, local) = (std::mem::take(&mut claimed.here), local.clone());
            self.completions.call(move || local.arrived(here));
        }
        claimed
    }

    /// Cuts the current link; reconnection starts at once.
    pub fn cut_link(&self) {
        let state = self.state.lock();
        if matches!(state.link, Link::Up(_)) {
            self.cut.send_replace(state.ups);
        }
    }

    /// Reports that a request failed.
    pub fn fail(&self, job: Job<ReplyTo>, runs: &[Chunks], error: &DeviceError) {
        if matches!(job.request, Request::Commit { .. }) && error.is_transient() {
            // The local side waits for the next link, whose open reports whether it was committed.
            self.cut_link();
        }
        match job.to {
            ReplyTo::Chunks => {
                for run in runs {
                    self.completions.failed(*run, error.clone());
                }
            }
            ReplyTo::Presence(done, ..) => {
                let error = error.clone();
                self.completions.call(move || done(Err(error)));
            }
            ReplyTo::Staged(done) => {
                let error = error.clone();
                self.completions.call(move || done(Err(error)));
            }
            ReplyTo::Done(done) => {
                let error = error.clone();
                self.completions.call(move || done(Err(error)));
            }
            ReplyTo::Direct(say) => {
                let _ = say.send(Err(error.clone()));
            }
        }
    }

    /// Notifies the local side, if attached, of the link's state.
    pub fn notify_link(&self, state: &ClientState) {
        if self.local.get().is_some() {
            self.completions.link(state.link.clone());
        }
    }

    /// Ends the client: every request fails with this error.
    pub fn end(&self, error: DeviceError) {
        let all = {
            let mut state = self.state.lock();
            if !matches!(state.link, Link::Gone(_)) {
                state.link = Link::Gone(error.clone());
                self.notify_link(&state);
            }
            state.connections.clear();
            state.scheduler.take_all()
        };
        for (job, runs) in all {
            self.fail(job, &runs, &error);
        }
        self.stop.send_replace(true);
    }

    /// Compresses a body, unless the site is so near that compression takes longer than sending.
    pub fn pack(&self, body: Bytes) -> (Coding, Bytes) {
        let far =
            self.state.lock().scheduler.window().round_trip() > Some(Duration::from_millis(2));
        if !far {
            return (Coding::Plain, body);
        }
        let mut packer = self.packer.lock();
        match packer.pack(&body) {
            (Coding::Plain, _) => (Coding::Plain, body),
            (coding, packed) => (coding, Bytes::copy_from_slice(packed)),
        }
    }
}

impl ClientState {
    /// Sends credit: the bytes received, and how many may be in flight.
    pub fn credit(&mut self, now: Duration) {
        for (connection, credit) in self.scheduler.credits(now) {
            self.send(connection, credit.into(), Bytes::new());
        }
    }

    pub fn send(&mut self, connection: usize, request: Request, body: Bytes) {
        if let Some(Some(way)) = self.connections.get(connection) {
            // A connection that has ended is noticed by its task, which reclaims its requests.
            let _ = way.send((request, body));
        }
    }
}
