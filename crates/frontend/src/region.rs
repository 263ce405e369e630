//! Memory whose pages come from a device: for programs that want bytes, not blocks.
//!
//! A [`Region`] is a range of addresses. Who touches a page that is absent waits while it is read from the
//! [`BlockDevice`]; several threads serve such faults at the same time, neighbours are fetched along where somebody
//! reads on, and what the device knows to be zeros costs neither a read nor memory. Writes are tracked by the kernel
//! without a stop, so that they can be pushed back: [`Region::push`], [`Region::dirty_since_mark`].
//!
//! The paper (r3map §1.3.1, §1.4.1, §1.6.1) serves one fault after the other and holds tracking of writes and
//! background pulls to be impossible with userfaultfd; Linux has since learned both (asynchronous write protection
//! and `PAGEMAP_SCAN`, Linux 6.7).
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
//! - [`Region::read_at`] and [`Region::write_at`] copy. They bring absent pages in themselves, so the device's errors
//!   are theirs, and exclude each other piece by piece (64 KiB): safe from any number of threads.
//! - [`Region::hold`] borrows the whole region as slices. While it is held, nothing is evicted, pushed or copied.
//! - [`Region::as_ptr`] is for those who write and track at the same time. Such writers must not write where
//!   `read_at` or `write_at` is at work, and while a push may run should write whole aligned words (atomically):
//!   a push copies words, each old or new, and catches what is written later with the next push.
//!
//! Through a slice or a pointer, an absent page is a wait. When the device fails, it is tried again if that can
//! help, up to [`Options::timeout`]; then the touch is a `SIGBUS` (a system call that was handed the address
//! returns `EFAULT`), and each later one too, until [`Region::prefault`], `read_at` or `write_at` brings the page in
//! after all. A kernel without `UFFDIO_POISON` (before 6.6) lets it wait until the device answers or the region is
//! closed. A touch after [`Region::close`] is a `SIGSEGV` or `EFAULT`.
//!
//! # What it relies on
//!
//! The device belongs to the region: what others write to it is not seen, or seen only here and there. The device
//! must not touch the region's memory to do its work. A child process does not inherit the memory.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Cost, DeviceError, check_range};
use rustix::event::EventfdFlags;

mod access;
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

pub use options::{MAX_PREFETCH, MAX_THREADS, MIN_LIMIT, Options, RegionError, Stats};
pub use push::Pushed;
pub use uffd::Support;

use memory::Memory;
use pagemap::Pagemap;
use scratch::Scratch;
use shared::{Parts, Shared};
use uffd::Uffd;

/// The largest alignment of a device: bytes that come and go together.
const MAX_UNIT: usize = 4 << 20;
/// The most threads that populate.
const POPULATORS: usize = 4;
/// How long a region that goes away waits for its threads; one that the device keeps longer ends by itself.
const STOP: Duration = Duration::from_secs(5);

/// Memory whose pages come from a device. See the [module](self).
pub struct Region {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What the kernel offers to regions.
///
/// # Errors
/// [`RegionError`]: nothing.
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

    /// What the kernel offers.
    #[must_use]
    pub fn support(&self) -> Support {
        self.shared.uffd.support
    }

