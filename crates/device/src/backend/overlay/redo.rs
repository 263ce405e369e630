//! An epoch on its way: a file of changes that count once it is sealed.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use drover_core::{BLOCK_SIZE_U64, Digest};

use super::OverlayError;
use crate::remote::{Change, Epoch};
use crate::storage::{Access, Directory, File, read_exact_at};

const MAGIC: [u8; 8] = *b"DRVRREDO";
const VERSION: u32 = 1;
const HEADER: usize = 64;
const CHANGE: usize = 32;
const PREFIX: &str = "epoch-";
/// Bytes of a redo file that are read or written in one go.
pub(super) const SLAB: usize = 1 << 20;

const KIND_DATA: u32 = 1;
const KIND_ZERO: u32 = 2;
const KIND_SEAL: u32 = 3;

/// Blocks, and where in the file their bytes begin; zeros without.
pub(super) type Piece = (Range<u64>, Option<u64>);

/// Changes of one epoch, in a file, and where in it each block is.
pub(super) struct Redo {
    pub epoch: Epoch,
    pub file: Box<dyn File>,
    pub name: String,
    /// By the first block; no two overlap.
    pieces: BTreeMap<u64, (u64, Option<u64>)>,
    /// Where the next change goes.
    end: u64,
    changes: u64,
    bytes: u64,
}

/// Why an epoch could not be sealed.
pub(super) enum SealError {
    /// It does not count.
    Not(io::Error),
    /// It is not known whether it would count after a crash.
    Unknown(io::Error),
}

/// What a redo file of an earlier run turned out to be.
pub(super) enum Found {
    /// All there.
    Sealed(Redo),
    /// It never counted.
    Unsealed,
}

/// The epoch of a redo file by that name.
pub(super) fn epoch_of(name: &str) -> Option<Epoch> {
    let number: u64 = name.strip_prefix(PREFIX)?.parse().ok()?;
    (name_of(Epoch(number)) == name).then_some(Epoch(number))
}

fn name_of(epoch: Epoch) -> String {
    format!("{PREFIX}{}", epoch.0)
}

