//! The implementation on the host's file systems.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::{Access, Directory, File, Lock, check_name};

/// Zeros to write where the file system cannot zero a range.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Opens a file for reading and writing; creates it, private to this user, if it does not exist.
///
/// # Errors
/// Errors of the file system.
pub fn open_private(path: &Path) -> io::Result<std::fs::File> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

/// Creates a file, private to this user, for reading and writing; truncates it if it exists.
///
/// # Errors
/// Errors of the file system.
pub fn create_private(path: &Path) -> io::Result<std::fs::File> {
    let file = open_private(path)?;
    file.set_len(0)?;
    Ok(file)
}

/// Creates a directory, private to this user, with missing parents. One that exists is left as it is.
///
/// # Errors
/// Errors of the file system.
pub fn make_private_dir(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
}

/// A directory of the host, held open: it can be renamed while in use.
#[derive(Debug)]
pub struct HostDirectory {
    fd: OwnedFd,
    /// Its path when it was opened, for messages.
    path: PathBuf,
}

impl HostDirectory {
    /// Opens an existing directory.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self {
            fd,
            path: path.into(),
        })
    }

    /// Opens a directory; creates it (durably, private to this user, with missing parents) if necessary.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open_or_create(path: &Path) -> io::Result<Self> {
        match Self::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => return result,
        }
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let above = Self::open_or_create(parent)?;
        make_private_dir(path)?;
        above.sync()?;
        Self::open(path)
    }

    /// Its path when it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn open_file(&self, name: &str, flags: OFlags) -> io::Result<std::fs::File> {
        check_name(name)?;
        // Symbolic links are not followed: they could lead anywhere.
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = retry_on_intr(|| rustix::fs::openat(&self.fd, name, flags, Mode::from(0o600)))?;
        Ok(fd.into())
    }
}

impl Directory for HostDirectory {
    fn create(&self, name: &str) -> io::Result<Box<dyn File>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
        Ok(Box::new(self.open_file(name, flags)?))
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn File>> {
        let flags = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
        };
        Ok(Box::new(self.open_file(name, flags)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        check_name(from)?;
        check_name(to)?;
        Ok(rustix::fs::renameat(&self.fd, from, &self.fd, to)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        Ok(rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())?)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            let entry = entry?;
            if entry.file_type() == FileType::Directory {
                continue;
            }
            // Names that are not UTF-8 are not drover's.
            if let Ok(name) = entry.file_name().to_str() {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::fsync(&self.fd))?)
    }

    fn lock(&self, name: &str, lock: Lock) -> io::Result<Box<dyn Send + Sync>> {
        let make = || self.open_file(name, OFlags::RDWR | OFlags::CREATE);
        let file = match lock {
            // A reader may lack write permission, or the file system may be read-only.
            Lock::Shared => match self.open_file(name, OFlags::RDONLY) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => make()?,
                opened => opened?,
            },
            Lock::Exclusive => make()?,
        };
        let operation = match lock {
            Lock::Shared => FlockOperation::NonBlockingLockShared,
            Lock::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        rustix::fs::flock(&file, operation)?;
        Ok(Box::new(HeldLock(file)))
    }

    fn describe(&self, name: &str) -> String {
        match name {
            "" => self.path.display().to_string(),
            _ => self.path.join(name).display().to_string(),
        }
    }
}

/// Unlocks when dropped. Closing the file would not do: a child that another thread has just forked has it open too,
/// until it runs its program.
struct HeldLock(std::fs::File);

impl Drop for HeldLock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

fn fallocate(
    file: &std::fs::File,
    flags: FallocateFlags,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    match retry_on_intr(|| rustix::fs::fallocate(file, flags, offset, length)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV) => {
            Err(io::ErrorKind::Unsupported.into())
        }
        result => Ok(result?),
    }
}

impl File for std::fs::File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match FileExt::read_at(self, &mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(data, offset)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        std::fs::File::set_len(self, length)
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(self, flags, offset, length) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            result => return result,
        }
        let end = offset.saturating_add(length).min(File::len(self)?);
        let mut at = offset;
        while at < end {
            let take = (end - at).min(ZEROS.len() as u64) as usize;
            self.write_all_at(&ZEROS[..take], at)?;
            at += take as u64;
        }
        Ok(())
    }

    fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
        match length {
            0 => Ok(()),
            _ => fallocate(self, FallocateFlags::KEEP_SIZE, offset, length),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}
