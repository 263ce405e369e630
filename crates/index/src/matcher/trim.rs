//! Giving room of the sequence cache back, in steps that each take little time.
//!
//! Nothing new is stored in a segment from the step before the one that frees it until the step after: the destination
//! may take plans over in another order than they were made. Before a step it takes over those that are under way, so
//! that none of them stores anything in what the step frees; after it, it gives the room back.

use drover_core::Digest;

use super::{ImageId, Matcher};
use crate::hash_file::HashFile;
use crate::page::PER_PAGE;
use crate::sequence::Uses;

/// Pages of hash files that one trimming looks at, in all: the digests of 170 GiB. Of larger sites a sample, evenly spread.
const MAX_PAGES: u64 = 1 << 17;

/// Pages in a step, which lie side by side: a disk with arms reads them at once.
const PAGES_A_STEP: u64 = 32;

/// Segments that a step empties.
const EMPTIED_A_STEP: usize = 32;

/// Segments that a step frees at most: those that it empties, and those that were empty.
pub const MAX_FREED: usize = 1024;

/// A trimming that is under way. Made by [`Matcher::begin_trim`]; its end is certain, whatever the site's size. At most one
/// is under way: the next one ends it.
#[derive(Debug)]
pub struct Trim {
    keep: u32,
    have: u32,
    uses: Uses,
    /// Images still to be looked at and their pages, the next one last; and the next page there, perhaps beyond it.
    images: Vec<(ImageId, u64)>,
    page: u64,
    /// Of so many pages one is looked at.
    stride: u64,
    /// Segments by use, the least used last; once all was looked at.
    order: Option<Vec<u32>>,
    /// Those that were empty then, the first one last.
    empty: Vec<u32>,
    /// What the next step frees, held back.
    chosen: Vec<u32>,
    /// What the last step freed, still held back.
    freed: Vec<u32>,
}

/// What a step of trimming did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trimmed {
    /// It looked at images; there is more to do, and the destination need not be asked before.
    Looked,
    /// These segments of [`SEGMENT_SLOTS`](crate::SEGMENT_SLOTS), perhaps none, are empty now, and nothing is stored there
    /// until the next step; there may be more to do.
    Freed(Vec<u32>),
    /// All done, or it cannot be done now. Nothing is held back any more.
    Done,
}

impl Matcher {
    /// Segments of the sequence cache that hold something: [`SEGMENT_SLOTS`](crate::SEGMENT_SLOTS) each, used or not.
    #[must_use]
    pub fn sequence_segments(&self) -> u32 {
        self.sequences.file.occupied()
    }

    /// Begins to bring the sequence cache down to `keep` segments. Of the first `have` the empty ones are freed again: the
    /// destination may not have heard of it. Whatever the trimming before held back is not held back any more.
    pub fn begin_trim(&mut self, keep: u32, have: u32) -> Trim {
        self.begin_trim_within(keep, have, MAX_PAGES)
    }

    /// The same, looking at so many pages at most, or a step more.
    fn begin_trim_within(&mut self, keep: u32, have: u32, max_pages: u64) -> Trim {
        self.sequences.file.release_all();
        let mut images = Vec::new();
        if self.sequence_segments() > keep {
            let all = self.images().into_iter();
            images.extend(all.map(|i| (i.image, i.blocks.div_ceil(PER_PAGE as u64))));
        }
        let pages: u64 = images.iter().map(|(_, pages)| pages).sum();
        Trim {
            keep,
            have,
            uses: Uses::default(),
            images,
            page: 0,
            stride: pages.div_ceil(max_pages).max(1),
            order: None,
            empty: Vec::new(),
            chosen: Vec::new(),
            freed: Vec::new(),
        }
    }

