//! Fetching units into memory: claiming, reading in runs, filling; zeros without a read.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use drover_core::{DeviceError, ExtentKind};
use rustix::io::Errno;

use super::shared::Shared;
use super::table::{Content, PageState};

/// The longest single read of the device, in bytes.
const MAX_READ: usize = 4 << 20;
/// Bytes per extents query to the device.
const ASKED: usize = 16 << 20;
/// Buffers kept for reuse.
const BUFFERS: usize = 8;

/// Units claimed as busy. Those not settled on drop become absent again.
struct Claim<'a> {
    shared: &'a Shared,
    units: Range<usize>,
    /// A unit whose waiters are not woken on failure: they are when a retry is worthwhile.
    patient: Option<usize>,
}

impl Claim<'_> {
    /// The first `count` units have been filled.
    fn filled(&mut self, count: usize) {
        let end = self.units.start + count;
        let units = self.units.start..end;
        // Counted first: once present, they may be evicted and subtracted.
        let resident = &self.shared.counts.resident;
        resident.fetch_add(count, Ordering::Relaxed);
        self.shared.settle(units.clone(), PageState::Present);
        self.shared.note_arrival(units);
        self.units.start = end;
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.units.is_empty() {
            return;
        }
        self.shared.settle(self.units.clone(), PageState::Absent);
        // Faults on busy units went unanswered.
        match self.patient.filter(|unit| self.units.contains(unit)) {
            Some(unit) => {
                self.shared.wake(self.units.start..unit);
                self.shared.wake(unit + 1..self.units.end);
            }
            None => self.shared.wake(self.units.clone()),
        }
    }
}

impl Shared {
    /// Fetches units that the caller has claimed. The waiters of unit `patient` are not woken on failure.
    pub(super) fn fetch(
        &self,
        units: Range<usize>,
        patient: Option<usize>,
    ) -> Result<(), DeviceError> {
        let mut claim = Claim {
            shared: self,
            units,
            patient,
        };
        while !claim.units.is_empty() {
            if self.is_closed() {
                return Err(DeviceError::Closed);
            }
            let first = claim.units.start;
            let content = self.content(first);
            let same = claim
                .units
                .clone()
                .take_while(|unit| self.content(*unit) == content)
                .count();
            let count = match content {
                Content::Zero => self.fetch_zeros(first..first + same).map(|()| same)?,
                _ => self.fetch_data(first..first + same)?,
            };
            claim.filled(count);
        }
        Ok(())
    }

    /// Fills claimed units with `data`, which differs from the device's contents.
    pub(super) fn fetch_from(&self, units: Range<usize>, data: &[u8]) -> Result<(), DeviceError> {
        let mut claim = Claim {
            shared: self,
            patient: None,
            units,
        };
        self.fill(claim.units.start * self.unit, data, false)?;
        claim.filled(claim.units.len());
        Ok(())
    }

    /// Ensures that units are in memory, fetching those that no other thread is fetching.
    pub(super) fn ensure(&self, units: Range<usize>, deadline: Instant) -> Result<(), DeviceError> {
        let mut at = units.start;
        while at < units.end {
            if self.is_closed() {
                return Err(DeviceError::Closed);
            }
            match self.table.state(at) {
                PageState::Present => at += 1,
                PageState::Busy => self.wait(at, deadline)?,
                PageState::Failed => {
                    if self.unpoison(at)? {
                        self.fetch(at..at + 1, None)?;
                    }
                }
                PageState::Absent => {
                    let window = self.streams.lock().fault(at);
                    let claimed = self.table.claim(at, window.now.max(units.end - at));
                    let end = claimed.end.min(units.end);
                    // Failures of mere read-ahead are ignored.
                    self.fetch(claimed, None)
                        .or_else(|error| match self.all_present(at..end) {
                            true => Ok(()),
                            false => Err(error),
                        })?;
                }
            }
        }
        Ok(())
    }

    /// Hints to the device what a reader will need soon, so that it can prefetch it while serving the current read.
    pub(super) fn announce(&self, units: Range<usize>) {
        let end = units.end.min(self.table.len());
        if units.start >= end {
            return;
        }
        let bytes = self.bytes(&(units.start..end));
        let (offset, length) = (bytes.start as u64, bytes.end.min(self.size) - bytes.start);
        let advised = catch_unwind(AssertUnwindSafe(|| {
            self.device.prefetch(offset, length as u64)
        }));
        if !matches!(advised, Ok(Ok(()))) {
            tracing::debug!("prefetch at {offset} failed");
        }
    }

    /// Wakes threads waiting for a page in the units.
    pub(super) fn wake(&self, units: Range<usize>) {
        if units.is_empty() {
            return;
        }
        let bytes = self.bytes(&units);
        if let Err(error) = self
            .uffd
            .wake(self.memory.address(bytes.start), bytes.len())
        {
            tracing::warn!("cannot wake threads that wait for a page: {error}");
        }
    }

