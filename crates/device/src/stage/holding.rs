//! A stage that can hold the state of a device at one moment for a reader, while writers go on.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes};
use drover_core::{check_range, is_zero};
use parking_lot::{Condvar, Mutex, RwLock};
use roaring::RoaringBitmap;

use super::LockGuard;

/// Smallest unit that is copied before it is overwritten, in bytes.
const MIN_CHUNK: u64 = 64 << 10;

/// Maximum number of those; larger devices are copied in larger ones.
const MAX_CHUNKS: u64 = 1 << 28;

/// A device whose state can be held: what is overwritten after that moment is copied aside first. When that fails, the
/// held state is lost, not the write.
pub struct Holding<D> {
    shared: Arc<Shared<D>>,
}

struct Shared<D> {
    inner: D,
    held: RwLock<Option<Arc<Aside>>>,
}

/// Where the contents are copied that are overwritten.
struct Aside {
    scratch: Arc<dyn BlockDevice>,
    /// In bytes, a power of two.
    chunk: u64,
    size: u64,
    state: Mutex<Copied>,
    /// Notified when a copy ends.
    ended: Condvar,
}

#[derive(Default)]
struct Copied {
    chunks: RoaringBitmap,
    /// Those being copied.
    under_way: HashSet<u32>,
    /// Why the held state is lost.
    lost: Option<DeviceError>,
}

/// Holds the state of a [`Holding`], and releases it.
pub struct HoldHandle<D> {
    shared: Arc<Shared<D>>,
}

/// A held state, as a device that cannot be written. Reads fail once it is released or lost.
pub struct Held<D> {
    shared: Arc<Shared<D>>,
    aside: Arc<Aside>,
}

impl<D: BlockDevice> Holding<D> {
    /// A device whose state is not held yet, and the handle for it.
    pub fn new(inner: D) -> (Self, HoldHandle<D>) {
        let shared = Arc::new(Shared {
            inner,
            held: RwLock::default(),
        });
        let handle = HoldHandle {
            shared: Arc::clone(&shared),
        };
        (Self { shared }, handle)
    }

    /// Changes a range, after what is there was copied aside if it has to be.
    fn change(
        &self,
        offset: u64,
        length: u64,
        change: impl FnOnce(&D) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        check_range(offset, length, self.shared.inner.size())?;
        let held = self.shared.held.read().clone();
        if let Some(aside) = held.filter(|_| length > 0) {
            aside.keep(&self.shared.inner, offset..offset + length);
        }
        change(&self.shared.inner)
    }
}

impl<D: BlockDevice> HoldHandle<D> {
    /// Holds the state as it is now. Nothing may be in flight: the device is locked. What is overwritten goes to
    /// `scratch`, which is as large, and keeps nothing from before.
    ///
    /// # Panics
    /// If a state is held already, or `scratch` is smaller.
    pub fn hold(&self, _locked: &LockGuard, scratch: Arc<dyn BlockDevice>) -> Held<D> {
        let size = self.shared.inner.size();
        assert!(scratch.size() >= size, "the scratch device is too small");
        let aside = Arc::new(Aside {
            scratch,
            chunk: size.div_ceil(MAX_CHUNKS).next_power_of_two().max(MIN_CHUNK),
            size,
            state: Mutex::default(),
            ended: Condvar::new(),
        });
        let before = self.shared.held.write().replace(Arc::clone(&aside));
        assert!(before.is_none(), "one state is held at a time");
        Held {
            shared: Arc::clone(&self.shared),
            aside,
        }
    }

    /// Ends the held state, if there is one: nothing is copied any more.
    pub fn release(&self) {
        if let Some(aside) = self.shared.held.write().take() {
            aside.lose(DeviceError::Closed);
        }
    }
}

impl Aside {
    fn lose(&self, why: DeviceError) {
        self.state.lock().lost.get_or_insert(why);
    }

    fn chunks(&self, range: &Range<u64>) -> Range<u32> {
        // There are at most `MAX_CHUNKS`.
        let narrow = |chunk: u64| u32::try_from(chunk).unwrap_or(u32::MAX);
        narrow(range.start / self.chunk)..narrow(range.end.div_ceil(self.chunk))
    }

    fn range(&self, chunk: u32) -> Range<u64> {
        let start = u64::from(chunk) * self.chunk;
        start..(start + self.chunk).min(self.size)
    }

