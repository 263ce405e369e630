//! `known.log`: image files that a site knows, with what is noted of each to choose similar ones. They are its images, and files that
//! are indexed when a similar image is sent (`docs/format/known-files.md`).
//!
//! All of it is a hint: what is lost is noted again from the files.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_image::Stamp;
use drover_storage::record_log::RecordLog;
use drover_storage::{Access, Directory, HostDirectory, open_if_exists, read_exact_at, replace};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::StoreError;
use crate::likeness::{Likeness, MAX_LIKENESS_BYTES};

/// Upper bound on the files that a site knows without having indexed them.
pub const MAX_KNOWN_FILES: usize = 10_000;

/// Upper bound on the log: every file at its largest, and as many records that others took the place of.
const MAX_LOG_BYTES: u64 = 256 << 20;

const NAME: &str = "known.log";
const TEMPORARY: &str = "known.tmp";
const MAGIC: &[u8; 8] = b"DRVRKNWN";
const VERSION: u32 = 1;
const HEADER: usize = 12;

/// Length and checksum in front of a record.
const FRAME: usize = 8;

/// Upper bound on a record: a path, the likeness, some numbers.
const MAX_RECORD: usize = MAX_LIKENESS_BYTES + 4096 + 256;

/// Superfluous records that are allowed before the log is written anew.
const SLACK: usize = 1000;

/// An image file that a site knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownFile {
    /// Its absolute path.
    pub path: PathBuf,
    /// Its stamp when it was looked at: if it has another one now, what is noted may be wrong.
    pub stamp: Stamp,
    /// Container format, as named by the `image` crate.
    pub format: String,
    /// The virtual disk size in bytes.
    pub virtual_bytes: u64,
    /// When it was looked at, seconds since 1970.
    pub looked_unix: i64,
    /// Whether it is to be indexed when a similar image is sent; else it is noted as an image of the site only.
    pub offered: bool,
    /// What is noted of it.
    pub likeness: Likeness,
}

/// A record: what is known of a file now.
#[derive(Serialize, Deserialize)]
struct Record {
    path: Vec<u8>,
    /// Nothing any more.
    about: Option<About>,
}

#[derive(Serialize, Deserialize)]
struct About {
    /// Device, inode, size.
    stamp: [u64; 3],
    /// Times of the last modification and change.
    times_ns: [i128; 2],
    format: String,
    virtual_bytes: u64,
    looked_unix: i64,
    offered: bool,
    likeness: Vec<u8>,
}

impl Record {
    fn put(file: &KnownFile) -> Self {
        let stamp = &file.stamp;
        Record {
            path: file.path.as_os_str().as_bytes().to_vec(),
            about: Some(About {
                stamp: [stamp.device, stamp.inode, stamp.size],
                times_ns: [stamp.mtime_ns, stamp.ctime_ns],
                format: file.format.clone(),
                virtual_bytes: file.virtual_bytes,
                looked_unix: file.looked_unix,
                offered: file.offered,
                likeness: file.likeness.encode(),
            }),
        }
    }

    fn remove(path: &Path) -> Self {
        Record {
            path: path.as_os_str().as_bytes().to_vec(),
            about: None,
        }
    }

    /// The file's path, and what is known of it.
    fn read(self) -> Option<(PathBuf, Option<KnownFile>)> {
        let path = PathBuf::from(std::ffi::OsString::from_vec(self.path));
        let Some(about) = self.about else {
            return Some((path, None));
        };
        let ([device, inode, size], [mtime_ns, ctime_ns]) = (about.stamp, about.times_ns);
        let file = KnownFile {
            path: path.clone(),
            stamp: Stamp {
                device,
                inode,
                size,
                mtime_ns,
                ctime_ns,
            },
            format: about.format,
            virtual_bytes: about.virtual_bytes,
            looked_unix: about.looked_unix,
            offered: about.offered,
            // Of another version: it is looked at again.
            likeness: Likeness::decode(&about.likeness)?,
        };
        Some((path, Some(file)))
    }

    fn encode(&self) -> Vec<u8> {
        let body = drover_net::encode(self);
        let mut out = Vec::with_capacity(FRAME + body.len());
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(&sum(&body).to_le_bytes());
        out.extend_from_slice(&body);
        out
    }
}

fn sum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

type Files = BTreeMap<PathBuf, Arc<KnownFile>>;

/// The result of reading a log.
#[derive(Default)]
struct Replayed {
    files: Files,
    records: usize,
    /// Where the last whole record ends; 0 without a header.
    end: u64,
}

