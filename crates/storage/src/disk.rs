//! Syncing large files that several threads write at once, and dropping them from the page cache; with a trait, so that
//! tests can simulate lost writes.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// A disk. The product uses [`HostDisk`]; tests have others, which lose writes.
pub trait Disk: std::fmt::Debug + Send + Sync {
    /// Returns when the contents of `file` are durable. A loss may be reported only once.
    ///
    /// # Errors
    /// If bytes written since the last call are lost, or may be.
    fn sync_data(&self, file: &File) -> io::Result<()>;

    /// The same, including all metadata of the file.
    ///
    /// # Errors
    /// As [`sync_data`](Self::sync_data).
    fn sync_all(&self, file: &File) -> io::Result<()>;

    /// Drops `file` from the page cache: later reads come from the disk.
    ///
    /// # Errors
    /// If that is not possible.
    fn forget(&self, file: &File) -> io::Result<()>;
}

/// The disks of the host.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostDisk;

impl Disk for HostDisk {
    fn sync_data(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    fn sync_all(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn forget(&self, file: &File) -> io::Result<()> {
        // Only clean pages are dropped. Pages whose write-back failed are clean once the error was reported.
        let _ = file.sync_data();
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
        Ok(())
    }
}

/// A file that keeps the first sync error: the kernel reports a loss once per open file, and the next sync succeeds.
#[derive(Debug)]
pub struct SyncedFile {
    file: File,
    disk: Arc<dyn Disk>,
    lost: OnceLock<io::Error>,
}

impl SyncedFile {
    /// Wraps `file`, of which no loss is known.
    pub fn new(file: File, disk: Arc<dyn Disk>) -> Self {
        SyncedFile {
            file,
            disk,
            lost: OnceLock::new(),
        }
    }

    /// The disk that it is on.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// Makes its contents durable.
    ///
    /// # Errors
    /// If this or an earlier sync reported a loss.
    pub fn sync_data(&self) -> io::Result<()> {
        self.keep(self.disk.sync_data(&self.file))
    }

    /// Makes contents and metadata durable.
    ///
    /// # Errors
    /// As [`sync_data`](Self::sync_data).
    pub fn sync_all(&self) -> io::Result<()> {
        self.keep(self.disk.sync_all(&self.file))
    }

    fn keep(&self, synced: io::Result<()>) -> io::Result<()> {
        if let Err(e) = synced {
            let _ = self.lost.set(e);
        }
        self.lost.get().map_or(Ok(()), |e| Err(copy_of(e)))
    }
}

impl crate::File for SyncedFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        crate::File::read_at(&self.file, buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        crate::File::write_at(&self.file, data, offset)
    }

    fn len(&self) -> io::Result<u64> {
        crate::File::len(&self.file)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        crate::File::punch_hole(&self.file, offset, length)
    }

    fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
        crate::File::allocate(&self.file, offset, length)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

impl Deref for SyncedFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

fn copy_of(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[derive(Debug, Default)]
    struct FailsOnce(AtomicBool);

    impl Disk for FailsOnce {
        fn sync_data(&self, _: &File) -> io::Result<()> {
            match self.0.swap(true, Ordering::Relaxed) {
                false => Err(io::Error::from_raw_os_error(5)),
                true => Ok(()),
            }
        }
        fn sync_all(&self, file: &File) -> io::Result<()> {
            self.sync_data(file)
        }
        fn forget(&self, _: &File) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_loss_that_was_reported_once_is_reported_from_then_on() {
        let file = SyncedFile::new(tempfile::tempfile().unwrap(), Arc::<FailsOnce>::default());
        for _ in 0..3 {
            assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(5));
            assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(5));
        }
    }
}
