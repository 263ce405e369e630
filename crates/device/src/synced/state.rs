//! The state of each chunk: one byte per chunk, so 16 MiB for a TiB in chunks of 64 KiB.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use drover_core::DeviceError;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::remote::{Chunks, Shape};

/// Maximum chunks of one device: their states take that many bytes of memory.
pub const MAX_CHUNKS: u64 = 1 << 28;

/// Bytes of adjacent chunks guarded by one lock (or one chunk, if that is longer), so that most requests take one lock.
const STRIPE: u64 = 4 << 20;

/// Number of locks.
const LOCKS: usize = 256;

/// Where the bytes of a chunk are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum ChunkState {
    /// Only at the remote.
    #[default]
    Absent = 0,
    /// Cached, and the same at the remote.
    Clean = 1,
    /// Cached according to the map of a cache that was not closed cleanly: its digest is checked before use.
    Unverified = 2,
    /// All zeros, also at the remote; occupies no space.
    Zero = 3,
    /// Cached, with changes not yet at the remote.
    Dirty = 4,
    /// Some subchunks are cached, the rest only at the remote.
    Partial = 5,
    /// All zeros, not yet at the remote; occupies no space.
    Erased = 6,
}

/// Set while a fetch of the chunk is in flight.
const IN_FLIGHT: u8 = 0x80;
/// The CLOCK reference bit: set on use, cleared when the hand passes.
const USED: u8 = 0x40;
/// Set when the chunk is requested as read-ahead, cleared when it is used (or expires): only in a cache of limited
/// size.
const AHEAD: u8 = 0x20;
const STATE: u8 = 0x07;

impl ChunkState {
    /// The state that a byte of the map encodes, if valid.
    pub fn from_byte(byte: u8) -> Option<Self> {
        (byte <= Self::Erased as u8).then(|| Self::of(byte))
    }

    /// The state in the low bits of a byte; invalid ones count as absent.
    pub fn of(byte: u8) -> Self {
        match byte & STATE {
            1 => Self::Clean,
            2 => Self::Unverified,
            3 => Self::Zero,
            4 => Self::Dirty,
            5 => Self::Partial,
            6 => Self::Erased,
            _ => Self::Absent,
        }
    }

    /// Occupies space in the cache's file.
    pub fn stored(self) -> bool {
        !matches!(self, Self::Absent | Self::Zero | Self::Erased)
    }

    /// Reads as zeros, whatever the cache's file holds.
    pub fn zero(self) -> bool {
        matches!(self, Self::Zero | Self::Erased)
    }

    /// Holds data that the remote may lack.
    pub fn needs_push(self) -> bool {
        matches!(self, Self::Dirty | Self::Partial | Self::Erased)
    }

    /// Cached, and the same at the remote: may be evicted.
    pub fn spare(self) -> bool {
        matches!(self, Self::Clean | Self::Unverified)
    }

    /// Complete: never needs a fetch.
    pub fn whole(self) -> bool {
        !matches!(self, Self::Absent | Self::Partial)
    }
}

/// Sizes: of the device, its chunks, and the up to 64 subchunks of a chunk, the granularity of change tracking.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub shape: Shape,
    /// A power of two: a 64th of a chunk, but at least 4096 bytes, the remote's alignment.
    pub subchunk: u64,
}

/// One bit per subchunk of a chunk.
pub type Mask = u64;

impl Geometry {
    pub fn new(shape: Shape) -> Result<Self, DeviceError> {
        if !shape.chunk.is_power_of_two() || shape.chunk < 4096 {
            return Err(DeviceError::Corrupt(format!(
                "the remote device has chunks of {} bytes, not a power of two of at least 4096",
                shape.chunk
            )));
        }
        if shape.chunks() > MAX_CHUNKS {
            return Err(DeviceError::Unsupported(
                "have more than 2^28 chunks: use a larger chunk".into(),
            ));
        }
        Ok(Self {
            shape,
            subchunk: u64::from(shape.chunk / 64).max(4096),
        })
    }

    pub fn chunk(self) -> u64 {
        u64::from(self.shape.chunk)
    }

    pub fn start(self, index: u64) -> u64 {
        index * self.chunk()
    }

    /// Length of a chunk in bytes; the last may be shorter.
    pub fn length(self, index: u64) -> u64 {
        u64::from(self.shape.length(index))
    }

