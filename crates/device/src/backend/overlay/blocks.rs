//! The overlay as a [`drover_core::BlockDevice`].

use std::ops::Range;
use std::sync::atomic::Ordering;

use drover_core::{
    BLOCK_SIZE, BLOCK_SIZE_U64, BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind,
    Zeroes, check_range,
};
use parking_lot::RwLockReadGuard;

use super::redo::Redo;
use super::states::BlockState;
use super::{DATA, MAX_REQUEST, Overlay, OverlayError};
use drover_storage::read_exact_at;

/// Zeros to write where space must stay allocated.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Maximum extents of one reply; the caller asks again for the rest.
const MAX_EXTENTS: usize = 4096;

/// Changed runs of blocks that are not in the log, beyond which the next change flushes: bounds the memory for them, and
/// what a flush adds to the log.
const MAX_UNLOGGED: usize = 1 << 16;

/// Where bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Base,
    Zero,
    Data,
    /// At this offset of the sealed redo file.
    Redo(u64),
}

/// Bytes of a request stored in one place.
struct Part {
    offset: u64,
    length: u64,
    place: Place,
}

pub(super) fn blocks_of(offset: u64, length: u64) -> Range<u64> {
    offset / BLOCK_SIZE_U64..(offset + length).div_ceil(BLOCK_SIZE_U64)
}

impl Overlay {
    /// Where the bytes of a range are stored, in order, with adjacent parts joined: the first `most` parts.
    fn plan(&self, offset: u64, length: u64, sealed: Option<&Redo>, most: usize) -> Vec<Part> {
        let end = offset + length;
        let mut parts: Vec<Part> = Vec::new();
        // Adds blocks, clipped to the range; `place` is that of the first block's first byte. False when there are
        // more than enough: the last part may be incomplete.
        let mut add = |blocks: Range<u64>, place: Place| {
            let start = blocks.start * BLOCK_SIZE_U64;
            let from = start.max(offset);
            let to = (blocks.end * BLOCK_SIZE_U64).min(end);
            let place = match place {
                Place::Redo(at) => Place::Redo(at + from - start),
                other => other,
            };
            let follows = |last: &Part| match (last.place, place) {
                (Place::Redo(a), Place::Redo(b)) => a + last.length == b,
                (a, b) => a == b,
            };
            match parts.last_mut() {
                Some(last) if follows(last) => last.length += to - from,
                _ => parts.push(Part {
                    offset: from,
                    length: to - from,
                    place,
                }),
            }
            parts.len() <= most
        };
        let states = self.states.read();
        let by_state = |blocks: Range<u64>, add: &mut dyn FnMut(Range<u64>, Place) -> bool| {
            states.runs(blocks).all(|(run, state)| {
                let place = match state {
                    BlockState::Base => Place::Base,
                    BlockState::Here => Place::Data,
                    BlockState::Zero => Place::Zero,
                };
                add(run, place)
            })
        };
        let blocks = blocks_of(offset, length);
        let mut at = blocks.start;
        let mut pieces = sealed.iter().flat_map(|redo| redo.pieces(blocks.clone()));
        let goes_on = pieces.all(|(piece, place)| {
            let before = at..piece.start;
            at = piece.end;
            by_state(before, &mut add) && add(piece, place.map_or(Place::Zero, Place::Redo))
        });
        if goes_on {
            by_state(at..blocks.end, &mut add);
        }
        parts.truncate(most);
        parts
    }

    /// The parts of a range that differ from the base, in order: bytes, and whether they are zeros. Includes a
    /// committed epoch that is not copied yet.
    #[must_use]
    pub fn changes_in(&self, range: Range<u64>) -> Vec<(Range<u64>, bool)> {
        let end = range.end.min(self.size);
        if range.start >= end {
            return Vec::new();
        }
        let sealed = self.sealed.read();
        let parts = self.plan(
            range.start,
            end - range.start,
            sealed.as_deref(),
            usize::MAX,
        );
        let changed = parts.iter().filter(|part| part.place != Place::Base);
        changed
            .map(|part| {
                let bytes = part.offset..part.offset + part.length;
                (bytes, part.place == Place::Zero)
            })
            .collect()
    }

