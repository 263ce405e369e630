//! Taking out of memory what the device has too.
//!
//! A page may be written through a pointer at any moment, and the kernel has no call that drops a page only if it was
//! not. But it can move one: in one step it is absent here and whole elsewhere. So a clean page is copied, found to be
//! clean still, moved aside, and dropped only if it is what was copied; else it is put back. A writer that comes too
//! late for the move faults, and waits until it is settled.
#![allow(unsafe_code)] // Memory is moved and dropped by address.

use std::ops::Range;
use std::sync::atomic::Ordering;

use drover_core::DeviceError;
use rustix::io::Errno;

use super::dirty::Dirty;
use super::memory::Memory;
use super::shared::Shared;
use super::table::State;

/// Entries beyond what the limit holds that the order of arrival may have.
const STALE: usize = 1024;

impl Shared {
    /// Takes clean units that lie whole in the range out of memory. Returns how many bytes.
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
            if !units.clone().any(|u| self.table.state(u) == State::Present) {
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
            // Whoever touched one of them meanwhile was told nothing, as it was busy.
            self.wake(units);
            evicted += result?;
        }
        self.counts.evicted.fetch_add(evicted, Ordering::Relaxed);
        Ok(evicted)
    }

    /// For memory that nobody writes through a pointer now.
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
            .filter(|unit| self.table.state(*unit) == State::Present)
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
        // What is clean after the copy was clean at the copy: the copy is what the device has.
        self.harvest(dirty, piece.clone())?;
        let mut evicted = 0;
        for unit in copied {
            if !self.is_clean(dirty, unit) || !self.table.claim_present(unit) {
                continue;
            }
            let bytes = self.bytes(&(unit..unit + 1));
            let copy = bytes.start - piece.start..bytes.end - piece.start;
            let moved = self.move_aside(scratch, &bytes);
            scratch.now.resize(moved, 0);
            // SAFETY: that much is there, and nobody else knows of it.
            unsafe { scratch.aside.read(0, &mut scratch.now) };
            if scratch.now == scratch.copy[copy] {
                evicted += self.gone(unit);
            } else {
                // Written in between, or not to be moved. What was moved comes back as written.
                let back = self.fill(bytes.start, &scratch.now, false);
                self.settle(unit..unit + 1, State::Present);
                back?;
            }
            // SAFETY: it was copied.
            unsafe { scratch.aside.discard(0, scratch.aside.length()) }
                .map_err(|error| DeviceError::from(std::io::Error::from(error)))?;
        }
        Ok(evicted)
    }

    /// Moves pages to the front of the scratch memory; returns how many bytes could be.
    fn move_aside(&self, scratch: &Scratch, bytes: &Range<usize>) -> usize {
        let mut moved = 0;
        while moved < bytes.len() {
            let to = scratch.aside.address(moved);
            let from = self.memory.address(bytes.start + moved);
            // SAFETY: slices of a region exclude eviction; who uses its pointer faults and gets the page again.
            match unsafe { self.uffd.take(to, from, bytes.len() - moved) } {
                Ok(0) => std::thread::yield_now(),
                Ok(count) => moved += count,
                // Pinned, or shared with what was forked: it stays.
                Err(error) => {
                    tracing::debug!("moving a page aside: {error}");
                    break;
                }
            }
        }
        moved
    }

    fn is_clean(&self, dirty: &Dirty, unit: usize) -> bool {
        let bytes = self.bytes(&(unit..unit + 1));
        !self.writable || dirty.is_clean(bytes.start / self.page..bytes.end / self.page)
    }

    /// A busy unit is absent from now on. Returns its bytes.
    fn gone(&self, unit: usize) -> u64 {
        self.settle(unit..unit + 1, State::Absent);
        self.counts.resident.fetch_sub(1, Ordering::Relaxed);
        self.bytes(&(unit..unit + 1)).len() as u64
    }

    /// Makes busy units absent in memory.
    pub(super) fn discard(&self, units: Range<usize>) {
        let bytes = self.bytes(&units);
        // SAFETY: the device has what they hold, or they hold nothing: the next touch brings the same back.
        if let Err(error) = unsafe { self.memory.discard(bytes.start, bytes.len()) } {
            tracing::warn!("giving memory back at {}: {error}", bytes.start);
        }
    }

    /// Remembers that units came, for the limit.
    pub(super) fn note_arrival(&self, units: Range<usize>) {
        if self.limit.is_some() {
            self.order.lock().push_back(units);
        }
    }

    /// Whether the limit is reached.
    pub(super) fn is_full(&self) -> bool {
        let resident = self.counts.resident.load(Ordering::Relaxed);
        self.limit
            .is_some_and(|limit| resident * self.unit >= limit)
    }

    /// Takes what came first out of memory while there is more than the limit allows.
    pub(super) fn keep_to_limit(&self) {
        let Some(limit) = self.limit else { return };
        // Evicting by hand leaves entries behind: their number has an end too.
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
                tracing::debug!("keeping to the limit: {error}");
                return;
            }
        }
    }
}

/// Where pages are moved to see whether they are still what they were.
pub(super) struct Scratch {
    aside: Memory,
    /// What a piece was.
    copy: Vec<u8>,
    /// What was moved.
    now: Vec<u8>,
}

impl Scratch {
    /// For pieces of `length` bytes.
    pub(super) fn new(uffd: &super::uffd::Uffd, length: usize) -> Result<Self, Errno> {
        let aside = Memory::new(length, true)?;
        uffd.register(aside.address(0), length, false)?;
        Ok(Self {
            aside,
            copy: vec![0; length],
            now: Vec::new(),
        })
    }
}
