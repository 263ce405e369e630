//! The digests of blocks: plain, or keyed in an encrypted vault, so that they tell nothing outside it.

use drover_core::{BLOCK_SIZE, Digest};
use drover_index::{ZERO_BLOCK, digest_blocks};

/// How blocks are digested.
#[derive(Clone, Copy, Default)]
pub struct Digester {
    key: Option<[u8; 32]>,
}

impl std::fmt::Debug for Digester {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.key {
            None => f.write_str("Digester(plain)"),
            Some(_) => f.write_str("Digester(keyed)"),
        }
    }
}

impl Digester {
    /// Digests of an encrypted vault: BLAKE3 keyed with this, of the plain digest. That costs one compression more a
    /// block, and the many blocks are still digested together.
    #[must_use]
    pub(crate) fn keyed(key: [u8; 32]) -> Self {
        Digester { key: Some(key) }
    }

    /// Appends the digest of each block of 4 KiB.
    pub fn blocks(&self, blocks: &[u8], out: &mut Vec<Digest>) {
        let from = out.len();
        digest_blocks(blocks, out);
        debug_assert_eq!(out.len() - from, blocks.len() / BLOCK_SIZE);
        if let Some(key) = &self.key {
            // Zeros are no secret, and stored nowhere.
            for digest in out[from..].iter_mut().filter(|d| **d != *ZERO_BLOCK) {
                *digest = Digest(*blake3::keyed_hash(key, &digest.0).as_bytes());
            }
        }
    }
}
