//! The mount's side of the protocol: [`Client`] connects to the site, keeps the link up and schedules requests. It is
//! the [`Remote`] of a managed device (one with a cache); [`crate::direct`] turns it into a device without a cache.

mod backlog;
mod completion;
mod connector;
mod early;
mod inner;
mod link;
mod open;
mod options;
pub(crate) mod presence;
mod replies;
pub(crate) mod scheduler;
mod verify;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use drover_core::DeviceError;
use drover_device::remote::{
    Change, Chunks, Done, Epoch, Link, Local, PresenceDone, Remote, Shape, StagedDone, Traffic,
};
use drover_net::WireCounters;
use drover_store::lease::Identity;
use parking_lot::{Mutex, RwLock};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::MountError;
use crate::compress::Packer;
use crate::protocol::{Coding, Opened, Reply, Request};

pub use connector::{ConnectError, Connecting, Connector, Leaving};
pub use options::{COMMIT_LIMIT, FIRST_CONTACT, GIVE_UP, Options};

use inner::{CLOSE_WAIT, ClientState, Inner, Rate, ReplyTo};
use presence::Pages;
use scheduler::{Job, Scheduler};
use verify::Workers;

/// Interval at which requests are checked for their deadline.
const EXPIRE_EVERY: Duration = Duration::from_millis(250);

/// Timeout of [`Client::close_now`].
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// A mounted image of another site.
pub struct Client {
    inner: Arc<Inner>,
}

impl Client {
    /// Mounts an image: connects, with retries for up to `first_contact` while they may help, and then keeps the link
    /// up, in tasks of `runtime`. If the site is unreachable but [`Options::known`] is set, the mount starts with the
    /// link down, and the site's later reply must match.
    ///
    /// # Errors
    /// [`MountError`]: refused, unreachable, or a protocol violation of the site.
    pub async fn open(
        runtime: &Handle,
        connector: Arc<dyn Connector>,
        options: Options,
    ) -> Result<Self, MountError> {
        let workers = Workers::new()?;
        let (opened, first) = match open::first(&connector, &options).await {
            Ok(first) => (first.opened.clone(), Some(first)),
            Err(MountError::Unreachable(why)) => match &options.known {
                Some(known) => {
                    tracing::info!(image = %options.image, why, "mounted without a link");
                    (known.clone(), None)
                }
                None => return Err(MountError::Unreachable(why)),
            },
            Err(error) => return Err(error),
        };
        open::check(&opened, &options).map_err(|what| MountError::Protocol {
            peer: options.image.to_string(),
            what,
        })?;
        let inner = Arc::new(Inner {
            committed: AtomicU64::new(opened.identity.epoch),
            state: Mutex::new(ClientState {
                scheduler: Scheduler::new(opened.shape(), options.window)
                    .with_patience(options.give_up),
                connections: Vec::new(),
                wires: Vec::new(),
                link: Link::Down("connecting".into()),
                ups: 0,
                rate: Rate::default(),
            }),
            options,
            opened,
            reached: first.is_some(),
            started: Instant::now(),
            local: OnceLock::new(),
            early: Mutex::default(),
            completions: workers.completions(),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            released: AtomicBool::new(false),
            stop: watch::Sender::new(false),
            latest: AtomicU64::new(0),
            cut: watch::Sender::new(0),
            silent: RwLock::new(false),
            packer: Mutex::new(Packer::new()?),
            pumping: AtomicBool::new(false),
            paced: Arc::default(),
        });
        workers.run(&inner)?;
        let up = {
            let _inside = runtime.enter();
            first.map(|first| link::LiveLink::first(&inner, first))
        };
        runtime.spawn(link::keep(inner.clone(), connector, up));
        runtime.spawn(expire_requests(Arc::downgrade(&inner)));
        runtime.spawn(pace(Arc::downgrade(&inner), inner.paced.clone()));
        Ok(Self { inner })
    }

    /// The number of the latest link that was up; 0 if none was.
    #[must_use]
    pub fn latest_link(&self) -> u64 {
        self.inner.latest.load(Ordering::Acquire)
    }

    /// Whether the link is up, as far as is known.
    #[must_use]
    pub fn is_up(&self) -> bool {
        matches!(self.inner.state.lock().link, Link::Up(_))
    }

