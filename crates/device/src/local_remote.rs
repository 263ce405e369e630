//! A remote in the same process: any device, read and written by a few threads. So a device whose every request takes
//! long, as one in an object store, gets what a managed device has: a cache, many requests under way, and prefetching.
//! Tests put stages below it that delay, fail and cut.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::Instant;

use bytes::Bytes;
use drover_core::{BlockDevice, DeviceError, Digest, ExtentKind, Zeroes};
use parking_lot::{Condvar, Mutex};

use crate::remote::{
    Change, Chunks, Content, Done, Epoch, Fetched, Link, Local, PresenceDone, Remote, Shape,
    Staged, StagedDone, Traffic,
};

/// Maximum bytes per read.
const AT_ONCE: u64 = 1 << 20;

/// Stages and commits epochs.
pub trait Committer: Send + Sync {
    /// The last committed epoch.
    fn committed(&self) -> Epoch;

    /// Stages part of an epoch.
    ///
    /// # Errors
    /// [`DeviceError`]; the epoch is then abandoned.
    fn push(&self, epoch: Epoch, changes: &[Change]) -> Result<(), DeviceError>;

    /// The staged parts of an epoch, from byte `from` of the device on. The default has none: all of it is sent again.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn staged(&self, _epoch: Epoch, _from: u64) -> Result<Staged, DeviceError> {
        Ok(Staged {
            end: u64::MAX,
            ..Staged::default()
        })
    }

    /// Commits an epoch durably. `covers` is how many bytes of the device it must contain.
    ///
    /// # Errors
    /// [`DeviceError`]; [`DeviceError::Unavailable`] if it contains another number: the device then queries what is
    /// staged, and sends the rest.
    fn commit(&self, epoch: Epoch, covers: u64) -> Result<(), DeviceError>;

    /// Drops what is staged.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn abandon(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Writes changes to the device as they arrive and flushes it at a commit: an interrupted epoch is partly visible.
pub struct Direct {
    device: Arc<dyn BlockDevice>,
    committed: AtomicU64,
}

impl Direct {
    /// Over `device`, which does not store epochs: `committed` is the last one, from elsewhere.
    #[must_use]
    pub fn new(device: Arc<dyn BlockDevice>, committed: Epoch) -> Self {
        Self {
            device,
            committed: AtomicU64::new(committed.0),
        }
    }
}

impl Committer for Direct {
    fn committed(&self) -> Epoch {
        Epoch(self.committed.load(Ordering::Acquire))
    }

    fn push(&self, _: Epoch, changes: &[Change]) -> Result<(), DeviceError> {
        for change in changes {
            match change {
                Change::Write(offset, bytes) => self.device.write(*offset, bytes)?,
                Change::Zero(offset, length) => {
                    self.device
                        .write_zeroes(*offset, *length, Zeroes::default())?;
                }
            }
        }
        Ok(())
    }

    fn commit(&self, epoch: Epoch, _: u64) -> Result<(), DeviceError> {
        self.device.flush()?;
        self.committed.store(epoch.0, Ordering::Release);
        Ok(())
    }
}

enum Job {
    Presence(Chunks, PresenceDone),
    Push(Epoch, Vec<Change>, Done),
    Staged(Epoch, u64, StagedDone),
    Commit(Epoch, u64, Done),
}

struct Queue {
    fetches: VecDeque<Chunks>,
    /// Runs that are being read: requests for their chunks wait for that.
    reading: Vec<Chunks>,
    /// Threads that read the device, which may take minutes. Once it is closed, none begins.
    inside: Vec<ThreadId>,
    /// Threads inside [`Local::next`].
    handing: usize,
    /// Threads that fetch in the background: one is always left for readers who wait.
    background: usize,
    jobs: VecDeque<Job>,
    /// [`Local::next`] may return chunks.
    kicked: bool,
    /// How often the link came up; while it is down, the reason.
    link: u64,
    down: Option<String>,
    closed: bool,
}

struct Inner {
    device: Arc<dyn BlockDevice>,
    committer: Arc<dyn Committer>,
    shape: Shape,
    read_only: bool,
    threads: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
    local: OnceLock<Weak<dyn Local>>,
    /// Held while the link's state is read and reported, so that the last report is the current state.
    telling: Mutex<()>,
    received: AtomicU64,
    sent: AtomicU64,
    in_flight: AtomicU64,
    window: u64,
    started: Instant,
}

