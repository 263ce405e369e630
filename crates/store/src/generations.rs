//! Generations: in which generation each chunk of a disk was last written, kept beside the disk.
//!
//! A [`Generations`] names a line of copies by a random *seed*, and counts *generations*: a new one begins whenever the
//! disk's contents become the basis of a copy elsewhere ([`Generations::track`]), or a copy of it takes over
//! ([`Generations::succeed`]). What a copy from generation *g* lacks is then what was written after *g*: a disk that returns
//! sends only that ([`Summary::compare`]). Each generation has a random tag, so that two copies which were both written after
//! they parted are not mistaken for one.
//!
//! The record of a chunk is durable *before* the write that it describes, so a crash at any moment leaves no written chunk
//! with an older generation (the paper saves the map at a clean exit only). To cost next to nothing, a whole region of
//! [`REGION`] bytes is recorded at its first write in a generation; which of its chunks were really written is known in memory,
//! and recorded exactly when the disk is closed or the next generation begins. Format: `docs/format/generations.md`.
//!
//! A map is believed only if it is of these contents ([`Contents`]): else digests decide, and the disk begins a new line.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use drover_core::DeviceError;
use drover_storage::chunk_log::{ChunkLog, ChunkLogError, Record};
use drover_storage::{Directory, Lock, remove_if_exists};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

mod device;
mod in_file;
mod line;
mod points;
mod summary;
mod thawed;
mod units;

pub use crate::machine::Generation;
pub use device::Recorded;
pub use in_file::{InFileError, new_of_file, of_file, remove_from_file, write_in_file};
pub use line::{About, Contents};
pub use points::Points;
pub use summary::{Comparison, MAX_SUMMARY_BYTES, NotComparable, Summary, SummaryError};
pub use thawed::{remember_thaw, was_thawed};
pub use units::{CHUNK, MAX_SIZE, Seed};

use line::Line;

/// What is recorded at its first write in a generation, in bytes.
pub const REGION: u64 = CHUNK * REGION_CHUNKS;
/// One word of a bitmap.
const REGION_CHUNKS: u64 = 64;

/// The file's name, in the directory of the image's lease and changes.
pub const FILE_NAME: &str = "generations";
const LOCK_NAME: &str = "generations.lock";

/// Why generations could not be read, recorded or begun.
#[derive(Debug, thiserror::Error)]
pub enum GenerationsError {
    /// The disk was handed over: it is another site's to write.
    #[error(
        "this copy is frozen, since its machine moved to another site, or its file was marked as an old copy: move the machine back, \
         or, if there is no other copy that goes on, thaw this one with `drover mounts break IMAGE`"
    )]
    Frozen,
    /// A write before the map was opened for writing, or after it was closed.
    #[error("the disk is not open for writing")]
    Closed,
    /// Another process has the map open.
    #[error("{0} is in use by another process")]
    Busy(String),
    /// The disk is larger than [`MAX_SIZE`].
    #[error("a disk of {0} bytes is larger than any whose generations are recorded")]
    TooLarge(u64),
    /// The summary is of a copy that may still be written, or of a disk of another size.
    #[error("the generations of another copy cannot be continued: {0}")]
    NotOver(&'static str),
    /// The file is damaged, or cannot be written.
    #[error(transparent)]
    Log(#[from] ChunkLogError),
    /// Another file cannot be written.
    #[error("cannot {doing} {file}: {source}")]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file.
        file: String,
        /// The cause.
        source: io::Error,
    },
}

impl From<GenerationsError> for DeviceError {
    fn from(error: GenerationsError) -> Self {
        match error {
            // The text stays; a kernel is told that the device is read-only.
            GenerationsError::Frozen => Self::Io(Arc::new(io::Error::new(
                io::ErrorKind::ReadOnlyFilesystem,
                error,
            ))),
            GenerationsError::Closed => Self::Closed,
            GenerationsError::Log(error) => error.into(),
            GenerationsError::Io { ref source, .. } => {
                io::Error::new(source.kind(), error.to_string()).into()
            }
            other => Self::Io(Arc::new(io::Error::other(other))),
        }
    }
}

