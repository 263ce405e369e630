//! Eviction of clean pages from memory.
//!
//! A page may be written through a pointer at any moment, and the kernel has no call that drops a page only if it is
//! clean. But it can move one atomically: it becomes absent here and intact elsewhere. So a clean page is copied,
//! checked to be still clean, moved aside, and dropped only if it equals the copy; otherwise it is put back. A writer
//! that comes after the move faults, and waits until the outcome is settled.
#![allow(unsafe_code)] // Memory is moved and dropped by address.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::DeviceError;
use rustix::io::Errno;

use super::dirty::Dirty;
use super::scratch::Scratch;
use super::shared::Shared;
use super::table::PageState;

/// How often a failure to put a page back is logged, and the longest pause between two attempts.
const SAY_EVERY: Duration = Duration::from_secs(10);
const MAX_PAUSE: Duration = Duration::from_millis(200);

/// Stale entries allowed in the arrival queue, beyond the limit's own.
const STALE: usize = 1024;

impl Shared {
    /// Evicts clean units that lie entirely in the range. Returns the bytes evicted.
    pub(super) fn evict(&self, range: Range<usize>) -> Result<u64, DeviceError> {
        let last = match range.end >= self.size {
            true => self.table.len(),
            false => range.end / self.unit,
        };
        let units = range.start.div_ceil(self.unit)..last;
        if units.is_empty() {
            return Ok(0);
        }
        let mut evicted = 0;
        for piece in self.pieces(self.bytes(&units)) {
            let units = self.units(&piece);
            if !units
                .clone()
                .any(|u| self.table.state(u) == PageState::Present)
            {
                continue;
            }
            let _stripe = self.stripe(piece.start).write();
            let mut dirty = self.dirty.lock();
            if self.is_closed() {
                return Err(DeviceError::Closed);
            }
            let mut scratch = self.scratch.lock();
            let result = match scratch.as_mut() {
                Some(scratch) => self.evict_by_move(&mut dirty, scratch, &piece),
                None => self.evict_at_once(&mut dirty, &piece),
            };
            // Faults on busy units went unanswered meanwhile.
            self.wake(units);
            evicted += result?;
        }
        self.counts.evicted.fetch_add(evicted, Ordering::Relaxed);
        Ok(evicted)
    }

    /// Drops units that nobody uses, written or not.
    pub(super) fn forget(&self, range: Range<usize>) -> Result<(), DeviceError> {
        let _turn = self.turn()?;
        for piece in self.pieces(self.bytes(&self.units(&range))) {
            let _stripe = self.stripe(piece.start).write();
            let mut dirty = self.dirty.lock();
            if self.is_closed() {
                return Err(DeviceError::Closed);
            }
            // What the kernel knows of a page goes with it: there may be very many ranges, and a scan takes time.
            let pages = piece.start / self.page..piece.end / self.page;
            for unit in self.units(&piece) {
                // What is known of the device may be out of date.
                self.table.has_data(unit);
                if self.table.claim_present(unit) {
                    if let Err(error) = self.try_discard(unit..unit + 1) {
                        self.settle(unit..unit + 1, PageState::Present);
                        self.wake(self.units(&piece));
                        return Err(std::io::Error::from(error).into());
                    }
                    self.gone(unit);
                } else if self.table.claim_failed(unit) {
                    if let Err(error) = self.try_discard(unit..unit + 1) {
                        self.settle(unit..unit + 1, PageState::Failed);
                        self.wake(self.units(&piece));
                        return Err(std::io::Error::from(error).into());
                    }
                    self.settle(unit..unit + 1, PageState::Absent);
                } else if self.table.state(unit) == PageState::Busy {
                    let text = format!("{} bytes at {} are in use", piece.len(), piece.start);
                    return Err(DeviceError::Unavailable(text));
                }
            }
            dirty.marked.clear(pages.clone());
            dirty.unpushed.clear(pages);
            self.wake(self.units(&piece));
        }
        Ok(())
    }

