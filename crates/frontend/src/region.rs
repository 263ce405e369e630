//! Memory whose pages come from a device: for programs that want bytes, not blocks.
//!
//! A [`Region`] is an address range. A thread that touches an absent page waits while it is read from the
//! [`BlockDevice`]; several threads serve such faults concurrently, sequential faults fetch neighbouring pages too, and
//! ranges that the device knows to be zeros cost neither a read nor memory. The kernel tracks writes without a fault,
//! so that they can be pushed back: [`Region::push`], [`Region::dirty_since_mark`].
//!
//! The paper (r3map §1.3.1, §1.4.1, §1.6.1) serves one fault at a time and considers write tracking and background
//! pulls impossible with userfaultfd; Linux has since gained both (asynchronous write protection and `PAGEMAP_SCAN`,
//! Linux 6.7).
//!
//! ```
//! use std::sync::Arc;
//! use drover_device::backend::MemoryDevice;
//! use drover_frontend::region::{Options, Region};
//!
//! let device = Arc::new(MemoryDevice::from_bytes(&vec![7; 1 << 20]));
//! let options = Options { writable: true, ..Options::default() };
//! let region = match Region::new(device.clone(), options) {
//!     Ok(region) => region,
//!     // No privilege, or an old kernel: the error says which.
//!     Err(error) => {
//!         eprintln!("SKIP: {error}");
//!         return Ok(());
//!     }
//! };
//! let mut bytes = [0; 3];
//! region.read_at(5000, &mut bytes)?;
//! assert_eq!(bytes, [7; 3]);
//!
//! region.write_at(5001, b"new")?;
//! assert_eq!(region.dirty_since_mark(true)?, vec![4096..8192]);
//! region.push()?;
//! drover_core::BlockDevice::read(&*device, 5000, &mut bytes)?;
//! assert_eq!(&bytes, b"\x07ne");
//! # Ok::<(), drover_core::DeviceError>(())
//! ```
//!
//! # Three ways to the bytes
//!
//! - [`Region::read_at`] and [`Region::write_at`] copy. They bring absent pages in themselves, so they return the
//!   device's errors, and exclude each other per piece (64 KiB): safe from any number of threads.
//! - [`Region::hold`] borrows the whole region as slices. While it is held, nothing is evicted, pushed or copied.
//! - [`Region::as_ptr`] is for programs that write while tracking or pushing. Such writers must not write to ranges in
//!   use by `read_at` or `write_at`, and during a push should write whole aligned words (atomically): a push copies
//!   words, each old or new, and the next push picks up later writes.
//!
//! Through a slice or a pointer, touching an absent page blocks. When the device fails, the read is retried if that may
//! help, up to [`Options::timeout`]; then the touch raises `SIGBUS` (a system call given the address returns `EFAULT`),
//! and so does each later one, until [`Region::prefault`], `read_at` or `write_at` brings the page in. On a kernel
//! without `UFFDIO_POISON` (before 6.6) the touch blocks until the device answers or the region is closed. A touch
//! after [`Region::close`] raises `SIGSEGV` or returns `EFAULT`.
//!
//! # What it relies on
//!
//! The region must be the device's only user: writes of others are not seen, or only in places. The device must not
//! touch the region's memory to do its work. A child process does not inherit the memory.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Cost, DeviceError, check_range};
use rustix::event::EventfdFlags;

mod access;
mod device;
mod dirty;
mod evict;
mod fetch;
mod harvest;
mod ioctl;
mod memory;
mod options;
mod pagemap;
mod push;
mod retries;
mod scratch;
mod serve;
mod shared;
mod stream;
mod table;
mod uffd;

pub use device::RegionDevice;
pub use options::{MAX_PREFETCH, MAX_THREADS, MIN_LIMIT, Options, RegionError, Stats};
pub use push::Pushed;
pub use uffd::Support;

use memory::Memory;
use pagemap::Pagemap;
use scratch::Scratch;
use shared::{Parts, Shared};
use uffd::Uffd;

/// The largest supported alignment of a device, which is the unit of fetching and eviction.
const MAX_UNIT: usize = 4 << 20;
/// Maximum number of threads that populate.
const POPULATORS: usize = 4;
/// How long dropping a region waits for its threads; one that the device blocks longer ends later by itself.
const STOP: Duration = Duration::from_secs(5);

