//! The threads that wait for a connection's device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// How long a thread without work stays (it costs a stack, a new one costs some 30 microseconds).
const LINGER: Duration = Duration::from_secs(5);

/// A queue and the threads that serve it: they come when work does, up to a limit, and go when there is none. The
/// queue's length is limited by the permits that its jobs hold.
pub(super) struct Lane<J: Send + 'static> {
    name: &'static str,
    limit: usize,
    run: Box<dyn Fn(J) + Send + Sync>,
    state: Mutex<State<J>>,
    work: Condvar,
}

struct State<J> {
    queue: VecDeque<J>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl<J: Send + 'static> Lane<J> {
    /// A lane of at most `limit` threads. `run` does not panic.
    pub(super) fn new(
        name: &'static str,
        limit: usize,
        run: impl Fn(J) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            limit: limit.max(1),
            run: Box::new(run),
            state: Mutex::new(State {
                queue: VecDeque::new(),
                threads: 0,
                idle: 0,
                closed: false,
            }),
            work: Condvar::new(),
        })
    }

    /// Has a job run, soon, by some thread.
    pub(super) fn submit(self: &Arc<Self>, job: J) {
        let mut state = self.state.lock();
        state.queue.push_back(job);
        if state.queue.len() <= state.idle {
            self.work.notify_one();
            return;
        }
        if state.threads >= self.limit {
            return;
        }
        state.threads += 1;
        drop(state);
        let lane = Arc::clone(self);
        let thread = std::thread::Builder::new().name(self.name.into());
        if let Err(error) = thread.spawn(move || lane.serve()) {
            // The system has no more threads: those that there are do it, or this one.
            tracing::warn!(%error, "nbd: no more threads");
            let mut state = self.state.lock();
            state.threads -= 1;
            if state.threads == 0 {
                while let Some(job) = state.queue.pop_front() {
                    parking_lot::MutexGuard::unlocked(&mut state, || (self.run)(job));
                }
            }
        }
    }

    fn serve(&self) {
        let mut state = self.state.lock();
        loop {
            while let Some(job) = state.queue.pop_front() {
                parking_lot::MutexGuard::unlocked(&mut state, || (self.run)(job));
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let late = self.work.wait_for(&mut state, LINGER).timed_out();
            state.idle -= 1;
            if late && state.queue.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }

    /// Lets the threads go once the queue is empty.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.work.notify_all();
    }
}
