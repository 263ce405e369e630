//! A map of runs of units to their states that survives crashes: an append-only, checksummed log.
//!
//! What a unit and a state are is the caller's. The log keeps records in order and hands them out again in order; what
//! it holds after a crash is what it held at some moment after the last [`ChunkLog::sync`] that returned. Layout and
//! argument: `docs/format/chunk-log.md`.

use std::sync::Arc;

use crate::record_log::RecordLog;
use crate::{Directory, File};

mod error;
mod format;
mod replay;

pub use error::ChunkLogError;
pub use format::{MAX_HEADER, Record};
pub use replay::Opened;

use format::{FRAME_RECORDS, RECORD_BYTES, frame, header_bytes, temporary};

/// A log shorter than this is never worth rewriting.
const REWRITE_BYTES: u64 = 1 << 20;
/// A log is worth rewriting when it is this many times as long as its last snapshot.
const REWRITE_TIMES: u64 = 4;

/// A log that is open for appending. Only one may be, which is for the caller to see to (see [`Directory::lock`]).
pub struct ChunkLog {
    directory: Arc<dyn Directory>,
    name: String,
    log: RecordLog,
    /// The number of the last frame.
    sequence: u64,
    /// The number of the last frame that is known to be on disk.
    durable: u64,
    /// Encoded records that are in no frame yet; fewer than a frame's.
    pending: Vec<u8>,
    /// Where the snapshot that the file began with ends.
    snapshot: u64,
    /// The name may still lead to an older file after a crash.
    name_pending: bool,
}

impl ChunkLog {
    /// Makes an empty log, durable when this returns, in place of any that is there. `header` is handed out again by
    /// [`Opened::header`].
    ///
    /// # Errors
    /// [`ChunkLogError::HeaderTooLong`] beyond [`MAX_HEADER`]; [`ChunkLogError::Io`].
    pub fn create(
        directory: Arc<dyn Directory>,
        name: &str,
        header: &[u8],
    ) -> Result<Self, ChunkLogError> {
        let mut log = Self::begin(directory, name, header, std::iter::empty())?;
        log.adopt_name()?;
        Ok(log)
    }

