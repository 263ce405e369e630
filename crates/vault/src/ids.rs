//! Sets of blocks of a container in little memory: what a snapshot uses is mostly whole containers, or some runs.

use std::fmt;

use crate::container::{LocalIds, MAX_BLOCKS};

/// A set with more runs than that is a bitmap, which then takes no more: 512 bytes.
const MAX_RUNS: usize = 128;

/// Local ids of a container: the same as [`LocalIds`], in some bytes for each run.
#[derive(Clone, PartialEq, Eq)]
pub struct Ids(Repr);

/// One set has one representation: [`Ids::tidy`] sees to it.
#[derive(Clone, PartialEq, Eq)]
enum Repr {
    /// First and last id of each run, ascending, not adjacent.
    Runs(Vec<(u16, u16)>),
    Bits(Box<LocalIds>),
}

impl Default for Ids {
    fn default() -> Self {
        Ids(Repr::Runs(Vec::new()))
    }
}

impl fmt::Debug for Ids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ids({})", self.count())
    }
}

impl From<&LocalIds> for Ids {
    fn from(bits: &LocalIds) -> Self {
        let mut runs: Vec<(u16, u16)> = bits.runs().take(MAX_RUNS + 1).collect();
        if runs.len() > MAX_RUNS {
            return Ids(Repr::Bits(Box::new(bits.clone())));
        }
        runs.shrink_to_fit();
        Ids(Repr::Runs(runs))
    }
}

impl Ids {
    /// Adds an id, which must be below 4,096.
    pub fn insert(&mut self, id: u16) {
        self.insert_run(id, 1);
    }

    /// Adds `count` ids from `first` on, at least one, all below 4,096.
    pub fn insert_run(&mut self, first: u16, count: u16) {
        let last = first + count - 1;
        let runs = match &mut self.0 {
            Repr::Runs(runs) => runs,
            Repr::Bits(bits) => {
                let is_between = bits.contains(last + 1)
                    && first.checked_sub(1).is_some_and(|id| bits.contains(id));
                bits.fill(first, last);
                // Only then there are fewer runs than before.
                if count > 1 || is_between {
                    self.tidy();
                }
                return;
            }
        };
        // The runs that overlap it, or touch it.
        let from = runs.partition_point(|(_, end)| *end + 1 < first);
        let to = from + runs[from..].partition_point(|(begin, _)| *begin <= last + 1);
        if from < to {
            runs[from] = (runs[from].0.min(first), runs[to - 1].1.max(last));
            runs.drain(from + 1..to);
            return;
        }
        if runs.len() == runs.capacity() {
            // Most have one run, or few.
            runs.reserve_exact(1 + runs.len() / 2);
        }
        runs.insert(from, (first, last));
        self.tidy();
    }

    /// The representation of a set depends on the set only.
    fn tidy(&mut self) {
        let is_long = match &self.0 {
            Repr::Runs(runs) => runs.len() > MAX_RUNS,
            Repr::Bits(bits) => {
                // Cheap, and right: bits that begin a run.
                let mut before = 0;
                let starts = bits.0.iter().map(|word| {
                    let starts = word & !(word << 1 | before);
                    before = word >> 63;
                    starts.count_ones() as usize
                });
                starts.sum::<usize>() > MAX_RUNS
            }
        };
        match (&self.0, is_long) {
            (Repr::Runs(_), true) => self.0 = Repr::Bits(Box::new(self.bits())),
            (Repr::Bits(bits), false) => *self = Ids::from(&**bits),
            _ => {}
        }
    }

    /// The same as a bitmap.
    #[must_use]
    pub fn bits(&self) -> LocalIds {
        match &self.0 {
            Repr::Bits(bits) => (**bits).clone(),
            Repr::Runs(runs) => {
                let mut bits = LocalIds::default();
                for &(first, last) in runs {
                    bits.fill(first, last.min(MAX_BLOCKS as u16 - 1));
                }
                bits
            }
        }
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> u32 {
        match &self.0 {
            Repr::Bits(bits) => bits.count(),
            Repr::Runs(runs) => runs.iter().map(|(a, b)| u32::from(b - a) + 1).sum(),
        }
    }

    /// Adds those of `other`.
    pub fn union(&mut self, other: &Ids) {
        if *self != *other {
            let mut bits = self.bits();
            bits.union(&other.bits());
            *self = Ids::from(&bits);
        }
    }

    /// Takes away those of `other`.
    pub fn remove(&mut self, other: &Ids) {
        *self = Ids::from(&self.bits().without(&other.bits()));
    }

    /// Whether all of them are in `other`.
    #[must_use]
    pub fn are_in(&self, other: &LocalIds) -> bool {
        self.bits().without(other).count() == 0
    }

    /// Bytes of memory it takes.
    #[must_use]
    pub fn memory(&self) -> usize {
        size_of::<Self>()
            + match &self.0 {
                Repr::Runs(runs) => runs.capacity() * size_of::<(u16, u16)>(),
                Repr::Bits(_) => size_of::<LocalIds>(),
            }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    fn of(ids: impl IntoIterator<Item = u16>) -> Ids {
        let mut out = Ids::default();
        ids.into_iter().for_each(|id| out.insert(id));
        out
    }

    #[test]
    fn a_whole_container_takes_little() {
        let whole = of(0..MAX_BLOCKS as u16);
        assert_eq!(whole.count() as usize, MAX_BLOCKS);
        assert!(whole.memory() <= 64, "{}", whole.memory());
        // 17 blocks a run, as recipes have.
        let usual = of((0..MAX_BLOCKS as u16).filter(|id| id % 18 != 0).take(1200));
        assert!(usual.memory() <= 512, "{}", usual.memory());
        // The worst: every other one.
        let worst = of((0..MAX_BLOCKS as u16).step_by(2));
        assert!(worst.memory() <= 600, "{}", worst.memory());
        assert_eq!(worst.bits().count() as usize, MAX_BLOCKS / 2);
    }

    proptest! {
        #[test]
        fn as_a_set(
            runs in proptest::collection::vec((0u16..4096, 1u16..40), 0..200),
            other in proptest::collection::vec((0u16..4096, 1u16..400), 0..40),
        ) {
            let list = |runs: &[(u16, u16)]| -> Vec<u16> {
                runs.iter().flat_map(|&(at, n)| at..(at + n).min(4096)).collect()
            };
            let (a, b) = (list(&runs), list(&other));
            let (x, y) = (of(a.clone()), of(b.clone()));
            let mut by_runs = Ids::default();
            runs.iter().for_each(|&(at, n)| by_runs.insert_run(at, n.min(4096 - at)));
            prop_assert_eq!(&by_runs, &x);
            let model: BTreeSet<u16> = a.iter().copied().collect();
            prop_assert_eq!(x.bits().iter().collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(x.count() as usize, model.len());
            // However it came to be, a set is equal to itself.
            prop_assert_eq!(&of(model.iter().copied()), &x);
            prop_assert_eq!(&Ids::from(&x.bits()), &x);
            let mut both = x.clone();
            both.union(&y);
            let union: BTreeSet<u16> = a.iter().chain(&b).copied().collect();
            prop_assert_eq!(both.bits().iter().collect::<Vec<_>>(), union.into_iter().collect::<Vec<_>>());
            let mut rest = x.clone();
            rest.remove(&y);
            let without: BTreeSet<u16> = model.iter().copied().filter(|id| !b.contains(id)).collect();
            prop_assert_eq!(&rest, &of(without));
            prop_assert_eq!(x.are_in(&y.bits()), a.iter().all(|id| b.contains(id)));
            prop_assert!(both.memory() <= 640);
        }
    }
}