/// The generations of a disk, open. Usable from many threads.
///
/// **Locks**, in the order in which they may be held together: `gate`, `waiting`, `state`.
pub struct Generations {
    directory: Arc<dyn Directory>,
    size: u64,
    /// Held shared by each change of the disk while it is made.
    gate: RwLock<Gate>,
    /// For each region, the chunks written in this generation.
    written: Box<[AtomicU64]>,
    /// The regions whose chunks all are durably recorded as written in this generation.
    recorded: Box<[AtomicU64]>,
    /// Regions that writers wait for: who gets `state` next records all of them with one sync.
    waiting: Mutex<Vec<u64>>,
    state: Mutex<State>,
    /// The map could not be kept, and was removed.
    lost: AtomicBool,
    _lock: Box<dyn Send + Sync>,
}

/// Whether the disk may be changed.
enum Gate {
    Closed,
    Open,
    Frozen,
}

struct State {
    log: ChunkLog,
    /// Without what `written` says of the current generation.
    line: Line,
    /// Whether it is of the contents that it was opened for.
    believed: bool,
}

/// A change of the disk that is being made: no generation begins before it is dropped.
#[must_use = "dropped when the change is made"]
pub struct Writing<'a> {
    _gate: RwLockReadGuard<'a, Gate>,
}

impl Generations {
    /// Opens the map in `directory` for a disk of `size` bytes that now has these contents, or begins a new line: where there
    /// is no map, or one that is not of these contents. An image that is frozen stays so, whatever became of its changes.
    /// Nothing can be written before [`Generations::begin`].
    ///
    /// # Errors
    /// [`GenerationsError`]: a damaged map, too, since it may be frozen.
    pub fn open(
        directory: Arc<dyn Directory>,
        size: u64,
        now: Contents,
    ) -> Result<Self, GenerationsError> {
        let lock = lock(directory.as_ref(), size)?;
        let found = match ChunkLog::open(Arc::clone(&directory), FILE_NAME) {
            Err(error) if error.is_missing() => None,
            Err(error) => return Err(error.into()),
            Ok(opened) => {
                let mut line = Line::of_header(opened.header(), &directory.describe(FILE_NAME))?;
                let log = opened.replay(|record| line.replay(record))?;
                Some((log, line)).filter(|(_, line)| !line.is_empty())
            }
        };
        let believed = found
            .as_ref()
            .is_some_and(|(_, line)| line.is_of(size, now));
        let (log, line) = match found {
            Some((log, line)) if believed || line.is_frozen(now) => (log, line),
            found => {
                if found.is_some() {
                    let file = directory.describe(FILE_NAME);
                    tracing::info!(
                        file,
                        "recorded generations are not of this disk's contents: a new line begins"
                    );
                }
                create(&directory, Line::new(size))?
            }
        };
        let believed = believed || !line.is_frozen(now);
        Ok(Self::with(
            directory,
            State {
                log,
                line,
                believed,
            },
            lock,
        ))
    }

    /// Makes the map of a disk that has just become the copy of another, whose generations are `of`: the same line, one
    /// generation on. Replaces any map in `directory`.
    ///
    /// # Errors
    /// [`GenerationsError::NotOver`]: the other may still be written in its last generation, or has another size.
    pub fn succeed(
        directory: Arc<dyn Directory>,
        size: u64,
        of: &Summary,
        now: Contents,
    ) -> Result<Self, GenerationsError> {
        Self::copy(directory, size, of, |line| {
            line.next();
            line.closed(now);
        })
    }

    /// Makes the map of a disk that is the very copy whose generations are `of`, and is frozen. Replaces any map in
    /// `directory`.
    ///
    /// # Errors
    /// As [`Generations::succeed`].
    pub fn keep(
        directory: Arc<dyn Directory>,
        size: u64,
        of: &Summary,
        now: Contents,
    ) -> Result<Self, GenerationsError> {
        Self::copy(directory, size, of, |line| drop(line.freeze(now)))
    }