    /// One step: looks at some of the images' digests, later frees some of the segments that these use least. What the step
    /// before freed the destination has given back.
    pub fn trim(&mut self, trim: &mut Trim) -> Trimmed {
        self.sequences.file.release(&trim.freed);
        trim.freed.clear();
        if trim.order.is_none() {
            // What is skipped reaches over images.
            while let Some(&(_, pages)) = trim.images.last()
                && trim.page >= pages
            {
                trim.page -= pages;
                trim.images.pop();
            }
            match trim.images.last() {
                Some(&(image, pages)) => {
                    self.look(image, pages, trim);
                    return Trimmed::Looked;
                }
                None => {
                    trim.order = Some(self.sequences.by_use(&trim.uses));
                    trim.empty = self.sequences.empty(trim.have);
                }
            }
        }
        let mut freed = std::mem::take(&mut trim.chosen);
        freed.sort_unstable();
        if !self.sequences.free(&freed, &mut self.shared) {
            self.sequences.file.release(&freed);
            trim.order = Some(Vec::new());
            trim.empty.clear();
            return Trimmed::Done;
        }
        self.choose(trim);
        if freed.is_empty() && trim.chosen.is_empty() {
            return Trimmed::Done;
        }
        trim.freed.clone_from(&freed);
        Trimmed::Freed(freed)
    }

    /// Chooses what the next step frees: what is empty already, and some of what is too much.
    fn choose(&mut self, trim: &mut Trim) {
        let over = self.sequence_segments().saturating_sub(trim.keep) as usize;
        let mut to_empty = over.min(EMPTIED_A_STEP);
        let file = &mut self.sequences.file;
        while trim.chosen.len() < MAX_FREED
            && let Some(no) = trim.empty.pop()
        {
            // What was filled since then is what came last.
            if file.is_empty(no) {
                file.hold(no);
                trim.chosen.push(no);
            }
        }
        while let Some(order) = &mut trim.order
            && let Some(&no) = order.last()
            && trim.chosen.len() < MAX_FREED
        {
            if !file.is_empty(no) {
                if to_empty == 0 {
                    return;
                }
                to_empty -= 1;
            }
            order.pop();
            file.hold(no);
            trim.chosen.push(no);
        }
    }

    /// Looks at the next pages of an image, and goes on behind those that it skips for them.
    fn look(&mut self, image: ImageId, pages: u64, trim: &mut Trim) {
        let run = trim.page..pages.min(trim.page + PAGES_A_STEP);
        trim.page += (run.end - run.start) * trim.stride;
        let mut digests: Vec<Digest> = Vec::new();
        // What cannot be read, or went meanwhile, uses nothing.
        let mut read = |file: &mut HashFile| {
            for no in run.clone() {
                if let Ok(Some(page)) = file.page(no) {
                    digests.extend(page.iter().map(|(_, d)| d));
                }
            }
        };
        if let Some(slot) = self.recent.slot_of(image) {
            if let Some(slot) = self.recent.slot_mut(slot) {
                read(&mut slot.file);
            }
        } else if self.older.contains_key(&image)
            && let Ok(Some(mut file)) = HashFile::open(self.storage.as_ref(), image.0)
        {
            read(&mut file);
            self.closed_traffic.0 += file.traffic.read;
        }
        for digest in &digests {
            self.sequences.count_uses(digest, &mut trim.uses);
        }
    }
}

#[cfg(test)]
mod tests {
    use drover_core::{Digest, Head};

    use super::*;
    use crate::matcher::MatcherConfig;
    use drover_storage::FakeDirectory;

    fn send(m: &mut Matcher, id: u64, content: u64, blocks: u64) {
        let digest = |n: u64| Digest(*blake3::hash(&(content << 32 | n).to_le_bytes()).as_bytes());
        let digests: Vec<Digest> = (0..blocks).map(digest).collect();
        let heads: Vec<Head> = (0..blocks)
            .map(|n| if n % 9 == 0 { Head::Strong } else { Head::No })
            .collect();
        let mut cursor = m.begin(ImageId(id)).unwrap();
        for (digests, heads) in digests.chunks(2048).zip(heads.chunks(2048)) {
            m.batch(&mut cursor, digests, heads).unwrap();
        }
        m.finish(cursor).unwrap();
    }