/// Memory whose pages come from a device. See the [module](self).
pub struct Region {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What the kernel supports for regions.
///
/// # Errors
/// [`RegionError`]: the kernel supports no regions.
pub fn support() -> Result<Support, RegionError> {
    Ok(Uffd::open()?.support)
}

impl Region {
    /// Maps the whole of `device`. Reads nothing yet.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn new(device: Arc<dyn BlockDevice>, options: Options) -> Result<Self, RegionError> {
        let capabilities = device.capabilities();
        let page = rustix::param::page_size();
        let unit = page.max(capabilities.alignment as usize);
        if !unit.is_power_of_two() || unit > MAX_UNIT || unit > capabilities.longest as usize {
            return Err(RegionError::Alignment {
                alignment: capabilities.alignment,
                longest: capabilities.longest,
            });
        }
        if options.writable && capabilities.read_only {
            return Err(RegionError::ReadOnly);
        }
        if options.limit.is_some_and(|limit| limit < MIN_LIMIT) {
            return Err(RegionError::Options("a region's limit is at least 4 MiB"));
        }
        if options.limit.is_some() && options.writable {
            return Err(RegionError::Options(
                "a writable region has no limit; evict what was pushed",
            ));
        }
        let size = usize::try_from(device.size())
            .ok()
            .filter(|size| (1..=isize::MAX as usize - unit).contains(size))
            .ok_or(RegionError::Size(device.size()))?;
        let length = size.next_multiple_of(page);
        let refused = |source| RegionError::Memory { length, source };
        let uffd = Uffd::open()?;
        if options.writable && !uffd.support.tracking {
            return Err(RegionError::NoTracking);
        }
        let memory = Memory::new(length, options.writable).map_err(refused)?;
        uffd.register(memory.address(0), length, options.writable)
            .map_err(refused)?;
        let pagemap = match pagemap::works() {
            true => Some(Pagemap::open().map_err(std::io::Error::from)?),
            false => None,
        };
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(std::io::Error::from)?;
        let scratch = match options.writable && uffd.support.moves {
            true => Some(Scratch::new(&uffd, unit.max(shared::STRIPE)).map_err(refused)?),
            false => None,
        };
        let cost = device.cost(0, page as u64);
        let shared = Arc::new(Shared::new(
            Parts {
                device,
                size,
                page,
                unit,
                memory,
                uffd,
                pagemap,
                bell,
                scratch,
            },
            &options,
        ));
        let mut region = Self {
            shared,
            threads: Vec::new(),
        };
        let servers = match (options.threads, cost) {
            (0, Cost::Memory) => 2,
            (0, Cost::Disk) => 4,
            (0, Cost::Network) => 16,
            (count, _) => count.min(MAX_THREADS),
        };
        for _ in 0..servers {
            region.spawn("region-fault", Shared::serve)?;
        }
        if options.populate {
            let next = Arc::new(AtomicUsize::new(0));
            for _ in 0..servers.min(POPULATORS) {
                let next = next.clone();
                region.spawn("region-populate", move |shared| shared.populate(&next))?;
            }
        }
        Ok(region)
    }