    fn copy(
        directory: Arc<dyn Directory>,
        size: u64,
        of: &Summary,
        change: impl FnOnce(&mut Line),
    ) -> Result<Self, GenerationsError> {
        check_over(of, size)?;
        let lock = lock(directory.as_ref(), size)?;
        let mut line = Line::of_summary(of);
        change(&mut line);
        let (log, line) = create(&directory, line)?;
        let believed = true;
        Ok(Self::with(
            directory,
            State {
                log,
                line,
                believed,
            },
            lock,
        ))
    }

    fn with(directory: Arc<dyn Directory>, state: State, lock: Box<dyn Send + Sync>) -> Self {
        let size = state.line.size;
        let regions = size.div_ceil(REGION);
        let zeros = |n: u64| (0..n).map(|_| AtomicU64::new(0)).collect();
        Self {
            directory,
            size,
            gate: RwLock::new(match state.line.about().frozen {
                true => Gate::Frozen,
                false => Gate::Closed,
            }),
            written: zeros(regions),
            recorded: zeros(regions.div_ceil(64)),
            waiting: Mutex::default(),
            state: Mutex::new(state),
            lost: AtomicBool::new(false),
            _lock: lock,
        }
    }

    /// Opens the disk for changes, durably: whatever becomes of this process, the map is then of `now` or a later version.
    /// Called again when the contents get another identity.
    ///
    /// # Errors
    /// [`GenerationsError::Frozen`], or the disk's.
    pub fn begin(&self, now: Contents) -> Result<(), GenerationsError> {
        let mut gate = self.gate.write();
        if matches!(*gate, Gate::Frozen) {
            return Err(GenerationsError::Frozen);
        }
        let mut state = self.state.lock();
        let is_open = matches!(*gate, Gate::Open) && state.line.is_of(self.size, now);
        if !is_open {
            let records = state.line.opened(now);
            self.or_lose(&mut state, |state| state.append(&records))?;
        }
        *gate = Gate::Open;
        Ok(())
    }

