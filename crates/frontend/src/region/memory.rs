//! The address range of a region.
#![allow(unsafe_code)] // Mappings are made and copied by address.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Anonymous memory, owned until dropped.
pub(super) struct Memory {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; `Region` coordinates reads and writes of it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Reserves `length` bytes, a nonzero multiple of the page size.
    pub(super) fn new(length: usize, writable: bool) -> Result<Self, Errno> {
        let mut access = ProtFlags::READ;
        if writable {
            access |= ProtFlags::WRITE;
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses an unused address range.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, access, flags) }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        let memory = Self { base, length };
        // Faults and dirty bits are per page; a child would see zeros instead of absent pages.
        memory.advise(0, length, Advice::LinuxNoHugepage)?;
        memory.advise(0, length, Advice::LinuxDontFork)?;
        Ok(memory)
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// The address of an offset.
    pub(super) fn address(&self, offset: usize) -> usize {
        debug_assert!(offset <= self.length);
        self.base.as_ptr() as usize + offset
    }

    /// The offset of an address inside.
    pub(super) fn offset(&self, address: usize) -> Option<usize> {
        address
            .checked_sub(self.base.as_ptr() as usize)
            .filter(|offset| *offset < self.length)
    }

    /// Drops the pages: absent from now on.
    ///
    /// # Safety
    /// Nothing may rely on their contents.
    pub(super) unsafe fn discard(&self, offset: usize, length: usize) -> Result<(), Errno> {
        self.advise(offset, length, Advice::LinuxDontNeed)
    }

    /// Makes every touch a `SIGSEGV` and frees the memory; the addresses stay reserved.
    ///
    /// # Safety
    /// There must be no reference into it, and no later access through a pointer.
    pub(super) unsafe fn close(&self) -> Result<(), Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let access = ProtFlags::empty();
        // SAFETY: the range is ours; the caller guarantees that nobody uses it.
        unsafe { mmap_anonymous(self.base().cast(), self.length, access, flags) }.map(drop)
    }

    /// Copies out.
    ///
    /// # Safety
    /// The range must be inside, the memory not closed, and nobody may write it meanwhile.
    pub(super) unsafe fn read(&self, offset: usize, buffer: &mut [u8]) {
        assert!(offset <= self.length && buffer.len() <= self.length - offset);
        // SAFETY: checked above, and the caller's.
        unsafe {
            let from = self.base().add(offset);
            std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), buffer.len());
        }
    }

    /// Copies in.
    ///
    /// # Safety
    /// The range must be inside and writable, the memory not closed, and nobody may read or write it meanwhile.
    pub(super) unsafe fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset <= self.length && data.len() <= self.length - offset);
        // SAFETY: checked above, and the caller's.
        unsafe {
            let to = self.base().add(offset);
            std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
        }
    }

    /// Copies whole words out while others may write them: each word is old or new, never torn.
    ///
    /// # Safety
    /// The range must be inside, its length a multiple of eight bytes, and the memory not closed.
    pub(super) unsafe fn read_racing(&self, offset: usize, buffer: &mut [u8]) {
        assert!(offset.is_multiple_of(8) && buffer.len().is_multiple_of(8));
        assert!(offset <= self.length && buffer.len() <= self.length - offset);
        for (index, word) in buffer.chunks_exact_mut(8).enumerate() {
            // SAFETY: inside and aligned, since the base is page-aligned. Atomic, as others may write.
            let now = unsafe {
                AtomicU64::from_ptr(self.base().add(offset + index * 8).cast())
                    .load(Ordering::Relaxed)
            };
            word.copy_from_slice(&now.to_ne_bytes());
        }
    }

    fn advise(&self, offset: usize, length: usize, advice: Advice) -> Result<(), Errno> {
        assert!(offset <= self.length && length <= self.length - offset);
        // SAFETY: inside the mapping, which is ours; only `discard` changes its contents, under its caller's contract.
        unsafe { madvise(self.base().add(offset).cast(), length, advice) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and unreachable from now on.
        let result = unsafe { munmap(self.base().cast(), self.length) };
        debug_assert!(result.is_ok(), "munmap: {result:?}");
    }
}
