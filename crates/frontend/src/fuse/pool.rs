//! Threads for requests that wait: started when they are needed, gone when they are idle, bounded in number, and in
//! jobs and bytes that wait for one.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Jobs that wait for a thread; who brings one more waits himself.
pub(super) const MAX_JOBS: usize = 4096;
/// Bytes that waiting and running jobs carry.
pub(super) const MAX_BYTES: usize = 128 << 20;
/// How long a thread without work stays.
const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// The threads. Dropped, it takes no more jobs; those it has are still done.
pub(super) struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    most: usize,
    state: Mutex<State>,
    work: Condvar,
    room: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<(Job, usize)>,
    bytes: usize,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Pool {
    /// At most `most` threads.
    pub(super) fn new(most: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                most: most.max(1),
                state: Mutex::default(),
                work: Condvar::new(),
                room: Condvar::new(),
            }),
        }
    }

    /// Has `job`, which carries `bytes` bytes, done by a thread. Waits while there are too many.
    ///
    /// Where not a single thread can be started, the caller does the job.
    pub(super) fn submit(&self, bytes: usize, job: impl FnOnce() + Send + 'static) {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        // A job larger than the limit goes alone.
        while state.jobs.len() >= MAX_JOBS || (state.bytes > 0 && state.bytes + bytes > MAX_BYTES) {
            shared.room.wait(&mut state);
        }
        state.bytes += bytes;
        state.jobs.push_back((Box::new(job), bytes));
        if state.idle >= state.jobs.len() || state.threads >= shared.most {
            drop(state);
            shared.work.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let theirs = shared.clone();
        let started = std::thread::Builder::new()
            .name("fuse-wait".into())
            .spawn(move || theirs.run());
        if started.is_err() {
            let mut state = shared.state.lock();
            state.threads -= 1;
            if state.threads == 0
                && let Some((job, bytes)) = state.jobs.pop_front()
            {
                drop(state);
                job();
                shared.done(bytes);
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some((job, bytes)) = state.jobs.pop_front() {
                drop(state);
                // A job that panics has its reply dropped, which says EIO; the thread goes on.
                let _ = std::panic::catch_unwind(AssertUnwindSafe(job));
                self.done(bytes);
                state = self.state.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let idle = self.work.wait_for(&mut state, IDLE).timed_out();
            state.idle -= 1;
            if idle && state.jobs.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }

    fn done(&self, bytes: usize) {
        self.state.lock().bytes -= bytes;
        self.room.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn no_more_threads_than_allowed_and_every_job_is_done() {
        let pool = Pool::new(3);
        let (now, top) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (done, all) = mpsc::channel();
        for n in 0..40 {
            let (now, top, done) = (now.clone(), top.clone(), done.clone());
            pool.submit(MAX_BYTES / 2, move || {
                top.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
                now.fetch_sub(1, Ordering::SeqCst);
                done.send(n).unwrap();
            });
        }
        drop((pool, done));
        let mut seen: Vec<i32> = all.iter().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..40).collect::<Vec<_>>());
        // Two halves fill the bytes: the third thread has nothing to do.
        assert!(top.load(Ordering::SeqCst) <= 2, "{top:?}");
    }

    #[test]
    fn a_job_that_panics_takes_no_thread_with_it() {
        let pool = Pool::new(1);
        pool.submit(0, || panic!("on purpose"));
        let (done, waits) = mpsc::channel();
        pool.submit(0, move || done.send(7).unwrap());
        assert_eq!(waits.recv_timeout(Duration::from_secs(5)), Ok(7));
    }
}
