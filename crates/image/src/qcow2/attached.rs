//! Data of drover's own in a qcow2 file, beside the disk: found again in any copy of the file, and no longer believed as soon as
//! a program that does not know of it has opened the file for writing.
//!
//! It lies in free clusters, those with a reference count of zero: one in use that no table of QEMU's refers to would be a leak
//! to `qemu-img check`. A header extension says where it is; a bit of the autoclear features says that it is valid. Whoever opens
//! the file for writing and does not know the bit clears it first, and may then use these clusters like all free ones.
//! Format: `docs/format/generations.md`.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest, checksum};
use drover_core::ReadAt;

use super::header::{AttachedExtension, EXTENSION, EXTENSION_BYTES, Header};
use crate::probe::probe;
use crate::reader::{Reader, be64};
use crate::{Format, ImageError};

/// Upper bound on attached data, in bytes.
pub const MAX_ATTACHED_BYTES: usize = 1 << 20;

/// Of the autoclear features: the attached data is valid.
const VALID: u64 = 1 << 58;
/// Where the autoclear features are.
const AUTOCLEAR_AT: u64 = 88;
/// Type and length of an extension, or the end of all.
const HEAD: u64 = 8;
/// What is left in the header's cluster for others, in bytes: QEMU writes the header anew, with its own extensions, when it opens
/// the file for writing.
const SPARE: u64 = 1024;
/// How many clusters in use after the end of the file are skipped.
const MAX_SKIPPED: u64 = 1 << 16;
/// Bytes of the L1 table that are read at once.
const PIECE: usize = 1 << 16;

/// A change of a file, in the order in which it must be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// These bytes at this offset, perhaps beyond the end of the file.
    Write(u64, Vec<u8>),
    /// All before is durable before anything after.
    Sync,
}

/// The size in bytes of the disk in a qcow2 file.
///
/// # Errors
/// [`ImageError`] when the file is no qcow2 that can be read.
pub fn qcow2_size(file: &Arc<dyn ReadAt>) -> Result<u64, ImageError> {
    Ok(header(file)?.1.size)
}

/// The data that is attached to a file; none if there is none, it is damaged or of another image, or the file was opened for
/// writing since by a program that does not know of it.
///
/// # Errors
/// [`ImageError`] when the file is no qcow2 that can be read.
pub fn attached(file: &Arc<dyn ReadAt>) -> Result<Option<Vec<u8>>, ImageError> {
    let (file, header) = header(file)?;
    if header.autoclear & VALID == 0 || !is_whole(&header) {
        return Ok(None);
    }
    let Some(place) = Place::of(&header) else {
        return Ok(None);
    };
    let end = place.offset.checked_add(place.length.into());
    if place.length as usize > MAX_ATTACHED_BYTES || end.is_none_or(|end| end > file.len()) {
        return Ok(None);
    }
    if place.seal != seal(&file, &header)? && !cfg!(fuzzing) {
        return Ok(None);
    }
    let mut data = vec![0; place.length as usize];
    file.read(place.offset, &mut data, "attached data")?;
    let is_sound = crc(&data) == place.data || cfg!(fuzzing);
    Ok(is_sound.then_some(data))
}

/// What to change in a file so that `data` is attached to it, in place of any before. Killed after any of these changes, or in
/// the middle of one, the file is the same disk, and has the old data, the new, or none.
///
/// # Errors
/// [`ImageError::Unsupported`] when it can have none, and why; or the file is no qcow2 that can be read.
///
/// # Panics
/// Never with at most [`MAX_ATTACHED_BYTES`] of data.
pub fn attach(file: &Arc<dyn ReadAt>, data: &[u8]) -> Result<Vec<Change>, ImageError> {
    assert!(data.len() <= MAX_ATTACHED_BYTES, "too much to attach");
    let (file, header) = header(file)?;
    let no = |why: &str| Err(file.unsupported(why));
    if header.version < 3 {
        return no("is of version 2: `qemu-img amend -o compat=1.1` makes it one of version 3");
    }
    if header.dirty {
        return no("was not closed cleanly: `qemu-img check -r all` repairs it");
    }
    if !is_whole(&header) {
        return no("is encrypted, or its disk is in other files, too");
    }
    let cluster = header.cluster_size();
    let needed = (EXTENSION_BYTES as u64) + HEAD;
    let (extension, is_new) = match (header.attached, header.extensions_end) {
        (Some(found), _) if found.length as usize != EXTENSION_BYTES => {
            return no("has data attached by a later version of drover");
        }
        (Some(found), _) => (found.offset, false),
        (None, Some(end)) if end % 8 == 0 && end + HEAD + needed + SPARE <= cluster => (end, true),
        _ => return no("has no room in its header"),
    };
    let is_valid = header.autoclear & VALID != 0;
    // What was attached is still where it was only if nobody has written since.
    let old = Place::of(&header).filter(|_| is_valid);
    let offset = free_clusters(&file, &header, old, data.len() as u64)?;
    let place = Place {
        offset,
        length: data.len() as u32,
        data: crc(data),
        seal: seal(&file, &header)?,
    };
    let features = |autoclear: u64| Change::Write(AUTOCLEAR_AT, autoclear.to_be_bytes().into());
    let mut changes = Vec::new();
    if is_valid {
        changes.extend([features(header.autoclear & !VALID), Change::Sync]);
    }
    let mut whole = data.to_vec();
    whole.resize(data.len().next_multiple_of(cluster as usize), 0);
    changes.extend([Change::Write(offset, whole), Change::Sync]);
    if is_new {
        // Behind the end of the extensions nobody reads; then one write of eight aligned bytes moves that end.
        let mut behind = place.encode().to_vec();
        behind.extend([0; HEAD as usize]);
        let head = [EXTENSION, EXTENSION_BYTES as u32].map(u32::to_be_bytes);
        changes.extend([Change::Write(extension + HEAD, behind), Change::Sync]);
        changes.extend([Change::Write(extension, head.concat()), Change::Sync]);
    } else {
        let encoded = place.encode().to_vec();
        changes.extend([Change::Write(extension + HEAD, encoded), Change::Sync]);
    }
    changes.extend([features(header.autoclear | VALID), Change::Sync]);
    Ok(changes)
}