    /// The image's state when it was mounted.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.inner.opened.identity
    }

    /// Whether the image is in the expected state, so that the cache is valid.
    #[must_use]
    pub fn fresh(&self) -> bool {
        self.inner.opened.fresh
    }

    /// Says which epoch the cache of a mount that stands by agrees with, before anything is read.
    pub fn agree(&self, epoch: Epoch) {
        self.inner.committed.store(epoch.0, Ordering::Release);
    }

    /// Whether the site was reached at the start; otherwise [`Client::opened`] is the earlier knowledge.
    #[must_use]
    pub fn was_reached(&self) -> bool {
        self.inner.reached
    }

    /// The site's reply when the image was mounted.
    #[must_use]
    pub fn opened(&self) -> &Opened {
        &self.inner.opened
    }

    /// Whether the site has confirmed the end of the mount. After [`Remote::close`] without a confirmation, a writer's
    /// lease remains there.
    #[must_use]
    pub fn was_released(&self) -> bool {
        self.inner.released.load(Ordering::Acquire)
    }

    /// Ends the mount, which returns its lease, and waits for that; for threads that may block.
    ///
    /// # Errors
    /// The site's refusal, or a timeout, after which the site has to notice by itself.
    pub fn close_now(&self) -> Result<(), DeviceError> {
        let (say, hear) = std::sync::mpsc::sync_channel(1);
        self.close(Box::new(move |result| {
            let _ = say.send(result);
        }));
        hear.recv_timeout(CLOSE_LIMIT)
            .unwrap_or_else(|_| Err(DeviceError::Unavailable("no reply".into())))
    }

    /// Encodes `body` for sending.
    pub(crate) fn pack(&self, body: Bytes) -> (Coding, Bytes) {
        self.inner.pack(body)
    }

    /// Bytes of memory of the direct changes that the site has made and not flushed.
    pub(crate) fn unflushed(&self) -> u64 {
        self.inner.state.lock().scheduler.unflushed()
    }

    /// Sends a request and returns a handle to its reply; for threads that may block.
    pub(crate) fn direct(&self, request: Request, body: Bytes) -> PendingReply {
        self.direct_after(Duration::ZERO, request, body)
    }

    /// The same for a request that has waited before.
    pub(crate) fn direct_after(
        &self,
        waited: Duration,
        request: Request,
        body: Bytes,
    ) -> PendingReply {
        let (say, hear) = std::sync::mpsc::sync_channel(1);
        let left = self.inner.options.limit(&request).saturating_sub(waited);
        let deadline = self.inner.now() + left;
        let job = Job::new(request, body, deadline, ReplyTo::Direct(say));
        self.inner.put(job);
        self.inner.issue();
        PendingReply { hear }
    }

    /// Fails for a request that has waited for the site as long as requests do.
    pub(crate) fn check_patience(&self, waited: Duration) -> Result<(), DeviceError> {
        let request = Request::DirectFlush { id: 0 };
        match waited < self.inner.options.limit(&request) {
            true => Ok(()),
            false => Err(self.inner.timeout_error(&request)),
        }
    }
}

/// A pending reply.
pub(crate) struct PendingReply {
    hear: std::sync::mpsc::Receiver<Result<(Reply, Bytes), DeviceError>>,
}

impl PendingReply {
    /// Waits for the reply, until the request's deadline, which may be put off.
    pub(crate) fn wait(self) -> Result<(Reply, Bytes), DeviceError> {
        self.hear.recv().unwrap_or(Err(DeviceError::Closed))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.inner.end(DeviceError::Closed);
    }
}

/// Ends the client when dropped, with the runtime perhaps: nothing else ends requests then.
struct Ends(Weak<Inner>);

impl Drop for Ends {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.end(DeviceError::Closed);
        }
    }
}

/// Fails requests whose deadline has passed.
async fn expire_requests(inner: Weak<Inner>) {
    let _ends = Ends(inner.clone());
    loop {
        tokio::time::sleep(EXPIRE_EVERY).await;
        let Some(inner) = inner.upgrade() else {
            return;
        };
        if *inner.stop.borrow() {
            return;
        }
        let now = inner.now();
        let (late, stalled) = inner.state.lock().scheduler.expire(now);
        if stalled {
            // The connection is alive, or the reader would have noticed, but no reply arrives.
            inner.cut_link();
        }
        for (job, runs) in late {
            let why = inner.timeout_error(&job.request);
            inner.fail(job, &runs, &why);
        }
    }
}

/// Sends requests that were delayed by pacing.
async fn pace(inner: Weak<Inner>, paced: Arc<Notify>) {
    loop {
        paced.notified().await;
        let Some(strong) = inner.upgrade() else {
            return;
        };
        if *strong.stop.borrow() {
            return;
        }
        let at = strong.state.lock().scheduler.select_at();
        let Some(at) = at.map(|at| strong.started + at) else {
            continue;
        };
        drop(strong);
        tokio::time::sleep_until(at).await;
        if let Some(inner) = inner.upgrade() {
            inner.issue();
        }
    }
}

impl Remote for Client {
    fn shape(&self) -> Shape {
        self.inner.opened.shape()
    }

    fn read_only(&self) -> bool {
        self.inner.opened.read_only
    }

    fn attach(&self, local: Weak<dyn Local>) {
        {
            // Under the lock, so that no change is reported twice or missed.
            let state = self.inner.state.lock();
            if self.inner.local.set(local).is_err() {
                return;
            }
            self.inner.notify_link(&state);
        }
        self.inner.pump();
    }

    fn fetch(&self, chunks: Chunks) {
        let inner = &self.inner;
        let Some(local) = inner.local.get().and_then(Weak::upgrade) else {
            return;
        };
        let deadline = inner.now() + inner.options.give_up;
        let claimed = inner.claim(chunks, &local);
        let mut missing = Vec::new();
        for run in claimed.coming.into_iter().chain(claimed.missing) {
            let mut state = inner.state.lock();
            let (urgent, rest) = state.scheduler.hurry(run, deadline);
            inner.completions.hurry(run);
            for (connection, request) in urgent {
                state.send(connection, request, Bytes::new());
            }
            missing.extend(rest);
        }
        for run in missing {
            inner.put(Job::read(run, false, deadline));
        }
        inner.issue();
    }

