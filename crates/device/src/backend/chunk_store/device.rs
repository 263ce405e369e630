//! The device over a store.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range,
};
use parking_lot::{Condvar, Mutex};

use super::buffer::Buffer;
use super::head::Own;
use super::inner::{Committed, Inner, Part, State};
use super::store::{ChunkStore, Promise};
use super::sweep::Doomed;
use super::table::Table;
use super::write_back::MAX_BATCH;
use crate::remote::Epoch;

/// Threads that write back what does not wait for a flush.
const WRITERS: usize = 2;
/// Runs in an answer about extents.
const MAX_RUNS: usize = 1 << 16;

/// A disk in a store. Use [`StoreDevice::open`].
pub struct StoreDevice {
    pub(super) inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The lease was its own already.
    pub(super) resumed: bool,
}

impl StoreDevice {
    pub(super) fn new(
        store: Arc<dyn ChunkStore>,
        committed: Committed,
        table: Table,
        read_only: bool,
        max_buffer: u64,
    ) -> Result<Self, DeviceError> {
        let header = committed.header().clone();
        let inner = Arc::new(Inner {
            promise: store.promise(),
            max_buffer: max_buffer.max(2 * u64::from(header.object)),
            header,
            store,
            read_only,
            state: Mutex::new(State {
                buffer: Buffer::default(),
                table,
                count: 0,
                failed: None,
                lost: None,
                closing: false,
            }),
            changed: Condvar::new(),
            own: Mutex::new(Own::new(committed.header().clone())),
            settled: AtomicU64::new(committed.header().epoch),
            committed: Mutex::new(committed),
            doomed: Doomed::default(),
            gone: OnceLock::new(),
            closed: AtomicBool::new(false),
            released: AtomicBool::new(false),
            logged: AtomicU32::new(0),
        });
        let mut threads = Vec::new();
        if !read_only {
            for _ in 0..WRITERS {
                let inner = Arc::clone(&inner);
                let thread = std::thread::Builder::new().name("store-write".into());
                threads.push(thread.spawn(move || inner.write_back_always())?);
            }
            let inner = Arc::clone(&inner);
            let thread = std::thread::Builder::new().name("store-tidy".into());
            threads.push(thread.spawn(move || inner.doomed.remove_always(&*inner.store))?);
        }
        Ok(StoreDevice {
            inner,
            threads: Mutex::new(threads),
            resumed: false,
        })
    }

    /// Bytes of a chunk: reads of less take as long.
    #[must_use]
    pub fn chunk(&self) -> u32 {
        self.inner.header.chunk
    }

    /// A random number of this disk.
    #[must_use]
    pub fn id(&self) -> [u8; 16] {
        self.inner.header.id
    }

    /// How often it was opened for writing, with this time if it is.
    #[must_use]
    pub fn session(&self) -> u32 {
        self.inner.header.session
    }

    /// Whether the lease was that of the same holder before it was opened: nobody else has written since.
    #[must_use]
    pub fn is_resumed(&self) -> bool {
        self.resumed
    }

    /// What its store promises of what was flushed.
    #[must_use]
    pub fn promise(&self) -> &Promise {
        &self.inner.promise
    }

    /// Why the disk can no longer be used, if it cannot: its lease was taken, or the store has lost it.
    #[must_use]
    pub fn trouble(&self) -> Option<DeviceError> {
        self.inner.gone.get().cloned()
    }

    /// The last epoch that is durable. A commit that is under way is not waited for.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.inner.settled.load(Ordering::Acquire))
    }

    /// Returns when the store has answered a small request.
    ///
    /// # Errors
    /// [`DeviceError`]: it does not answer, or refuses.
    pub fn reach(&self) -> Result<(), DeviceError> {
        self.inner.reach()
    }

    /// Looks whether it still has its lease, by one small request to the store: one that is idle learns so that the lease was
    /// broken, or that the store has lost the disk. One that was opened for reading only reaches the store.
    ///
    /// # Errors
    /// [`DeviceError`]: why it can no longer be used ([`StoreDevice::trouble`]), or the store does not answer.
    pub fn check(&self) -> Result<(), DeviceError> {
        self.inner.check()
    }

    /// Flushes, and gives the lease back. To be called after the last request; again, if it failed.
    ///
    /// # Errors
    /// [`DeviceError`]: what was not flushed is lost with this, and the lease stays.
    pub fn close(&self) -> Result<(), DeviceError> {
        self.end(|inner| inner.commit(None))
    }

    /// Drops what was not flushed, and gives the lease back. To be called after the last request; again, if it failed.
    ///
    /// # Errors
    /// [`DeviceError`]: the lease stays.
    pub fn abandon(&self) -> Result<(), DeviceError> {
        self.end(Inner::revert)
    }

    fn end(&self, last: impl FnOnce(&Inner) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        self.inner.closed.store(true, Ordering::Release);
        if self.inner.read_only {
            self.stop();
            return Ok(());
        }
        if self.inner.released.load(Ordering::Acquire) {
            return Ok(());
        }
        let last = last(&self.inner);
        let lost = self.inner.lost();
        if lost.is_none() {
            last?;
        } else if let Err(error) = last
            && !matches!(error, DeviceError::Corrupt(_))
        {
            return Err(error);
        }
        self.stop();
        self.inner.release()?;
        self.inner.released.store(true, Ordering::Release);
        // What could be kept is there, and trying again is of no use.
        lost.map_or(Ok(()), Err)
    }

    /// Ends its threads. What they are doing is waited for.
    fn stop(&self) {
        self.inner.state.lock().closing = true;
        self.inner.changed.notify_all();
        self.inner.doomed.finish();
        for thread in std::mem::take(&mut *self.threads.lock()) {
            let _ = thread.join();
        }
    }
}