    /// Called ahead of each change of a range of the disk: when it returns, the range is durably recorded as changed in this
    /// generation. If that is impossible, the map is removed instead, so that nobody believes it.
    ///
    /// # Errors
    /// [`GenerationsError::Frozen`]; [`GenerationsError::Closed`]; or the map can neither be kept nor removed.
    pub fn before_write(&self, offset: u64, length: u64) -> Result<Writing<'_>, GenerationsError> {
        self.before_writes(std::iter::once((offset, length)))
    }

    /// As [`Generations::before_write`], ahead of a change of many ranges `(offset, length)` at once.
    ///
    /// # Errors
    /// As [`Generations::before_write`].
    pub fn before_writes(
        &self,
        ranges: impl Iterator<Item = (u64, u64)>,
    ) -> Result<Writing<'_>, GenerationsError> {
        let gate = self.gate.read();
        match *gate {
            Gate::Open => {}
            Gate::Closed => return Err(GenerationsError::Closed),
            Gate::Frozen => return Err(GenerationsError::Frozen),
        }
        let mut missing = Vec::new();
        for (offset, length) in ranges {
            let end = offset.saturating_add(length).min(self.size);
            if offset < end {
                self.mark(offset / CHUNK..end.div_ceil(CHUNK), &mut missing);
            }
        }
        if !missing.is_empty() {
            self.record(&missing)?;
        }
        Ok(Writing { _gate: gate })
    }

    /// Marks chunks as written; adds their regions that are not recorded to `missing`.
    fn mark(&self, chunks: Range<u64>, missing: &mut Vec<u64>) {
        for region in chunks.start / REGION_CHUNKS..chunks.end.div_ceil(REGION_CHUNKS) {
            let start = region * REGION_CHUNKS;
            let first = chunks.start.saturating_sub(start);
            let last = (chunks.end - start).min(REGION_CHUNKS);
            let mask = u64::MAX >> (REGION_CHUNKS - last) & u64::MAX << first;
            let word = &self.written[region as usize];
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Relaxed);
            }
            if !self.is_recorded(region) && missing.last() != Some(&region) {
                missing.push(region);
            }
        }
    }

    fn is_recorded(&self, region: u64) -> bool {
        let word = &self.recorded[(region / 64) as usize];
        word.load(Ordering::Acquire) >> (region % 64) & 1 == 1
    }

    /// Records all chunks of regions, durably, with those that others wait for.
    fn record(&self, regions: &[u64]) -> Result<(), GenerationsError> {
        let missing = || regions.iter().filter(|region| !self.is_recorded(**region));
        self.waiting.lock().extend(missing());
        let mut state = self.state.lock();
        let mut wanted = std::mem::take(&mut *self.waiting.lock());
        // If another writer took them and failed, they are not waiting any more.
        wanted.extend(missing());
        wanted.retain(|region| !self.is_recorded(*region));
        if wanted.is_empty() {
            return Ok(());
        }
        wanted.sort_unstable();
        wanted.dedup();
        let age = state.line.age();
        let chunks = wanted.iter().flat_map(|region| self.chunks_of(*region));
        let records = line::records(chunks.map(|chunk| (chunk, age)));
        self.or_lose(&mut state, |state| {
            if state.log.is_broken() {
                self.rewrite(state)?;
            }
            state.append(&records)
        })?;
        for region in wanted {
            let word = &self.recorded[(region / 64) as usize];
            word.fetch_or(1 << (region % 64), Ordering::Release);
        }
        Ok(())
    }

    /// Makes a change of the log; if it fails, removes the map, durably.
    fn or_lose(
        &self,
        state: &mut State,
        change: impl FnOnce(&mut State) -> Result<(), GenerationsError>,
    ) -> Result<(), GenerationsError> {
        if self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let Err(error) = change(state) else {
            return Ok(());
        };
        let removed = remove_if_exists(self.directory.as_ref(), FILE_NAME)
            .and_then(|()| self.directory.sync());
        if removed.is_err() {
            return Err(error);
        }
        tracing::warn!(%error, "generations cannot be recorded; the next copy of this disk is compared by its digests");
        self.lost.store(true, Ordering::Release);
        Ok(())
    }

    /// Begins the next generation: what is the disk's contents now can become a copy elsewhere. Waits for changes that are
    /// being made. Durable when it returns.
    ///
    /// # Errors
    /// [`GenerationsError::Frozen`], or the disk's.
    pub fn track(&self) -> Result<Generation, GenerationsError> {
        let mut gate = self.gate.write();
        if matches!(*gate, Gate::Frozen) {
            return Err(GenerationsError::Frozen);
        }
        self.settle(&mut gate, &mut self.state.lock(), |line| vec![line.next()])?;
        Ok(self.state.lock().line.generation())
    }

    /// What the disk is now can be copied: ends the generation, if anything was written in it, and returns the map as of its end.
    /// None if the map is not believed, or could not be kept. Waits for changes that are being made; durable when it returns.
    ///
    /// # Errors
    /// As [`Generations::track`].
    pub fn point(&self) -> Result<Option<Summary>, GenerationsError> {
        let mut gate = self.gate.write();
        if matches!(*gate, Gate::Frozen) {
            return Err(GenerationsError::Frozen);
        }
        let mut state = self.state.lock();
        let is_known = |state: &State| state.believed && !self.lost.load(Ordering::Acquire);
        if !is_known(&state) {
            return Ok(None);
        }
        if let Some(over) = state
            .line
            .summary(&|chunk| self.has_written(chunk))
            .at_end()
        {
            return Ok(Some(over));
        }
        self.settle(&mut gate, &mut state, |line| vec![line.next()])?;
        Ok(is_known(&state)
            .then(|| {
                state
                    .line
                    .summary(&|chunk| self.has_written(chunk))
                    .at_end()
            })
            .flatten())
    }

    /// Freezes the disk, which has these contents, durably: nothing is written until it is thawed, and its generation is over.
    /// Waits for changes that are being made.
    ///
    /// # Errors
    /// Of the disk: it is not frozen, and its generations may be lost.
    pub fn freeze(&self, now: Contents) -> Result<(), GenerationsError> {
        let mut gate = self.gate.write();
        let mut state = self.state.lock();
        self.settle(&mut gate, &mut state, |line| line.freeze(now))?;
        if self.lost.load(Ordering::Acquire) {
            // Frozen it must be, even if nothing is known of what was written.
            let mut line = Line::new(self.size);
            line.freeze(now);
            (state.log, state.line) = create(&self.directory, line)?;
            self.lost.store(false, Ordering::Release);
        }
        *gate = Gate::Frozen;
        Ok(())
    }

    /// Continues the line of the copy that this disk came from, whose last generation is over: all that was written to this
    /// copy, since its own line began, counts as written in the generation after that. Durable when it returns.
    ///
    /// # Errors
    /// [`GenerationsError::NotOver`]: the other may still be written in its last generation, or has another size.
    /// [`GenerationsError::Frozen`]; or the disk's: then the line stays, or the map is lost.
    pub fn adopt(&self, of: &Summary) -> Result<(), GenerationsError> {
        check_over(of, self.size)?;
        let gate = self.gate.write();
        if matches!(*gate, Gate::Frozen) {
            return Err(GenerationsError::Frozen);
        }
        let mut state = self.state.lock();
        if !state.believed || self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut line = Line::of_summary(of);
        line.next();
        let age = line.age();
        for chunk in 0..self.size.div_ceil(CHUNK) {
            if self.has_written(chunk) || state.line.age_of(chunk) > 0 {
                line.set(chunk, age);
            }
        }
        line.continue_as(&state.line);
        self.or_lose(&mut state, |state| {
            state.line = line;
            let records = state.line.snapshot();
            Ok(state.log.rewrite(&state.line.header(), records)?)
        })?;
        // Regions that were recorded as a whole are so no more.
        clear(&self.recorded);
        Ok(())
    }

    /// Thaws a frozen disk: the next generation begins. Does nothing to one that is not frozen.
    ///
    /// # Errors
    /// Of the disk: it stays frozen.
    pub fn thaw(&self) -> Result<(), GenerationsError> {
        let mut gate = self.gate.write();
        if !matches!(*gate, Gate::Frozen) {
            return Ok(());
        }
        let mut state = self.state.lock();
        if state.believed {
            self.settle(&mut gate, &mut state, |line| vec![line.next()])?;
        } else {
            (state.log, state.line) = create(&self.directory, Line::new(self.size))?;
            state.believed = true;
        }
        *gate = Gate::Closed;
        Ok(())
    }

    /// Records that all changes are made, and which contents the disk has now. Nothing is written after it without another
    /// [`Generations::begin`].
    ///
    /// # Errors
    /// Of the disk.
    pub fn close(&self, now: Contents) -> Result<(), GenerationsError> {
        let mut gate = self.gate.write();
        if !matches!(*gate, Gate::Open) {
            return Ok(());
        }
        *gate = Gate::Closed;
        self.settle(&mut gate, &mut self.state.lock(), |line| line.closed(now))
    }

    /// Records that the same disk has other contents by name, for example since its changes were made part of a new file.
    ///
    /// # Errors
    /// [`GenerationsError::Closed`] while it is open for changes; or the disk's.
    pub fn rename(&self, now: Contents) -> Result<(), GenerationsError> {
        let mut gate = self.gate.write();
        if matches!(*gate, Gate::Open) {
            return Err(GenerationsError::Closed);
        }
        let mut state = self.state.lock();
        if state.believed {
            return self.settle(&mut gate, &mut state, |line| line.closed(now));
        }
        // Only what is frozen is opened without being believed.
        let records = state.line.freeze_as(now);
        state.append(&records)
    }

    /// Records exactly what was written in this generation, then what `change` makes of the line; or loses the map. After an
    /// error, nothing can be written until the map is opened again. The caller holds the gate exclusively.
    fn settle(
        &self,
        gate: &mut Gate,
        state: &mut State,
        change: impl FnOnce(&mut Line) -> Vec<Record>,
    ) -> Result<(), GenerationsError> {
        let settled = self.or_lose(state, |state| {
            let (before, floor) = (state.line.generation(), state.line.floor());
            let age = state.line.age();
            let regions = (0..self.written.len() as u64).filter(|region| self.is_recorded(*region));
            let mut exact = Vec::new();
            for chunk in regions.flat_map(|region| self.chunks_of(region)) {
                if self.has_written(chunk) {
                    state.line.set(chunk, age);
                }
                exact.push((chunk, state.line.age_of(chunk)));
            }
            // From here on the log may say that they were not written: the next write of each is recorded again.
            clear(&self.recorded);
            let mut records = line::records(exact);
            records.extend(change(&mut state.line));
            if state.line.generation() != before {
                clear(&self.written);
            }
            match state.log.wants_rewrite() || state.line.floor() != floor {
                true => self.rewrite(state),
                false => state.append(&records),
            }
        });
        if settled.is_err() && !matches!(*gate, Gate::Frozen) {
            *gate = Gate::Closed;
        }
        settled
    }

    /// The chunks of a region.
    fn chunks_of(&self, region: u64) -> Range<u64> {
        let first = region * REGION_CHUNKS;
        first..(first + REGION_CHUNKS).min(self.size.div_ceil(CHUNK))
    }

    /// Writes the log anew.
    fn rewrite(&self, state: &mut State) -> Result<(), GenerationsError> {
        let age = state.line.age();
        let regions = (0..self.written.len() as u64).filter(|region| self.is_recorded(*region));
        let chunks = regions.flat_map(|region| self.chunks_of(region));
        let mut records = state.line.snapshot();
        records.extend(line::records(chunks.map(|chunk| (chunk, age))));
        Ok(state.log.rewrite(&state.line.header(), records)?)
    }

    fn has_written(&self, chunk: u64) -> bool {
        let word = &self.written[(chunk / REGION_CHUNKS) as usize];
        word.load(Ordering::Relaxed) >> (chunk % REGION_CHUNKS) & 1 == 1
    }

    /// What is known of it, for display.
    #[must_use]
    pub fn about(&self) -> About {
        self.state.lock().line.about()
    }

    /// Whether the disk is frozen.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        matches!(*self.gate.read(), Gate::Frozen)
    }

    /// The generations as a peer is told of them; none if the map was not of the disk's contents, or could not be kept.
    /// Waits for changes that are being made.
    #[must_use]
    pub fn summary(&self) -> Option<Summary> {
        let _gate = self.gate.write();
        let state = self.state.lock();
        if !state.believed || self.lost.load(Ordering::Acquire) {
            return None;
        }
        Some(state.line.summary(&|chunk| self.has_written(chunk)))
    }

    /// The byte ranges written in a later generation than `generation`, in order.
    #[must_use]
    pub fn newer_than(&self, generation: Generation) -> Option<Vec<Range<u64>>> {
        Some(self.summary()?.newer_than(generation))
    }
}

