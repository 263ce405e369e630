//! The redo file of an epoch: a sparse file with the epoch's blocks at their own offsets, followed by a log of the
//! changes, which is valid once it is sealed. In memory it takes two bits per block.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use drover_core::{BLOCK_SIZE_U64, Digest};

use super::OverlayError;
use super::states::{BlockState, States};
use crate::remote::{Change, Epoch};
use drover_storage::record_log::RecordLog;
use drover_storage::{Access, Directory, File, read_exact_at, remove_if_exists};

const MAGIC: [u8; 8] = *b"DRVRREDO";
const VERSION: u32 = 2;
const HEADER: usize = 80;
const RECORD: usize = 32;
const PREFIX: &str = "epoch-";
/// Bytes of a redo file read or written at once.
pub(super) const SLAB: usize = 1 << 20;
/// Bytes after which staged data is synced, so that little is left to sync at the commit.
const SYNC_EVERY: u64 = 64 << 20;
/// Bytes of a checksum; there is one per block of data.
const SUM: usize = 4;

const KIND_DATA: u32 = 1;
const KIND_ZERO: u32 = 2;
const KIND_SEAL: u32 = 3;
const KIND_FORGET: u32 = 4;

/// Blocks, and the file offset of their bytes; none for zeros.
pub(super) type Piece = (Range<u64>, Option<u64>);

/// The boot of the machine in which something was written; zeros if unknown.
pub(super) type Boot = [u8; 16];

/// The overlay a redo file belongs to.
#[derive(Clone, Copy)]
pub(super) struct RedoOf<'a> {
    pub base: &'a Digest,
    /// Size of the device in bytes.
    pub size: u64,
    pub boot: Boot,
}

/// The changes of one epoch, in a file, and the blocks they cover.
pub(super) struct Redo {
    pub epoch: Epoch,
    pub file: Arc<dyn File>,
    pub name: String,
    size: u64,
    /// Blocks present or zero; `Base` means not part of the epoch.
    states: States,
    log: RecordLog,
    records: u64,
    /// Approximate bytes of the present blocks.
    here: u64,
    unsynced: u64,
}

/// Why an epoch could not be sealed.
pub(super) enum SealError {
    /// It is not sealed.
    Not(io::Error),
    /// Whether the seal would survive a crash is unknown.
    Unknown(io::Error),
}

/// The result of opening a redo file of an earlier run.
pub(super) enum OpenedRedo {
    /// Sealed and complete.
    Sealed(Redo),
    /// Not sealed; the surviving part stays staged.
    Staged(Redo),
    /// Unusable, and never committed.
    Nothing,
}

/// The epoch of a redo file with this name.
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

/// The head of a log record.
struct Head {
    kind: u32,
    /// Checksum of the block checksums that follow.
    sums_crc: u32,
    offset: u64,
    length: u64,
}

impl Head {
    fn encode(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.sums_crc.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        let sum = crc(&bytes[..28]);
        bytes[28..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; RECORD]) -> Option<Self> {
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let fine = u32_at(28) == crc(&bytes[..28]) || cfg!(fuzzing);
        fine.then(|| Self {
            kind: u32_at(0),
            sums_crc: u32_at(4),
            offset: u64_at(8),
            length: u64_at(16),
        })
    }
}

