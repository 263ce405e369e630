//! A managed device as a [`BlockDevice`].

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range,
};

use super::shared::Shared;
use super::state::ChunkState;
use super::{Synced, write};

impl BlockDevice for Synced {
    fn size(&self) -> u64 {
        self.shared.geometry.shape.size
    }

    fn capabilities(&self) -> Capabilities {
        let read_only = self.shared.read_only;
        Capabilities {
            read_only,
            fast_zeroes: !read_only,
            trim: !read_only,
            durable: true,
            extents: true,
            alignment: 1,
            preferred: self.shared.geometry.subchunk as u32,
            longest: u32::MAX,
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.shared.read(offset, buffer)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.shared.changeable(offset, data.len() as u64)?;
        self.shared.write(offset, write::Source::Data(data))
    }

    fn write_zeroes(&self, offset: u64, length: u64, _: Zeroes) -> Result<(), DeviceError> {
        self.shared.changeable(offset, length)?;
        self.shared.write(offset, write::Source::Zeros(length))
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.shared.changeable(offset, length)?;
        self.shared.trim(offset, length)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.shared.alive()?;
        self.shared.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.size())?;
        self.shared.alive()?;
        Ok(self.shared.extents(offset, length))
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        check_range(offset, length, self.size())?;
        self.shared.alive()?;
        self.shared.read_ahead(offset, length);
        Ok(())
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        let end = offset.saturating_add(length).min(self.size());
        let touched = self
            .shared
            .geometry
            .touched(offset.min(end), end - offset.min(end));
        match touched.clone().all(|i| self.shared.states.get(i).whole()) {
            true => Cost::Disk,
            false => Cost::Network,
        }
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        let end = offset.saturating_add(length).min(self.size());
        let offset = offset.min(end);
        // With a cache limit, only a write to a dirty chunk is certain to have room.
        let limited = self.shared.cache_limit.is_some();
        let ready = |index| match self.shared.states.get(index) {
            ChunkState::Dirty => true,
            state => state.whole() && !limited,
        };
        let mut touched = self.shared.geometry.touched(offset, end - offset);
        let much = || self.shared.table.lock().dirty.len() >= write::MAX_ZEROED / 2;
        match touched.all(ready) && !much() {
            true => Cost::Disk,
            false => Cost::Network,
        }
    }
}

impl Shared {
    /// Extents by state; the number of chunks covered is limited to bound the reply.
    fn extents(&self, offset: u64, length: u64) -> Vec<Extent> {
        const MAX_HINTED: usize = 1 << 16;
        let mut runs: Vec<Extent> = Vec::new();
        for index in self.geometry.touched(offset, length).take(MAX_HINTED) {
            let within = self.geometry.within(index, offset, length);
            let kind = match self.states.get(index) {
                ChunkState::Zero | ChunkState::Erased => ExtentKind::Zero,
                _ => ExtentKind::Data,
            };
            let bytes = within.end - within.start;
            match runs.last_mut() {
                Some(last) if last.kind == kind => last.length += bytes,
                _ => runs.push(Extent {
                    offset: self.geometry.start(index) + within.start,
                    length: bytes,
                    kind,
                }),
            }
        }
        if runs.is_empty() {
            // An empty range still gets a reply.
            runs.push(Extent {
                offset,
                length,
                kind: ExtentKind::Data,
            });
        }
        runs
    }
}