impl State {
    /// Appends records, durably.
    fn append(&mut self, records: &[Record]) -> Result<(), GenerationsError> {
        self.log.append(records)?;
        Ok(self.log.sync()?)
    }
}

/// What a directory's map says of a disk with these contents, without opening it for changes; none without one, or if it is of
/// other contents and the disk is not frozen.
///
/// # Errors
/// A damaged map.
pub fn look(
    directory: Arc<dyn Directory>,
    now: Contents,
) -> Result<Option<About>, GenerationsError> {
    let said = directory.describe(FILE_NAME);
    let opened = match ChunkLog::open(directory, FILE_NAME) {
        Err(error) if error.is_missing() => return Ok(None),
        result => result?,
    };
    let mut line = Line::of_header(opened.header(), &said)?;
    opened.read(|record| line.replay(record))?;
    let is_known = !line.is_empty() && (line.is_of(line.size, now) || line.is_frozen(now));
    Ok(is_known.then(|| line.about()))
}

/// Keeps the disk of a directory from being opened for changes, as long as what is returned is there.
///
/// # Errors
/// [`GenerationsError::Busy`]: it is open for changes; or the lock's.
pub fn hold(directory: &dyn Directory) -> Result<Box<dyn Send + Sync>, GenerationsError> {
    lock(directory, 0)
}