/// A [`Remote`] over a [`BlockDevice`].
pub struct LocalRemote {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl LocalRemote {
    /// Reads and writes `device` with `threads` threads (at least one), in chunks of `chunk` bytes. Changes go through
    /// `committer`, which must write to the same device; a [`Direct`] one if none is given.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn new(
        device: Arc<dyn BlockDevice>,
        chunk: u32,
        threads: usize,
        committer: Option<Arc<dyn Committer>>,
    ) -> Result<Arc<Self>, DeviceError> {
        let threads = threads.max(1);
        let committer = match committer {
            Some(committer) => committer,
            None => Arc::new(Direct::new(Arc::clone(&device), Epoch(0))),
        };
        let inner = Arc::new(Inner {
            shape: Shape {
                size: device.size(),
                chunk,
            },
            read_only: device.capabilities().read_only,
            threads,
            device,
            committer,
            queue: Mutex::new(Queue {
                fetches: VecDeque::new(),
                reading: Vec::new(),
                inside: Vec::new(),
                handing: 0,
                background: 0,
                jobs: VecDeque::new(),
                kicked: false,
                link: 1,
                down: None,
                closed: false,
            }),
            changed: Condvar::new(),
            local: OnceLock::new(),
            telling: Mutex::new(()),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            window: threads as u64 * AT_ONCE.max(u64::from(chunk)),
            started: Instant::now(),
        });
        let mut handles = Vec::new();
        for number in 0..threads {
            let inner = Arc::clone(&inner);
            let name = format!("remote-{number}");
            let thread = std::thread::Builder::new().name(name);
            handles.push(thread.spawn(move || inner.work())?);
        }
        Ok(Arc::new(Self {
            inner,
            threads: Mutex::new(handles),
        }))
    }

    /// Takes the link down: requests in flight fail or wait as documented at [`Remote`].
    pub fn cut(&self, why: &str) {
        let lost = {
            let mut queue = self.inner.queue.lock();
            queue.down = Some(why.to_owned());
            std::mem::take(&mut queue.jobs)
        };
        for job in lost {
            job.fail(&DeviceError::Unavailable(why.to_owned()));
        }
        self.inner.tell_link();
    }

    /// Brings it up again.
    pub fn mend(&self) {
        {
            let mut queue = self.inner.queue.lock();
            if queue.down.take().is_none() {
                return;
            }
            queue.link += 1;
            queue.kicked = true;
        }
        self.inner.changed.notify_all();
        self.inner.tell_link();
    }

    fn submit(&self, job: Job) {
        let refused = {
            let mut queue = self.inner.queue.lock();
            let error = match (&queue.down, queue.closed) {
                (_, true) => Some(DeviceError::Closed),
                (Some(why), _) => Some(DeviceError::Unavailable(why.clone())),
                _ => None,
            };
            match error {
                Some(error) => Some((job, error)),
                None => {
                    queue.jobs.push_back(job);
                    None
                }
            }
        };
        match refused {
            Some((job, error)) => job.fail(&error),
            None => drop(self.inner.changed.notify_one()),
        }
    }