    /// The kind of content the device has there; queries a stretch at a time.
    fn content(&self, unit: usize) -> Content {
        if !self.capabilities.extents {
            return Content::Data;
        }
        match self.table.content(unit) {
            Content::Unknown => {
                self.ask(unit);
                match self.table.content(unit) {
                    Content::Unknown => Content::Data,
                    known => known,
                }
            }
            known => known,
        }
    }

    /// A failed query only costs unnecessary reads.
    fn ask(&self, unit: usize) {
        let start = unit * self.unit;
        let length = ASKED.next_multiple_of(self.unit).min(self.size - start);
        let answer = catch_unwind(AssertUnwindSafe(|| {
            self.device.extents(start as u64, length as u64)
        }));
        let Ok(Ok(runs)) = answer else {
            tracing::debug!("cannot query the extents at {start}");
            return;
        };
        let mut zero_from = None;
        let mut next = unit;
        let last = (start + length).div_ceil(self.unit);
        for run in runs {
            let end = usize::try_from(run.end()).unwrap_or(usize::MAX);
            let from = usize::try_from(run.offset).unwrap_or(usize::MAX);
            // A unit that spans two kinds counts as data.
            if run.kind == ExtentKind::Data {
                zero_from = None;
            } else if zero_from.is_none() {
                zero_from = Some(from.div_ceil(self.unit));
            }
            // The last unit may extend beyond the device, where there are zeros.
            let upto = match end >= self.size {
                true => last,
                false => (end / self.unit).min(last),
            };
            while next < upto {
                let zero = zero_from.is_some_and(|from| next >= from);
                self.table.learn(next, zero);
                next += 1;
            }
            if end >= start + length {
                break;
            }
        }
    }

    fn fetch_zeros(&self, units: Range<usize>) -> Result<(), DeviceError> {
        let bytes = self.bytes(&units);
        // Counted first: the call wakes waiters, which may look at the counter.
        let zero_bytes = &self.counts.zero_bytes;
        zero_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let mut at = bytes.start;
        while at < bytes.end {
            let done = self.uffd.zero(self.memory.address(at), bytes.end - at);
            match self.after(at, done) {
                Ok(done) => at += done,
                Err(error) => {
                    // None of the units counts as present: they are fetched, and counted, once more.
                    zero_bytes.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Reads the first units of a run and fills them; returns how many.
    fn fetch_data(&self, units: Range<usize>) -> Result<usize, DeviceError> {
        let longest = MAX_READ.min(self.capabilities.longest as usize) / self.unit;
        let count = units.len().min(longest.max(1));
        let bytes = self.bytes(&(units.start..units.start + count));
        let length = bytes.end.min(self.size) - bytes.start;
        let mut buffer = self.buffers.lock().pop().unwrap_or_default();
        // The tail of the last page is beyond the device.
        buffer.clear();
        buffer.resize(bytes.len(), 0);
        self.counts.reads.fetch_add(1, Ordering::Relaxed);
        let read = catch_unwind(AssertUnwindSafe(|| {
            self.device.read(bytes.start as u64, &mut buffer[..length])
        }));
        match read {
            Ok(result) => result?,
            Err(_) => {
                let panicked = std::io::Error::other("the device panicked in a read");
                return Err(DeviceError::Io(Arc::new(panicked)));
            }
        }
        self.counts
            .bytes_read
            .fetch_add(length as u64, Ordering::Relaxed);
        self.fill(bytes.start, &buffer, self.writable)?;
        let mut buffers = self.buffers.lock();
        if buffers.len() < BUFFERS {
            buffers.push(buffer);
        }
        Ok(count)
    }

    /// Fills claimed pages.
    pub(super) fn fill(&self, offset: usize, data: &[u8], clean: bool) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < data.len() {
            let address = self.memory.address(offset + done);
            let copied = self.uffd.copy(address, &data[done..], clean);
            done += self.after(offset + done, copied)?;
        }
        Ok(())
    }

    /// The number of bytes filled by a call, or its error.
    fn after(&self, offset: usize, done: Result<usize, Errno>) -> Result<usize, DeviceError> {
        match done {
            Ok(0) => {
                // Another thread is changing the address space: retry after yielding to it.
                std::thread::yield_now();
                match self.is_closed() {
                    true => Err(DeviceError::Closed),
                    false => Ok(0),
                }
            }
            Ok(done) => Ok(done),
            // Only this process fills pages, but a page that is present already is fine.
            Err(Errno::EXIST) => {
                let address = self.memory.address(offset);
                let _ = self.uffd.wake(address, self.page);
                Ok(self.page)
            }
            Err(_) if self.is_closed() => Err(DeviceError::Closed),
            Err(error) => Err(DeviceError::Io(Arc::new(error.into()))),
        }
    }
}
