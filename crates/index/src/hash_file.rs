//! Hash files: the digests of an image in walk order, 340 to a page with the page's checksum, and a side file with
//! each digest's head bits (teleportation §2.5, §2.11; `docs/format/hash-files.md`).

use std::io;
use std::sync::Arc;

use drover_core::{Digest, Head};
use drover_storage::{Access, Directory, File, open_if_exists, remove_if_exists};

use crate::head::{head_from_bits, pack_heads};
use crate::page::{Bits, PAGE_BYTES, PER_PAGE, Page, crc, is_sealed, seal};

mod all;
#[cfg(test)]
mod tests;

pub use all::digests_of;

/// A sync that can be run later, without holding the matcher's lock.
pub type DeferredSync = Box<dyn FnOnce() -> io::Result<()> + Send>;

const MAGIC: [u8; 8] = *b"DRVRHSH1";
const VERSION: u32 = 2;
pub(crate) const HEADER: u64 = 64;
const COMPLETE: u32 = 1;

/// Bytes of the head bits of a page.
const HEAD_BYTES: usize = PER_PAGE.div_ceil(4);
/// Bytes of a record: head bits and the record's checksum.
const RECORD: usize = HEAD_BYTES.next_multiple_of(4) + 4;
/// Records read at a time.
const GROUP: usize = 64;

/// Names of an image's two files.
pub(crate) fn names(image: u64) -> (String, String) {
    (
        format!("img-{image:016x}.hash"),
        format!("img-{image:016x}.side"),
    )
}

/// Removes an image's files durably.
pub(crate) fn remove_files(storage: &dyn Directory, image: u64) -> std::io::Result<()> {
    unlink_files(storage, image)?;
    storage.sync()
}

/// Removes an image's files; durable once the directory is synced.
pub(crate) fn unlink_files(storage: &dyn Directory, image: u64) -> std::io::Result<()> {
    let (hash, side) = names(image);
    // The side file first: without it the hash file is invalid.
    remove_if_exists(storage, &side)?;
    remove_if_exists(storage, &hash)
}

/// The image that a file with this name belongs to.
pub(crate) fn any_file_of(name: &str) -> Option<u64> {
    image_of(name.strip_suffix(".side").or(name.strip_suffix(".hash"))?)
}

fn image_of(stem: &str) -> Option<u64> {
    let hex = stem.strip_prefix("img-")?;
    let id = u64::from_str_radix(hex, 16).ok()?;
    (format!("{id:016x}") == hex).then_some(id)
}

/// Header of a side file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub image: u64,
    /// Serial number of the file; later files of the index have larger ones.
    pub serial: u64,
    /// Digests in the hash file.
    pub blocks: u64,
    /// Whether the hash file is complete.
    pub complete: bool,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER as usize] {
        let mut b = [0; HEADER as usize];
        b[..8].copy_from_slice(&MAGIC);
        b[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let flags = if self.complete { COMPLETE } else { 0 };
        b[12..16].copy_from_slice(&flags.to_le_bytes());
        b[16..24].copy_from_slice(&self.image.to_le_bytes());
        b[24..32].copy_from_slice(&self.serial.to_le_bytes());
        b[32..40].copy_from_slice(&self.blocks.to_le_bytes());
        let sum = crc(&b[..60]);
        b[60..].copy_from_slice(&sum.to_le_bytes());
        b
    }

    /// Decodes a header of the current version.
    pub(crate) fn from_bytes(b: &[u8; HEADER as usize]) -> Option<Self> {
        Self::of_version(VERSION, b)
    }

    /// Decodes a header of the given version.
    pub(crate) fn of_version(version: u32, b: &[u8; HEADER as usize]) -> Option<Self> {
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        let flags = u32_at(12);
        let good = b[..8] == MAGIC
            && u32_at(8) == version
            && flags & !COMPLETE == 0
            && u32_at(60) == crc(&b[..60]);
        good.then(|| Header {
            image: u64_at(16),
            serial: u64_at(24),
            blocks: u64_at(32),
            complete: flags & COMPLETE != 0,
        })
    }

    /// Reads the header's bytes from `file`, if it is long enough.
    pub(crate) fn bytes_of(file: &dyn File) -> io::Result<Option<[u8; HEADER as usize]>> {
        let mut b = [0; HEADER as usize];
        let n = file.read_at(&mut b, 0)?;
        Ok((n == b.len()).then_some(b))
    }

    /// Reads and decodes the header of `file`.
    pub(crate) fn read(file: &dyn File) -> io::Result<Option<Self>> {
        Ok(Self::bytes_of(file)?.and_then(|b| Self::from_bytes(&b)))
    }

    /// Whether files of these sizes can hold all digests, `per_page` to a page.
    pub(crate) fn fits(&self, per_page: usize, record: usize, hash: u64, side: u64) -> bool {
        let pages = self.blocks.div_ceil(per_page as u64);
        let fits = |size: u64, each: usize, extra: u64| {
            pages
                .checked_mul(each as u64)
                .and_then(|n| n.checked_add(extra))
                .is_some_and(|n| size >= n)
        };
        fits(hash, PAGE_BYTES, 0) && fits(side, record, HEADER)
    }
}

