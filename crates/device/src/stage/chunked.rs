//! A stage that accepts any offset and length, over a device that accepts only whole chunks.

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range, is_zero,
};
use parking_lot::{RwLock, RwLockReadGuard};

/// Locks, shared by chunks modulo this number.
const LOCKS: usize = 64;

/// Reads up to this size are one request for all touched chunks, and a copy; longer ones read whole chunks in place and
/// copy only the edges.
const COPIED: u64 = 256 << 10;

/// Accepts any offset and length and issues only whole-chunk requests below (r3map §1.4.5.2, the
/// `ArbitraryReadWriterAt`). The last chunk is as short as the device makes it.
///
/// Whole chunks pass straight through, many per request. Partial chunks are read, modified and written back under the
/// chunk's lock, so that concurrent writes to different parts of one chunk are both kept. A trim forwards only whole
/// chunks and zeroes the rest.
///
/// Locks: a request holds either one lock exclusively, to modify part of a chunk, or several shared ones, taken in
/// index order, to write whole chunks. They are deliberately held during I/O of the device below.
pub struct Chunked<D> {
    inner: D,
    chunk: u64,
    /// Maximum bytes of a request below: whole chunks, or less than one if the device's limit is smaller.
    step: u64,
    read_only: bool,
    locks: [RwLock<()>; LOCKS],
}

/// A range split at chunk boundaries: a partial chunk, whole chunks, a partial chunk; each may be empty.
struct Cut {
    head: (u64, u64),
    whole: (u64, u64),
    tail: (u64, u64),
}

impl<D: BlockDevice> Chunked<D> {
    /// Splits requests at multiples of `chunk` bytes.
    ///
    /// # Panics
    /// If `chunk` is not a power of two, or smaller than the alignment of `inner`.
    pub fn new(inner: D, chunk: u32) -> Self {
        let below = inner.capabilities();
        assert!(chunk.is_power_of_two(), "a chunk is a power of two");
        assert!(
            chunk >= below.alignment,
            "a chunk is no smaller than the alignment below"
        );
        let unit = match below.longest >= chunk {
            true => chunk,
            false => below.alignment,
        };
        Self {
            chunk: u64::from(chunk),
            step: u64::from(below.longest / unit * unit).max(u64::from(unit)),
            read_only: below.read_only,
            locks: std::array::from_fn(|_| RwLock::new(())),
            inner,
        }
    }

    fn change(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        // Checked before a chunk is read for modification.
        if self.read_only {
            return Err(DeviceError::ReadOnly);
        }
        check_range(offset, length, self.size())
    }

    fn up(&self, at: u64) -> u64 {
        at.checked_next_multiple_of(self.chunk)
            .unwrap_or(u64::MAX)
            .min(self.inner.size())
    }

    fn down(&self, at: u64) -> u64 {
        at / self.chunk * self.chunk
    }

    /// The chunks touched by a range inside the device.
    fn cover(&self, offset: u64, length: u64) -> (u64, u64) {
        let from = self.down(offset);
        match length {
            0 => (from, 0),
            _ => (from, self.up(offset + length) - from),
        }
    }

    /// Splits a range inside the device. A short last chunk that is covered to its end counts as whole.
    fn cut(&self, offset: u64, length: u64) -> Cut {
        let end = offset + length;
        let first = self.up(offset);
        let last = match end == self.inner.size() {
            true => end,
            false => self.down(end),
        };
        if first > last {
            return Cut {
                head: (offset, length),
                whole: (first, 0),
                tail: (end, 0),
            };
        }
        Cut {
            head: (offset, first - offset),
            whole: (first, last - first),
            tail: (last, end - last),
        }
    }

    fn lock_of(&self, at: u64) -> usize {
        (at / self.chunk % LOCKS as u64) as usize
    }

