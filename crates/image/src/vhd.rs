//! Virtual PC images ("vpc" in QEMU): fixed and dynamic.

use drover_core::ReadAt;

use crate::ImageError;
use crate::reader::be32;

const FOOTER: usize = 512;

/// Whether the last sector is the footer of a fixed disk, checksum included: a raw disk that
/// merely ends with the cookie stays raw.
pub(crate) fn has_fixed_footer(file: &dyn ReadAt) -> Result<bool, ImageError> {
    let Some(at) = file.len().checked_sub(FOOTER as u64) else {
        return Ok(false);
    };
    let mut footer = [0u8; FOOTER];
    file.read_exact_at(&mut footer, at)
        .map_err(|e| ImageError::io("read the last sector", e))?;
    Ok(footer.starts_with(b"conectix") && checksum_matches(&footer, 64))
}

/// The ones' complement of the sum of all bytes but the checksum's own four.
fn checksum_matches(bytes: &[u8], at: usize) -> bool {
    let sum = bytes
        .iter()
        .enumerate()
        .filter(|(i, _)| !(at..at + 4).contains(i))
        .fold(0u32, |sum, (_, &b)| sum.wrapping_add(u32::from(b)));
    !sum == be32(bytes, at)
}