/// A page is damaged or unreadable.
#[derive(Debug)]
pub(crate) struct Damaged;

impl From<io::Error> for Damaged {
    fn from(_: io::Error) -> Self {
        Damaged
    }
}

/// Bytes transferred since the counters were last reset.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Traffic {
    pub read: u64,
    pub written: u64,
}

/// An image's digests.
pub(crate) struct HashFile {
    header: Header,
    hash: Arc<dyn File>,
    side: Arc<dyn File>,
    /// Full pages on disk.
    pages: u64,
    /// Digests after those pages, with their heads.
    tail: Vec<Digest>,
    tail_heads: Vec<Head>,
    /// The group of records read last, with its number.
    group: Option<(u64, Vec<u8>)>,
    pub traffic: Traffic,
}

impl HashFile {
    /// Creates the files of an image; existing ones are truncated.
    pub(crate) fn create(storage: &dyn Directory, image: u64, serial: u64) -> io::Result<Self> {
        Self::create_as(storage, names(image), image, serial)
    }

    /// Like [`create`](Self::create), with other names.
    pub(crate) fn create_as(
        storage: &dyn Directory,
        (hash, side): (String, String),
        image: u64,
        serial: u64,
    ) -> io::Result<Self> {
        let header = Header {
            image,
            serial,
            blocks: 0,
            complete: false,
        };
        // The side file first: without a header, a hash file is invalid.
        let side: Arc<dyn File> = storage.create(&side)?.into();
        side.write_at(&header.to_bytes(), 0)?;
        let hash = storage.create(&hash)?.into();
        Ok(Self::with(header, hash, side, 0))
    }

    /// Opens the complete files of an image. `None` when they are incomplete or truncated.
    pub(crate) fn open(storage: &dyn Directory, image: u64) -> io::Result<Option<Self>> {
        let (hash, side) = names(image);
        let (Some(hash), Some(side)) = (open(storage, &hash)?, open(storage, &side)?) else {
            return Ok(None);
        };
        let Some(header) = Header::read(side.as_ref())?.filter(|h| h.image == image && h.complete)
        else {
            return Ok(None);
        };
        let whole = header.fits(PER_PAGE, RECORD, hash.len()?, side.len()?);
        let pages = header.blocks.div_ceil(PER_PAGE as u64);
        Ok(whole.then(|| Self::with(header, hash, side, pages)))
    }

    fn with(header: Header, hash: Arc<dyn File>, side: Arc<dyn File>, pages: u64) -> Self {
        HashFile {
            header,
            hash,
            side,
            pages,
            tail: Vec::new(),
            tail_heads: Vec::new(),
            group: None,
            traffic: Traffic::default(),
        }
    }

    pub(crate) fn header(&self) -> Header {
        self.header
    }

    /// Number of digests, including those in memory.
    pub(crate) fn blocks(&self) -> u64 {
        self.header.blocks
    }

