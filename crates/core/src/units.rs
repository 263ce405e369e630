//! Sizes and positions of blocks, and checks of their bytes for zeros.

use std::ops::Add;

use serde::{Deserialize, Serialize};

/// Block size in bytes. Hashing, matching and reuse all work on blocks.
pub const BLOCK_SIZE: usize = 4096;

/// [`BLOCK_SIZE`] for arithmetic on offsets.
pub const BLOCK_SIZE_U64: u64 = BLOCK_SIZE as u64;

/// The position of a block in an image's walk, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct BlockIndex(pub u64);

impl BlockIndex {
    /// The byte offset of the block in the walk.
    #[must_use]
    pub fn byte_offset(self) -> u64 {
        self.0 * BLOCK_SIZE_U64
    }
}

/// The index of a data block among the data blocks of an image's walk, which excludes zero blocks.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[repr(transparent)]
pub struct CompactIndex(pub u64);

impl Add<u64> for CompactIndex {
    type Output = Self;

    /// The index `blocks` data blocks further on. Saturates: peers and journals may hold any index, and one beyond an
    /// image's last is found nowhere.
    fn add(self, blocks: u64) -> Self {
        Self(self.0.saturating_add(blocks))
    }
}

/// Number of blocks that hold `bytes` bytes; the last may be partial.
#[must_use]
pub fn blocks_for(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_SIZE_U64)
}

/// Whether all bytes are zero. True for an empty slice.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    // Most nonzero blocks differ early; the rest is compared in wide words.
    let (head, rest) = bytes.split_at(bytes.len().min(16));
    if head.iter().any(|&b| b != 0) {
        return false;
    }
    let mut wide = rest.chunks_exact(64);
    wide.by_ref().all(|c| {
        let mut or = 0u64;
        for w in c.chunks_exact(8) {
            or |= u64::from_ne_bytes([w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]]);
        }
        or == 0
    }) && wide.remainder().iter().all(|&b| b == 0)
}

/// The number of zero bytes at the end of `bytes`.
#[must_use]
pub fn trailing_zeros(bytes: &[u8]) -> usize {
    bytes.iter().rev().take_while(|&&b| b == 0).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn zero_scan_agrees_with_the_plain_one(len in 0usize..300, dirty in proptest::option::of(0usize..300)) {
            let mut v = vec![0u8; len];
            if let Some(at) = dirty && at < len { v[at] = 1; }
            prop_assert_eq!(is_zero(&v), v.iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn counting_blocks_rounds_up() {
        assert_eq!(blocks_for(0), 0);
        assert_eq!(blocks_for(1), 1);
        assert_eq!(blocks_for(4096), 1);
        assert_eq!(blocks_for(4097), 2);
        assert_eq!(BlockIndex(3).byte_offset(), 12288);
    }

    #[test]
    fn trailing_zeros_are_counted_from_the_end() {
        assert_eq!(trailing_zeros(&[0, 1, 0, 0]), 2);
        assert_eq!(trailing_zeros(&[]), 0);
        assert_eq!(trailing_zeros(&[0, 0]), 2);
    }
}
