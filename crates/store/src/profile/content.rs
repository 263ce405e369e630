//! The content of blocks of a disk, as short digests.

use std::collections::HashMap;
use std::io;

use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, Digest, ReadAt, blocks_for, is_zero};
use drover_index::digest_blocks;

/// The first bytes of a block's digest, as in a hash file.
pub type ShortDigest = [u8; Digest::SHORT_LEN];

/// Blocks read at a time.
pub(super) const AT_ONCE: u64 = 256;

/// Reads these blocks of a disk, in the disk's order. Those that hold zeros and those outside are not in the result.
///
/// # Errors
/// When the disk cannot be read.
pub fn digests_at(disk: &dyn ReadAt, blocks: &[u64]) -> io::Result<HashMap<u64, ShortDigest>> {
    let end = blocks_for(disk.len());
    let mut sorted: Vec<u64> = blocks.iter().copied().filter(|b| *b < end).collect();
    sorted.sort_unstable();
    sorted.dedup();
    let mut out = HashMap::with_capacity(sorted.len());
    let mut reader = Reader::new(disk);
    let mut rest = sorted.as_slice();
    while let Some(&first) = rest.first() {
        let is_next = |(n, block): &(u64, &u64)| **block == first + n && *n < AT_ONCE;
        let count = (0..).zip(rest).take_while(is_next).count();
        rest = &rest[count..];
        reader.read(first, count as u64, |block, digest| {
            out.insert(block, digest);
        })?;
    }
    Ok(out)
}

/// Reads runs of blocks.
pub(super) struct Reader<'a> {
    disk: &'a dyn ReadAt,
    bytes: Vec<u8>,
    digests: Vec<Digest>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(disk: &'a dyn ReadAt) -> Self {
        Reader {
            disk,
            bytes: Vec::new(),
            digests: Vec::new(),
        }
    }

    /// Reads a run of at most [`AT_ONCE`] blocks, the last padded with zeros, and tells of those that are not zeros.
    pub(super) fn read(
        &mut self,
        first: u64,
        count: u64,
        mut tell: impl FnMut(u64, ShortDigest),
    ) -> io::Result<()> {
        let offset = first * BLOCK_SIZE_U64;
        let length = (count * BLOCK_SIZE_U64) as usize;
        let have = self.disk.len().saturating_sub(offset).min(length as u64) as usize;
        self.bytes.clear();
        self.bytes.resize(length, 0);
        self.disk.read_exact_at(&mut self.bytes[..have], offset)?;
        self.digests.clear();
        digest_blocks(&self.bytes, &mut self.digests);
        let (blocks, _) = self.bytes.as_chunks::<BLOCK_SIZE>();
        for ((block, bytes), digest) in (first..).zip(blocks).zip(&self.digests) {
            if !is_zero(bytes) {
                tell(block, short(digest));
            }
        }
        Ok(())
    }
}

fn short(digest: &Digest) -> ShortDigest {
    let mut out = ShortDigest::default();
    out.copy_from_slice(&digest.0[..Digest::SHORT_LEN]);
    out
}
