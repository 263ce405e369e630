//! Every digest of an image, for searches in it.

use std::io;

use drover_core::Digest;
use drover_storage::{Access, Directory, open_if_exists};

use super::{Header, RECORD, names};
use crate::page::{PAGE_BYTES, PER_PAGE, is_sealed};

/// Pages read at a time.
const AT_ONCE: u64 = 64;

/// Calls `see` with each digest of an image and its compact index, in order, the first [`Digest::SHORT_LEN`] bytes of it; what is in
/// a damaged page is passed over. Nothing is written, so the matcher may be in use. `see` ends it by returning false. Returns how many digests the
/// image has; `None` if the directory has not all of them, or they are more than `limit`.
///
/// # Errors
/// When a file cannot be read.
pub fn digests_of(
    storage: &dyn Directory,
    image: u64,
    limit: u64,
    mut see: impl FnMut(u64, &[u8; Digest::SHORT_LEN]) -> bool,
) -> io::Result<Option<u64>> {
    let (hash, side) = names(image);
    let open = |name: &str| open_if_exists(storage, name, Access::Read);
    let (Some(hash), Some(side)) = (open(&hash)?, open(&side)?) else {
        return Ok(None);
    };
    let header = Header::read(side.as_ref())?.filter(|h| h.image == image && h.complete);
    let Some(header) = header.filter(|h| h.blocks <= limit) else {
        return Ok(None);
    };
    if !header.fits(PER_PAGE, RECORD, hash.len()?, side.len()?) {
        return Ok(None);
    }
    let pages = header.blocks.div_ceil(PER_PAGE as u64);
    let mut bytes = vec![0; AT_ONCE as usize * PAGE_BYTES];
    for first in (0..pages).step_by(AT_ONCE as usize) {
        let n = hash.read_at(&mut bytes, first * PAGE_BYTES as u64)?;
        let whole = bytes[..n].chunks_exact(PAGE_BYTES);
        for (page, no) in whole.zip(first..pages) {
            let sealed = page.try_into().is_ok_and(|page| is_sealed(page, no));
            let digests = page.chunks_exact(Digest::SHORT_LEN).take(PER_PAGE);
            let numbered = (no * PER_PAGE as u64..header.blocks).zip(digests);
            for (index, digest) in numbered.filter(|_| sealed) {
                let Ok(digest) = digest.try_into() else { break };
                if !see(index, digest) {
                    return Ok(Some(header.blocks));
                }
            }
        }
    }
    Ok(Some(header.blocks))
}
