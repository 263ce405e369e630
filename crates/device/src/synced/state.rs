//! The state of each chunk: one byte per chunk, so 16 MiB for a TiB in chunks of 64 KiB.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use drover_core::DeviceError;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::remote::{Chunks, Shape};

/// Most chunks of one device: their states take that many bytes of memory.
pub const MAX_CHUNKS: u64 = 1 << 28;

/// Bytes of neighbouring chunks that one lock guards (or one chunk, where that is longer), so that most requests take
/// one lock.
const STRIPE: u64 = 4 << 20;

/// How many locks there are.
const LOCKS: usize = 256;

/// Where the bytes of a chunk are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ChunkState {
    /// Only at the far side.
    Absent = 0,
    /// Here, and the same at the far side.
    Clean = 1,
    /// Here, as far as the map of a cache that was not closed can tell: its digest is compared before it is used.
    Unverified = 2,
    /// Zeros only, also at the far side; takes no room.
    Zero = 3,
    /// Here, and some of it not yet at the far side.
    Dirty = 4,
    /// Some subchunks are here, the rest only at the far side.
    Partial = 5,
    /// Zeros only, which the far side does not know yet; takes no room.
    Erased = 6,
}

/// Set while the far side has been asked for the chunk and has not answered.
const IN_FLIGHT: u8 = 0x80;
/// Set when the chunk is used, cleared when the hand of the clock passes.
const USED: u8 = 0x40;
/// Set when the chunk is asked for ahead of a reader, cleared when it is used (or nobody came): only in a cache of limited
/// size.
const AHEAD: u8 = 0x20;
const STATE: u8 = 0x07;

impl ChunkState {
    /// What a byte of the map means, if anything.
    pub fn from_byte(byte: u8) -> Option<Self> {
        (byte <= Self::Erased as u8).then(|| Self::of(byte))
    }

    /// What the low bits of a byte mean; unknown ones claim nothing.
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

    /// Takes room in the cache's file.
    pub fn stored(self) -> bool {
        !matches!(self, Self::Absent | Self::Zero | Self::Erased)
    }

    /// Reads as zeros, whatever the cache's file holds.
    pub fn zero(self) -> bool {
        matches!(self, Self::Zero | Self::Erased)
    }

    /// Holds what the far side may not have.
    pub fn needs_push(self) -> bool {
        matches!(self, Self::Dirty | Self::Partial | Self::Erased)
    }

    /// Here, and the same at the far side: may be let go.
    pub fn spare(self) -> bool {
        matches!(self, Self::Clean | Self::Unverified)
    }

    /// Whole and as good as it can be: never fetched.
    pub fn whole(self) -> bool {
        !matches!(self, Self::Absent | Self::Partial)
    }
}

/// Sizes: of the device, of its chunks, and of the 64 or fewer subchunks of a chunk by which changes are told.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub shape: Shape,
    /// A power of two: a 64th of a chunk, but at least 4096 bytes, what the far side takes.
    pub subchunk: u64,
}

/// A bit for each subchunk of a chunk.
pub type Mask = u64;

