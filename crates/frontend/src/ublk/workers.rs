//! Worker threads for requests that may block, and their completion on the queue's thread.
// prctl has no safe wrapper.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::abi::Descriptor;
use super::request::{Buffer, Target};
use crate::pool::Pool;

/// Results for a queue's thread: a list, and an eventfd that its ring polls.
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
        // Fails only at the counter's maximum, when it is signalled already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// The results since the last call; clears the eventfd first, so that none is missed.
    pub(super) fn take(&self) -> Vec<(u16, i32)> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.bell, &mut count); // would block if not signalled
        std::mem::take(&mut *self.done.lock())
    }
}

/// A request and the destination of its result.
pub(super) struct Job {
    pub(super) queue: u16,
    pub(super) tag: u16,
    pub(super) descriptor: Descriptor,
    pub(super) mailbox: Arc<Mailbox>,
}

/// Threads for requests that wait for a disk or a network. The backlog is bounded by the queues' depth: a tag has at
/// most one request.
pub(super) struct Workers {
    target: Arc<Target>,
    requests: Pool<Job>,
    /// For those that may take long, so that they do not delay the others.
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

    /// Queues a request.
    pub(super) fn submit(&self, job: Job) {
        match self.target.may_wait_long(&job.descriptor) {
            true => self.changes.submit(job),
            false => self.requests.submit(job),
        }
    }
}

/// Tells the kernel that this thread serves a block device, so that its allocations do not wait for write-back to that
/// device. Needs `CAP_SYS_RESOURCE`; without it, only extreme memory pressure is a problem.
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
