//! A bitmap of the slots of a page.

/// Digests per page: as many as fit beside a checksum.
pub(crate) const PER_PAGE: usize = 340;

const WORDS: usize = PER_PAGE.div_ceil(64);

/// A bit per slot of a page. Bits beyond the last slot are never set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Bits([u64; WORDS]);

impl Bits {
    /// Size on disk in bytes.
    pub(crate) const BYTES: usize = WORDS * 8;

    /// Sets the bits of slots `from..to`.
    pub(crate) fn range(from: usize, to: usize) -> Self {
        debug_assert!(to <= PER_PAGE);
        let mut bits = Bits::default();
        for (i, word) in bits.0.iter_mut().enumerate() {
            let low = |end: usize| {
                let n = end.saturating_sub(i * 64) as u32;
                1u64.checked_shl(n).map_or(u64::MAX, |b| b - 1)
            };
            *word = low(to) & !low(from);
        }
        bits
    }

    #[inline]
    pub(crate) fn get(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }

    pub(crate) fn set(&mut self, i: usize) {
        debug_assert!(i < PER_PAGE);
        self.0[i / 64] |= 1 << (i % 64);
    }

    /// Clears the bits of slots `from..to`.
    pub(crate) fn clear(&mut self, from: usize, to: usize) {
        let gone = Bits::range(from, to);
        self.0.iter_mut().zip(gone.0).for_each(|(a, b)| *a &= !b);
    }

    /// The union of both.
    pub(crate) fn or(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a |= b);
        self
    }

    /// Whether it includes all bits of `other`.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).all(|(a, b)| b & !a == 0)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    pub(crate) fn count(&self) -> u32 {
        self.0.iter().map(|w| w.count_ones()).sum()
    }

    /// The first slot at or after `at` whose bit is `what`, or the end.
    pub(crate) fn next(&self, at: usize, what: bool) -> usize {
        let mut i = at;
        while i < PER_PAGE {
            let word = self.0[i / 64] ^ if what { 0 } else { u64::MAX };
            match word >> (i % 64) {
                0 => i = (i / 64 + 1) * 64,
                rest => return (i + rest.trailing_zeros() as usize).min(PER_PAGE),
            }
        }
        PER_PAGE
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(self.0) {
            *to = word.to_le_bytes();
        }
        bytes
    }

    /// `None` when there are bits beyond the last slot.
    pub(crate) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut bits = Bits::default();
        for (word, from) in bits.0.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*from);
        }
        Bits::range(0, PER_PAGE).covers(&bits).then_some(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compared with a plain table.
        #[test]
        fn bits_are_those_of_a_plain_table(
            set in proptest::collection::vec(0..PER_PAGE, 0..60),
            from in 0..=PER_PAGE,
            n in 0..=PER_PAGE,
        ) {
            let to = (from + n).min(PER_PAGE);
            let mut bits = Bits::default();
            let mut plain = vec![false; PER_PAGE];
            for i in set {
                bits.set(i);
                plain[i] = true;
            }
            let more = bits.or(Bits::range(from, to));
            prop_assert!(more.covers(&bits));
            prop_assert_eq!(bits.covers(&more), plain[from..to].iter().all(|b| *b));
            prop_assert_eq!(Bits::from_bytes(&bits.to_bytes()), Some(bits));
            let check = |bits: &Bits, plain: &[bool]| {
                (0..PER_PAGE).all(|i| {
                    let next = |what| plain[i..].iter().position(|b| *b == what);
                    bits.get(i) == plain[i]
                        && [true, false].iter().all(|&w| bits.next(i, w) == next(w).map_or(PER_PAGE, |n| i + n))
                })
            };
            prop_assert!(check(&bits, &plain));
            prop_assert_eq!(bits.count() as usize, plain.iter().filter(|b| **b).count());
            bits.clear(from, to);
            plain[from..to].fill(false);
            prop_assert!(check(&bits, &plain));
            prop_assert_eq!(bits.is_empty(), !plain.contains(&true));
        }
    }

    #[test]
    fn bits_beyond_the_last_slot_are_refused() {
        let mut bytes = Bits::range(0, PER_PAGE).to_bytes();
        assert!(Bits::from_bytes(&bytes).is_some());
        bytes[PER_PAGE / 8] |= 1 << (PER_PAGE % 8);
        assert_eq!(Bits::from_bytes(&bytes), None);
    }
}
