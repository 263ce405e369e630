//! Which blocks first came to the site with a flock: kept while the flock is received, so that each image's report can say
//! what it took from itself, from the other images of the flock, and from what the site had before.
//!
//! It is told of every plan in the order in which the matcher made them, and needs no block data. A block is *new* if it
//! first came with this flock; a block that repeats a new one is new as well, wherever it was found: in an image or in
//! the sequence cache.

use std::collections::{BTreeMap, HashMap};

use drover_core::CompactIndex;
use drover_index::{ImageId, SequenceStore};
use drover_store::sequences::From;

use crate::destination::Run;
use crate::protocol::Origins;

/// Limit on the stretches that a flock keeps (about 32 MiB). Beyond it, neighbouring blocks share what is known of the
/// first of them: reports become approximate, nothing else.
const MAX_STRETCHES: usize = 1 << 20;

/// Where a block was found when it was planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kin {
    /// Nowhere: the source sends it.
    Sent,
    /// In the image itself.
    Own,
    /// In another image of the flock, or in what was stored from one.
    Flock,
    /// In what the site had before.
    Site,
}

/// What is known of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    kin: Kin,
    /// Whether it first came with the flock.
    new: bool,
}

impl Mark {
    const SENT: Mark = Mark {
        kin: Kin::Sent,
        new: true,
    };
    const FLOCK: Mark = Mark {
        kin: Kin::Flock,
        new: true,
    };
    const SITE: Mark = Mark {
        kin: Kin::Site,
        new: false,
    };

    fn own(new: bool) -> Mark {
        Mark { kin: Kin::Own, new }
    }
}

/// The marks of an image's data blocks from the first on, as stretches with their ends.
#[derive(Debug, Default)]
struct Marks(Vec<(u64, Mark)>);

impl Marks {
    fn blocks(&self) -> u64 {
        self.0.last().map_or(0, |(end, _)| *end)
    }

    /// The mark of a block, and how many blocks from there on have it.
    fn at(&self, block: u64) -> Option<(Mark, u64)> {
        let nth = self.0.partition_point(|(end, _)| *end <= block);
        self.0.get(nth).map(|(end, mark)| (*mark, end - block))
    }

    fn push(&mut self, count: u64, mark: Mark, may_split: bool) {
        let end = self.blocks() + count;
        match self.0.last_mut() {
            _ if count == 0 => {}
            Some((last, same)) if *same == mark || !may_split => *last = end,
            _ => self.0.push((end, mark)),
        }
    }

    /// Forgets the blocks from `block` on, and returns what is to be [put back](Self::put_back) behind as many as are known
    /// then.
    fn cut(&mut self, block: u64) -> Vec<(u64, Mark)> {
        let keep = self.0.partition_point(|(end, _)| *end <= block);
        let behind = self.0[keep..].to_vec();
        self.truncate(block);
        behind
    }

    /// Puts back what was cut off, from the end of what is known now on.
    fn put_back(&mut self, behind: &[(u64, Mark)], may_split: bool) {
        for (end, mark) in behind {
            self.push(end.saturating_sub(self.blocks()), *mark, may_split);
        }
    }

    /// Forgets the blocks from `block` on.
    fn truncate(&mut self, block: u64) {
        let keep = self.0.partition_point(|(end, _)| *end <= block);
        let cut = self.0.get(keep).copied();
        self.0.truncate(keep);
        if let Some((_, mark)) = cut
            && self.blocks() < block
        {
            self.0.push((block, mark));
        }
    }
}

/// What is known of a flock's blocks; see the module documentation.
#[derive(Debug, Default)]
pub struct Provenance {
    images: HashMap<ImageId, Marks>,
    /// Slots of the sequence cache with new blocks: first, and end.
    slots: BTreeMap<u64, u64>,
}

impl Provenance {
    /// Starts an image of the flock, or starts it again.
    pub fn begin(&mut self, image: ImageId) {
        self.images.insert(image, Marks::default());
    }

    /// Whether the image is of the flock.
    pub fn has(&self, image: ImageId) -> bool {
        self.images.contains_key(&image)
    }

    fn may_split(&self) -> bool {
        let of_images: usize = self.images.values().map(|m| m.0.len()).sum();
        of_images + self.slots.len() < MAX_STRETCHES
    }

    /// Data blocks of `image` from `base` on are in place and are not planned: they came in an earlier session, or the site
    /// `had` them at the same place.
    pub fn recorded(&mut self, image: ImageId, base: CompactIndex, count: u64, had: bool) {
        let may_split = self.may_split();
        if let Some(marks) = self.images.get_mut(&image) {
            let behind = marks.cut(base.0);
            let mark = if had { Mark::SITE } else { Mark::SENT };
            marks.push(count, mark, may_split);
            marks.put_back(&behind, may_split);
        }
    }

