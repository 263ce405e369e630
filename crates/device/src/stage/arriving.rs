//! A stage whose contents are still arriving from elsewhere.

mod log;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range,
};
use drover_storage::Directory;
use drover_storage::chunk_log::ChunkLogError;
use parking_lot::{Condvar, Mutex};
use roaring::RoaringBitmap;

use log::{AbsentLog, runs};

/// Bytes that are absent or not.
const BLOCK: u64 = 4096;
/// The largest device of which something can be absent.
pub const MAX_ARRIVING: u64 = u32::MAX as u64 * BLOCK;
/// How long a reader waits before it asks again for what it asked for.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// A device parts of which may be absent: who reads those waits until they arrive, and asks for them. Without absent parts it
/// is the device below.
pub struct Arriving<D> {
    inner: D,
    shared: Arc<Shared>,
}

/// Says what is absent, and brings it.
#[derive(Clone)]
pub struct ArrivalHandle {
    shared: Arc<Shared>,
}

type Ask = Arc<dyn Fn(Range<u64>) + Send + Sync>;

struct Shared {
    size: u64,
    timeout: Duration,
    /// Whether nothing is absent.
    complete: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    absent: RoaringBitmap,
    ask: Option<Ask>,
    failed: Option<DeviceError>,
    /// When something arrived last.
    arrived: Option<Instant>,
    /// In place of the one that it was made with.
    timeout: Option<Duration>,
    /// How often those who wait had to ask anew.
    revived: u64,
    /// Says the same after the end of this process.
    log: Option<AbsentLog>,
}

fn broken(error: &ChunkLogError) -> DeviceError {
    DeviceError::Unavailable(format!("what has not arrived: {error}"))
}

/// Until when a reader waits: what arrives meanwhile, of whatever, gives it more time.
fn deadline(begun: Instant, arrived: Option<Instant>, timeout: Duration) -> Instant {
    arrived.map_or(begun, |arrived| arrived.max(begun)) + timeout
}

impl Shared {
    fn left(&self, state: &State) -> u64 {
        let last = u32::try_from(self.size / BLOCK).unwrap_or(u32::MAX);
        let short = match state.absent.contains(last) {
            true => BLOCK - self.size % BLOCK,
            false => 0,
        };
        state.absent.len() * BLOCK - short
    }

    /// Removes blocks from what is absent, and wakes who waits for them.
    fn present(&self, state: &mut State, blocks: Range<u32>) -> Result<(), DeviceError> {
        let is_new = state.absent.range_cardinality(blocks.clone()) > 0;
        if let Some(log) = state.log.as_mut().filter(|_| is_new) {
            log.present(&blocks).map_err(|e| broken(&e))?;
        }
        state.absent.remove_range(blocks);
        if state.absent.is_empty() {
            self.complete.store(true, Ordering::SeqCst);
        }
        self.changed.notify_all();
        Ok(())
    }
}

/// The blocks that a range touches.
fn touched(range: &Range<u64>) -> Range<u32> {
    let narrow = |block| u32::try_from(block).unwrap_or(u32::MAX);
    narrow(range.start / BLOCK)..narrow(range.end.div_ceil(BLOCK))
}

/// The smallest range of bytes that holds all absent blocks of a range of blocks.
fn missing(state: &State, blocks: Range<u32>, size: u64) -> Option<Range<u64>> {
    let mut absent = state.absent.range(blocks);
    let first = absent.next()?;
    let last = absent.next_back().unwrap_or(first);
    let end = (u64::from(last) + 1) * BLOCK;
    Some(u64::from(first) * BLOCK..end.min(size))
}