fn header(file: &Arc<dyn ReadAt>) -> Result<(Reader, Header), ImageError> {
    let probed = probe(file)?;
    let file = Reader::new(Arc::clone(file), Format::Qcow2);
    if probed.format != Format::Qcow2 {
        return Err(ImageError::unsupported(probed.format, "is no qcow2"));
    }
    let header = Header::read(&file)?;
    Ok((file, header))
}

/// Whether all of the disk is in this file, so that nobody can change it without opening the file for writing.
fn is_whole(header: &Header) -> bool {
    header.backing_name.is_none() && !header.external_data && header.encryption.is_none()
}

/// Clusters for `length` bytes that nothing uses: those of `old`, or the first ones after the end of the file.
fn free_clusters(
    file: &Reader,
    header: &Header,
    old: Option<Place>,
    length: u64,
) -> Result<u64, ImageError> {
    let cluster = header.cluster_size();
    let room = |place: &Place| u64::from(place.length).next_multiple_of(cluster);
    let count = length.div_ceil(cluster);
    let used = |first: u64| -> Result<Option<u64>, ImageError> {
        for index in (first..first + count).rev() {
            if is_used(file, header, index)? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    };
    // At the end of the file, whatever a damaged file says.
    if let Some(old) = old
        && old.offset.is_multiple_of(cluster)
        && (1..=file.len()).contains(&old.offset)
        && old.offset.saturating_add(room(&old)) >= file.len()
        && length <= room(&old)
        && used(old.offset / cluster)?.is_none()
    {
        return Ok(old.offset);
    }
    let end = file.len().div_ceil(cluster);
    let mut first = end;
    // QEMU may have taken clusters and not written them yet when it was killed.
    while let Some(last) = used(first)? {
        first = last + 1;
        if first > end + MAX_SKIPPED {
            return Err(file.unsupported("uses clusters far behind its end"));
        }
    }
    Ok(first * cluster)
}

/// Whether a cluster has a reference count above zero.
fn is_used(file: &Reader, header: &Header, index: u64) -> Result<bool, ImageError> {
    let bits = 1u64 << header.refcount_order;
    let per_block = header.cluster_size() * 8 / bits;
    let entry = index / per_block * 8;
    if entry >= header.refcount_bytes {
        return Ok(false);
    }
    let block = file.be64(header.refcount_offset + entry, "refcount table")? & !511;
    if block == 0 {
        return Ok(false);
    }
    let at = index % per_block * bits;
    let mut count = [0; 8];
    let bytes = &mut count[..(bits as usize).div_ceil(8)];
    let offset = block.checked_add(at / 8);
    let offset = offset.ok_or_else(|| file.damaged("refcount table", "a block beyond all"))?;
    file.read(offset, bytes, "refcount block")?;
    if bits < 8 {
        bytes[0] = bytes[0] >> (at % 8) & ((1 << bits) - 1);
    }
    Ok(bytes.iter().any(|byte| *byte != 0))
}

/// What tells an image from others, and from itself with other tables.
fn seal(file: &Reader, header: &Header) -> Result<u32, ImageError> {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for number in [
        header.size,
        header.cluster_size(),
        header.l1_offset,
        header.l1_entries,
    ] {
        digest.update(&number.to_be_bytes());
    }
    let mut left = header.l1_entries as usize * 8;
    let mut at = header.l1_offset;
    let mut piece = vec![0; left.min(PIECE)];
    while left > 0 {
        let n = left.min(PIECE);
        file.read(at, &mut piece[..n], "L1 table")?;
        digest.update(&piece[..n]);
        (at, left) = (at + n as u64, left - n);
    }
    Ok(digest.finalize() as u32)
}

fn crc(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Where attached data is, as the header extension says it.
#[derive(Debug, Clone, Copy)]
struct Place {
    offset: u64,
    length: u32,
    /// CRC-32C of the data.
    data: u32,
    /// See [`seal`].
    seal: u32,
}

impl Place {
    fn of(header: &Header) -> Option<Self> {
        let AttachedExtension { content, .. } = header.attached?;
        let (body, sum) = content.split_last_chunk()?;
        let number = |at: usize| be64(&content, at);
        let is_sound = u32::from_be_bytes(*sum) == crc(body) || cfg!(fuzzing);
        is_sound.then(|| Place {
            offset: number(0),
            length: (number(8) >> 32) as u32,
            data: number(8) as u32,
            seal: (number(16) >> 32) as u32,
        })
    }

    fn encode(self) -> [u8; EXTENSION_BYTES] {
        let mut bytes = [0; EXTENSION_BYTES];
        bytes[..8].copy_from_slice(&self.offset.to_be_bytes());
        for (at, number) in [(8, self.length), (12, self.data), (16, self.seal)] {
            bytes[at..at + 4].copy_from_slice(&number.to_be_bytes());
        }
        let sum = crc(&bytes[..EXTENSION_BYTES - 4]);
        bytes[EXTENSION_BYTES - 4..].copy_from_slice(&sum.to_be_bytes());
        bytes
    }
}
