//! A device stored in a directory, one file per chunk.

mod files;
mod header;

use std::sync::Arc;

use drover_core::{
    BlockDevice, Capabilities, Cost, DeviceError, Extent, ExtentKind, Zeroes, check_range,
};
use parking_lot::{Mutex, RwLock};

use self::files::Files;
pub use self::header::MAX_CHUNKS;
use crate::remote::Shape;
use drover_storage::{Access, Directory, File, Lock};

/// Locks, shared by chunks modulo this number.
const LOCKS: usize = 256;

/// Maximum runs in one reply to an extents request.
const MAX_RUNS: usize = 1 << 16;

/// Zeros to write where space must stay allocated.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// How a [`DirectoryDevice`] is opened.
#[derive(Clone, Copy, Debug)]
pub struct DirectoryOptions {
    /// Refuses writes; others may read at the same time.
    pub read_only: bool,
    /// Maximum chunk files kept open; files in use by requests may exceed it.
    pub most_open: usize,
}

impl Default for DirectoryOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            most_open: 256,
        }
    }
}

/// A device with one file per chunk (r3map §1.4.8): requests for different chunks do not contend. A chunk without a
/// file is zeros. The format and the states after a crash: `docs/format/directory-device.md`.
///
/// Once a sync of a file has failed, all later flushes fail: it is unknown what was lost.
///
/// Lock order: `flushing`; one of `chunks`; the table of open files, which is held during no I/O except opening a file.
pub struct DirectoryDevice {
    directory: Arc<dyn Directory>,
    shape: Shape,
    read_only: bool,
    files: Files,
    /// Held shared to use a chunk's file, exclusively to create or remove it.
    chunks: [RwLock<()>; LOCKS],
    /// A flush waits for one in progress: the names which that one is syncing are not durable yet.
    flushing: Mutex<()>,
    /// Keeps others out until it is released.
    lock: Mutex<Option<Box<dyn Send + Sync>>>,
}

/// The part of a range that lies in one chunk.
struct Part {
    index: u64,
    /// Offset in the chunk.
    at: u64,
    length: u64,
    /// Range in the request's buffer.
    within: std::ops::Range<usize>,
    /// Whether it covers the whole chunk.
    whole: bool,
}

impl DirectoryDevice {
    /// Creates a device of zeros in a directory that has none, and opens it.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a shape with more than [`MAX_CHUNKS`] or a chunk size that is not a power of
    /// two of at least 4096; [`DeviceError::Io`] of kind `AlreadyExists` when the directory has a device or chunks;
    /// errors of the medium. After a crash, or an error in the last step, there is a complete device or none; if none,
    /// the call can be repeated.
    pub fn create(
        directory: Arc<dyn Directory>,
        shape: Shape,
        options: DirectoryOptions,
    ) -> Result<Self, DeviceError> {
        // Before locking, so that a directory of something else is left untouched.
        header::check_new(directory.as_ref(), shape)?;
        let lock = header::lock(directory.as_ref(), Lock::Exclusive)?;
        header::create(directory.as_ref(), shape)?;
        drop(lock);
        Self::open(directory, options)
    }

    /// Opens the device in a directory.
    ///
    /// # Errors
    /// [`DeviceError::Corrupt`] when the header is damaged or a chunk does not belong to the device;
    /// [`DeviceError::Unavailable`] when it is open elsewhere; errors of the medium.
    pub fn open(
        directory: Arc<dyn Directory>,
        options: DirectoryOptions,
    ) -> Result<Self, DeviceError> {
        let kind = match options.read_only {
            true => Lock::Shared,
            false => Lock::Exclusive,
        };
        let shape = header::read(directory.as_ref())?;
        let lock = header::lock(directory.as_ref(), kind)?;
        let access = match options.read_only {
            true => Access::Read,
            false => Access::Write,
        };
        let files = Files::scan(Arc::clone(&directory), shape, access, options.most_open)?;
        Ok(Self {
            directory,
            shape,
            read_only: options.read_only,
            files,
            chunks: std::array::from_fn(|_| RwLock::new(())),
            flushing: Mutex::new(()),
            lock: Mutex::new(Some(lock)),
        })
    }

    /// Device and chunk size.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Chunks that have a file.
    #[must_use]
    pub fn present(&self) -> u64 {
        self.files.count()
    }

    /// Chunk files currently open.
    #[must_use]
    pub fn open_files(&self) -> usize {
        self.files.open_count()
    }

    /// Lets others open the device. To be called after the last request: another process may write from now on.
    pub fn unlock(&self) {
        *self.lock.lock() = None;
    }

