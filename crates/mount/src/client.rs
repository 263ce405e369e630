//! The mount's side: an image of another site as the far side of a managed device, or as a device of its own.

mod backlog;
mod connector;
mod early;
mod link;
mod options;
pub(crate) mod presence;
pub(crate) mod scheduler;
mod tell;

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
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use crate::MountError;
use crate::compress::Packer;
use crate::protocol::{Answer, Ask, Coding, Opened};

pub(crate) use connector::Connected;
pub use connector::{ConnectError, Connecting, Connector};
use early::Early;
pub use options::{COMMIT_LIMIT, FIRST_CONTACT, GIVE_UP, Options};
use presence::Pages;
use scheduler::{Job, Scheduler, split};
use tell::{Teller, Threads};

/// How often is looked for requests that have waited too long.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// How long closing may wait for the site's word.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// Whom an answer is for.
#[derive(Default)]
enum Reply {
    /// The [`Local`]: chunks.
    #[default]
    Chunks,
    /// Whoever wanted to know which chunks are zero, with what was found so far.
    Presence(PresenceDone, Pages),
    /// Whoever wanted something done.
    Done(Done),
    /// Whoever wanted to know what is staged.
    Staged(StagedDone),
    /// A thread that waits.
    Direct(std::sync::mpsc::SyncSender<Result<(Answer, Bytes), DeviceError>>),
}

/// An image of another site.
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    options: Options,
    opened: Opened,
    /// The site said so when the mount began, and not some time before.
    reached: bool,
    started: Instant,
    state: Mutex<State>,
    /// The last epoch that the site said counts.
    committed: AtomicU64,
    local: OnceLock<Weak<dyn Local>>,
    /// Taken alone.
    early: Mutex<Early>,
    teller: Teller,
    /// Wire bytes of links that are gone.
    received: AtomicU64,
    sent: AtomicU64,
    /// Wrong digests that came.
    wrong: AtomicU64,
    closing: AtomicBool,
    /// The site has said that it knows of the end.
    released: AtomicBool,
    stop: watch::Sender<bool>,
    /// Cuts the link of this number, as [`State::ups`] counts: something waited too long.
    cut: watch::Sender<u64>,
    /// Whether the near side is told nothing more that it did not ask for since. Held while it is told.
    silent: RwLock<bool>,
    packer: Mutex<Packer>,
    /// A thread has been told to ask for more background work.
    pumping: AtomicBool,
    /// Something that could be sent has to wait for its time.
    paced: Arc<Notify>,
}

struct State {
    scheduler: Scheduler<Reply>,
    /// Ways to the writers of the lanes.
    lanes: Vec<Option<mpsc::UnboundedSender<(Ask, Bytes)>>>,
    wires: Vec<Arc<WireCounters>>,
    link: Link,
    /// How often the link came up.
    ups: u64,
    rate: Rate,
}

/// Bytes a second, lately.
#[derive(Default)]
struct Rate {
    at: Duration,
    came: u64,
    rate: f64,
}

