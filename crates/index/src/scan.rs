//! Scans a batch of blocks for zero blocks and probable file starts (teleportation §2.2, §2.3).

use drover_core::{BLOCK_SIZE, Head, is_zero};

use crate::head::is_strong_head;
use crate::zero::ZeroMap;

/// Zero bytes at the end of a block that make it look like a file's tail (teleportation §3.3).
const TAIL_ZEROS: usize = 5;

/// Result of scanning a batch of blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// One bit per block: whether it is all zeros.
    pub zero: ZeroMap,
    /// One per nonzero block, in order.
    pub heads: Vec<Head>,
}

/// Scans an image batch by batch, in logical order.
#[derive(Debug, Clone, Default)]
pub struct Scanner {
    after_tail: bool,
}

impl Scanner {
    /// A scanner at the start of an image.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Scans the next blocks.
    ///
    /// # Panics
    /// When `bytes` is not a whole number of blocks.
    pub fn scan(&mut self, bytes: &[u8]) -> Scan {
        let (blocks, rest) = bytes.as_chunks::<BLOCK_SIZE>();
        assert!(rest.is_empty(), "a scan takes whole blocks");
        let mut scan = Scan::default();
        scan.heads.reserve(blocks.len());
        for block in blocks {
            let zero = is_zero(block);
            scan.zero.push(zero);
            if zero {
                self.after_tail = false;
                continue;
            }
            scan.heads.push(if is_strong_head(block) {
                Head::Strong
            } else if self.after_tail {
                Head::Weak
            } else {
                Head::No
            });
            self.after_tail = block[BLOCK_SIZE - TAIL_ZEROS..] == [0; TAIL_ZEROS];
        }
        scan
    }

    /// Notes that blocks known to be zero were skipped without being read.
    pub fn skip_zeros(&mut self) {
        self.after_tail = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Blocks for every rule: zero, plain, tail, nearly a tail, strong, strong and tail.
    fn block(kind: u8) -> Vec<u8> {
        let mut b = match kind {
            0 => return vec![0; BLOCK_SIZE],
            1..=3 => vec![0xA7; BLOCK_SIZE],
            _ => [b"\x7fELF\x02\x01\x01\0".as_slice(), &[0xA7; BLOCK_SIZE - 8]].concat(),
        };
        let zeros = [0, 0, TAIL_ZEROS, TAIL_ZEROS - 1, 0, 900][kind as usize];
        b[BLOCK_SIZE - zeros..].fill(0);
        b
    }

    /// Applies the rules to a whole image at once.
    fn plain(blocks: &[Vec<u8>]) -> (Vec<bool>, Vec<Head>) {
        let zero: Vec<bool> = blocks.iter().map(|b| b.iter().all(|&x| x == 0)).collect();
        let mut heads = Vec::new();
        for (i, b) in blocks.iter().enumerate().filter(|(i, _)| !zero[*i]) {
            let tail = i > 0 && !zero[i - 1] && blocks[i - 1].ends_with(&[0; 5]);
            heads.push(match (b.starts_with(b"\x7fELF"), tail) {
                (true, _) => Head::Strong,
                (false, true) => Head::Weak,
                (false, false) => Head::No,
            });
        }
        (zero, heads)
    }

    proptest! {
        #[test]
        fn batches_of_any_size_see_the_same(kinds in proptest::collection::vec(0u8..6, 0..60), cut in 1usize..9) {
            let blocks: Vec<Vec<u8>> = kinds.iter().map(|&k| block(k)).collect();
            let (zero, heads) = plain(&blocks);
            let mut scanner = Scanner::new();
            let (mut got_zero, mut got_heads) = (Vec::new(), Vec::new());
            for batch in blocks.chunks(cut) {
                let s = scanner.scan(&batch.concat());
                got_zero.extend(s.zero.iter());
                got_heads.extend(s.heads);
            }
            prop_assert_eq!(got_zero, zero);
            prop_assert_eq!(got_heads, heads);
        }
    }

    #[test]
    fn a_hole_ends_the_tail_before_it() {
        let mut s = Scanner::new();
        s.scan(&block(2));
        assert_eq!(s.clone().scan(&block(1)).heads, [Head::Weak]);
        s.skip_zeros();
        assert_eq!(s.scan(&block(1)).heads, [Head::No]);
    }
}