    pub fn index(self, offset: u64) -> u64 {
        offset / self.chunk()
    }

    /// The chunks that a range touches.
    pub fn touched(self, offset: u64, length: u64) -> Range<u64> {
        match length {
            0 => self.index(offset)..self.index(offset),
            _ => self.index(offset)..self.index(offset + length - 1) + 1,
        }
    }

    /// The part of a range that lies in chunk `index`, relative to the chunk.
    pub fn within(self, index: u64, offset: u64, length: u64) -> Range<u64> {
        let start = self.start(index);
        let from = offset.max(start) - start;
        let to = (offset + length).min(start + self.length(index)) - start;
        from..to
    }

    /// All subchunks of a chunk.
    pub fn all(self, index: u64) -> Mask {
        low(self.length(index).div_ceil(self.subchunk))
    }

    /// Subchunks touched by a range inside a chunk.
    pub fn touch(self, range: &Range<u64>) -> Mask {
        match range.is_empty() {
            true => 0,
            false => low(range.end.div_ceil(self.subchunk)) & !low(range.start / self.subchunk),
        }
    }

    /// Subchunks completely covered by a range inside chunk `index`.
    pub fn cover(self, index: u64, range: &Range<u64>) -> Mask {
        let end = match range.end == self.length(index) {
            true => range.end.div_ceil(self.subchunk),
            false => range.end / self.subchunk,
        };
        low(end) & !low(range.start.div_ceil(self.subchunk))
    }

    /// Bytes of the device in the given subchunks of chunk `index`.
    pub fn bytes(self, index: u64, mask: Mask) -> u64 {
        let all = self.all(index);
        let mut bytes = u64::from((mask & all).count_ones()) * self.subchunk;
        let last = all & !(all >> 1);
        if mask & last != 0 {
            bytes -= u64::from(all.count_ones()) * self.subchunk - self.length(index);
        }
        bytes
    }

    /// The runs of subchunks in `mask`, as ranges relative to chunk `index`.
    pub fn runs(self, index: u64, mask: Mask) -> impl Iterator<Item = Range<u64>> {
        let length = self.length(index);
        let mut left = mask;
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let first = left.trailing_zeros();
            let count = (!(left >> first)).trailing_zeros().min(64 - first);
            left &= !(low(u64::from(count)) << first);
            let from = u64::from(first) * self.subchunk;
            Some(from..(from + u64::from(count) * self.subchunk).min(length))
        })
    }

    /// Splits a range at lock boundaries.
    pub fn pieces(self, offset: u64, length: u64) -> impl Iterator<Item = (u64, u64)> {
        self.small_pieces(offset, length, u64::MAX)
    }

    /// The same, in pieces that touch at most `most` chunks (at least one).
    pub fn small_pieces(
        self,
        offset: u64,
        length: u64,
        most: u64,
    ) -> impl Iterator<Item = (u64, u64)> {
        let most = 1 << most.max(1).ilog2();
        let stripe = STRIPE
            .max(self.chunk())
            .min(self.chunk().saturating_mul(most));
        let mut at = offset;
        let end = offset + length;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let take = (stripe - at % stripe).min(end - at);
            at += take;
            Some((at - take, take))
        })
    }
}

/// The lowest `count` bits.
fn low(count: u64) -> Mask {
    match count {
        64.. => Mask::MAX,
        _ => (1 << count) - 1,
    }
}

/// The states of all chunks, and the locks that guard their bytes.
///
/// A state changes only under the write lock of the chunk's stripe (and the table's, see `table.rs`); the flags change
/// at any time. A holder of the read lock may rely on the bytes of local chunks.
pub struct States {
    geometry: Geometry,
    states: Vec<AtomicU8>,
    stripes: Vec<RwLock<()>>,
    /// Chunks that occupy space.
    stored: AtomicU64,
    /// Chunks that need no fetch: all but absent and partial ones.
    local: AtomicU64,
    /// Chunks that occupy space and may be evicted.
    spare: AtomicU64,
    /// Unused read-ahead chunks, cached or in flight.
    ahead: AtomicU64,
    /// Chunks in flight.
    asked: AtomicU64,
}