/// Reads a log: any bytes.
fn replay(bytes: &[u8]) -> Replayed {
    let mut found = Replayed::default();
    let sound = bytes.starts_with(MAGIC) && bytes.get(8..HEADER) == Some(&VERSION.to_le_bytes());
    if !sound {
        return found;
    }
    let mut rest = &bytes[HEADER..];
    loop {
        found.end = (bytes.len() - rest.len()) as u64;
        let Some((frame, after)) = rest.split_at_checked(FRAME) else {
            return found;
        };
        let word = |at: usize| frame[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
        let body = after.split_at_checked(word(0) as usize);
        let body = body.filter(|(body, _)| body.len() <= MAX_RECORD);
        let Some((body, after)) = body.filter(|(body, _)| cfg!(fuzzing) || sum(body) == word(4))
        else {
            return found;
        };
        rest = after;
        found.records += 1;
        // A record that cannot be read is skipped: its file is looked at again.
        let record = drover_net::decode::<Record>(body).ok();
        match record.and_then(Record::read) {
            Some((path, Some(file))) => drop(found.files.insert(path, Arc::new(file))),
            Some((path, None)) => drop(found.files.remove(&path)),
            None => {}
        }
    }
}

fn read(directory: &dyn Directory) -> io::Result<Replayed> {
    let Some(file) = open_if_exists(directory, NAME, Access::Read)? else {
        return Ok(Replayed::default());
    };
    let length = file.len()?;
    if length > MAX_LOG_BYTES {
        return Ok(Replayed::default());
    }
    let mut bytes = vec![0; length as usize];
    match read_exact_at(&*file, &mut bytes, 0) {
        // It was written anew meanwhile.
        Err(e) if e.kind() != io::ErrorKind::UnexpectedEof => Err(e),
        _ => Ok(replay(&bytes)),
    }
}

struct State {
    files: Files,
    /// `None` after a failure.
    log: Option<RecordLog>,
    records: usize,
}

/// The files that a site knows. One process writes them; others may read.
pub struct KnownFiles {
    directory: Arc<dyn Directory>,
    state: Mutex<State>,
}

impl KnownFiles {
    /// Opens the log in a directory, to write it. What cannot be read of it is lost.
    ///
    /// # Errors
    /// When the directory cannot be used.
    pub fn open(directory: Arc<dyn Directory>) -> Result<Self, StoreError> {
        let failed = |e| StoreError::file("read", directory.describe(NAME))(e);
        let found = read(&*directory).map_err(failed)?;
        let known = KnownFiles {
            state: Mutex::new(State {
                files: found.files,
                log: None,
                records: found.records,
            }),
            directory,
        };
        if found.end > 0 {
            let reopen = || {
                let file = known.directory.open(NAME, Access::Write)?;
                RecordLog::reopen(file.into(), found.end)
            };
            // It is written anew with the next change.
            known.state.lock().log = reopen().ok();
        }
        Ok(known)
    }

    /// The files that the site with its state in `directory` knows, whether it runs or not.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn of_site(directory: &Path) -> Result<Vec<Arc<KnownFile>>, StoreError> {
        let files = HostDirectory::open(directory).and_then(|directory| read(&directory));
        match files {
            Ok(found) => Ok(found.files.into_values().collect()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(StoreError::file("read", directory.join(NAME))(e)),
        }
    }

    /// All files, by path.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<KnownFile>> {
        self.state.lock().files.values().cloned().collect()
    }

    /// What is known of the file at a path.
    #[must_use]
    pub fn get(&self, path: &Path) -> Option<Arc<KnownFile>> {
        self.state.lock().files.get(path).cloned()
    }

    /// Notes files, durably on return.
    ///
    /// # Errors
    /// When the log cannot be written. They are known until the site stops nevertheless.
    pub fn put(&self, files: Vec<KnownFile>) -> Result<(), StoreError> {
        let records: Vec<Record> = files.iter().map(Record::put).collect();
        let mut state = self.state.lock();
        for file in files {
            state.files.insert(file.path.clone(), Arc::new(file));
        }
        self.write(&mut state, &records)
    }

    /// Forgets the file at a path; one that is not known is no error.
    ///
    /// # Errors
    /// When the log cannot be written.
    pub fn remove(&self, path: &Path) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        match state.files.remove(path) {
            Some(_) => self.write(&mut state, &[Record::remove(path)]),
            None => Ok(()),
        }
    }

    fn write(&self, state: &mut State, records: &[Record]) -> Result<(), StoreError> {
        let failed = |e| StoreError::file("write", self.directory.describe(NAME))(e);
        let enough = state.records + records.len() <= 2 * state.files.len() + SLACK;
        if let Some(log) = state.log.as_mut().filter(|_| enough) {
            let bytes: Vec<u8> = records.iter().flat_map(Record::encode).collect();
            if log.append(&bytes).and_then(|()| log.sync()).is_ok() {
                state.records += records.len();
                return Ok(());
            }
        }
        // The first time, after a failure, or when much of it is superfluous.
        state.log = None;
        let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
        for file in state.files.values() {
            bytes.extend(Record::put(file).encode());
        }
        replace(&*self.directory, TEMPORARY, NAME, &bytes).map_err(failed)?;
        state.records = state.files.len();
        let reopen = || {
            let file = self.directory.open(NAME, Access::Write)?;
            RecordLog::reopen(file.into(), bytes.len() as u64)
        };
        state.log = Some(reopen().map_err(failed)?);
        Ok(())
    }
}

