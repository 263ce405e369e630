//! What is pending, slot by slot: plain data, without files.

use std::collections::BTreeMap;

use drover_index::{ImageId, SEGMENT_SLOTS};

/// A change of what is pending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The slots from `first` on are pending so.
    Put(u64, Pending),
    /// So many slots from the first on are pending no more.
    Clear(u64, u32),
    /// An image is gone, or will never come.
    Drop(ImageId),
}

/// Stores that may be pending; beyond this the oldest slots are given up.
const MAX_PENDING: usize = 1 << 18;

/// Slots whose blocks are still only in images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Slots.
    pub count: u32,
    /// The image on whose way they were found.
    pub image: u64,
    /// The first one's compact index there.
    pub from: u64,
    /// Where they were when they were found: another image, and the first one's compact index.
    pub found: Option<(u64, u64)>,
}

impl Pending {
    /// The places of `count` blocks that are `skip` blocks on.
    pub fn part(self, skip: u64, count: u64) -> Self {
        Pending {
            count: count as u32,
            from: self.from.saturating_add(skip),
            found: self.found.map(|(i, at)| (i, at.saturating_add(skip))),
            ..self
        }
    }
}

/// What is pending, by the first slot.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Table(BTreeMap<u64, Pending>);

impl Table {
    /// Stores that are pending.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// All of them, by their first slot.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Pending)> + '_ {
        self.0.iter().map(|(&first, p)| (first, *p))
    }

    /// Those that begin at `at` or later.
    pub fn iter_from(&self, at: u64) -> impl Iterator<Item = (u64, Pending)> + '_ {
        self.0.range(at..).map(|(&first, p)| (first, *p))
    }

    /// Whether any of these slots is pending.
    pub fn is_in(&self, first: u64, end: u64) -> bool {
        self.covering(first).is_some() || self.0.range(first..end).next().is_some()
    }

    /// The slot behind the last that is pending.
    pub fn end(&self) -> u64 {
        let last = self.0.last_key_value();
        last.map_or(0, |(first, p)| first + u64::from(p.count))
    }

    /// What begins at exactly this slot.
    pub fn at(&self, first: u64) -> Option<Pending> {
        self.0.get(&first).copied()
    }

    /// What a slot is part of.
    pub fn covering(&self, slot: u64) -> Option<(u64, Pending)> {
        let (&first, p) = self.0.range(..=slot).next_back()?;
        (first + u64::from(p.count) > slot).then_some((first, *p))
    }

    /// The same changes in the same order make the same table.
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

    /// Cuts the slots out of whatever is pending.
    fn clear(&mut self, first: u64, count: u32) {
        let end = first + u64::from(count);
        let touched: Vec<u64> = self
            .0
            .range(..end)
            .rev()
            // None is longer than a segment, so nothing starts further back than that.
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

    /// What is pending from the image is read from where it was found, and given up when it has no such place.
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

    /// Gives up what lies at or beyond a slot.
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
    /// No slot is pending twice, and nothing is longer than a segment.
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