impl States {
    pub fn new(geometry: Geometry) -> Self {
        let count = usize::try_from(geometry.shape.chunks()).unwrap_or(usize::MAX);
        let mut states = Vec::new();
        states.resize_with(count, || AtomicU8::new(0));
        let mut stripes = Vec::new();
        stripes.resize_with(LOCKS, RwLock::default);
        Self {
            geometry,
            states,
            stripes,
            stored: AtomicU64::new(0),
            local: AtomicU64::new(0),
            spare: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            asked: AtomicU64::new(0),
        }
    }

    pub fn count(&self) -> u64 {
        self.states.len() as u64
    }

    fn byte(&self, index: u64) -> &AtomicU8 {
        &self.states[index as usize]
    }

    pub fn get(&self, index: u64) -> ChunkState {
        ChunkState::of(self.byte(index).load(Ordering::Acquire))
    }

    /// The caller holds the stripe's write lock.
    pub fn set(&self, index: u64, new: ChunkState) {
        let byte = self.byte(index);
        // Arriving read-ahead is still unused.
        let kept = |old: u8| match new == ChunkState::Clean && old & IN_FLIGHT != 0 {
            true => old & (IN_FLIGHT | AHEAD),
            false => old & IN_FLIGHT,
        };
        let before = byte
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
                Some(kept(old) | USED | new as u8)
            })
            .unwrap_or_default();
        let old = ChunkState::of(before);
        count(&self.stored, old.stored(), new.stored());
        count(&self.local, old.whole(), new.whole());
        count(&self.spare, old.spare(), new.spare());
        count(&self.ahead, before & AHEAD != 0, kept(before) & AHEAD != 0);
    }

    /// Marks the chunk as used; true if it was unused read-ahead.
    pub fn mark(&self, index: u64) -> bool {
        let byte = self.byte(index);
        let old = byte.load(Ordering::Relaxed);
        if old & USED == 0 {
            byte.fetch_or(USED, Ordering::Relaxed);
        }
        old & AHEAD != 0 && self.not_ahead(index)
    }

    /// Marks the chunk as requested for read-ahead.
    pub fn set_ahead(&self, index: u64) {
        let old = self.byte(index).fetch_or(AHEAD, Ordering::AcqRel);
        count(&self.ahead, old & AHEAD != 0, true);
    }

    /// Whether the chunk is unused read-ahead, cached or in flight.
    pub fn is_ahead(&self, index: u64) -> bool {
        self.byte(index).load(Ordering::Acquire) & AHEAD != 0
    }

    /// Clears the read-ahead mark (used or expired); false if it was not set.
    pub fn not_ahead(&self, index: u64) -> bool {
        let old = self.byte(index).fetch_and(!AHEAD, Ordering::AcqRel);
        count(&self.ahead, old & AHEAD != 0, false);
        old & AHEAD != 0
    }

    /// Passes the CLOCK hand over a chunk: whether it was used since the last pass.
    pub fn pass(&self, index: u64) -> bool {
        self.byte(index).fetch_and(!USED, Ordering::Relaxed) & USED != 0
    }

    /// Claims the right to fetch a chunk; false when it is in flight or needs no fetch.
    pub fn ask(&self, index: u64) -> bool {
        let byte = self.byte(index);
        let old = byte.fetch_or(IN_FLIGHT, Ordering::AcqRel);
        if old & IN_FLIGHT != 0 {
            return false;
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        if ChunkState::of(old).whole() {
            self.answered(index);
            return false;
        }
        true
    }

    /// Whether the chunk needs a fetch that is not in flight.
    pub fn wanted(&self, index: u64) -> bool {
        let byte = self.byte(index).load(Ordering::Acquire);
        byte & IN_FLIGHT == 0 && !ChunkState::of(byte).whole()
    }

    pub fn in_flight(&self, index: u64) -> bool {
        self.byte(index).load(Ordering::Acquire) & IN_FLIGHT != 0
    }

    /// The fetch was answered; false when none was in flight.
    pub fn answered(&self, index: u64) -> bool {
        let old = self.byte(index).fetch_and(!IN_FLIGHT, Ordering::AcqRel);
        count(&self.asked, old & IN_FLIGHT != 0, false);
        old & IN_FLIGHT != 0
    }

    pub fn stored(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    pub fn local(&self) -> u64 {
        self.local.load(Ordering::Relaxed)
    }

    pub fn spare(&self) -> u64 {
        self.spare.load(Ordering::Relaxed)
    }

    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    pub fn ahead(&self) -> u64 {
        self.ahead.load(Ordering::Relaxed)
    }

    fn stripe(&self, index: u64) -> &RwLock<()> {
        let stripe = self.geometry.start(index) / STRIPE.max(self.geometry.chunk());
        &self.stripes[stripe as usize % LOCKS]
    }

    pub fn read(&self, index: u64) -> RwLockReadGuard<'_, ()> {
        self.stripe(index).read()
    }

    pub fn write(&self, index: u64) -> RwLockWriteGuard<'_, ()> {
        self.stripe(index).write()
    }

    /// Waits until the current holders of all locks have released them.
    pub fn drain(&self) {
        for stripe in &self.stripes {
            drop(stripe.write());
        }
    }

    /// The first run of chunks in `first..end` that need a fetch.
    pub fn run(&self, first: u64, end: u64) -> Option<Chunks> {
        let from = (first..end).find(|i| self.wanted(*i))?;
        let to = (from..end).find(|i| !self.wanted(*i)).unwrap_or(end);
        Some(Chunks {
            first: from,
            count: u32::try_from(to - from).unwrap_or(u32::MAX),
        })
    }
}

