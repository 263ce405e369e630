//! Storage of drover's own state files: one trait for a flat directory of files ([`Directory`], [`File`]), its
//! implementation on the host, and a fake for tests that simulates power failures.
//!
//! Built on it: files that remember their first sync error ([`SyncedFile`]), atomic replacement of a small file
//! ([`atomic_replace`]) with a checksum ([`Envelope`]), append-only logs of records ([`record_log`]), and on those a map
//! of runs to states ([`chunk_log`]) and a durable value per chunk ([`chunk_map`]).
//!
//! The meaning of a format belongs to the crate that owns it. Images of users are not read through this crate.
//!
//! The traits are small so that the fake can forget what was not synced: data is durable only after [`File::sync`]
//! (bytes and length) and [`Directory::sync`] (names that were created, renamed or removed).
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
mod disk;
mod envelope;
mod host;
pub mod record_log;
mod replace;

#[cfg(feature = "testing")]
mod fake;

pub use disk::{Disk, HostDisk, SyncedFile};
pub use envelope::{Envelope, EnvelopeError};
#[cfg(feature = "testing")]
pub use fake::{FakeDirectory, Operation};
pub use host::HostDirectory;
pub use replace::{atomic_replace, remove_leftovers, replace, sync_parent};

/// A flat directory of files. A name is one path component; any other is refused as `InvalidInput`.
pub trait Directory: Send + Sync {
    /// Makes a file, or empties the one there is; for reading and writing.
    ///
    /// # Errors
    /// What the medium reports.
    fn create(&self, name: &str) -> io::Result<Box<dyn File>>;

    /// Opens a file that exists.
    ///
    /// # Errors
    /// `NotFound` when there is none; else what the medium reports.
    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn File>>;

    /// Renames a file over `to` in one step.
    ///
    /// # Errors
    /// `NotFound` when there is no `from`; else what the medium reports.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file. Who has it open can go on with it.
    ///
    /// # Errors
    /// `NotFound` when there is none; else what the medium reports.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// The names of all files, in any order.
    ///
    /// # Errors
    /// What the medium reports.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes names durable.
    ///
    /// # Errors
    /// What the medium reports; then it is not known which are.
    fn sync(&self) -> io::Result<()>;

    /// Takes the lock that is the file `name`, made when it is not there, without waiting. Held until the returned
    /// value is dropped or the process ends. A shared lock of a file that is there takes no right to write.
    ///
    /// # Errors
    /// `WouldBlock` when somebody else holds it; else what the medium reports.
    fn lock(&self, name: &str, lock: Lock) -> io::Result<Box<dyn Send + Sync>>;

    /// How a person finds the file, or the directory if the name is empty: for messages only.
    fn describe(&self, name: &str) -> String;
}

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only reading.
    Read,
    /// Reading and writing.
    Write,
}

/// Who else may hold a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Others that share it.
    Shared,
    /// Nobody.
    Exclusive,
}

/// An open file of a [`Directory`], for many threads at once. It stays usable when its name is removed.
pub trait File: Send + Sync {
    /// Reads like `pread`, but fewer bytes than asked for only at the end of the file.
    ///
    /// # Errors
    /// What the medium reports.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all of `data`; the file grows when it must. Who appends knows where the file ends.
    ///
    /// # Errors
    /// What the medium reports; then any part of `data` may have been written.
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()>;

    /// Bytes in the file.
    ///
    /// # Errors
    /// What the medium reports.
    fn len(&self) -> io::Result<u64>;

    /// Whether the file has no bytes.
    ///
    /// # Errors
    /// What the medium reports.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Cuts the file, or lets it grow by a hole.
    ///
    /// # Errors
    /// What the medium reports.
    fn set_len(&self, length: u64) -> io::Result<()>;

    /// Makes a range read as zeros and gives its space back where the medium can; the length stays. Always done: where
    /// there are no holes zeros are written.
    ///
    /// # Errors
    /// What the medium reports.
    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes sure that there is room for a range, so that a later write to it does not find the disk full. What the
    /// range reads as and the length stay.
    ///
    /// # Errors
    /// `StorageFull`; `Unsupported` where the medium cannot promise; else what it reports.
    fn allocate(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes bytes and length durable, not the name. After an error what was written since the last success may be
    /// lost although it can still be read, and a later success says nothing about it.
    ///
    /// # Errors
    /// What the medium reports.
    fn sync(&self) -> io::Result<()>;
}

/// Fills `buffer`, which must be inside the file.
///
/// # Errors
/// `UnexpectedEof` when the file ends before; else what the medium reports.
pub fn read_exact_at(file: &dyn File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    match file.read_at(buffer, offset)? == buffer.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Opens a file; none where there is none.
///
/// # Errors
/// What the medium reports.
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

/// Removes a file; one that is not there is no error.
///
/// # Errors
/// What the medium reports.
pub fn remove_if_exists(directory: &dyn Directory, name: &str) -> io::Result<()> {
    match directory.remove(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// A name must not leave its directory.
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
