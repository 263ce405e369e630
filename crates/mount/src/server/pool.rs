//! The thread pool that reads disks, hashes and compresses, so that the runtime's threads never block.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use drover_net::PeerKey;
use drover_store::lease::MountId;
use parking_lot::{Condvar, Mutex};

use crate::compress::{Packer, Unpacker};

mod schedule;

pub use schedule::Kind;

use schedule::{Limits, Running, Schedule};

/// State that a thread of the pool reuses between jobs.
pub struct WorkerScratch {
    /// Compresses replies.
    pub packer: Packer,
    /// Decompresses request bodies.
    pub unpacker: Unpacker,
    /// Buffer for chunks.
    pub buffer: Vec<u8>,
}

impl WorkerScratch {
    /// Creates the state of one thread.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            packer: Packer::new()?,
            unpacker: Unpacker::new()?,
            buffer: Vec::new(),
        })
    }
}

type Job = Box<dyn FnOnce(&mut WorkerScratch) + Send>;

/// A pool with separate threads for reads and for changes. Callers bound the number of queued jobs: a connection has a
/// limited number of units in flight.
pub struct Pool {
    shared: Arc<PoolShared>,
    threads: Vec<JoinHandle<()>>,
}

struct PoolShared {
    state: Mutex<PoolState>,
    reads: Condvar,
    changes: Condvar,
}

struct PoolState {
    schedule: JobSchedule,
    closed: bool,
}

/// The peer and the mount that a job belongs to.
pub type JobOwner = (PeerKey, MountId);

type JobSchedule = Schedule<PeerKey, MountId, Job>;

type Next = fn(&mut JobSchedule) -> Option<(Running<PeerKey, MountId>, Job)>;

impl Pool {
    /// Starts a pool with the threads of [`Limits::new`].
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn new(threads: usize) -> io::Result<Self> {
        let limits = Limits::new(threads);
        let shared = Arc::new(PoolShared {
            state: Mutex::new(PoolState {
                schedule: Schedule::new(limits),
                closed: false,
            }),
            reads: Condvar::new(),
            changes: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            threads: Vec::new(),
        };
        for n in 0..limits.reading {
            pool.start(format!("mount-read-{n}"), true)?;
        }
        for n in 0..limits.changing {
            pool.start(format!("mount-write-{n}"), false)?;
        }
        Ok(pool)
    }

    fn start(&mut self, name: String, reads: bool) -> io::Result<()> {
        let shared = self.shared.clone();
        let mut scratch = WorkerScratch::new()?;
        let thread = std::thread::Builder::new().name(name);
        self.threads.push(thread.spawn(move || match reads {
            true => shared.work(&mut scratch, &shared.reads, Schedule::next_read),
            false => shared.work(&mut scratch, &shared.changes, Schedule::next_change),
        })?);
        Ok(())
    }

    /// Queues a job of a mount that reads or writes so many bytes.
    pub fn submit(
        &self,
        who: JobOwner,
        kind: Kind,
        bytes: u64,
        job: impl FnOnce(&mut WorkerScratch) + Send + 'static,
    ) {
        let mut state = self.shared.state.lock();
        state.schedule.put(who, kind, bytes, Box::new(job));
        drop(state);
        self.shared.more(kind).notify_one();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.reads.notify_all();
        self.shared.changes.notify_all();
        let own = std::thread::current().id();
        for thread in self.threads.drain(..) {
            // The last reference to the pool may be dropped by one of its own jobs.
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
    }
}

impl PoolShared {
    fn more(&self, kind: Kind) -> &Condvar {
        match kind {
            Kind::Front | Kind::Back => &self.reads,
            Kind::Change | Kind::Write(..) | Kind::Sync => &self.changes,
        }
    }

    fn work(&self, scratch: &mut WorkerScratch, more: &Condvar, next: Next) {
        let mut state = self.state.lock();
        loop {
            if let Some((running, job)) = next(&mut state.schedule) {
                if matches!(running.kind, Kind::Change | Kind::Write(..) | Kind::Sync)
                    && state.schedule.has_changes()
                {
                    // The end of a job wakes one thread, but several jobs may have waited for it.
                    self.changes.notify_one();
                }
                drop(state);
                let began = Instant::now();
                job(scratch);
                let took = began.elapsed();
                state = self.state.lock();
                state.schedule.done(running, took);
                // Wakes a thread that was blocked by this job.
                more.notify_one();
            } else if state.closed {
                return;
            } else {
                more.wait(&mut state);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn foreground_work_goes_first_and_finds_a_thread() {
        let pool = Pool::new(2).unwrap();
        let who = |n| (PeerKey([n; 32]), MountId([n; 16]));
        let (say, hear) = mpsc::channel();
        let (go, gate) = mpsc::channel::<()>();
        // A background job that does not end occupies all threads for background work.
        pool.submit(who(1), Kind::Back, 0, move |_| gate.recv().unwrap());
        for n in 0..3 {
            let say = say.clone();
            pool.submit(who(1), Kind::Back, 0, move |_| say.send(n).unwrap());
        }
        let front = say.clone();
        pool.submit(who(1), Kind::Front, 0, move |_| front.send(100).unwrap());
        assert_eq!(hear.recv().unwrap(), 100);
        assert!(hear.try_recv().is_err());
        go.send(()).unwrap();
        let rest: Vec<i32> = (0..3).map(|_| hear.recv().unwrap()).collect();
        assert_eq!(rest, [0, 1, 2]);
    }

    #[test]
    fn writes_that_waited_for_a_sync_are_all_begun_though_none_of_them_ends() {
        let pool = Pool::new(4).unwrap();
        let who = (PeerKey([1; 32]), MountId([1; 16]));
        let (say, hear) = mpsc::channel();
        let (end_sync, sync) = mpsc::channel::<()>();
        pool.submit(who, Kind::Sync, 0, move |_| {
            let _ = sync.recv();
        });
        let mut gates = Vec::new();
        for at in 0..3 {
            let (gate, passes) = mpsc::channel::<()>();
            gates.push(gate);
            let say = say.clone();
            pool.submit(who, Kind::Write(at, at + 1), 0, move |_| {
                say.send(at).unwrap();
                let _ = passes.recv();
            });
        }
        // By now the woken threads have most likely seen that the sync blocks them.
        std::thread::sleep(std::time::Duration::from_millis(100));
        end_sync.send(()).unwrap();
        for _ in 0..3 {
            let begun = hear.recv_timeout(std::time::Duration::from_secs(60));
            begun.expect("a write is begun");
        }
        drop(gates);
    }

    #[test]
    fn changes_that_do_not_end_keep_nothing_from_readers_and_other_mounts() {
        let pool = Pool::new(2).unwrap();
        let who = |n| (PeerKey([n; 32]), MountId([n; 16]));
        let (say, hear) = mpsc::channel();
        let (go, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        for n in 0..50 {
            let gate = gate.clone();
            let kind = if n % 2 == 0 { Kind::Sync } else { Kind::Change };
            pool.submit(who(1), kind, 0, move |_| {
                let _ = gate.lock().recv();
            });
        }
        for (n, kind) in [
            (1, Kind::Front),
            (1, Kind::Back),
            (2, Kind::Change),
            (3, Kind::Sync),
        ] {
            let say = say.clone();
            pool.submit(who(n), kind, 0, move |_| say.send(n).unwrap());
        }
        let mut done: Vec<u8> = (0..4).map(|_| hear.recv().unwrap()).collect();
        done.sort_unstable();
        assert_eq!(done, [1, 1, 2, 3]);
        drop(go);
    }
}