impl Client {
    /// Mounts an image: connects, tries again while that may help and `first_contact` has not passed, and keeps the link
    /// up from then on, in tasks of `runtime`. When the site is not reached but [`Options::known`], the link is down at
    /// first, and what the site says once it is up must agree.
    ///
    /// # Errors
    /// [`MountError`]: refused, not reachable, or a site that does not keep to the protocol.
    pub async fn open(
        runtime: &Handle,
        connector: Arc<dyn Connector>,
        options: Options,
    ) -> Result<Self, MountError> {
        let threads = Threads::start()?;
        let (opened, first) = match link::first(&connector, &options).await {
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
        link::check(&opened, &options).map_err(|what| MountError::Protocol {
            peer: options.image.to_string(),
            what,
        })?;
        let inner = Arc::new(Inner {
            committed: AtomicU64::new(opened.identity.epoch),
            state: Mutex::new(State {
                scheduler: Scheduler::new(opened.shape(), options.window),
                lanes: Vec::new(),
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
            teller: threads.teller(),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            released: AtomicBool::new(false),
            stop: watch::Sender::new(false),
            cut: watch::Sender::new(0),
            silent: RwLock::new(false),
            packer: Mutex::new(Packer::new()?),
            pumping: AtomicBool::new(false),
            paced: Arc::default(),
        });
        threads.run(&inner)?;
        let up = {
            let _inside = runtime.enter();
            first.map(|first| link::Up::first(&inner, first))
        };
        runtime.spawn(link::keep(inner.clone(), connector, up));
        runtime.spawn(look(Arc::downgrade(&inner)));
        runtime.spawn(pace(Arc::downgrade(&inner), inner.paced.clone()));
        Ok(Self { inner })
    }

    /// The state that the image was in when it was mounted.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.inner.opened.identity
    }

    /// Whether the expected state is the one that was found: the cache is good.
    #[must_use]
    pub fn fresh(&self) -> bool {
        self.inner.opened.fresh
    }

    /// Whether the site was reached at the start; without that, [`Client::opened`] is what was known before.
    #[must_use]
    pub fn was_reached(&self) -> bool {
        self.inner.reached
    }

    /// What the site said when the image was mounted.
    #[must_use]
    pub fn opened(&self) -> &Opened {
        &self.inner.opened
    }

    /// Chunks that came with a wrong digest.
    #[must_use]
    pub fn wrong_digests(&self) -> u64 {
        self.inner.wrong.load(Ordering::Relaxed)
    }

    /// Whether the site has confirmed that the mount gave back what it had there. After [`Remote::close`] without
    /// that, a writer's lease stays there.
    #[must_use]
    pub fn was_released(&self) -> bool {
        self.inner.released.load(Ordering::Acquire)
    }

    /// What to send for `body`.
    pub(crate) fn pack(&self, body: Bytes) -> (Coding, Bytes) {
        self.inner.pack(body)
    }

    /// Asks and waits for the answer; for threads that may block.
    pub(crate) fn direct(&self, ask: Ask, body: Bytes) -> Waiting {
        let (say, hear) = std::sync::mpsc::sync_channel(1);
        self.inner.ask(ask, body, Reply::Direct(say));
        Waiting {
            hear,
            limit: self.inner.options.give_up + CLOSE_WAIT,
        }
    }
}

/// An answer to come.
pub(crate) struct Waiting {
    hear: std::sync::mpsc::Receiver<Result<(Answer, Bytes), DeviceError>>,
    limit: Duration,
}

impl Waiting {
    /// The answer.
    pub(crate) fn wait(self) -> Result<(Answer, Bytes), DeviceError> {
        self.hear
            .recv_timeout(self.limit)
            .unwrap_or(Err(DeviceError::Closed))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.inner.end(DeviceError::Closed);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // So that it sees that there is nothing left to pace.
        self.paced.notify_one();
    }
}

/// Fails what has waited too long.
async fn look(inner: Weak<Inner>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(inner) = inner.upgrade() else {
            return;
        };
        if *inner.stop.borrow() {
            return;
        }
        let now = inner.now();
        let (late, stalled) = inner.state.lock().scheduler.expire(now);
        if stalled {
            // The lane lives, or the reader would have noticed, but no answer comes.
            inner.cut_link();
        }
        for (job, runs) in late {
            let why = inner.why_not(&job.ask);
            inner.fail(job, &runs, &why);
        }
    }
}

/// Sends what had to wait for its time.
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

impl Inner {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Why a request was not answered in time.
    fn why_not(&self, ask: &Ask) -> DeviceError {
        let text = match &self.state.lock().link {
            Link::Up(_) => {
                let limit = self.options.limit(ask);
                format!("the site gave no answer within {limit:?}")
            }
            Link::Down(why) => why.clone(),
            Link::Gone(error) => return error.clone(),
        };
        DeviceError::Unavailable(text)
    }

    fn ask(self: &Arc<Self>, ask: Ask, body: Bytes, to: Reply) {
        let limit = self.options.limit(&ask);
        let job = Job {
            ask,
            body,
            deadline: self.now() + limit,
            again: false,
            to,
        };
        self.put(job);
        self.issue();
    }

