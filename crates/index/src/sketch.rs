//! A sketch of a set: a few of its members, chosen by their values alone, from which the similarity of two sets is estimated
//! (a bottom-k sketch, a kind of min-hash).

use drover_core::Digest;

/// Members that a sketch of an image's blocks keeps.
pub const BLOCK_SKETCH: usize = 256;

/// The smallest distinct values of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sketch {
    /// How many it keeps.
    size: usize,
    /// At most `size` of them, ascending.
    smallest: Vec<u64>,
}

impl Sketch {
    /// The sketch of the empty set, which keeps `size` values, at least 2.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Sketch {
            size: size.max(2),
            smallest: Vec::new(),
        }
    }

    /// The sketch with these values; `None` when they are too many, or not ascending.
    #[must_use]
    pub fn of_values(size: usize, values: Vec<u64>) -> Option<Self> {
        let sound = values.len() <= size && values.windows(2).all(|w| w[0] < w[1]);
        sound.then_some(Sketch {
            size: size.max(2),
            smallest: values,
        })
    }

    /// Its values, ascending.
    #[must_use]
    pub fn values(&self) -> &[u64] {
        &self.smallest
    }

    /// Adds a member by a value that is as good as random.
    pub fn add(&mut self, value: u64) {
        let full = self.smallest.len() >= self.size;
        if full && self.smallest.last().is_some_and(|last| value >= *last) {
            return;
        }
        if let Err(at) = self.smallest.binary_search(&value) {
            if full {
                self.smallest.pop();
            }
            self.smallest.insert(at, value);
        }
    }

    /// Adds blocks by their digests, of which the first eight bytes count.
    pub fn add_blocks(&mut self, digests: &[Digest]) {
        for digest in digests {
            let first = digest.0.first_chunk().copied().unwrap_or_default();
            self.add(u64::from_le_bytes(first));
        }
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.smallest.is_empty()
    }

    /// About how many members the set has; exactly, if the sketch has them all.
    #[must_use]
    pub fn members(&self) -> f64 {
        match self.smallest.last() {
            Some(last) if self.smallest.len() >= self.size => {
                (self.size - 1) as f64 / ((*last as f64 + 1.0) / 2f64.powi(64))
            }
            _ => self.smallest.len() as f64,
        }
    }

    /// The members of this sketch and of the other among the smallest of both sets: those in both, and all.
    fn common(&self, other: &Sketch) -> (usize, Sketch) {
        let size = self.size.min(other.size);
        let mut both = 0;
        let mut union = Vec::with_capacity(size);
        let (mut a, mut b) = (
            self.smallest.iter().peekable(),
            other.smallest.iter().peekable(),
        );
        while union.len() < size {
            let next = match (a.peek(), b.peek()) {
                (Some(x), Some(y)) => **x.min(y),
                (Some(x), None) | (None, Some(x)) => **x,
                (None, None) => break,
            };
            let in_a = a.next_if(|x| **x == next).is_some();
            let in_b = b.next_if(|y| **y == next).is_some();
            both += usize::from(in_a && in_b);
            union.push(next);
        }
        let union = Sketch {
            size,
            smallest: union,
        };
        (both, union)
    }

    /// Estimates the similarity of the two sets: the members in both by the members in either (Jaccard). With sketches of k
    /// values, the standard deviation is at most 0.5 / √k.
    #[must_use]
    pub fn similarity(&self, other: &Sketch) -> f64 {
        let (both, union) = self.common(other);
        match union.smallest.len() {
            0 => 0.0,
            all => both as f64 / all as f64,
        }
    }

    /// Estimates which part of this set the other one has.
    #[must_use]
    pub fn part_in(&self, other: &Sketch) -> f64 {
        let (_, union) = self.common(other);
        let members = self.members();
        match members > 0.0 {
            true => (self.similarity(other) * union.members() / members).min(1.0),
            false => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::digest_block;

    fn digest(n: u64) -> Digest {
        let mut block = [0u8; 4096];
        block[..8].copy_from_slice(&n.to_le_bytes());
        digest_block(&block)
    }

    fn sketch(size: usize, members: impl Iterator<Item = u64>) -> Sketch {
        let digests: Vec<Digest> = members.map(digest).collect();
        let mut sketch = Sketch::new(size);
        sketch.add_blocks(&digests);
        sketch
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// Against the exact similarity; five standard deviations, so that no run fails by chance.
        #[test]
        fn estimates_are_near_the_exact_similarity(
            only_a in 0u64..1500, both in 0u64..1500, only_b in 0u64..1500, first in any::<u32>(),
        ) {
            let first = u64::from(first) << 20;
            let (b_from, b_to) = (first + only_a, first + only_a + both + only_b);
            let a = sketch(BLOCK_SKETCH, first..first + only_a + both);
            let b = sketch(BLOCK_SKETCH, b_from..b_to);
            let all = (only_a + both + only_b) as f64;
            let exact = if all > 0.0 { both as f64 / all } else { 0.0 };
            let deviation = (exact * (1.0 - exact) / BLOCK_SKETCH as f64).sqrt();
            let estimate = a.similarity(&b);
            prop_assert!((estimate - exact).abs() <= 5.0 * deviation + 0.02, "{estimate} for {exact}");
            prop_assert_eq!(estimate, b.similarity(&a));
            prop_assert_eq!(a.similarity(&a), if a.is_empty() { 0.0 } else { 1.0 });
            let members = (only_a + both) as f64;
            prop_assert!((a.members() - members).abs() <= 0.35 * members, "{} for {members}", a.members());
            if members > 0.0 {
                let (part, exact) = (a.part_in(&b), both as f64 / members);
                prop_assert!((part - exact).abs() <= 0.35, "{part} for {exact}");
            }
        }

        /// The order and repetitions do not count, and values and back are the same.
        #[test]
        fn a_sketch_is_of_a_set(mut members in prop::collection::vec(0u64..3000, 0..2000)) {
            let once = sketch(64, members.iter().copied());
            members.reverse();
            members.extend(members.clone());
            prop_assert_eq!(&once, &sketch(64, members.iter().copied()));
            prop_assert_eq!(Sketch::of_values(64, once.values().to_vec()), Some(once));
        }
    }

    #[test]
    fn small_sets_are_exact_and_wrong_values_are_refused() {
        let (a, b) = (sketch(256, 0..100), sketch(256, 50..200));
        assert_eq!(a.members(), 100.0);
        assert_eq!(a.similarity(&b), 0.25);
        assert_eq!(a.part_in(&b), 0.5);
        assert_eq!(Sketch::of_values(2, vec![1, 1]), None);
        assert_eq!(Sketch::of_values(2, vec![1, 2, 3]), None);
    }
}