    /// Appends records, behind all earlier ones. They may be lost until [`ChunkLog::sync`] has returned; a crash before
    /// leaves some first part of what was appended since.
    ///
    /// # Errors
    /// [`ChunkLogError::Io`]: then none of `records` was appended, and the log is as it was.
    /// [`ChunkLogError::Broken`].
    pub fn append(&mut self, records: &[Record]) -> Result<(), ChunkLogError> {
        self.check()?;
        let full = FRAME_RECORDS * RECORD_BYTES;
        if self.pending.len() + records.len() * RECORD_BYTES < full {
            records.iter().for_each(|r| r.encode(&mut self.pending));
            return Ok(());
        }
        let before = (self.pending.clone(), self.sequence);
        let end = self.log.end();
        for record in records {
            record.encode(&mut self.pending);
            if self.pending.len() == full
                && let Err(error) = self.write_frame()
            {
                (self.pending, self.sequence) = before;
                if self.log.cut(end).is_ok() {
                    self.durable = self.sequence;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Makes everything appended durable.
    ///
    /// # Errors
    /// [`ChunkLogError::Io`]; when the disk was full nothing is lost and it can be tried again, see
    /// [`ChunkLog::is_broken`] for the rest. [`ChunkLogError::Broken`].
    pub fn sync(&mut self) -> Result<(), ChunkLogError> {
        self.hand_over()?;
        self.sync_file()?;
        match self.name_pending {
            true => self.sync_name(),
            false => Ok(()),
        }
    }

    /// Hands everything appended to the file system, without making it durable: a killed process loses none of it, a
    /// power loss may.
    ///
    /// # Errors
    /// As [`ChunkLog::sync`].
    pub fn hand_over(&mut self) -> Result<(), ChunkLogError> {
        self.check()?;
        match self.pending.is_empty() {
            true => Ok(()),
            false => self.write_frame(),
        }
    }

    /// Whether the log is so much longer than its snapshot was that [`ChunkLog::rewrite`] is worth it.
    #[must_use]
    pub fn wants_rewrite(&self) -> bool {
        self.bytes() > REWRITE_BYTES && self.bytes() > self.snapshot * REWRITE_TIMES
    }

    /// Whether it is not known what the file holds, because a sync failed. Only [`ChunkLog::rewrite`], or opening the
    /// log again, makes it usable.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.log.is_broken()
    }

    /// Bytes of the log, with what is not written yet.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.log.end() + self.pending.len() as u64
    }

    /// Begins the log anew with a header and `snapshot`, which takes the place of all that was appended so far. In one
    /// step, also for a crash, and durable when this returns. Takes the room of the old and the new log for a moment.
    ///
    /// # Errors
    /// [`ChunkLogError::HeaderTooLong`]; [`ChunkLogError::Io`]: then the old log goes on, or, when only the name could
    /// not be made durable, the new one, and [`ChunkLog::sync`] tries that again.
    pub fn rewrite(
        &mut self,
        header: &[u8],
        snapshot: impl IntoIterator<Item = Record>,
    ) -> Result<(), ChunkLogError> {
        let directory = Arc::clone(&self.directory);
        let mut new = Self::begin(directory, &self.name, header, snapshot.into_iter())?;
        let result = new.adopt_name();
        // Without the new name the old file is still what a crash leaves.
        if result.is_ok() || new.name_pending {
            *self = new;
        }
        result
    }

    /// Writes a log under its temporary name and makes its bytes durable.
    fn begin(
        directory: Arc<dyn Directory>,
        name: &str,
        header: &[u8],
        snapshot: impl Iterator<Item = Record>,
    ) -> Result<Self, ChunkLogError> {
        if header.len() > MAX_HEADER {
            return Err(ChunkLogError::HeaderTooLong {
                file: directory.describe(name),
                length: header.len(),
            });
        }
        let new_name = temporary(name);
        let file: Arc<dyn File> = directory
            .create(&new_name)
            .map_err(ChunkLogError::io("create", &directory.describe(&new_name)))?
            .into();
        let mut log = Self {
            directory,
            name: name.to_owned(),
            log: RecordLog::new(Arc::clone(&file), header_bytes(header, 0).len() as u64),
            sequence: 0,
            durable: 0,
            pending: Vec::new(),
            snapshot: 0,
            name_pending: false,
        };
        let result = log.fill(file.as_ref(), header, snapshot);
        match result {
            Ok(()) => Ok(log),
            Err(error) => {
                // Best effort: the next rewrite empties it.
                let _ = log.directory.remove(&new_name);
                Err(error)
            }
        }
    }

    fn fill(
        &mut self,
        file: &dyn File,
        header: &[u8],
        snapshot: impl Iterator<Item = Record>,
    ) -> Result<(), ChunkLogError> {
        for record in snapshot {
            record.encode(&mut self.pending);
            if self.pending.len() == FRAME_RECORDS * RECORD_BYTES {
                self.write_frame()?;
            }
        }
        if !self.pending.is_empty() {
            self.write_frame()?;
        }
        self.snapshot = self.log.end();
        let header = header_bytes(header, self.snapshot);
        file.write_at(&header, 0).map_err(self.io("write"))?;
        self.log.sync().map_err(self.io("sync"))?;
        self.durable = self.sequence;
        Ok(())
    }

    fn adopt_name(&mut self) -> Result<(), ChunkLogError> {
        self.directory
            .rename(&temporary(&self.name), &self.name)
            .map_err(self.io("rename a new file to"))?;
        self.name_pending = true;
        self.sync_name()
    }

    fn sync_name(&mut self) -> Result<(), ChunkLogError> {
        self.directory
            .sync()
            .map_err(self.io("make durable the name of"))?;
        self.name_pending = false;
        Ok(())
    }

    /// Writes what is pending as a frame.
    fn write_frame(&mut self) -> Result<(), ChunkLogError> {
        let frame = frame(self.sequence + 1, self.durable, &self.pending);
        if let Err(error) = self.log.append(&frame) {
            if !self.log.is_broken() {
                // What is left was made durable when the rest was cut off.
                self.durable = self.sequence;
            }
            return Err(self.io("append to")(error));
        }
        self.sequence += 1;
        self.pending.clear();
        Ok(())
    }

    fn sync_file(&mut self) -> Result<(), ChunkLogError> {
        if self.durable == self.sequence {
            return Ok(());
        }
        self.log.sync().map_err(self.io("sync"))?;
        self.durable = self.sequence;
        Ok(())
    }

    fn check(&self) -> Result<(), ChunkLogError> {
        match self.log.is_broken() {
            true => Err(ChunkLogError::Broken {
                file: self.directory.describe(&self.name),
            }),
            false => Ok(()),
        }
    }

    fn io(&self, doing: &'static str) -> impl Fn(std::io::Error) -> ChunkLogError + use<> {
        ChunkLogError::io(doing, &self.directory.describe(&self.name))
    }
}

#[cfg(test)]
mod tests;
