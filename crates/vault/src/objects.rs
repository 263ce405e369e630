//! Where a vault keeps its objects. Every object is written once and never changed: all that a vault does rests on
//! that, and on [`Objects::create`] refusing a key that exists.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use drover_storage::{make_private_dir, sync_parent};
use parking_lot::Mutex;

use crate::error::{StoreError, VaultError};

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: String,
    /// Its length in bytes.
    pub size: u64,
    /// When it was written, by the store's clock, in milliseconds since 1970.
    pub modified_ms: i64,
}

/// A store of objects, blocking. A key is `/`-separated; a prefix consists of whole components.
///
/// An operation MUST be atomic, durable when it returns, and seen by every operation that begins later, whoever asks.
pub trait Objects: Send + Sync {
    /// Writes an object, unless the key exists; whether it was written. After an error it may have been written.
    ///
    /// # Errors
    /// What the store says.
    fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError>;

    /// An object; none if it does not exist.
    ///
    /// # Errors
    /// What the store says.
    fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError>;

    /// Part of an object, as far as it goes; none if it does not exist.
    ///
    /// # Errors
    /// What the store says.
    fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, StoreError>;

    /// Every object below a prefix, in any order.
    ///
    /// # Errors
    /// What the store says.
    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError>;

    /// Removes an object; one that does not exist is no error.
    ///
    /// # Errors
    /// What the store says.
    fn remove(&self, key: &str) -> Result<(), StoreError>;

    /// Where it is, for messages.
    fn describe(&self) -> String;

    /// Removes what interrupted writes have left, if it is older; how many.
    ///
    /// # Errors
    /// What the store says.
    fn sweep(&self, older: Duration) -> Result<u64, StoreError> {
        let _ = older;
        Ok(0)
    }
}

/// Where objects are until they are complete, in the directory of a vault.
const UNFINISHED: &str = ".unfinished";

/// A vault in a directory: a file for each object, private to its user. An object is written beside and gets its name
/// by a hard link, which fails if the name exists; file and directory are synced before it counts.
#[derive(Debug)]
pub struct LocalObjects {
    root: PathBuf,
    /// Directories that are durable.
    made: Mutex<HashSet<PathBuf>>,
}

impl LocalObjects {
    /// The directory `root`, which must exist.
    ///
    /// # Errors
    /// When it is no directory that can be read.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        let objects = LocalObjects {
            root: root.to_path_buf(),
            made: Mutex::new(HashSet::new()),
        };
        match fs::read_dir(root) {
            Ok(_) => Ok(objects),
            Err(error) => Err(objects.error("open", "the directory", &error)),
        }
    }

    fn error(&self, doing: &'static str, key: &str, error: &io::Error) -> StoreError {
        StoreError {
            doing,
            key: key.to_owned(),
            vault: self.describe(),
            why: match drover_core::is_disk_full(error) {
                true => "the disk is full".into(),
                false => error.to_string(),
            },
            can_retry: error.kind() != io::ErrorKind::PermissionDenied,
            is_damage: false,
        }
    }

    /// The file of an object; never outside of the vault, nor one that is unfinished.
    fn path(&self, key: &str) -> io::Result<PathBuf> {
        match key
            .split('/')
            .all(|part| !part.is_empty() && !part.starts_with('.'))
        {
            true => Ok(self.root.join(key)),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no key")),
        }
    }

    /// Creates a directory and those above it, durably.
    fn make(&self, directory: &Path) -> io::Result<()> {
        if directory == self.root || self.made.lock().contains(directory) {
            return Ok(());
        }
        if let Some(parent) = directory.parent() {
            self.make(parent)?;
        }
        if !directory.is_dir() {
            make_private_dir(directory)?;
        }
        // It may have been created by somebody who has not synced yet.
        sync_parent(directory)?;
        self.made.lock().insert(directory.to_path_buf());
        Ok(())
    }

    fn try_create(&self, key: &str, bytes: &[u8]) -> io::Result<bool> {
        let path = self.path(key)?;
        let unfinished = self.root.join(UNFINISHED);
        self.make(&unfinished)?;
        self.make(path.parent().unwrap_or(&self.root))?;
        let temporary = unfinished.join(format!("{:016x}", fastrand::u64(..)));
        let write = || {
            let mut file = File::options()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            match fs::hard_link(&temporary, &path) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(error) => Err(error),
            }
        };
        let written = write();
        // Best effort: a leftover only takes space, and is swept later.
        let _ = fs::remove_file(&temporary);
        let written = written?;
        // Also if it was there: whoever created it may not have synced yet.
        sync_parent(&path)?;
        Ok(written)
    }

    fn collect(&self, directory: &Path, key: &str, out: &mut Vec<Listed>) -> io::Result<()> {
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else {
                continue;
            };
            let key = format!("{key}/{name}");
            let meta = match entry.metadata() {
                // Removed since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                meta => meta?,
            };
            if meta.is_dir() {
                self.collect(&entry.path(), &key, out)?;
            } else if meta.is_file() {
                let since = meta.modified()?.duration_since(UNIX_EPOCH);
                out.push(Listed {
                    key,
                    size: meta.len(),
                    modified_ms: since
                        .map_or(0, |t| i64::try_from(t.as_millis()).unwrap_or(i64::MAX)),
                });
            }
        }
        Ok(())
    }

    fn read<T>(
        &self,
        key: &str,
        read: impl FnOnce(&File) -> io::Result<T>,
    ) -> Result<Option<T>, StoreError> {
        match self
            .path(key)
            .and_then(File::open)
            .and_then(|file| read(&file))
        {
            Ok(got) => Ok(Some(got)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.error("read", key, &error)),
        }
    }
}

