//! Reads and writes of a region's memory, and closing it. Bytes are accessed only under the lock of their stripe, with
//! the region open and the units present: no fault, no signal.
#![allow(unsafe_code)] // Memory is copied by address.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use drover_core::{DeviceError, check_range};

use super::shared::Shared;

/// Bytes brought in together for one read or write.
const STEP: usize = 1 << 20;

impl Shared {
    pub(super) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let range = self.inside(offset, buffer.len())?;
        let deadline = Instant::now() + self.timeout;
        for step in steps(range.clone(), self.step()) {
            self.ensure(self.units(&step), deadline)?;
            for piece in self.pieces(step) {
                let into = &mut buffer[piece.start - range.start..piece.end - range.start];
                loop {
                    let _stripe = self.stripe(piece.start).read();
                    if self.is_readable(&piece)? {
                        // SAFETY: inside, open and present; writers of this piece need its lock.
                        unsafe { self.memory.read(piece.start, into) };
                        break;
                    }
                    drop(_stripe);
                    self.again(&piece, deadline)?;
                }
            }
            self.keep_to_limit();
        }
        Ok(())
    }

    pub(super) fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let range = self.inside(offset, data.len())?;
        if !self.writable {
            return Err(DeviceError::ReadOnly);
        }
        let deadline = Instant::now() + self.timeout;
        for piece in self.pieces(range.clone()) {
            let from = &data[piece.start - range.start..piece.end - range.start];
            loop {
                let _stripe = self.stripe(piece.start).write();
                self.place_whole_units(&piece, from)?;
                if self.is_readable(&piece)? {
                    // SAFETY: inside, writable, open and present; this piece's lock is held exclusively.
                    unsafe { self.memory.write(piece.start, from) };
                    break;
                }
                drop(_stripe);
                self.again(&piece, deadline)?;
            }
        }
        Ok(())
    }

    /// Units overwritten completely need not be fetched first. Called under the lock of the piece.
    fn place_whole_units(&self, piece: &Range<usize>, from: &[u8]) -> Result<(), DeviceError> {
        let whole = piece.start.div_ceil(self.unit)..piece.end / self.unit;
        let mut at = whole.start;
        while at < whole.end {
            let claimed = self.table.claim(at, whole.end - at);
            at = claimed.end.max(at + 1);
            if !claimed.is_empty() {
                let bytes = self.bytes(&claimed);
                let data = &from[bytes.start - piece.start..bytes.end - piece.start];
                self.fetch_from(claimed, data)?;
            }
        }
        Ok(())
    }

    /// Copies pages out for the device, while others may write them through a pointer.
    pub(super) fn copy_out(
        &self,
        range: Range<usize>,
        buffer: &mut [u8],
    ) -> Result<(), DeviceError> {
        let deadline = Instant::now() + self.timeout;
        for piece in self.pieces(range.clone()) {
            let into = &mut buffer[piece.start - range.start..piece.end - range.start];
            loop {
                let _stripe = self.stripe(piece.start).read();
                if self.is_readable(&piece)? {
                    // SAFETY: inside, whole pages, open.
                    unsafe { self.memory.read_racing(piece.start, into) };
                    break;
                }
                drop(_stripe);
                // Dirty pages are not evicted; one just filled may be written before it counts as present.
                self.again(&piece, deadline)?;
            }
        }
        Ok(())
    }

    /// Makes every later touch fail, and wakes the waiters.
    pub(super) fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.rouse();
        let _stripes: Vec<_> = self
            .stripes()
            .iter()
            .map(parking_lot::RwLock::write)
            .collect();
        let _dirty = self.dirty.lock();
        // SAFETY: safe code touches the memory under a stripe's lock and only if not closed; slices borrow the region
        // mutably or come with the promise not to outlive this.
        if let Err(error) = unsafe { self.memory.close() } {
            tracing::error!("cannot close a region's memory: {error}");
        }
        // They fault again, on memory that is inaccessible now.
        self.wake(0..self.table.len());
    }

    fn inside(&self, offset: u64, length: usize) -> Result<Range<usize>, DeviceError> {
        check_range(offset, length as u64, self.size as u64)?;
        let offset = offset as usize;
        Ok(offset..offset + length)
    }

    fn is_readable(&self, piece: &Range<usize>) -> Result<bool, DeviceError> {
        match self.is_closed() {
            true => Err(DeviceError::Closed),
            false => Ok(self.all_present(self.units(piece))),
        }
    }

    /// Brings in a piece that was found incomplete.
    fn again(&self, piece: &Range<usize>, deadline: Instant) -> Result<(), DeviceError> {
        if Instant::now() > deadline {
            return Err(DeviceError::Unavailable(
                "pages leave memory faster than they can be used: the region's limit is too low"
                    .into(),
            ));
        }
        self.ensure(self.units(piece), deadline)
    }

    /// Bytes brought in together: limited so that they do not evict each other.
    fn step(&self) -> usize {
        let most = self.limit.map_or(STEP, |limit| STEP.min(limit / 2));
        most.max(self.stripe_bytes())
    }
}

/// Splits a range at multiples of `step`.
fn steps(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = (at / step + 1).saturating_mul(step).min(range.end);
        let next = at..end;
        at = end;
        (!next.is_empty()).then_some(next)
    })
}