    fn read_range(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let mut from_base = Vec::new();
        {
            // Held while the overlay's own files are read: a commit switches before or after this request.
            let sealed = self.sealed.read();
            let length = buffer.len() as u64;
            for part in self.plan(offset, length, sealed.as_deref(), usize::MAX) {
                let from = (part.offset - offset) as usize;
                let bytes = &mut buffer[from..from + part.length as usize];
                match part.place {
                    Place::Zero => bytes.fill(0),
                    Place::Data => self.read_data(bytes, part.offset)?,
                    Place::Redo(at) => {
                        if let Some(redo) = sealed.as_deref() {
                            read_exact_at(redo.file.as_ref(), bytes, at)
                                .map_err(self.io("read", &redo.name))?;
                        }
                    }
                    Place::Base => from_base.push(part),
                }
            }
        }
        // The base never changes, so it is read without the lock.
        for part in from_base {
            let from = (part.offset - offset) as usize;
            let bytes = &mut buffer[from..from + part.length as usize];
            self.read_base(part.offset, bytes)?;
        }
        Ok(())
    }

    fn read_base(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let longest = self.base.capabilities().longest.max(1) as usize;
        for (nth, bytes) in buffer.chunks_mut(longest).enumerate() {
            self.base.read(offset + (nth * longest) as u64, bytes)?;
        }
        Ok(())
    }

