//! Threads for requests that wait: for a disk, for a network. At most [`Pool::new`]'s limit of them, which come as they
//! are needed and go when they are not. What waits for a thread is bounded by the queues' depth: every tag has one request at most.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::abi::Descriptor;
use super::request::{Buffer, Target};

/// How long a thread without work stays, with its stack and its buffer.
const LINGER: Duration = Duration::from_secs(5);

/// Where a queue's thread is told what became of requests: a list, and an eventfd that its ring watches.
pub(super) struct Mailbox {
    done: Mutex<Vec<(u16, i32)>>,
    pub(super) bell: OwnedFd,
}

impl Mailbox {
    pub(super) fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Self {
            done: Mutex::default(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn put(&self, tag: u16, result: i32) {
        self.done.lock().push((tag, result));
        // Fails only with 2^64 rings unheard, and then it rings already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// What came since the last time; silences the bell first, so that nothing is missed.
    pub(super) fn take(&self) -> Vec<(u16, i32)> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.bell, &mut count); // would block when it has not rung
        std::mem::take(&mut *self.done.lock())
    }
}

/// A request and where its result goes.
pub(super) struct Job {
    pub(super) queue: u16,
    pub(super) tag: u16,
    pub(super) descriptor: Descriptor,
    pub(super) mailbox: Arc<Mailbox>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Those that may wait for long, and how many of them threads are at.
    changes: VecDeque<Job>,
    changing: usize,
    threads: usize,
    idle: usize,
    closed: bool,
}

struct Inner {
    target: Arc<Target>,
    limit: usize,
    /// Threads that wait for changes at most: the rest is for what need not wait for them.
    most_changing: usize,
    state: Mutex<State>,
    more: Condvar,
}

impl State {
    /// The next request, and whether it is a change that may wait for long.
    fn next(&mut self, most_changing: usize) -> Option<(Job, bool)> {
        if let Some(job) = self.jobs.pop_front() {
            return Some((job, false));
        }
        if self.changing >= most_changing {
            return None;
        }
        let job = self.changes.pop_front()?;
        self.changing += 1;
        Some((job, true))
    }

    /// How many threads there is something to do for.
    fn wanted(&self, most_changing: usize) -> usize {
        let changes = self.changes.len().min(most_changing - self.changing);
        self.jobs.len() + changes
    }
}

/// The pool. Its threads end when the last of its handles is gone and what was given to it is done.
pub(super) struct Pool(Arc<Inner>);

impl Pool {
    pub(super) fn new(target: Arc<Target>, limit: usize) -> Self {
        Self(Arc::new(Inner {
            target,
            limit,
            most_changing: (limit / 2).max(1),
            state: Mutex::default(),
            more: Condvar::new(),
        }))
    }

    /// Takes a request over. Where no thread can be started and none runs, does it on the spot.
    pub(super) fn submit(&self, job: Job) {
        let mut state = self.0.state.lock();
        match self.0.target.may_wait_long(&job.descriptor) {
            true => state.changes.push_back(job),
            false => state.jobs.push_back(job),
        }
        let wanted = state.wanted(self.0.most_changing);
        if state.idle >= wanted {
            self.0.more.notify_one();
            return;
        }
        if state.threads >= self.0.limit {
            return;
        }
        let inner = self.0.clone();
        state.threads += 1;
        let started = thread::Builder::new()
            .name("ublk-worker".into())
            .spawn(move || inner.work());
        if let Err(error) = started {
            state.threads -= 1;
            tracing::warn!(%error, "no thread for a ublk request");
            if state.threads == 0 {
                let job = state.next(self.0.most_changing);
                drop(state);
                if let Some((job, long)) = job {
                    self.0.perform(&job, &mut Buffer::new());
                    self.0.state.lock().changing -= usize::from(long);
                }
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.more.notify_all();
    }
}

impl Inner {
    fn work(&self) {
        super::queue::serve_writeback();
        let mut buffer = Buffer::new();
        let mut state = self.state.lock();
        loop {
            if let Some((job, long)) = state.next(self.most_changing) {
                drop(state);
                self.perform(&job, &mut buffer);
                state = self.state.lock();
                state.changing -= usize::from(long);
            } else if state.closed && state.changes.is_empty() {
                state.threads -= 1;
                return;
            } else {
                state.idle += 1;
                let late = self.more.wait_for(&mut state, LINGER).timed_out();
                state.idle -= 1;
                if late && state.wanted(self.most_changing) == 0 {
                    state.threads -= 1;
                    return;
                }
            }
        }
    }

    fn perform(&self, job: &Job, buffer: &mut Buffer) {
        let result = self
            .target
            .perform(job.queue, job.tag, &job.descriptor, buffer);
        job.mailbox.put(job.tag, result);
    }
}
