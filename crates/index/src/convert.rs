//! Converts files of version 1 at open: hash files and the sequence cache, which had 128 digests of 32 bytes to a
//! page (`docs/format/hash-files.md`).
//!
//! The new files are written completely under temporary names and then renamed, the one with the header last. After a
//! crash the conversion starts over or, if the new header exists, is completed.

use std::io;
use std::sync::Arc;

use drover_core::{Digest, Head, is_disk_full};
use drover_storage::{Directory, File, remove_if_exists};

use crate::error::{IndexError, Result};
use crate::hash_file::{self, HashFile, any_file_of, names, open, remove_files};
use crate::head::head_from_bits;
use crate::matcher::{ImageId, OpenReport, Repair};
use crate::page::{PER_PAGE, Page, crc};
use crate::sequence::{self, on_disk, record_offset};

/// Temporary names of new files.
const HASH: &str = "convert.hash";
const SIDE: &str = "convert.side";

/// Version 1: digests per page, and bytes of a page and of a record in both side files.
const OLD_PER_PAGE: usize = 128;
const OLD_PAGE: usize = OLD_PER_PAGE * Digest::LEN;
const OLD_IMAGE_RECORD: usize = 40;
const OLD_SEQUENCE_RECORD: usize = 64;
const OLD_HEADER: u64 = 64;

/// Old pages read at a time.
const AT_ONCE: u64 = 64;

/// Converts all files of version 1.
pub(crate) fn convert(storage: &dyn Directory, report: &mut OpenReport) -> Result<()> {
    settle(storage).map_err(IndexError::io("renaming", SIDE))?;
    let all = storage.list().map_err(IndexError::io("listing", "."))?;
    let side_files = all.iter().filter(|n| n.ends_with(".side"));
    for id in side_files.filter_map(|n| any_file_of(n)) {
        let old = OldImage::open(storage, id).map_err(IndexError::io("opening", names(id).1))?;
        let Some(mut old) = old else { continue };
        match image(storage, &mut old, report) {
            Ok(()) => report.converted = true,
            // The image can be indexed again, which needs less space than both files together.
            Err(e) if is_disk_full(&e) => {
                report.repaired(Repair::NoRoomToConvert(names(id).0));
                drop_new(storage)?;
                remove_files(storage, id).map_err(IndexError::io("removing", names(id).0))?;
            }
            Err(e) => return Err(IndexError::io("converting", names(id).0)(e)),
        }
    }
    let old = OldSequences::open(storage).map_err(IndexError::io("opening", sequence::SIDE))?;
    let Some(old) = old else { return Ok(()) };
    match sequences(storage, &old, report) {
        Ok(()) => report.converted = true,
        Err(e) if is_disk_full(&e) => {
            let what = Repair::NoRoomToConvert(sequence::HASH.into());
            report.repaired(what);
            drop_new(storage)?;
            [sequence::SIDE, sequence::HASH]
                .into_iter()
                .try_for_each(|n| remove_if_exists(storage, n))
                .map_err(IndexError::io("removing", sequence::HASH))?;
        }
        Err(e) => return Err(IndexError::io("converting", sequence::HASH)(e)),
    }
    settle(storage).map_err(IndexError::io("removing", HASH))
}

/// Removes partial conversions: they take up space and must not become the files of images indexed again.
fn drop_new(storage: &dyn Directory) -> Result<()> {
    [SIDE, HASH]
        .into_iter()
        .try_for_each(|n| remove_if_exists(storage, n))
        .map_err(IndexError::io("removing", HASH))
}

/// Renames new files that are complete, and removes the others.
fn settle(storage: &dyn Directory) -> io::Result<()> {
    let side = open(storage, SIDE)?;
    let to = match &side {
        Some(side) => whole(side.as_ref())?,
        None => None,
    };
    let Some((hash_name, side_name)) = to else {
        remove_if_exists(storage, SIDE)?;
        return remove_if_exists(storage, HASH);
    };
    if open(storage, HASH)?.is_some() {
        storage.rename(HASH, &hash_name)?;
        storage.sync()?;
    }
    storage.rename(SIDE, &side_name)?;
    storage.sync()
}

/// The final names of new files, if the header says that they are complete.
fn whole(side: &dyn File) -> io::Result<Option<(String, String)>> {
    let Some(b) = hash_file::Header::bytes_of(side)? else {
        return Ok(None);
    };
    let image = hash_file::Header::from_bytes(&b).filter(|h| h.complete);
    let sequences = sequence::Header::from_bytes(&b).map(|_| sequence_names());
    Ok(image.map(|h| names(h.image)).or(sequences))
}

fn sequence_names() -> (String, String) {
    (sequence::HASH.into(), sequence::SIDE.into())
}

