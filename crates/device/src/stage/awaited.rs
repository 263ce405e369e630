//! A device that comes later: requests wait for it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes};

use super::{LockGuard, Lockable};

/// A device whose shape is known and that is not there yet: requests wait until [`AwaitedHandle::arrive`] gives it.
pub type Awaited = Lockable<Later>;

/// Gives an [`Awaited`] its device. When it is dropped without, whoever waits gets an error.
#[derive(Debug)]
pub struct AwaitedHandle {
    later: Later,
    waiting: LockGuard,
}

/// The device below an [`Awaited`].
#[derive(Clone)]
pub struct Later {
    size: u64,
    capabilities: Capabilities,
    device: Arc<OnceLock<Arc<dyn BlockDevice>>>,
}

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Later")
            .field("size", &self.size)
            .field("is_here", &self.device.get().is_some())
            .finish_non_exhaustive()
    }
}

impl Awaited {
    /// A device of `size` bytes. A request that waits longer than `timeout` (at most a day) fails with
    /// [`DeviceError::Unavailable`].
    ///
    /// # Errors
    /// Never for a device that nobody has used yet.
    pub fn of(
        size: u64,
        capabilities: Capabilities,
        timeout: Duration,
    ) -> Result<(Self, AwaitedHandle), DeviceError> {
        let later = Later {
            size,
            capabilities,
            device: Arc::default(),
        };
        let (device, lock) = Lockable::new(later.clone(), timeout);
        let waiting = lock.lock()?;
        Ok((device, AwaitedHandle { later, waiting }))
    }
}

impl AwaitedHandle {
    /// Whether this device has the size that was promised, and lacks nothing else of that.
    pub fn is_for(&self, device: &dyn BlockDevice) -> bool {
        let (now, promised) = (device.capabilities(), self.later.capabilities);
        device.size() == self.later.size
            && now.alignment <= promised.alignment
            && now.longest >= promised.longest
            && (promised.read_only || !now.read_only)
    }

    /// The device is here: the requests that waited go to it.
    ///
    /// # Errors
    /// When it is not what was promised. Then the device is closed.
    pub fn arrive(self, device: Arc<dyn BlockDevice>) -> Result<(), DeviceError> {
        let is_it = self.is_for(&*device);
        let Self { later, waiting } = self;
        if !is_it || later.device.set(device).is_err() {
            waiting.close();
            return Err(DeviceError::Unsupported(
                "be another one than was awaited".into(),
            ));
        }
        drop(waiting);
        Ok(())
    }

    /// It does not come: whoever waits for it gets an error.
    pub fn give_up(self) {
        self.waiting.close();
    }
}

impl Later {
    fn device(&self) -> Result<&Arc<dyn BlockDevice>, DeviceError> {
        let absent = || DeviceError::Unavailable("it is not here yet".into());
        self.device.get().ok_or_else(absent)
    }
}

impl BlockDevice for Later {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.device()?.read(offset, buffer)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.device()?.write(offset, data)
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.device()?.write_zeroes(offset, length, zeroes)
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.device()?.trim(offset, length)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.device()?.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.device()?.extents(offset, length)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.device()?.prefetch(offset, length)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        let device = self.device.get();
        device.map_or(Cost::Network, |device| device.cost(offset, length))
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        let device = self.device.get();
        device.map_or(Cost::Network, |device| device.write_cost(offset, length))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::backend::MemoryDevice;

    const LONG: Duration = Duration::from_secs(60);

    fn memory(size: usize) -> Arc<dyn BlockDevice> {
        Arc::new(MemoryDevice::from_bytes(&vec![7; size]))
    }

    fn awaited(timeout: Duration) -> (Arc<Awaited>, AwaitedHandle) {
        let (device, handle) = Awaited::of(8192, memory(8192).capabilities(), timeout).unwrap();
        (Arc::new(device), handle)
    }

    #[test]
    fn requests_wait_until_it_is_here() {
        let (device, handle) = awaited(LONG);
        let (done, is_done) = mpsc::channel();
        let waiting = {
            let device = Arc::clone(&device);
            thread::spawn(move || {
                let mut found = [0; 2];
                let read = device.read(0, &mut found);
                done.send(()).unwrap();
                read.map(|()| found)
            })
        };
        let soon = Duration::from_millis(100);
        assert!(is_done.recv_timeout(soon).is_err(), "it waits");
        // A request that is refused anyway does not.
        assert!(matches!(
            device.read(8192, &mut [0]),
            Err(DeviceError::OutOfRange { .. })
        ));
        handle.arrive(memory(8192)).unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), [7; 2]);
        device.write(1, &[9]).unwrap();
        let mut found = [0; 2];
        device.read(0, &mut found).unwrap();
        assert_eq!(found, [7, 9]);
    }

    #[test]
    fn what_never_comes_is_an_error() {
        for drops in [true, false] {
            let (device, handle) = awaited(LONG);
            let waiting = {
                let device = Arc::clone(&device);
                thread::spawn(move || device.write(0, &[1]))
            };
            thread::sleep(Duration::from_millis(20));
            match drops {
                true => drop(handle),
                false => handle.give_up(),
            }
            // Without a device there is nothing to answer with.
            assert!(waiting.join().unwrap().is_err());
            assert!(device.flush().is_err());
        }
        let (device, _handle) = awaited(Duration::from_millis(20));
        let late = device.flush();
        assert!(matches!(late, Err(DeviceError::Unavailable(_))), "{late:?}");
    }

    #[test]
    fn another_device_is_refused() {
        let (device, handle) = awaited(LONG);
        assert!(handle.arrive(memory(4096)).is_err());
        assert!(matches!(device.flush(), Err(DeviceError::Closed)));
    }
}