    /// A plan for the data blocks of `image` from `base` on, the first or one that replaces it; what follows stays.
    pub fn planned(&mut self, image: ImageId, base: CompactIndex, runs: &[Run]) {
        let may_split = self.may_split();
        let Some(mut marks) = self.images.remove(&image) else {
            return;
        };
        let behind = marks.cut(base.0);
        for run in runs {
            let count = u64::from(run.count);
            match run.from {
                From::Literal => marks.push(count, Mark::SENT, may_split),
                From::Own { first } => {
                    let (mut at, mut left) = (first.0, count);
                    while left > 0 {
                        let (mark, n) = marks.at(at).unwrap_or((Mark::SENT, left));
                        let n = n.min(left);
                        marks.push(n, Mark::own(mark.new), may_split);
                        at += n;
                        left -= n;
                    }
                }
                From::Image { image, first } => match self.images.get(&image) {
                    None => marks.push(count, Mark::SITE, may_split),
                    Some(other) => {
                        let (mut at, mut left) = (first.0, count);
                        while left > 0 {
                            let (mark, n) = other.at(at).unwrap_or((Mark::SENT, left));
                            let n = n.min(left);
                            let found = if mark.new { Mark::FLOCK } else { Mark::SITE };
                            marks.push(n, found, may_split);
                            at += n;
                            left -= n;
                        }
                    }
                },
                From::Sequence { first } => {
                    let (mut at, end) = (first, first + count);
                    while at < end {
                        let (new, until) = self.slot(at);
                        let until = until.min(end);
                        let found = if new { Mark::FLOCK } else { Mark::SITE };
                        marks.push(until - at, found, may_split);
                        at = until;
                    }
                }
            }
        }
        marks.put_back(&behind, may_split);
        self.images.insert(image, marks);
    }

    /// Whether a slot has a new block, and up to where that is so.
    fn slot(&self, at: u64) -> (bool, u64) {
        match self.slots.range(..=at).next_back() {
            Some((_, end)) if *end > at => (true, *end),
            _ => {
                let next = self.slots.range(at + 1..).next();
                (false, next.map_or(u64::MAX, |(first, _)| *first))
            }
        }
    }

    /// Blocks of an image, perhaps not of this flock, were stored in the sequence cache.
    pub fn stored(&mut self, image: ImageId, store: &SequenceStore) {
        let end = store.first + u64::from(store.count);
        self.clear_slots(store.first, end);
        let may_split = self.may_split();
        let Some(marks) = self.images.get(&image).filter(|_| may_split) else {
            return;
        };
        let (mut at, mut slot) = (store.from.0, store.first);
        while slot < end {
            let Some((mark, n)) = marks.at(at) else {
                return;
            };
            let n = n.min(end - slot);
            if mark.new {
                match self.slots.range_mut(..slot).next_back() {
                    Some((_, before)) if *before == slot => *before = slot + n,
                    _ => drop(self.slots.insert(slot, slot + n)),
                }
            }
            at += n;
            slot += n;
        }
    }

    fn clear_slots(&mut self, first: u64, end: u64) {
        if let Some((_, before)) = self.slots.range_mut(..first).next_back()
            && *before > first
        {
            let rest = std::mem::replace(before, first);
            self.slots.insert(first, rest);
        }
        while let Some((&at, &until)) = self.slots.range(first..end).next() {
            self.slots.remove(&at);
            if until > end {
                self.slots.insert(end, until);
            }
        }
    }

