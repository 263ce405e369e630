//! The files of the audit log: `audit.log`, and the older `audit.log.1` to `audit.log.4`.
//!
//! Several processes write. A line is one write in append mode, which needs no lock. Whoever finds [`MAX_FILE_BYTES`] in
//! the file renames it, under a lock on the file itself; who has opened it before may still add a line to it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The length from which a file is renamed.
pub const MAX_FILE_BYTES: u64 = 8 << 20;

/// How many renamed files are kept.
pub const OLD_FILES: u32 = 4;

/// Upper bound on a line, with its newline: so much is written in one piece.
pub const MAX_LINE_BYTES: usize = 4096;

/// The name of the newest file.
const NAME: &str = "audit.log";

/// The files in a directory.
#[derive(Debug, Clone)]
pub struct Log {
    dir: PathBuf,
    path: PathBuf,
    /// [`MAX_FILE_BYTES`], less in tests.
    max: u64,
}

impl Log {
    /// The log in this directory.
    pub fn new(dir: &Path) -> Log {
        Log::with_limit(dir, MAX_FILE_BYTES)
    }

    /// The same with files of another length.
    pub fn with_limit(dir: &Path, max: u64) -> Log {
        Log {
            dir: dir.to_owned(),
            path: dir.join(NAME),
            max,
        }
    }

    /// The newest file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that has been renamed `age` times.
    pub fn old(&self, age: u32) -> PathBuf {
        match age {
            0 => self.path.clone(),
            age => self.dir.join(format!("{NAME}.{age}")),
        }
    }

    /// Appends a line, which ends in a newline.
    ///
    /// # Errors
    /// When the file cannot be written; a part of the line may be in it.
    pub fn append(&self, line: &[u8]) -> io::Result<()> {
        let mut file = self.open()?;
        if file.metadata()?.len() >= self.max {
            self.rename(&file)?;
            file = self.open()?;
        }
        let length = file.metadata()?.len();
        let line = match is_torn(&file, length)? {
            true => &[b"\n", line].concat(),
            false => line,
        };
        let written = loop {
            match file.write(line) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                written => break written?,
            }
        };
        match written < line.len() {
            true => Err(ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }

    fn open(&self) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(&self.path)
    }

    /// Makes the file the first of the older ones, unless another process does or has done so.
    fn rename(&self, file: &File) -> io::Result<()> {
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(()),
            Err(TryLockError::Error(e)) => return Err(e),
        }
        match fs::metadata(&self.path) {
            Ok(now) if identity(&now) == identity(&file.metadata()?) => {}
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => return Ok(()),
        }
        for age in (0..OLD_FILES).rev() {
            match fs::rename(self.old(age), self.old(age + 1)) {
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                renamed => renamed?,
            }
        }
        Ok(())
    }
}

/// What tells one file from another, whatever it is called.
pub fn identity(about: &fs::Metadata) -> (u64, u64) {
    (about.dev(), about.ino())
}

/// Whether the file ends within a line: the disk was full, or a process was killed.
fn is_torn(file: &File, length: u64) -> io::Result<bool> {
    let mut last = [b'\n'];
    match length {
        0 => return Ok(false),
        length => drop(file.read_at(&mut last, length - 1)?),
    }
    Ok(last != [b'\n'])
}
