//! The block map in memory: two bits per block, in pages allocated only where some block differs from the base.

use std::collections::BTreeMap;
use std::ops::Range;

use drover_storage::chunk_log::Record;

/// Blocks per page: 64 MiB of the device.
const PAGE: u64 = 16_384;
const PER_WORD: u64 = 32;

/// Where a block is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum BlockState {
    /// In the base.
    Base = 0,
    /// In the overlay's data.
    Here = 1,
    /// Nowhere: zeros.
    Zero = 2,
}

impl BlockState {
    fn of(bits: u64) -> Self {
        match bits & 3 {
            1 => Self::Here,
            2 => Self::Zero,
            _ => Self::Base,
        }
    }

    /// The state with that number, other than `Base`.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Here, Self::Zero]
            .into_iter()
            .find(|state| *state as u8 == number)
    }
}

/// A run of blocks in one state.
pub(super) type Run = (Range<u64>, BlockState);

/// The states of all blocks, and which of them have changed since they were last taken.
#[derive(Default)]
pub(super) struct States {
    /// A missing page means the base.
    pages: BTreeMap<u64, Page>,
    /// Changed blocks: run ends by run start. Grows with unflushed changes.
    changed: BTreeMap<u64, u64>,
    /// Blocks that differ from the base.
    count: u64,
}

enum Page {
    /// Every block.
    All(BlockState),
    Each(Box<[u64; (PAGE / PER_WORD) as usize]>),
}

impl Page {
    fn get(&self, within: u64) -> BlockState {
        match self {
            Self::All(state) => *state,
            Self::Each(words) => {
                BlockState::of(words[(within / PER_WORD) as usize] >> (within % PER_WORD * 2))
            }
        }
    }

    fn set(&mut self, within: u64, state: BlockState) {
        if let Self::All(all) = self {
            let word = u64::MAX / 3 * (*all as u64);
            *self = Self::Each(Box::new([word; (PAGE / PER_WORD) as usize]));
        }
        if let Self::Each(words) = self {
            let shift = within % PER_WORD * 2;
            let word = &mut words[(within / PER_WORD) as usize];
            *word = *word & !(3 << shift) | (state as u64) << shift;
        }
    }

    /// End of the run that contains `within`.
    fn run_end(&self, within: u64) -> u64 {
        let Self::Each(words) = self else {
            return PAGE;
        };
        let state = self.get(within) as u64;
        let mut at = within;
        while at < PAGE {
            // A bit wherever a block's state differs.
            let differ = words[(at / PER_WORD) as usize] ^ (u64::MAX / 3 * state);
            let left = differ >> (at % PER_WORD * 2);
            if left != 0 {
                return at + u64::from(left.trailing_zeros() / 2);
            }
            at = (at / PER_WORD + 1) * PER_WORD;
        }
        PAGE
    }
}

impl States {
    /// Blocks that differ from the base.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The state of a block.
    pub fn get(&self, block: u64) -> BlockState {
        let page = self.pages.get(&(block / PAGE));
        page.map_or(BlockState::Base, |page| page.get(block % PAGE))
    }

    /// End of the run that contains `block`, at most `end`.
    fn run_end(&self, block: u64, end: u64) -> u64 {
        let state = self.get(block);
        let mut at = block;
        while at < end && self.get(at) == state {
            let start = at / PAGE * PAGE;
            at = match self.pages.get(&(at / PAGE)) {
                Some(page) => start + page.run_end(at - start),
                // Up to the next existing page.
                None => match self.pages.range(at / PAGE..).next() {
                    Some((next, _)) => next * PAGE,
                    None => end,
                },
            };
        }
        at.min(end)
    }

