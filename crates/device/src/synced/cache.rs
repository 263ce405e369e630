//! The files of a cache: the bytes, a digest for each chunk, and the map of chunk states. Layout and
//! behaviour after crashes: `docs/format/mount-cache.md`.

use std::sync::Arc;

use drover_core::{DeviceError, Digest};
use parking_lot::Mutex;

use super::SyncedError;
use super::state::{ChunkState, Geometry, Mask};
use crate::remote::{Epoch, Shape};
use drover_storage::chunk_log::{ChunkLog, ChunkLogError, Opened, Record};
use drover_storage::chunk_map::{ChunkMap, ChunkValue};
use drover_storage::{Access, Directory, File, Lock, read_exact_at};

const DATA: &str = "data";
const DIGESTS: &str = "digests";
const MAP: &str = "map";
const LOCK: &str = "lock";
const BEFORE_WRITE: &str = "before-write";
const MAGIC: &[u8; 8] = b"DRVRMNT\0";
const VERSION: u32 = 2;
const HEADER: usize = 88;
/// Version 1, which does not record the image.
const FORMER: u32 = 1;
const FORMER_HEADER: usize = 56;

/// Records that are not about chunks: `first` holds an epoch.
const COMMITTED: u8 = 64;
const INTENT: u8 = 65;
const OPENED: u8 = 66;
const CLOSED: u8 = 67;

/// The chunks' bytes and digests. Usable from any thread; `state.rs` defines who may access which chunk.
pub struct Cache {
    pub geometry: Geometry,
    directory: Arc<dyn Directory>,
    data: Box<dyn File>,
    digests: Box<dyn File>,
    lock: Mutex<Option<Box<dyn Send + Sync>>>,
}

/// The map of an opened cache.
pub struct OpenedMap {
    pub log: Log,
    /// The cache was not closed cleanly.
    pub unclean: bool,
}

fn io(
    directory: &dyn Directory,
    doing: &'static str,
    name: &str,
) -> impl FnOnce(std::io::Error) -> SyncedError {
    let file = directory.describe(name);
    move |source| SyncedError::Io {
        doing,
        file,
        source,
    }
}

/// The device that a cache belongs to.
#[derive(Clone, Copy)]
pub struct CacheOf<'a> {
    /// The device's identity.
    pub identity: &'a [u8],
    /// The image's digest.
    pub image: Digest,
    /// The digest that a version 1 cache is known to belong to.
    pub former: Option<Digest>,
}

fn header(geometry: Geometry, of: CacheOf<'_>) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&geometry.shape.chunk.to_le_bytes());
    bytes.extend_from_slice(&geometry.shape.size.to_le_bytes());
    bytes.extend_from_slice(blake3::hash(of.identity).as_bytes());
    bytes.extend_from_slice(&of.image.0);
    bytes
}

impl Cache {
    /// Opens the cache in a directory, or creates an empty one.
    pub fn open(
        directory: Arc<dyn Directory>,
        geometry: Geometry,
        of: CacheOf<'_>,
    ) -> Result<(Self, OpenedMap), SyncedError> {
        let lock = exclusive(directory.as_ref())?;
        let ours = header(geometry, of);
        match ChunkLog::open(Arc::clone(&directory), MAP) {
            Ok(opened) => {
                let is_former = check_header(directory.as_ref(), opened.header(), &ours, of)?;
                let (mut log, unclean) = Log::replay(opened, geometry)?;
                if is_former {
                    log.restart(&ours)?;
                }
                let file = |name: &str| {
                    directory.open(name, Access::Write).map_err(io(
                        directory.as_ref(),
                        "open",
                        name,
                    ))
                };
                let cache = Self {
                    geometry,
                    data: file(DATA)?,
                    digests: file(DIGESTS)?,
                    directory,
                    lock: Mutex::new(Some(lock)),
                };
                if unclean {
                    // The page cache may hold writes of a killed process that the map relies on.
                    cache.sync()?;
                }
                Ok((cache, OpenedMap { log, unclean }))
            }
            Err(error) if error.is_missing() => Self::create(directory, geometry, &ours, lock),
            Err(error) => Err(error.into()),
        }
    }

