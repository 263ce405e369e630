//! `sequences.pending`: the journal of pending stores (`docs/format/sequence-cache.md`).
//!
//! Like all of the sequence cache it is a hint, so nothing waits for it to be durable. If it cannot be written, the
//! file is truncated: an empty journal needs no space and is incomplete, but never stale. After a crash, lost entries
//! only cost retransmissions.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use drover_core::CompactIndex;
use drover_index::{ImageId, SEGMENT_SLOTS};
use drover_storage::create_private;

use super::table::{Change, Pending, Table};

const MAGIC: [u8; 8] = *b"DRVRPEND";
/// Versions 1 and 2 were one packed table, written at close, without the magic. Version 3 allowed at most 128 slots per
/// record and is otherwise the same; it can be read, and is rewritten.
const VERSION: u32 = 4;
const HEADER: usize = 16;
const RECORD: usize = 56;

/// Superfluous records allowed before the file is rewritten.
const SLACK: u64 = 1 << 14;

/// Beyond its maximum size.
const MAX_BYTES: u64 = 64 << 20;

/// The open file.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    /// `None` after a failed write.
    file: Option<File>,
    records: u64,
    unsynced: bool,
}

impl Journal {
    /// Opens the journal at `path`, and replays the pending stores.
    pub fn open(path: &Path) -> (Self, Table) {
        let mut table = Table::default();
        let mut journal = Journal {
            path: path.into(),
            file: None,
            records: 0,
            unsynced: false,
        };
        // An unreadable journal counts as empty.
        let bytes = read(path).unwrap_or_default();
        let current = checked_header(&bytes, VERSION);
        let Some(records) = current else {
            if let Some(records) = checked_header(&bytes, 3) {
                replay(records, &mut table);
            }
            journal.rewrite(&table);
            return (journal, table);
        };
        journal.records = replay(records, &mut table);
        let file = File::options().write(true).open(path);
        let end = HEADER as u64 + journal.records * RECORD as u64;
        match file.and_then(|file| file.set_len(end).map(|()| file)) {
            Ok(file) => journal.file = Some(file),
            Err(e) => journal.give_up(&e),
        }
        (journal, table)
    }

    /// Appends a change that has been applied to `table`.
    pub fn append(&mut self, change: Change, table: &Table) {
        if self.records > 2 * table.len() as u64 + SLACK {
            return self.rewrite(table);
        }
        let Some(file) = &self.file else { return };
        let at = HEADER as u64 + self.records * RECORD as u64;
        match file.write_all_at(&encode(change), at) {
            Ok(()) => {
                self.records += 1;
                self.unsynced = true;
            }
            Err(e) => self.give_up(&e),
        }
    }

    /// Rewrites the file if an earlier write failed; else syncs what was appended.
    pub fn settle(&mut self, table: &Table) {
        let Some(file) = &self.file else {
            return self.rewrite(table);
        };
        if std::mem::take(&mut self.unsynced)
            && let Err(e) = file.sync_data()
        {
            self.give_up(&e);
        }
    }

    /// Rewrites the file with only the records that are needed.
    pub fn rewrite(&mut self, table: &Table) {
        let mut bytes = Vec::with_capacity(HEADER + table.len() * RECORD);
        bytes.extend_from_slice(&header(VERSION));
        table
            .iter()
            .for_each(|(first, p)| bytes.extend_from_slice(&encode(Change::Put(first, p))));
        let fresh = self.path.with_extension("pending.new");
        let write = || -> io::Result<File> {
            let file = create_private(&fresh)?;
            file.write_all_at(&bytes, 0)?;
            file.sync_data()?;
            std::fs::rename(&fresh, &self.path)?;
            Ok(file)
        };
        match write() {
            Ok(file) => {
                self.file = Some(file);
                self.records = table.len() as u64;
                self.unsynced = false;
            }
            Err(e) => {
                let _ = std::fs::remove_file(&fresh);
                self.give_up(&e);
            }
        }
    }

    /// Simulates a failed write.
    #[cfg(test)]
    pub fn fail(&mut self) {
        self.give_up(&io::ErrorKind::StorageFull.into());
    }

    /// Truncates the file, which would soon be stale.
    fn give_up(&mut self, error: &io::Error) {
        let path = self.path.display();
        tracing::debug!("{path}: {error}; it is rewritten once there is space");
        self.file = None;
        self.records = 0;
        if let Err(e) = std::fs::remove_file(&self.path)
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {path}: {e}");
        }
    }
}

