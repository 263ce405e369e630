//! The common part of stages that pass requests on unchanged, delay or refuse them.

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes, check_range};

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`BlockDevice::read`].
    Read,
    /// [`BlockDevice::write`].
    Write,
    /// [`BlockDevice::write_zeroes`].
    WriteZeroes,
    /// [`BlockDevice::trim`].
    Trim,
    /// [`BlockDevice::flush`].
    Flush,
    /// [`BlockDevice::extents`].
    Extents,
    /// [`BlockDevice::prefetch`].
    Prefetch,
}

impl Operation {
    /// All of them, in the order of the trait.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::WriteZeroes,
        Self::Trim,
        Self::Flush,
        Self::Extents,
        Self::Prefetch,
    ];

    /// Whether it may change the device's contents.
    #[must_use]
    pub fn changes(self) -> bool {
        matches!(self, Self::Write | Self::WriteZeroes | Self::Trim)
    }
}

/// A request at a [`Gate`]. Its range is inside the device; a flush has an empty one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The kind of request.
    pub operation: Operation,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes of the device range.
    pub length: u64,
}

impl Request {
    /// Bytes of payload in either direction: none for zeros and trims, however long.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self.operation {
            Operation::Read | Operation::Write => self.length,
            _ => 0,
        }
    }
}

/// Decides when and whether requests pass.
pub trait Gate: Send + Sync {
    /// Held by a passed request until it completes; dropped also when the device panics.
    type Pass<'a>
    where
        Self: 'a;

    /// Called before the request is passed to the device, for a range inside it. May wait, but not indefinitely.
    ///
    /// # Errors
    /// The error that the request fails with instead of being passed on.
    fn enter(&self, request: &Request) -> Result<Entry<Self::Pass<'_>>, DeviceError>;

    /// Called after the device has completed it. May wait, but not indefinitely.
    ///
    /// # Errors
    /// The error that the request fails with although it was executed.
    fn leave(&self, pass: Self::Pass<'_>) -> Result<(), DeviceError>;

    /// The cost of a request, given the device's own.
    fn cost(&self, inner: Cost) -> Cost;
}

/// A [`Gate`]'s decision on a request that does not fail.
#[derive(Debug)]
pub enum Entry<P> {
    /// Pass it on.
    Pass(P),
    /// Reply as if done. Only for [`Operation::Prefetch`], which is a hint.
    Ignore,
}

/// A device behind a gate. Forwards every request with unchanged arguments, and every capability.
pub struct Gated<D, G> {
    inner: D,
    gate: G,
}

impl<D: BlockDevice, G: Gate> Gated<D, G> {
    /// Puts `gate` in front of `inner`.
    pub fn with_gate(inner: D, gate: G) -> Self {
        Self { inner, gate }
    }

    /// The device behind the gate.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The gate.
    pub fn gate(&self) -> &G {
        &self.gate
    }

    fn through<T>(
        &self,
        operation: Operation,
        offset: u64,
        length: u64,
        ask: impl FnOnce(&D) -> Result<T, DeviceError>,
    ) -> Result<Option<T>, DeviceError> {
        // A request that is refused anyway does not wait at the gate.
        check_range(offset, length, self.inner.size())?;
        let request = Request {
            operation,
            offset,
            length,
        };
        match self.gate.enter(&request)? {
            Entry::Ignore => Ok(None),
            Entry::Pass(pass) => {
                let answer = ask(&self.inner)?;
                self.gate.leave(pass)?;
                Ok(Some(answer))
            }
        }
    }

    /// For operations that no gate may ignore.
    fn must<T>(
        &self,
        operation: Operation,
        offset: u64,
        length: u64,
        ask: impl FnOnce(&D) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.through(operation, offset, length, ask)?
            .ok_or(DeviceError::Unsupported("ignore a request".into()))
    }
}

impl<D: BlockDevice, G: Gate> BlockDevice for Gated<D, G> {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.must(Operation::Read, offset, buffer.len() as u64, |inner| {
            inner.read(offset, buffer)
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.must(Operation::Write, offset, data.len() as u64, |inner| {
            inner.write(offset, data)
        })
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.must(Operation::WriteZeroes, offset, length, |inner| {
            inner.write_zeroes(offset, length, zeroes)
        })
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.must(Operation::Trim, offset, length, |inner| {
            inner.trim(offset, length)
        })
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.must(Operation::Flush, 0, 0, BlockDevice::flush)
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.must(Operation::Extents, offset, length, |inner| {
            inner.extents(offset, length)
        })
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.through(Operation::Prefetch, offset, length, |inner| {
            inner.prefetch(offset, length)
        })
        .map(drop)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.gate.cost(self.inner.cost(offset, length))
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.gate.cost(self.inner.write_cost(offset, length))
    }
}
