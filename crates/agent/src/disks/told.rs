//! A disk in a store as mounts of peers use it: its errors do not tell them where the store is, and go to the site's log.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, ImageName, Zeroes};
use drover_device::backend::StoreDevice;
use drover_device::backend::chunk_store::Epochs;
use drover_device::local_remote::Committer;
use drover_device::remote::{Change, Epoch};
use parking_lot::Mutex;

/// How often the same error is logged.
const AGAIN: Duration = Duration::from_secs(60);

/// Such a disk.
pub struct Told {
    device: Arc<StoreDevice>,
    epochs: Epochs,
    name: ImageName,
    /// The last error, and when it was logged.
    last: Mutex<Option<(String, Instant)>>,
}

impl Told {
    /// Over a disk.
    pub fn new(device: Arc<StoreDevice>, name: ImageName) -> Told {
        Told {
            epochs: Epochs::new(Arc::clone(&device)),
            device,
            name,
            last: Mutex::default(),
        }
    }

    /// The disk.
    pub fn device(&self) -> &Arc<StoreDevice> {
        &self.device
    }

    /// The last error, until something succeeds that may tell that it has ended.
    pub fn last(&self) -> Option<String> {
        self.last.lock().as_ref().map(|(text, _)| text.clone())
    }

    /// The store has answered.
    pub fn is_well(&self) {
        *self.last.lock() = None;
    }

    /// Logs an error, once in a while.
    pub fn note(&self, error: &DeviceError) {
        let text = error.to_string();
        let mut last = self.last.lock();
        let is_known = |(known, at): &(String, Instant)| *known == text && at.elapsed() < AGAIN;
        if !last.as_ref().is_some_and(is_known) {
            tracing::warn!(disk = %self.name, "{text}");
            *last = Some((text, Instant::now()));
        }
    }

    fn told<T>(&self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        let name = &self.name;
        result.map_err(|error| match &error {
            DeviceError::OutOfRange { .. }
            | DeviceError::Unaligned { .. }
            | DeviceError::ReadOnly
            | DeviceError::Unsupported(_)
            | DeviceError::Closed => error,
            _ => {
                self.note(&error);
                match error {
                    DeviceError::Unavailable(_) => DeviceError::Unavailable(format!(
                        "the store of {name} does not answer the site"
                    )),
                    DeviceError::NoSpace(_) => {
                        DeviceError::NoSpace(format!("the store of {name} is full"))
                    }
                    DeviceError::Corrupt(_) => DeviceError::Corrupt(format!(
                        "a part of {name} is lost or damaged in its store"
                    )),
                    _ => DeviceError::Io(Arc::new(io::Error::other(format!(
                        "{name} cannot be used in its store: the log of the site says why"
                    )))),
                }
            }
        })
    }
}

impl Committer for Told {
    fn committed(&self) -> Epoch {
        self.epochs.committed()
    }

    fn push(&self, epoch: Epoch, changes: &[Change]) -> Result<(), DeviceError> {
        self.told(self.epochs.push(epoch, changes))
    }

    fn commit(&self, epoch: Epoch, covers: u64) -> Result<(), DeviceError> {
        self.told(self.epochs.commit(epoch, covers))
    }

    fn abandon(&self) -> Result<(), DeviceError> {
        self.told(self.epochs.abandon())
    }
}

impl BlockDevice for Told {
    fn size(&self) -> u64 {
        self.device.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.device.capabilities()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.told(self.device.read(offset, buffer))
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.told(self.device.write(offset, data))
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.told(self.device.write_zeroes(offset, length, zeroes))
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.told(self.device.trim(offset, length))
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.told(self.device.flush())
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.told(self.device.extents(offset, length))
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.told(self.device.prefetch(offset, length))
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.device.cost(offset, length)
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.device.write_cost(offset, length)
    }
}