impl<D: BlockDevice> Arriving<D> {
    /// Everything is there until [`ArrivalHandle::expect`]. A reader of something absent gives up when nothing at all has
    /// arrived for `timeout`.
    pub fn new(inner: D, timeout: Duration) -> (Self, ArrivalHandle) {
        let shared = Arc::new(Shared {
            size: inner.size(),
            timeout: timeout.min(super::MAX_TIMEOUT),
            complete: AtomicBool::new(true),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let handle = ArrivalHandle {
            shared: Arc::clone(&shared),
        };
        (Self { inner, shared }, handle)
    }

    /// As [`Arriving::new`], with a list of what is absent in a file of `directory`: what an earlier process has left there is
    /// absent still, but for what was written since. `boot` identifies the boot of this computer. The device below must keep
    /// what an earlier process of this boot has written, flushed or not.
    ///
    /// # Errors
    /// When that file cannot be read, is damaged or of a device of another size, or when the device cannot be flushed.
    pub fn kept(
        inner: D,
        directory: &Arc<dyn Directory>,
        boot: [u8; 16],
        timeout: Duration,
    ) -> Result<(Self, ArrivalHandle), DeviceError> {
        inner.flush()?;
        let opened = AbsentLog::open(directory, boot, inner.size().div_ceil(BLOCK));
        let (log, absent) = opened.map_err(|e| broken(&e))?;
        let (device, handle) = Self::new(inner, timeout);
        let is_complete = absent.is_empty();
        {
            let mut state = device.shared.state.lock();
            (state.absent, state.log) = (absent, Some(log));
        }
        device.shared.complete.store(is_complete, Ordering::SeqCst);
        Ok((device, handle))
    }

    /// The device below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    fn is_complete(&self) -> bool {
        self.shared.complete.load(Ordering::SeqCst)
    }

    /// Waits until these blocks are there.
    fn wait(&self, blocks: &Range<u32>) -> Result<(), DeviceError> {
        if self.is_complete() || blocks.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let mut state = self.shared.state.lock();
        let mut asked: Option<(Instant, u64)> = None;
        while let Some(range) = missing(&state, blocks.clone(), self.shared.size) {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let timeout = state.timeout.unwrap_or(self.shared.timeout);
            let deadline = deadline(begun, state.arrived, timeout);
            if Instant::now() >= deadline {
                let (length, offset) = (range.end - range.start, range.start);
                let text = format!("{length} bytes at {offset} have not arrived");
                return Err(DeviceError::Unavailable(text));
            }
            let is_due = |(asked, revived): (Instant, u64)| {
                asked.elapsed() >= ASK_AGAIN || revived != state.revived
            };
            if asked.is_none_or(is_due) {
                asked = Some((Instant::now(), state.revived));
                if let Some(ask) = state.ask.clone() {
                    parking_lot::MutexGuard::unlocked(&mut state, || ask(range));
                    continue;
                }
            }
            let until = deadline.min(Instant::now() + ASK_AGAIN);
            self.shared.changed.wait_until(&mut state, until);
        }
        Ok(())
    }

    /// Makes a change: what it covers in part is there before it, and what it covers wholly need not arrive any more.
    fn change(
        &self,
        offset: u64,
        length: u64,
        change: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        check_range(offset, length, self.shared.size)?;
        if self.is_complete() || length == 0 {
            return change();
        }
        let range = offset..offset + length;
        let all = touched(&range);
        let end = match range.end == self.shared.size {
            true => all.end,
            false => u32::try_from(range.end / BLOCK).unwrap_or(u32::MAX),
        };
        let start = u32::try_from(offset.div_ceil(BLOCK)).unwrap_or(u32::MAX);
        let whole = start.min(all.end)..end.max(start.min(all.end));
        self.wait(&(all.start..whole.start))?;
        self.wait(&(whole.end..all.end))?;
        // What arrives meanwhile is older.
        let mut state = self.shared.state.lock();
        change()?;
        self.shared.present(&mut state, whole)
    }
}

impl ArrivalHandle {
    /// Size of the device in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// From now on these ranges are absent; nobody may use them at this moment. Parts of blocks count as whole.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`]; [`DeviceError::Unsupported`] on a device larger than [`MAX_ARRIVING`]; or the list cannot be
    /// written ([`Arriving::kept`]).
    pub fn expect(&self, ranges: &[Range<u64>]) -> Result<(), DeviceError> {
        if self.shared.size > MAX_ARRIVING {
            let text = format!("tell what is absent of more than {MAX_ARRIVING} bytes");
            return Err(DeviceError::Unsupported(text.into()));
        }
        let mut state = self.shared.state.lock();
        for range in ranges {
            let length = range.end.saturating_sub(range.start);
            check_range(range.start, length, self.shared.size)?;
        }
        let ranges = ranges.iter().filter(|range| range.start < range.end);
        let blocks: Vec<_> = ranges.map(touched).collect();
        if let Some(log) = state.log.as_mut().filter(|_| !blocks.is_empty()) {
            log.expect(&blocks).map_err(|e| broken(&e))?;
        }
        for run in blocks {
            state.absent.insert_range(run);
        }
        state.failed = None;
        let complete = state.absent.is_empty();
        self.shared.complete.store(complete, Ordering::SeqCst);
        Ok(())
    }

    /// `ask` is called with each range that a reader waits for, again and again until it is there. It must not block.
    pub fn on_wait(&self, ask: impl Fn(Range<u64>) + Send + Sync + 'static) {
        self.shared.state.lock().ask = Some(Arc::new(ask));
    }

    /// Bytes that are absent.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.shared.left(&self.shared.state.lock())
    }

    /// What is absent.
    #[must_use]
    pub fn absent(&self) -> Vec<Range<u64>> {
        let state = self.shared.state.lock();
        let bytes = |run: Range<u32>| {
            u64::from(run.start) * BLOCK..(u64::from(run.end) * BLOCK).min(self.shared.size)
        };
        runs(&state.absent).map(bytes).collect()
    }

