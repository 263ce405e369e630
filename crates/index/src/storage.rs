//! Where the index keeps its files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A sync that can be made later, without whoever it was got from.
pub type Syncer = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// A flat directory of files. Names are the index's own: lower-case letters, digits, `-`, `.`.
///
/// What is written is durable only after [`StorageFile::sync`] (bytes and length) or
/// [`sync_names`](Self::sync_names) (created, renamed and removed names).
pub trait Storage: Send {
    /// An open file.
    type File: StorageFile + 'static;

    /// Opens an existing file for reading and writing.
    ///
    /// # Errors
    /// `NotFound` when there is none; else what the medium reports.
    fn open(&self, name: &str) -> io::Result<Self::File>;

    /// Creates a file, or empties the one there is.
    ///
    /// # Errors
    /// What the medium reports.
    fn create(&self, name: &str) -> io::Result<Self::File>;

    /// Renames a file over `to` in one step.
    ///
    /// # Errors
    /// What the medium reports.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file; one that does not exist is no error.
    ///
    /// # Errors
    /// What the medium reports.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Every file's name, in any order.
    ///
    /// # Errors
    /// What the medium reports.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes names durable.
    ///
    /// # Errors
    /// What the medium reports.
    fn sync_names(&self) -> io::Result<()>;

    /// Does the same when it is called; or has done it, and does nothing then.
    ///
    /// # Errors
    /// What the medium reports.
    fn names_syncer(&self) -> io::Result<Syncer> {
        self.sync_names()?;
        Ok(Box::new(|| Ok(())))
    }
}

/// An open file of a [`Storage`]. It stays usable when its name is removed.
pub trait StorageFile: Send {
    /// Reads like `pread`: fewer bytes than asked only at the end.
    ///
    /// # Errors
    /// What the medium reports.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all of `buf`, growing the file when needed.
    ///
    /// # Errors
    /// What the medium reports; then any part of `buf` may have been written.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;

    /// Bytes in the file.
    ///
    /// # Errors
    /// What the medium reports.
    fn size(&self) -> io::Result<u64>;

    /// Cuts or grows (with zeros) the file.
    ///
    /// # Errors
    /// What the medium reports.
    fn set_size(&self, size: u64) -> io::Result<()>;

    /// Makes bytes and length durable.
    ///
    /// # Errors
    /// What the medium reports.
    fn sync(&self) -> io::Result<()>;

    /// Does the same when it is called; or has done it, and does nothing then.
    ///
    /// # Errors
    /// What the medium reports.
    fn syncer(&self) -> io::Result<Syncer> {
        self.sync()?;
        Ok(Box::new(|| Ok(())))
    }
}

/// Files in a directory.
#[derive(Debug, Clone)]
pub struct DirStorage {
    dir: PathBuf,
}

impl DirStorage {
    /// Uses `dir`, making it when it does not exist.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn new(dir: impl Into<PathBuf>) -> io::Result<Self> {
        let dir = dir.into();
        fs::create_dir_all(&dir)?;
        Ok(DirStorage { dir })
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.dir
    }
}

impl Storage for DirStorage {
    type File = File;

    fn open(&self, name: &str) -> io::Result<File> {
        File::options()
            .read(true)
            .write(true)
            .open(self.dir.join(name))
    }

    fn create(&self, name: &str) -> io::Result<File> {
        File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(self.dir.join(name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.dir.join(from), self.dir.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.dir.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            // A name that is not UTF-8 is none of ours.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }

    fn names_syncer(&self) -> io::Result<Syncer> {
        let dir = File::open(&self.dir)?;
        Ok(Box::new(move || dir.sync_all()))
    }
}

impl StorageFile for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match FileExt::read_at(self, &mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(buf, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.set_len(size)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn syncer(&self) -> io::Result<Syncer> {
        let file = self.try_clone()?;
        Ok(Box::new(move || file.sync_data()))
    }
}
