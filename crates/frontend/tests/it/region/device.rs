//! A device that counts, waits and fails as the test requires.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes};
use drover_device::backend::MemoryDevice;
use parking_lot::{Condvar, Mutex};

/// The longest that a read waits for its gate: a test that forgets to open it fails, and does not hang.
const GATE: Duration = Duration::from_secs(120);

pub struct Probe {
    pub inner: MemoryDevice,
    pub reads: Mutex<Vec<Range<u64>>>,
    pub advice: Mutex<Vec<Range<u64>>>,
    pub writes: Mutex<Vec<Range<u64>>>,
    pub flushes: AtomicU64,
    /// What every read takes.
    pub delay: Mutex<Duration>,
    /// Reads that fall into these bytes fail so.
    pub bad: Mutex<Option<(Range<u64>, DeviceError)>>,
    pub fail_writes: AtomicBool,
    alignment: u32,
    shut: Mutex<bool>,
    opened: Condvar,
}

impl Probe {
    pub fn new(inner: MemoryDevice) -> Self {
        Self {
            inner,
            reads: Mutex::default(),
            advice: Mutex::default(),
            writes: Mutex::default(),
            flushes: AtomicU64::new(0),
            delay: Mutex::default(),
            bad: Mutex::default(),
            fail_writes: AtomicBool::new(false),
            alignment: 1,
            shut: Mutex::default(),
            opened: Condvar::new(),
        }
    }

    pub fn of(bytes: &[u8]) -> Self {
        Self::new(MemoryDevice::from_bytes(bytes))
    }

    /// Takes only what is aligned so.
    pub fn aligned(self, alignment: u32) -> Self {
        Self { alignment, ..self }
    }

    /// Reads wait from now on.
    pub fn shut(&self) {
        *self.shut.lock() = true;
    }

    pub fn open(&self) {
        *self.shut.lock() = false;
        self.opened.notify_all();
    }

    pub fn read_count(&self) -> usize {
        self.reads.lock().len()
    }

    pub fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.inner.size() as usize];
        self.inner.read(0, &mut bytes).expect("a memory device");
        bytes
    }
}

fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl BlockDevice for Probe {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            alignment: self.alignment,
            ..self.inner.capabilities()
        }
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let range = offset..offset + buffer.len() as u64;
        let unit = u64::from(self.alignment);
        assert!(
            offset.is_multiple_of(unit) && range.end.is_multiple_of(unit),
            "{range:?}"
        );
        self.reads.lock().push(range.clone());
        let delay = *self.delay.lock();
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let mut shut = self.shut.lock();
        while *shut {
            if self.opened.wait_for(&mut shut, GATE).timed_out() {
                return Err(DeviceError::Corrupt("the gate stayed shut".into()));
            }
        }
        drop(shut);
        if let Some((bad, error)) = &*self.bad.lock()
            && meet(bad, &range)
        {
            return Err(error.clone());
        }
        self.inner.read(offset, buffer)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let range = offset..offset + data.len() as u64;
        let unit = u64::from(self.alignment);
        assert!(
            offset.is_multiple_of(unit) && range.end.is_multiple_of(unit),
            "{range:?}"
        );
        if self.fail_writes.load(Ordering::SeqCst) {
            return Err(DeviceError::Unavailable("the test says so".into()));
        }
        self.writes.lock().push(range);
        self.inner.write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.inner.write_zeroes(offset, length, zeroes)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.trim(offset, length)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        self.inner.flush()
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.inner.extents(offset, length)
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.advice.lock().push(offset..offset + length);
        self.inner.prefetch(offset, length)
    }
    fn cost(&self, _: u64, _: u64) -> Cost {
        Cost::Network
    }
    fn write_cost(&self, _: u64, _: u64) -> Cost {
        Cost::Network
    }
}