/// Removes the map of a directory, durably, whatever it says; a missing one is not an error.
///
/// # Errors
/// Of the disk.
pub fn forget(directory: &dyn Directory) -> Result<(), GenerationsError> {
    let removed = remove_if_exists(directory, FILE_NAME).and_then(|()| directory.sync());
    removed.map_err(|source| GenerationsError::Io {
        doing: "remove",
        file: directory.describe(FILE_NAME),
        source,
    })
}

/// The generations of a disk with these contents, which nobody writes; none if there is no map, or it is of other contents.
///
/// # Errors
/// A damaged map.
pub fn summary(
    directory: Arc<dyn Directory>,
    now: Contents,
) -> Result<Option<Summary>, GenerationsError> {
    let said = directory.describe(FILE_NAME);
    let opened = match ChunkLog::open(directory, FILE_NAME) {
        Err(error) if error.is_missing() => return Ok(None),
        result => result?,
    };
    let mut line = Line::of_header(opened.header(), &said)?;
    opened.read(|record| line.replay(record))?;
    let is_known = !line.is_empty() && line.is_closed_as(now);
    Ok(is_known.then(|| line.summary(&|_| false)))
}

/// The seed of the map of a directory, whatever its contents; none without one, or if it is damaged.
pub fn seed(directory: Arc<dyn Directory>) -> Option<Seed> {
    let said = directory.describe(FILE_NAME);
    let opened = ChunkLog::open(directory, FILE_NAME).ok()?;
    Some(Line::of_header(opened.header(), &said).ok()?.about().seed)
}