    /// For memory that no pointer writes to now.
    fn evict_at_once(&self, dirty: &mut Dirty, piece: &Range<usize>) -> Result<u64, DeviceError> {
        self.harvest(dirty, piece.clone())?;
        let mut evicted = 0;
        for unit in self.units(piece) {
            if self.is_clean(dirty, unit) && self.table.claim_present(unit) {
                self.discard(unit..unit + 1);
                evicted += self.gone(unit);
            }
        }
        Ok(evicted)
    }

    fn evict_by_move(
        &self,
        dirty: &mut Dirty,
        scratch: &mut Scratch,
        piece: &Range<usize>,
    ) -> Result<u64, DeviceError> {
        let copied: Vec<usize> = self
            .units(piece)
            .filter(|unit| self.table.state(*unit) == PageState::Present)
            .filter(|unit| self.is_clean(dirty, *unit))
            .collect();
        for unit in &copied {
            let bytes = self.bytes(&(*unit..unit + 1));
            let into = bytes.start - piece.start..bytes.end - piece.start;
            // SAFETY: inside, whole pages, open and present, under the lock of the stripe.
            unsafe {
                self.memory
                    .read_racing(bytes.start, &mut scratch.copy[into])
            };
        }
        // A page that is clean after the copy was clean during it: the copy equals the device's contents.
        self.harvest(dirty, piece.clone())?;
        #[cfg(test)]
        scratch.trial.write();
        let mut evicted = 0;
        for unit in copied {
            if !self.is_clean(dirty, unit) || !self.table.claim_present(unit) {
                continue;
            }
            let bytes = self.bytes(&(unit..unit + 1));
            let copy = bytes.start - piece.start..bytes.end - piece.start;
            let moved = self.move_aside(scratch, &bytes);
            scratch.now.resize(moved, 0);
            // SAFETY: that many bytes are mapped, and nothing else refers to them.
            unsafe { scratch.aside.read(0, &mut scratch.now) };
            if scratch.now == scratch.copy[copy] {
                evicted += self.gone(unit);
            } else {
                // Written in between, or not movable. Pages moved aside come back as dirty.
                self.put_back(scratch, bytes.start);
                self.settle(unit..unit + 1, PageState::Present);
            }
            // SAFETY: the contents are on the device, or back in place.
            unsafe { scratch.aside.discard(0, scratch.aside.length()) }
                .map_err(|error| DeviceError::from(std::io::Error::from(error)))?;
        }
        Ok(evicted)
    }

    /// Moves pages to the front of the scratch memory; returns how many bytes were moved.
    fn move_aside(&self, scratch: &mut Scratch, bytes: &Range<usize>) -> usize {
        let mut moved = 0;
        while moved < bytes.len() {
            let to = scratch.aside.address(moved);
            let from = self.memory.address(bytes.start + moved);
            // SAFETY: slices of a region exclude eviction; who uses its pointer faults and gets the page again.
            let taken = unsafe { self.uffd.take(to, from, bytes.len() - moved) };
            #[cfg(test)]
            let taken = scratch.trial.say(taken);
            match taken {
                Ok(0) => std::thread::yield_now(),
                Ok(count) => moved += count,
                // The previous call moved it without reporting it (seen with Linux 6.18 under load): nobody else fills
                // these.
                Err(Errno::EXIST) => moved += self.page,
                // Pinned, or shared with a forked process: it stays.
                Err(error) => {
                    tracing::debug!("cannot move a page aside: {error}");
                    break;
                }
            }
        }
        moved
    }

    /// Puts pages that were moved aside back in place. They exist nowhere else: if the kernel is out of memory this is
    /// retried until it succeeds, and threads that touch the page wait.
    fn put_back(&self, scratch: &mut Scratch, start: usize) {
        let mut done = 0;
        let mut backoff = Backoff::default();
        while done < scratch.now.len() {
            let result = match self.move_back(scratch, start, done) {
                Ok(count) => Ok(count),
                // A copy needs a free page, which a move does not; but it also works where the page has become shared.
                Err(_) => self.copy_back(scratch, start, done),
            };
            match result {
                Ok(0) => std::thread::yield_now(),
                Ok(count) => done += count,
                // Only this process fills pages: an earlier call did it.
                Err(Errno::EXIST) => done += self.page,
                Err(error) => backoff.wait(start + done, error),
            }
        }
        self.wake_bytes(start..start + done);
    }