    /// Counts blocks of an image that were reused: `count` data blocks from `first` on.
    pub fn tally(&self, image: ImageId, first: u64, count: u64, origins: &mut Origins) {
        let Some(marks) = self.images.get(&image) else {
            return;
        };
        let (mut at, mut left) = (first, count);
        while left > 0 {
            let (mark, n) = marks.at(at).unwrap_or((Mark::SITE, left));
            let n = n.min(left);
            match mark.kin {
                Kin::Own => origins.own += n,
                Kin::Flock => origins.flock += n,
                Kin::Sent | Kin::Site => origins.site += n,
            }
            at += n;
            left -= n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_index::Via;

    fn run(count: u32, from: From) -> Run {
        Run {
            count,
            from,
            via: Via::C1,
        }
    }

    /// The plain model: a mark for each block, a flag for each slot.
    #[derive(Default)]
    struct Model {
        images: HashMap<ImageId, Vec<Mark>>,
        slots: HashMap<u64, bool>,
    }

    impl Model {
        fn planned(&mut self, image: ImageId, runs: &[Run]) {
            for run in runs {
                for i in 0..u64::from(run.count) {
                    let mark = match run.from {
                        From::Literal => Mark::SENT,
                        From::Own { first } => {
                            Mark::own(self.images[&image][(first.0 + i) as usize].new)
                        }
                        From::Image { image, first } => match self.images.get(&image) {
                            Some(of) if of[(first.0 + i) as usize].new => Mark::FLOCK,
                            _ => Mark::SITE,
                        },
                        From::Sequence { first } => {
                            match self.slots.get(&(first + i)).is_some_and(|new| *new) {
                                true => Mark::FLOCK,
                                false => Mark::SITE,
                            }
                        }
                    };
                    self.images.get_mut(&image).unwrap().push(mark);
                }
            }
        }
    }

    fn agree(seed: u64) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut real, mut model) = (Provenance::default(), Model::default());
        let foreign = ImageId(100);
        for n in 0..rng.u64(1..5) {
            let image = ImageId(n);
            real.begin(image);
            model.images.insert(image, Vec::new());
            for _ in 0..rng.u64(1..12) {
                let base = model.images[&image].len() as u64;
                if rng.u32(0..6) == 0 {
                    let (count, had) = (rng.u64(1..9), rng.bool());
                    real.recorded(image, CompactIndex(base), count, had);
                    let mark = if had { Mark::SITE } else { Mark::SENT };
                    let marks = model.images.get_mut(&image).unwrap();
                    marks.extend((0..count).map(|_| mark));
                    continue;
                }
                let mut runs = Vec::new();
                let mut at = base;
                for _ in 0..rng.u32(1..6) {
                    let count = rng.u32(1..10);
                    let other = ImageId(rng.u64(0..n + 1));
                    let known = model.images.get(&other).map_or(0, Vec::len) as u64;
                    let from = match rng.u32(0..5) {
                        0 if at > 0 => From::Own {
                            first: CompactIndex(rng.u64(0..at)),
                        },
                        1 if other != image && known >= u64::from(count) => From::Image {
                            image: other,
                            first: CompactIndex(rng.u64(0..=known - u64::from(count))),
                        },
                        2 => From::Sequence {
                            first: rng.u64(0..40),
                        },
                        3 => From::Image {
                            image: foreign,
                            first: CompactIndex(0),
                        },
                        _ => From::Literal,
                    };
                    runs.push(run(count, from));
                    at += u64::from(count);
                }
                real.planned(image, CompactIndex(base), &runs);
                model.planned(image, &runs);
                let blocks = model.images[&image].len() as u64;
                let count = rng.u64(1..10).min(blocks);
                let store = SequenceStore {
                    first: rng.u64(0..40),
                    from: CompactIndex(rng.u64(0..=blocks - count)),
                    count: count as u32,
                };
                let of = if rng.u32(0..4) == 0 { foreign } else { image };
                real.stored(of, &store);
                for i in 0..count {
                    let new =
                        of != foreign && model.images[&image][(store.from.0 + i) as usize].new;
                    model.slots.insert(store.first + i, new);
                }
            }
        }
        for (image, marks) in &model.images {
            for (i, mark) in marks.iter().enumerate() {
                let found = real.images[image].at(i as u64).map(|(mark, _)| mark);
                assert_eq!(found, Some(*mark), "seed {seed}: {image:?} {i}");
            }
            let mut counted = Origins::default();
            real.tally(*image, 0, marks.len() as u64, &mut counted);
            let of = |kin: &[Kin]| marks.iter().filter(|m| kin.contains(&m.kin)).count() as u64;
            let expected = Origins {
                own: of(&[Kin::Own]),
                flock: of(&[Kin::Flock]),
                site: of(&[Kin::Sent, Kin::Site]),
            };
            assert_eq!(counted, expected, "seed {seed}");
        }
        for slot in 0..60 {
            let new = model.slots.get(&slot).is_some_and(|new| *new);
            assert_eq!(real.slot(slot).0, new, "seed {seed}: slot {slot}");
        }
    }

    #[test]
    fn stretches_say_the_same_as_a_mark_for_each_block() {
        (0..2000).for_each(agree);
    }

    #[test]
    fn an_image_that_starts_again_is_marked_anew() {
        let mut all = Provenance::default();
        let image = ImageId(1);
        all.begin(image);
        all.planned(image, CompactIndex(0), &[run(10, From::Literal)]);
        all.planned(
            image,
            CompactIndex(10),
            &[run(10, From::Sequence { first: 5 })],
        );
        let repeated = From::Own {
            first: CompactIndex(0),
        };
        all.planned(image, CompactIndex(15), &[run(3, repeated)]);
        assert_eq!(all.images[&image].blocks(), 20, "what follows stays");
        let mut counted = Origins::default();
        all.tally(image, 10, 10, &mut counted);
        assert_eq!((counted.site, counted.own), (7, 3));
        counted = Origins::default();
        all.tally(image, 18, 2, &mut counted);
        assert_eq!(counted.site, 2);
        assert!(!all.has(ImageId(2)));
        all.planned(ImageId(2), CompactIndex(0), &[run(1, From::Literal)]);
        assert!(!all.has(ImageId(2)), "not of the flock");
    }
}
