//! Scratch memory for pages that are moved out of a region while others write.

use rustix::io::Errno;

use super::memory::Memory;
use super::uffd::Uffd;

/// Memory to which pages are moved in order to compare them with their copy.
pub(super) struct Scratch {
    pub(super) aside: Memory,
    /// The copy of a piece.
    pub(super) copy: Vec<u8>,
    /// The moved contents.
    pub(super) now: Vec<u8>,
    #[cfg(test)]
    pub(super) trial: Trial,
}

/// Injects rare events into an eviction.
#[cfg(test)]
#[derive(Default)]
pub(super) struct Trial {
    /// Writes to the memory after it was copied.
    pub(super) write: Option<Box<dyn FnMut() + Send>>,
    /// The number of put-back calls to fail.
    pub(super) refusals: u32,
    /// The number of move calls whose success is not reported.
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
