//! An append-only file of records: appending such that a crash leaves only whole records, and reading them back.
//!
//! Framing is the owner's: each record has a checksum that detects a torn one, and replay ends there. This module
//! ensures that nothing that could be mistaken for a record follows a torn one.

use std::io;
use std::sync::Arc;

use crate::File;

/// The tail of a log. One owner appends to a file.
pub struct RecordLog {
    file: Arc<dyn File>,
    /// End offset of the last record.
    end: u64,
    /// Offset up to which the file is known to be on disk.
    durable: u64,
    /// Bytes after `durable` may be lost, or bytes after `end` may reappear.
    broken: bool,
}

impl RecordLog {
    /// Continues at `end`, which is the end of the file.
    #[must_use]
    pub fn new(file: Arc<dyn File>, end: u64) -> Self {
        Self {
            file,
            end,
            durable: 0,
            broken: false,
        }
    }

    /// Continues at `end`, where the last whole record ends; the rest is cut off.
    ///
    /// # Errors
    /// Errors of the medium.
    pub fn reopen(file: Arc<dyn File>, end: u64) -> io::Result<Self> {
        if file.len()? > end {
            file.set_len(end)?;
        }
        Ok(Self::new(file, end))
    }

    /// Advances past an existing record that ends at `end`: for replaying before appending.
    pub fn pass(&mut self, end: u64) {
        self.end = end;
    }

    /// Appends one or more records. They may be lost until [`RecordLog::sync`] has returned.
    ///
    /// # Errors
    /// Errors of the medium: nothing was appended, and a partial write is undone. Also an earlier failure that left the
    /// contents unknown.
    pub fn append(&mut self, record: &[u8]) -> io::Result<()> {
        self.check()?;
        if let Err(error) = self.file.write_at(record, self.end) {
            // The log itself remembers whether the cut failed.
            let _ = self.cut(self.end);
            return Err(error);
        }
        self.end += record.len() as u64;
        Ok(())
    }

    /// Makes everything appended durable.
    ///
    /// # Errors
    /// Errors of the medium, permanently: data appended since the last success may be lost, and no later sync can tell.
    pub fn sync(&mut self) -> io::Result<()> {
        self.check()?;
        let synced = self.file.sync();
        match synced {
            Ok(()) => self.durable = self.end,
            Err(_) => self.broken = true,
        }
        synced
    }

    /// Truncates the log to `end`, durably: a removed record must not reappear after one written in its place. Repairs
    /// a broken log if all that remains was durable.
    ///
    /// # Errors
    /// Errors of the medium; the log is broken then.
    pub fn cut(&mut self, end: u64) -> io::Result<()> {
        let cut = self.file.set_len(end).and_then(|()| self.file.sync());
        self.end = end;
        match cut.is_ok() && (!self.broken || end <= self.durable) {
            true => (self.durable, self.broken) = (end, false),
            false => self.broken = true,
        }
        cut
    }

    /// End offset of the last record.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Whether the contents of the file are unknown.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    fn check(&self) -> io::Result<()> {
        match self.broken {
            true => Err(io::Error::other("an earlier write or sync of it failed")),
            false => Ok(()),
        }
    }
}

impl std::fmt::Debug for RecordLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecordLog")
            .field("end", &self.end)
            .field("durable", &self.durable)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

/// Part of a file in memory, for reading it from front to back.
pub struct Window {
    file: Box<dyn File>,
    length: u64,
    buffer: Vec<u8>,
    start: u64,
}

impl Window {
    /// Bytes per read.
    pub const BYTES: usize = 256 << 10;

    /// For a file of its current length.
    ///
    /// # Errors
    /// Errors of the medium.
    pub fn new(file: Box<dyn File>) -> io::Result<Self> {
        Ok(Self {
            length: file.len()?,
            file,
            buffer: Vec::new(),
            start: 0,
        })
    }

    /// Length of the file in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// `length` bytes at `offset`, fewer at the end of the file. Allocates memory only for what exists.
    ///
    /// # Errors
    /// Errors of the medium.
    pub fn at(&mut self, offset: u64, length: usize) -> io::Result<&[u8]> {
        let wanted = (self.length.saturating_sub(offset)).min(length as u64) as usize;
        let inside =
            offset >= self.start && offset + wanted as u64 <= self.start + self.buffer.len() as u64;
        if !inside {
            self.buffer.resize(wanted.max(Self::BYTES), 0);
            let count = self.file.read_at(&mut self.buffer, offset)?;
            self.buffer.truncate(count);
            self.start = offset;
        }
        let from = (offset - self.start) as usize;
        let to = (from + wanted).min(self.buffer.len());
        Ok(&self.buffer[from..to])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Directory, FakeDirectory, Operation};

    fn log(fake: &FakeDirectory) -> RecordLog {
        let file = fake.create("log").unwrap();
        fake.sync().unwrap();
        RecordLog::new(file.into(), 0)
    }

    #[test]
    fn what_could_not_be_appended_is_taken_back() {
        let fake = FakeDirectory::default();
        let mut log = log(&fake);
        log.append(&[1; 700]).unwrap();
        fake.set_capacity(Some(1024));
        let error = log.append(&[2; 900]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!((log.end(), log.is_broken()), (700, false));
        log.append(&[3; 100]).unwrap();
        log.sync().unwrap();
        for seed in 0..50 {
            let bytes = fake.after_crash(seed).bytes("log").unwrap();
            assert_eq!(bytes, [&[1; 700][..], &[3; 100]].concat());
        }
    }

    #[test]
    fn a_failed_sync_is_final_unless_all_that_is_left_was_durable() {
        let fake = FakeDirectory::default();
        let mut log = log(&fake);
        log.append(&[1; 100]).unwrap();
        log.sync().unwrap();
        log.append(&[2; 100]).unwrap();
        fake.set_faults(|operation, _| {
            (operation == Operation::Sync).then_some(io::ErrorKind::Other)
        });
        log.sync().unwrap_err();
        fake.clear_faults();
        log.sync().unwrap_err();
        log.append(&[3; 100]).unwrap_err();
        log.cut(150).unwrap();
        assert!(log.is_broken(), "50 bytes may be lost");
        log.cut(100).unwrap();
        log.append(&[4; 100]).unwrap();
        log.sync().unwrap();
        let bytes = fake.after_crash(3).bytes("log").unwrap();
        assert_eq!(bytes, [[1; 100], [4; 100]].concat());
    }

    #[test]
    fn a_window_shows_any_part_of_a_file() {
        let fake = FakeDirectory::default();
        let bytes: Vec<u8> = (0..Window::BYTES * 3).map(|i| (i % 251) as u8).collect();
        fake.put("f", &bytes);
        let file = fake.open("f", crate::Access::Read).unwrap();
        let mut window = Window::new(file).unwrap();
        for (at, length) in [
            (0, 10),
            (9, 5),
            (Window::BYTES - 3, 6),
            (5, Window::BYTES * 2),
            (7, 7),
            (bytes.len() - 4, 100),
            (bytes.len() + 1, 3),
        ] {
            let from = at.min(bytes.len());
            let to = (at + length).min(bytes.len());
            assert_eq!(window.at(at as u64, length).unwrap(), &bytes[from..to]);
        }
    }
}