    fn read_data(&self, buffer: &mut [u8], offset: u64) -> Result<(), OverlayError> {
        read_exact_at(self.data.as_ref(), buffer, offset).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => OverlayError::Damaged {
                file: self.directory.describe(DATA),
                what: "it is shorter than when it was opened",
            },
            _ => self.io("read", DATA)(error),
        })
    }

    fn write_data(&self, data: &[u8], offset: u64) -> Result<(), OverlayError> {
        self.data
            .write_at(data, offset)
            .map_err(self.io("write", DATA))
    }

    /// Checks a change and enters the plain section: no epoch waits to be copied, and none will while the guard lives.
    fn enter(&self, offset: u64, length: u64) -> Result<RwLockReadGuard<'_, ()>, DeviceError> {
        self.writable()?;
        check_range(offset, length, self.size)?;
        loop {
            let plain = self.plain.read();
            if self.staged.load(Ordering::Acquire) {
                return Err(DeviceError::Unavailable(
                    "an epoch is being staged; commit or abandon it first".into(),
                ));
            }
            if !self.unsettled.load(Ordering::Acquire) {
                self.mark()?;
                return Ok(plain);
            }
            drop(plain);
            self.settle_for_a_change()?;
        }
    }

    /// Runs a plain change; one that fails may still have changed something.
    fn change(
        &self,
        offset: u64,
        length: u64,
        change: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        if self.states.read().changed_runs() >= MAX_UNLOGGED {
            self.flush()?;
        }
        let _plain = self.enter(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let result = {
            let _taken = self.ranges.take(blocks_of(offset, length));
            change()
        };
        self.unflushed.store(true, Ordering::Release);
        result
    }

    /// Writes part of a block that is not in the overlay yet, by writing all of it.
    fn write_into_new(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let block = offset / BLOCK_SIZE_U64;
        let (start, length) = self.bytes_of(block..block + 1);
        let mut whole = [0; BLOCK_SIZE];
        let whole = &mut whole[..length as usize];
        if self.states.read().get(block) == BlockState::Base {
            self.read_base(start, whole)?;
        }
        let within = (offset - start) as usize;
        whole[within..within + data.len()].copy_from_slice(data);
        self.write_data(whole, start)?;
        self.states.write().set(block..block + 1, BlockState::Here);
        Ok(())
    }

    /// Writes to blocks whose range lock the caller holds.
    fn write_taken(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let blocks = blocks_of(at, rest.len() as u64);
            let here = {
                let states = self.states.read();
                let first = states.runs(blocks.clone()).next();
                first.filter(|run| run.1 == BlockState::Here)
            };
            // The next part: either existing blocks, written in place, or new ones.
            let (take, fresh) = match here {
                Some((run, _)) => ((run.end * BLOCK_SIZE_U64 - at).min(rest.len() as u64), None),
                None => {
                    let aligned = at.is_multiple_of(BLOCK_SIZE_U64);
                    let end = at + rest.len() as u64;
                    let whole_end = match end == self.size {
                        true => blocks.end,
                        false => end / BLOCK_SIZE_U64,
                    };
                    if !aligned || whole_end == blocks.start {
                        let block_end = (blocks.start + 1) * BLOCK_SIZE_U64;
                        let take = (block_end - at).min(rest.len() as u64) as usize;
                        self.write_into_new(at, &rest[..take])?;
                        at += take as u64;
                        rest = &rest[take..];
                        continue;
                    }
                    let whole = blocks.start..whole_end;
                    let (_, length) = self.bytes_of(whole.clone());
                    (length, Some(whole))
                }
            };
            self.write_data(&rest[..take as usize], at)?;
            if let Some(whole) = fresh {
                self.states.write().set(whole, BlockState::Here);
            }
            at += take;
            rest = &rest[take as usize..];
        }
        Ok(())
    }

    /// Writes zeros inside blocks; a block that is zero already stays unallocated.
    fn zero_part(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        if length == 0 || self.states.read().get(offset / BLOCK_SIZE_U64) == BlockState::Zero {
            return Ok(());
        }
        self.write_taken(offset, &ZEROS[..length as usize])
    }

    /// Makes whole blocks zero. The map is changed first, so that nobody reads a range being deallocated.
    fn zero_blocks(&self, blocks: Range<u64>) {
        let runs = self.states.read().runs(blocks.clone()).collect();
        self.states.write().set(blocks, BlockState::Zero);
        self.punch(runs);
    }

    /// Makes whole blocks zero while keeping or allocating their space.
    fn zero_here(&self, blocks: Range<u64>) -> Result<(), DeviceError> {
        let (offset, length) = self.bytes_of(blocks.clone());
        self.data
            .punch_hole(offset, length)
            .map_err(self.io("zero", DATA))?;
        match self.data.allocate(offset, length) {
            Err(error) if error.kind() == std::io::ErrorKind::Unsupported => {
                let mut at = offset;
                while at < offset + length {
                    let take = (offset + length - at).min(ZEROS.len() as u64);
                    self.write_data(&ZEROS[..take as usize], at)?;
                    at += take;
                }
            }
            result => result.map_err(self.io("take room in", DATA))?,
        }
        self.states.write().set(blocks, BlockState::Here);
        Ok(())
    }

    /// The whole blocks inside a range.
    pub(super) fn whole_blocks(&self, offset: u64, length: u64) -> Range<u64> {
        let end = offset + length;
        let last = match end == self.size {
            true => end.div_ceil(BLOCK_SIZE_U64),
            false => end / BLOCK_SIZE_U64,
        };
        offset.div_ceil(BLOCK_SIZE_U64)..last
    }

    fn check_length(&self, offset: u64, length: usize) -> Result<(), DeviceError> {
        check_range(offset, length as u64, self.size)?;
        match length > MAX_REQUEST as usize {
            true => Err(DeviceError::Unaligned {
                offset,
                length: length as u64,
                alignment: 1,
            }),
            false => Ok(()),
        }
    }
}

