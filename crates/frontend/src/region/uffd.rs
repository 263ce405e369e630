//! The userfaultfd calls: one small function each.
#![allow(unsafe_code)] // The kernel's calls take addresses.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux_raw_sys::general as abi;
use linux_raw_sys::ioctl as op;
use rustix::io::Errno;
use rustix::mm::UserfaultfdFlags;

use super::ioctl::{self, code, ioctl};
use super::options::RegionError;

/// `_IO(0xAA, 0x00)` of `/dev/userfaultfd`: a new userfaultfd.
const NEW: u32 = code(0, abi::USERFAULTFD_IOC, 0, 0);
const POISON: u32 = code(
    ioctl::READ_WRITE,
    abi::USERFAULTFD_IOC,
    abi::_UFFDIO_POISON,
    size_of::<abi::uffdio_poison>(),
);
const MOVE: u32 = code(
    ioctl::READ_WRITE,
    abi::USERFAULTFD_IOC,
    abi::_UFFDIO_MOVE,
    size_of::<abi::uffdio_move>(),
);
/// Size of `struct uffd_msg` in bytes.
const MESSAGE: usize = 32;

/// What the kernel supports for regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// Faults by system calls that are given the memory are served too. Otherwise they return `EFAULT` for absent
    /// pages, and only the program's own accesses are served (no privilege, and `vm.unprivileged_userfaultfd` is 0).
    pub kernel_faults: bool,
    /// Writes can be tracked without a fault each (`UFFD_FEATURE_WP_ASYNC` and `PAGEMAP_SCAN`, Linux 6.7): a region can
    /// be writable.
    pub tracking: bool,
    /// Touching a page that cannot be read raises `SIGBUS` (`UFFDIO_POISON`, Linux 6.6); otherwise it blocks until the
    /// device answers or the region is closed.
    pub poison: bool,
    /// Pages can be removed from memory atomically (`UFFDIO_MOVE`, Linux 6.8): a page with concurrent writes through a
    /// pointer can be evicted without losing one.
    pub moves: bool,
}

/// A fault with a waiting thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) address: usize,
}

/// A userfaultfd after its handshake.
pub(super) struct Uffd {
    fd: OwnedFd,
    /// Its supported features.
    pub(super) support: Support,
}

impl Uffd {
    /// Opens one and negotiates features.
    pub(super) fn open() -> Result<Self, RegionError> {
        // A userfaultfd permits one handshake: the first probes the features, the second requests them.
        let (probe, kernel_faults) = open()?;
        let offered = handshake(&probe, 0)?;
        drop(probe);
        let tracking = u64::from(abi::UFFD_FEATURE_PAGEFAULT_FLAG_WP | abi::UFFD_FEATURE_WP_ASYNC);
        let support = Support {
            kernel_faults,
            tracking: offered & tracking == tracking && super::pagemap::works(),
            poison: offered & u64::from(abi::UFFD_FEATURE_POISON) != 0,
            moves: offered & u64::from(abi::UFFD_FEATURE_MOVE) != 0,
        };
        let mut wanted = 0;
        if support.tracking {
            wanted |= tracking | u64::from(abi::UFFD_FEATURE_WP_UNPOPULATED);
        }
        if support.poison {
            wanted |= u64::from(abi::UFFD_FEATURE_POISON);
        }
        if support.moves {
            wanted |= u64::from(abi::UFFD_FEATURE_MOVE);
        }
        let (fd, _) = open()?;
        handshake(&fd, wanted & offered)?;
        Ok(Self { fd, support })
    }

    /// From now on touching an absent page of the range produces a [`Fault`].
    pub(super) fn register(&self, at: usize, length: usize, track: bool) -> Result<(), Errno> {
        let mut mode = abi::UFFDIO_REGISTER_MODE_MISSING;
        if track {
            mode |= abi::UFFDIO_REGISTER_MODE_WP;
        }
        let mut register = abi::uffdio_register {
            range: range(at, length),
            mode: mode.into(),
            ioctls: 0,
        };
        // SAFETY: the kernel reads and writes this structure only; the range is a mapping of our own.
        unsafe { ioctl(self.fd.as_fd(), op::UFFDIO_REGISTER, &mut register) }.map(drop)
    }

    /// Fills absent pages from `data`, as clean when writes are tracked, and wakes their waiters. Returns how many
    /// bytes were filled; a partial fill is not an error. `Errno::EXIST`: the first page is present already.
    pub(super) fn copy(&self, at: usize, data: &[u8], clean: bool) -> Result<usize, Errno> {
        let mode = if clean { abi::UFFDIO_COPY_MODE_WP } else { 0 };
        let mut copy = abi::uffdio_copy {
            dst: at as u64,
            src: data.as_ptr() as u64,
            len: data.len() as u64,
            mode: mode.into(),
            copy: 0,
        };
        // SAFETY: `data` is readable for its length; the kernel fills only absent pages of registered memory, which
        // belongs to regions, whose absent pages nobody has seen.
        let result = unsafe { ioctl(self.fd.as_fd(), op::UFFDIO_COPY, &mut copy) };
        progress(result, copy.copy, data.len())
    }

    /// Makes absent pages read as zeros, without allocating memory. Returns and fails as [`Uffd::copy`].
    pub(super) fn zero(&self, at: usize, length: usize) -> Result<usize, Errno> {
        let mut zero = abi::uffdio_zeropage {
            range: range(at, length),
            mode: 0,
            zeropage: 0,
        };
        // SAFETY: as for `copy`.
        let result = unsafe { ioctl(self.fd.as_fd(), op::UFFDIO_ZEROPAGE, &mut zero) };
        progress(result, zero.zeropage, length)
    }