    /// Memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let group = self.group.as_ref().map_or(0, |(_, b)| b.capacity());
        self.tail.capacity() * (Digest::LEN + 1) + group
    }

    /// Appends digests in memory; [`flush`](Self::flush) writes them.
    pub(crate) fn append(&mut self, digests: &[Digest], heads: &[Head]) {
        self.tail.extend_from_slice(digests);
        self.tail_heads.extend_from_slice(heads);
        self.header.blocks += digests.len() as u64;
    }

    /// Removes the last `n` digests, which must not have been flushed.
    pub(crate) fn take_back(&mut self, n: usize) {
        self.tail.truncate(self.tail.len() - n);
        self.tail_heads.truncate(self.tail.len());
        self.header.blocks -= n as u64;
    }

    /// Writes all full pages.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        let full = self.tail.len() / PER_PAGE * PER_PAGE;
        self.write_tail(full)?;
        self.tail.drain(..full);
        self.tail_heads.drain(..full);
        self.pages += (full / PER_PAGE) as u64;
        Ok(())
    }

    /// Writes the tail's first `n` digests as pages, padding the last one.
    fn write_tail(&mut self, n: usize) -> io::Result<()> {
        if n == 0 {
            return Ok(());
        }
        let mut bytes = Vec::with_capacity(n.div_ceil(PER_PAGE) * PAGE_BYTES);
        let mut records = Vec::with_capacity(n.div_ceil(PER_PAGE) * RECORD);
        let pages = self.tail[..n].chunks(PER_PAGE);
        for (i, (page, heads)) in pages.zip(self.tail_heads.chunks(PER_PAGE)).enumerate() {
            let no = self.pages + i as u64;
            let mut on_disk = Page::of(page).to_bytes();
            seal(&mut on_disk, no);
            bytes.extend_from_slice(&on_disk);
            records.extend(record(no, &heads[..page.len()]));
        }
        self.hash.write_at(&bytes, self.pages * PAGE_BYTES as u64)?;
        self.side
            .write_at(&records, HEADER + self.pages * RECORD as u64)?;
        self.traffic.written += (bytes.len() + records.len()) as u64;
        Ok(())
    }

    /// Writes everything. Sync it, then call [`mark_complete`](Self::mark_complete).
    pub(crate) fn write_out(&mut self) -> io::Result<[DeferredSync; 2]> {
        self.flush()?;
        self.write_tail(self.tail.len())?;
        Ok([deferred_sync(&self.hash), deferred_sync(&self.side)])
    }

    /// Marks the file as complete in the header.
    pub(crate) fn mark_complete(&mut self) -> io::Result<DeferredSync> {
        let header = Header {
            complete: true,
            ..self.header
        };
        self.side.write_at(&header.to_bytes(), 0)?;
        let sync = deferred_sync(&self.side);
        self.header = header;
        self.pages = self.header.blocks.div_ceil(PER_PAGE as u64);
        self.tail = Vec::new();
        self.tail_heads = Vec::new();
        self.group = None;
        Ok(sync)
    }

    /// Both steps, in order, with their syncs.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        let syncs = self.write_out()?;
        syncs.into_iter().try_for_each(|sync| sync())?;
        self.mark_complete()?()
    }

    /// Returns a page, from memory if it is there. `None` past the end.
    pub(crate) fn page(&mut self, no: u64) -> Result<Option<Page>, Damaged> {
        let from = no.saturating_mul(PER_PAGE as u64);
        if from >= self.header.blocks {
            return Ok(None);
        }
        if no >= self.pages {
            let from = (from - self.pages * PER_PAGE as u64) as usize;
            let to = self.tail.len().min(from + PER_PAGE);
            return Ok(Some(Page::of(&self.tail[from..to])));
        }
        let mut bytes = [0; PAGE_BYTES];
        let n = self.hash.read_at(&mut bytes, no * PAGE_BYTES as u64)?;
        self.traffic.read += n as u64;
        if n < PAGE_BYTES || !is_sealed(&bytes, no) {
            return Err(Damaged);
        }
        let count = (self.header.blocks - from).min(PER_PAGE as u64);
        Ok(Some(Page::from_bytes(
            &bytes,
            Bits::range(0, count as usize),
        )))
    }

    /// Whether the page is on disk and immutable.
    pub(crate) fn is_settled(&self, no: u64) -> bool {
        no < self.pages
    }

    /// The heads of a page on disk.
    pub(crate) fn heads(&mut self, no: u64) -> Result<Vec<Head>, Damaged> {
        let bits = self.record(no)?;
        let left = self.header.blocks.saturating_sub(no * PER_PAGE as u64);
        (0..left.min(PER_PAGE as u64) as usize)
            .map(|i| head_from_bits(bits[i / 4] >> (2 * (i % 4)) & 3).ok_or(Damaged))
            .collect()
    }

    /// The head bits of a page.
    fn record(&mut self, no: u64) -> Result<[u8; HEAD_BYTES], Damaged> {
        let group = no / GROUP as u64;
        let from = no as usize % GROUP * RECORD;
        let known = matches!(&self.group, Some((g, b)) if *g == group && b.len() >= from + RECORD);
        if !known {
            let mut bytes = vec![0; GROUP * RECORD];
            let offset = HEADER + group * (GROUP * RECORD) as u64;
            let n = self.side.read_at(&mut bytes, offset)?;
            // While the file grows, cache only the records that exist now.
            bytes.truncate(n / RECORD * RECORD);
            self.traffic.read += n as u64;
            self.group = Some((group, bytes));
        }
        let bytes = self.group.as_ref().map_or(&[][..], |(_, b)| b);
        let r = bytes.get(from..from + RECORD).ok_or(Damaged)?;
        let (body, sum) = r.split_at(RECORD - 4);
        if record_crc(no, body).to_le_bytes() != sum {
            return Err(Damaged);
        }
        let mut bits = [0; HEAD_BYTES];
        bits.copy_from_slice(&body[..HEAD_BYTES]);
        Ok(bits)
    }
}

fn deferred_sync(file: &Arc<dyn File>) -> DeferredSync {
    let file = Arc::clone(file);
    Box::new(move || file.sync())
}

fn record(no: u64, heads: &[Head]) -> [u8; RECORD] {
    let mut r = [0; RECORD];
    let bits = pack_heads(heads);
    r[..bits.len()].copy_from_slice(&bits);
    let sum = record_crc(no, &r[..RECORD - 4]);
    r[RECORD - 4..].copy_from_slice(&sum.to_le_bytes());
    r
}

/// The page's number is part of the checksum, so that a misplaced record is invalid.
fn record_crc(no: u64, body: &[u8]) -> u32 {
    let mut b = [0; 8 + RECORD - 4];
    b[..8].copy_from_slice(&no.to_le_bytes());
    b[8..].copy_from_slice(body);
    crc(&b)
}

/// Opens a file for reading and writing. `None` if it does not exist.
pub(crate) fn open(storage: &dyn Directory, name: &str) -> io::Result<Option<Arc<dyn File>>> {
    Ok(open_if_exists(storage, name, Access::Write)?.map(Arc::from))
}