impl Geometry {
    pub fn new(shape: Shape) -> Result<Self, DeviceError> {
        if !shape.chunk.is_power_of_two() || shape.chunk < 4096 {
            return Err(DeviceError::Corrupt(format!(
                "the far side cuts its device into chunks of {} bytes: not a power of two of at least 4096",
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

    /// Bytes of a chunk; the last may be shorter.
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

    /// The part of a range that lies in chunk `index`, as a range inside the chunk.
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

    /// Subchunks that a range inside a chunk touches.
    pub fn touch(self, range: &Range<u64>) -> Mask {
        match range.is_empty() {
            true => 0,
            false => low(range.end.div_ceil(self.subchunk)) & !low(range.start / self.subchunk),
        }
    }

    /// Subchunks that a range inside chunk `index` covers whole.
    pub fn cover(self, index: u64, range: &Range<u64>) -> Mask {
        let end = match range.end == self.length(index) {
            true => range.end.div_ceil(self.subchunk),
            false => range.end / self.subchunk,
        };
        low(end) & !low(range.start.div_ceil(self.subchunk))
    }

    /// Bytes of the device that subchunks of chunk `index` hold.
    pub fn bytes(self, index: u64, mask: Mask) -> u64 {
        let all = self.all(index);
        let mut bytes = u64::from((mask & all).count_ones()) * self.subchunk;
        let last = all & !(all >> 1);
        if mask & last != 0 {
            bytes -= u64::from(all.count_ones()) * self.subchunk - self.length(index);
        }
        bytes
    }

    /// The runs of subchunks in `mask`, as ranges inside chunk `index`.
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

    /// Cuts a range where the locks change.
    pub fn pieces(self, offset: u64, length: u64) -> impl Iterator<Item = (u64, u64)> {
        self.small_pieces(offset, length, u64::MAX)
    }

    /// The same, into pieces that touch at most `most` chunks (at least one).
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
/// at any time. Whoever holds the read lock may rely on the bytes of what is local.
pub struct States {
    geometry: Geometry,
    states: Vec<AtomicU8>,
    stripes: Vec<RwLock<()>>,
    /// Chunks that take room.
    stored: AtomicU64,
    /// Chunks that need no fetch: all but absent and partial ones.
    local: AtomicU64,
    /// Chunks that take room and may be let go.
    spare: AtomicU64,
    /// Chunks that are here or coming ahead of a reader.
    ahead: AtomicU64,
    /// Chunks that the far side was asked for.
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
        // What came ahead of a reader is still not used.
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

    /// Says that the chunk was used: whether it had come ahead of a reader and was not used before.
    pub fn mark(&self, index: u64) -> bool {
        let byte = self.byte(index);
        let old = byte.load(Ordering::Relaxed);
        if old & USED == 0 {
            byte.fetch_or(USED, Ordering::Relaxed);
        }
        old & AHEAD != 0 && self.not_ahead(index)
    }

    /// Says that the chunk is asked for ahead of a reader.
    pub fn set_ahead(&self, index: u64) {
        let old = self.byte(index).fetch_or(AHEAD, Ordering::AcqRel);
        count(&self.ahead, old & AHEAD != 0, true);
    }

    /// Whether the chunk is here or coming ahead of a reader, and was not used yet.
    pub fn is_ahead(&self, index: u64) -> bool {
        self.byte(index).load(Ordering::Acquire) & AHEAD != 0
    }

    /// The reader has come, or will not come: false when it was not ahead of one.
    pub fn not_ahead(&self, index: u64) -> bool {
        let old = self.byte(index).fetch_and(!AHEAD, Ordering::AcqRel);
        count(&self.ahead, old & AHEAD != 0, false);
        old & AHEAD != 0
    }

    /// Passes the hand of the clock over a chunk: whether it had been used since the last time.
    pub fn pass(&self, index: u64) -> bool {
        self.byte(index).fetch_and(!USED, Ordering::Relaxed) & USED != 0
    }

    /// Claims the right to ask for a chunk; false when it is already asked for or needs no fetch.
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

    /// Whether the chunk would have to be asked for.
    pub fn wanted(&self, index: u64) -> bool {
        let byte = self.byte(index).load(Ordering::Acquire);
        byte & IN_FLIGHT == 0 && !ChunkState::of(byte).whole()
    }

    pub fn in_flight(&self, index: u64) -> bool {
        self.byte(index).load(Ordering::Acquire) & IN_FLIGHT != 0
    }

    /// The far side has answered; false when it was not asked.
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

    /// Waits until whoever holds a lock now has let go of it.
    pub fn drain(&self) {
        for stripe in &self.stripes {
            drop(stripe.write());
        }
    }

    /// The run of chunks from `first` on, before `end`, that would have to be asked for.
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