    fn parts(&self, offset: u64, length: u64) -> impl Iterator<Item = Part> {
        let (chunk, shape) = (u64::from(self.shape.chunk), self.shape);
        let end = offset + length;
        let mut from = offset;
        std::iter::from_fn(move || {
            let length = (end - from).min(chunk - from % chunk);
            let start = (from - offset) as usize;
            let part = Part {
                index: from / chunk,
                at: from % chunk,
                length,
                within: start..start + length as usize,
                whole: length == u64::from(shape.length(from / chunk)),
            };
            from += length;
            (length > 0).then_some(part)
        })
    }

    fn lock_of(&self, index: u64) -> &RwLock<()> {
        &self.chunks[(index % LOCKS as u64) as usize]
    }

    fn change(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        if self.read_only {
            return Err(DeviceError::ReadOnly);
        }
        check_range(offset, length, self.shape.size)
    }

    /// Calls `change` with the file of a chunk, which is created if `make` says so; without a file there is nothing to
    /// change.
    fn with_file(
        &self,
        index: u64,
        make: bool,
        change: impl FnOnce(&dyn File) -> std::io::Result<()>,
    ) -> Result<(), DeviceError> {
        let lock = self.lock_of(index);
        {
            let _shared = lock.read();
            if self.files.has(index) {
                return self.files.change(index, change);
            }
            if !make {
                return Ok(());
            }
        }
        let _alone = lock.write();
        if !self.files.has(index) {
            self.files.make(index)?;
        }
        self.files.change(index, change)
    }

    /// Zeros part of a chunk, deallocating it where possible.
    fn clear(&self, part: &Part) -> Result<(), DeviceError> {
        if !part.whole {
            return self.with_file(part.index, false, |file| {
                file.punch_hole(part.at, part.length)
            });
        }
        let _alone = self.lock_of(part.index).write();
        match self.files.has(part.index) {
            true => self.files.remove(part.index),
            false => Ok(()),
        }
    }
}

/// Writes zeros to a range of a file.
fn write_zeros(file: &dyn File, offset: u64, length: u64) -> std::io::Result<()> {
    let end = offset + length;
    let mut at = offset;
    while at < end {
        let take = (end - at).min(ZEROS.len() as u64);
        file.write_at(&ZEROS[..take as usize], at)?;
        at += take;
    }
    Ok(())
}

impl BlockDevice for DirectoryDevice {
    fn size(&self) -> u64 {
        self.shape.size
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: self.read_only,
            fast_zeroes: !self.read_only,
            trim: !self.read_only,
            durable: true,
            extents: true,
            alignment: 1,
            preferred: self.shape.chunk,
            longest: u32::MAX,
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        check_range(offset, buffer.len() as u64, self.shape.size)?;
        for part in self.parts(offset, buffer.len() as u64) {
            let _shared = self.lock_of(part.index).read();
            let bytes = &mut buffer[part.within];
            match self.files.has(part.index) {
                true => self.files.read(part.index, bytes, part.at)?,
                false => bytes.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.change(offset, data.len() as u64)?;
        for part in self.parts(offset, data.len() as u64) {
            self.with_file(part.index, true, |file| {
                file.write_at(&data[part.within], part.at)
            })?;
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.change(offset, length)?;
        if zeroes.keep_allocated && zeroes.only_fast {
            return Err(DeviceError::Unsupported(
                "zero a range quickly and keep its space".into(),
            ));
        }
        for part in self.parts(offset, length) {
            match zeroes.keep_allocated {
                true => self.with_file(part.index, true, |file| {
                    write_zeros(file, part.at, part.length)
                })?,
                false => self.clear(&part)?,
            }
        }
        Ok(())
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.change(offset, length)?;
        for part in self.parts(offset, length) {
            self.clear(&part)?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        if self.read_only {
            return Ok(());
        }
        let _one_at_a_time = self.flushing.lock();
        self.files.sync()
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        check_range(offset, length, self.shape.size)?;
        let mut runs: Vec<Extent> = Vec::new();
        let mut at = offset;
        for part in self.parts(offset, length) {
            let kind = match self.files.has(part.index) {
                true => ExtentKind::Data,
                false => ExtentKind::Hole,
            };
            let full = runs.len() == MAX_RUNS;
            match runs.last_mut() {
                Some(last) if last.kind == kind => last.length += part.length,
                Some(_) if full => break,
                _ => runs.push(Extent {
                    offset: at,
                    length: part.length,
                    kind,
                }),
            }
            at += part.length;
        }
        Ok(runs)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        // The kernel reads ahead within a file; opening files ahead would only evict others from the table.
        check_range(offset, length, self.shape.size)
    }

    fn cost(&self, _: u64, _: u64) -> Cost {
        Cost::Disk
    }

    fn write_cost(&self, _: u64, _: u64) -> Cost {
        Cost::Disk
    }
}

impl std::fmt::Debug for DirectoryDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectoryDevice")
            .field("directory", &self.directory.describe(header::NAME))
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
