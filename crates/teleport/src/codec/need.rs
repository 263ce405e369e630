//! Runs of blocks, and `NEED`: the runs of a batch that the source must send.

use drover_core::{BlockIndex, put_varint};

use super::{Malformed, Reader};
use crate::protocol::BATCH_BLOCKS;

/// Ascending, disjoint, non-adjacent runs `(first block, blocks)` of a walk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Runs(Vec<(u64, u64)>);

impl Runs {
    /// Appends blocks after the last run; merges adjacent runs.
    ///
    /// # Panics
    /// In debug builds, if `first` is not past the last block.
    pub fn push(&mut self, first: u64, blocks: u64) {
        if blocks == 0 {
            return;
        }
        match self.0.last_mut() {
            Some((f, n)) if *f + *n == first => *n += blocks,
            last => {
                debug_assert!(last.is_none_or(|(f, n)| *f + *n < first));
                self.0.push((first, blocks));
            }
        }
    }

    /// The runs.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().copied()
    }

    /// The runs as pairs of block and count.
    #[must_use]
    pub fn to_vec(&self) -> Vec<(BlockIndex, u64)> {
        self.iter()
            .map(|(first, n)| (BlockIndex(first), n))
            .collect()
    }

    /// Every block.
    pub fn blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().flat_map(|&(f, n)| f..f + n)
    }

    /// Number of blocks.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().map(|r| r.1).sum()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        put_varint(out, self.0.len() as u64);
        let mut at = 0;
        for &(first, blocks) in &self.0 {
            put_varint(out, first - at);
            put_varint(out, blocks);
            at = first + blocks;
        }
    }

    /// Decodes at most `max_blocks` blocks, none at or beyond 2^32.
    pub(super) fn get(r: &mut Reader<'_>, max_blocks: u64) -> Result<Self, Malformed> {
        let n = r.at_most(max_blocks)?;
        let mut runs = Runs(Vec::with_capacity(n.min(BATCH_BLOCKS) as usize));
        let (mut at, mut left) = (0u64, max_blocks);
        for k in 0..n {
            let gap = r.at_most(1 << 32)?;
            let blocks = r.at_most(left)?;
            if blocks == 0 || (k > 0 && gap == 0) {
                return Err(r.malformed());
            }
            left -= blocks;
            let first = at + gap;
            at = first + blocks;
            if at > 1 << 32 {
                return Err(r.malformed());
            }
            runs.0.push((first, blocks));
        }
        Ok(runs)
    }
}

impl FromIterator<u64> for Runs {
    fn from_iter<I: IntoIterator<Item = u64>>(blocks: I) -> Self {
        let mut out = Runs::default();
        blocks.into_iter().for_each(|b| out.push(b, 1));
        out
    }
}

/// What the source must send of one batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// Blocks of the walk; at most a batch's worth.
    pub runs: Runs,
}

impl Need {
    /// Encodes it for the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.runs.put(&mut out);
        out
    }

    /// Decodes a need.
    ///
    /// # Errors
    /// When the bytes are not exactly one need.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "need");
        let runs = Runs::get(&mut r, BATCH_BLOCKS)?;
        r.end()?;
        Ok(Need { runs })
    }
}

/// Blocks that come ahead of all that nobody waits for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Want {
    /// A machine waits for them: they come first of these.
    pub waited: bool,
    /// Blocks of the walk; at most a batch's worth.
    pub runs: Runs,
}

impl Want {
    /// Encodes it for the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![u8::from(self.waited)];
        self.runs.put(&mut out);
        out
    }

    /// Decodes one.
    ///
    /// # Errors
    /// When the bytes are not exactly one.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "want");
        let waited = r.at_most(1)? == 1;
        let runs = Runs::get(&mut r, BATCH_BLOCKS)?;
        r.end()?;
        Ok(Want { waited, runs })
    }
}

/// Batches of a walk that the source need not send: the destination has their blocks in an old copy of the disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Have {
    /// Numbers of batches, not of blocks.
    pub batches: Runs,
}

/// Upper bound on the runs of batches in a [`Have`].
const MAX_HAVE_RUNS: usize = 64 << 10;

/// Upper bound on its batches.
const MAX_HAVE: u64 = 1 << 21;

impl Have {
    /// Whether a batch is among them.
    #[must_use]
    pub fn has(&self, batch: u64) -> bool {
        let runs = &self.batches.0;
        let after = runs.partition_point(|(first, _)| *first <= batch);
        after > 0 && batch < runs[after - 1].0 + runs[after - 1].1
    }

    /// The first of them that is at least `batch`.
    #[must_use]
    pub fn next_from(&self, batch: u64) -> Option<u64> {
        let runs = &self.batches.0;
        let at = runs.partition_point(|(first, n)| first + n <= batch);
        runs.get(at).map(|(first, _)| batch.max(*first))
    }

    /// Encodes it for the wire; what is beyond the limits is left out.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let runs = self.batches.iter().take(MAX_HAVE_RUNS);
        let runs = runs.take_while(|(first, n)| first + n <= MAX_HAVE);
        let mut out = Vec::new();
        Runs(runs.collect()).put(&mut out);
        out
    }

    /// Decodes one.
    ///
    /// # Errors
    /// When the bytes are not exactly one.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "list of batches");
        let batches = Runs::get(&mut r, MAX_HAVE)?;
        if batches.0.len() > MAX_HAVE_RUNS {
            return Err(r.malformed());
        }
        r.end()?;
        Ok(Have { batches })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn batches_there_and_back(set in prop::collection::btree_set(0u64..3000, 0..500)) {
            let have = Have { batches: set.iter().copied().collect() };
            (0..3001).for_each(|batch| {
                assert_eq!(have.has(batch), set.contains(&batch));
                assert_eq!(have.next_from(batch), set.range(batch..).next().copied());
            });
            prop_assert_eq!(Have::decode(&have.encode()), Ok(have));
        }

        #[test]
        fn there_and_back(set in prop::collection::btree_set(0u64..5000, 0..500)) {
            let need = Need { runs: set.iter().copied().collect() };
            prop_assert_eq!(need.runs.count(), set.len() as u64);
            prop_assert!(need.runs.blocks().eq(set.iter().copied()));
            prop_assert_eq!(Need::decode(&need.encode()), Ok(need.clone()));
            for waited in [false, true] {
                let want = Want { waited, runs: need.runs.clone() };
                prop_assert_eq!(Want::decode(&want.encode()), Ok(want));
            }
        }

        #[test]
        fn rubbish_is_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(n) = Need::decode(&bytes) {
                prop_assert!(n.runs.count() <= BATCH_BLOCKS);
            }
            if let Ok(want) = Want::decode(&bytes) {
                prop_assert!(want.runs.count() <= BATCH_BLOCKS);
            }
            if let Ok(have) = Have::decode(&bytes) {
                prop_assert!(have.batches.count() <= MAX_HAVE);
            }
        }
    }
}