    fn create(
        directory: Arc<dyn Directory>,
        geometry: Geometry,
        header: &[u8],
        lock: Box<dyn Send + Sync>,
    ) -> Result<(Self, OpenedMap), SyncedError> {
        let file = |name: &str, length: u64| {
            let make = || {
                let file = directory.create(name)?;
                file.set_len(length)?;
                file.sync()?;
                Ok(file)
            };
            make().map_err(io(directory.as_ref(), "make", name))
        };
        let chunks = geometry.shape.chunks();
        let cache = Self {
            geometry,
            data: file(DATA, geometry.shape.size)?,
            digests: file(DIGESTS, chunks * Digest::LEN as u64)?,
            directory: Arc::clone(&directory),
            lock: Mutex::new(Some(lock)),
        };
        // The map comes last: it is what makes the directory a cache.
        let log = ChunkLog::create(directory, MAP, header)?;
        let found = OpenedMap {
            log: Log {
                map: ChunkMap::default(),
                log,
                geometry,
                committed: None,
                intent: None,
                unsaid: false,
            },
            unclean: false,
        };
        Ok((cache, found))
    }

    /// Reads at `offset` of the device.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        read_exact_at(self.data.as_ref(), buffer, offset).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => DeviceError::Corrupt(format!(
                "{} is shorter than the device; unmount and remove the cache",
                self.directory.describe(DATA)
            )),
            _ => error.into(),
        })
    }

    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        Ok(self.data.write_at(data, offset)?)
    }

    /// Zeros a range, deallocating it where the file system can.
    pub fn punch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        Ok(self.data.punch_hole(offset, length)?)
    }

    pub fn chunk(&self, index: u64) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = vec![0; self.geometry.length(index) as usize];
        self.read(self.geometry.start(index), &mut bytes)?;
        Ok(bytes)
    }

    /// The digest on disk.
    pub fn digest(&self, index: u64) -> Result<Digest, DeviceError> {
        let mut digest = Digest::default();
        read_exact_at(
            self.digests.as_ref(),
            &mut digest.0,
            index * Digest::LEN as u64,
        )?;
        Ok(digest)
    }

    /// Writes digests of chunks, in ascending order.
    pub fn write_digests(&self, digests: &[(u64, Digest)]) -> Result<(), DeviceError> {
        for run in digests.chunk_by(|a, b| a.0 + 1 == b.0) {
            let bytes: Vec<u8> = run.iter().flat_map(|(_, digest)| digest.0).collect();
            self.digests
                .write_at(&bytes, run[0].0 * Digest::LEN as u64)?;
        }
        Ok(())
    }

    pub fn sync_data(&self) -> Result<(), DeviceError> {
        Ok(self.data.sync()?)
    }

    pub fn sync_digests(&self) -> Result<(), DeviceError> {
        Ok(self.digests.sync()?)
    }

    fn sync(&self) -> Result<(), SyncedError> {
        let directory = self.directory.as_ref();
        self.data.sync().map_err(io(directory, "sync", DATA))?;
        self.digests.sync().map_err(io(directory, "sync", DIGESTS))
    }

    /// Releases the lock; nothing may be changed through this value afterwards.
    pub fn unlock(&self) {
        *self.lock.lock() = None;
    }

    /// Deletes a cache that is no longer needed. Needs no disk space.
    pub fn forget(&self) -> std::io::Result<()> {
        // The map is what makes it a cache.
        self.directory.remove(MAP)?;
        self.directory.sync()?;
        self.directory.remove(DATA)?;
        self.directory.remove(DIGESTS)
    }

    /// An unnamed sparse file, as long as the device, for the copy-before-write store.
    pub fn copy_before(&self) -> Result<Box<dyn File>, DeviceError> {
        let file = self.directory.create(BEFORE_WRITE)?;
        self.directory.remove(BEFORE_WRITE)?;
        file.set_len(self.geometry.shape.size)?;
        Ok(file)
    }
}

