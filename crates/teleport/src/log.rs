//! The transfer log: all state that must survive a crash for a transfer to resume.
//!
//! One append-only file per transfer: the offer and its layout, then each batch with its plan, in walk order; finally
//! the data needed to give the file its name. The blocks themselves are in the partial file; a resume digests them
//! again, so the log never claims that a block is present (`docs/format/transfer-log.md`).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_storage::record_log::{RecordLog, Window};
use drover_storage::{Disk, SyncedFile, create_private};

use crate::TeleportError;

const MAGIC: &[u8; 8] = b"DRVRLOG\0";
const VERSION: u32 = 1;
const HEADER_BYTES: u64 = 16;
const RECORD_HEADER: usize = 12;

/// The largest record: a layout at its limit, plus overhead.
const MAX_RECORD: usize = drover_store::MAX_LAYOUT_BYTES as usize + (1 << 16);

/// Type of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordKind {
    /// The sender and the offer (postcard of `Opening`).
    Opening,
    /// The encoded layout.
    Layout,
    /// A batch with its plan.
    Batch,
    /// The file is complete and synced and is about to be renamed (postcard of `Closing`).
    Closing,
    /// Blocks that came ahead of their batches, in a log of their own (`transfer::ahead`).
    Ahead,
}

impl RecordKind {
    fn number(self) -> u8 {
        match self {
            RecordKind::Opening => 1,
            RecordKind::Layout => 2,
            RecordKind::Batch => 3,
            // 4 and 6 were used by early versions; reading stops at such a record.
            RecordKind::Closing => 5,
            RecordKind::Ahead => 7,
        }
    }

    fn from_number(n: u8) -> Option<Self> {
        use RecordKind::*;
        [Opening, Layout, Batch, Closing, Ahead]
            .into_iter()
            .find(|k| k.number() == n)
    }
}

/// A record that was read.
#[derive(Debug, PartialEq, Eq)]
pub struct Record {
    /// Its type.
    pub kind: RecordKind,
    /// Its bytes.
    pub payload: Vec<u8>,
    /// End of the record in the file, in bytes.
    pub end: u64,
}

fn checksum(kind: u8, payload: &[u8]) -> u32 {
    let mut d = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    d.update(&[kind]);
    d.update(payload);
    d.finalize() as u32
}

