//! A bitmap of zero blocks in a form that compresses well (teleportation §2.2).

/// A bit per block of a batch: set when the block is all zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ZeroMap {
    words: Vec<u64>,
    len: usize,
}

/// The bytes are not a zero map of the expected length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ZeroMapError {
    /// The bytes are truncated, have trailing data or contain an invalid number.
    #[error("a zero map is malformed")]
    Malformed,
    /// More blocks than the reader allows.
    #[error("a zero map of {len} blocks is longer than the {max} allowed")]
    TooLong {
        /// Number of blocks that the map claims.
        len: u64,
        /// Maximum number of blocks.
        max: usize,
    },
}

const RAW: u8 = 0;
const RUNS: u8 = 1;

impl ZeroMap {
    /// Number of blocks in the map.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the map has no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a block.
    pub fn push(&mut self, zero: bool) {
        if self.len.is_multiple_of(64) {
            self.words.push(0);
        }
        self.words[self.len / 64] |= u64::from(zero) << (self.len % 64);
        self.len += 1;
    }

    /// Appends `count` blocks of the same kind.
    pub fn push_run(&mut self, zero: bool, count: usize) {
        let end = self.len + count;
        self.words.resize(end.div_ceil(64), 0);
        if zero {
            for i in self.len..end {
                self.words[i / 64] |= 1 << (i % 64);
            }
        }
        self.len = end;
    }

    /// Whether block `i` is zero; `false` beyond the end.
    #[must_use]
    pub fn get(&self, i: usize) -> bool {
        i < self.len && self.words[i / 64] >> (i % 64) & 1 == 1
    }

    /// Number of zero blocks.
    #[must_use]
    pub fn count_zero(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// Every block in order.
    pub fn iter(&self) -> impl Iterator<Item = bool> + '_ {
        (0..self.len).map(|i| self.get(i))
    }

    /// The blocks as maximal runs `(zero, count)`.
    pub fn runs(&self) -> impl Iterator<Item = (bool, usize)> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            if at >= self.len {
                return None;
            }
            let (zero, from) = (self.get(at), at);
            at = self.next_unlike(at, zero);
            Some((zero, at - from))
        })
    }

    /// The first block at or after `at` that is not `zero`.
    fn next_unlike(&self, mut at: usize, zero: bool) -> usize {
        while at < self.len {
            let word = self.words[at / 64];
            let unlike = (if zero { !word } else { word }) >> (at % 64);
            if unlike != 0 {
                return (at + unlike.trailing_zeros() as usize).min(self.len);
            }
            at = (at / 64 + 1) * 64;
        }
        self.len
    }

    /// Encodes the map as run lengths or plain bits, whichever is shorter.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut runs = vec![RUNS];
        put_varint(&mut runs, self.len as u64);
        let raw_len = self.len.div_ceil(8);
        // Runs alternate and begin with a nonzero one, so only lengths are written.
        let mut expect = false;
        for (zero, count) in self.runs() {
            if zero != expect {
                runs.push(0);
            }
            put_varint(&mut runs, count as u64);
            expect = !zero;
            if runs.len() > raw_len + 10 {
                break;
            }
        }
        let mut raw = vec![RAW];
        put_varint(&mut raw, self.len as u64);
        if runs.len() < raw.len() + raw_len {
            return runs;
        }
        raw.extend(
            self.words
                .iter()
                .flat_map(|w| w.to_le_bytes())
                .take(raw_len),
        );
        raw
    }

    /// Decodes the output of [`to_bytes`](Self::to_bytes), of at most `max` blocks.
    ///
    /// # Errors
    /// [`ZeroMapError`]; nothing is allocated for a map that is too long.
    pub fn from_bytes(bytes: &[u8], max: usize) -> Result<Self, ZeroMapError> {
        let (&kind, mut rest) = bytes.split_first().ok_or(ZeroMapError::Malformed)?;
        let len = take_varint(&mut rest)?;
        if len > max as u64 {
            return Err(ZeroMapError::TooLong { len, max });
        }
        let len = len as usize;
        let mut map = ZeroMap::default();
        match kind {
            RAW => {
                if rest.len() != len.div_ceil(8) {
                    return Err(ZeroMapError::Malformed);
                }
                map.words = rest
                    .chunks(8)
                    .map(|c| {
                        let mut w = [0u8; 8];
                        w[..c.len()].copy_from_slice(c);
                        u64::from_le_bytes(w)
                    })
                    .collect();
                map.len = len;
                let padding_set = !len.is_multiple_of(64)
                    && map.words.last().is_some_and(|w| w >> (len % 64) != 0);
                if padding_set {
                    return Err(ZeroMapError::Malformed);
                }
            }
            RUNS => {
                let mut zero = false;
                while map.len < len {
                    let count = take_varint(&mut rest)?;
                    // Only the very first run may be empty, else a map could consist of empty runs.
                    let left = (len - map.len) as u64;
                    if count > left || (count == 0 && (zero || map.len > 0)) {
                        return Err(ZeroMapError::Malformed);
                    }
                    map.push_run(zero, count as usize);
                    zero = !zero;
                }
                if !rest.is_empty() {
                    return Err(ZeroMapError::Malformed);
                }
            }
            _ => return Err(ZeroMapError::Malformed),
        }
        Ok(map)
    }
}