fn crc(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The head of a change.
struct Head {
    kind: u32,
    payload_crc: u32,
    offset: u64,
    length: u64,
}

impl Head {
    fn encode(&self) -> [u8; CHANGE] {
        let mut bytes = [0; CHANGE];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.payload_crc.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        let sum = crc(&bytes[..28]);
        bytes[28..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; CHANGE]) -> Option<Self> {
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let fine = u32_at(28) == crc(&bytes[..28]) || cfg!(fuzzing);
        fine.then(|| Self {
            kind: u32_at(0),
            payload_crc: u32_at(4),
            offset: u64_at(8),
            length: u64_at(16),
        })
    }
}

fn header(epoch: Epoch, base: &Digest) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&epoch.0.to_le_bytes());
    bytes[24..56].copy_from_slice(&base.0);
    let sum = crc(&bytes[..60]);
    bytes[60..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The blocks of a range of whole blocks; the device's last one may be short.
fn blocks_of(offset: u64, length: u64) -> Range<u64> {
    offset / BLOCK_SIZE_U64..(offset + length).div_ceil(BLOCK_SIZE_U64)
}

/// Whether a range consists of whole blocks of a device of `size` bytes.
pub(super) fn is_whole(offset: u64, length: u64, size: u64) -> bool {
    offset.is_multiple_of(BLOCK_SIZE_U64)
        && offset
            .checked_add(length)
            .is_some_and(|end| end == size || end < size && end.is_multiple_of(BLOCK_SIZE_U64))
}

impl Redo {
    fn without_changes(epoch: Epoch, file: Box<dyn File>, name: String) -> Self {
        Self {
            epoch,
            file,
            name,
            pieces: BTreeMap::new(),
            end: HEADER as u64,
            changes: 0,
            bytes: 0,
        }
    }

    /// Makes the file, its name durable.
    pub fn create(
        directory: &dyn Directory,
        epoch: Epoch,
        base: &Digest,
    ) -> Result<Self, OverlayError> {
        let name = name_of(epoch);
        let said = directory.describe(&name);
        let failed = OverlayError::io("create", &said);
        match directory.remove(&name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let file = directory.create(&name).map_err(&failed)?;
        file.write_at(&header(epoch, base), 0).map_err(&failed)?;
        directory.sync().map_err(&failed)?;
        Ok(Self::without_changes(epoch, file, name))
    }

    /// Bytes that a set of changes takes here. Each counts as a block at least, for what is kept of it in memory.
    pub fn bytes_of(changes: &[Change]) -> u64 {
        let bytes = |change: &Change| match change {
            Change::Write(_, data) => CHANGE as u64 + data.len() as u64,
            Change::Zero(..) => BLOCK_SIZE_U64,
        };
        changes.iter().map(bytes).sum()
    }

    /// What [`Redo::bytes_of`] said of all changes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends changes, which were checked. After an error none of them is there.
    pub fn append(&mut self, changes: &[Change]) -> io::Result<()> {
        let mut end = self.end;
        let mut places = Vec::with_capacity(changes.len());
        let mut slab: Vec<u8> = Vec::new();
        let mut slab_at = end;
        for change in changes {
            let (kind, payload): (_, &[u8]) = match change {
                Change::Write(_, data) => (KIND_DATA, data),
                Change::Zero(..) => (KIND_ZERO, &[]),
            };
            let head = Head {
                kind,
                payload_crc: crc(payload),
                offset: change.offset(),
                length: change.covers(),
            };
            slab.extend_from_slice(&head.encode());
            slab.extend_from_slice(payload);
            places.push((kind == KIND_DATA).then_some(end + CHANGE as u64));
            end += (CHANGE + payload.len()) as u64;
            if slab.len() >= SLAB {
                self.file.write_at(&slab, slab_at)?;
                slab_at += slab.len() as u64;
                slab.clear();
            }
        }
        self.file.write_at(&slab, slab_at)?;
        for (change, place) in changes.iter().zip(places) {
            self.insert(blocks_of(change.offset(), change.covers()), place);
        }
        self.end = end;
        self.changes += changes.len() as u64;
        self.bytes += Self::bytes_of(changes);
        Ok(())
    }

    /// Makes the changes count, durably. They were all durable before the seal was written: a seal never stands behind
    /// changes that a crash has lost.
    ///
    /// # Errors
    /// [`SealError`].
    pub fn seal(&mut self) -> Result<(), SealError> {
        let ready = self.file.set_len(self.end).and_then(|()| self.file.sync());
        ready.map_err(SealError::Not)?;
        let seal = Head {
            kind: KIND_SEAL,
            payload_crc: 0,
            offset: self.changes,
            length: self.end,
        };
        let sealed = self.file.write_at(&seal.encode(), self.end);
        let Err(error) = sealed.and_then(|()| self.file.sync()) else {
            return Ok(());
        };
        // Taken back, and that durably.
        match self.file.set_len(self.end).and_then(|()| self.file.sync()) {
            Ok(()) => Err(SealError::Not(error)),
            Err(_) => Err(SealError::Unknown(error)),
        }
    }

    /// The pieces that touch a range of blocks, cut to it, in order.
    pub fn pieces(&self, blocks: Range<u64>) -> impl Iterator<Item = Piece> + '_ {
        let before = self.pieces.range(..blocks.start).next_back();
        let (from, to) = (blocks.start, blocks.end.max(blocks.start));
        before
            .into_iter()
            .chain(self.pieces.range(from..to))
            .filter(move |(_, (end, _))| *end > from)
            .map(move |(&start, &(end, at))| {
                let first = start.max(from);
                let skipped = (first - start) * BLOCK_SIZE_U64;
                (first..end.min(to), at.map(|at| at + skipped))
            })
    }

    /// All pieces, in order.
    pub fn all(&self) -> impl Iterator<Item = Piece> + '_ {
        self.pieces.iter().map(|(&s, &(end, at))| (s..end, at))
    }

    fn insert(&mut self, blocks: Range<u64>, place: Option<u64>) {
        if blocks.is_empty() {
            return;
        }
        let touched: Vec<_> = self.pieces(blocks.clone()).map(|piece| piece.0).collect();
        for part in touched {
            let Some((start, (end, at))) = self.at_or_before(part.start) else {
                continue;
            };
            self.pieces.remove(&start);
            if start < blocks.start {
                self.pieces.insert(start, (blocks.start, at));
            }
            if end > blocks.end {
                let at = at.map(|at| at + (blocks.end - start) * BLOCK_SIZE_U64);
                self.pieces.insert(blocks.end, (end, at));
            }
        }
        self.pieces.insert(blocks.start, (blocks.end, place));
    }

    fn at_or_before(&self, block: u64) -> Option<(u64, (u64, Option<u64>))> {
        let (start, piece) = self.pieces.range(..=block).next_back()?;
        Some((*start, *piece))
    }

    /// Looks at a redo file that an earlier run left.
    ///
    /// # Errors
    /// [`OverlayError::Damaged`] when it was sealed and is not whole any more; [`OverlayError::Io`].
    pub fn open(
        directory: &dyn Directory,
        epoch: Epoch,
        base: &Digest,
        size: u64,
    ) -> Result<Found, OverlayError> {
        let name = name_of(epoch);
        let said = directory.describe(&name);
        let read = OverlayError::io("read", &said);
        let file = directory.open(&name, Access::Read).map_err(&read)?;
        let length = file.len().map_err(&read)?;
        let mut redo = Self::without_changes(epoch, file, name);
        let what = match redo.parse(base, size, length).map_err(&read)? {
            Ok(()) => return Ok(Found::Sealed(redo)),
            Err(what) => what,
        };
        match redo.ends_with_seal(length).map_err(&read)? {
            true => Err(OverlayError::Damaged { file: said, what }),
            false => Ok(Found::Unsealed),
        }
    }

    fn ends_with_seal(&self, length: u64) -> io::Result<bool> {
        let Some(at) = length.checked_sub(CHANGE as u64) else {
            return Ok(false);
        };
        let mut bytes = [0; CHANGE];
        read_exact_at(self.file.as_ref(), &mut bytes, at)?;
        let head = Head::decode(&bytes);
        Ok(head.is_some_and(|head| head.kind == KIND_SEAL && head.length == at))
    }

    /// Reads up to the seal; says what is wrong when it does not come to one.
    fn parse(
        &mut self,
        base: &Digest,
        size: u64,
        length: u64,
    ) -> io::Result<Result<(), &'static str>> {
        let mut found = [0; HEADER];
        if length < HEADER as u64 {
            return Ok(Err("its header"));
        }
        read_exact_at(self.file.as_ref(), &mut found, 0)?;
        if found != header(self.epoch, base) && !cfg!(fuzzing) {
            return Ok(Err("its header"));
        }
        let mut slab = Vec::new();
        loop {
            let mut bytes = [0; CHANGE];
            if length - self.end < CHANGE as u64 {
                return Ok(Err("it has no end"));
            }
            read_exact_at(self.file.as_ref(), &mut bytes, self.end)?;
            let Some(head) = Head::decode(&bytes) else {
                return Ok(Err("the head of a change"));
            };
            let at = self.end + CHANGE as u64;
            let fine = is_whole(head.offset, head.length, size);
            match head.kind {
                KIND_SEAL if head.offset == self.changes && head.length == self.end => {
                    return Ok(Ok(()));
                }
                KIND_ZERO if fine => {
                    self.insert(blocks_of(head.offset, head.length), None);
                    self.end = at;
                }
                KIND_DATA if fine && head.length <= length - at => {
                    if !self.payload_fits(&head, at, &mut slab)? {
                        return Ok(Err("the bytes of a change"));
                    }
                    self.insert(blocks_of(head.offset, head.length), Some(at));
                    self.end = at + head.length;
                }
                _ => return Ok(Err("a change that cannot be")),
            }
            self.changes += 1;
        }
    }

    fn payload_fits(&self, head: &Head, at: u64, slab: &mut Vec<u8>) -> io::Result<bool> {
        let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        let mut done = 0;
        while done < head.length {
            let take = (head.length - done).min(SLAB as u64) as usize;
            slab.resize(take, 0);
            read_exact_at(self.file.as_ref(), slab, at + done)?;
            sum.update(slab);
            done += take as u64;
        }
        Ok(sum.finalize() as u32 == head.payload_crc || cfg!(fuzzing))
    }
}

#[cfg(test)]
mod tests;