    /// Waits until nothing is absent, or for so long. Whether nothing is.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout.min(super::MAX_TIMEOUT);
        let mut state = self.shared.state.lock();
        while !state.absent.is_empty() {
            if self
                .shared
                .changed
                .wait_until(&mut state, until)
                .timed_out()
            {
                break;
            }
        }
        state.absent.is_empty()
    }

    /// From now on a reader gives up when nothing has arrived for so long.
    pub fn set_timeout(&self, timeout: Duration) {
        self.shared.state.lock().timeout = Some(timeout.min(super::MAX_TIMEOUT));
    }

    /// What is absent may come after all, whatever [`ArrivalHandle::fail`] said, and is asked for at once by all who wait.
    pub fn revive(&self) {
        let mut state = self.shared.state.lock();
        state.failed = None;
        state.revived += 1;
        self.shared.changed.notify_all();
    }

    /// What is absent will not come: who reads it gets this error, until [`ArrivalHandle::expect`] or
    /// [`ArrivalHandle::revive`].
    pub fn fail(&self, error: DeviceError) {
        self.shared.state.lock().failed = Some(error);
        self.shared.changed.notify_all();
    }
}

/// What arrives is written below, unless it was written by others or has arrived before.
impl<D: BlockDevice> Arriving<D> {
    /// Bytes arrive: whole blocks, but for the device's end. Returns how many were still absent.
    ///
    /// # Errors
    /// [`DeviceError::Unaligned`], and errors of the device below; what could not be written stays absent.
    pub fn arrive(&self, offset: u64, data: &[u8]) -> Result<u64, DeviceError> {
        self.place(offset, data.len() as u64, |range| {
            let part = (range.start - offset) as usize..(range.end - offset) as usize;
            self.inner.write(range.start, &data[part])
        })
    }

    /// As [`Arriving::arrive`], with zeros.
    ///
    /// # Errors
    /// As [`Arriving::arrive`].
    pub fn arrive_zeroes(&self, offset: u64, length: u64) -> Result<u64, DeviceError> {
        self.place(offset, length, |range| {
            let length = range.end - range.start;
            self.inner
                .write_zeroes(range.start, length, Zeroes::default())
        })
    }

    fn place(
        &self,
        offset: u64,
        length: u64,
        mut write: impl FnMut(Range<u64>) -> Result<(), DeviceError>,
    ) -> Result<u64, DeviceError> {
        let size = self.shared.size;
        check_range(offset, length, size)?;
        let end = offset + length;
        if !offset.is_multiple_of(BLOCK) || !(end.is_multiple_of(BLOCK) || end == size) {
            return Err(DeviceError::Unaligned {
                offset,
                length,
                alignment: BLOCK as u32,
            });
        }
        let mut placed = 0;
        let mut state = self.shared.state.lock();
        let mut blocks = touched(&(offset..end));
        while let Some(first) = state.absent.range(blocks.clone()).next() {
            let absent = |block: &u32| state.absent.contains(*block);
            let count = (first..blocks.end).take_while(absent).count() as u32;
            let run = first..first + count;
            let range = u64::from(run.start) * BLOCK..(u64::from(run.end) * BLOCK).min(size);
            placed += range.end - range.start;
            write(range)?;
            state.arrived = Some(Instant::now());
            blocks.start = run.end;
            self.shared.present(&mut state, run)?;
        }
        Ok(placed)
    }
}

impl<D: BlockDevice> BlockDevice for Arriving<D> {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let length = buffer.len() as u64;
        check_range(offset, length, self.shared.size)?;
        self.wait(&touched(&(offset..offset + length)))?;
        self.inner.read(offset, buffer)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.change(offset, data.len() as u64, || self.inner.write(offset, data))
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.change(offset, length, || {
            self.inner.write_zeroes(offset, length, zeroes)
        })
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.change(offset, length, || self.inner.trim(offset, length))
    }

    fn flush(&self) -> Result<(), DeviceError> {
        let (said, is_complete) = {
            let state = self.shared.state.lock();
            let is_complete = state.absent.is_empty();
            let log = state.log.as_ref();
            (log.and_then(|log| log.said(is_complete)), is_complete)
        };
        self.inner.flush()?;
        let Some(said) = said else {
            return Ok(());
        };
        let mut state = self.shared.state.lock();
        let is_complete = is_complete && state.absent.is_empty();
        let State { log, absent, .. } = &mut *state;
        let marked = match log {
            Some(log) if is_complete => log.clear(),
            Some(log) => log.flushed(&said, absent),
            None => Ok(()),
        };
        marked.map_err(|e| broken(&e))
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.shared.size)?;
        if self.is_complete() || length == 0 {
            return self.inner.extents(offset, length);
        }
        let end = offset + length;
        let blocks = touched(&(offset..end));
        let first = {
            let state = self.shared.state.lock();
            missing(&state, blocks.clone(), self.shared.size)
        };
        match first {
            None => self.inner.extents(offset, length),
            // What is absent may be anything.
            Some(missing) if missing.start <= offset => Ok(vec![Extent {
                offset,
                length: missing.end.min(end) - offset,
                kind: ExtentKind::Data,
            }]),
            Some(missing) => self.inner.extents(offset, missing.start - offset),
        }
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        match self.is_complete() {
            true => self.inner.prefetch(offset, length),
            false => check_range(offset, length, self.shared.size),
        }
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        match self.is_complete() {
            true => self.inner.cost(offset, length),
            false => Cost::Network,
        }
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        match self.is_complete() {
            true => self.inner.write_cost(offset, length),
            false => Cost::Network,
        }
    }
}

#[cfg(test)]
mod tests;
