//! The sequence cache's hash file: segments of 340 digests, and a side file with a record for each.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use drover_storage::{Directory, File};

use super::gaps::Gaps;
use crate::hash_file::{Damaged, Traffic, open};
use crate::matcher::Repair;
use crate::page::{Bits, PAGE_BYTES, PER_PAGE, Page, crc};

pub(crate) const HASH: &str = "seq.hash";
pub(crate) const SIDE: &str = "seq.side";

const MAGIC: [u8; 8] = *b"DRVRSEQ1";
const VERSION: u32 = 2;
pub(crate) const HEADER: usize = 64;
const RECORD: usize = 3 * Bits::BYTES + 16;
const CLEAN: u32 = 1;

/// Number of changed segments in memory from which on they should be written.
const BUSY: usize = 256;

/// Where to store a new piece of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub segment: u32,
    pub offset: usize,
    /// The segment's contents must be evicted first.
    pub recycled: bool,
}

pub(crate) struct SequenceFile {
    hash: Arc<dyn File>,
    side: Arc<dyn File>,
    /// Segments in use or previously used.
    segments: u32,
    /// Which of them are not empty, and their number.
    holds: Vec<bool>,
    occupied: u32,
    limit: u32,
    /// The segment being filled, and its fill level.
    tail: Option<(u32, usize)>,
    /// The segment to be reused next when there is no free space.
    hand: u32,
    gaps: Gaps,
    /// Segments to which stores are blocked; they contain no gaps.
    held: BTreeSet<u32>,
    /// Changed segments that are not written yet.
    changed: BTreeMap<u32, Arc<Page>>,
    epoch: u64,
    clean: bool,
    pub traffic: Traffic,
}

fn slot(segment: u32, offset: usize) -> u64 {
    u64::from(segment) * PER_PAGE as u64 + offset as u64
}

impl SequenceFile {
    /// Opens the files, or creates them. A damaged record counts as an empty segment.
    pub(crate) fn open(
        storage: &dyn Directory,
        limit: u32,
        repairs: &mut Vec<Repair>,
    ) -> io::Result<Self> {
        let files = (open(storage, HASH)?, open(storage, SIDE)?);
        if let (Some(hash), Some(side)) = files {
            let mut b = [0; HEADER];
            let n = side.read_at(&mut b, 0)?;
            if n == HEADER
                && let Some(Header { epoch, hand, clean }) = Header::from_bytes(&b)
            {
                let mut file = Self::with(hash, side, limit, epoch, clean);
                file.scan(repairs)?;
                file.hand = if hand < file.segments { hand } else { 0 };
                return Ok(file);
            }
            // A side file without a header was just being created.
            if b != [0; HEADER] {
                repairs.push(Repair::Sequences);
            }
        }
        let side = storage.create(SIDE)?.into();
        let hash = storage.create(HASH)?.into();
        let file = Self::with(hash, side, limit, 0, false);
        file.write_header()?;
        Ok(file)
    }

    fn with(hash: Arc<dyn File>, side: Arc<dyn File>, limit: u32, epoch: u64, clean: bool) -> Self {
        SequenceFile {
            hash,
            side,
            segments: 0,
            holds: Vec::new(),
            occupied: 0,
            limit,
            tail: None,
            hand: 0,
            gaps: Gaps::default(),
            held: BTreeSet::new(),
            changed: BTreeMap::new(),
            epoch,
            clean,
            traffic: Traffic::default(),
        }
    }

    /// Reads all records; finds free slots and damage.
    fn scan(&mut self, repairs: &mut Vec<Repair>) -> io::Result<()> {
        let size = self.side.len()?.saturating_sub(HEADER as u64);
        let records = size.div_ceil(RECORD as u64);
        let on_disk = records.min(u64::from(self.limit)) as u32;
        self.segments = on_disk;
        if records > u64::from(on_disk) {
            // The limit was lowered. Segments beyond it must not reappear when it is raised.
            self.side.set_len(record_offset(on_disk))?;
            let bytes = u64::from(on_disk) * PAGE_BYTES as u64;
            if self.hash.len()? > bytes {
                self.hash.set_len(bytes)?;
            }
        }
        let mut bytes = vec![0; 512 * RECORD];
        let mut no = 0;
        while no < on_disk {
            let n = self.side.read_at(&mut bytes, record_offset(no))?;
            self.traffic.read += n as u64;
            if n == 0 {
                break;
            }
            for r in bytes[..n].chunks(RECORD).take((on_disk - no) as usize) {
                match <&[u8; RECORD]>::try_from(r)
                    .ok()
                    .and_then(|r| Record::parse(no, r))
                {
                    Some(record) => {
                        self.note(no, !record.used.is_empty());
                        self.add_free(no, &record.used);
                    }
                    None => {
                        repairs.push(Repair::SequencePage(u64::from(no)));
                        self.empty(no);
                    }
                }
                no += 1;
            }
        }
        Ok(())
    }