fn header(epoch: Epoch, base: &Digest, boot: Boot) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&epoch.0.to_le_bytes());
    bytes[24..56].copy_from_slice(&base.0);
    bytes[56..72].copy_from_slice(&boot);
    let sum = crc(&bytes[..76]);
    bytes[76..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Offset of the log: after the last block.
fn log_of(size: u64) -> u64 {
    size.next_multiple_of(BLOCK_SIZE_U64)
}

/// The blocks of a block-aligned range; the device's last one may be short.
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
    fn without_changes(epoch: Epoch, file: Box<dyn File>, name: String, size: u64) -> Self {
        let file: Arc<dyn File> = file.into();
        let log = RecordLog::new(Arc::clone(&file), log_of(size) + HEADER as u64);
        Self {
            epoch,
            file,
            name,
            size,
            states: States::default(),
            log,
            records: 0,
            here: 0,
            unsynced: 0,
        }
    }

    /// Creates the file and makes its name durable.
    pub fn create(
        directory: &dyn Directory,
        epoch: Epoch,
        of: RedoOf<'_>,
    ) -> Result<Self, OverlayError> {
        let name = name_of(epoch);
        let said = directory.describe(&name);
        let failed = OverlayError::io("create", &said);
        remove_if_exists(directory, &name).map_err(&failed)?;
        let file = directory.create(&name).map_err(&failed)?;
        file.write_at(&header(epoch, of.base, of.boot), log_of(of.size))
            .map_err(&failed)?;
        directory.sync().map_err(&failed)?;
        Ok(Self::without_changes(epoch, file, name, of.size))
    }

    /// Upper bound of the bytes that a set of changes takes.
    pub fn bytes_of(changes: &[Change]) -> u64 {
        let bytes = |change: &Change| match change {
            Change::Write(_, data) => {
                let sums = (data.len() as u64).div_ceil(BLOCK_SIZE_U64) * SUM as u64;
                RECORD as u64 + sums + data.len() as u64
            }
            Change::Zero(..) => RECORD as u64,
        };
        changes.iter().map(bytes).sum()
    }

    /// Approximate bytes that the changes so far take.
    pub fn bytes(&self) -> u64 {
        self.here + self.log_bytes()
    }

    /// Bytes of the device that the changes so far cover.
    pub fn covers(&self) -> u64 {
        let blocks: u64 = self.all().map(|(run, _)| run.end - run.start).sum();
        let last = self.size.div_ceil(BLOCK_SIZE_U64);
        // The device's last block may be short.
        let beyond = match self.pieces(last.saturating_sub(1)..last).next() {
            Some(_) => log_of(self.size) - self.size,
            None => 0,
        };
        blocks * BLOCK_SIZE_U64 - beyond
    }

    /// Bytes of the log.
    pub fn log_bytes(&self) -> u64 {
        self.log.end() - log_of(self.size) - HEADER as u64
    }

    /// Whether appended changes may be lost.
    pub fn is_broken(&self) -> bool {
        self.log.is_broken()
    }

    /// Appends changes, which the caller has checked. After an error only some of them are present, and blocks that
    /// they cover may no longer be part of the epoch.
    pub fn append(&mut self, changes: &[Change]) -> io::Result<()> {
        let mut rest = changes;
        while !rest.is_empty() {
            // The checksums of blocks written twice would not match.
            let overlaps = |nth: &usize| {
                let blocks = blocks_of(rest[*nth].offset(), rest[*nth].covers());
                rest[..*nth].iter().any(|other| touches(other, &blocks))
            };
            let count = (1..rest.len()).find(overlaps).unwrap_or(rest.len());
            self.append_apart(&rest[..count])?;
            rest = &rest[count..];
        }
        Ok(())
    }

    /// Appends changes that do not overlap.
    fn append_apart(&mut self, changes: &[Change]) -> io::Result<()> {
        self.forget(changes)?;
        let mut log = Vec::new();
        for change in changes {
            let mut head = Head {
                kind: KIND_ZERO,
                sums_crc: 0,
                offset: change.offset(),
                length: change.covers(),
            };
            let mut sums = Vec::new();
            if let Change::Write(offset, data) = change {
                self.file.write_at(data, *offset)?;
                self.unsynced += data.len() as u64;
                let each = data.chunks(BLOCK_SIZE_U64 as usize).map(crc);
                sums.extend(each.flat_map(u32::to_le_bytes));
                (head.kind, head.sums_crc) = (KIND_DATA, crc(&sums));
            }
            log.extend_from_slice(&head.encode());
            log.extend_from_slice(&sums);
        }
        self.log(&log, changes.len() as u64)?;
        for change in changes {
            let state = match change {
                Change::Write(_, data) => {
                    self.here += data.len() as u64;
                    BlockState::Here
                }
                Change::Zero(..) => BlockState::Zero,
            };
            let blocks = blocks_of(change.offset(), change.covers());
            self.states.load(blocks, state);
        }
        if self.unsynced >= SYNC_EVERY {
            self.unsynced = 0;
            return self.log.sync();
        }
        Ok(())
    }

    fn log(&mut self, records: &[u8], count: u64) -> io::Result<()> {
        self.log.append(records)?;
        self.records += count;
        Ok(())
    }

    /// Removes from the epoch the blocks with data that is about to be overwritten, until the new data is complete.
    fn forget(&mut self, changes: &[Change]) -> io::Result<()> {
        let mut log = Vec::new();
        let mut records = 0;
        let mut forgotten = Vec::new();
        for change in changes.iter().filter(|c| matches!(c, Change::Write(..))) {
            let runs = self
                .states
                .runs(blocks_of(change.offset(), change.covers()));
            for (run, _) in runs.filter(|run| run.1 == BlockState::Here) {
                let offset = run.start * BLOCK_SIZE_U64;
                let head = Head {
                    kind: KIND_FORGET,
                    sums_crc: 0,
                    offset,
                    length: (run.end * BLOCK_SIZE_U64).min(self.size) - offset,
                };
                log.extend_from_slice(&head.encode());
                records += 1;
                forgotten.push(run);
            }
        }
        if records > 0 {
            self.log(&log, records)?;
            for run in forgotten {
                let bytes = (run.end - run.start) * BLOCK_SIZE_U64;
                self.here = self.here.saturating_sub(bytes);
                self.states.load(run, BlockState::Base);
            }
        }
        Ok(())
    }

    /// Seals the changes, durably. They are all durable before the seal is written: a seal never follows changes that a
    /// crash has lost.
    ///
    /// # Errors
    /// [`SealError`].
    pub fn seal(&mut self) -> Result<(), SealError> {
        let end = self.log.end();
        self.log.cut(end).map_err(SealError::Not)?;
        let seal = Head {
            kind: KIND_SEAL,
            sums_crc: 0,
            offset: self.records,
            length: end,
        };
        let sealed = self.log.append(&seal.encode());
        let Err(error) = sealed.and_then(|()| self.log.sync()) else {
            return Ok(());
        };
        // The seal is removed, durably.
        match self.log.cut(end) {
            Ok(()) => Err(SealError::Not(error)),
            Err(_) => Err(SealError::Unknown(error)),
        }
    }

    /// The pieces that intersect a range of blocks, clipped to it, in order.
    pub fn pieces(&self, blocks: Range<u64>) -> impl Iterator<Item = Piece> + '_ {
        self.states
            .runs(blocks)
            .filter_map(|(run, state)| match state {
                BlockState::Base => None,
                BlockState::Here => {
                    let place = run.start * BLOCK_SIZE_U64;
                    Some((run, Some(place)))
                }
                BlockState::Zero => Some((run, None)),
            })
    }

    /// All pieces, in order.
    pub fn all(&self) -> impl Iterator<Item = Piece> + '_ {
        self.pieces(0..self.size.div_ceil(BLOCK_SIZE_U64))
    }

    /// Opens a redo file of an earlier run. An unsealed one is verified against its checksums, unless it was written in
    /// this boot of the machine.
    ///
    /// # Errors
    /// [`OverlayError::Damaged`] when it was sealed and is incomplete now; [`OverlayError::OldRedo`];
    /// [`OverlayError::Io`].
    pub fn open(
        directory: &dyn Directory,
        epoch: Epoch,
        of: RedoOf<'_>,
        access: Access,
    ) -> Result<OpenedRedo, OverlayError> {
        let name = name_of(epoch);
        let said = directory.describe(&name);
        let read = OverlayError::io("read", &said);
        let file = directory.open(&name, access).map_err(&read)?;
        let length = file.len().map_err(&read)?;
        let mut redo = Self::without_changes(epoch, file, name, of.size);
        let parsed = redo.parse(of, length).map_err(&read)?;
        if matches!(parsed, Parsed::Sealed) {
            if access == Access::Write {
                // The seal of a killed process may only be in the page cache.
                let synced = redo.file.sync();
                synced.map_err(OverlayError::io("sync", &said))?;
            }
            return Ok(OpenedRedo::Sealed(redo));
        }
        if redo.ends_with_seal(length).map_err(&read)? {
            if redo.is_of_version_1().map_err(&read)? {
                return Err(OverlayError::OldRedo { file: said });
            }
            let what = match parsed {
                Parsed::Not(what) | Parsed::Staged(what) => what,
                Parsed::Sealed => "its end",
            };
            return Err(OverlayError::Damaged { file: said, what });
        }
        match (parsed, access) {
            (Parsed::Staged(_), Access::Write) => {
                // No torn record may precede new ones.
                redo.file
                    .set_len(redo.log.end())
                    .map_err(OverlayError::io("cut", &said))?;
                Ok(OpenedRedo::Staged(redo))
            }
            _ => Ok(OpenedRedo::Nothing),
        }
    }

    /// What a sealed redo file covers, from its log alone; none when it is not sealed, or incomplete. Changes nothing.
    pub fn skim(
        directory: &dyn Directory,
        epoch: Epoch,
        base: &Digest,
        size: u64,
    ) -> io::Result<Option<States>> {
        let name = name_of(epoch);
        let file = directory.open(&name, Access::Read)?;
        let length = file.len()?;
        let mut redo = Self::without_changes(epoch, file, name, size);
        if length < redo.log.end() + RECORD as u64 || !redo.ends_with_seal(length)? {
            return Ok(None);
        }
        let mut found = [0; HEADER];
        read_exact_at(redo.file.as_ref(), &mut found, log_of(size))?;
        let mut boot = [0; 16];
        boot.copy_from_slice(&found[56..72]);
        if found != header(epoch, base, boot) {
            return Ok(None);
        }
        while let Some(head) = redo.head(length)? {
            let blocks = blocks_of(head.offset, head.length);
            let fine = is_whole(head.offset, head.length, size);
            let mut end = redo.log.end() + RECORD as u64;
            let state = match head.kind {
                KIND_SEAL => return Ok(Some(redo.states)),
                KIND_ZERO if fine => BlockState::Zero,
                KIND_FORGET if fine => BlockState::Base,
                KIND_DATA if fine => {
                    end += (blocks.end - blocks.start) * SUM as u64;
                    BlockState::Here
                }
                _ => return Ok(None),
            };
            redo.states.load(blocks, state);
            if end > length {
                return Ok(None);
            }
            redo.log.pass(end);
        }
        Ok(None)
    }

    fn ends_with_seal(&self, length: u64) -> io::Result<bool> {
        let Some(at) = length.checked_sub(RECORD as u64) else {
            return Ok(false);
        };
        let mut bytes = [0; RECORD];
        read_exact_at(self.file.as_ref(), &mut bytes, at)?;
        let head = Head::decode(&bytes);
        Ok(head.is_some_and(|head| head.kind == KIND_SEAL && head.length == at))
    }

    /// A version 1 file has its header where the first block is now.
    fn is_of_version_1(&self) -> io::Result<bool> {
        let mut bytes = [0; 12];
        self.file.read_at(&mut bytes, 0)?;
        Ok(bytes[..8] == MAGIC && bytes[8..] == 1u32.to_le_bytes())
    }

    /// Parses the log up to its seal, or as far as it is valid.
    fn parse(&mut self, of: RedoOf<'_>, length: u64) -> io::Result<Parsed> {
        let start = log_of(of.size);
        let mut found = [0; HEADER];
        if length < self.log.end() {
            return Ok(Parsed::Not("its header"));
        }
        read_exact_at(self.file.as_ref(), &mut found, start)?;
        let mut boot = [0; 16];
        boot.copy_from_slice(&found[56..72]);
        if found != header(self.epoch, of.base, boot) && !cfg!(fuzzing) {
            return Ok(Parsed::Not("its header"));
        }
        let known = boot == of.boot && boot != [0; 16] && !self.ends_with_seal(length)?;
        // Blocks whose checksums do not match.
        let mut lost = States::default();
        let result = loop {
            let Some(head) = self.head(length)? else {
                break Parsed::Staged("the head of a change, or its end");
            };
            let sums = self.log.end() + RECORD as u64;
            let blocks = blocks_of(head.offset, head.length);
            let fine = is_whole(head.offset, head.length, of.size);
            match head.kind {
                KIND_SEAL if head.offset == self.records && head.length == self.log.end() => {
                    break Parsed::Sealed;
                }
                KIND_ZERO | KIND_FORGET if fine => {
                    let state = match head.kind {
                        KIND_ZERO => BlockState::Zero,
                        _ => BlockState::Base,
                    };
                    self.states.load(blocks.clone(), state);
                    lost.load(blocks, BlockState::Base);
                    self.log.pass(sums);
                }
                KIND_DATA if fine && self.sums_fit(&head, length)? => {
                    self.states.load(blocks.clone(), BlockState::Here);
                    lost.load(blocks.clone(), BlockState::Base);
                    self.log
                        .pass(sums + (blocks.end - blocks.start) * SUM as u64);
                    if !known {
                        self.compare(sums, blocks, &mut lost)?;
                    }
                }
                _ => break Parsed::Staged("a change that cannot be"),
            }
            self.records += 1;
        };
        for (run, _) in lost.recorded() {
            self.states.load(run, BlockState::Base);
        }
        let here = self.all().filter(|piece| piece.1.is_some());
        let blocks: u64 = here.map(|piece| piece.0.end - piece.0.start).sum();
        self.here = blocks * BLOCK_SIZE_U64;
        Ok(match result {
            Parsed::Sealed if lost.count() > 0 => Parsed::Staged("the bytes of a change"),
            other => other,
        })
    }

    /// The record at the current end of the log.
    fn head(&self, length: u64) -> io::Result<Option<Head>> {
        let mut bytes = [0; RECORD];
        if length - self.log.end() < RECORD as u64 {
            return Ok(None);
        }
        read_exact_at(self.file.as_ref(), &mut bytes, self.log.end())?;
        Ok(Head::decode(&bytes))
    }

    /// Whether the checksums of a record are present and intact.
    fn sums_fit(&self, head: &Head, length: u64) -> io::Result<bool> {
        let mut left = head.length.div_ceil(BLOCK_SIZE_U64) * SUM as u64;
        let mut at = self.log.end() + RECORD as u64;
        if left > length - at {
            return Ok(false);
        }
        let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        let mut slab = Vec::new();
        while left > 0 {
            slab.resize(left.min(SLAB as u64) as usize, 0);
            read_exact_at(self.file.as_ref(), &mut slab, at)?;
            sum.update(&slab);
            at += slab.len() as u64;
            left -= slab.len() as u64;
        }
        Ok(sum.finalize() as u32 == head.sums_crc || cfg!(fuzzing))
    }

    /// Verifies blocks against their checksums, which are at `sums`.
    fn compare(&self, mut sums: u64, blocks: Range<u64>, lost: &mut States) -> io::Result<()> {
        let at_once = SLAB as u64 / BLOCK_SIZE_U64;
        let (mut slab, mut expected) = (Vec::new(), Vec::new());
        for first in (blocks.start..blocks.end).step_by(at_once as usize) {
            let end = (first + at_once).min(blocks.end);
            let offset = first * BLOCK_SIZE_U64;
            slab.resize(((end * BLOCK_SIZE_U64).min(self.size) - offset) as usize, 0);
            read_exact_at(self.file.as_ref(), &mut slab, offset)?;
            expected.resize((end - first) as usize * SUM, 0);
            read_exact_at(self.file.as_ref(), &mut expected, sums)?;
            sums += expected.len() as u64;
            let data = slab.chunks(BLOCK_SIZE_U64 as usize);
            for (block, (bytes, sum)) in (first..).zip(data.zip(expected.chunks(SUM))) {
                if crc(bytes).to_le_bytes() != sum && !cfg!(fuzzing) {
                    lost.load(block..block + 1, BlockState::Here);
                }
            }
        }
        Ok(())
    }
}

/// The state of a parsed log.
enum Parsed {
    Sealed,
    Staged(&'static str),
    Not(&'static str),
}

fn touches(change: &Change, blocks: &Range<u64>) -> bool {
    let other = blocks_of(change.offset(), change.covers());
    other.start < blocks.end && blocks.start < other.end
}

#[cfg(test)]
mod tests;
