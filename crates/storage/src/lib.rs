//! Storage of drover's own state files: one trait for a flat directory of files ([`Directory`], [`File`]), its
//! implementation on the host, and a fake for tests that simulates power failures.
//!
//! Built on it: files that remember their first sync error ([`SyncedFile`]), atomic replacement of a small file
//! ([`atomic_replace`]) with a checksum ([`Envelope`]), append-only logs of records ([`record_log`]), and on those a
//! map of runs to states ([`chunk_log`]) and a durable value per chunk ([`chunk_map`]).
//!
//! With the feature `s3`, `cloud` has prefixes in object stores.
//!
//! The meaning of a format belongs to the crate that owns it. Images of users are not read through this crate.
//!
//! The traits are small so that the fake can lose unsynced data: data is durable only after [`File::sync`] (contents
//! and length) and [`Directory::sync`] (names created, renamed or removed).
//!
//! ```
//! use std::sync::Arc;
//!
//! use drover_storage::chunk_log::{ChunkLog, Record};
//! use drover_storage::HostDirectory;
//!
//! let temporary = tempfile::tempdir()?;
//! let directory = Arc::new(HostDirectory::open(temporary.path())?);
//! let mut log = ChunkLog::create(directory.clone(), "map", b"owner's header")?;
//! log.append(&[Record { first: 7, count: 3, state: 1, mask: 0 }])?;
//! log.sync()?;
//!
//! let mut records = Vec::new();
//! ChunkLog::open(directory, "map")?.replay(|record| {
//!     records.push(record);
//!     Ok(())
//! })?;
//! assert_eq!((records[0].first, records[0].count), (7, 3));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::io;

pub mod chunk_log;
pub mod chunk_map;
#[cfg(feature = "s3")]
pub mod cloud;
mod disk;
mod envelope;
mod host;
pub mod record_log;
mod replace;

#[cfg(feature = "testing")]
mod fake;
#[cfg(all(feature = "s3", feature = "testing"))]
pub mod testing;

pub use disk::{Disk, HostDisk, SyncedFile};
pub use envelope::{Envelope, EnvelopeError};
#[cfg(feature = "testing")]
pub use fake::{FakeDirectory, Operation};
pub use host::{HostDirectory, create_private, make_private_dir, open_private};
pub use replace::{atomic_replace, remove_leftovers, replace, sync_parent};

/// A flat directory of files. A name is one path component; any other is refused with `InvalidInput`.
pub trait Directory: Send + Sync {
    /// Creates or truncates a file, open for reading and writing.
    ///
    /// # Errors
    /// Errors of the medium.
    fn create(&self, name: &str) -> io::Result<Box<dyn File>>;

    /// Opens an existing file.
    ///
    /// # Errors
    /// `NotFound` if there is none; else errors of the medium.
    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn File>>;

    /// Renames a file over `to` atomically.
    ///
    /// # Errors
    /// `NotFound` if `from` does not exist; else errors of the medium.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file. It stays usable through open handles.
    ///
    /// # Errors
    /// `NotFound` if there is none; else errors of the medium.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// The names of all files, in any order.
    ///
    /// # Errors
    /// Errors of the medium.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes names durable.
    ///
    /// # Errors
    /// Errors of the medium; it is unknown then which names are durable.
    fn sync(&self) -> io::Result<()>;

    /// Locks the file `name`, created if necessary, without waiting. Held until the returned value is dropped or the
    /// process ends. A shared lock on an existing file needs no write permission.
    ///
    /// # Errors
    /// `WouldBlock` if the lock is held elsewhere; else errors of the medium.
    fn lock(&self, name: &str, lock: Lock) -> io::Result<Box<dyn Send + Sync>>;

    /// The path of a file, or of the directory if the name is empty: for messages only.
    fn describe(&self, name: &str) -> String;
}

/// Access mode of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// Read and write.
    Write,
}

/// The kind of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Shared with other holders of shared locks.
    Shared,
    /// Exclusive.
    Exclusive,
}

/// An open file of a [`Directory`], usable from many threads at once. It stays usable when its name is removed.
pub trait File: Send + Sync {
    /// Reads like `pread`; returns fewer bytes than requested only at the end of the file.
    ///
    /// # Errors
    /// Errors of the medium.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all of `data`, growing the file if necessary. Appending is up to the caller, who tracks the end.
    ///
    /// # Errors
    /// Errors of the medium; any part of `data` may have been written then.
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()>;

    /// Length of the file in bytes.
    ///
    /// # Errors
    /// Errors of the medium.
    fn len(&self) -> io::Result<u64>;

    /// Whether the file is empty.
    ///
    /// # Errors
    /// Errors of the medium.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Truncates the file, or extends it with a hole.
    ///
    /// # Errors
    /// Errors of the medium.
    fn set_len(&self, length: u64) -> io::Result<()>;

    /// Makes a range read as zeros and deallocates it where the medium can; the length is unchanged. Never unsupported:
    /// without holes, zeros are written.
    ///
    /// # Errors
    /// Errors of the medium.
    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Allocates space for a range, so that a later write to it does not find the disk full. Contents and length are
    /// unchanged.
    ///
    /// # Errors
    /// `StorageFull`; `Unsupported` where the medium cannot guarantee it; else errors of the medium.
    fn allocate(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes contents and length durable, not the name. After an error, data written since the last success may be lost
    /// although it can still be read, and a later success does not cover it.
    ///
    /// # Errors
    /// Errors of the medium.
    fn sync(&self) -> io::Result<()>;
}

/// Fills `buffer` from a range that must lie inside the file.
///
/// # Errors
/// `UnexpectedEof` if the file is shorter; else errors of the medium.
pub fn read_exact_at(file: &dyn File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    match file.read_at(buffer, offset)? == buffer.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Opens a file; none if it does not exist.
///
/// # Errors
/// Errors of the medium.
pub fn open_if_exists(
    directory: &dyn Directory,
    name: &str,
    access: Access,
) -> io::Result<Option<Box<dyn File>>> {
    match directory.open(name, access) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Removes a file; a missing one is not an error.
///
/// # Errors
/// Errors of the medium.
pub fn remove_if_exists(directory: &dyn Directory, name: &str) -> io::Result<()> {
    match directory.remove(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// A name must not escape its directory.
fn check_name(name: &str) -> io::Result<()> {
    let fine = !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0']);
    match fine {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name:?} is no name of a file"),
        )),
    }
}

#[cfg(test)]
mod tests;
