//! Block maps: which blocks of an image's walk hold data, and the position of the n-th data block.
//!
//! Hash files and plans count only nonzero blocks ("compact" indices). A [`BlockMap`] translates a compact index to a
//! block of the walk. It is built batch by batch and stored with every image; a batch takes 16 bytes when it is all
//! data or all zero, and 272 when mixed.

use drover_core::{BlockIndex, CompactIndex, put_varint, take_varint};

/// Blocks per entry of a [`BlockMap`]: one batch (8 MiB of the walk).
pub const ENTRY_BLOCKS: u64 = 2048;

const WORDS: usize = (ENTRY_BLOCKS / 64) as usize;

/// The blocks of one batch that hold data, as a bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataBits {
    blocks: u16,
    words: Box<[u64; WORDS]>,
}

impl DataBits {
    /// An empty bitmap for `blocks` blocks.
    ///
    /// # Panics
    /// If `blocks` exceeds a batch.
    #[must_use]
    pub fn new(blocks: u64) -> Self {
        assert!(blocks <= ENTRY_BLOCKS);
        DataBits {
            blocks: blocks as u16,
            words: Box::new([0; WORDS]),
        }
    }

    /// Number of blocks in the batch.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        u64::from(self.blocks)
    }

    /// Number of data blocks.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Whether block `i` holds data.
    #[must_use]
    pub fn get(&self, i: u64) -> bool {
        i < self.blocks() && self.words[(i / 64) as usize] >> (i % 64) & 1 == 1
    }

    /// Number of data blocks before block `i`.
    #[must_use]
    pub fn rank(&self, i: u64) -> u64 {
        let (word, bit) = ((i / 64) as usize, i % 64);
        let whole: u64 = self.words[..word]
            .iter()
            .map(|w| u64::from(w.count_ones()))
            .sum();
        whole + u64::from((self.words[word] & ((1 << bit) - 1)).count_ones())
    }

    /// Marks block `i` as data.
    pub fn set(&mut self, i: u64) {
        debug_assert!(i < self.blocks());
        self.words[(i / 64) as usize] |= 1 << (i % 64);
    }

    /// Marks block `i` as zero.
    pub fn clear(&mut self, i: u64) {
        self.words[(i / 64) as usize] &= !(1 << (i % 64));
    }

    /// The data blocks, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.words.iter().enumerate().flat_map(|(w, &bits)| {
            let mut bits = bits;
            std::iter::from_fn(move || {
                if bits == 0 {
                    return None;
                }
                let at = bits.trailing_zeros();
                bits &= bits - 1;
                Some(w as u64 * 64 + u64::from(at))
            })
        })
    }

    /// Run-length encoding: lengths of alternating runs, starting with data (possibly of length zero).
    #[must_use]
    pub fn runs(&self) -> Vec<u64> {
        let mut out = Vec::new();
        let (mut value, mut length) = (true, 0);
        for i in 0..self.blocks() {
            if self.get(i) == value {
                length += 1;
            } else {
                out.push(length);
                value = !value;
                length = 1;
            }
        }
        out.push(length);
        out
    }

    /// Inverse of [`runs`](Self::runs); `None` unless the runs add up to exactly `blocks` blocks.
    #[must_use]
    pub fn from_runs(blocks: u64, runs: &[u64]) -> Option<Self> {
        if blocks > ENTRY_BLOCKS {
            return None;
        }
        let mut out = DataBits::new(blocks);
        let mut at = 0u64;
        for (n, &length) in runs.iter().enumerate() {
            let end = at.checked_add(length).filter(|&e| e <= blocks)?;
            if n % 2 == 0 {
                (at..end).for_each(|i| out.set(i));
            }
            at = end;
        }
        (at == blocks).then_some(out)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Bits {
    Zero,
    Data,
    Mixed(Box<[u64; WORDS]>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    /// Data blocks before this batch.
    before: u64,
    blocks: u16,
    bits: Bits,
}

/// Which blocks of a walk hold data. See the module's documentation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockMap {
    entries: Vec<Entry>,
    data_blocks: u64,
    walk_blocks: u64,
}

impl BlockMap {
    /// Appends a batch. All but the last have [`ENTRY_BLOCKS`] blocks.
    pub fn push(&mut self, bits: &DataBits) {
        let count = bits.count();
        let kind = match count {
            0 => Bits::Zero,
            n if n == bits.blocks() => Bits::Data,
            _ => Bits::Mixed(bits.words.clone()),
        };
        self.entries.push(Entry {
            before: self.data_blocks,
            blocks: bits.blocks,
            bits: kind,
        });
        self.data_blocks += count;
        self.walk_blocks += bits.blocks();
    }

    /// Total number of data blocks.
    #[must_use]
    pub fn data_blocks(&self) -> u64 {
        self.data_blocks
    }

    /// Total number of blocks.
    #[must_use]
    pub fn walk_blocks(&self) -> u64 {
        self.walk_blocks
    }

    /// Number of batches.
    #[must_use]
    pub fn batches(&self) -> u64 {
        self.entries.len() as u64
    }

    /// The first data block that is not before the batch; the end of all data when there is no such batch yet.
    #[must_use]
    pub fn first_data_of(&self, batch: u64) -> CompactIndex {
        let entry = usize::try_from(batch)
            .ok()
            .and_then(|b| self.entries.get(b));
        CompactIndex(entry.map_or(self.data_blocks, |e| e.before))
    }

    /// The batch's bitmap, if there is such a batch.
    #[must_use]
    pub fn batch(&self, batch: u64) -> Option<DataBits> {
        let e = self.entries.get(usize::try_from(batch).ok()?)?;
        let mut out = DataBits::new(u64::from(e.blocks));
        match &e.bits {
            Bits::Zero => {}
            Bits::Data => (0..u64::from(e.blocks)).for_each(|i| out.set(i)),
            Bits::Mixed(words) => out.words = words.clone(),
        }
        Some(out)
    }

    /// The position in the walk of the data block with this compact index; `None` when out of range.
    #[must_use]
    pub fn walk_of(&self, compact: CompactIndex) -> Option<BlockIndex> {
        let compact = compact.0;
        if compact >= self.data_blocks {
            return None;
        }
        let at = self.entries.partition_point(|e| e.before <= compact) - 1;
        let e = &self.entries[at];
        let mut rank = compact - e.before;
        let start = at as u64 * ENTRY_BLOCKS;
        match &e.bits {
            Bits::Zero => None,
            Bits::Data => Some(BlockIndex(start + rank)),
            Bits::Mixed(words) => {
                for (w, &bits) in words.iter().enumerate() {
                    let ones = u64::from(bits.count_ones());
                    if rank < ones {
                        let mut bits = bits;
                        for _ in 0..rank {
                            bits &= bits - 1;
                        }
                        let bit = w as u64 * 64 + u64::from(bits.trailing_zeros());
                        return Some(BlockIndex(start + bit));
                    }
                    rank -= ones;
                }
                None
            }
        }
    }

    /// The walk blocks of `count` data blocks from compact index `first`, as runs `(block, count)`; `None` when out of
    /// range.
    #[must_use]
    pub fn walk_runs(&self, first: CompactIndex, count: u64) -> Option<Vec<(BlockIndex, u64)>> {
        let mut out: Vec<(BlockIndex, u64)> = Vec::new();
        let mut left = count;
        let mut compact = first;
        while left > 0 {
            let block = self.walk_of(compact)?;
            // The longest run known from one lookup: to the end of a batch that is all data, else one block.
            let e = &self.entries[(block.0 / ENTRY_BLOCKS) as usize];
            let stretch = match e.bits {
                Bits::Data => (u64::from(e.blocks) - block.0 % ENTRY_BLOCKS).min(left),
                _ => 1,
            };
            match out.last_mut() {
                Some((b, n)) if b.0 + *n == block.0 => *n += stretch,
                _ => out.push((block, stretch)),
            }
            compact.0 += stretch;
            left -= stretch;
        }
        Some(out)
    }

    /// Approximate memory use in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let mixed = self
            .entries
            .iter()
            .filter(|e| matches!(e.bits, Bits::Mixed(_)))
            .count();
        self.entries.capacity() * size_of::<Entry>() + mixed * WORDS * 8
    }
}

