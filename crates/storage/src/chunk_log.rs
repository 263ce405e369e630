//! A map of runs of units to their states that survives crashes: an append-only, checksummed log.
//!
//! The meaning of units and states is the caller's. The log keeps records in order and replays them in order; after a
//! crash it holds its contents as of some moment after the last [`ChunkLog::sync`] that returned. Layout and argument:
//! `docs/format/chunk-log.md`.

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

/// Logs shorter than this are never rewritten.
const REWRITE_BYTES: u64 = 1 << 20;
/// A log is due for a rewrite when it is this many times as long as its last snapshot.
const REWRITE_TIMES: u64 = 4;

/// A log open for appending. The caller must ensure that it is the only one (see [`Directory::lock`]).
pub struct ChunkLog {
    directory: Arc<dyn Directory>,
    name: String,
    /// The caller's.
    pub(crate) header: Vec<u8>,
    log: RecordLog,
    /// The number of the last frame.
    sequence: u64,
    /// The last frame known to be on disk.
    durable: u64,
    /// Encoded records not in a frame yet; less than one frame.
    pending: Vec<u8>,
    /// End offset of the snapshot at the beginning of the file.
    snapshot: u64,
    /// After a crash the name may still refer to an older file.
    name_pending: bool,
}

impl ChunkLog {
    /// Creates an empty log, durable on return, replacing any existing one. `header` is returned again by
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

    /// Appends records. They may be lost until [`ChunkLog::sync`] has returned; a crash before that preserves some
    /// prefix of them.
    ///
    /// # Errors
    /// [`ChunkLogError::Io`]: none of `records` was appended and the log is unchanged. [`ChunkLogError::Broken`].
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
    /// [`ChunkLogError::Io`]; if the disk was full nothing is lost and the call can be retried, otherwise see
    /// [`ChunkLog::is_broken`]. [`ChunkLogError::Broken`].
    pub fn sync(&mut self) -> Result<(), ChunkLogError> {
        self.hand_over()?;
        self.sync_file()?;
        match self.name_pending {
            true => self.sync_name(),
            false => Ok(()),
        }
    }

    /// Writes everything appended to the file, without making it durable: it survives a killed process, but not a power
    /// loss.
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

    /// Whether [`ChunkLog::rewrite`] is due: the log is broken, or has grown enough since its snapshot.
    #[must_use]
    pub fn wants_rewrite(&self) -> bool {
        let long = self.bytes() > REWRITE_BYTES && self.bytes() > self.snapshot * REWRITE_TIMES;
        long || self.is_broken()
    }

    /// Whether the contents of the file are unknown because a sync failed. Only [`ChunkLog::rewrite`], or reopening the
    /// log, makes it usable again.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.log.is_broken()
    }

    /// Size of the log in bytes, including what is not written yet.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.log.end() + self.pending.len() as u64
    }

    /// Restarts the log with a header and `snapshot`, replacing everything appended so far. Atomic, also in a crash,
    /// and durable on return. Needs space for the old and the new log at the same time.
    ///
    /// # Errors
    /// [`ChunkLogError::HeaderTooLong`]; [`ChunkLogError::Io`]: the old log remains in use, or, if only the new name
    /// could not be made durable, the new one, and [`ChunkLog::sync`] retries that.
    pub fn rewrite(
        &mut self,
        header: &[u8],
        snapshot: impl IntoIterator<Item = Record>,
    ) -> Result<(), ChunkLogError> {
        let directory = Arc::clone(&self.directory);
        let mut new = Self::begin(directory, &self.name, header, snapshot.into_iter())?;
        let result = new.adopt_name();
        // Until the new name is durable, a crash still leaves the old file.
        if result.is_ok() || new.name_pending {
            *self = new;
        }
        result
    }

    /// Whether a [`ChunkLog::rewrite`] that failed has taken effect all the same: until [`ChunkLog::sync`] has returned, a power
    /// loss may bring the old log back.
    #[must_use]
    pub fn has_pending_name(&self) -> bool {
        self.name_pending
    }

    /// Writes a log under its temporary name and makes its contents durable.
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
            header: header.to_vec(),
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
                // Best effort: the next rewrite truncates it.
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

    /// Writes the pending records as a frame.
    fn write_frame(&mut self) -> Result<(), ChunkLogError> {
        let frame = frame(self.sequence + 1, self.durable, &self.pending);
        if let Err(error) = self.log.append(&frame) {
            if !self.log.is_broken() {
                // The remainder was made durable when the tail was cut.
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