impl Objects for LocalObjects {
    fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        self.try_create(key, &bytes)
            .map_err(|error| self.error("write", key, &error))
    }

    fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        self.read(key, |file| read_range(file, 0..u64::MAX))
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        self.read(key, |file| read_range(file, range))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let mut out = Vec::new();
        self.path(prefix)
            .and_then(|path| self.collect(&path, prefix, &mut out))
            .map_err(|error| self.error("list", prefix, &error))?;
        Ok(out)
    }

    fn remove(&self, key: &str) -> Result<(), StoreError> {
        let removed = self.path(key).and_then(|path| {
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                removed => removed?,
            }
            sync_parent(&path)
        });
        removed.map_err(|error| self.error("remove", key, &error))
    }

    fn describe(&self) -> String {
        self.root.display().to_string()
    }

    fn sweep(&self, older: Duration) -> Result<u64, StoreError> {
        let mut swept = 0;
        for entry in fs::read_dir(self.root.join(UNFINISHED))
            .into_iter()
            .flatten()
            .flatten()
        {
            let modified = entry.metadata().and_then(|meta| meta.modified());
            let age = modified
                .ok()
                .and_then(|m| SystemTime::now().duration_since(m).ok());
            if age.is_some_and(|age| age >= older) && fs::remove_file(entry.path()).is_ok() {
                swept += 1;
            }
        }
        Ok(swept)
    }
}

/// Writes an object whose key belongs to its writer alone: if it exists, an answer was lost.
pub(crate) fn put_own(objects: &dyn Objects, key: &str, bytes: Vec<u8>) -> Result<(), VaultError> {
    let bytes = Bytes::from(bytes);
    if objects.create(key, bytes.clone())? || objects.get(key)?.as_ref() == Some(&bytes) {
        return Ok(());
    }
    Err(VaultError::Damaged {
        key: key.to_owned(),
        vault: objects.describe(),
        why: "it exists with another content".into(),
    })
}

/// An object of at most `max` bytes; of a longer one the first `max` + 1, which no decoder takes.
pub(crate) fn get_at_most(
    objects: &dyn Objects,
    key: &str,
    max: u64,
) -> Result<Option<Bytes>, StoreError> {
    objects.get_range(key, 0..max + 1)
}

/// Bytes of a file, as far as it goes.
fn read_range(file: &File, range: Range<u64>) -> io::Result<Bytes> {
    let end = range.end.min(file.metadata()?.len());
    let mut bytes = vec![0; usize::try_from(end.saturating_sub(range.start)).unwrap_or(0)];
    file.read_exact_at(&mut bytes, range.start)?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let objects = LocalObjects::open(dir.path()).unwrap();
        assert!(
            objects
                .create("a/b/c", Bytes::from_static(b"first"))
                .unwrap()
        );
        assert!(
            !objects
                .create("a/b/c", Bytes::from_static(b"second"))
                .unwrap()
        );
        assert_eq!(objects.get("a/b/c").unwrap().unwrap(), "first");
        assert_eq!(objects.get_range("a/b/c", 1..3).unwrap().unwrap(), "ir");
        assert_eq!(objects.get_range("a/b/c", 3..30).unwrap().unwrap(), "st");
        assert_eq!(objects.get("a/b/d").unwrap(), None);
        let listed = objects.list("a").unwrap();
        assert_eq!(
            (listed[0].key.as_str(), listed[0].size, listed.len()),
            ("a/b/c", 5, 1)
        );
        assert_eq!(objects.list("x").unwrap(), []);
        for key in ["", "../x", "a//b", ".unfinished/x", "/etc/passwd"] {
            assert!(objects.create(key, Bytes::new()).is_err(), "{key}");
        }
        objects.remove("a/b/c").unwrap();
        objects.remove("a/b/c").unwrap();
        assert_eq!(objects.list("a").unwrap(), []);
        fs::write(dir.path().join(UNFINISHED).join("0"), b"half").unwrap();
        assert_eq!(objects.sweep(Duration::from_secs(3600)).unwrap(), 0);
        assert_eq!(objects.sweep(Duration::ZERO).unwrap(), 1);
    }
}