    fn add_free(&mut self, segment: u32, used: &Bits) {
        let mut from = used.next(0, false);
        while from < PER_PAGE {
            let to = used.next(from, true);
            self.gaps.add(slot(segment, from), to - from);
            from = used.next(to, false);
        }
    }

    /// The epoch of the index to which the clean files belong.
    pub(crate) fn clean_epoch(&self) -> Option<u64> {
        self.clean.then_some(self.epoch)
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn segments(&self) -> u32 {
        self.segments
    }

    /// Maximum number of segments.
    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// Number of segments that are not empty.
    pub(crate) fn occupied(&self) -> u32 {
        self.occupied
    }

    /// Whether a segment is empty.
    pub(crate) fn is_empty(&self, no: u32) -> bool {
        !self.holds.get(no as usize).is_some_and(|h| *h)
    }

    fn note(&mut self, no: u32, holds: bool) {
        let no = no as usize;
        if no >= self.holds.len() {
            self.holds.resize(no + 1, false);
        }
        let before = std::mem::replace(&mut self.holds[no], holds);
        self.occupied = self.occupied + u32::from(holds) - u32::from(before);
    }

    /// Memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.holds.len() + self.gaps.len() * 48 + self.changed.len() * size_of::<Page>()
    }

    /// Whether enough has changed that it should be written.
    pub(crate) fn is_busy(&self) -> bool {
        self.changed.len() >= BUSY
    }

    /// Whether most of the permitted space is in use.
    pub(crate) fn is_filling(&self) -> bool {
        self.occupied >= self.limit - self.limit / 4
    }

    /// A segment that was changed and not written yet, or was never written.
    pub(crate) fn in_memory(&self, no: u32) -> Option<Arc<Page>> {
        if no >= self.segments {
            return Some(Arc::new(Page::empty()));
        }
        self.changed.get(&no).cloned()
    }

    /// Reads a segment.
    pub(crate) fn read(&mut self, no: u32) -> Result<Page, Damaged> {
        let mut r = [0; RECORD];
        let n = self.side.read_at(&mut r, record_offset(no))?;
        self.traffic.read += n as u64;
        let record = Record::parse(no, &r).filter(|_| n == RECORD);
        let record = record.ok_or(Damaged)?;
        if record.used.is_empty() {
            return Ok(Page::empty());
        }
        let mut bytes = [0; PAGE_BYTES];
        let n = self
            .hash
            .read_at(&mut bytes, u64::from(no) * PAGE_BYTES as u64)?;
        self.traffic.read += n as u64;
        if n < PAGE_BYTES || crc(&bytes) != record.page_crc {
            return Err(Damaged);
        }
        let mut page = Page::from_bytes(&bytes, record.used);
        page.start = record.start;
        page.strong = record.strong;
        Ok(page)
    }

    /// Allocates space for `n` digests, at most a segment: a gap of exactly that size, the rest of the segment being
    /// filled, or a new segment; at the limit, any gap that is large enough, finally the segment that was filled
    /// longest ago. `None` when stores to all remaining ones are blocked.
    pub(crate) fn place(&mut self, n: usize) -> Option<Place> {
        let at = |s: u64| Place {
            segment: (s / PER_PAGE as u64) as u32,
            offset: (s % PER_PAGE as u64) as usize,
            recycled: false,
        };
        if let Some(s) = self.gaps.take_exact(n) {
            return Some(at(s));
        }
        if let Some((segment, used)) = &mut self.tail
            && *used + n <= PER_PAGE
        {
            let place = at(slot(*segment, *used));
            *used += n;
            return Some(place);
        }
        let fresh = match self.gaps.take_exact(PER_PAGE) {
            Some(s) => Some((s / PER_PAGE as u64) as u32),
            None if self.segments < self.limit && !self.held.contains(&self.segments) => {
                let new = self.segments;
                self.segments += 1;
                // It is not on disk yet.
                self.change(new, Arc::new(Page::empty()));
                Some(new)
            }
            None => None,
        };
        if let Some(segment) = fresh {
            self.begin_segment(segment, n);
            return Some(at(slot(segment, 0)));
        }
        if let Some(s) = self.gaps.take_best(n) {
            return Some(at(s));
        }
        for _ in 0..self.segments {
            let segment = self.hand;
            self.hand = (self.hand + 1) % self.segments;
            if !self.held.contains(&segment) {
                return Some(Place {
                    segment,
                    offset: 0,
                    recycled: true,
                });
            }
        }
        None
    }