/// Reads units of `each` bytes. Anything past the end reads as zeros; unreadable units become data that fails every
/// checksum.
fn read_units(file: &dyn File, buf: &mut [u8], offset: u64, each: usize) {
    match file.read_at(buf, offset) {
        Ok(n) => buf[n..].fill(0),
        Err(_) => {
            for (i, unit) in buf.chunks_mut(each).enumerate() {
                match file.read_at(unit, offset + (i * each) as u64) {
                    Ok(n) => unit[n..].fill(0),
                    Err(_) => unit.fill(0xff),
                }
            }
        }
    }
}

fn u32_at(b: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]])
}

/// Digests of an old page.
fn digests_of(page: &[u8]) -> impl Iterator<Item = Digest> {
    let (digests, _) = page.as_chunks::<{ Digest::LEN }>();
    digests.iter().map(|d| Digest(*d).short())
}

/// A complete image of version 1.
struct OldImage {
    header: hash_file::Header,
    hash: Arc<dyn File>,
    side: Arc<dyn File>,
}

impl OldImage {
    fn open(storage: &dyn Directory, id: u64) -> io::Result<Option<Self>> {
        let (hash, side) = names(id);
        let (Some(hash), Some(side)) = (open(storage, &hash)?, open(storage, &side)?) else {
            return Ok(None);
        };
        let header = hash_file::Header::bytes_of(side.as_ref())?
            .and_then(|b| hash_file::Header::of_version(1, &b))
            .filter(|h| h.image == id && h.complete);
        let Some(header) = header else {
            return Ok(None);
        };
        let fits = header.fits(OLD_PER_PAGE, OLD_IMAGE_RECORD, hash.len()?, side.len()?);
        Ok(fits.then_some(OldImage { header, hash, side }))
    }
}

/// The head bits of an old page, if both checksums match.
fn old_heads(no: u64, record: &[u8], page: &[u8]) -> Option<Vec<Head>> {
    let (body, sum) = record.split_at(OLD_IMAGE_RECORD - 4);
    let mut summed = [0; 8 + OLD_IMAGE_RECORD - 4];
    summed[..8].copy_from_slice(&no.to_le_bytes());
    summed[8..].copy_from_slice(body);
    let good = u32_at(sum, 0) == crc(&summed) && u32_at(body, 32) == crc(page);
    if !good {
        return None;
    }
    (0..OLD_PER_PAGE)
        .map(|i| head_from_bits(body[i / 4] >> (2 * (i % 4)) & 3))
        .collect()
}

fn image(storage: &dyn Directory, old: &mut OldImage, report: &mut OpenReport) -> io::Result<()> {
    let h = old.header;
    let new_names = (HASH.to_owned(), SIDE.to_owned());
    let mut new = HashFile::create_as(storage, new_names, h.image, h.serial)?;
    let pages = h.blocks.div_ceil(OLD_PER_PAGE as u64);
    let mut left = h.blocks;
    let (mut bytes, mut records) = (Vec::new(), Vec::new());
    for first in (0..pages).step_by(AT_ONCE as usize) {
        let n = (pages - first).min(AT_ONCE) as usize;
        bytes.resize(n * OLD_PAGE, 0);
        records.resize(n * OLD_IMAGE_RECORD, 0);
        read_units(
            old.hash.as_ref(),
            &mut bytes,
            first * OLD_PAGE as u64,
            OLD_PAGE,
        );
        let at = OLD_HEADER + first * OLD_IMAGE_RECORD as u64;
        read_units(old.side.as_ref(), &mut records, at, OLD_IMAGE_RECORD);
        let both = bytes.chunks(OLD_PAGE).zip(records.chunks(OLD_IMAGE_RECORD));
        for (no, (page, record)) in (first..).zip(both) {
            let count = left.min(OLD_PER_PAGE as u64) as usize;
            left -= count as u64;
            match old_heads(no, record, page) {
                Some(heads) => {
                    let digests: Vec<Digest> = digests_of(page).take(count).collect();
                    new.append(&digests, &heads[..count]);
                }
                // Later blocks keep their positions; no block has such a digest.
                None => {
                    let image = ImageId(h.image);
                    report.repaired(Repair::ImagePage(image, no));
                    new.append(&vec![Digest::default(); count], &vec![Head::No; count]);
                }
            }
        }
        new.flush()?;
    }
    storage.sync()?;
    new.finish()?;
    settle(storage)
}

/// The sequence cache of version 1.
struct OldSequences {
    header: sequence::Header,
    hash: Arc<dyn File>,
    side: Arc<dyn File>,
}

