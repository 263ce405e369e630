//! The stage that records the generations of what is written.

use std::sync::{Arc, OnceLock};

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes, check_range};

use super::Generations;

/// A device whose changes are recorded in its generations ahead of being made; trims and zeroes, too. Before it is told of
/// any, it only forwards. Refuses changes while the disk is frozen.
pub struct Recorded<D> {
    inner: D,
    generations: OnceLock<Arc<Generations>>,
}

impl<D> Recorded<D> {
    /// Records nothing yet.
    pub fn new(inner: D) -> Self {
        let generations = OnceLock::new();
        Self { inner, generations }
    }

    /// Records what is changed from now on. The generations were opened for the size of the device; those that it was told
    /// of first stay.
    pub fn record(&self, generations: Arc<Generations>) {
        let _ = self.generations.set(generations);
    }

    /// The device below. What is changed there is not recorded.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Its generations.
    pub fn generations(&self) -> Option<&Arc<Generations>> {
        self.generations.get()
    }

    /// The device below, and its generations.
    pub fn into_parts(self) -> (D, Option<Arc<Generations>>) {
        (self.inner, self.generations.into_inner())
    }
}

impl<D: BlockDevice> Recorded<D> {
    fn change(
        &self,
        offset: u64,
        length: u64,
        make: impl FnOnce(&D) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Some(generations) = self.generations.get() else {
            return make(&self.inner);
        };
        check_range(offset, length, self.inner.size())?;
        let _writing = generations.before_write(offset, length)?;
        make(&self.inner)
    }
}

impl<D: BlockDevice> BlockDevice for Recorded<D> {
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
        self.change(offset, data.len() as u64, |inner| inner.write(offset, data))
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.change(offset, length, |inner| {
            inner.write_zeroes(offset, length, zeroes)
        })
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.change(offset, length, |inner| inner.trim(offset, length))
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
        // A region is recorded on a disk.
        match self.generations.get() {
            Some(_) => self.inner.write_cost(offset, length).max(Cost::Disk),
            None => self.inner.write_cost(offset, length),
        }
    }
}