    /// Blocks stores to this segment, which may not exist yet. Its contents can still be found.
    pub(crate) fn hold(&mut self, no: u32) {
        self.forget_room(no);
        self.held.insert(no);
    }

    /// Unblocks these segments. The free space in those that are not empty is found again when the index is next
    /// opened.
    pub(crate) fn release(&mut self, segments: &[u32]) {
        for &no in segments {
            if self.held.remove(&no) && no < self.segments && self.is_empty(no) {
                self.gaps.add(slot(no, 0), PER_PAGE);
            }
        }
    }

    /// Unblocks all segments.
    pub(crate) fn release_all(&mut self) {
        let held: Vec<u32> = self.held.iter().copied().collect();
        self.release(&held);
    }

    /// Excludes this segment's free space from allocation.
    fn forget_room(&mut self, no: u32) {
        self.gaps.remove_segment(no);
        if self.tail.is_some_and(|(t, _)| t == no) {
            self.tail = None;
        }
    }

    /// Adds `n` free slots from here on.
    fn add_gap(&mut self, no: u32, from: usize, n: usize) {
        if !self.held.contains(&no) {
            self.gaps.add(slot(no, from), n);
        }
    }

    /// Allocates the first `n` slots of a segment that was just [emptied](Self::empty).
    pub(crate) fn reserve(&mut self, segment: u32, n: usize) {
        self.forget_room(segment);
        self.begin_segment(segment, n);
    }

    /// Allocates the first `n` slots of a free segment. The tail does not change if that fills it.
    fn begin_segment(&mut self, segment: u32, n: usize) {
        if n == PER_PAGE {
            return;
        }
        if let Some((old, used)) = self.tail.replace((segment, n))
            && used < PER_PAGE
        {
            self.gaps.add(slot(old, used), PER_PAGE - used);
        }
    }

    /// Sets a segment's new contents, to be written by the next [`flush`](Self::flush).
    pub(crate) fn change(&mut self, no: u32, page: Arc<Page>) {
        self.note(no, !page.used.is_empty());
        self.changed.insert(no, page);
    }

    /// Drops all sequences of a segment.
    pub(crate) fn empty(&mut self, no: u32) {
        self.change(no, Arc::new(Page::empty()));
        self.forget_room(no);
        self.add_gap(no, 0, PER_PAGE);
    }

    /// Drops one sequence.
    pub(crate) fn remove(&mut self, no: u32, from: usize, n: usize, page: &Arc<Page>) {
        let gone = Bits::range(from, from + n);
        let mut page = self.in_memory(no).unwrap_or_else(|| Arc::clone(page));
        if !page.used.covers(&gone) {
            return;
        }
        let p = Arc::make_mut(&mut page);
        for bits in [&mut p.used, &mut p.start, &mut p.strong] {
            bits.clear(from, from + n);
        }
        self.change(no, page);
        self.add_gap(no, from, n);
    }

    /// Writes changed segments and passes each to `written`. After an error they stay marked as changed.
    pub(crate) fn flush(&mut self, mut written: impl FnMut(u32, Arc<Page>)) -> io::Result<()> {
        if self.changed.is_empty() {
            return Ok(());
        }
        if self.clean {
            self.clean = false;
            self.write_header()?;
            self.side.sync()?;
        }
        // Adjacent segments are written together.
        let mut runs: Vec<(u32, Vec<u8>, Vec<u8>)> = Vec::new();
        for (&no, page) in &self.changed {
            let (bytes, record) = on_disk(no, page);
            match runs.last_mut() {
                Some((first, b, r)) if *first + (r.len() / RECORD) as u32 == no => {
                    b.extend_from_slice(&bytes);
                    r.extend_from_slice(&record);
                }
                _ => runs.push((no, bytes.to_vec(), record.to_vec())),
            }
        }
        for (no, bytes, records) in runs {
            self.hash
                .write_at(&bytes, u64::from(no) * PAGE_BYTES as u64)?;
            self.side.write_at(&records, record_offset(no))?;
            self.traffic.written += (bytes.len() + records.len()) as u64;
        }
        for (no, page) in std::mem::take(&mut self.changed) {
            written(no, page);
        }
        Ok(())
    }

