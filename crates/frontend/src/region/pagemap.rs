//! Which pages were written: the `PAGEMAP_SCAN` call (Linux 6.7).
//!
//! A page filled as clean carries the write-protect bit; the first write clears it in the kernel, without a fault. The
//! scan reports pages without the bit and sets it again, atomically per page: no write is missed.
#![allow(unsafe_code)] // The kernel's call takes addresses.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use linux_raw_sys::general as abi;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::ioctl::{READ_WRITE, code, ioctl};

const SCAN: u32 = code(READ_WRITE, b'f' as u32, 16, size_of::<abi::pm_scan_arg>());
/// Maximum runs reported by one call.
const RUNS: usize = 512;

/// The process's own pagemap.
pub(super) struct Pagemap(OwnedFd);

/// Whether the kernel supports the call.
pub(super) fn works() -> bool {
    // An empty vector over no pages: only whether the call exists matters.
    Pagemap::open().is_ok_and(|map| {
        let mut scan = argument(0..0);
        // SAFETY: no vector is given.
        let answer = unsafe { ioctl(map.0.as_fd(), SCAN, &mut scan) };
        answer != Err(Errno::NOTTY)
    })
}

impl Pagemap {
    pub(super) fn open() -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open("/proc/self/pagemap", flags, Mode::empty()).map(Self)
    }

    /// Calls `found` for every run of pages (addresses) written since the last scan, and marks them clean. Pages that
    /// are zero because they were never written are not among them. Poisoned pages are.
    pub(super) fn written(
        &self,
        addresses: Range<usize>,
        mut found: impl FnMut(Range<usize>),
    ) -> Result<(), Errno> {
        let empty = abi::page_region {
            start: 0,
            end: 0,
            categories: 0,
        };
        let mut runs = [empty; RUNS];
        let mut at = addresses.start;
        while at < addresses.end {
            let mut scan = argument(at..addresses.end);
            scan.flags = u64::from(abi::PM_SCAN_WP_MATCHING | abi::PM_SCAN_CHECK_WPASYNC);
            // Pages filled with zeros have no write-protect bit, but lose the zero flag with the first write.
            scan.category_inverted = abi::PAGE_IS_PFNZERO.into();
            scan.category_mask = u64::from(abi::PAGE_IS_WRITTEN | abi::PAGE_IS_PFNZERO);
            scan.category_anyof_mask = u64::from(abi::PAGE_IS_PRESENT | abi::PAGE_IS_SWAPPED);
            scan.return_mask = abi::PAGE_IS_WRITTEN.into();
            let count = self.scan(&mut scan, &mut runs)?;
            for run in &runs[..count] {
                found(run.start as usize..run.end as usize);
            }
            // The scan stops when the vector is full.
            at = (scan.walk_end as usize).max(at + 1);
        }
        Ok(())
    }

    /// Whether the page at `address` is present, in memory or in swap.
    pub(super) fn is_there(&self, address: usize, page: usize) -> Result<bool, Errno> {
        let empty = abi::page_region {
            start: 0,
            end: 0,
            categories: 0,
        };
        let mut runs = [empty; 1];
        let mut scan = argument(address..address + page);
        scan.category_anyof_mask = u64::from(abi::PAGE_IS_PRESENT | abi::PAGE_IS_SWAPPED);
        scan.return_mask = abi::PAGE_IS_PRESENT.into();
        Ok(self.scan(&mut scan, &mut runs)? > 0)
    }

    fn scan(
        &self,
        scan: &mut abi::pm_scan_arg,
        runs: &mut [abi::page_region],
    ) -> Result<usize, Errno> {
        scan.vec = runs.as_mut_ptr() as u64;
        scan.vec_len = runs.len() as u64;
        // SAFETY: the vector is writable for its length.
        let count = unsafe { ioctl(self.0.as_fd(), SCAN, scan) }?;
        Ok((count as usize).min(runs.len()))
    }
}

fn argument(addresses: Range<usize>) -> abi::pm_scan_arg {
    abi::pm_scan_arg {
        size: size_of::<abi::pm_scan_arg>() as u64,
        flags: 0,
        start: addresses.start as u64,
        end: addresses.end as u64,
        walk_end: 0,
        vec: 0,
        vec_len: 0,
        max_pages: 0,
        category_inverted: 0,
        category_mask: 0,
        category_anyof_mask: 0,
        return_mask: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_that_of_the_header() {
        assert_eq!(SCAN, 0xC060_6610);
    }
}
