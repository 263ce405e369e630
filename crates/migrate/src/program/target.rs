//! What the parts of a program are copied into.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use drover_core::{BlockDevice, DeviceError, Zeroes};
use drover_device::stage::{ArrivalHandle, Arriving};
use drover_frontend::region::{Options, Region, RegionDevice, RegionError};

use super::protocol::BLOCK;

/// How long a reader of a device waits for something that is absent, before a seeder says how long it tries.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Threads that serve the faults of a region: as many as over a device at another site.
const THREADS: usize = 16;

type Store = Arc<Arriving<Arc<dyn BlockDevice>>>;

/// A region or a device that a part of a program is copied into.
#[derive(Clone)]
pub struct Target {
    /// What is copied while the program runs elsewhere goes here.
    copy: Arc<dyn BlockDevice>,
    /// What comes later goes here.
    store: Store,
    arrival: ArrivalHandle,
    region: Option<Arc<Region>>,
}

impl Target {
    /// A writable region over `device`, which must be zero and of the part's size; a
    /// [`MemoryDevice`](drover_device::backend::MemoryDevice) takes no memory but for what follows after the hand-over.
    /// Who touches something that is absent waits for it, as long as its seeder tries to send it.
    ///
    /// # Errors
    /// When there cannot be one.
    pub fn region(
        device: Arc<dyn BlockDevice>,
        options: Options,
    ) -> Result<(Self, Arc<Region>), RegionError> {
        let (store, arrival) = Arriving::new(device, options.timeout);
        let store = Arc::new(store);
        let options = Options {
            writable: true,
            // It would fetch what is about to be copied.
            populate: false,
            // Faults wait for the seeder, however near the device is.
            threads: match options.threads {
                0 => THREADS,
                count => count,
            },
            ..options
        };
        let region = Arc::new(Region::new(Arc::clone(&store) as _, options)?);
        let copy = RegionDevice::new(Arc::clone(&region));
        if u64::from(copy.capabilities().preferred) > BLOCK {
            return Err(RegionError::Options(
                "what moves is told apart in blocks of 4096 bytes: larger pages, or a device of larger alignment, cannot take it",
            ));
        }
        let target = Self {
            copy: Arc::new(copy),
            store,
            arrival,
            region: Some(Arc::clone(&region)),
        };
        Ok((target, region))
    }

    /// A device, which must be zero and of the part's size. The program uses the one that is returned.
    #[must_use]
    pub fn device(device: Arc<dyn BlockDevice>) -> (Self, Arc<dyn BlockDevice>) {
        let (store, arrival) = Arriving::new(device, TIMEOUT);
        let store = Arc::new(store);
        let target = Self::stored(Arc::clone(&store), arrival);
        (target, store)
    }

    /// A device some of which may be absent already.
    #[must_use]
    pub fn stored(store: Arc<Arriving<Arc<dyn BlockDevice>>>, arrival: ArrivalHandle) -> Self {
        Self {
            copy: Arc::clone(&store) as _,
            store,
            arrival,
            region: None,
        }
    }

    /// Its size in bytes.
    pub(super) fn size(&self) -> u64 {
        self.store.size()
    }

    /// Writes what is copied before the hand-over.
    pub(super) fn copy(&self, piece: &Piece<'_>) -> Result<(), DeviceError> {
        match piece {
            Piece::Data(offset, bytes) => self.copy.write(*offset, bytes),
            Piece::Zeros(offset, length) => {
                self.copy.write_zeroes(*offset, *length, Zeroes::default())
            }
        }
    }

    /// From now on these are absent, whatever was copied. They may still have to be told several times.
    pub(super) fn leave(&self, ranges: &[Range<u64>]) -> Result<(), DeviceError> {
        self.arrival.expect(ranges)?;
        if let Some(region) = &self.region {
            for range in ranges {
                region.forget(range.start, range.end - range.start)?;
            }
        }
        Ok(())
    }

    /// Writes what was absent.
    pub(super) fn arrive(&self, piece: &Piece<'_>) -> Result<(), DeviceError> {
        match piece {
            Piece::Data(offset, bytes) => self.store.arrive(*offset, bytes),
            Piece::Zeros(offset, length) => self.store.arrive_zeroes(*offset, *length),
        }
        .map(drop)
    }

    pub(super) fn flush(&self) -> Result<(), DeviceError> {
        if self.region.is_some() {
            self.copy.flush()?;
        }
        self.store.flush()
    }

    pub(crate) fn arrival(&self) -> &ArrivalHandle {
        &self.arrival
    }
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target")
            .field("size", &self.size())
            .field("region", &self.region.is_some())
            .finish_non_exhaustive()
    }
}

/// Bytes of a part.
pub(super) enum Piece<'a> {
    /// These, at an offset.
    Data(u64, &'a [u8]),
    /// Zeros: offset and length.
    Zeros(u64, u64),
}
