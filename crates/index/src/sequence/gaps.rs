//! Free slots inside segments, found by size (teleportation §2.15).

use std::collections::{BTreeMap, BTreeSet};

use crate::page::PER_PAGE;

/// Maximum number of gaps tracked; dropped ones are found again when the index is next opened.
const LIMIT: usize = 1 << 17;

/// One list of gaps per size. Adjacent free slots inside a segment form one gap.
pub(crate) struct Gaps {
    by_slot: BTreeMap<u64, u16>,
    by_size: Vec<BTreeSet<u64>>,
}

impl Default for Gaps {
    fn default() -> Self {
        Gaps {
            by_slot: BTreeMap::new(),
            by_size: (0..=PER_PAGE).map(|_| BTreeSet::new()).collect(),
        }
    }
}

impl Gaps {
    /// Adds a gap that lies inside one segment and does not overlap another gap.
    pub(crate) fn add(&mut self, slot: u64, size: usize) {
        let segment = slot / PER_PAGE as u64;
        let (mut from, mut to) = (slot, slot + size as u64);
        debug_assert!(size > 0 && (to - 1) / PER_PAGE as u64 == segment);
        if let Some((&s, &n)) = self.by_slot.range(..from).next_back()
            && s + u64::from(n) == from
            && s / PER_PAGE as u64 == segment
        {
            self.drop_gap(s, n);
            from = s;
        }
        if let Some(&n) = self.by_slot.get(&to)
            && to / PER_PAGE as u64 == segment
        {
            self.drop_gap(to, n);
            to += u64::from(n);
        }
        if self.by_slot.len() < LIMIT {
            let size = (to - from) as u16;
            self.by_slot.insert(from, size);
            self.by_size[usize::from(size)].insert(from);
        }
    }

    fn drop_gap(&mut self, slot: u64, size: u16) {
        self.by_slot.remove(&slot);
        self.by_size[usize::from(size)].remove(&slot);
    }

    /// Takes a gap of exactly this size.
    pub(crate) fn take_exact(&mut self, size: usize) -> Option<u64> {
        let slot = self.by_size[size].pop_first()?;
        self.by_slot.remove(&slot);
        Some(slot)
    }

    /// Takes the beginning of the smallest gap that is large enough.
    pub(crate) fn take_best(&mut self, size: usize) -> Option<u64> {
        let fits = (size..=PER_PAGE).find(|&n| !self.by_size[n].is_empty())?;
        let slot = self.take_exact(fits)?;
        if fits > size {
            self.add(slot + size as u64, fits - size);
        }
        Some(slot)
    }

    /// Removes the gaps of a segment.
    pub(crate) fn remove_segment(&mut self, segment: u32) {
        let from = u64::from(segment) * PER_PAGE as u64;
        let inside: Vec<(u64, u16)> = self
            .by_slot
            .range(from..from + PER_PAGE as u64)
            .map(|(&s, &n)| (s, n))
            .collect();
        for (s, n) in inside {
            self.drop_gap(s, n);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_slot.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compared with a plain array of free slots.
        #[test]
        fn no_slot_is_given_twice_and_none_is_lost(ops in proptest::collection::vec((0u8..4, 1usize..=PER_PAGE, any::<u32>()), 0..300)) {
            const SEGMENTS: usize = 4;
            let mut gaps = Gaps::default();
            let mut free = vec![false; SEGMENTS * PER_PAGE];
            for (what, size, pick) in ops {
                match what {
                    0 | 1 => {
                        // Free a run of allocated slots inside a segment.
                        let from = pick as usize % free.len();
                        let end = (from / PER_PAGE + 1) * PER_PAGE;
                        let n = free[from..end.min(from + size)].iter().take_while(|f| !**f).count();
                        if n > 0 {
                            free[from..from + n].fill(true);
                            gaps.add(from as u64, n);
                        }
                    }
                    2 => {
                        let longest = longest_run(&free);
                        match gaps.take_best(size) {
                            Some(s) => {
                                let r = s as usize..s as usize + size;
                                prop_assert!(free[r.clone()].iter().all(|f| *f));
                                prop_assert_eq!(r.start / PER_PAGE, (r.end - 1) / PER_PAGE);
                                free[r].fill(false);
                            }
                            None => prop_assert!(longest < size),
                        }
                    }
                    _ => {
                        let segment = pick as usize % SEGMENTS;
                        gaps.remove_segment(segment as u32);
                        free[segment * PER_PAGE..(segment + 1) * PER_PAGE].fill(false);
                    }
                }
                let total: usize = gaps.by_slot.values().map(|n| usize::from(*n)).sum();
                prop_assert_eq!(total, free.iter().filter(|f| **f).count());
                prop_assert_eq!(gaps.by_size.iter().map(BTreeSet::len).sum::<usize>(), gaps.len());
            }
        }
    }

    fn longest_run(free: &[bool]) -> usize {
        free.chunks(PER_PAGE)
            .flat_map(|segment| segment.split(|f| !f).map(<[bool]>::len))
            .max()
            .unwrap_or(0)
    }
}