impl FromIterator<bool> for ZeroMap {
    fn from_iter<I: IntoIterator<Item = bool>>(iter: I) -> Self {
        let mut map = ZeroMap::default();
        iter.into_iter().for_each(|z| map.push(z));
        map
    }
}

fn put_varint(out: &mut Vec<u8>, mut v: u64) {
    while v >= 0x80 {
        out.push(v as u8 | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Result<u64, ZeroMapError> {
    let mut v = 0u64;
    for shift in (0..63).step_by(7) {
        let (&b, rest) = bytes.split_first().ok_or(ZeroMapError::Malformed)?;
        *bytes = rest;
        v |= u64::from(b & 0x7f) << shift;
        if b & 0x80 == 0 {
            return Ok(v);
        }
    }
    Err(ZeroMapError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_and_bytes_agree_with_plain_bools(runs in proptest::collection::vec((any::<bool>(), 0usize..200), 0..20)) {
            let plain: Vec<bool> = runs.iter().flat_map(|&(z, n)| vec![z; n]).collect();
            let mut map = ZeroMap::default();
            runs.iter().for_each(|&(z, n)| map.push_run(z, n));
            prop_assert_eq!(&map, &plain.iter().copied().collect::<ZeroMap>());
            prop_assert_eq!(map.count_zero(), plain.iter().filter(|z| **z).count());
            prop_assert_eq!(map.runs().flat_map(|(z, n)| vec![z; n]).collect::<Vec<_>>(), plain);
            let bytes = map.to_bytes();
            prop_assert!(bytes.len() <= map.len().div_ceil(8) + 11);
            prop_assert_eq!(ZeroMap::from_bytes(&bytes, map.len()), Ok(map.clone()));
            if !map.is_empty() {
                prop_assert!(ZeroMap::from_bytes(&bytes, map.len() - 1).is_err());
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(map) = ZeroMap::from_bytes(&bytes, 4096) {
                prop_assert!(map.len() <= 4096);
                prop_assert_eq!(ZeroMap::from_bytes(&map.to_bytes(), 4096), Ok(map));
            }
        }
    }

    #[test]
    fn a_gigabyte_of_zeros_is_a_few_bytes() {
        let mut map = ZeroMap::default();
        map.push_run(true, 262_144);
        assert!(map.to_bytes().len() <= 8);
        let random: ZeroMap = (0..4096u32)
            .map(|i| i.wrapping_mul(0x9e37_79b9) >> 31 == 1)
            .collect();
        assert!(random.to_bytes().len() <= 4096 / 8 + 3);
    }
}