    /// The runs of a range, in order; adjacent runs differ in state.
    pub fn runs(&self, blocks: Range<u64>) -> impl Iterator<Item = Run> + '_ {
        let mut at = blocks.start;
        std::iter::from_fn(move || {
            if at >= blocks.end {
                return None;
            }
            let start = at;
            at = self.run_end(at, blocks.end);
            Some((start..at, self.get(start)))
        })
    }

    /// Sets states as read from disk, without marking them changed.
    pub fn load(&mut self, blocks: Range<u64>, state: BlockState) {
        let mut at = blocks.start;
        while at < blocks.end {
            let number = at / PAGE;
            let end = blocks.end.min((number + 1) * PAGE);
            let there = self.runs(at..end).filter(|run| run.1 != BlockState::Base);
            self.count -= there.map(|run| run.0.end - run.0.start).sum::<u64>();
            if state != BlockState::Base {
                self.count += end - at;
            }
            if end - at == PAGE {
                self.pages.insert(number, Page::All(state));
            } else {
                let page = self
                    .pages
                    .entry(number)
                    .or_insert(Page::All(BlockState::Base));
                if !matches!(page, Page::All(all) if *all == state) {
                    (at..end).for_each(|block| page.set(block % PAGE, state));
                }
            }
            at = end;
        }
    }

    /// Sets states and marks them changed.
    pub fn set(&mut self, blocks: Range<u64>, state: BlockState) {
        let news: Vec<_> = self
            .runs(blocks)
            .filter(|run| run.1 != state)
            .map(|run| run.0)
            .collect();
        for run in news {
            self.load(run.clone(), state);
            self.mark(run);
        }
    }

    /// Marks a run changed.
    pub fn mark(&mut self, run: Range<u64>) {
        let (mut start, mut end) = (run.start, run.end);
        while let Some((&from, &to)) = self.changed.range(..=end).next_back()
            && to >= start
        {
            self.changed.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.changed.insert(start, end);
    }

    /// Takes the changed runs, with their current states.
    pub fn take_changed(&mut self) -> Vec<Record> {
        let changed = std::mem::take(&mut self.changed);
        let mut records = Vec::new();
        for (start, end) in changed {
            records.extend(self.runs(start..end).flat_map(records_of));
        }
        records
    }

    /// Everything that differs from the base.
    pub fn snapshot(&self) -> impl Iterator<Item = Record> + '_ {
        let end = |page: u64| (page + 1) * PAGE;
        self.pages
            .keys()
            .flat_map(move |page| self.runs(page * PAGE..end(*page)))
            .filter(|run| run.1 != BlockState::Base)
            .flat_map(records_of)
    }
}

/// Splits a run into records of the largest possible count.
fn records_of((blocks, state): Run) -> impl Iterator<Item = Record> {
    const MAX_COUNT: u64 = u32::MAX as u64;
    (blocks.start..blocks.end)
        .step_by(MAX_COUNT as usize)
        .map(move |first| Record {
            first,
            count: (blocks.end - first).min(MAX_COUNT) as u32,
            state: state as u8,
            mask: 0,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_like_a_vector_of_states() {
        for seed in 0..8 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let blocks = PAGE * 3 + 100;
            let mut states = States::default();
            let mut model = vec![BlockState::Base; blocks as usize];
            let mut logged = model.clone();
            for _ in 0..60 {
                let start = match rng.bool() {
                    true => rng.u64(0..=blocks),
                    false => rng.u64(0..=3) * PAGE,
                };
                let most = [3, 100, PAGE, blocks][rng.usize(0..4)];
                let end = (start + rng.u64(0..=most)).min(blocks);
                let state = [BlockState::Base, BlockState::Here, BlockState::Zero][rng.usize(0..3)];
                states.set(start..end, state);
                model[start as usize..end as usize].fill(state);
                if rng.u8(0..5) == 0 {
                    for record in states.take_changed() {
                        let range =
                            record.first as usize..(record.first as usize + record.count as usize);
                        let state =
                            BlockState::from_number(record.state).unwrap_or(BlockState::Base);
                        logged[range].fill(state);
                    }
                    assert!(logged == model, "seed {seed}: what changed");
                }
                let (from, to) = (rng.u64(0..=blocks), rng.u64(0..=blocks));
                let mut at = from;
                let mut last = None;
                for (run, state) in states.runs(from..to) {
                    assert!(
                        run.start == at && run.end > at && last != Some(state),
                        "seed {seed}"
                    );
                    assert!(
                        model[run.start as usize..run.end as usize]
                            .iter()
                            .all(|s| *s == state)
                    );
                    (at, last) = (run.end, Some(state));
                }
                assert_eq!(at, to.max(from), "seed {seed}");
            }
            let count = model.iter().filter(|s| **s != BlockState::Base).count() as u64;
            assert_eq!(states.count(), count, "seed {seed}");
            let mut again = States::default();
            for record in states.snapshot() {
                let state = BlockState::from_number(record.state).expect("no base in a snapshot");
                again.load(record.first..record.first + u64::from(record.count), state);
            }
            assert!(
                (0..blocks).all(|b| again.get(b) == states.get(b)),
                "seed {seed}"
            );
        }
    }

    #[test]
    fn what_is_marked_again_is_taken_again() {
        let mut states = States::default();
        states.set(10..20, BlockState::Here);
        states.set(20..25, BlockState::Zero);
        states.set(12..14, BlockState::Here);
        let records = states.take_changed();
        assert_eq!(records.len(), 2, "{records:?}");
        assert!(states.take_changed().is_empty());
        states.mark(11..13);
        states.mark(13..22);
        let runs: Vec<_> = states
            .take_changed()
            .iter()
            .map(|r| (r.first, r.count))
            .collect();
        assert_eq!(runs, [(11, 9), (20, 2)]);
    }

    #[test]
    fn a_trimmed_device_takes_little_memory() {
        let mut states = States::default();
        let blocks = 1 << 34;
        states.set(0..blocks, BlockState::Zero);
        assert!(states.pages.values().all(|p| matches!(p, Page::All(_))));
        assert_eq!(states.take_changed().len(), 5, "runs of at most u32::MAX");
        assert_eq!(states.count(), blocks);
    }
}
