//! The persistent dirty bitmaps in a qcow2 file, as far as they tell whether anything was written.

use super::header::Header;
use crate::ImageError;
use crate::reader::{Reader, be16, be32, be64};

/// Of the autoclear features: the bitmaps are as the program that wrote last knows them.
const CONSISTENT: u64 = 1;
/// Of a bitmap's flags: a program has not written it back; it records each write.
const IN_USE: u32 = 1;
const AUTO: u32 = 1 << 1;
/// The type of dirty bitmaps.
const DIRTY: u8 = 1;
/// Bytes of an entry of the directory before its name.
const FIXED: usize = 24;
/// The largest directory, and the largest table, in bytes: what is larger is not looked at.
const MAX_DIRECTORY: u64 = 1 << 20;
const MAX_TABLE: u64 = 8 << 20;
/// How many bytes of a table are read at once.
const PIECE: usize = 1 << 16;

/// Whether a file has exactly one bitmap of this name, of the size of the disk, in which each write is recorded, and none was.
pub(super) fn has_recorded_nothing(
    file: &Reader,
    header: &Header,
    name: &str,
) -> Result<bool, ImageError> {
    const FIELD: &str = "bitmap directory";
    let Some((bytes, offset)) = header.bitmaps else {
        return Ok(false);
    };
    if header.autoclear & CONSISTENT == 0 || bytes > MAX_DIRECTORY {
        return Ok(false);
    }
    let mut directory = vec![0; bytes as usize];
    file.read(offset, &mut directory, FIELD)?;
    let mut rest = &directory[..];
    let mut found = None;
    while rest.len() >= FIXED {
        let name_at = FIXED.saturating_add(be32(rest, 20) as usize);
        let end = name_at.saturating_add(be16(rest, 18).into());
        let Some(its_name) = rest.get(name_at..end) else {
            return Err(file.damaged(FIELD, "an entry reaches past its end"));
        };
        if its_name == name.as_bytes() {
            if found.is_some() {
                return Ok(false);
            }
            found = Some(rest);
        }
        rest = rest.get(end.next_multiple_of(8)..).unwrap_or_default();
    }
    let Some(found) = found else {
        return Ok(false);
    };
    let (flags, kind, granularity) = (be32(found, 12), found[16], found[17]);
    if flags & (IN_USE | AUTO) != AUTO || kind != DIRTY || !(9..=31).contains(&granularity) {
        return Ok(false);
    }
    let bits_of_cluster = header.cluster_size() * 8;
    let entries = header
        .size
        .div_ceil(1 << granularity)
        .div_ceil(bits_of_cluster);
    if u64::from(be32(found, 8)) != entries {
        return Ok(false);
    }
    is_zero(file, be64(found, 0), entries * 8)
}

/// Whether all entries of a table are zero: so are the bits then, and no cluster is allocated for them.
fn is_zero(file: &Reader, mut offset: u64, bytes: u64) -> Result<bool, ImageError> {
    if bytes > MAX_TABLE {
        return Ok(false);
    }
    let mut left = bytes as usize;
    let mut piece = vec![0; left.min(PIECE)];
    while left > 0 {
        let n = left.min(PIECE);
        file.read(offset, &mut piece[..n], "bitmap table")?;
        if piece[..n].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        (offset, left) = (offset + n as u64, left - n);
    }
    Ok(true)
}
