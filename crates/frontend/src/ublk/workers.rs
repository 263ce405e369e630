//! Worker threads for requests that may wait, and their completion back to the queue.
// prctl has no safe wrapper.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::abi::Descriptor;
use super::request::{Buffer, Target};
use crate::pool::Pool;

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

/// Threads for requests that wait: for a disk, for a network. What waits for a thread is bounded by the queues' depth:
/// every tag has one request at most.
pub(super) struct Workers {
    target: Arc<Target>,
    requests: Pool<Job>,
    /// For those that may wait for long: the others do not wait for them.
    changes: Pool<Job>,
}

impl Workers {
    /// At most `limit` threads, and half as many for changes.
    pub(super) fn new(target: Arc<Target>, limit: usize) -> Self {
        let pool = |limit| {
            let target = Arc::clone(&target);
            Pool::new("ublk-worker", limit, move || {
                serve_writeback();
                let (target, mut buffer) = (Arc::clone(&target), Buffer::new());
                move |job: Job| {
                    let result = target.perform(job.queue, job.tag, &job.descriptor, &mut buffer);
                    job.mailbox.put(job.tag, result);
                }
            })
        };
        Self {
            requests: pool(limit),
            changes: pool(limit / 2),
            target,
        }
    }

    /// Takes a request over.
    pub(super) fn submit(&self, job: Job) {
        match self.target.may_wait_long(&job.descriptor) {
            true => self.changes.submit(job),
            false => self.requests.submit(job),
        }
    }
}

/// Tells the kernel that this thread serves a block device: memory that it asks for is not to be won by writing to that
/// very device. Needs `CAP_SYS_RESOURCE`; without it all works but under the hardest want of memory.
pub(super) fn serve_writeback() {
    /// `linux/prctl.h`
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    let (on, none): (libc::c_ulong, libc::c_ulong) = (1, 0);
    // SAFETY: PR_SET_IO_FLUSHER takes a number and three zeros, and touches no memory.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, on, none, none, none) };
    if result != 0 {
        tracing::debug!("not an I/O flusher: {}", io::Error::last_os_error());
    }
}
