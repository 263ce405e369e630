//! Refuses requests that are not aligned or too long.

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes, check_range};

/// Passes on only requests that are aligned to a chunk and no longer than a limit (r3map §1.4.5.2, the
/// `ChunkedReadWriterAt`): a backend with a file a chunk must never see a longer one.
pub struct Strict<D> {
    inner: D,
    alignment: u32,
    longest: u32,
}

impl<D: BlockDevice> Strict<D> {
    /// Demands `alignment` (a power of two) and reads and writes of at most `longest` bytes. What `inner` itself
    /// demands is not loosened.
    ///
    /// # Panics
    /// When `alignment` is no power of two.
    pub fn new(inner: D, alignment: u32, longest: u32) -> Self {
        assert!(
            alignment.is_power_of_two(),
            "an alignment is a power of two"
        );
        let own = inner.capabilities();
        Self {
            alignment: alignment.max(own.alignment),
            longest: longest.min(own.longest),
            inner,
        }
    }

    fn aligned(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.inner.size())?;
        let mask = u64::from(self.alignment) - 1;
        // The device may end inside a chunk.
        let last = offset + length == self.inner.size();
        if offset & mask == 0 && (length & mask == 0 || last) {
            return Ok(());
        }
        Err(DeviceError::Unaligned {
            offset,
            length,
            alignment: self.alignment,
        })
    }

    fn short(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.aligned(offset, length)?;
        if length <= u64::from(self.longest) {
            return Ok(());
        }
        Err(DeviceError::Unaligned {
            offset,
            length,
            alignment: self.alignment,
        })
    }
}

impl<D: BlockDevice> BlockDevice for Strict<D> {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            alignment: self.alignment,
            longest: self.longest,
            ..self.inner.capabilities()
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.short(offset, buffer.len() as u64)?;
        self.inner.read(offset, buffer)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.short(offset, data.len() as u64)?;
        self.inner.write(offset, data)
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.aligned(offset, length)?;
        self.inner.write_zeroes(offset, length, zeroes)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.aligned(offset, length)?;
        self.inner.trim(offset, length)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.inner.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.aligned(offset, length)?;
        self.inner.extents(offset, length)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.aligned(offset, length)?;
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
mod tests {
    use super::*;
    use crate::backend::MemoryDevice;

    #[test]
    fn it_keeps_the_contract() {
        crate::testing::contract(&|size| {
            Box::new(Strict::new(MemoryDevice::new(size), 4096, 64 << 10))
        });
    }

    #[test]
    fn a_short_last_chunk_is_taken_to_its_end_only() {
        let device = Strict::new(MemoryDevice::new(10_000), 4096, 8192);
        device.write(8192, &[1; 1808]).unwrap();
        device.read(4096, &mut [0; 5904]).unwrap();
        for length in [1, 1807] {
            let result = device.write(8192, &vec![2; length]);
            assert!(
                matches!(result, Err(DeviceError::Unaligned { .. })),
                "{result:?}"
            );
        }
        let outside = device.write(8192, &[2; 4096]);
        assert!(
            matches!(outside, Err(DeviceError::OutOfRange { .. })),
            "{outside:?}"
        );
    }

    #[test]
    fn what_is_not_aligned_or_too_long_does_not_pass() {
        let device = Strict::new(MemoryDevice::new(1 << 20), 4096, 8192);
        let refused = [
            device.read(1, &mut [0; 4096]),
            device.read(0, &mut [0; 4095]),
            device.read(0, &mut [0; 12288]),
            device.write(2048, &[1; 4096]),
            device.write(0, &[1; 12288]),
            device.write_zeroes(0, 100, Zeroes::default()),
            device.trim(100, 4096),
            device.extents(0, 1).map(drop),
            device.prefetch(1, 4096),
        ];
        for (which, result) in refused.iter().enumerate() {
            assert!(
                matches!(result, Err(DeviceError::Unaligned { .. })),
                "{which}: {result:?}"
            );
        }
        assert_eq!(device.inner.allocated(), 0);
        // Zeros and trims carry no bytes: they may be as long as they like.
        device.write_zeroes(0, 1 << 20, Zeroes::default()).unwrap();
        device.write(8192, &[1; 8192]).unwrap();
    }
}