    /// Locks a range of whole chunks against partial modifications.
    fn keep(&self, (offset, length): (u64, u64)) -> Vec<RwLockReadGuard<'_, ()>> {
        if length == 0 {
            return Vec::new();
        }
        let count = length.div_ceil(self.chunk).min(LOCKS as u64) as usize;
        let mut which: Vec<usize> = (0..count)
            .map(|n| (self.lock_of(offset) + n) % LOCKS)
            .collect();
        which.sort_unstable();
        which.into_iter().map(|n| self.locks[n].read()).collect()
    }

    fn read_below(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let mut at = offset;
        for part in buffer.chunks_mut(self.step as usize) {
            self.inner.read(at, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn write_below(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let mut at = offset;
        for part in data.chunks(self.step as usize) {
            self.inner.write(at, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Reads a range through a buffer holding all the chunks it touches.
    fn read_copied(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        if buffer.is_empty() {
            return Ok(());
        }
        let (from, length) = self.cover(offset, buffer.len() as u64);
        let mut copy = vec![0; length as usize];
        self.read_below(from, &mut copy)?;
        let skip = (offset - from) as usize;
        buffer.copy_from_slice(&copy[skip..skip + buffer.len()]);
        Ok(())
    }

    /// Reads the chunk that contains a range, applies `change` to the range, and writes the chunk back if that returns
    /// true.
    fn modify(
        &self,
        (offset, length): (u64, u64),
        change: impl FnOnce(&mut [u8]) -> bool,
    ) -> Result<(), DeviceError> {
        if length == 0 {
            return Ok(());
        }
        let (from, whole) = self.cover(offset, length);
        let _alone = self.locks[self.lock_of(from)].write();
        let mut copy = vec![0; whole as usize];
        self.read_below(from, &mut copy)?;
        let skip = (offset - from) as usize;
        match change(&mut copy[skip..skip + length as usize]) {
            true => self.write_below(from, &copy),
            false => Ok(()),
        }
    }

    /// Zeroes part of a chunk. Nothing is written where it is zero already, unless it must stay `allocated`.
    fn zero_part(&self, part: (u64, u64), allocated: bool) -> Result<(), DeviceError> {
        self.modify(part, |bytes| {
            let needed = allocated || !is_zero(bytes);
            bytes.fill(0);
            needed
        })
    }
}

impl<D: BlockDevice> BlockDevice for Chunked<D> {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn capabilities(&self) -> Capabilities {
        let below = self.inner.capabilities();
        Capabilities {
            alignment: 1,
            preferred: below.preferred.max(self.chunk as u32),
            longest: u32::MAX,
            ..below
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let length = buffer.len() as u64;
        check_range(offset, length, self.size())?;
        let Cut { head, whole, tail } = self.cut(offset, length);
        if head.1 == 0 && tail.1 == 0 {
            return self.read_below(offset, buffer);
        }
        let (_, covered) = self.cover(offset, length);
        if whole.1 == 0 || covered <= COPIED {
            return self.read_copied(offset, buffer);
        }
        let (first, rest) = buffer.split_at_mut(head.1 as usize);
        let (middle, last) = rest.split_at_mut(whole.1 as usize);
        self.read_copied(head.0, first)?;
        self.read_below(whole.0, middle)?;
        self.read_copied(tail.0, last)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.change(offset, data.len() as u64)?;
        let Cut { head, whole, tail } = self.cut(offset, data.len() as u64);
        let (first, rest) = data.split_at(head.1 as usize);
        let (middle, last) = rest.split_at(whole.1 as usize);
        let put = |from: &[u8], to: &mut [u8]| {
            to.copy_from_slice(from);
            true
        };
        self.modify(head, |bytes| put(first, bytes))?;
        if !middle.is_empty() {
            let _kept = self.keep(whole);
            self.write_below(whole.0, middle)?;
        }
        self.modify(tail, |bytes| put(last, bytes))
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.change(offset, length)?;
        let Cut { head, whole, tail } = self.cut(offset, length);
        if whole.1 > 0 {
            let _kept = self.keep(whole);
            self.inner.write_zeroes(whole.0, whole.1, zeroes)?;
        } else if length > 0 && zeroes.only_fast {
            return Err(DeviceError::Unsupported(
                "zero a part of a chunk faster than by writing it".into(),
            ));
        }
        self.zero_part(head, zeroes.keep_allocated)?;
        self.zero_part(tail, zeroes.keep_allocated)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.change(offset, length)?;
        let Cut { head, whole, tail } = self.cut(offset, length);
        if whole.1 > 0 {
            let _kept = self.keep(whole);
            self.inner.trim(whole.0, whole.1)?;
        }
        self.zero_part(head, false)?;
        self.zero_part(tail, false)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.inner.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.size())?;
        if length == 0 {
            return Ok(Vec::new());
        }
        let (from, covered) = self.cover(offset, length);
        let end = offset + length;
        let mut runs = self.inner.extents(from, covered)?;
        runs.retain_mut(|run| {
            let (start, stop) = (run.offset.max(offset), run.end().min(end));
            run.offset = start;
            run.length = stop.saturating_sub(start);
            run.length > 0
        });
        if runs.is_empty() {
            // The device reported only extents before the range.
            runs.push(Extent {
                offset,
                length: self.up(offset + 1).min(end) - offset,
                kind: ExtentKind::Data,
            });
        }
        Ok(runs)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size())?;
        let (from, covered) = self.cover(offset, length);
        self.inner.prefetch(from, covered)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        match check_range(offset, length, self.size()) {
            Ok(()) => {
                let (from, covered) = self.cover(offset, length);
                self.inner.cost(from, covered)
            }
            Err(_) => self.inner.cost(offset, length),
        }
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        match check_range(offset, length, self.size()) {
            Ok(()) => {
                let (from, covered) = self.cover(offset, length);
                let write = self.inner.write_cost(from, covered);
                match (from, covered) == (offset, length) {
                    true => write,
                    // Partially covered chunks are read first.
                    false => write.max(self.inner.cost(from, covered)),
                }
            }
            Err(_) => self.inner.write_cost(offset, length),
        }
    }
}

#[cfg(test)]
mod tests;