impl BlockMap {
    /// Encodes it for a map file, uncompressed: the number of blocks, and the runs of each batch.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_varint(&mut out, self.walk_blocks());
        for bits in (0..self.batches()).filter_map(|b| self.batch(b)) {
            let runs = bits.runs();
            put_varint(&mut out, runs.len() as u64);
            runs.iter().for_each(|&r| put_varint(&mut out, r));
        }
        out
    }

    /// Inverse of [`encode`](Self::encode); `None` for invalid input.
    pub(crate) fn decode(mut bytes: &[u8]) -> Option<BlockMap> {
        let mut left = take_varint(&mut bytes).filter(|&n| n <= 1 << 32)?;
        let mut out = BlockMap::default();
        while left > 0 {
            let blocks = left.min(ENTRY_BLOCKS);
            let n = take_varint(&mut bytes).filter(|&n| n <= ENTRY_BLOCKS + 1)?;
            let runs = (0..n)
                .map(|_| take_varint(&mut bytes))
                .collect::<Option<Vec<_>>>()?;
            out.push(&DataBits::from_runs(blocks, &runs)?);
            left -= blocks;
        }
        bytes.is_empty().then_some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bits(blocks: u64, data: &[bool]) -> DataBits {
        let mut b = DataBits::new(blocks);
        (0..blocks)
            .filter(|&i| data[i as usize % data.len()])
            .for_each(|i| b.set(i));
        b
    }

    proptest! {
        #[test]
        fn runs_and_back(blocks in 1u64..=ENTRY_BLOCKS, data in prop::collection::vec(any::<bool>(), 1..200)) {
            let b = bits(blocks, &data);
            prop_assert_eq!(DataBits::from_runs(blocks, &b.runs()), Some(b.clone()));
            prop_assert_eq!(b.iter().count() as u64, b.count());
            prop_assert!(b.iter().enumerate().all(|(n, i)| b.get(i) && b.rank(i) == n as u64));
        }

        #[test]
        fn compact_indices_agree_with_the_plain_list(
            batches in prop::collection::vec(prop::collection::vec(any::<bool>(), 1..70), 1..5),
            last in 1u64..=ENTRY_BLOCKS,
        ) {
            let mut map = BlockMap::default();
            let mut plain = Vec::new();
            for (n, data) in batches.iter().enumerate() {
                let blocks = if n + 1 == batches.len() { last } else { ENTRY_BLOCKS };
                let b = bits(blocks, data);
                plain.extend(b.iter().map(|i| n as u64 * ENTRY_BLOCKS + i));
                map.push(&b);
                prop_assert_eq!(map.batch(n as u64), Some(b));
            }
            prop_assert_eq!(map.data_blocks(), plain.len() as u64);
            for (c, &w) in plain.iter().enumerate().step_by(37) {
                prop_assert_eq!(map.walk_of(CompactIndex(c as u64)), Some(BlockIndex(w)));
            }
            prop_assert_eq!(map.walk_of(CompactIndex(plain.len() as u64)), None);
            let runs = map.walk_runs(CompactIndex(0), plain.len() as u64).unwrap();
            let flat: Vec<u64> = runs.iter().flat_map(|&(b, n)| b.0..b.0 + n).collect();
            prop_assert_eq!(flat, plain);
        }
    }

    #[test]
    fn runs_that_do_not_add_up_are_refused() {
        assert!(DataBits::from_runs(10, &[4, 5]).is_none());
        assert!(DataBits::from_runs(10, &[4, 7]).is_none());
        assert!(DataBits::from_runs(10, &[u64::MAX, 11]).is_none());
        assert!(DataBits::from_runs(ENTRY_BLOCKS + 1, &[ENTRY_BLOCKS + 1]).is_none());
    }
}