    /// Sequences are stored without what is there already only while room is scarce.
    #[test]
    fn what_was_given_back_is_room_again() {
        let config = MatcherConfig {
            sequence_limit: 150,
            ..MatcherConfig::default()
        };
        let (mut m, _) = Matcher::open(FakeDirectory::default(), config).unwrap();
        for id in [1, 2] {
            send(&mut m, id, 1, 40_000);
        }
        assert!(m.sequences.is_filling(), "{}", m.sequence_segments());
        let mut trim = m.begin_trim(20, 0);
        while m.trim(&mut trim) != Trimmed::Done {}
        assert_eq!(m.sequence_segments(), 20);
        assert!(!m.sequences.is_filling());
    }

    /// More are empty than one step frees; what is filled before their turn comes stays, and all others are named.
    #[test]
    fn what_is_filled_while_it_waits_for_its_turn_stays() {
        let (mut m, _) = Matcher::open(FakeDirectory::default(), MatcherConfig::default()).unwrap();
        for id in [1, 2] {
            send(&mut m, id, 1, 500_000);
        }
        let all = m.sequence_segments();
        assert!(all as usize > MAX_FREED + 200, "{all}");
        let mut trim = m.begin_trim(0, all);
        while m.trim(&mut trim) != Trimmed::Done {}
        assert_eq!(m.sequence_segments(), 0);
        let mut trim = m.begin_trim(0, all);
        assert_eq!(m.trim(&mut trim), Trimmed::Freed(Vec::new()));
        assert_eq!(trim.chosen.len(), MAX_FREED);
        for id in [3, 4] {
            send(&mut m, id, 2, 20_000);
        }
        let (empty, filled): (Vec<u32>, Vec<u32>) =
            (0..all).partition(|no| m.sequences.file.is_empty(*no));
        assert!(filled.len() > 10, "{filled:?}");
        let mut freed = Vec::new();
        while let Trimmed::Freed(some) = m.trim(&mut trim) {
            freed.extend(some);
        }
        freed.sort_unstable();
        assert_eq!(freed, empty);
        assert_eq!(m.sequence_segments() as usize, filled.len());
    }

    /// A large site is looked at in a sample, which is enough to tell what is used from what is not; images may go meanwhile.
    #[test]
    fn a_sample_ends_soon_and_tells_what_is_used() {
        let (mut m, _) = Matcher::open(FakeDirectory::default(), MatcherConfig::default()).unwrap();
        for (id, content) in [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)] {
            send(&mut m, id, content, 80_000);
        }
        let all = m.sequence_segments();
        let (old, new) = (all / 2, all - all / 2);
        assert!(old.min(new) > 200, "{all} segments");
        for id in [1, 2] {
            m.forget(ImageId(id)).unwrap();
        }
        let read = m.stats().bytes_read;
        let mut trim = m.begin_trim_within(new, 0, 400);
        let (mut steps, mut freed) = (0, Vec::new());
        loop {
            steps += 1;
            match m.trim(&mut trim) {
                Trimmed::Looked if steps == 1 => m.forget(ImageId(5)).unwrap(),
                Trimmed::Looked => {}
                Trimmed::Freed(some) => freed.extend(some),
                Trimmed::Done => break,
            }
        }
        // 32 pages for each step that looks, and 32 segments for each other, which are read to be emptied.
        assert!(steps < 20 + old as usize / 30, "{steps}");
        let pages = (m.stats().bytes_read - read) / 4096;
        assert!(pages < 500 + 2 * u64::from(old), "{pages} pages");
        assert_eq!(freed.len(), old as usize);
        // What was of the images that went, but for what lies at the seam.
        let wrong = freed.iter().filter(|no| **no > old + 2).count();
        assert!(wrong * 50 < freed.len(), "{wrong} of {}", freed.len());
    }
}
