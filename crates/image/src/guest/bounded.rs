//! Reads of a disk within limits.

use std::collections::VecDeque;
use std::io;

use drover_core::ReadAt;

/// Upper bound on the bytes that a look inside a disk reads.
pub const MAX_LOOK_BYTES: u64 = 32 << 20;

/// Upper bound on its reads, those that are answered from memory included: it bounds the time.
pub const MAX_LOOK_READS: u32 = 100_000;

/// Bytes of a cached page.
const PAGE: u64 = 4096;

/// Pages that are kept.
const PAGES: usize = 64;

/// Why no more can be read.
#[derive(Debug)]
pub(super) enum Stop {
    /// A limit is reached.
    Limit,
    /// What was read makes no sense, or has a feature that is not known here.
    Unreadable,
    /// The medium failed.
    Io,
}

impl From<io::Error> for Stop {
    fn from(_: io::Error) -> Self {
        Stop::Io
    }
}

/// A disk, and what may still be read of it.
pub(super) struct Bounded<'a> {
    disk: &'a dyn ReadAt,
    bytes: u64,
    reads: u32,
    /// The latest pages, by their numbers.
    pages: VecDeque<(u64, Box<[u8]>)>,
    /// The pages read so far, in order of their first read.
    seen: Vec<u64>,
}

impl<'a> Bounded<'a> {
    pub(super) fn new(disk: &'a dyn ReadAt) -> Self {
        Bounded {
            disk,
            bytes: 0,
            reads: 0,
            pages: VecDeque::new(),
            seen: Vec::new(),
        }
    }

    /// Length of the disk.
    pub(super) fn len(&self) -> u64 {
        self.disk.len()
    }

    /// Bytes read so far.
    pub(super) fn read_bytes(&self) -> u64 {
        self.bytes
    }

    /// The offsets of the pages of 4096 bytes that were read in small pieces since this was last called: tables, not files.
    pub(super) fn take_seen(&mut self) -> Vec<u64> {
        self.pages.clear();
        std::mem::take(&mut self.seen)
            .iter()
            .map(|page| page * PAGE)
            .collect()
    }

    fn count(&mut self, bytes: u64) -> Result<(), Stop> {
        self.reads += 1;
        self.bytes += bytes;
        match self.reads > MAX_LOOK_READS || self.bytes > MAX_LOOK_BYTES {
            true => Err(Stop::Limit),
            false => Ok(()),
        }
    }

    /// Fills `buf` with a piece of a table.
    pub(super) fn read(&mut self, mut at: u64, mut buf: &mut [u8]) -> Result<(), Stop> {
        let end = at.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.len()) {
            return Err(Stop::Unreadable);
        }
        while !buf.is_empty() {
            let within = (at % PAGE) as usize;
            let n = buf.len().min(PAGE as usize - within);
            let page = self.page(at / PAGE)?;
            let (now, rest) = buf.split_at_mut(n);
            now.copy_from_slice(page.get(within..within + n).ok_or(Stop::Unreadable)?);
            (buf, at) = (rest, at + n as u64);
        }
        Ok(())
    }

    fn page(&mut self, number: u64) -> Result<&[u8], Stop> {
        if let Some(i) = self.pages.iter().position(|(n, _)| *n == number) {
            self.count(0)?;
            return Ok(&self.pages[i].1);
        }
        let length = PAGE.min(self.len().saturating_sub(number * PAGE));
        self.count(length)?;
        let mut page = vec![0; length as usize].into_boxed_slice();
        self.disk.read_exact_at(&mut page, number * PAGE)?;
        if self.pages.len() >= PAGES {
            self.pages.pop_front();
        }
        // A page that was dropped and is read again is noted twice.
        self.seen.push(number);
        self.pages.push_back((number, page));
        Ok(self.pages.back().map_or(&[][..], |(_, page)| page))
    }

    /// Fills `buf` with content of a file, which is not kept.
    pub(super) fn read_content(&mut self, at: u64, buf: &mut [u8]) -> Result<(), Stop> {
        self.count(buf.len() as u64)?;
        Ok(self.disk.read_exact_at(buf, at)?)
    }

    pub(super) fn bytes<const N: usize>(&mut self, at: u64) -> Result<[u8; N], Stop> {
        let mut bytes = [0; N];
        self.read(at, &mut bytes)?;
        Ok(bytes)
    }
}

/// Numbers in a table, little-endian; 0 beyond its end.
pub(super) fn le16(bytes: &[u8], at: usize) -> u16 {
    let found = bytes.get(at..at + 2).and_then(|b| b.try_into().ok());
    found.map_or(0, u16::from_le_bytes)
}

/// As [`le16`].
pub(super) fn le32(bytes: &[u8], at: usize) -> u32 {
    let found = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    found.map_or(0, u32::from_le_bytes)
}

/// As [`le16`].
pub(super) fn le64(bytes: &[u8], at: usize) -> u64 {
    let found = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
    found.map_or(0, u64::from_le_bytes)
}
