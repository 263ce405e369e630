//! What was written to a disk and is not in its store yet: whole objects in memory, with the parts of them that are known.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Ranges of an object that are known; with more, the rest of the object is read from the store at once.
pub const MAX_RANGES: usize = 64;

/// Disjoint ranges in order, none touching the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// Adds a range.
    pub fn add(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|r| r.end < range.start);
        let end = self.0.partition_point(|r| r.start <= range.end);
        let mut whole = range;
        if first < end {
            whole.start = whole.start.min(self.0[first].start);
            whole.end = whole.end.max(self.0[end - 1].end);
        }
        self.0.splice(first..end, [whole]);
    }

    /// Whether all of a range is known.
    pub fn has(&self, range: &Range<usize>) -> bool {
        let at = self.0.partition_point(|r| r.end < range.end);
        let whole = self.0.get(at);
        range.is_empty() || whole.is_some_and(|r| r.start <= range.start && range.end <= r.end)
    }

    /// The known parts of a range.
    pub fn within(&self, range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let parts = self
            .0
            .iter()
            .map(|r| r.start.max(range.start)..r.end.min(range.end));
        parts.filter(|part| !part.is_empty())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// An object that was written to.
#[derive(Clone, Debug)]
pub struct Slot {
    /// As long as the object; what is not known of it is arbitrary.
    pub content: Arc<Vec<u8>>,
    /// What is known.
    pub known: Ranges,
    /// It is on its way to the store, or is being completed from there: it must not change.
    pub is_busy: bool,
    /// When it was first written, as a count.
    pub since: u64,
}

/// Objects that were written to, by number.
#[derive(Default)]
pub struct Buffer {
    slots: HashMap<u64, Slot>,
    bytes: u64,
    count: u64,
}

impl Buffer {
    /// Bytes in it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many objects were put in so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// An object, if it is in it.
    pub fn get(&self, index: u64) -> Option<&Slot> {
        self.slots.get(&index)
    }

    /// The same, to change it.
    pub fn get_mut(&mut self, index: u64) -> Option<&mut Slot> {
        self.slots.get_mut(&index)
    }

    /// Puts in an object of which nothing is known, if it is not there.
    pub fn open(&mut self, index: u64, length: usize) -> &mut Slot {
        let (bytes, count) = (&mut self.bytes, &mut self.count);
        self.slots.entry(index).or_insert_with(|| {
            *bytes += length as u64;
            *count += 1;
            Slot {
                content: Arc::new(vec![0; length]),
                known: Ranges::default(),
                is_busy: false,
                since: *count,
            }
        })
    }

    /// Takes an object out.
    pub fn remove(&mut self, index: u64) {
        if let Some(slot) = self.slots.remove(&index) {
            self.bytes -= slot.content.len() as u64;
        }
    }

    /// Takes all of them out.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.bytes = 0;
    }

    /// Whether an object is on its way.
    pub fn any_busy(&self) -> bool {
        self.slots.values().any(|slot| slot.is_busy)
    }

    /// Whether one that was put in among the first `count` is still there.
    pub fn has_of(&self, count: u64) -> bool {
        self.slots.values().any(|slot| slot.since <= count)
    }

    /// Objects that are not on their way, the oldest first, of at most so many bytes but at least one; all put in among the
    /// first `count`.
    pub fn oldest(&self, count: u64, most: u64) -> Vec<u64> {
        let free = |slot: &Slot| !slot.is_busy && slot.since <= count;
        let free = self.slots.iter().filter(|(_, slot)| free(slot));
        let mut all: Vec<_> = free
            .map(|(index, slot)| (slot.since, *index, slot.content.len() as u64))
            .collect();
        all.sort_unstable();
        let mut left = most;
        let fits = |(n, (.., length)): &(usize, (u64, u64, u64))| {
            let fits = *n == 0 || *length <= left;
            left = left.saturating_sub(*length);
            fits
        };
        let some = all.into_iter().enumerate().take_while(fits);
        some.map(|(_, (_, index, _))| index).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_as_a_set_of_bytes() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..200 {
            let (mut ranges, mut model) = (Ranges::default(), [false; 64]);
            for _ in 0..20 {
                let start = random.usize(..64);
                let range = start..random.usize(start..=64);
                ranges.add(range.clone());
                model[range].fill(true);
                let start = random.usize(..64);
                let asked = start..random.usize(start..=64);
                assert_eq!(ranges.has(&asked), model[asked.clone()].iter().all(|b| *b));
                let mut seen = [false; 64];
                for part in ranges.within(&asked) {
                    seen[part].fill(true);
                }
                for (at, seen) in seen.iter().enumerate() {
                    assert_eq!(*seen, asked.contains(&at) && model[at]);
                }
                let runs = model.chunk_by(|a, b| a == b).filter(|run| run[0]).count();
                assert_eq!(ranges.count(), runs);
            }
        }
    }

    #[test]
    fn the_oldest_go_first() {
        let mut buffer = Buffer::default();
        for index in [5, 3, 9, 3] {
            buffer.open(index, 10);
        }
        assert_eq!((buffer.bytes(), buffer.count()), (30, 3));
        assert_eq!(buffer.oldest(9, 1), [5]);
        assert_eq!(buffer.oldest(9, 20), [5, 3]);
        assert_eq!(buffer.oldest(1, 100), [5]);
        buffer.get_mut(5).unwrap().is_busy = true;
        assert_eq!(buffer.oldest(9, 100), [3, 9]);
        buffer.remove(5);
        assert_eq!(
            (buffer.bytes(), buffer.has_of(1), buffer.has_of(2)),
            (20, false, true)
        );
    }
}