impl OldSequences {
    fn open(storage: &dyn Directory) -> io::Result<Option<Self>> {
        let (hash, side) = sequence_names();
        let (Some(hash), Some(side)) = (open(storage, &hash)?, open(storage, &side)?) else {
            return Ok(None);
        };
        let header = hash_file::Header::bytes_of(side.as_ref())?
            .and_then(|b| sequence::Header::of_version(1, &b));
        Ok(header.map(|header| OldSequences { header, hash, side }))
    }
}

/// Start, used and strong bits of an old segment.
#[derive(Clone, Copy, Default)]
struct OldBits {
    start: u128,
    used: u128,
    strong: u128,
}

/// Decodes an old segment's record, if the checksums of record and page match.
fn old_bits(no: u32, r: &[u8], page: &[u8]) -> Option<OldBits> {
    // A hole in the file.
    if r.iter().all(|b| *b == 0) {
        return Some(OldBits::default());
    }
    let (wide, _) = r.as_chunks::<16>();
    let bits = |i: usize| u128::from_le_bytes(wide[i]);
    let (start, used, strong) = (bits(0), bits(1), bits(2));
    let good = u32_at(r, 60) == crc(&r[..60])
        && u32_at(r, 56) == no
        && (start | strong) & !used == 0
        && (used == 0 || u32_at(r, 48) == crc(page));
    good.then_some(OldBits {
        start,
        used,
        strong,
    })
}

fn sequences(
    storage: &dyn Directory,
    old: &OldSequences,
    report: &mut OpenReport,
) -> io::Result<()> {
    let mut new = NewSequences {
        side: storage.create(SIDE)?.into(),
        hash: storage.create(HASH)?.into(),
        page: Page::empty(),
        slot: 0,
    };
    let records = old.side.len()?.saturating_sub(OLD_HEADER) / OLD_SEQUENCE_RECORD as u64;
    let segments = records.min(u64::from(u32::MAX / OLD_PER_PAGE as u32)) as u32;
    let (mut bytes, mut records) = (Vec::new(), Vec::new());
    for first in (0..segments).step_by(AT_ONCE as usize) {
        let n = (segments - first).min(AT_ONCE as u32) as usize;
        bytes.resize(n * OLD_PAGE, 0);
        records.resize(n * OLD_SEQUENCE_RECORD, 0);
        let at = |each: usize| u64::from(first) * each as u64;
        read_units(old.hash.as_ref(), &mut bytes, at(OLD_PAGE), OLD_PAGE);
        let records_at = OLD_HEADER + at(OLD_SEQUENCE_RECORD);
        read_units(
            old.side.as_ref(),
            &mut records,
            records_at,
            OLD_SEQUENCE_RECORD,
        );
        let both = bytes
            .chunks(OLD_PAGE)
            .zip(records.chunks(OLD_SEQUENCE_RECORD));
        for (no, (page, record)) in (first..).zip(both) {
            let bits = old_bits(no, record, page).unwrap_or_else(|| {
                let no = u64::from(no);
                report.repaired(Repair::SequencePage(no));
                OldBits::default()
            });
            new.add(page, bits)?;
        }
    }
    new.write()?;
    new.hash.sync()?;
    new.side.sync()?;
    storage.sync()?;
    let hand = u64::from(old.header.hand) * OLD_PER_PAGE as u64 / PER_PAGE as u64;
    let header = sequence::Header {
        hand: hand as u32,
        clean: false,
        ..old.header
    };
    new.side.write_at(&header.to_bytes(), 0)?;
    new.side.sync()?;
    settle(storage)
}

/// The new files as they are written. Every slot keeps its number, because that is the position of its block's data.
struct NewSequences {
    side: Arc<dyn File>,
    hash: Arc<dyn File>,
    page: Page,
    /// The next slot.
    slot: u64,
}

impl NewSequences {
    fn add(&mut self, page: &[u8], bits: OldBits) -> io::Result<()> {
        for (i, digest) in digests_of(page).enumerate() {
            let at = (self.slot % PER_PAGE as u64) as usize;
            if bits.used >> i & 1 == 1 {
                self.page.set(at, &digest);
                // A sequence that now spans two segments becomes two.
                if bits.start >> i & 1 == 1 || at == 0 {
                    self.page.start.set(at);
                }
                if bits.strong >> i & 1 == 1 {
                    self.page.strong.set(at);
                }
            }
            if at == PER_PAGE - 1 {
                self.write()?;
            }
            self.slot += 1;
        }
        Ok(())
    }

    /// Writes the page of the next slot; an empty page becomes a hole.
    fn write(&mut self) -> io::Result<()> {
        if !self.page.used.is_empty() {
            let no = self.slot / PER_PAGE as u64;
            let (bytes, record) = on_disk(no as u32, &self.page);
            self.hash.write_at(&bytes, no * bytes.len() as u64)?;
            self.side.write_at(&record, record_offset(no as u32))?;
            self.page = Page::empty();
        }
        Ok(())
    }
}
