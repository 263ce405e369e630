//! The threads that read disks, hash and compress: never the runtime's own.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use crate::compress::{Packer, Unpacker};

/// What a thread of the pool works with.
pub struct Tools {
    /// Packs answers.
    pub packer: Packer,
    /// Unpacks requests' bodies.
    pub unpacker: Unpacker,
    /// Room for chunks.
    pub buffer: Vec<u8>,
}

impl Tools {
    /// Tools for one thread.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            packer: Packer::new()?,
            unpacker: Unpacker::new()?,
            buffer: Vec::new(),
        })
    }
}

type Job = Box<dyn FnOnce(&mut Tools) + Send>;

/// Threads with two queues. How many jobs wait is bounded by those who submit: a lane has a limited number of units
/// under way.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    more: Condvar,
    /// Threads that background work may have at once: one fewer than there are.
    most_back: usize,
}

#[derive(Default)]
struct State {
    front: VecDeque<Job>,
    back: VecDeque<Job>,
    running_back: usize,
    closed: bool,
}

impl Pool {
    /// A pool of so many threads, at least two.
    ///
    /// # Errors
    /// What the system reports when it cannot start them.
    pub fn new(threads: usize) -> io::Result<Self> {
        let threads = threads.max(2);
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            more: Condvar::new(),
            most_back: threads - 1,
        });
        let mut pool = Self {
            shared,
            threads: Vec::new(),
        };
        for n in 0..threads {
            let shared = pool.shared.clone();
            let mut tools = Tools::new()?;
            let thread = std::thread::Builder::new()
                .name(format!("mount-{n}"))
                .spawn(move || shared.work(&mut tools))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Has a job done; one that somebody waits for before all that nobody does.
    pub fn submit(&self, front: bool, job: impl FnOnce(&mut Tools) + Send + 'static) {
        let mut state = self.shared.state.lock();
        if front {
            state.front.push_back(Box::new(job));
        } else {
            state.back.push_back(Box::new(job));
        }
        drop(state);
        self.shared.more.notify_one();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.more.notify_all();
        let own = std::thread::current().id();
        for thread in self.threads.drain(..) {
            // The last one to let go of the pool may be a job of its own.
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
    }
}

impl Shared {
    fn work(&self, tools: &mut Tools) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.front.pop_front() {
                drop(state);
                job(tools);
            } else if state.running_back < self.most_back
                && let Some(job) = state.back.pop_front()
            {
                state.running_back += 1;
                drop(state);
                job(tools);
                self.state.lock().running_back -= 1;
                // Whoever was woken for background work and found no room for it.
                self.more.notify_one();
            } else if state.closed {
                return;
            } else {
                self.more.wait(&mut state);
                continue;
            }
            state = self.state.lock();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_somebody_waits_for_goes_first_and_finds_a_thread() {
        let pool = Pool::new(2).unwrap();
        let (say, hear) = mpsc::channel();
        let (go, gate) = mpsc::channel::<()>();
        // Background work that does not end takes all threads but one.
        pool.submit(false, move |_| gate.recv().unwrap());
        for n in 0..3 {
            let say = say.clone();
            pool.submit(false, move |_| say.send(n).unwrap());
        }
        let front = say.clone();
        pool.submit(true, move |_| front.send(100).unwrap());
        assert_eq!(hear.recv().unwrap(), 100);
        assert!(hear.try_recv().is_err());
        go.send(()).unwrap();
        let rest: Vec<i32> = (0..3).map(|_| hear.recv().unwrap()).collect();
        assert_eq!(rest, [0, 1, 2]);
    }
}