fn count(counter: &AtomicU64, before: bool, after: bool) {
    match (before, after) {
        (false, true) => {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        (true, false) => {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(size: u64, chunk: u32) -> Geometry {
        Geometry::new(Shape { size, chunk }).unwrap()
    }

    #[test]
    fn subchunks_are_a_64th_of_a_chunk_and_at_least_a_block() {
        assert_eq!(geometry(1 << 30, 4096).subchunk, 4096);
        assert_eq!(geometry(1 << 30, 64 << 10).subchunk, 4096);
        assert_eq!(geometry(1 << 30, 1 << 20).subchunk, 16 << 10);
        assert!(Geometry::new(Shape { size: 1, chunk: 0 }).is_err());
        assert!(
            Geometry::new(Shape {
                size: 1,
                chunk: 5000
            })
            .is_err()
        );
        let many = Shape {
            size: u64::MAX,
            chunk: 4096,
        };
        assert!(Geometry::new(many).is_err());
    }

    #[test]
    fn masks_agree_with_counting_bytes() {
        let mut random = fastrand::Rng::with_seed(7);
        for chunk in [4096, 65536, 1 << 20] {
            let g = geometry(5 * u64::from(chunk) + 70_001 % u64::from(chunk), chunk);
            for _ in 0..300 {
                let index = random.u64(0..g.shape.chunks());
                let length = g.length(index);
                let from = random.u64(0..=length);
                let range = from..random.u64(from..=length);
                let (touch, cover) = (g.touch(&range), g.cover(index, &range));
                for subchunk in 0..64 {
                    let start = subchunk * g.subchunk;
                    let end = (start + g.subchunk).min(length);
                    let bit = 1u64 << subchunk;
                    let touched =
                        start < end && start < range.end && range.start < end && !range.is_empty();
                    let covered = start < end && range.start <= start && end <= range.end;
                    assert_eq!(touch & bit != 0, touched, "{range:?} {subchunk}");
                    assert_eq!(cover & bit != 0, covered, "{range:?} {subchunk}");
                }
                let bytes: u64 = g.runs(index, touch).map(|r| r.end - r.start).sum();
                assert_eq!(bytes, g.bytes(index, touch));
            }
            assert_eq!(g.bytes(0, Mask::MAX), u64::from(chunk));
            let last = g.shape.chunks() - 1;
            assert_eq!(g.bytes(last, g.all(last)), g.length(last));
        }
    }

    #[test]
    fn a_chunk_is_asked_for_once() {
        let states = States::new(geometry(1 << 20, 65536));
        assert!(states.ask(3));
        assert!(!states.ask(3));
        assert_eq!(states.run(0, 16), Some(Chunks { first: 0, count: 3 }));
        assert_eq!(
            states.run(3, 16),
            Some(Chunks {
                first: 4,
                count: 12
            })
        );
        assert!(states.answered(3));
        assert!(!states.answered(3));
        states.set(3, ChunkState::Clean);
        assert!(!states.ask(3));
        assert!(!states.in_flight(3));
        assert_eq!((states.stored(), states.local()), (1, 1));
        states.set(3, ChunkState::Zero);
        assert_eq!((states.stored(), states.local()), (0, 1));
    }
}