/// Applies the records, and returns how many were valid: a crash may leave a torn record, which ends the journal.
pub fn replay(records: &[u8], table: &mut Table) -> u64 {
    let changes = records.chunks_exact(RECORD).map_while(decode);
    changes.map(|change| table.apply(change)).count() as u64
}

/// Reads a file, up to the maximum size of a journal.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path)?
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)?;
    match read as u64 > MAX_BYTES {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        false => Ok(bytes),
    }
}

fn sum(bytes: &[u8]) -> [u8; 4] {
    (crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32).to_le_bytes()
}

fn header(version: u32) -> [u8; HEADER] {
    let mut h = [0; HEADER];
    h[..8].copy_from_slice(&MAGIC);
    h[8..12].copy_from_slice(&version.to_le_bytes());
    let sum = sum(&h[..12]);
    h[12..].copy_from_slice(&sum);
    h
}

/// The records after a header of that version.
fn checked_header(bytes: &[u8], version: u32) -> Option<&[u8]> {
    let (h, records) = bytes.split_first_chunk::<HEADER>()?;
    (*h == header(version)).then_some(records)
}

/// Number of slots in the largest possible file.
const MAX_SLOTS: u64 = 1 << (63 - drover_core::BLOCK_SIZE.trailing_zeros());

const PUT: u8 = 1;
const CLEAR: u8 = 2;
const DROP: u8 = 3;
const FOUND: u8 = 1;

fn encode(change: Change) -> [u8; RECORD] {
    let (kind, count, words, found) = match change {
        Change::Put(first, p) => (PUT, p.count, [first, p.image, p.from.0], p.found),
        Change::Clear(first, count) => (CLEAR, count, [first, 0, 0], None),
        Change::Drop(image) => (DROP, 0, [0, image.0, 0], None),
    };
    let mut r = [0; RECORD];
    r[0] = kind;
    r[1] = if found.is_some() { FOUND } else { 0 };
    r[4..8].copy_from_slice(&count.to_le_bytes());
    let (image, from) = found.unwrap_or_default();
    let words = [words[0], words[1], words[2], image, from.0];
    for (to, word) in r[8..48].chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    let sum = sum(&r[..52]);
    r[52..].copy_from_slice(&sum);
    r
}

fn decode(r: &[u8]) -> Option<Change> {
    if r.len() != RECORD || (r[52..] != sum(&r[..52]) && !cfg!(fuzzing)) {
        return None;
    }
    let count = u32::from_le_bytes(r[4..8].try_into().ok()?);
    let mut words = r[8..48]
        .as_chunks()
        .0
        .iter()
        .map(|w| u64::from_le_bytes(*w));
    let mut word = || words.next();
    let (first, image, from, other, at) = (word()?, word()?, word()?, word()?, word()?);
    let found = (r[1] & FOUND != 0).then_some((other, CompactIndex(at)));
    // At most the slots of a segment, within a file: sums and products of these cannot overflow.
    let inside = |count: u32| (1..=SEGMENT_SLOTS).contains(&u64::from(count)) && first < MAX_SLOTS;
    match r[0] {
        PUT if inside(count) => Some(Change::Put(
            first,
            Pending {
                count,
                image,
                from: CompactIndex(from),
                found,
            },
        )),
        CLEAR if inside(count) => Some(Change::Clear(first, count)),
        DROP => Some(Change::Drop(ImageId(image))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_of_version_3_is_read_and_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sequences.pending");
        let pending = Pending {
            count: 128,
            image: 1,
            from: CompactIndex(5),
            found: None,
        };
        let mut bytes = header(3).to_vec();
        bytes.extend(encode(Change::Put(256, pending)));
        std::fs::write(&path, &bytes).unwrap();
        for _ in 0..2 {
            let (_, table) = Journal::open(&path);
            assert_eq!(table.at(256), Some(pending));
            assert!(std::fs::read(&path).unwrap().starts_with(&header(VERSION)));
        }
    }

    /// Such a record has a valid checksum only if forged: it ends the journal, and nothing overflows.
    #[test]
    fn slots_beyond_any_file_are_not_taken() {
        let pending = Pending {
            count: SEGMENT_SLOTS as u32,
            image: 1,
            from: CompactIndex(u64::MAX),
            found: Some((2, CompactIndex(u64::MAX))),
        };
        let last = MAX_SLOTS - 1;
        let mut records = Vec::new();
        for first in [last, last - 1, u64::MAX - SEGMENT_SLOTS, 5] {
            records.extend(encode(Change::Put(first, pending)));
        }
        let mut table = Table::default();
        assert_eq!(replay(&records, &mut table), 2);
        table.check();
        assert!(table.covering(last).is_some());
    }
}