    /// Discards unwritten changes and returns them.
    pub(crate) fn abandon(&mut self) -> BTreeMap<u32, Arc<Page>> {
        std::mem::take(&mut self.changed)
    }

    /// Syncs written data.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        self.hash.sync()?;
        self.side.sync()
    }

    /// Call after a snapshot of C2 with this epoch: until the next change the two match.
    pub(crate) fn mark_clean(&mut self, epoch: u64) -> io::Result<()> {
        self.epoch = epoch;
        self.clean = true;
        let done = self.write_header().and_then(|()| self.side.sync());
        if done.is_err() {
            self.clean = false;
        }
        done
    }

    fn write_header(&self) -> io::Result<()> {
        let header = Header {
            epoch: self.epoch,
            hand: self.hand,
            clean: self.clean,
        };
        self.side.write_at(&header.to_bytes(), 0)
    }
}

/// Header of the side file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub epoch: u64,
    pub hand: u32,
    pub clean: bool,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let mut b = [0; HEADER];
        b[..8].copy_from_slice(&MAGIC);
        b[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let flags = if self.clean { CLEAN } else { 0 };
        b[12..16].copy_from_slice(&flags.to_le_bytes());
        b[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        b[24..28].copy_from_slice(&self.hand.to_le_bytes());
        let sum = crc(&b[..60]);
        b[60..].copy_from_slice(&sum.to_le_bytes());
        b
    }

    /// Decodes a header of the current version.
    pub(crate) fn from_bytes(b: &[u8; HEADER]) -> Option<Self> {
        Self::of_version(VERSION, b)
    }

    /// Decodes a header of the given version.
    pub(crate) fn of_version(version: u32, b: &[u8; HEADER]) -> Option<Self> {
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let flags = u32_at(12);
        let good = b[..8] == MAGIC
            && u32_at(8) == version
            && flags & !CLEAN == 0
            && u32_at(60) == crc(&b[..60]);
        good.then(|| Header {
            epoch: u64::from(u32_at(16)) | u64::from(u32_at(20)) << 32,
            hand: u32_at(24),
            clean: flags & CLEAN != 0,
        })
    }
}

/// Encodes a segment's page and record for the disk.
pub(crate) fn on_disk(no: u32, page: &Page) -> ([u8; PAGE_BYTES], [u8; RECORD]) {
    let bytes = page.to_bytes();
    let record = Record {
        start: page.start,
        used: page.used,
        strong: page.strong,
        page_crc: crc(&bytes),
    };
    (bytes, record.to_bytes(no))
}

/// Offset of a segment's record in the side file.
pub(crate) fn record_offset(no: u32) -> u64 {
    HEADER as u64 + u64::from(no) * RECORD as u64
}

/// A segment's record in the side file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Record {
    start: Bits,
    used: Bits,
    strong: Bits,
    page_crc: u32,
}

impl Record {
    fn to_bytes(self, no: u32) -> [u8; RECORD] {
        let mut r = [0; RECORD];
        let (masks, rest) = r.split_at_mut(3 * Bits::BYTES);
        let (masks, _) = masks.as_chunks_mut::<{ Bits::BYTES }>();
        for (to, bits) in masks.iter_mut().zip([self.start, self.used, self.strong]) {
            *to = bits.to_bytes();
        }
        rest[..4].copy_from_slice(&self.page_crc.to_le_bytes());
        rest[8..12].copy_from_slice(&no.to_le_bytes());
        let sum = crc(&r[..RECORD - 4]);
        r[RECORD - 4..].copy_from_slice(&sum.to_le_bytes());
        r
    }

    fn parse(no: u32, r: &[u8; RECORD]) -> Option<Self> {
        let (masks, rest) = r.split_at(3 * Bits::BYTES);
        let u32_at =
            |i: usize| u32::from_le_bytes([rest[i], rest[i + 1], rest[i + 2], rest[i + 3]]);
        let (masks, _) = masks.as_chunks::<{ Bits::BYTES }>();
        let record = Record {
            start: Bits::from_bytes(&masks[0])?,
            used: Bits::from_bytes(&masks[1])?,
            strong: Bits::from_bytes(&masks[2])?,
            page_crc: u32_at(0),
        };
        // A record of zeros was never written: a hole in the file.
        if r == &[0; RECORD] {
            return Some(record);
        }
        let inside = record.used.covers(&record.start.or(record.strong));
        let good = u32_at(12) == crc(&r[..RECORD - 4]) && u32_at(8) == no && inside;
        good.then_some(record)
    }
}