    fn spawn(
        &mut self,
        name: &str,
        work: impl FnOnce(&Shared) + Send + 'static,
    ) -> Result<(), RegionError> {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || work(&shared))?;
        self.threads.push(thread);
        Ok(())
    }

    /// What the kernel supports.
    #[must_use]
    pub fn support(&self) -> Support {
        self.shared.uffd.support
    }

    /// Length of the device in bytes. The rest of the last page is memory too; it is initially zero and never pushed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.size
    }

    /// Always false: an empty device cannot be mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of the memory, valid until [`Region::close`] or drop. A touch may wait for the device, or kill the
    /// process: see the [module](self). Readers must stay clear of ranges that a [`Region::write_at`] is writing.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.shared.memory.base()
    }

    /// The address of the memory for writing; `None` for a read-only region. As for [`Region::as_ptr`], and a writer
    /// needs exclusive use of the bytes: no concurrent `read_at` or `write_at` of them. Pushes and evictions may run.
    #[must_use]
    pub fn as_mut_ptr(&self) -> Option<*mut u8> {
        self.shared.writable.then(|| self.shared.memory.base())
    }

    /// Borrows the region as slices. Until the end of the borrow nothing is evicted, not even to keep to a limit.
    #[must_use]
    pub fn hold(&mut self) -> Held<'_> {
        // Eviction for the limit checks under this lock.
        let _evicting = self.shared.evicting.lock();
        self.shared.held.fetch_add(1, Ordering::SeqCst);
        drop(_evicting);
        Held { region: self }
    }

    /// Copies out, bringing in absent pages.
    ///
    /// # Errors
    /// Errors of the device; [`DeviceError::Unavailable`] when another thread's read of the same page takes longer than
    /// [`Options::timeout`]; [`DeviceError::Closed`].
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.shared.read_at(offset, buffer)
    }

    /// Copies in. Absent pages that are written only in part are read from the device first.
    ///
    /// # Errors
    /// As [`Region::read_at`], and [`DeviceError::ReadOnly`]. Part of the data may have been written then.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.shared.write_at(offset, data)
    }

    /// Brings a range in, so that touching it does not fault.
    ///
    /// # Errors
    /// As [`Region::read_at`].
    pub fn prefault(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let range = self.range(offset, length)?;
        let deadline = Instant::now() + self.shared.timeout;
        self.shared.ensure(self.shared.units(&range), deadline)
    }

    /// What was written since the mark, with page granularity: byte ranges, in order. `clear` sets a new mark.
    /// Independent of pushes.
    ///
    /// # Errors
    /// [`DeviceError::ReadOnly`] for a read-only region, [`DeviceError::Closed`], and errors of the kernel.
    pub fn dirty_since_mark(&self, clear: bool) -> Result<Vec<Range<u64>>, DeviceError> {
        let shared = &self.shared;
        if !shared.writable {
            return Err(DeviceError::ReadOnly);
        }
        let mut dirty = shared.dirty.lock();
        shared.harvest(&mut dirty, 0..shared.memory.length())?;
        let runs = dirty.marked.runs();
        if clear {
            for run in &runs {
                dirty.marked.clear(run.clone());
            }
        }
        let bytes = |page: usize| (page * shared.page).min(shared.size) as u64;
        Ok(runs
            .into_iter()
            .map(|run| bytes(run.start)..bytes(run.end))
            .collect())
    }

    /// Writes dirty pages back in address order, adjacent ones together, and flushes the device. Concurrent writes are
    /// included in this push or the next. Pages that a failed push did not write are included in the next.
    ///
    /// If writers ran meanwhile, the device holds no single moment's state: see [`Region::push_with`].
    ///
    /// # Errors
    /// Errors of the device; [`DeviceError::ReadOnly`], [`DeviceError::Closed`]; [`DeviceError::Unavailable`] when
    /// another push is in progress for longer than [`Options::timeout`].
    pub fn push(&self) -> Result<Pushed, DeviceError> {
        self.shared.push()
    }

    /// A push after which the device holds exactly the region's contents between `pause` and `resume`, during which all
    /// writers must be stopped.
    ///
    /// Most pages are written before the pause; the rest is copied during it and written afterwards if it is at most 64
    /// MiB, else it is written during the pause. `resume` is called if and only if `pause` was, also on failure.
    ///
    /// # Errors
    /// As [`Region::push`].
    pub fn push_with(
        &self,
        pause: impl FnOnce(),
        resume: impl FnOnce(),
    ) -> Result<Pushed, DeviceError> {
        self.shared.push_with(pause, resume)
    }

    /// Flushes the device, making pushed data durable as far as the device promises. Pushes nothing.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn flush(&self) -> Result<(), DeviceError> {
        self.shared.device.flush()
    }

    /// Evicts the clean pages that lie entirely in a range; the next touch brings them back. Returns the bytes evicted.
    ///
    /// Concurrent writes through a pointer are preserved if the kernel can move pages ([`Support::moves`]); otherwise
    /// writers must stay clear of the range.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::Closed`].
    pub fn evict(&self, offset: u64, length: u64) -> Result<u64, DeviceError> {
        let range = self.range(offset, length)?;
        self.shared.evict(range)
    }

    /// Drops the pages that a range touches, also those that were written and not pushed: the next touch reads the device
    /// again. Nobody may use the memory of the range meanwhile.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::ReadOnly`], [`DeviceError::Closed`]; [`DeviceError::Unavailable`] when a
    /// page is just being fetched, or a push is in progress for longer than [`Options::timeout`].
    pub fn forget(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let range = self.range(offset, length)?;
        self.shared.forget(range)
    }

    /// Closes the region: waiting calls return [`DeviceError::Closed`]; touching the memory, or waiting for a page,
    /// raises a signal. Unpushed writes are lost. Dropping a region closes it.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Counters since the start.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }

    fn range(&self, offset: u64, length: u64) -> Result<Range<usize>, DeviceError> {
        check_range(offset, length, self.shared.size as u64)?;
        Ok(offset as usize..(offset + length) as usize)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.close();
        let until = Instant::now() + STOP;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
            match thread.is_finished() {
                true => drop(thread.join()),
                // The address range stays reserved until the device returns.
                false => {
                    tracing::warn!(
                        "a thread of a region still waits for its device and is abandoned"
                    )
                }
            }
        }
    }
}

/// A region borrowed as slices. Touching absent pages blocks: see the [module](self).
pub struct Held<'a> {
    region: &'a mut Region,
}

#[allow(unsafe_code)] // Memory becomes slices.
impl Held<'_> {
    /// The bytes for writing; `None` for a read-only region.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let pointer = self.region.as_mut_ptr()?;
        // SAFETY: as in `deref`; the mutable borrow makes this the only slice.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer, self.region.len()) })
    }
}

#[allow(unsafe_code)] // Memory becomes slices.
impl Deref for Held<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped for its whole length until the region is closed, which takes a borrow of it. All writes in
        // safe code go through a borrow of the region too, and it is borrowed mutably here. The region's threads only
        // fill pages that nobody has seen, and evict nothing while it is held.
        unsafe { std::slice::from_raw_parts(self.region.as_ptr(), self.region.len()) }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.region.shared.held.fetch_sub(1, Ordering::SeqCst);
    }
}