    /// Waits for no thread that reads: it only keeps the device open until then.
    fn stop(&self) {
        let (jobs, fetches, inside) = {
            let mut queue = self.inner.queue.lock();
            queue.closed = true;
            (
                std::mem::take(&mut queue.jobs),
                std::mem::take(&mut queue.fetches),
                queue.inside.clone(),
            )
        };
        self.inner.changed.notify_all();
        for job in jobs {
            job.fail(&DeviceError::Closed);
        }
        if let Some(local) = self.inner.local() {
            for chunks in fetches {
                local.failed(chunks, DeviceError::Closed);
            }
        }
        for thread in std::mem::take(&mut *self.threads.lock()) {
            let id = thread.thread().id();
            if id != std::thread::current().id() && !inside.contains(&id) {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for LocalRemote {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Queue {
    /// The chunks of a run that are not being read.
    fn not_read(&self, chunks: Chunks) -> Vec<Chunks> {
        let is_read = |index: u64| {
            let mut reading = self.reading.iter();
            reading.any(|run| (run.first..run.end()).contains(&index))
        };
        let mut parts: Vec<Chunks> = Vec::new();
        for index in (chunks.first..chunks.end()).filter(|index| !is_read(*index)) {
            match parts.last_mut() {
                Some(run) if run.end() == index => run.count += 1,
                _ => parts.push(Chunks {
                    first: index,
                    count: 1,
                }),
            }
        }
        parts
    }

    /// The first chunks of a run were read.
    fn was_read(&mut self, part: Chunks) {
        let Some(at) = self.reading.iter().position(|r| r.first == part.first) else {
            return;
        };
        match self.reading[at].count.saturating_sub(part.count) {
            0 => drop(self.reading.swap_remove(at)),
            left => {
                self.reading[at] = Chunks {
                    first: part.end(),
                    count: left,
                };
            }
        }
    }
}

impl Job {
    fn fail(self, error: &DeviceError) {
        match self {
            Job::Presence(_, done) => done(Err(error.clone())),
            Job::Staged(_, _, done) => done(Err(error.clone())),
            Job::Push(_, _, done) | Job::Commit(_, _, done) => done(Err(error.clone())),
        }
    }
}

impl Inner {
    fn local(&self) -> Option<Arc<dyn Local>> {
        self.local.get()?.upgrade()
    }

    fn link(&self) -> Link {
        let queue = self.queue.lock();
        match (&queue.down, queue.closed) {
            (_, true) => Link::Gone(DeviceError::Closed),
            (Some(why), _) => Link::Down(why.clone()),
            (None, _) => Link::Up(queue.link),
        }
    }

    fn tell_link(&self) {
        let _telling = self.telling.lock();
        if let Some(local) = self.local() {
            local.link(self.link());
        }
    }

    /// One thread: foreground requests first, then others, then background fetching.
    fn work(&self) {
        loop {
            let mut queue = self.queue.lock();
            if queue.closed {
                return;
            }
            if queue.down.is_some() {
                self.changed.wait(&mut queue);
            } else if queue.handing == 0
                && let Some(chunks) = queue.fetches.pop_front()
            {
                let parts = queue.not_read(chunks);
                queue.reading.extend(&parts);
                drop(queue);
                parts.into_iter().for_each(|part| self.fetch(part));
            } else if let Some(job) = queue.jobs.pop_front() {
                let link = queue.link;
                drop(queue);
                self.run(job, link);
            } else if queue.kicked && (queue.background == 0 || queue.background + 1 < self.threads)
            {
                queue.kicked = false;
                queue.background += 1;
                // A chunk handed out now may be requested before it is registered here.
                queue.handing += 1;
                drop(queue);
                let most = AT_ONCE.max(u64::from(self.shape.chunk));
                let next = self.local().and_then(|local| local.next(most));
                {
                    let mut queue = self.queue.lock();
                    queue.handing -= 1;
                    queue.kicked |= next.is_some();
                    queue.reading.extend(next);
                }
                self.changed.notify_all();
                next.into_iter().for_each(|chunks| self.fetch(chunks));
                self.queue.lock().background -= 1;
                self.changed.notify_one();
            } else {
                self.changed.wait(&mut queue);
            }
        }
    }

    /// Reads a run that is registered as being read.
    fn fetch(&self, chunks: Chunks) {
        let bytes = u64::from(chunks.count) * u64::from(self.shape.chunk);
        self.in_flight.fetch_add(bytes, Ordering::Relaxed);
        let step = (AT_ONCE / u64::from(self.shape.chunk)).max(1);
        let mut first = chunks.first;
        while first < chunks.end() {
            let count = step.min(chunks.end() - first) as u32;
            let part = Chunks { first, count };
            let result = self.unless_closed(|| self.read(part));
            // Before the reply: requests from then on are read again.
            self.queue.lock().was_read(part);
            let Some(local) = self.local() else { break };
            match result {
                Ok(fetched) => local.arrived(fetched),
                Err(error) => local.failed(part, error),
            }
            first = part.end();
        }
        self.in_flight.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Reads the device, unless it is closed.
    fn unless_closed<T>(
        &self,
        read: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let id = std::thread::current().id();
        {
            let mut queue = self.queue.lock();
            if queue.closed {
                return Err(DeviceError::Closed);
            }
            queue.inside.push(id);
        }
        let result = read();
        self.queue.lock().inside.retain(|other| *other != id);
        result
    }

    fn read(&self, chunks: Chunks) -> Result<Vec<Fetched>, DeviceError> {
        let chunk = u64::from(self.shape.chunk);
        let start = chunks.first * chunk;
        let end = (chunks.end() * chunk).min(self.shape.size);
        let mut bytes = vec![0; end.saturating_sub(start) as usize];
        self.device.read(start, &mut bytes)?;
        self.received
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let bytes = Bytes::from(bytes);
        let fetched = (chunks.first..chunks.end()).map(|index| {
            let from = ((index - chunks.first) * chunk) as usize;
            let part = bytes.slice(from..from + self.shape.length(index) as usize);
            let content = match part.iter().all(|b| *b == 0) {
                true => Content::Zero,
                false => {
                    let digest = Digest(blake3::hash(&part).into());
                    Content::Data(part, digest)
                }
            };
            Fetched { index, content }
        });
        Ok(fetched.collect())
    }

    /// `link` is the link of the request: a reply never uses another.
    fn run(&self, job: Job, link: u64) {
        match job {
            Job::Presence(chunks, done) => {
                done(self.unless_closed(|| self.presence(chunks)));
            }
            Job::Push(epoch, changes, done) => {
                let bytes: u64 = changes.iter().map(Change::covers).sum();
                let result = self.committer.push(epoch, &changes);
                self.sent.fetch_add(bytes, Ordering::Relaxed);
                done(self.answer(result, link));
            }
            Job::Staged(epoch, from, done) => {
                let result = self.committer.staged(epoch, from);
                done(self.answer(result, link));
            }
            Job::Commit(epoch, covers, done) => {
                let result = self.committer.commit(epoch, covers);
                done(self.answer(result, link));
            }
        }
    }

    fn answer<T>(&self, result: Result<T, DeviceError>, link: u64) -> Result<T, DeviceError> {
        let queue = self.queue.lock();
        match &queue.down {
            Some(why) => Err(DeviceError::Unavailable(why.clone())),
            None if queue.link != link => Err(DeviceError::Unavailable("the link was cut".into())),
            None => result,
        }
    }

    fn presence(&self, chunks: Chunks) -> Result<Vec<Chunks>, DeviceError> {
        let chunk = u64::from(self.shape.chunk);
        let mut at = chunks.first * chunk;
        let end = (chunks.end() * chunk).min(self.shape.size);
        let mut zero: Vec<Chunks> = Vec::new();
        // Neighbouring runs of zeros count as one.
        let mut since = at;
        while at < end {
            let runs = self.device.extents(at, end - at)?;
            for run in runs {
                if run.kind == ExtentKind::Data {
                    since = run.end();
                } else {
                    let first = since.div_ceil(chunk);
                    let last = match run.end() == self.shape.size {
                        true => run.end().div_ceil(chunk),
                        false => run.end() / chunk,
                    };
                    let count = u32::try_from(last.saturating_sub(first)).unwrap_or(u32::MAX);
                    match zero.last_mut() {
                        _ if count == 0 => {}
                        Some(known) if known.first == first => known.count = count,
                        _ => zero.push(Chunks { first, count }),
                    }
                }
                at = run.end();
            }
        }
        Ok(zero)
    }
}

impl Remote for LocalRemote {
    fn shape(&self) -> Shape {
        self.inner.shape
    }

    fn read_only(&self) -> bool {
        self.inner.read_only
    }

    fn attach(&self, local: Weak<dyn Local>) {
        // A second one is not notified: the first was promised all replies.
        let _ = self.inner.local.set(local);
    }

    fn fetch(&self, chunks: Chunks) {
        let closed = {
            let mut queue = self.inner.queue.lock();
            if !queue.closed {
                queue.fetches.push_back(chunks);
            }
            queue.closed
        };
        match closed {
            false => drop(self.inner.changed.notify_one()),
            true => {
                if let Some(local) = self.inner.local() {
                    local.failed(chunks, DeviceError::Closed);
                }
            }
        }
    }

    fn kick(&self) {
        self.inner.queue.lock().kicked = true;
        self.inner.changed.notify_one();
    }

    fn presence(&self, chunks: Chunks, done: PresenceDone) {
        self.submit(Job::Presence(chunks, done));
    }

    fn push(&self, epoch: Epoch, changes: Vec<Change>, done: Done) {
        self.submit(Job::Push(epoch, changes, done));
    }

    fn staged(&self, epoch: Epoch, from: u64, done: StagedDone) {
        self.submit(Job::Staged(epoch, from, done));
    }

    fn commit(&self, epoch: Epoch, covers: u64, done: Done) {
        self.submit(Job::Commit(epoch, covers, done));
    }

    fn committed(&self) -> Epoch {
        self.inner.committer.committed()
    }

    fn link(&self) -> Link {
        self.inner.link()
    }

    fn traffic(&self) -> Traffic {
        let received = self.inner.received.load(Ordering::Relaxed);
        Traffic {
            in_flight: self.inner.in_flight.load(Ordering::Relaxed),
            window: self.inner.window,
            push_window: self.inner.window,
            received,
            sent: self.inner.sent.load(Ordering::Relaxed),
            round_trip: 0.0,
            rate: received as f64 / self.inner.started.elapsed().as_secs_f64().max(0.001),
        }
    }

    fn close(&self, done: Done) {
        self.stop();
        done(Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::backend::MemoryDevice;
    use crate::stage::{Entry, Gate, Gated, Request};

    /// Processes a link failure late: after the report that the link is up, or after a while.
    struct Late {
        is_told: Sender<()>,
        up: (Sender<()>, Mutex<Receiver<()>>),
        noted: Mutex<Vec<Link>>,
    }

    impl Local for Late {
        fn arrived(&self, _: Vec<Fetched>) {}

        fn failed(&self, _: Chunks, _: DeviceError) {}

        fn next(&self, _: u64) -> Option<Chunks> {
            None
        }

        fn link(&self, link: Link) {
            let is_up = matches!(link, Link::Up(_));
            if !is_up {
                let _ = self.is_told.send(());
                let _ = self.up.1.lock().recv_timeout(Duration::from_millis(300));
            }
            self.noted.lock().push(link);
            if is_up {
                let _ = self.up.0.send(());
            }
        }
    }

    /// Otherwise a device would consider the link down forever, and its writers would wait for space forever.
    #[test]
    fn the_last_report_of_the_link_is_its_state() {
        let remote = LocalRemote::new(Arc::new(MemoryDevice::new(4096)), 4096, 1, None).unwrap();
        let (is_told, told) = channel();
        let (up, is_up) = channel();
        let late = Arc::new(Late {
            is_told,
            up: (up, Mutex::new(is_up)),
            noted: Mutex::default(),
        });
        let local: Weak<Late> = Arc::downgrade(&late);
        remote.attach(local);
        std::thread::scope(|scope| {
            scope.spawn(|| remote.cut("a test"));
            told.recv_timeout(Duration::from_secs(60)).unwrap();
            remote.mend();
        });
        assert!(matches!(remote.link(), Link::Up(_)));
        let noted = late.noted.lock();
        assert!(
            matches!(noted[..], [Link::Down(_), Link::Up(_)]),
            "{noted:?}"
        );
    }

    /// A device whose reads begin, and end when the test says so.
    struct Dead {
        begun: Sender<()>,
        go: Mutex<Receiver<()>>,
    }

    impl Gate for Dead {
        type Pass<'a> = ();

        fn enter(&self, _: &Request) -> Result<Entry<()>, DeviceError> {
            let _ = self.begun.send(());
            let _ = self.go.lock().recv_timeout(Duration::from_secs(60));
            Ok(Entry::Pass(()))
        }

        fn leave(&self, (): ()) -> Result<(), DeviceError> {
            Ok(())
        }

        fn cost(&self, inner: drover_core::Cost) -> drover_core::Cost {
            inner
        }
    }

    struct Failures(Mutex<Sender<(u32, DeviceError)>>);

    impl Local for Failures {
        fn arrived(&self, _: Vec<Fetched>) {}

        fn failed(&self, chunks: Chunks, error: DeviceError) {
            let _ = self.0.lock().send((chunks.count, error));
        }

        fn next(&self, _: u64) -> Option<Chunks> {
            None
        }

        fn link(&self, _: Link) {}
    }

    /// A store that does not answer makes each read take minutes: closing waits for none, and no further one begins.
    #[test]
    fn closing_waits_for_no_read() {
        let (begun, is_begun) = channel();
        let (go, going) = channel();
        let dead = Dead {
            begun,
            go: Mutex::new(going),
        };
        let device = Gated::with_gate(MemoryDevice::new(4 << 20), dead);
        let remote = LocalRemote::new(Arc::new(device), 1 << 20, 1, None).unwrap();
        let (failed, failures) = channel();
        let local = Arc::new(Failures(Mutex::new(failed)));
        let weak: Weak<Failures> = Arc::downgrade(&local);
        remote.attach(weak);
        remote.fetch(Chunks { first: 0, count: 3 });
        is_begun.recv_timeout(Duration::from_secs(60)).unwrap();
        let (done, is_done) = channel();
        remote.close(Box::new(move |result| drop(done.send(result))));
        // It did not wait: the read is still under way.
        assert!(matches!(is_done.try_recv(), Ok(Ok(()))));
        go.send(()).unwrap();
        for _ in 0..2 {
            let failed = failures.recv_timeout(Duration::from_secs(60));
            assert!(matches!(failed, Ok((1, DeviceError::Closed))), "{failed:?}");
        }
        assert!(is_begun.try_recv().is_err());
    }
}