fn head_of(kind: RecordKind, payload: &[u8]) -> [u8; RECORD_HEADER] {
    let mut head = [0; RECORD_HEADER];
    head[..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    head[4] = kind.number();
    head[8..].copy_from_slice(&checksum(kind.number(), payload).to_le_bytes());
    head
}

/// A log open for appending.
#[derive(Debug)]
pub struct Log {
    file: Arc<SyncedFile>,
    log: RecordLog,
    path: PathBuf,
}

impl Log {
    /// Creates an empty log.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn create(path: &Path, disk: &Arc<dyn Disk>) -> Result<Self, TeleportError> {
        let failed = |e| TeleportError::file("create", path)(e);
        let file = create_private(path).map_err(failed)?;
        let mut header = Vec::from(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&checksum(0, &header).to_le_bytes());
        let mut log = Self::at(path, file, 0, disk).map_err(failed)?;
        log.log.append(&header).map_err(failed)?;
        Ok(log)
    }

    /// Opens a log for appending after `keep` bytes; anything beyond is truncated.
    ///
    /// # Errors
    /// When the file cannot be opened or truncated.
    pub fn reopen(path: &Path, keep: u64, disk: &Arc<dyn Disk>) -> Result<Self, TeleportError> {
        let failed = |e| TeleportError::file("reopen", path)(e);
        let file = File::options().write(true).open(path).map_err(failed)?;
        Self::at(path, file, keep, disk).map_err(failed)
    }

    fn at(path: &Path, file: File, end: u64, disk: &Arc<dyn Disk>) -> io::Result<Self> {
        let file = Arc::new(SyncedFile::new(file, disk.clone()));
        Ok(Log {
            log: RecordLog::reopen(file.clone(), end)?,
            file,
            path: path.into(),
        })
    }

    /// Appends a record. Durable only after a sync.
    ///
    /// # Errors
    /// When it cannot be written; the log is then truncated to its previous length, so that no later record follows a
    /// torn one.
    pub fn append(&mut self, kind: RecordKind, payload: &[u8]) -> Result<(), TeleportError> {
        let mut record = Vec::with_capacity(RECORD_HEADER + payload.len());
        record.extend_from_slice(&head_of(kind, payload));
        record.extend_from_slice(payload);
        let appended = self.log.append(&record);
        appended.map_err(TeleportError::file("append to", &self.path))
    }

    /// Syncs all appended records.
    ///
    /// # Errors
    /// I/O errors.
    pub fn sync(&self) -> Result<(), TeleportError> {
        self.file
            .sync_data()
            .map_err(TeleportError::file("sync", &self.path))
    }

    /// Its file, to sync from another thread.
    #[must_use]
    pub fn file(&self) -> Arc<SyncedFile> {
        self.file.clone()
    }

    /// Truncates the log to `keep` bytes.
    ///
    /// # Errors
    /// I/O errors.
    pub fn cut(&mut self, keep: u64) -> Result<(), TeleportError> {
        let cut = self.log.cut(keep);
        cut.map_err(TeleportError::file("cut", &self.path))
    }

    /// Renames the file, replacing any file of that name.
    ///
    /// # Errors
    /// I/O errors.
    pub fn rename(&mut self, to: &Path) -> Result<(), TeleportError> {
        std::fs::rename(&self.path, to).map_err(TeleportError::file("rename to", to))?;
        self.path = to.into();
        Ok(())
    }

    /// End of the last record in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.log.end()
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Reads a log from the beginning; stops at the first torn or damaged record.
pub struct LogReader {
    window: Window,
    at: u64,
}

impl LogReader {
    /// Opens a log. `None` when it has no valid header and is unusable.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn open(path: &Path) -> Result<Option<Self>, TeleportError> {
        let failed = |e| TeleportError::file("read", path)(e);
        let file = File::open(path).map_err(failed)?;
        let mut window = Window::new(Box::new(file)).map_err(failed)?;
        let Ok(header) = window.at(0, HEADER_BYTES as usize) else {
            return Ok(None);
        };
        let Some((front, sum)) = header.split_at_checked(12) else {
            return Ok(None);
        };
        let good = &front[..8] == MAGIC
            && front[8..] == VERSION.to_le_bytes()
            && sum == checksum(0, front).to_le_bytes();
        Ok(good.then_some(LogReader {
            window,
            at: HEADER_BYTES,
        }))
    }

    /// Passes over the next record if it is this one. Takes little memory, however long the record is.
    pub fn pass(&mut self, kind: RecordKind, payload: &[u8]) -> bool {
        let head = self.window.at(self.at, RECORD_HEADER);
        if head.ok() != Some(&head_of(kind, payload)) {
            return false;
        }
        let mut at = self.at + RECORD_HEADER as u64;
        for piece in payload.chunks(Window::BYTES) {
            if self.window.at(at, piece.len()).ok() != Some(piece) {
                return false;
            }
            at += piece.len() as u64;
        }
        self.at = at;
        true
    }

    /// End of the last valid record in bytes.
    #[must_use]
    pub fn valid_bytes(&self) -> u64 {
        self.at
    }
}

impl Iterator for LogReader {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        let head = self.window.at(self.at, RECORD_HEADER).ok()?;
        let head: [u8; RECORD_HEADER] = head.try_into().ok()?;
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let kind = RecordKind::from_number(head[4])?;
        let end = self.at + (RECORD_HEADER + length) as u64;
        if length > MAX_RECORD || end > self.window.length() || head[5..8] != [0; 3] {
            return None;
        }
        let start = self.at + RECORD_HEADER as u64;
        let payload = self.window.at(start, length).ok()?.to_vec();
        if payload.len() < length {
            return None;
        }
        // Let fuzzers past the checksum.
        if head[8..] != checksum(head[4], &payload).to_le_bytes() && !cfg!(fuzzing) {
            return None;
        }
        self.at = end;
        Some(Record { kind, payload, end })
    }
}