impl Drop for StoreDevice {
    fn drop(&mut self) {
        self.inner.closed.store(true, Ordering::Release);
        self.stop();
    }
}

impl BlockDevice for StoreDevice {
    fn size(&self) -> u64 {
        self.inner.header.size
    }

    fn capabilities(&self) -> Capabilities {
        let can_write = !self.inner.read_only;
        Capabilities {
            read_only: self.inner.read_only,
            fast_zeroes: can_write,
            trim: can_write,
            durable: self.inner.promise.is_durable,
            extents: true,
            alignment: 1,
            preferred: self.inner.header.chunk,
            longest: u32::MAX,
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        check_range(offset, buffer.len() as u64, self.inner.header.size)?;
        self.inner.alive()?;
        let mut parts = self.inner.parts(offset, buffer.len() as u64).peekable();
        while parts.peek().is_some() {
            let mut bytes = 0;
            let mut some = Vec::new();
            while let Some(part) = parts.next_if(|_| bytes < MAX_BATCH) {
                bytes += part.range.len() as u64;
                some.push(part);
            }
            self.inner.read_parts(some, buffer)?;
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.inner.may_change(offset, data.len() as u64)?;
        for part in self.inner.parts(offset, data.len() as u64) {
            self.inner
                .write_part(&part, Some(&data[part.within.clone()]))?;
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.inner.may_change(offset, length)?;
        if zeroes.keep_allocated && zeroes.only_fast {
            return Err(DeviceError::Unsupported(
                "zero a range quickly and keep its space".into(),
            ));
        }
        for part in self.inner.parts(offset, length) {
            match part.is_whole {
                true => self.inner.clear(part.index)?,
                false => self.inner.write_part(&part, None)?,
            }
        }
        Ok(())
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.may_change(offset, length)?;
        // Parts of objects stay what they are: zeros would have to be written.
        for part in self
            .inner
            .parts(offset, length)
            .filter(|part| part.is_whole)
        {
            self.inner.clear(part.index)?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        match self.inner.read_only {
            true => self.inner.alive(),
            false if self.inner.closed.load(Ordering::Acquire) => Err(DeviceError::Closed),
            false => self.inner.commit(None),
        }
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.inner.header.size)?;
        let state = self.inner.state.lock();
        let mut runs: Vec<Extent> = Vec::new();
        let mut at = offset;
        for part in self.inner.parts(offset, length) {
            let is_here =
                state.table.get(part.index).is_some() || state.buffer.get(part.index).is_some();
            let kind = match is_here {
                true => ExtentKind::Data,
                false => ExtentKind::Hole,
            };
            let length = part.range.len() as u64;
            let is_full = runs.len() == MAX_RUNS;
            match runs.last_mut() {
                Some(run) if run.kind == kind => run.length += length,
                _ if is_full => break,
                _ => runs.push(Extent {
                    offset: at,
                    length,
                    kind,
                }),
            }
            at += length;
        }
        Ok(runs)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        // A cache in front of it fetches ahead; it has none of its own.
        check_range(offset, length, self.inner.header.size)
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        if check_range(offset, length, self.inner.header.size).is_err() {
            return Cost::Memory;
        }
        let state = self.inner.state.lock();
        let is_here = |part: Part| match state.buffer.get(part.index) {
            Some(slot) => slot.known.has(&part.range),
            None => !state.table.get(part.index).is_some(),
        };
        match self.inner.parts(offset, length).all(is_here) {
            true => Cost::Memory,
            false => Cost::Network,
        }
    }

    fn write_cost(&self, _: u64, _: u64) -> Cost {
        // It may find its object on the way to the store.
        Cost::Network
    }
}