/// The contents of a cache that is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheContents {
    /// Shape of the cached device.
    pub shape: Shape,
    /// Written bytes not known to be at the remote, in whole subchunks.
    pub dirty: u64,
    /// Digest of the image; none in a version 1 cache, which does not record it.
    pub image: Option<Digest>,
}

impl CacheContents {
    /// Reads the map of the cache in `directory`; none when there is no cache.
    ///
    /// # Errors
    /// [`SyncedError`]: the cache is in use, or its map cannot be read.
    pub fn read(directory: &Arc<dyn Directory>) -> Result<Option<Self>, SyncedError> {
        let opened = match ChunkLog::open(Arc::clone(directory), MAP) {
            Ok(opened) => opened,
            Err(error) if error.is_missing() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let _lock = exclusive(directory.as_ref())?;
        let (image, shape) = parts(opened.header(), directory.describe(MAP))?;
        let geometry = Geometry::new(shape)?;
        let (log, _) = Log::replay(opened, geometry)?;
        let dirty = log
            .chunks()
            .filter(|c| c.1.needs_push())
            .map(|(index, _, mask)| match mask {
                0 => geometry.length(index),
                mask => u64::from(mask.count_ones()) * geometry.subchunk,
            })
            .sum();
        Ok(Some(Self {
            shape,
            dirty,
            image,
        }))
    }
}

/// The image's digest, if it is recorded, and the device's shape.
fn parts(header: &[u8], file: String) -> Result<(Option<Digest>, Shape), SyncedError> {
    let image = match version_of(header) {
        Some(VERSION) => {
            let mut image = Digest::default();
            image.0.copy_from_slice(&header[FORMER_HEADER..]);
            Some(image)
        }
        Some(FORMER) => None,
        Some(_) => return Err(SyncedError::Version { file }),
        None => return Err(SyncedError::NotACache { file }),
    };
    let number = |range: std::ops::Range<usize>| {
        let bytes = header[range].iter().rev();
        bytes.fold(0u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let shape = Shape {
        chunk: number(12..16) as u32,
        size: number(16..24),
    };
    Ok((image, shape))
}

fn io_of(directory: &dyn Directory) -> impl Fn(std::io::Error) -> SyncedError {
    let file = directory.describe(DIGESTS);
    move |source| SyncedError::Io {
        doing: "change",
        file: file.clone(),
        source,
    }
}

/// Drops the chunks with any of these byte ranges, in order, from the cache in `directory`, which is not open and has nothing to
/// push: all others agree with the remote at `epoch`. Durable when it returns; a crash leaves the cache as it was or without
/// some of these chunks. Does nothing without a cache.
///
/// # Errors
/// [`SyncedError`]: [`SyncedError::Conflict`] if it has something to push.
pub fn drop_chunks(
    directory: &Arc<dyn Directory>,
    changed: &[std::ops::Range<u64>],
    epoch: Epoch,
) -> Result<(), SyncedError> {
    let opened = match ChunkLog::open(Arc::clone(directory), MAP) {
        Ok(opened) => opened,
        Err(error) if error.is_missing() => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let _lock = exclusive(directory.as_ref())?;
    let (_, shape) = parts(opened.header(), directory.describe(MAP))?;
    let (mut log, unclean) = Log::replay(opened, Geometry::new(shape)?)?;
    if log.is_dirty() {
        return Err(SyncedError::Conflict);
    }
    let chunk = u64::from(shape.chunk);
    let is_in = |index: u64| {
        let (start, end) = (index * chunk, (index + 1) * chunk);
        let next = changed.partition_point(|range| range.end <= start);
        changed.get(next).is_some_and(|range| range.start < end)
    };
    let gone: Vec<_> = log
        .chunks()
        .filter(|(index, ..)| is_in(*index))
        .map(|(index, ..)| (index, ChunkState::Absent, 0))
        .collect();
    // After a power loss, the old bytes must not be found to have the digest that they had.
    let io = io_of(directory.as_ref());
    let digests = directory.open(DIGESTS, Access::Write).map_err(&io)?;
    for run in gone.chunk_by(|a, b| a.0 + 1 == b.0) {
        let nothing = vec![0; run.len() * Digest::LEN];
        let at = run[0].0 * Digest::LEN as u64;
        digests.write_at(&nothing, at).map_err(&io)?;
    }
    digests.sync().map_err(&io)?;
    log.save(&gone, true)?;
    log.agree(epoch)?;
    if !unclean {
        log.close()?;
    }
    Ok(())
}

fn exclusive(directory: &dyn Directory) -> Result<Box<dyn Send + Sync>, SyncedError> {
    directory
        .lock(LOCK, Lock::Exclusive)
        .map_err(|source| match source.kind() {
            std::io::ErrorKind::WouldBlock => SyncedError::InUse {
                directory: directory.describe(LOCK),
            },
            _ => io(directory, "lock", LOCK)(source),
        })
}

/// The version of a header, if it is one.
fn version_of(header: &[u8]) -> Option<u32> {
    let is_magic = header.len() >= 12 && header[..8] == *MAGIC;
    let number = header.get(8..12)?.iter().rev();
    let version = number.fold(0, |number, byte| number << 8 | u32::from(*byte));
    let length = match version {
        FORMER => FORMER_HEADER,
        VERSION => HEADER,
        _ => header.len(),
    };
    (is_magic && header.len() == length).then_some(version)
}

/// Whether it is a version 1 header that may be adopted.
fn check_header(
    directory: &dyn Directory,
    found: &[u8],
    ours: &[u8],
    of: CacheOf<'_>,
) -> Result<bool, SyncedError> {
    let file = directory.describe(MAP);
    match version_of(found) {
        Some(VERSION) if found == ours => Ok(false),
        Some(VERSION) => Err(SyncedError::OtherImage { file }),
        Some(FORMER) if found[12..] != ours[12..FORMER_HEADER] => {
            Err(SyncedError::OtherImage { file })
        }
        Some(FORMER) if of.former == Some(of.image) => Ok(true),
        Some(FORMER) if of.former.is_some() => Err(SyncedError::OtherImage { file }),
        Some(_) => Err(SyncedError::Version { file }),
        None => Err(SyncedError::NotACache { file }),
    }
}

/// A map entry: the chunk's state, and the subchunks it applies to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Chunk(ChunkState, Mask);

impl ChunkValue for Chunk {
    const BITS: u32 = 4;

    fn parts(self) -> (u8, u64) {
        (self.0 as u8, self.1)
    }

    fn from_parts(state: u8, mask: u64) -> Option<Self> {
        Some(Self(ChunkState::from_byte(state)?, mask))
    }
}

/// The map on disk, and the epoch it agrees with.
pub struct Log {
    map: ChunkMap<Chunk>,
    log: ChunkLog,
    geometry: Geometry,
    /// The remote's epoch that the clean chunks agree with; none before the remote was first reached.
    pub committed: Option<Epoch>,
    /// The epoch whose commit has been requested since.
    pub intent: Option<Epoch>,
    /// The file may not record `committed` yet.
    unsaid: bool,
}

impl Log {
    fn replay(opened: Opened, geometry: Geometry) -> Result<(Self, bool), SyncedError> {
        let mut map = ChunkMap::<Chunk>::default();
        let (mut committed, mut intent, mut closed) = (None, None, true);
        let log = opened.replay(|record| {
            closed = record.state == CLOSED;
            match record.state {
                COMMITTED => (committed, intent) = (Some(Epoch(record.first)), None),
                INTENT => intent = Some(Epoch(record.first)),
                OPENED | CLOSED => {}
                _ => return map.replay(record, geometry.shape.chunks()),
            }
            Ok(())
        })?;
        let log = Self {
            map,
            log,
            geometry,
            committed,
            intent,
            unsaid: false,
        };
        Ok((log, !closed))
    }

    /// Every chunk that is not absent: its state, and the subchunks it applies to.
    pub fn chunks(&self) -> impl Iterator<Item = (u64, ChunkState, Mask)> {
        let there = self.map.recorded();
        let each = there.flat_map(|(run, chunk)| run.map(move |index| (index, chunk)));
        // A file may name subchunks that the last chunk does not have.
        each.map(|(index, chunk)| (index, chunk.0, chunk.1 & self.geometry.all(index)))
    }

    /// The records that are not about chunks.
    fn notes(&self) -> Vec<Record> {
        let committed = self.committed.map(|epoch| mark(COMMITTED, epoch));
        let intent = self.intent.map(|epoch| mark(INTENT, epoch));
        let opened = mark(OPENED, Epoch(0));
        [Some(opened), committed, intent]
            .into_iter()
            .flatten()
            .collect()
    }

    /// Records states: durably if the data they depend on is durable, else only so that they survive a killed process.
    pub fn save(
        &mut self,
        chunks: &[(u64, ChunkState, Mask)],
        durably: bool,
    ) -> Result<(), DeviceError> {
        let chunks = chunks
            .iter()
            .map(|(index, state, mask)| (*index, Chunk(*state, *mask)));
        let notes = self.notes();
        Ok(self.map.save(&mut self.log, chunks, durably, &notes)?)
    }

    fn append(&mut self, records: &[Record]) -> Result<(), ChunkLogError> {
        let notes = self.notes();
        self.map.append(&mut self.log, records, &notes)
    }

    /// Rewrites the file with another header.
    fn restart(&mut self, header: &[u8]) -> Result<(), ChunkLogError> {
        let notes = self.notes().into_iter();
        self.log.rewrite(header, notes.chain(self.map.snapshot()))
    }

    /// Called before the first change after an open: from now on a stop without [`Log::close`] is detected.
    pub fn begin(&mut self) -> Result<(), DeviceError> {
        Ok(self.append(&[mark(OPENED, Epoch(0))])?)
    }

    /// Called before a commit is requested: if the reply is lost, the epoch is recognised as ours.
    pub fn intend(&mut self, epoch: Epoch) -> Result<(), DeviceError> {
        // In one write: with the intent alone, the previous epoch would not be recognised.
        let said = self.committed.filter(|_| self.unsaid);
        let said = said.map(|epoch| mark(COMMITTED, epoch));
        let mut records: Vec<_> = said.into_iter().collect();
        records.push(mark(INTENT, epoch));
        self.append(&records)?;
        self.unsaid = false;
        self.intent = Some(epoch);
        Ok(())
    }

    /// The remote is at this epoch, and the clean chunks agree with it. That holds after an error too: it is recorded
    /// with the next intent.
    pub fn agree(&mut self, epoch: Epoch) -> Result<(), DeviceError> {
        (self.committed, self.intent) = (Some(epoch), None);
        self.unsaid = true;
        self.append(&[mark(COMMITTED, epoch)])?;
        self.unsaid = false;
        Ok(())
    }

    /// Whether the clean chunks agree with the remote at this epoch.
    pub fn knows(&self, epoch: Epoch) -> bool {
        self.committed.is_none_or(|committed| committed == epoch) || self.intent == Some(epoch)
    }

    /// Makes every chunk absent again.
    pub fn forget(&mut self) -> Result<(), DeviceError> {
        let (chunks, notes) = (self.geometry.shape.chunks(), self.notes());
        Ok(self.map.clear(&mut self.log, chunks, &notes)?)
    }

    /// Whether the file records that a chunk must be pushed.
    pub fn needs_push(&self, index: u64) -> bool {
        self.map.get(index).0.needs_push()
    }

    /// Whether the file records that anything must be pushed.
    pub fn is_dirty(&self) -> bool {
        self.map.recorded().any(|run| run.1.0.needs_push())
    }

    /// Everything is saved and nothing will change.
    pub fn close(&mut self) -> Result<(), DeviceError> {
        Ok(self.append(&[mark(CLOSED, Epoch(0))])?)
    }
}

fn mark(state: u8, epoch: Epoch) -> Record {
    Record {
        first: epoch.0,
        count: 1,
        state,
        mask: 0,
    }
}