/// Whether a log ends in a closing record. Examines only record headers; callers that act on it read the log.
#[must_use]
pub fn is_closed(path: &Path) -> bool {
    use std::os::unix::fs::FileExt;
    let Ok(file) = File::open(path) else {
        return false;
    };
    let (mut at, mut head) = (HEADER_BYTES, [0u8; RECORD_HEADER]);
    while file.read_exact_at(&mut head, at).is_ok() {
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        match RecordKind::from_number(head[4]) {
            Some(RecordKind::Closing) => return true,
            Some(_) => at += RECORD_HEADER as u64 + u64::from(length),
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Arc<dyn Disk> {
        Arc::new(drover_storage::HostDisk)
    }

    fn sample(path: &Path) -> Vec<(RecordKind, Vec<u8>)> {
        let records = vec![
            (RecordKind::Opening, b"who".to_vec()),
            (RecordKind::Layout, vec![]),
            (RecordKind::Batch, vec![7; 300]),
            (RecordKind::Batch, vec![9; 40]),
        ];
        let mut log = Log::create(path, &disk()).unwrap();
        for (k, p) in &records {
            log.append(*k, p).unwrap();
        }
        log.sync().unwrap();
        records
    }

    fn read(path: &Path) -> Option<Vec<(RecordKind, Vec<u8>)>> {
        LogReader::open(path)
            .unwrap()
            .map(|r| r.map(|r| (r.kind, r.payload)).collect())
    }

    #[test]
    fn what_was_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let records = sample(&path);
        assert_eq!(read(&path), Some(records));
    }

    #[test]
    fn a_log_cut_anywhere_keeps_its_whole_records_and_can_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let records = sample(&path);
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let Some(reader) = LogReader::open(&path).unwrap() else {
                assert!(cut < 16);
                continue;
            };
            let mut reader = reader;
            let kept: Vec<_> = reader.by_ref().map(|r| (r.kind, r.payload)).collect();
            assert_eq!(kept, records[..kept.len()]);
            let mut log = Log::reopen(&path, reader.valid_bytes(), &disk()).unwrap();
            assert!(!is_closed(&path));
            log.append(RecordKind::Closing, b"end").unwrap();
            assert!(is_closed(&path));
            let again = read(&path).unwrap();
            assert_eq!(again.len(), kept.len() + 1);
            assert_eq!(again.last().unwrap().1, b"end");
        }
    }

    #[test]
    fn a_record_of_an_unknown_kind_ends_the_log_and_it_goes_on_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let records = sample(&path);
        let before = std::fs::metadata(&path).unwrap().len();
        for kind in [4u8, 6] {
            let payload = b"a plan, as early versions wrote";
            let mut bytes = std::fs::read(&path).unwrap();
            bytes.extend((payload.len() as u32).to_le_bytes());
            bytes.extend([kind, 0, 0, 0]);
            bytes.extend(checksum(kind, payload).to_le_bytes());
            bytes.extend(payload);
            std::fs::write(&path, &bytes).unwrap();
            let mut log = Log::reopen(&path, bytes.len() as u64, &disk()).unwrap();
            log.append(RecordKind::Closing, b"end").unwrap();
            assert!(!is_closed(&path));
            let mut reader = LogReader::open(&path).unwrap().unwrap();
            let kept: Vec<_> = reader.by_ref().map(|r| (r.kind, r.payload)).collect();
            assert_eq!((kept, reader.valid_bytes()), (records.clone(), before));
            Log::reopen(&path, before, &disk()).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().len(), before);
        }
    }

    #[test]
    fn a_flipped_bit_ends_the_log_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let records = sample(&path);
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 0x10;
            std::fs::write(&path, &bad).unwrap();
            match read(&path) {
                None => assert!(at < 16),
                Some(kept) => {
                    assert!(kept.len() < records.len());
                    assert_eq!(kept, records[..kept.len()]);
                }
            }
        }
    }
}