    /// Copies what is in a range, unless it was copied. Other writers of the same chunks wait.
    fn keep(&self, inner: &impl BlockDevice, range: Range<u64>) {
        for chunk in self.chunks(&range) {
            let mut state = self.state.lock();
            while state.under_way.contains(&chunk) {
                self.ended.wait(&mut state);
            }
            if state.lost.is_some() {
                return;
            }
            if state.chunks.contains(chunk) {
                continue;
            }
            state.under_way.insert(chunk);
            drop(state);
            let copied = self.copy(inner, self.range(chunk));
            let mut state = self.state.lock();
            state.under_way.remove(&chunk);
            match copied {
                Ok(()) => {
                    state.chunks.insert(chunk);
                }
                Err(e) => {
                    state.lost.get_or_insert(e);
                }
            }
            drop(state);
            self.ended.notify_all();
        }
    }

    fn copy(&self, inner: &impl BlockDevice, range: Range<u64>) -> Result<(), DeviceError> {
        let length = usize::try_from(range.end - range.start).unwrap_or(0);
        let mut bytes = vec![0; length];
        inner.read(range.start, &mut bytes)?;
        match is_zero(&bytes) {
            // The scratch device has zeros there.
            true => Ok(()),
            false => self.scratch.write(range.start, &bytes),
        }
    }

    /// Whether a chunk was copied.
    ///
    /// # Errors
    /// When the held state is lost.
    fn has(&self, chunk: u32) -> Result<bool, DeviceError> {
        let state = self.state.lock();
        match &state.lost {
            Some(e) => Err(e.clone()),
            None => Ok(state.chunks.contains(chunk)),
        }
    }
}

impl<D: BlockDevice> BlockDevice for Holding<D> {
    fn size(&self) -> u64 {
        self.shared.inner.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.shared.inner.capabilities()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.shared.inner.read(offset, buffer)
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
        self.shared.inner.flush()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.shared.inner.extents(offset, length)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.shared.inner.prefetch(offset, length)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.shared.inner.cost(offset, length)
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.shared.inner.write_cost(offset, length)
    }
}

impl<D: BlockDevice> BlockDevice for Held<D> {
    fn size(&self) -> u64 {
        self.aside.size
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: true,
            ..self.shared.inner.capabilities()
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let aside = &self.aside;
        check_range(offset, buffer.len() as u64, aside.size)?;
        let whole = offset..offset + buffer.len() as u64;
        for chunk in aside.chunks(&whole) {
            let part = aside.range(chunk);
            let part = part.start.max(whole.start)..part.end.min(whole.end);
            let within = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
            let buffer = &mut buffer[within(part.start)..within(part.end)];
            if !aside.has(chunk)? {
                self.shared.inner.read(part.start, buffer)?;
            }
            // It may have been overwritten while it was read: but then it was copied before.
            if aside.has(chunk)? {
                aside.scratch.read(part.start, buffer)?;
            }
        }
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    fn write_zeroes(&self, _: u64, _: u64, _: Zeroes) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    fn trim(&self, _: u64, _: u64) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Of what was overwritten since, nothing more is known than that it may be data.
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        let now = self.shared.inner.extents(offset, length)?;
        let aside = &self.aside;
        let mut held: Vec<Extent> = Vec::new();
        let mut add = |range: Range<u64>, kind: ExtentKind| match held.last_mut() {
            Some(last) if last.kind == kind && last.offset + last.length == range.start => {
                last.length += range.end - range.start;
            }
            _ if range.is_empty() => {}
            _ => held.push(Extent {
                offset: range.start,
                length: range.end - range.start,
                kind,
            }),
        };
        for extent in now {
            let whole = extent.offset..extent.offset + extent.length;
            if extent.kind == ExtentKind::Data {
                add(whole, extent.kind);
                continue;
            }
            let copied: Vec<u32> = {
                let state = aside.state.lock();
                let chunks = aside.chunks(&whole);
                state.chunks.range(chunks).collect()
            };
            let mut at = whole.start;
            for chunk in copied {
                let part = aside.range(chunk);
                let part = part.start.max(whole.start)..part.end.min(whole.end);
                add(at..part.start, extent.kind);
                at = part.end;
                add(part, ExtentKind::Data);
            }
            add(at..whole.end, extent.kind);
        }
        Ok(held)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.shared.inner.prefetch(offset, length)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.shared.inner.cost(offset, length)
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.shared.inner.write_cost(offset, length)
    }
}

#[cfg(test)]
mod tests;
