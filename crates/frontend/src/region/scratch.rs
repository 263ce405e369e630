//! Scratch memory for pages that are moved out of a region while others write.

use rustix::io::Errno;

use super::memory::Memory;
use super::uffd::Uffd;

/// Where pages are moved to see whether they are still what they were.
pub(super) struct Scratch {
    pub(super) aside: Memory,
    /// What a piece was.
    pub(super) copy: Vec<u8>,
    /// What was moved.
    pub(super) now: Vec<u8>,
    #[cfg(test)]
    pub(super) trial: Trial,
}

/// What happens during an eviction that hardly ever happens.
#[cfg(test)]
#[derive(Default)]
pub(super) struct Trial {
    /// Writes to the memory after it was copied.
    pub(super) write: Option<Box<dyn FnMut() + Send>>,
    /// So many calls that put a page back are refused.
    pub(super) refusals: u32,
    /// So many calls that move a page aside do not say that they did.
    pub(super) silent: u32,
}

#[cfg(test)]
impl Trial {
    pub(super) fn write(&mut self) {
        if let Some(write) = &mut self.write {
            write();
        }
    }

    pub(super) fn say(&mut self, moved: Result<usize, Errno>) -> Result<usize, Errno> {
        if self.silent == 0 || moved.is_err() {
            return moved;
        }
        self.silent -= 1;
        Ok(0)
    }

    pub(super) fn refuse(&mut self) -> Result<(), Errno> {
        if self.refusals == 0 {
            return Ok(());
        }
        self.refusals -= 1;
        Err(Errno::NOMEM)
    }
}

impl Scratch {
    /// For pieces of `length` bytes.
    pub(super) fn new(uffd: &Uffd, length: usize) -> Result<Self, Errno> {
        let aside = Memory::new(length, true)?;
        uffd.register(aside.address(0), length, false)?;
        Ok(Self {
            aside,
            copy: vec![0; length],
            now: Vec::new(),
            #[cfg(test)]
            trial: Trial::default(),
        })
    }
}
