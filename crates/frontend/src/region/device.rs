//! A region as a device: for what copies devices.

use std::sync::Arc;

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range,
};

use super::Region;
use super::table::PageState;

/// Bytes of zeros written together.
const STEP: usize = 1 << 20;

/// What a region holds now, as a device. It may be read while a program writes the memory through a pointer: each aligned
/// word is then old or new, and what was written is in the next [`Region::dirty_since_mark`]. A flush pushes nothing.
#[derive(Clone)]
pub struct RegionDevice(Arc<Region>);

impl RegionDevice {
    /// The memory of `region`.
    #[must_use]
    pub fn new(region: Arc<Region>) -> Self {
        Self(region)
    }

    /// The region.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.0
    }
}

impl BlockDevice for RegionDevice {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: !self.0.shared.writable,
            fast_zeroes: true,
            trim: false,
            durable: false,
            extents: true,
            alignment: 1,
            preferred: self.0.shared.unit as u32,
            longest: 1 << 30,
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let shared = &self.0.shared;
        check_range(offset, buffer.len() as u64, self.size())?;
        let (start, end) = (offset as usize, offset as usize + buffer.len());
        let pages = start / shared.page * shared.page..end.next_multiple_of(shared.page);
        if pages == (start..end) {
            return shared.copy_out(pages, buffer);
        }
        let mut whole = vec![0; pages.len()];
        shared.copy_out(pages.clone(), &mut whole)?;
        buffer.copy_from_slice(&whole[start - pages.start..end - pages.start]);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.0.write_at(offset, data)
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        check_range(offset, length, self.size())?;
        if !self.0.shared.writable {
            return Err(DeviceError::ReadOnly);
        }
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let extents = self.extents(at, end - at)?;
            for extent in extents {
                // What is absent and zero below stays absent.
                if extent.kind == ExtentKind::Data || zeroes.keep_allocated {
                    let zeros = vec![0; STEP];
                    for start in (at..extent.end()).step_by(STEP) {
                        let length = (extent.end() - start).min(STEP as u64) as usize;
                        self.0.write_at(start, &zeros[..length])?;
                    }
                }
                at = extent.end();
            }
        }
        Ok(())
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        match self.0.shared.is_closed() {
            true => Err(DeviceError::Closed),
            false => Ok(()),
        }
    }

    /// One run: what is in memory counts as data, what is absent is as the device below says.
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.size())?;
        let shared = &self.0.shared;
        let end = offset + length;
        let is_absent = |unit| shared.table.state(unit) == PageState::Absent;
        let mut units = shared.units(&(offset as usize..end as usize));
        let absent = is_absent(units.start);
        let last = units.find(|unit| is_absent(*unit) != absent);
        let run = last.map_or(end, |unit| (unit * shared.unit) as u64) - offset;
        match absent {
            true => shared.device.extents(offset, run),
            false => Ok(vec![Extent {
                offset,
                length: run,
                kind: ExtentKind::Data,
            }]),
        }
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size())
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        let shared = &self.0.shared;
        if check_range(offset, length, self.size()).is_err() {
            return Cost::Memory;
        }
        let range = offset as usize..(offset + length) as usize;
        match shared.all_present(shared.units(&range)) {
            true => Cost::Memory,
            false => shared.device.cost(offset, length),
        }
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.cost(offset, length)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use drover_device::backend::MemoryDevice;

    use super::*;
    use crate::region::Options;

    fn region(device: Arc<dyn BlockDevice>) -> Option<Arc<Region>> {
        let options = Options {
            writable: true,
            ..Options::default()
        };
        match Region::new(device, options) {
            Ok(region) => Some(Arc::new(region)),
            Err(error) => {
                eprintln!("SKIP: {error}");
                None
            }
        }
    }

    #[test]
    fn it_is_what_the_region_holds() {
        let below = Arc::new(MemoryDevice::new((1 << 20) + 100));
        below.write(300_000, b"below").unwrap();
        let Some(region) = region(below) else { return };
        let device = RegionDevice::new(Arc::clone(&region));
        let mut found = [0; 5];
        device.read(300_000, &mut found).unwrap();
        assert_eq!(&found, b"below");
        region.write_at((1 << 20) + 90, b"0123456789").unwrap();
        let mut tail = [0; 12];
        device.read((1 << 20) + 88, &mut tail).unwrap();
        assert_eq!(&tail, b"\0\x000123456789");
        device.write_zeroes(0, 1 << 20, Zeroes::default()).unwrap();
        device.read(300_000, &mut found).unwrap();
        assert_eq!(found, [0; 5]);
        // Absent zeros were not written.
        let dirty: u64 = region
            .dirty_since_mark(false)
            .unwrap()
            .iter()
            .map(|run: &Range<u64>| run.end - run.start)
            .sum();
        assert!(dirty <= 100 + (128 << 10), "{dirty}");
        assert!(device.read((1 << 20) + 99, &mut [0; 2]).is_err());
    }

    #[test]
    fn what_is_forgotten_is_read_again() {
        let below = Arc::new(MemoryDevice::new(1 << 20));
        let Some(region) = region(Arc::clone(&below) as _) else {
            return;
        };
        let mut found = [0; 4];
        // One page that was read as zeros, one that was written.
        region.read_at(0, &mut found).unwrap();
        region.write_at(8192, b"here").unwrap();
        region.write_at(16384, b"kept").unwrap();
        below.write(0, b"new0").unwrap();
        below.write(8192, b"new2").unwrap();
        region.forget(0, 12288).unwrap();
        assert_eq!(region.dirty_since_mark(true).unwrap(), vec![16384..20480]);
        for (offset, expected) in [(0, b"new0"), (8192, b"new2"), (16384, b"kept")] {
            region.read_at(offset, &mut found).unwrap();
            assert_eq!(&found, expected);
        }
        region.write_at(8192, b"last").unwrap();
        assert_eq!(region.dirty_since_mark(true).unwrap(), vec![8192..12288]);
        assert!(region.forget(1 << 20, 1).is_err());
    }
}
