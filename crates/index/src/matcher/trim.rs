//! Trimming the sequence cache to free disk space, in short steps.
//!
//! Between the step before the one that frees a segment and the step after it, nothing is stored in that segment: the
//! destination may apply plans in another order than they were made. Before a step it applies the plans in flight, so
//! that none of them stores into segments freed by the step; after the step it frees their data.

use drover_core::Digest;

use super::{ImageId, Matcher};
use crate::hash_file::HashFile;
use crate::page::PER_PAGE;
use crate::sequence::Uses;

/// Maximum number of hash file pages examined by one trim: the digests of 170 GiB. Larger sites are sampled evenly.
const MAX_PAGES: u64 = 1 << 17;

/// Pages per step; they are contiguous, so that a hard disk reads them in one go.
const PAGES_A_STEP: u64 = 32;

/// Segments emptied per step.
const EMPTIED_A_STEP: usize = 32;

/// Maximum number of segments freed per step: those it empties, and those already empty.
pub const MAX_FREED: usize = 1024;

/// A trim in progress, from [`Matcher::begin_trim`]. It always terminates, whatever the site's size. At most one is
/// in progress: starting another cancels it.
#[derive(Debug)]
pub struct Trim {
    keep: u32,
    have: u32,
    uses: Uses,
    /// Images still to be examined and their page counts, the next one last; and the next page there, possibly beyond
    /// its end.
    images: Vec<(ImageId, u64)>,
    page: u64,
    /// One in this many pages is examined.
    stride: u64,
    /// Segments by use, the least used last; set once everything was examined.
    order: Option<Vec<u32>>,
    /// Segments that were already empty, the first one last.
    empty: Vec<u32>,
    /// Segments that the next step frees; stores to them are blocked.
    chosen: Vec<u32>,
    /// Segments that the last step freed; stores to them are still blocked.
    freed: Vec<u32>,
}

/// Result of a trim step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trimmed {
    /// It examined images; there is more to do, without asking the destination first.
    Looked,
    /// These segments of [`SEGMENT_SLOTS`](crate::SEGMENT_SLOTS), possibly none, are now empty, and nothing is stored
    /// in them until the next step; there may be more to do.
    Freed(Vec<u32>),
    /// Done, or it cannot be done now. All segments can be stored to again.
    Done,
}

impl Matcher {
    /// Segments of the sequence cache in use: [`SEGMENT_SLOTS`](crate::SEGMENT_SLOTS) each, used or not.
    #[must_use]
    pub fn sequence_segments(&self) -> u32 {
        self.sequences.file.occupied()
    }

    /// Begins to trim the sequence cache to `keep` segments. Empty ones among the first `have` are freed again, in
    /// case the destination missed an earlier answer. Cancels any previous trim and unblocks its segments.
    pub fn begin_trim(&mut self, keep: u32, have: u32) -> Trim {
        self.begin_trim_within(keep, have, MAX_PAGES)
    }

    /// Like [`begin_trim`](Self::begin_trim), but examines at most `max_pages` pages, or a step more.
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

    /// Runs one step: first examines some of the images' digests, later frees some of the segments that they use
    /// least. The destination has freed the data of the segments in the previous answer.
    pub fn trim(&mut self, trim: &mut Trim) -> Trimmed {
        self.sequences.file.release(&trim.freed);
        trim.freed.clear();
        if trim.order.is_none() {
            // The stride may skip over whole images.
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

    /// Chooses the segments that the next step frees: those already empty, and some of the excess.
    fn choose(&mut self, trim: &mut Trim) {
        let over = self.sequence_segments().saturating_sub(trim.keep) as usize;
        let mut to_empty = over.min(EMPTIED_A_STEP);
        let file = &mut self.sequences.file;
        while trim.chosen.len() < MAX_FREED
            && let Some(no) = trim.empty.pop()
        {
            // Segments filled since then hold the latest sequences, so keep those.
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

    /// Examines the next pages of an image, then advances by the stride.
    fn look(&mut self, image: ImageId, pages: u64, trim: &mut Trim) {
        let run = trim.page..pages.min(trim.page + PAGES_A_STEP);
        trim.page += (run.end - run.start) * trim.stride;
        let mut digests: Vec<Digest> = Vec::new();
        // Pages that are unreadable, or were removed meanwhile, count as using nothing.
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

    /// Only while space is scarce are sequences stored without the parts already present.
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

    /// More segments are empty than one step frees; those filled before their turn are kept, and all others are
    /// reported.
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

    /// A large site is sampled, which suffices to tell used segments from unused ones; images may be removed
    /// meanwhile.
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
        // 32 pages per examining step, and 32 segments per freeing step, which are read to be emptied.
        assert!(steps < 20 + old as usize / 30, "{steps}");
        let pages = (m.stats().bytes_read - read) / 4096;
        assert!(pages < 500 + 2 * u64::from(old), "{pages} pages");
        assert_eq!(freed.len(), old as usize);
        // Freed segments belong to removed images, except at the boundary.
        let wrong = freed.iter().filter(|no| **no > old + 2).count();
        assert!(wrong * 50 < freed.len(), "{wrong} of {}", freed.len());
    }
}