impl BlockDevice for Overlay {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: self.options.read_only,
            fast_zeroes: !self.options.read_only,
            trim: !self.options.read_only,
            durable: true,
            extents: true,
            alignment: 1,
            preferred: BLOCK_SIZE as u32,
            longest: MAX_REQUEST,
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.check_length(offset, buffer.len())?;
        self.read_range(offset, buffer)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.check_length(offset, data.len())?;
        self.change(offset, data.len() as u64, || self.write_taken(offset, data))
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        if zeroes.keep_allocated && zeroes.only_fast {
            check_range(offset, length, self.size)?;
            return Err(DeviceError::Unsupported(
                "zero a range quickly and keep its room".into(),
            ));
        }
        self.change(offset, length, || {
            let end = offset + length;
            let whole = self.whole_blocks(offset, length);
            if whole.is_empty() {
                // Inside one block, or across the boundary of two.
                let edge = (whole.start * BLOCK_SIZE_U64).clamp(offset, end);
                self.zero_part(offset, edge - offset)?;
                return self.zero_part(edge, end - edge);
            }
            let (start, covered) = self.bytes_of(whole.clone());
            self.zero_part(offset, start - offset)?;
            self.zero_part(start + covered, end - start - covered)?;
            match zeroes.keep_allocated {
                true => self.zero_here(whole),
                false => {
                    self.zero_blocks(whole);
                    Ok(())
                }
            }
        })
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.change(offset, length, || {
            // Partial blocks at the edges stay as they are: trimming them frees nothing.
            let whole = self.whole_blocks(offset, length);
            if !whole.is_empty() {
                self.zero_blocks(whole);
            }
            Ok(())
        })
    }

    fn flush(&self) -> Result<(), DeviceError> {
        if self.options.read_only {
            return Ok(());
        }
        self.writable()?;
        Ok(self.save()?)
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.size)?;
        let parts = {
            let sealed = self.sealed.read();
            self.plan(offset, length, sealed.as_deref(), MAX_EXTENTS)
        };
        let mut extents: Vec<Extent> = Vec::new();
        for part in parts {
            if extents.len() >= MAX_EXTENTS {
                break;
            }
            let mut add = |extent: Extent| match extents.last_mut() {
                Some(last) if last.kind == extent.kind => last.length += extent.length,
                _ => extents.push(extent),
            };
            let kind = match part.place {
                Place::Data | Place::Redo(_) => ExtentKind::Data,
                Place::Zero => ExtentKind::Zero,
                Place::Base => {
                    let found = self.base.extents(part.offset, part.length)?;
                    let end = found.last().map_or(part.offset, Extent::end);
                    found.into_iter().for_each(&mut add);
                    if end < part.offset + part.length {
                        break;
                    }
                    continue;
                }
            };
            add(Extent {
                offset: part.offset,
                length: part.length,
                kind,
            });
        }
        if extents.is_empty() {
            // An empty range.
            extents.push(Extent {
                offset,
                length,
                kind: ExtentKind::Data,
            });
        }
        Ok(extents)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size)?;
        let parts = self.plan(offset, length, self.sealed.read().as_deref(), MAX_EXTENTS);
        for part in parts.iter().filter(|part| part.place == Place::Base) {
            self.base.prefetch(part.offset, part.length)?;
        }
        Ok(())
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        if check_range(offset, length, self.size).is_err() {
            return Cost::Memory;
        }
        // What follows so many parts does not change an estimate.
        let parts = self.plan(offset, length, self.sealed.read().as_deref(), MAX_EXTENTS);
        let costs = parts.iter().map(|part| match part.place {
            Place::Base => self.base.cost(part.offset, part.length),
            Place::Data | Place::Redo(_) => Cost::Disk,
            Place::Zero => Cost::Memory,
        });
        costs.max().unwrap_or(Cost::Memory)
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        // A partial write may need the base's contents.
        self.cost(offset, length).max(Cost::Disk)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use drover_core::Digest;
    use drover_storage::FakeDirectory;

    use super::*;
    use crate::backend::MemoryDevice;
    use crate::backend::overlay::{Identity, Options};

    #[test]
    fn a_plan_of_many_parts_ends_early() {
        let size = 40_000 * BLOCK_SIZE_U64;
        let overlay = Overlay::open(
            Arc::new(FakeDirectory::default()),
            Arc::new(MemoryDevice::new(size)),
            Identity {
                base: Digest([7; 32]),
                size,
                name: "web".into(),
            },
            Options::default(),
        )
        .unwrap();
        for block in 0..20_000 {
            overlay
                .trim(2 * block * BLOCK_SIZE_U64, BLOCK_SIZE_U64)
                .unwrap();
        }
        let parts = |most| {
            let parts = overlay.plan(0, size, None, most).into_iter();
            parts.map(|p| (p.offset, p.length)).collect::<Vec<_>>()
        };
        let all = parts(usize::MAX);
        assert_eq!(all.len(), 40_000);
        for most in [1, 7, MAX_EXTENTS] {
            assert_eq!(parts(most), all[..most]);
        }
        assert_eq!(overlay.extents(0, size).unwrap().len(), MAX_EXTENTS);
    }
}