    fn move_back(&self, scratch: &mut Scratch, start: usize, done: usize) -> Result<usize, Errno> {
        #[cfg(test)]
        scratch.trial.refuse()?;
        let to = self.memory.address(start + done);
        let from = scratch.aside.address(done);
        // SAFETY: the page at `to` was moved away and nobody has seen it since; nothing else refers to the one at
        // `from`.
        unsafe { self.uffd.take(to, from, scratch.now.len() - done) }
    }

    fn copy_back(&self, scratch: &mut Scratch, start: usize, done: usize) -> Result<usize, Errno> {
        #[cfg(test)]
        scratch.trial.refuse()?;
        let to = self.memory.address(start + done);
        self.uffd.copy(to, &scratch.now[done..], false)
    }

    fn wake_bytes(&self, bytes: Range<usize>) {
        let address = self.memory.address(bytes.start);
        // If this fails, waiters are woken when the piece is done.
        let _ = self.uffd.wake(address, bytes.len());
    }

    fn is_clean(&self, dirty: &Dirty, unit: usize) -> bool {
        let bytes = self.bytes(&(unit..unit + 1));
        !self.writable || dirty.is_clean(bytes.start / self.page..bytes.end / self.page)
    }

    /// Marks a busy unit absent. Returns its bytes.
    fn gone(&self, unit: usize) -> u64 {
        self.settle(unit..unit + 1, PageState::Absent);
        self.counts.resident.fetch_sub(1, Ordering::Relaxed);
        self.bytes(&(unit..unit + 1)).len() as u64
    }

    /// Drops the memory of busy units, if the kernel can: else it stays, and holds what the device has.
    pub(super) fn discard(&self, units: Range<usize>) {
        let start = self.bytes(&units).start;
        if let Err(error) = self.try_discard(units) {
            tracing::warn!("cannot release memory at {start}: {error}");
        }
    }

    fn try_discard(&self, units: Range<usize>) -> Result<(), Errno> {
        let bytes = self.bytes(&units);
        // SAFETY: the device has the same contents, or there are none, or they are to be forgotten: the next touch brings them
        // back.
        unsafe { self.memory.discard(bytes.start, bytes.len()) }
    }

    /// Records the arrival of units, for the limit.
    pub(super) fn note_arrival(&self, units: Range<usize>) {
        if self.limit.is_some() {
            self.order.lock().push_back(units);
        }
    }

    /// Whether the memory limit is reached.
    pub(super) fn is_full(&self) -> bool {
        let resident = self.counts.resident.load(Ordering::Relaxed);
        self.limit
            .is_some_and(|limit| resident * self.unit >= limit)
    }

    /// Evicts the oldest arrivals while memory exceeds the limit.
    pub(super) fn keep_to_limit(&self) {
        let Some(limit) = self.limit else { return };
        // Explicit evictions leave stale entries behind, so their number is limited too.
        let over = || {
            let resident = self.counts.resident.load(Ordering::Relaxed);
            resident * self.unit > limit || self.order.lock().len() > limit / self.unit + STALE
        };
        if !over() {
            return;
        }
        let _evicting = self.evicting.lock();
        while over() && self.held.load(Ordering::SeqCst) == 0 {
            let Some(units) = self.order.lock().pop_front() else {
                return;
            };
            if let Err(error) = self.evict(self.bytes(&units)) {
                tracing::debug!("cannot evict down to the limit: {error}");
                return;
            }
        }
    }
}

/// Backs off between attempts to put a page back, and logs now and then.
#[derive(Default)]
struct Backoff {
    pause: Duration,
    said: Option<Instant>,
}