    fn kick(&self) {
        self.inner.pump();
    }

    fn presence(&self, chunks: Chunks, done: PresenceDone) {
        let request = Request::Presence {
            id: 0,
            first: chunks.first,
            count: chunks.count,
        };
        let to = ReplyTo::Presence(done, Pages::of(chunks));
        self.inner.send_request(request, Bytes::new(), to);
    }

    fn push(&self, epoch: Epoch, changes: Vec<Change>, done: Done) {
        // Chunks that the site read before this change must not answer requests made after it.
        let under_way = self.inner.early.lock().drop_all();
        for run in under_way {
            self.inner.state.lock().scheduler.forget(run);
        }
        let most = self.inner.state.lock().scheduler.push_part();
        let parts = changes.into_iter().flat_map(|change| parts(change, most));
        let parts = parts.collect::<Vec<_>>();
        let mut done = completion::all(parts.len(), done);
        for part in parts {
            let (request, body) = match part {
                Change::Write(offset, bytes) => {
                    let length = bytes.len() as u32;
                    let (coding, body) = self.inner.pack(bytes);
                    let request = Request::Write {
                        id: 0,
                        epoch: epoch.0,
                        offset,
                        length,
                        coding,
                    };
                    (request, body)
                }
                Change::Zero(offset, length) => {
                    let request = Request::Zero {
                        id: 0,
                        epoch: epoch.0,
                        offset,
                        length,
                    };
                    (request, Bytes::new())
                }
            };
            self.inner
                .send_request(request, body, ReplyTo::Done(done()));
        }
    }

    fn staged(&self, epoch: Epoch, from: u64, done: StagedDone) {
        let request = Request::Staged {
            id: 0,
            epoch: epoch.0,
            from,
        };
        self.inner
            .send_request(request, Bytes::new(), ReplyTo::Staged(done));
    }

    fn commit(&self, epoch: Epoch, covers: u64, done: Done) {
        let request = Request::Commit {
            id: 0,
            epoch: epoch.0,
            covers,
        };
        self.inner
            .send_request(request, Bytes::new(), ReplyTo::Done(done));
    }

    fn committed(&self) -> Epoch {
        Epoch(self.inner.committed.load(Ordering::Acquire))
    }

    fn link(&self) -> Link {
        self.inner.state.lock().link.clone()
    }

    fn traffic(&self) -> Traffic {
        let inner = &self.inner;
        let now = inner.now();
        let mut state = inner.state.lock();
        let came = state.scheduler.came();
        let since = now.saturating_sub(state.rate.at).as_secs_f64();
        if since >= 0.2 {
            state.rate = Rate {
                at: now,
                came,
                rate: (came - state.rate.came) as f64 / since,
            };
        }
        let of = |wires: &[Arc<WireCounters>], what: fn(&WireCounters) -> u64| {
            wires.iter().map(|wire| what(wire)).sum::<u64>()
        };
        let window = state.scheduler.window();
        Traffic {
            in_flight: state.scheduler.in_flight(),
            window: window.size(),
            push_window: state.scheduler.push_window(),
            received: inner.received.load(Ordering::Relaxed)
                + of(&state.wires, WireCounters::received),
            sent: inner.sent.load(Ordering::Relaxed) + of(&state.wires, WireCounters::sent),
            round_trip: window.round_trip().unwrap_or_default().as_secs_f64(),
            rate: state.rate.rate,
        }
    }

    fn close(&self, done: Done) {
        let inner = self.inner.clone();
        if inner.closing.swap(true, Ordering::AcqRel) {
            inner.completions.call(move || done(Ok(())));
            return;
        }
        let closed = self.inner.clone();
        // Whatever the reply: the site has ended the mount, or is unreachable.
        let done: Done = Box::new(move |result| {
            closed.end(DeviceError::Closed);
            let completions = closed.completions.clone();
            // Behind all completions queued by the shutdown.
            completions.call(move || {
                *closed.silent.write() = true;
                done(match result {
                    Err(DeviceError::Unavailable(_) | DeviceError::Closed) => Ok(()),
                    other => other,
                });
            });
        });
        let (request, deadline) = (Request::Close { id: 0 }, inner.now() + CLOSE_WAIT);
        inner.put(Job::new(
            request,
            Bytes::new(),
            deadline,
            ReplyTo::Done(done),
        ));
        inner.issue();
    }
}

/// Splits a change into parts of at most `most` bytes on the link.
fn parts(change: Change, most: usize) -> Vec<Change> {
    match change {
        Change::Write(offset, bytes) => (0..bytes.len())
            .step_by(most)
            .map(|at| {
                let end = bytes.len().min(at + most);
                Change::Write(offset + at as u64, bytes.slice(at..end))
            })
            .collect(),
        zero @ Change::Zero(..) => vec![zero],
    }
}

#[cfg(test)]
mod tests;
