//! Finds digests that occurred earlier in the batch.

use drover_core::Digest;

/// A small open-addressed hash table of the batch's blocks, reused across batches to save allocations.
#[derive(Default)]
pub(crate) struct Repeats {
    /// Block number plus one; zero is free. At least half of the table is free.
    table: Vec<u16>,
    mask: usize,
}

impl Repeats {
    /// Clears the table for a batch of `n` blocks.
    pub(crate) fn clear(&mut self, n: usize) {
        let size = (2 * n).next_power_of_two().max(16);
        self.table.clear();
        self.table.resize(size, 0);
        self.mask = size - 1;
    }

    fn home(&self, digest: &Digest) -> usize {
        (digest.prefix() >> 20) as usize & self.mask
    }

    /// Inserts block `i`, unless its digest is present.
    pub(crate) fn insert(&mut self, digests: &[Digest], i: usize) {
        let mut at = self.home(&digests[i]);
        while let Some(j) = self.table[at].checked_sub(1) {
            if digests[usize::from(j)] == digests[i] {
                return;
            }
            at = (at + 1) & self.mask;
        }
        self.table[at] = i as u16 + 1;
    }

    /// The block inserted with the digest of block `i`.
    pub(crate) fn find(&self, digests: &[Digest], i: usize) -> Option<usize> {
        let mut at = self.home(&digests[i]);
        loop {
            let j = usize::from(self.table[at].checked_sub(1)?);
            if digests[j] == digests[i] {
                return Some(j);
            }
            at = (at + 1) & self.mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_a_plain_search(ns in proptest::collection::vec(0u8..40, 0..200)) {
            let digests: Vec<Digest> = ns.iter().map(|&n| Digest([n % 40; 32])).collect();
            let mut repeats = Repeats::default();
            repeats.clear(digests.len());
            for i in 0..digests.len() {
                let plain = (0..i).find(|&j| digests[j] == digests[i]);
                prop_assert_eq!(repeats.find(&digests, i), plain);
                repeats.insert(&digests, i);
            }
        }
    }
}