    /// Makes touching absent pages raise `SIGBUS` and wakes their waiters. Returns and fails as [`Uffd::copy`].
    pub(super) fn poison(&self, at: usize, length: usize) -> Result<usize, Errno> {
        let mut poison = abi::uffdio_poison {
            range: range(at, length),
            mode: 0,
            updated: 0,
        };
        // SAFETY: as for `copy`.
        let result = unsafe { ioctl(self.fd.as_fd(), POISON, &mut poison) };
        progress(result, poison.updated, length)
    }

    /// Moves pages out of `from` to absent pages at `to`: `from` is absent afterwards. Returns and fails as
    /// [`Uffd::copy`].
    ///
    /// # Safety
    /// Only callers that expect the pages of `from` to disappear may hold references into them.
    pub(super) unsafe fn take(
        &self,
        to: usize,
        from: usize,
        length: usize,
    ) -> Result<usize, Errno> {
        let mut take = abi::uffdio_move {
            dst: to as u64,
            src: from as u64,
            len: length as u64,
            mode: 0,
            move_: 0,
        };
        // SAFETY: the caller's; both ranges are mappings of our own.
        let result = unsafe { ioctl(self.fd.as_fd(), MOVE, &mut take) };
        progress(result, take.move_, length)
    }

    /// Wakes the threads waiting for a page in the range; if it is still absent they fault again.
    pub(super) fn wake(&self, at: usize, length: usize) -> Result<(), Errno> {
        let mut range = range(at, length);
        // SAFETY: the kernel reads this structure only.
        unsafe { ioctl(self.fd.as_fd(), op::UFFDIO_WAKE, &mut range) }.map(drop)
    }

    /// The next pending fault, if any.
    pub(super) fn next(&self) -> Result<Option<Fault>, Errno> {
        let mut message = [0u8; MESSAGE];
        match rustix::io::read(&self.fd, &mut message) {
            Ok(MESSAGE) if u32::from(message[0]) == abi::UFFD_EVENT_PAGEFAULT => {
                let mut address = [0; 8];
                address.copy_from_slice(&message[16..24]);
                Ok(Some(Fault {
                    address: u64::from_ne_bytes(address) as usize,
                }))
            }
            // No other events were requested.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn range(at: usize, length: usize) -> abi::uffdio_range {
    abi::uffdio_range {
        start: at as u64,
        len: length as u64,
    }
}

/// The progress of a call that may stop half-way.
fn progress(result: Result<u32, Errno>, done: i64, length: usize) -> Result<usize, Errno> {
    match result {
        Ok(_) => Ok(length),
        // Interrupted: the count tells the progress; a negative one means that it did not start.
        Err(Errno::AGAIN) => Ok(usize::try_from(done).unwrap_or(0)),
        Err(error) => Err(error),
    }
}

/// Opens a userfaultfd; also returns whether it reports faults of system calls.
fn open() -> Result<(OwnedFd, bool), RegionError> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // SAFETY: what the descriptor does to memory is up to the calls of this module.
    match unsafe { rustix::mm::userfaultfd(flags) } {
        Ok(fd) => return Ok((fd, true)),
        Err(Errno::PERM) => {}
        Err(source) => return Err(RegionError::Open(source)),
    }
    if let Some(fd) = open_device() {
        return Ok((fd, true));
    }
    let user_only = UserfaultfdFlags::from_bits_retain(abi::UFFD_USER_MODE_ONLY);
    // SAFETY: as above.
    unsafe { rustix::mm::userfaultfd(flags | user_only) }
        .map(|fd| (fd, false))
        .map_err(RegionError::Open)
}

fn open_device() -> Option<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/userfaultfd", flags, Mode::empty()).ok()?;
    let wanted = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // SAFETY: this request takes flags, not a pointer, and returns a descriptor that is ours.
    unsafe { ioctl::new_fd(device.as_fd(), NEW, wanted.bits() as usize) }.ok()
}

fn handshake(fd: &OwnedFd, features: u64) -> Result<u64, RegionError> {
    let mut api = abi::uffdio_api {
        api: abi::UFFD_API.into(),
        features,
        ioctls: 0,
    };
    // SAFETY: the kernel reads and writes this structure only.
    unsafe { ioctl(fd.as_fd(), op::UFFDIO_API, &mut api) }.map_err(RegionError::Handshake)?;
    Ok(api.features)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_are_those_of_the_headers() {
        assert_eq!(NEW, 0xAA00);
        assert_eq!(POISON, 0xC020_AA08);
        assert_eq!(MOVE, 0xC028_AA05);
        let register = code(ioctl::READ_WRITE, abi::USERFAULTFD_IOC, 0, 32);
        assert_eq!(register, op::UFFDIO_REGISTER);
        assert_eq!(size_of::<abi::uffd_msg>(), MESSAGE);
    }

    #[test]
    fn a_call_that_stopped_half_way_says_how_far_it_came() {
        assert_eq!(progress(Ok(0), 8192, 8192), Ok(8192));
        assert_eq!(progress(Err(Errno::AGAIN), 4096, 8192), Ok(4096));
        assert_eq!(progress(Err(Errno::AGAIN), -11, 8192), Ok(0));
        assert_eq!(progress(Err(Errno::EXIST), -17, 8192), Err(Errno::EXIST));
    }
}
