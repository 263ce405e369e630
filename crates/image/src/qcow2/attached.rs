//! A few bytes of drover's own in the header of a qcow2 file, beside the disk: found again in any copy of the file, and no longer
//! believed as soon as QEMU has written to the file.
//!
//! They are in a header extension; a bit of the autoclear features says that they are valid. Who opens the file for writing and does
//! not know the bit clears it. QEMU does not do so when it has the file open and begins to write later (`qemu-img commit`,
//! `blockdev-reopen`): so the bytes are only believed while a persistent dirty bitmap, in which QEMU records what it writes, says
//! that nothing was written. Format: `docs/format/generations.md`.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest, checksum};
use drover_core::ReadAt;

use super::bitmaps::has_recorded_nothing;
use super::header::{ATTACHED, ATTACHED_BYTES, Header};
use crate::probe::probe;
use crate::reader::{Reader, be32};
use crate::{Format, ImageError};

/// Upper bound on attached data, in bytes.
pub const MAX_ATTACHED_BYTES: usize = ATTACHED_BYTES - 3 * 4;

/// Of the autoclear features: the attached data is valid.
const VALID: u64 = 1 << 58;
/// Where the autoclear features are.
const AUTOCLEAR_AT: u64 = 88;
/// Type and length of an extension, or the end of all.
const HEAD: u64 = 8;
/// What is left in the header's cluster for others, in bytes: QEMU writes the header anew, with its own extensions, when it opens
/// the file for writing.
const SPARE: u64 = 1024;
/// Bytes of the L1 table that are read at once.
const PIECE: usize = 1 << 16;

/// A change of a file, in the order in which it must be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// These bytes at this offset.
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

/// The data that is attached to a file; none if there is none, it is damaged or of another image, or the disk may have been written
/// since. `bitmap` names the dirty bitmap that has to say otherwise: one that is in the file, in which QEMU records each write, and
/// has recorded none.
///
/// # Errors
/// [`ImageError`] when the file is no qcow2 that can be read.
pub fn attached(
    file: &Arc<dyn ReadAt>,
    bitmap: impl FnOnce(&[u8]) -> Option<String>,
) -> Result<Option<Vec<u8>>, ImageError> {
    let (file, header) = header(file)?;
    if header.autoclear & VALID == 0 || !is_whole(&header) {
        return Ok(None);
    }
    let Some((data, sealed)) = header.attached.and_then(|found| decode(&found.content)) else {
        return Ok(None);
    };
    if sealed != seal(&file, &header)? && !cfg!(fuzzing) {
        return Ok(None);
    }
    let Some(bitmap) = bitmap(&data) else {
        return Ok(None);
    };
    let is_valid = has_recorded_nothing(&file, &header, &bitmap)? || cfg!(fuzzing);
    Ok(is_valid.then_some(data))
}

/// What to change in a file so that `data` is attached to it, in place of any before. Killed after any of these changes, or in
/// the middle of one, the file is the same disk, and has the old data, the new, or none.
///
/// # Errors
/// [`ImageError::Unsupported`] when it can have none, or not so many bytes, and why; or the file is no qcow2 that can be read.
pub fn attach(file: &Arc<dyn ReadAt>, data: &[u8]) -> Result<Vec<Change>, ImageError> {
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
    if header.snapshots > 0 {
        return no(
            "has internal snapshots, to which QEMU does not return while it records what is written: `qemu-img snapshot -d` \
             deletes them",
        );
    }
    let Some(content) = encode(data, seal(&file, &header)?) else {
        return no("would need more of its header than there is");
    };
    let needed = HEAD + ATTACHED_BYTES as u64 + HEAD;
    let (extension, is_new) = match (header.attached, header.extensions_end) {
        (Some(found), _) if found.length as usize != ATTACHED_BYTES => {
            return no("has data attached by another version of drover");
        }
        (Some(found), _) => (found.offset, false),
        (None, Some(end)) if end % 8 == 0 && end + needed + SPARE <= header.cluster_size() => {
            (end, true)
        }
        _ => return no("has no room in its header"),
    };
    let mut changes = invalidate(&header);
    if is_new {
        // Behind the end of the extensions nobody reads; then one write of eight aligned bytes moves that end.
        let behind = [&content[..], &[0; HEAD as usize]].concat();
        let head = [ATTACHED, ATTACHED_BYTES as u32].map(u32::to_be_bytes);
        changes.extend([Change::Write(extension + HEAD, behind), Change::Sync]);
        changes.extend([Change::Write(extension, head.concat()), Change::Sync]);
    } else {
        changes.extend([
            Change::Write(extension + HEAD, content.into()),
            Change::Sync,
        ]);
    }
    changes.extend([features(header.autoclear | VALID), Change::Sync]);
    Ok(changes)
}

/// What to change in a file so that nothing is attached to it any more: nothing if nothing was.
///
/// # Errors
/// [`ImageError`] when the file is no qcow2 that can be read.
pub fn detach(file: &Arc<dyn ReadAt>) -> Result<Vec<Change>, ImageError> {
    let (_, header) = header(file)?;
    let mut changes = invalidate(&header);
    if let Some(found) = header.attached {
        let length = u64::from(found.length);
        let nothing = vec![0; found.length as usize];
        changes.extend([Change::Write(found.offset + HEAD, nothing), Change::Sync]);
        // The last one is cut off; QEMU puts those that it does not know behind its own.
        let end = found.offset + HEAD + length.next_multiple_of(8);
        if header.extensions_end == Some(end) && found.offset % 8 == 0 {
            let end = vec![0; HEAD as usize];
            changes.extend([Change::Write(found.offset, end), Change::Sync]);
        }
    }
    Ok(changes)
}

fn features(autoclear: u64) -> Change {
    Change::Write(AUTOCLEAR_AT, autoclear.to_be_bytes().into())
}

/// Says that what is attached is not valid.
fn invalidate(header: &Header) -> Vec<Change> {
    match header.autoclear & VALID {
        0 => Vec::new(),
        _ => vec![features(header.autoclear & !VALID), Change::Sync],
    }
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

/// The content of the extension: how many bytes the data has, the [`seal`], the data, zeros, a sum. None for too much data.
fn encode(data: &[u8], seal: u32) -> Option<[u8; ATTACHED_BYTES]> {
    let mut content = [0; ATTACHED_BYTES];
    content[..4].copy_from_slice(&(data.len() as u32).to_be_bytes());
    content[4..8].copy_from_slice(&seal.to_be_bytes());
    let (body, sum) = content.split_at_mut(ATTACHED_BYTES - 4);
    body[8..].get_mut(..data.len())?.copy_from_slice(data);
    sum.copy_from_slice(&crc(body).to_be_bytes());
    Some(content)
}

/// Data and seal in an extension; none if it is damaged.
fn decode(content: &[u8; ATTACHED_BYTES]) -> Option<(Vec<u8>, u32)> {
    let (body, sum) = content.split_at(ATTACHED_BYTES - 4);
    if be32(sum, 0) != crc(body) && !cfg!(fuzzing) {
        return None;
    }
    let data = body[8..].get(..be32(body, 0) as usize)?;
    Some((data.to_vec(), be32(body, 4)))
}
