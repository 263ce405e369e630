//! Which pages were written: since the program's mark, and since the last push.

use std::ops::Range;

/// Dirty state, one bit per page in each set.
///
/// The kernel keeps one bit per page, which a scan clears: so a scan adds to both sets, and each reader clears its own.
pub(super) struct Dirty {
    /// Written since the mark.
    pub(super) marked: Bits,
    /// Written, and not yet part of a push.
    pub(super) unpushed: Bits,
    /// Being pushed. Neither these nor unpushed pages may be evicted.
    pub(super) pushing: Bits,
}

impl Dirty {
    pub(super) fn new(pages: usize) -> Self {
        Self {
            marked: Bits::new(pages),
            unpushed: Bits::new(pages),
            pushing: Bits::new(pages),
        }
    }

    /// Moves all unpushed pages to the pushing set, and returns them as runs.
    pub(super) fn begin_push(&mut self) -> Vec<Range<usize>> {
        let runs = self.unpushed.runs();
        for run in &runs {
            self.unpushed.clear(run.clone());
            self.pushing.set(run.clone());
        }
        runs
    }

    pub(super) fn is_clean(&self, mut pages: Range<usize>) -> bool {
        !pages.any(|page| self.unpushed.has(page) || self.pushing.has(page))
    }
}

/// A set of pages.
pub(super) struct Bits(Vec<u64>);

impl Bits {
    fn new(count: usize) -> Self {
        Self(vec![0; count.div_ceil(64)])
    }

    pub(super) fn has(&self, page: usize) -> bool {
        self.0[page / 64] >> (page % 64) & 1 != 0
    }

    pub(super) fn set(&mut self, pages: Range<usize>) {
        each_word(pages, |word, mask| self.0[word] |= mask);
    }

    pub(super) fn clear(&mut self, pages: Range<usize>) {
        each_word(pages, |word, mask| self.0[word] &= !mask);
    }

    /// The pages in the set, as runs.
    pub(super) fn runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (index, word) in self.0.iter().enumerate() {
            let mut rest = *word;
            while rest != 0 {
                let first = rest.trailing_zeros() as usize;
                let length = (rest >> first).trailing_ones() as usize;
                let start = index * 64 + first;
                match runs.last_mut() {
                    Some(last) if last.end == start => last.end += length,
                    _ => runs.push(start..start + length),
                }
                rest &= match first + length {
                    64 => 0,
                    end => u64::MAX << end,
                };
            }
        }
        runs
    }
}

fn each_word(bits: Range<usize>, mut what: impl FnMut(usize, u64)) {
    let mut at = bits.start;
    while at < bits.end {
        let end = (at / 64 * 64 + 64).min(bits.end);
        let mask = u64::MAX >> (64 - (end - at)) << (at % 64);
        what(at / 64, mask);
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_what_was_set() {
        let mut random = fastrand::Rng::with_seed(7);
        for round in 0..200 {
            let mut bits = Bits::new(300);
            let mut model = vec![false; 300];
            for _ in 0..random.usize(0..20) {
                let start = random.usize(0..300);
                let end = random.usize(start..=300);
                let set = random.bool();
                model[start..end].fill(set);
                match set {
                    true => bits.set(start..end),
                    false => bits.clear(start..end),
                }
            }
            let mut back = vec![false; 300];
            let runs = bits.runs();
            for run in &runs {
                back[run.clone()].fill(true);
            }
            assert_eq!(back, model, "round {round}");
            let apart = runs.windows(2).all(|pair| pair[0].end < pair[1].start);
            assert!(apart, "round {round}: {runs:?}");
            assert!((0..300).all(|page| bits.has(page) == model[page]));
        }
    }

    #[test]
    fn what_is_pushed_is_not_clean_until_it_is_there() {
        let mut dirty = Dirty::new(100);
        dirty.unpushed.set(3..5);
        assert_eq!(dirty.begin_push(), vec![3..5]);
        assert_eq!(dirty.begin_push(), Vec::new());
        assert!(!dirty.is_clean(4..6));
        assert!(dirty.is_clean(5..100));
        dirty.pushing.clear(3..5);
        assert!(dirty.is_clean(0..100));
    }
}