impl std::fmt::Debug for KnownFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KnownFiles")
            .field("files", &self.state.lock().files.len())
            .finish_non_exhaustive()
    }
}

/// Reads a log; what is accepted is the same when it is written and read again.
#[cfg(fuzzing)]
pub(crate) fn replay_for_fuzzing(bytes: &[u8]) {
    let found = replay(bytes);
    assert!(found.end <= bytes.len() as u64);
    let mut again = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    for file in found.files.values() {
        again.extend(Record::put(file).encode());
    }
    assert_eq!(replay(&again).files, found.files);
}

#[cfg(test)]
mod tests {
    use drover_storage::FakeDirectory;

    use super::*;

    fn file(n: u64) -> KnownFile {
        KnownFile {
            path: format!("/srv/images/{}.qcow2", n % 10).into(),
            stamp: Stamp {
                device: 1,
                inode: n,
                size: n * 4096,
                mtime_ns: -5,
                ctime_ns: i64::MAX.into(),
            },
            format: "qcow2".into(),
            virtual_bytes: n,
            looked_unix: 7,
            offered: n.is_multiple_of(2),
            likeness: Likeness::of_system(&format!("system-{n}")),
        }
    }

    fn listed(directory: &FakeDirectory) -> Vec<KnownFile> {
        let known = KnownFiles::open(Arc::new(directory.clone())).unwrap();
        known.list().iter().map(|f| KnownFile::clone(f)).collect()
    }

    #[test]
    fn what_was_noted_is_there_after_a_crash_at_any_time() {
        for seed in 0..40 {
            let fake = FakeDirectory::default();
            let known = KnownFiles::open(Arc::new(fake.clone())).unwrap();
            let mut model = BTreeMap::new();
            let mut rng = fastrand::Rng::with_seed(seed);
            for n in 0..rng.u64(1..40) {
                let new = file(n + 10 * rng.u64(0..3));
                if rng.bool() {
                    model.insert(new.path.clone(), new.clone());
                    known.put(vec![new]).unwrap();
                } else {
                    model.remove(&new.path);
                    known.remove(&new.path).unwrap();
                }
            }
            let expected: Vec<_> = model.into_values().collect();
            assert_eq!(listed(&fake.after_crash(seed)), expected, "seed {seed}");
            // Also in the middle of a change, which is there or is not.
            let steps = fake.steps() + rng.u64(0..6);
            fake.cut_power_at(steps);
            let next = file(100);
            let _ = known.put(vec![next.clone()]);
            let left = listed(&fake.after_crash(seed + 1));
            let with = {
                let mut all: BTreeMap<_, _> = expected
                    .iter()
                    .map(|f| (f.path.clone(), f.clone()))
                    .collect();
                all.insert(next.path.clone(), next);
                all.into_values().collect::<Vec<_>>()
            };
            assert!(left == expected || left == with, "seed {seed}: {left:?}");
        }
    }

    #[test]
    fn a_log_does_not_grow_without_end_and_damage_ends_it() {
        let fake = FakeDirectory::default();
        let known = KnownFiles::open(Arc::new(fake.clone())).unwrap();
        let once = Record::put(&file(0)).encode().len();
        for n in 0..3 * SLACK as u64 {
            known.put(vec![file(n)]).unwrap();
        }
        let bytes = fake.bytes(NAME).unwrap();
        assert!(bytes.len() < (2 * SLACK) * (once + 10), "{}", bytes.len());
        assert_eq!(known.list().len(), 10);
        fake.edit(NAME, |bytes| {
            let at = bytes.len() - 3;
            bytes[at] ^= 1;
        });
        let known = KnownFiles::open(Arc::new(fake.clone())).unwrap();
        known.put(vec![file(3)]).unwrap();
        assert_eq!(listed(&fake).len(), 10);
        // Of another version, or of nothing: it begins anew.
        fake.put(NAME, b"DRVRKNWN\x09\0\0\0");
        let known = KnownFiles::open(Arc::new(fake.clone())).unwrap();
        assert!(known.list().is_empty());
        known.put(vec![file(4)]).unwrap();
        assert_eq!(listed(&fake), [file(4)]);
    }

    #[test]
    fn a_full_disk_loses_nothing_that_was_there() {
        let fake = FakeDirectory::default();
        let known = KnownFiles::open(Arc::new(fake.clone())).unwrap();
        known.put(vec![file(1)]).unwrap();
        fake.set_capacity(Some(fake.used() + 1000));
        known.put((0..100).map(file).collect()).unwrap_err();
        assert_eq!(listed(&fake), [file(1)]);
        fake.set_capacity(None);
        known.put(vec![file(103)]).unwrap();
        assert_eq!(listed(&fake).len(), 10);
    }
}
