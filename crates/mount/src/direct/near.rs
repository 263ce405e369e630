//! A direct mount on the host that has the image: what no mount has written over is read from the image itself, and not by way of
//! the site's process.
//!
//! The image never changes, and while a mount has it open only this mount can write over it. So it is enough to know what was
//! written over before ([`crate::protocol::LookAtChanges`]), and to note each change before it is asked for: a read that begins
//! after a change was answered finds it noted, and goes to the site.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use drover_core::{BLOCK_SIZE_U64, BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes};

use super::RemoteDevice;
use crate::client::Client;

/// Maximum parts of a device that are noted one by one: a megabyte of memory.
const MAX_PARTS: u64 = 1 << 23;

/// A [`RemoteDevice`] of which a part is read from the image on this host, as soon as that is known.
pub struct NearDevice {
    remote: RemoteDevice,
    client: Arc<Client>,
    near: Arc<Near>,
}

/// What of a device is on this host.
pub struct Near {
    size: u64,
    /// The image without what mounts wrote over it.
    base: OnceLock<Arc<dyn BlockDevice>>,
    written: Written,
}

impl NearDevice {
    /// The device of the image mounted by `client`, and the handle by which it learns of the image on this host.
    #[must_use]
    pub fn new(client: Arc<Client>) -> (Self, Arc<Near>) {
        let remote = RemoteDevice::new(Arc::clone(&client));
        let near = Arc::new(Near {
            size: remote.size(),
            base: OnceLock::new(),
            written: Written::new(remote.size()),
        });
        let device = Self {
            remote,
            client,
            near: Arc::clone(&near),
        };
        (device, near)
    }

    /// The image, if all of a range can be read from it. Not while there is no link: the site may have given the lease to
    /// another.
    fn base(&self, offset: u64, length: u64) -> Option<&dyn BlockDevice> {
        let base = self.near.base.get()?;
        let all = !self.near.written.has_any(offset, length) && self.client.is_up();
        all.then_some(base.as_ref())
    }

    /// Notes a change before it is made.
    fn changing(&self, offset: u64, length: u64) -> &RemoteDevice {
        self.near.written.note(offset, length);
        &self.remote
    }
}

impl Near {
    /// The image was found on this host, complete, and the byte ranges that were written over before, at any moment since it was
    /// mounted. False for one of another size.
    pub fn found(
        &self,
        base: Arc<dyn BlockDevice>,
        written: impl IntoIterator<Item = Range<u64>>,
    ) -> bool {
        if base.size() != self.size {
            return false;
        }
        for range in written {
            self.written
                .note(range.start, range.end.saturating_sub(range.start));
        }
        self.base.set(base).is_ok()
    }
}

impl BlockDevice for NearDevice {
    fn size(&self) -> u64 {
        self.remote.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.remote.capabilities()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        match self.base(offset, buffer.len() as u64) {
            Some(base) => base.read(offset, buffer),
            None => self.remote.read(offset, buffer),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.changing(offset, data.len() as u64).write(offset, data)
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.changing(offset, length)
            .write_zeroes(offset, length, zeroes)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.changing(offset, length).trim(offset, length)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.remote.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        match self.base(offset, length) {
            Some(base) => base.extents(offset, length),
            None => self.remote.extents(offset, length),
        }
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.remote.prefetch(offset, length)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        match self.base(offset, length) {
            Some(base) => base.cost(offset, length),
            None => self.remote.cost(offset, length),
        }
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.remote.write_cost(offset, length)
    }
}

/// The parts of a device that were written over, or may be soon. Of a large device a part is more than a block.
struct Written {
    /// Bytes of a part, as a power of two.
    shift: u32,
    parts: Box<[AtomicU64]>,
}

impl Written {
    fn new(size: u64) -> Self {
        let mut shift = BLOCK_SIZE_U64.trailing_zeros();
        while size.div_ceil(1 << shift) > MAX_PARTS {
            shift += 1;
        }
        let words = size.div_ceil(1 << shift).div_ceil(64);
        Self {
            shift,
            parts: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The words with parts of a range, and which of their bits.
    fn words(&self, offset: u64, length: u64) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let (first, end) = match length {
            0 => (0, 0),
            _ => {
                let last = offset.saturating_add(length - 1) >> self.shift;
                (offset >> self.shift, last + 1)
            }
        };
        let words =
            (first / 64..end.div_ceil(64)).zip(self.parts.iter().skip(as_index(first / 64)));
        words.map(move |(word, bits)| {
            let from = first.max(word * 64) - word * 64;
            let to = end.min(word * 64 + 64) - word * 64;
            (bits, (u64::MAX >> (64 - (to - from))) << from)
        })
    }

    fn note(&self, offset: u64, length: u64) {
        for (bits, mask) in self.words(offset, length) {
            if bits.load(Ordering::SeqCst) & mask != mask {
                bits.fetch_or(mask, Ordering::SeqCst);
            }
        }
    }

    fn has_any(&self, offset: u64, length: u64) -> bool {
        self.words(offset, length)
            .any(|(bits, mask)| bits.load(Ordering::SeqCst) & mask != 0)
    }
}

fn as_index(word: u64) -> usize {
    usize::try_from(word).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_is_found_and_nothing_beside_it() {
        let size = 3 * 64 * BLOCK_SIZE_U64 + 5;
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..300 {
            let written = Written::new(size);
            let mut blocks = vec![false; usize::try_from(size.div_ceil(BLOCK_SIZE_U64)).unwrap()];
            let within = |offset: u64, length: u64| {
                let end = (offset + length).div_ceil(BLOCK_SIZE_U64);
                let first = offset / BLOCK_SIZE_U64;
                as_index(first)..as_index(if length == 0 { first } else { end })
            };
            for _ in 0..rng.usize(0..4) {
                let offset = rng.u64(0..size);
                let length = rng.u64(0..=(size - offset).min(100_000));
                written.note(offset, length);
                blocks[within(offset, length)].fill(true);
            }
            for _ in 0..200 {
                let offset = rng.u64(0..size);
                let length = rng.u64(0..=size - offset);
                let any = blocks[within(offset, length)].contains(&true);
                assert_eq!(written.has_any(offset, length), any, "{offset} {length}");
            }
        }
    }

    #[test]
    fn the_largest_device_takes_a_megabyte() {
        let written = Written::new(crate::protocol::MAX_SIZE);
        assert_eq!(written.parts.len(), 1 << 17);
        written.note(crate::protocol::MAX_SIZE - 1, 1);
        assert!(written.has_any(0, crate::protocol::MAX_SIZE));
        assert!(!written.has_any(0, crate::protocol::MAX_SIZE / 2));
    }
}