/// Fails unless a disk of `size` bytes can continue the line.
fn check_over(of: &Summary, size: u64) -> Result<(), GenerationsError> {
    if of.size != size {
        return Err(GenerationsError::NotOver("it is of a disk of another size"));
    }
    match of.over {
        true => Ok(()),
        false => Err(GenerationsError::NotOver(
            "its last generation has not ended",
        )),
    }
}

fn clear(bits: &[AtomicU64]) {
    bits.iter()
        .for_each(|word| word.store(0, Ordering::Release));
}

fn lock(directory: &dyn Directory, size: u64) -> Result<Box<dyn Send + Sync>, GenerationsError> {
    if size > MAX_SIZE {
        return Err(GenerationsError::TooLarge(size));
    }
    directory
        .lock(LOCK_NAME, Lock::Exclusive)
        .map_err(|source| {
            let file = directory.describe(FILE_NAME);
            match source.kind() {
                io::ErrorKind::WouldBlock => GenerationsError::Busy(file),
                _ => GenerationsError::Io {
                    doing: "lock",
                    file,
                    source,
                },
            }
        })
}

/// Writes the map of a line, replacing any.
fn create(
    directory: &Arc<dyn Directory>,
    line: Line,
) -> Result<(ChunkLog, Line), GenerationsError> {
    let mut log = ChunkLog::create(Arc::clone(directory), FILE_NAME, &line.header())?;
    log.append(&line.snapshot())?;
    log.sync()?;
    Ok((log, line))
}

#[cfg(test)]
mod tests;
