//! The thread pool of front ends, for requests that may block: on a disk, a network, or room in a cache.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// How long an idle thread is kept, with its stack and state (starting one costs some 30 microseconds).
const LINGER: Duration = Duration::from_secs(5);

/// Called for each job of a thread; it may keep state between jobs.
type Worker<J> = Box<dyn FnMut(J)>;

/// A queue and the threads that serve it: started on demand up to a limit, and ended when idle. The submitter must
/// bound the queue's length. Once dropped, it takes no more jobs; queued ones are still executed.
pub(crate) struct Pool<J: Send + 'static>(Arc<Shared<J>>);

struct Shared<J> {
    name: &'static str,
    limit: usize,
    worker: Box<dyn Fn() -> Worker<J> + Send + Sync>,
    state: Mutex<Jobs<J>>,
    work: Condvar,
}

struct Jobs<J> {
    queue: VecDeque<J>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl<J: Send + 'static> Pool<J> {
    /// At most `limit` threads (at least one), each of which starts by creating its `worker`.
    pub(crate) fn new<W: FnMut(J) + 'static>(
        name: &'static str,
        limit: usize,
        worker: impl Fn() -> W + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Shared {
            name,
            limit: limit.max(1),
            worker: Box::new(move || Box::new(worker())),
            state: Mutex::new(Jobs {
                queue: VecDeque::new(),
                threads: 0,
                idle: 0,
                closed: false,
            }),
            work: Condvar::new(),
        }))
    }

    /// Queues a job; executes it on this thread if not a single one can be started.
    pub(crate) fn submit(&self, job: J) {
        let shared = &self.0;
        let mut state = shared.state.lock();
        state.queue.push_back(job);
        if state.queue.len() <= state.idle {
            shared.work.notify_one();
            return;
        }
        if state.threads >= shared.limit {
            return;
        }
        state.threads += 1;
        drop(state);
        let theirs = Arc::clone(shared);
        let thread = std::thread::Builder::new().name(shared.name.into());
        if let Err(error) = thread.spawn(move || theirs.serve()) {
            tracing::warn!(%error, "{}: cannot start another thread", shared.name);
            let mut state = shared.state.lock();
            state.threads -= 1;
            if state.threads == 0 {
                shared.empty(&mut state, &mut (shared.worker)());
            }
        }
    }
}

impl<J: Send + 'static> Drop for Pool<J> {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.work.notify_all();
    }
}

impl<J> Shared<J> {
    fn serve(&self) {
        let mut worker = (self.worker)();
        let mut state = self.state.lock();
        loop {
            self.empty(&mut state, &mut worker);
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

    fn empty(&self, state: &mut MutexGuard<'_, Jobs<J>>, worker: &mut Worker<J>) {
        while let Some(job) = state.queue.pop_front() {
            // A panicking job informs its submitter through what it drops; the thread continues.
            MutexGuard::unlocked(state, || {
                drop(catch_unwind(AssertUnwindSafe(|| worker(job))));
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn no_more_threads_than_allowed_and_every_job_is_done() {
        let (now, top) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (done, all) = mpsc::channel();
        let pool = {
            let (now, top) = (Arc::clone(&now), Arc::clone(&top));
            Pool::new("test", 3, move || {
                let (now, top, done) = (Arc::clone(&now), Arc::clone(&top), done.clone());
                move |n: i32| {
                    top.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(1));
                    now.fetch_sub(1, Ordering::SeqCst);
                    done.send(n).unwrap();
                }
            })
        };
        for n in 0..40 {
            pool.submit(n);
        }
        drop(pool);
        let mut seen: Vec<i32> = all.iter().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..40).collect::<Vec<_>>());
        assert!(top.load(Ordering::SeqCst) <= 3, "{top:?}");
    }

    #[test]
    fn a_job_that_panics_takes_no_thread_with_it() {
        let pool = Pool::new("test", 1, || {
            |job: Option<mpsc::Sender<i32>>| job.expect("a panic on purpose").send(7).unwrap()
        });
        pool.submit(None);
        let (done, waits) = mpsc::channel();
        pool.submit(Some(done));
        assert_eq!(waits.recv_timeout(Duration::from_secs(60)), Ok(7));
    }
}