    /// Schedules a request, or fails it at once when there is no use.
    fn put(&self, job: Job<Reply>) {
        let mut state = self.state.lock();
        let refused = match &state.link {
            Link::Gone(error) => Some((job, error.clone())),
            // Part of an epoch whose other parts went with an earlier link must not reach a later one.
            Link::Down(why) if !job.survives() => {
                Some((job, DeviceError::Unavailable(why.clone())))
            }
            _ => match state.scheduler.ask(job) {
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

    /// Sends what may be sent.
    fn issue(&self) {
        let now = self.now();
        let mut state = self.state.lock();
        while let Some((lane, ask, body)) = state.scheduler.select(now) {
            state.send(lane, ask, body);
        }
        let waits = state.scheduler.select_at().is_some();
        drop(state);
        if waits {
            self.paced.notify_one();
        }
    }

    /// The same, and asks for background work while there is room for it.
    fn pump(&self) {
        self.issue();
        let Some(local) = self.local.get().and_then(Weak::upgrade) else {
            return;
        };
        loop {
            let room = self.state.lock().scheduler.room();
            // Not under the lock: what is asked has locks of its own, and asks back.
            let Some(chunks) = room.and_then(|most| local.next(most)) else {
                return;
            };
            let most = (crate::protocol::MAX_READ / self.opened.chunk).max(1);
            let missing = self.claim(chunks, &local).missing;
            for run in missing.into_iter().flat_map(|run| split(run, most)) {
                self.put(Job {
                    ask: read(run, true),
                    body: Bytes::new(),
                    deadline: self.now() + self.options.give_up,
                    again: false,
                    to: Reply::Chunks,
                });
            }
            self.issue();
        }
    }

    /// The near side asks for a run: it is handed what is here already.
    fn claim(&self, run: Chunks, local: &Arc<dyn Local>) -> early::Claimed {
        let mut claimed = self.early.lock().claim(run);
        if !claimed.here.is_empty() {
            let (here, local) = (std::mem::take(&mut claimed.here), local.clone());
            self.teller.call(move || local.arrived(here));
        }
        claimed
    }

    /// Ends the link that is up; the next one is made at once.
    fn cut_link(&self) {
        let state = self.state.lock();
        if matches!(state.link, Link::Up(_)) {
            self.cut.send_replace(state.ups);
        }
    }

    /// Tells that a request failed.
    fn fail(&self, job: Job<Reply>, runs: &[Chunks], error: &DeviceError) {
        if matches!(job.ask, Ask::Commit { .. }) && error.is_transient() {
            // Whether it counts is only told when a link comes up, and that is what the near side waits for.
            self.cut_link();
        }
        match job.to {
            Reply::Chunks => {
                for run in runs {
                    self.teller.failed(*run, error.clone());
                }
            }
            Reply::Presence(done, ..) => {
                let error = error.clone();
                self.teller.call(move || done(Err(error)));
            }
            Reply::Staged(done) => {
                let error = error.clone();
                self.teller.call(move || done(Err(error)));
            }
            Reply::Done(done) => {
                let error = error.clone();
                self.teller.call(move || done(Err(error)));
            }
            Reply::Direct(say) => {
                let _ = say.send(Err(error.clone()));
            }
        }
    }

    /// Tells the near side, if there is one yet, what the link's state is.
    fn tell_link(&self, state: &State) {
        if self.local.get().is_some() {
            self.teller.link(state.link.clone());
        }
    }

    /// No more requests are answered.
    fn end(&self, error: DeviceError) {
        let all = {
            let mut state = self.state.lock();
            if !matches!(state.link, Link::Gone(_)) {
                state.link = Link::Gone(error.clone());
                self.tell_link(&state);
            }
            state.lanes.clear();
            state.scheduler.take_all()
        };
        for (job, runs) in all {
            self.fail(job, &runs, &error);
        }
        self.stop.send_replace(true);
    }
}

impl State {
    /// Tells the site what has arrived.
    fn credit(&mut self, now: Duration) {
        for (lane, credit) in self.scheduler.credits(now) {
            self.send(lane, credit.into(), Bytes::new());
        }
    }

    fn send(&mut self, lane: usize, ask: Ask, body: Bytes) {
        if let Some(Some(way)) = self.lanes.get(lane) {
            // A lane that has ended is noticed by its task, which takes back what was asked.
            let _ = way.send((ask, body));
        }
    }
}

fn read(run: Chunks, background: bool) -> Ask {
    Ask::Read {
        id: 0,
        first: run.first,
        count: run.count,
        background,
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
            // Under the lock, so that no change is told twice or not at all.
            let state = self.inner.state.lock();
            if self.inner.local.set(local).is_err() {
                return;
            }
            self.inner.tell_link(&state);
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
            let (hurried, rest) = state.scheduler.hurry(run, deadline);
            inner.teller.hurry(run);
            for (lane, ask) in hurried {
                state.send(lane, ask, Bytes::new());
            }
            missing.extend(rest);
        }
        for run in missing {
            inner.put(Job {
                ask: read(run, false),
                body: Bytes::new(),
                deadline,
                again: false,
                to: Reply::Chunks,
            });
        }
        inner.issue();
    }

    fn kick(&self) {
        self.inner.pump();
    }

    fn presence(&self, chunks: Chunks, done: PresenceDone) {
        let ask = Ask::Presence {
            id: 0,
            first: chunks.first,
            count: chunks.count,
        };
        let to = Reply::Presence(done, Pages::of(chunks));
        self.inner.ask(ask, Bytes::new(), to);
    }

    fn push(&self, epoch: Epoch, changes: Vec<Change>, done: Done) {
        // Nothing that the site read before this may be handed out as what is asked for after it.
        let under_way = self.inner.early.lock().drop_all();
        for run in under_way {
            self.inner.state.lock().scheduler.forget(run);
        }
        let most = self.inner.state.lock().scheduler.push_part();
        let parts = changes.into_iter().flat_map(|change| parts(change, most));
        let parts = parts.collect::<Vec<_>>();
        let mut done = tell::all(parts.len(), done);
        for part in parts {
            let (ask, body) = match part {
                Change::Write(offset, bytes) => {
                    let length = bytes.len() as u32;
                    let (coding, body) = self.inner.pack(bytes);
                    let ask = Ask::Write {
                        id: 0,
                        epoch: epoch.0,
                        offset,
                        length,
                        coding,
                    };
                    (ask, body)
                }
                Change::Zero(offset, length) => {
                    let ask = Ask::Zero {
                        id: 0,
                        epoch: epoch.0,
                        offset,
                        length,
                    };
                    (ask, Bytes::new())
                }
            };
            self.inner.ask(ask, body, Reply::Done(done()));
        }
    }

    fn staged(&self, epoch: Epoch, from: u64, done: StagedDone) {
        let ask = Ask::Staged {
            id: 0,
            epoch: epoch.0,
            from,
        };
        self.inner.ask(ask, Bytes::new(), Reply::Staged(done));
    }

    fn commit(&self, epoch: Epoch, covers: u64, done: Done) {
        let ask = Ask::Commit {
            id: 0,
            epoch: epoch.0,
            covers,
        };
        self.inner.ask(ask, Bytes::new(), Reply::Done(done));
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
            inner.teller.call(move || done(Ok(())));
            return;
        }
        let told = self.inner.clone();
        // Whatever the answer: the site knows, or cannot be told.
        let done: Done = Box::new(move |result| {
            told.end(DeviceError::Closed);
            let teller = told.teller.clone();
            // Behind all that has failed with it.
            teller.call(move || {
                *told.silent.write() = true;
                done(match result {
                    Err(DeviceError::Unavailable(_) | DeviceError::Closed) => Ok(()),
                    other => other,
                });
            });
        });
        let job = Job {
            ask: Ask::Close { id: 0 },
            body: Bytes::new(),
            deadline: inner.now() + CLOSE_WAIT,
            again: false,
            to: Reply::Done(done),
        };
        inner.put(job);
        inner.issue();
    }
}

impl Inner {
    /// Packs what is sent, unless the site is so near that it takes longer than sending it.
    fn pack(&self, body: Bytes) -> (Coding, Bytes) {
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

/// A change in parts of at most `most` bytes on the link.
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
