//! The table of pending stores, by slot: plain data, without files.

use std::collections::BTreeMap;

use drover_core::CompactIndex;
use drover_index::{ImageId, SEGMENT_SLOTS};

/// A change to the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The slots from `first` on are pending.
    Put(u64, Pending),
    /// This many slots from the first on are no longer pending.
    Clear(u64, u32),
    /// An image was removed, or will never be completed.
    Drop(ImageId),
}

/// Upper bound on pending stores; beyond it the oldest are dropped.
const MAX_PENDING: usize = 1 << 18;

/// A pending store: slots whose blocks are still only in images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Number of slots.
    pub count: u32,
    /// The incoming image in which they were found.
    pub image: u64,
    /// The first block in it.
    pub from: CompactIndex,
    /// Where else the blocks were when they were found: another image, and the first block in it.
    pub found: Option<(u64, CompactIndex)>,
}

impl Pending {
    /// The sources of `count` blocks, after skipping `skip` blocks.
    pub fn part(self, skip: u64, count: u64) -> Self {
        Pending {
            count: count as u32,
            from: self.from + skip,
            found: self.found.map(|(i, at)| (i, at + skip)),
            ..self
        }
    }
}

/// The pending stores, keyed by their first slot.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Table(BTreeMap<u64, Pending>);

impl Table {
    /// Number of pending stores.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// All stores, by their first slot.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Pending)> + '_ {
        self.0.iter().map(|(&first, p)| (first, *p))
    }

    /// The stores that begin at `at` or later.
    pub fn iter_from(&self, at: u64) -> impl Iterator<Item = (u64, Pending)> + '_ {
        self.0.range(at..).map(|(&first, p)| (first, *p))
    }

    /// Whether any of these slots is pending.
    pub fn is_in(&self, first: u64, end: u64) -> bool {
        self.covering(first).is_some() || self.0.range(first..end).next().is_some()
    }

    /// The slot after the last pending one.
    pub fn end(&self) -> u64 {
        let last = self.0.last_key_value();
        last.map_or(0, |(first, p)| first + u64::from(p.count))
    }

    /// The store that begins at exactly this slot.
    pub fn at(&self, first: u64) -> Option<Pending> {
        self.0.get(&first).copied()
    }

    /// The store that contains this slot.
    pub fn covering(&self, slot: u64) -> Option<(u64, Pending)> {
        let (&first, p) = self.0.range(..=slot).next_back()?;
        (first + u64::from(p.count) > slot).then_some((first, *p))
    }

    /// Applies a change. Deterministic: the same sequence of changes yields the same table.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Put(first, p) => {
                self.clear(first, p.count);
                self.0.insert(first, p);
                if self.0.len() > MAX_PENDING {
                    self.0.pop_first();
                }
            }
            Change::Clear(first, count) => self.clear(first, count),
            Change::Drop(image) => self.drop_image(image.0),
        }
    }

    /// Removes the slots from all pending stores.
    fn clear(&mut self, first: u64, count: u32) {
        let end = first + u64::from(count);
        let touched: Vec<u64> = self
            .0
            .range(..end)
            .rev()
            // No store is longer than a segment, so none that overlaps starts further back.
            .take_while(|(s, _)| **s + SEGMENT_SLOTS > first)
            .filter(|(s, p)| **s + u64::from(p.count) > first)
            .map(|(s, _)| *s)
            .collect();
        for start in touched {
            let Some(p) = self.0.remove(&start) else {
                continue;
            };
            let stop = start + u64::from(p.count);
            if start < first {
                self.0.insert(start, p.part(0, first - start));
            }
            if stop > end {
                self.0.insert(end, p.part(end - start, stop - end));
            }
        }
    }

    /// Redirects stores from the image to where they were found; drops those without such a place.
    fn drop_image(&mut self, image: u64) {
        self.0.retain(|_, p| {
            let found = p.found.take_if(|(i, _)| *i == image || p.image == image);
            if p.image != image {
                return true;
            }
            match found.filter(|(i, _)| *i != image) {
                Some((other, at)) => (p.image, p.from) = (other, at),
                None => return false,
            }
            true
        });
    }

    /// Drops everything at or beyond a slot.
    pub fn cut(&mut self, end: u64) {
        if let Some((first, p)) = self.covering(end)
            && first < end
        {
            self.0.insert(first, p.part(0, end - first));
        }
        self.0.split_off(&end);
    }
}

#[cfg(any(test, fuzzing))]
impl Table {
    /// Checks that no slot is pending twice, and no store is longer than a segment.
    pub fn check(&self) {
        let mut end = 0;
        for (first, p) in self.iter() {
            assert!(
                (1..=SEGMENT_SLOTS).contains(&u64::from(p.count)),
                "{first}: {p:?}"
            );
            assert!(first >= end, "{first} is in what ends at {end}");
            end = first + u64::from(p.count);
        }
    }
}
