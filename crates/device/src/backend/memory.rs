//! A device in memory. Ranges that were never written take no memory.

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range,
};
use parking_lot::RwLock;

/// Bytes allocated and locked together.
const PIECE: u64 = 64 << 10;

/// A sparse device in memory, locked per piece: accesses to different pieces do not contend.
pub struct MemoryDevice {
    size: u64,
    pieces: Vec<RwLock<Option<Box<[u8]>>>>,
}

impl MemoryDevice {
    /// A device of `size` zero bytes. Allocates 24 bytes per 64 KiB up front, the rest on write.
    #[must_use]
    pub fn new(size: u64) -> Self {
        let count = usize::try_from(size.div_ceil(PIECE)).unwrap_or(usize::MAX);
        let mut pieces = Vec::new();
        pieces.resize_with(count, RwLock::default);
        Self { size, pieces }
    }

    /// A device with the contents `bytes`.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let device = Self::new(bytes.len() as u64);
        for (piece, content) in device.pieces.iter().zip(bytes.chunks(PIECE as usize)) {
            let mut whole = vec![0; PIECE as usize].into_boxed_slice();
            whole[..content.len()].copy_from_slice(content);
            *piece.write() = Some(whole);
        }
        device
    }

    /// Bytes allocated.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        let count = self.pieces.iter().filter(|p| p.read().is_some()).count();
        count as u64 * PIECE
    }

    fn clear(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size)?;
        for part in parts(offset, length) {
            let mut piece = self.pieces[part.index].write();
            if part.range.len() == PIECE as usize {
                *piece = None;
            } else if let Some(bytes) = piece.as_mut() {
                bytes[part.range].fill(0);
            }
        }
        Ok(())
    }
}

/// The part of a range that lies in one piece.
struct Part {
    index: usize,
    /// Range in the piece.
    range: std::ops::Range<usize>,
    /// Range in the request's buffer.
    within: std::ops::Range<usize>,
}

fn parts(offset: u64, length: u64) -> impl Iterator<Item = Part> {
    let mut at = offset;
    let end = offset + length;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let start = (at % PIECE) as usize;
        let take = (end - at).min(PIECE - at % PIECE) as usize;
        let from = (at - offset) as usize;
        let part = Part {
            index: (at / PIECE) as usize,
            range: start..start + take,
            within: from..from + take,
        };
        at += take as u64;
        Some(part)
    })
}

impl BlockDevice for MemoryDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: false,
            fast_zeroes: true,
            trim: true,
            durable: false,
            extents: true,
            alignment: 1,
            preferred: PIECE as u32,
            longest: u32::MAX,
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        check_range(offset, buffer.len() as u64, self.size)?;
        for part in parts(offset, buffer.len() as u64) {
            match self.pieces[part.index].read().as_ref() {
                Some(bytes) => buffer[part.within].copy_from_slice(&bytes[part.range]),
                None => buffer[part.within].fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        check_range(offset, data.len() as u64, self.size)?;
        for part in parts(offset, data.len() as u64) {
            self.pieces[part.index]
                .write()
                .get_or_insert_with(|| vec![0; PIECE as usize].into_boxed_slice())[part.range]
                .copy_from_slice(&data[part.within]);
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        if !zeroes.keep_allocated {
            return self.clear(offset, length);
        }
        check_range(offset, length, self.size)?;
        for part in parts(offset, length) {
            self.pieces[part.index]
                .write()
                .get_or_insert_with(|| vec![0; PIECE as usize].into_boxed_slice())[part.range]
                .fill(0);
        }
        Ok(())
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.clear(offset, length)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.size)?;
        let mut runs: Vec<Extent> = Vec::new();
        for part in parts(offset, length) {
            let kind = match self.pieces[part.index].read().is_some() {
                true => ExtentKind::Data,
                false => ExtentKind::Hole,
            };
            let take = part.range.len() as u64;
            match runs.last_mut() {
                Some(last) if last.kind == kind => last.length += take,
                _ => runs.push(Extent {
                    offset: offset + part.within.start as u64,
                    length: take,
                    kind,
                }),
            }
        }
        Ok(runs)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size)
    }

    fn cost(&self, _: u64, _: u64) -> Cost {
        Cost::Memory
    }

    fn write_cost(&self, _: u64, _: u64) -> Cost {
        Cost::Memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_keeps_the_contract() {
        crate::testing::contract(&|size| Box::new(MemoryDevice::new(size)));
    }

    #[test]
    fn only_what_is_written_takes_room() {
        let device = MemoryDevice::new(1 << 30);
        assert_eq!(device.allocated(), 0);
        device.write(PIECE - 1, &[1, 2]).unwrap();
        assert_eq!(device.allocated(), 2 * PIECE);
        device.trim(PIECE, PIECE).unwrap();
        assert_eq!(device.allocated(), PIECE);
        let zeroes = Zeroes {
            keep_allocated: true,
            only_fast: false,
        };
        device.write_zeroes(0, PIECE, zeroes).unwrap();
        assert_eq!(device.allocated(), PIECE);
    }

    #[test]
    fn bytes_that_are_given_are_there() {
        let bytes: Vec<u8> = (0..150_000u32).map(|n| n as u8).collect();
        let device = MemoryDevice::from_bytes(&bytes);
        let mut back = vec![0; bytes.len()];
        device.read(0, &mut back).unwrap();
        assert_eq!(back, bytes);
    }
}
