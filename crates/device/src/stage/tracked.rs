//! A stage that records which ranges were written.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes, check_range};
use parking_lot::Mutex;
use roaring::RoaringBitmap;

use super::LockGuard;

/// Maximum number of tracked blocks; a set of them takes at most 32 MiB. Larger devices are tracked in larger blocks.
const MAX_BLOCKS: u64 = 1 << 28;

/// A device that records the set of blocks that may have changed since a mark.
///
/// Relative to a mark: changes that completed before it are not in the set; those that began after it are; those in
/// flight at the mark are in it, and also in what [`TrackHandle::take`] returned at that moment. Failed changes count:
/// they may have been partly executed.
pub struct Tracked<D> {
    inner: D,
    shared: Arc<Shared>,
}

struct Shared {
    size: u64,
    /// Block size in bytes, a power of two.
    block: u64,
    /// Nothing is recorded.
    idle: AtomicBool,
    state: Mutex<Changes>,
}

#[derive(Default)]
struct Changes {
    dirty: RoaringBitmap,
    /// The blocks of changes in flight: one entry per thread making one.
    under_way: HashMap<u64, Range<u64>>,
    next: u64,
}

/// Sets marks on a [`Tracked`] and reports what changed since.
#[derive(Clone)]
pub struct TrackHandle {
    shared: Arc<Shared>,
}

/// A set of blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Dirty {
    blocks: RoaringBitmap,
    block: u64,
    size: u64,
}

impl Dirty {
    /// The runs of changed bytes, in order and disjoint, clipped to the device.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let mut blocks = self.blocks.iter().map(u64::from).peekable();
        std::iter::from_fn(move || {
            let first = blocks.next()?;
            let mut end = first + 1;
            while blocks.next_if_eq(&end).is_some() {
                end += 1;
            }
            Some(first * self.block..end.saturating_mul(self.block).min(self.size))
        })
    }

    /// Total bytes of all runs.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self.blocks.max() {
            Some(last) => {
                let start = u64::from(last) * self.block;
                (self.blocks.len() - 1) * self.block + (self.size - start).min(self.block)
            }
            None => 0,
        }
    }

    /// Whether nothing changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether a run contains the byte at `offset`.
    #[must_use]
    pub fn contains(&self, offset: u64) -> bool {
        u32::try_from(offset / self.block).is_ok_and(|block| self.blocks.contains(block))
    }
}

impl TrackHandle {
    /// Sets a mark: drops all changes that have completed.
    pub fn mark(&self) {
        drop(self.take());
    }

    /// What changed since the mark; without one, since the device was created.
    #[must_use]
    pub fn dirty_since_mark(&self) -> Dirty {
        let blocks = self.shared.state.lock().dirty.clone();
        self.shared.dirty(blocks)
    }

    /// What changed since the mark, and a new mark, atomically: no change is lost in between.
    #[must_use = "what is not used is lost"]
    pub fn take(&self) -> Dirty {
        let mut state = self.shared.state.lock();
        let mut kept = RoaringBitmap::new();
        for blocks in state.under_way.values() {
            kept.insert_range(narrow(blocks));
        }
        let taken = std::mem::replace(&mut state.dirty, kept);
        self.shared.dirty(taken)
    }

    /// Merges a taken set back, for a caller that could not process it.
    ///
    /// # Panics
    /// If `dirty` comes from a device with another shape.
    pub fn put_back(&self, dirty: Dirty) {
        assert!(
            (dirty.size, dirty.block) == (self.shared.size, self.shared.block),
            "a set is put back where it was taken"
        );
        self.shared.state.lock().dirty |= dirty.blocks;
    }

    /// Stops recording, and drops what was recorded.
    pub fn stop(&self) {
        self.shared.idle.store(true, Ordering::Release);
        self.shared.state.lock().dirty = RoaringBitmap::new();
    }

    /// Records again, with a mark. Nothing may be in flight: the device is locked.
    pub fn start(&self, _locked: &LockGuard) {
        self.mark();
        self.shared.idle.store(false, Ordering::Release);
    }

    /// Block size in bytes.
    #[must_use]
    pub fn granularity(&self) -> u64 {
        self.shared.block
    }
}

impl std::fmt::Debug for TrackHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrackHandle")
            .field("granularity", &self.shared.block)
            .field("dirty", &self.shared.state.lock().dirty.len())
            .finish_non_exhaustive()
    }
}

/// The block size with which a device is tracked.
fn block_for(size: u64, granularity: u32) -> u64 {
    let least = size.div_ceil(MAX_BLOCKS).next_power_of_two();
    u64::from(granularity).max(least)
}

/// In the bitmap's index type; there are at most [`MAX_BLOCKS`].
fn narrow(blocks: &Range<u64>) -> Range<u32> {
    let narrow = |block| u32::try_from(block).unwrap_or(u32::MAX);
    narrow(blocks.start)..narrow(blocks.end)
}

impl Shared {
    fn dirty(&self, blocks: RoaringBitmap) -> Dirty {
        Dirty {
            blocks,
            block: self.block,
            size: self.size,
        }
    }
}

/// A change in flight; completes on drop, also on a panic.
struct UnderWay<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.shared.state.lock().under_way.remove(&self.id);
    }
}

impl<D: BlockDevice> Tracked<D> {
    /// Starts tracking, in blocks of `granularity` bytes, or larger ones if the device would have more than 2^28; the
    /// handle knows the size.
    ///
    /// # Panics
    /// If `granularity` is not a power of two.
    pub fn new(inner: D, granularity: u32) -> (Self, TrackHandle) {
        assert!(
            granularity.is_power_of_two(),
            "a granularity is a power of two"
        );
        let size = inner.size();
        let shared = Arc::new(Shared {
            size,
            block: block_for(size, granularity),
            idle: AtomicBool::new(false),
            state: Mutex::default(),
        });
        let handle = TrackHandle {
            shared: Arc::clone(&shared),
        };
        (Self { inner, shared }, handle)
    }

    fn begin(&self, offset: u64, length: u64) -> Result<Option<UnderWay<'_>>, DeviceError> {
        check_range(offset, length, self.shared.size)?;
        if length == 0 || self.shared.idle.load(Ordering::Acquire) {
            return Ok(None);
        }
        let block = self.shared.block;
        let blocks = offset / block..(offset + length).div_ceil(block);
        let mut state = self.shared.state.lock();
        state.dirty.insert_range(narrow(&blocks));
        let id = state.next;
        state.next += 1;
        state.under_way.insert(id, blocks);
        Ok(Some(UnderWay {
            shared: &self.shared,
            id,
        }))
    }
}

impl<D: BlockDevice> BlockDevice for Tracked<D> {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.read(offset, buffer)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let _change = self.begin(offset, data.len() as u64)?;
        self.inner.write(offset, data)
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        let _change = self.begin(offset, length)?;
        self.inner.write_zeroes(offset, length, zeroes)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let _change = self.begin(offset, length)?;
        self.inner.trim(offset, length)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.inner.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.inner.extents(offset, length)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.prefetch(offset, length)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.cost(offset, length)
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.write_cost(offset, length)
    }
}

#[cfg(test)]
mod tests;