impl Backoff {
    fn wait(&mut self, offset: usize, error: Errno) {
        if self.said.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
            self.said = Some(Instant::now());
            tracing::warn!(
                "the kernel does not take back what was written at {offset} of a region: {error}; trying on"
            );
        }
        self.pause = (self.pause * 2).clamp(Duration::from_millis(1), MAX_PAUSE);
        std::thread::sleep(self.pause);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use drover_device::backend::MemoryDevice;

    use super::super::{Options, Region};

    /// Writes a byte to each of some pages after they were copied, and injects `refusals` failures to put them back and
    /// `silent` moves that are not reported.
    fn evicted_while_written(refusals: u32, silent: u32) {
        let page = rustix::param::page_size();
        let options = Options {
            writable: true,
            ..Options::default()
        };
        let device = Arc::new(MemoryDevice::from_bytes(&vec![1; 16 * page]));
        let region = match Region::new(device, options) {
            Ok(region) if region.support().moves => region,
            Ok(_) => return eprintln!("SKIP: the kernel cannot move pages"),
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        let mut all = vec![0; 16 * page];
        region.read_at(0, &mut all).unwrap();
        let base = region.shared.memory.address(0);
        {
            let mut scratch = region.shared.scratch.lock();
            let trial = &mut scratch.as_mut().unwrap().trial;
            (trial.refusals, trial.silent) = (refusals, silent);
            trial.write = Some(Box::new(move || {
                for n in [3, 4, 9] {
                    // SAFETY: inside the region, which lives while it evicts.
                    unsafe { ((base + n * page + 7) as *mut u8).write_volatile(9) };
                }
            }));
        }
        region.shared.evict(0..16 * page).unwrap();
        {
            let mut scratch = region.shared.scratch.lock();
            let trial = &mut scratch.as_mut().unwrap().trial;
            assert!(
                refusals < 3 || trial.refusals < refusals,
                "nothing was put back"
            );
            trial.write = None;
        }
        region.read_at(0, &mut all).unwrap();
        for (n, bytes) in all.chunks(page).enumerate() {
            let written = u8::from([3, 4, 9].contains(&n)) * 8 + 1;
            assert_eq!((bytes[7], bytes[8]), (written, 1), "page {n}");
        }
        // It counts as dirty, and reaches the device.
        assert_eq!(region.push().unwrap().bytes, 3 * page as u64);
    }

    #[test]
    fn what_cannot_be_forgotten_is_said() {
        let page = rustix::param::page_size();
        let options = Options {
            writable: true,
            ..Options::default()
        };
        let device = Arc::new(MemoryDevice::new(4 * page as u64));
        let region = match Region::new(device, options) {
            Ok(region) => region,
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        region.write_at(page as u64, &[7]).unwrap();
        let address = region.shared.memory.address(page) as *mut std::ffi::c_void;
        // The kernel does not release locked memory.
        // SAFETY: inside the region, which lives until the end.
        if let Err(error) = unsafe { rustix::mm::mlock(address, page) } {
            return eprintln!("SKIP: {error}");
        }
        region.forget(page as u64, page as u64).unwrap_err();
        // SAFETY: as above.
        unsafe { rustix::mm::munlock(address, page) }.unwrap();
        let mut found = [0];
        region.read_at(page as u64, &mut found).unwrap();
        assert_eq!(found, [7]);
        region.forget(page as u64, page as u64).unwrap();
        region.read_at(page as u64, &mut found).unwrap();
        assert_eq!(found, [0]);
    }

    #[test]
    fn what_is_written_during_an_eviction_stays() {
        evicted_while_written(0, 0);
    }

    #[test]
    fn what_is_written_during_an_eviction_stays_also_when_the_kernel_refuses() {
        // First only the move fails, then also the copy, several times.
        for refusals in [1, 2, 3, 20] {
            evicted_while_written(refusals, 0);
        }
    }

    #[test]
    fn what_is_written_during_an_eviction_stays_also_when_the_kernel_moves_a_page_and_does_not_say_so()
     {
        evicted_while_written(0, 16);
    }
}
