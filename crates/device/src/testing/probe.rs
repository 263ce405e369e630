//! A device that records its requests.

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes};
use parking_lot::Mutex;

use crate::backend::MemoryDevice;

/// A request as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A read of `(offset, length)`.
    Read(u64, u64),
    /// A write of `(offset, length)`.
    Write(u64, u64),
    /// Zeros for `(offset, length)`.
    Zero(u64, u64, Zeroes),
    /// A trim of `(offset, length)`.
    Trim(u64, u64),
    /// A flush.
    Flush,
    /// A question for the extents of `(offset, length)`.
    Extents(u64, u64),
    /// Advice for `(offset, length)`.
    Prefetch(u64, u64),
    /// A question for the cost of `(offset, length)`.
    Cost(u64, u64),
    /// A question for what a write of `(offset, length)` costs.
    WriteCost(u64, u64),
}

/// A device in memory with configurable capabilities and cost, which records every call.
pub struct Probe {
    memory: MemoryDevice,
    capabilities: Capabilities,
    cost: Cost,
    calls: Mutex<Vec<Call>>,
}

impl Probe {
    /// A device of `size` zero bytes.
    #[must_use]
    pub fn new(size: u64, capabilities: Capabilities, cost: Cost) -> Self {
        Self {
            memory: MemoryDevice::new(size),
            capabilities,
            cost,
            calls: Mutex::default(),
        }
    }

    /// A device that can do all that there is, with no demands.
    #[must_use]
    pub fn able(size: u64) -> Self {
        let capabilities = Capabilities {
            durable: true,
            ..MemoryDevice::new(0).capabilities()
        };
        Self::new(size, capabilities, Cost::Memory)
    }

    /// The calls since the last call of this, without those for size and capabilities.
    pub fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.calls.lock())
    }

    fn note(&self, call: Call) {
        self.calls.lock().push(call);
    }

    fn change(&self, call: Call) -> Result<(), DeviceError> {
        self.note(call);
        match self.capabilities.read_only {
            true => Err(DeviceError::ReadOnly),
            false => Ok(()),
        }
    }
}

impl BlockDevice for Probe {
    fn size(&self) -> u64 {
        self.memory.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.note(Call::Read(offset, buffer.len() as u64));
        self.memory.read(offset, buffer)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.change(Call::Write(offset, data.len() as u64))?;
        self.memory.write(offset, data)
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.change(Call::Zero(offset, length, zeroes))?;
        self.memory.write_zeroes(offset, length, zeroes)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.change(Call::Trim(offset, length))?;
        self.memory.trim(offset, length)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.note(Call::Flush);
        self.memory.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.note(Call::Extents(offset, length));
        self.memory.extents(offset, length)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.note(Call::Prefetch(offset, length));
        self.memory.prefetch(offset, length)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.note(Call::Cost(offset, length));
        self.cost
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.note(Call::WriteCost(offset, length));
        self.cost
    }
}
