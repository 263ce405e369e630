//! The threads of a region: those that serve faults, and those that populate it.
//!
//! Threads that serve faults follow the leader/followers pattern: one polls, reads a fault, makes another thread the
//! leader and serves the fault itself. So a fault is not handed between threads, and does not wake all of them.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use drover_core::DeviceError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::retries::backoff;
use super::shared::Shared;
use super::table::PageState;
use super::uffd::Fault;

/// Bytes per read of populating.
const POPULATE_RUN: usize = 256 << 10;
/// How long populating yields to faults before each read, at most.
const STAND_BACK: Duration = Duration::from_millis(50);

impl Shared {
    /// Serves faults until the region is closed.
    pub(super) fn serve(&self) {
        while let Some(fault) = self.next_fault() {
            let Some(offset) = self.memory.offset(fault.address) else {
                continue;
            };
            self.counts.faults.fetch_add(1, Ordering::Relaxed);
            self.serve_fault(offset / self.unit);
        }
    }

    /// Waits for a fault, as the leader. `None` if the region is closed.
    fn next_fault(&self) -> Option<Fault> {
        let _leader = self.leader.lock();
        loop {
            if self.is_closed() {
                return None;
            }
            let (due, wait) = self.retries.lock().due(Instant::now());
            for unit in due {
                // The waiting threads fault again, which triggers the next attempt.
                self.wake(unit..unit + 1);
            }
            match self.uffd.next() {
                Ok(Some(fault)) => return Some(fault),
                Ok(None) => {}
                Err(error) => {
                    tracing::error!("cannot read a page fault: {error}");
                    return None;
                }
            }
            let mut fds = [
                PollFd::from_borrowed_fd(self.uffd.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN),
            ];
            let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
            match poll(&mut fds, wait.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("cannot wait for page faults: {error}");
                    return None;
                }
            }
            if !fds[1].revents().is_empty() && !self.is_closed() {
                let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
            }
        }
    }

    fn serve_fault(&self, unit: usize) {
        match self.table.state(unit) {
            // The thread that holds the unit wakes this fault's thread too.
            PageState::Busy => {
                self.counts.shared.fetch_add(1, Ordering::Relaxed);
                return;
            }
            PageState::Failed => return self.wake(unit..unit + 1),
            PageState::Present => return self.found_present(unit),
            PageState::Absent => {}
        }
        let window = self.streams.lock().fault(unit);
        let claimed = self.table.claim(unit, window.now);
        if claimed.is_empty() {
            self.counts.shared.fetch_add(1, Ordering::Relaxed);
            // The other thread may have finished: then this one must fault again, or is served already.
            if self.table.state(unit) != PageState::Busy {
                self.wake(unit..unit + 1);
            }
            return;
        }
        self.demand.fetch_add(1, Ordering::SeqCst);
        let end = claimed.end;
        let alone = claimed.len() == 1;
        if window.ahead > 0 {
            self.announce(end..end + 2 * window.ahead);
        }
        let mut result = self.fetch(claimed, Some(unit));
        if result.is_err() && !alone && self.table.state(unit) == PageState::Absent {
            // A neighbour's failure does not concern this page.
            let again = self.table.claim(unit, 1);
            result = self.fetch(again, Some(unit));
        }
        self.demand.fetch_sub(1, Ordering::SeqCst);
        match result {
            Err(error) if self.table.state(unit) != PageState::Present => self.failed(unit, &error),
            result => {
                self.retries.lock().forget(unit);
                if result.is_ok() && window.ahead > 0 && end < self.table.len() {
                    // Read-ahead while the reader uses what it got. A failure shows when somebody needs the page.
                    let claimed = self.table.claim(end, window.ahead);
                    let _ = self.fetch(claimed, None);
                }
                self.keep_to_limit();
            }
        }
    }

    /// A fault on a page that is present: it was filled since, or something else has dropped it.
    fn found_present(&self, unit: usize) {
        let offset = unit * self.unit;
        let gone = self.pagemap.as_ref().is_some_and(|map| {
            self.bytes(&(unit..unit + 1))
                .step_by(self.page)
                .any(|at| map.is_there(self.memory.address(at), self.page) == Ok(false))
        });
        if gone && self.table.claim_present(unit) {
            tracing::warn!("the page at {offset} of a memory region was discarded outside drover");
            self.counts.resident.fetch_sub(1, Ordering::Relaxed);
            // Pages of the unit that are still there are unchanged: filling skips them.
            if let Err(error) = self.fetch(unit..unit + 1, Some(unit)) {
                self.failed(unit, &error);
            }
        }
        self.wake(unit..unit + 1);
    }

    /// Handles a fault that the device failed: schedules a retry, or gives up.
    fn failed(&self, unit: usize, error: &DeviceError) {
        if self.is_closed() {
            return;
        }
        let now = Instant::now();
        let (since, attempts) = self.retries.lock().failed(unit, now);
        let worth_it = error.is_transient() && now.duration_since(since) < self.timeout;
        let offset = unit * self.unit;
        if self.uffd.support.poison && !worth_it {
            tracing::error!(
                "{} bytes at {offset} of a memory region cannot be loaded; accessing them raises SIGBUS: {error}",
                self.unit
            );
            self.retries.lock().forget(unit);
            match self.poison(unit) {
                Ok(()) => return,
                Err(error) => tracing::error!("cannot poison the page at {offset}: {error}"),
            }
        } else if attempts == 1 {
            tracing::warn!("{offset} of a memory region: {error}; trying again");
        }
        self.retries.lock().defer(unit, now + backoff(attempts));
        self.ring();
    }

    /// From now on a touch of the unit raises `SIGBUS`.
    fn poison(&self, unit: usize) -> Result<(), Errno> {
        // Under this lock a poisoned page is always known as failed, so that it is not taken for a dirty one.
        let _dirty = self.dirty.lock();
        if self.table.claim(unit, 1).is_empty() {
            // Another thread retries, and wakes the waiters.
            return Ok(());
        }
        // Counted first: the call wakes the waiters.
        self.counts.failed.fetch_add(1, Ordering::Relaxed);
        let bytes = self.bytes(&(unit..unit + 1));
        let mut at = bytes.start;
        while at < bytes.end {
            match self.uffd.poison(self.memory.address(at), bytes.end - at) {
                Ok(done) => at += done,
                Err(Errno::EXIST) => at += self.page,
                Err(error) => {
                    self.counts.failed.fetch_sub(1, Ordering::Relaxed);
                    self.settle(unit..unit + 1, PageState::Absent);
                    return Err(error);
                }
            }
        }
        self.settle(unit..unit + 1, PageState::Failed);
        self.wake(unit..unit + 1);
        Ok(())
    }

    /// Brings in absent units in order, starting at `next`; several threads may share it.
    pub(super) fn populate(&self, next: &AtomicUsize) {
        let run = (POPULATE_RUN / self.unit).max(1);
        loop {
            let mut at = next.fetch_add(run, Ordering::Relaxed);
            let end = at.saturating_add(run).min(self.table.len());
            if at >= end {
                return;
            }
            let mut failing: Option<(Instant, u32)> = None;
            while at < end {
                self.stand_back();
                if self.is_closed() || self.is_full() {
                    return;
                }
                let claimed = self.table.claim(at, end - at);
                if claimed.is_empty() {
                    at += 1;
                    continue;
                }
                at = claimed.end;
                let first = claimed.start;
                if let Err(error) = self.fetch(claimed, None) {
                    let now = Instant::now();
                    let (since, attempts) = failing.get_or_insert((now, 0));
                    *attempts += 1;
                    if !error.is_transient() || now.duration_since(*since) > self.timeout {
                        let offset = first * self.unit;
                        tracing::warn!("a region is not populated at {offset}: {error}");
                        break;
                    }
                    std::thread::sleep(backoff(*attempts));
                    at = first;
                }
            }
        }
    }

    /// Faults take priority.
    fn stand_back(&self) {
        let until = Instant::now() + STAND_BACK;
        while self.demand.load(Ordering::SeqCst) > 0 && !self.is_closed() {
            if Instant::now() >= until {
                return;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}