    /// Bytes: the device's. The rest of the last page is memory too; it is zero at first and never pushed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.size
    }

    /// Never: a device without bytes cannot be mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the bytes are, until [`Region::close`] or drop. A touch may wait for the device, or end the process: see
    /// the [module](self). Who reads must not be where a [`Region::write_at`] is at work.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.shared.memory.base()
    }

    /// Where the bytes are that may be written; `None` for a region that is not writable. As for [`Region::as_ptr`],
    /// and who writes must be alone there: no `read_at` or `write_at` of the same bytes meanwhile. Pushes and evictions
    /// may run.
    #[must_use]
    pub fn as_mut_ptr(&self) -> Option<*mut u8> {
        self.shared.writable.then(|| self.shared.memory.base())
    }

    /// Borrows the region as slices. Until the end of the borrow nothing is evicted, also not for a limit.
    #[must_use]
    pub fn hold(&mut self) -> Held<'_> {
        // Who evicts for the limit looks under this lock.
        let _evicting = self.shared.evicting.lock();
        self.shared.held.fetch_add(1, Ordering::SeqCst);
        drop(_evicting);
        Held { region: self }
    }

    /// Copies out, and brings in what is absent.
    ///
    /// # Errors
    /// What the device says; [`DeviceError::Unavailable`] when another's read of the same page takes longer than
    /// [`Options::timeout`]; [`DeviceError::Closed`].
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.shared.read_at(offset, buffer)
    }

    /// Copies in. Of pages that are written in part and absent, the rest comes from the device.
    ///
    /// # Errors
    /// As [`Region::read_at`], and [`DeviceError::ReadOnly`]. A part of the data may be written then.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.shared.write_at(offset, data)
    }

    /// Brings a range in, so that touches of it do not fault.
    ///
    /// # Errors
    /// As [`Region::read_at`].
    pub fn prefault(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let range = self.range(offset, length)?;
        let deadline = Instant::now() + self.shared.timeout;
        self.shared.ensure(self.shared.units(&range), deadline)
    }

    /// What was written since the mark, to the page: runs of bytes, in order. `clear` sets the mark to now. Pushes do
    /// not change it.
    ///
    /// # Errors
    /// [`DeviceError::ReadOnly`] for a region that is not writable, [`DeviceError::Closed`], and what the kernel says.
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

    /// Writes back what was written, in the order of its place and neighbours together, and flushes the device. What
    /// is written meanwhile is in this push or the next. What a failed push did not write, the next one does.
    ///
    /// The device then holds no single moment's state if writers ran: see [`Region::push_with`].
    ///
    /// # Errors
    /// What the device says; [`DeviceError::ReadOnly`], [`DeviceError::Closed`]; [`DeviceError::Unavailable`] when
    /// another push is under way for longer than [`Options::timeout`].
    pub fn push(&self) -> Result<Pushed, DeviceError> {
        self.shared.push()
    }

    /// A push after which the device holds exactly what the region held between `pause` and `resume`, in which all
    /// writers must stand still.
    ///
    /// Most is written before, and what is left is copied during the pause and written after it, if it is at most
    /// 64 MiB; else it is written during the pause. `resume` is called if and only if `pause` was, also on failure.
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

    /// Flushes the device: what was pushed is where it promises it to be. Pushes nothing.
    ///
    /// # Errors
    /// What the device says.
    pub fn flush(&self) -> Result<(), DeviceError> {
        self.shared.device.flush()
    }

    /// Takes what lies whole in a range and was not written since it was pushed out of memory; the next touch
    /// brings it back. Returns the bytes.
    ///
    /// What is written through a pointer at the same moment stays, if the kernel can move pages
    /// ([`Support::moves`]); else such writers must be elsewhere.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::Closed`].
    pub fn evict(&self, offset: u64, length: u64) -> Result<u64, DeviceError> {
        let range = self.range(offset, length)?;
        self.shared.evict(range)
    }

    /// Ends it: whoever waits in a call gets [`DeviceError::Closed`], whoever touches the memory from now on, or waits
    /// for a page, a signal. What was not pushed is lost. Dropping a region closes it.
    pub fn close(&self) {
        self.shared.close();
    }

    /// What happened so far.
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
                // It keeps the addresses taken until the device lets it go.
                false => {
                    tracing::warn!(
                        "a thread of a region still waits for its device and is abandoned"
                    )
                }
            }
        }
    }
}

/// A region in hand, as slices. Touches wait for absent pages: see the [module](self).
pub struct Held<'a> {
    region: &'a mut Region,
}

#[allow(unsafe_code)] // Memory becomes slices.
impl Held<'_> {
    /// The bytes, to be written; `None` for a region that is not writable.
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
        // SAFETY: mapped for its whole length until the region is closed, which takes a borrow of it. All that is
        // written in safe code goes through a borrow of the region too, and it is borrowed mutably here. The threads
        // of the region only fill pages that nobody has seen, and evict nothing while it is held.
        unsafe { std::slice::from_raw_parts(self.region.as_ptr(), self.region.len()) }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.region.shared.held.fetch_sub(1, Ordering::SeqCst);
    }
}
