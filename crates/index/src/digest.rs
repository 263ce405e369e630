//! Block digests and the digest of a whole image (`docs/format/digests.md`).

mod many;

use std::io;
use std::sync::LazyLock;

use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, Digest, Extent, ExtentKind, ReadAt, blocks_for};

/// Prefix of the input of [`ImageDigest`], so that it cannot equal a block's digest by construction.
const IMAGE_DOMAIN: &[u8] = b"drover image digest v1\0";

/// Zero-block digests hashed at a time: 128 KiB.
const ZERO_SLAB: usize = 4096;

/// The digest of a block of zeros.
pub static ZERO_BLOCK: LazyLock<Digest> = LazyLock::new(|| digest_block(&[0; BLOCK_SIZE]));

static ZERO_DIGESTS: LazyLock<Vec<u8>> = LazyLock::new(|| ZERO_BLOCK.0.repeat(ZERO_SLAB));

/// BLAKE3-256 of one block.
///
/// # Panics
/// When `block` is not 4096 bytes.
#[must_use]
pub fn digest_block(block: &[u8]) -> Digest {
    assert_eq!(block.len(), BLOCK_SIZE, "a block is 4096 bytes");
    Digest(*blake3::hash(block).as_bytes())
}

/// Appends the BLAKE3-256 of every block in `bytes` to `out`; the same as [`digest_block`] of each, but twice as
/// fast: sixteen blocks share the vector units.
///
/// # Panics
/// When `bytes` is not a whole number of blocks.
pub fn digest_blocks(bytes: &[u8], out: &mut Vec<Digest>) {
    let (blocks, rest) = bytes.as_chunks::<BLOCK_SIZE>();
    assert!(rest.is_empty(), "digest_blocks takes whole blocks");
    out.reserve(blocks.len());
    for group in blocks.chunks(many::LANES) {
        many::digest_group(group, out);
    }
}

/// The digest of a whole file: over its length and the digests of its blocks in file order, the last block padded
/// with zeros.
///
/// Pass it every block once, in order, then call [`finish`](Self::finish).
#[derive(Debug, Clone)]
pub struct ImageDigest {
    hasher: blake3::Hasher,
    left: u64,
}

impl ImageDigest {
    /// Starts the digest of a file of `file_len` bytes.
    #[must_use]
    pub fn new(file_len: u64) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(IMAGE_DOMAIN);
        hasher.update(&file_len.to_le_bytes());
        ImageDigest {
            hasher,
            left: blocks_for(file_len),
        }
    }

    /// Adds the digests of the next blocks.
    ///
    /// # Panics
    /// When the file has fewer blocks.
    pub fn blocks(&mut self, digests: &[Digest]) {
        self.take(digests.len() as u64);
        let mut bytes = [0u8; 64 * Digest::LEN];
        for group in digests.chunks(64) {
            for (to, d) in bytes.chunks_exact_mut(Digest::LEN).zip(group) {
                to.copy_from_slice(&d.0);
            }
            self.hasher.update(&bytes[..group.len() * Digest::LEN]);
        }
    }

    /// Adds `n` zero blocks.
    ///
    /// # Panics
    /// When the file has fewer blocks.
    pub fn zero_blocks(&mut self, n: u64) {
        self.take(n);
        let mut left = n;
        while left > 0 {
            let now = left.min(ZERO_SLAB as u64);
            self.hasher
                .update(&ZERO_DIGESTS[..now as usize * Digest::LEN]);
            left -= now;
        }
    }

    /// Number of blocks not added yet.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.left
    }

    /// The digest.
    ///
    /// # Panics
    /// When blocks are [missing](Self::missing).
    #[must_use]
    pub fn finish(self) -> Digest {
        assert_eq!(self.left, 0, "an image digest needs every block");
        Digest(*self.hasher.finalize().as_bytes())
    }

    fn take(&mut self, n: u64) {
        self.left = self
            .left
            .checked_sub(n)
            .expect("more blocks than the file has");
    }
}

/// The digest of the whole file behind `reader`. `extents` lists parts that need not be read: sorted extents of the
/// file, of which only `Zero` and `Hole` matter; anything not covered is read. They are trusted: a wrong extent gives
/// a wrong digest.
///
/// # Errors
/// Read errors.
pub fn image_digest(
    reader: &dyn ReadAt,
    extents: impl IntoIterator<Item = Extent>,
) -> io::Result<Digest> {
    let len = reader.len();
    let total = blocks_for(len);
    let mut image = ImageDigest::new(len);
    let mut at = 0u64;
    let mut read = Reading::default();
    for e in extents {
        if e.kind == ExtentKind::Data {
            continue;
        }
        // Only blocks entirely inside the extent are skipped; an extent up to the end of the file covers the padding
        // too.
        let first = blocks_for(e.offset).clamp(at, total);
        let end = if e.end() >= len {
            total
        } else {
            (e.end() / BLOCK_SIZE_U64).clamp(first, total)
        };
        read.blocks(reader, &mut image, at, first)?;
        image.zero_blocks(end - first);
        at = end;
    }
    read.blocks(reader, &mut image, at, total)?;
    Ok(image.finish())
}

/// Reads, pads and digests in batches of 1 MiB.
#[derive(Default)]
struct Reading {
    bytes: Vec<u8>,
    digests: Vec<Digest>,
}

impl Reading {
    const BLOCKS: u64 = 256;

    fn blocks(
        &mut self,
        reader: &dyn ReadAt,
        image: &mut ImageDigest,
        from: u64,
        to: u64,
    ) -> io::Result<()> {
        let mut at = from;
        while at < to {
            let n = (to - at).min(Self::BLOCKS);
            let offset = at * BLOCK_SIZE_U64;
            let have = (n * BLOCK_SIZE_U64).min(reader.len() - offset) as usize;
            self.bytes.clear();
            self.bytes.resize((n * BLOCK_SIZE_U64) as usize, 0);
            reader.read_exact_at(&mut self.bytes[..have], offset)?;
            self.digests.clear();
            digest_blocks(&self.bytes, &mut self.digests);
            image.blocks(&self.digests);
            at += n;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
