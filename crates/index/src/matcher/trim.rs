//! Giving room of the sequence cache back, in steps that each take little time.

use drover_core::Digest;

use super::{ImageId, Matcher};
use crate::hash_file::HashFile;
use crate::page::PER_PAGE;
use crate::sequence::Uses;
use crate::storage::Storage;

/// Pages of hash files that one trimming looks at, in all: the digests of 170 GiB. Of larger sites a sample, evenly spread.
const MAX_PAGES: u64 = 1 << 17;

/// Pages in a step, which lie side by side: a disk with arms reads them at once.
const PAGES_A_STEP: u64 = 32;

/// Segments that a step gives back.
const FREED_A_STEP: usize = 32;

/// A trimming that is under way. Made by [`Matcher::begin_trim`]; its end is certain, whatever the site's size.
#[derive(Debug)]
pub struct Trim {
    keep: u32,
    uses: Uses,
    /// Images still to be looked at and their pages, the next one last; and the next page there, perhaps beyond it.
    images: Vec<(ImageId, u64)>,
    page: u64,
    /// Of so many pages one is looked at.
    stride: u64,
    /// Segments by use, the least used last, once all was looked at.
    order: Option<Vec<u32>>,
}

/// What a step of trimming did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trimmed {
    /// It looked at images; there is more to do.
    Looked,
    /// These segments of [`SEGMENT_SLOTS`](crate::SEGMENT_SLOTS) are empty now; there may be more to do.
    Freed(Vec<u32>),
    /// All done, or it cannot be done now.
    Done,
}

impl<S: Storage> Matcher<S> {
    /// Segments of the sequence cache that hold something: [`SEGMENT_SLOTS`](crate::SEGMENT_SLOTS) each, used or not.
    #[must_use]
    pub fn sequence_segments(&self) -> u32 {
        self.sequences.file.occupied()
    }

    /// Begins to bring the sequence cache down to `keep` segments. `None` when it is not larger.
    #[must_use]
    pub fn begin_trim(&self, keep: u32) -> Option<Trim> {
        self.begin_trim_within(keep, MAX_PAGES)
    }

    /// The same, looking at so many pages at most, or a step more.
    fn begin_trim_within(&self, keep: u32, max_pages: u64) -> Option<Trim> {
        if self.sequence_segments() <= keep {
            return None;
        }
        let images = self.images();
        let images = images
            .iter()
            .map(|i| (i.image, i.blocks.div_ceil(PER_PAGE as u64)));
        let images: Vec<_> = images.collect();
        let pages: u64 = images.iter().map(|(_, pages)| pages).sum();
        Some(Trim {
            keep,
            uses: Uses::default(),
            images,
            page: 0,
            stride: pages.div_ceil(max_pages).max(1),
            order: None,
        })
    }

    /// One step: looks at some of the images' digests, later frees some of the segments that these use least.
    pub fn trim(&mut self, trim: &mut Trim) -> Trimmed {
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
                None => trim.order = Some(self.sequences.by_use(&trim.uses)),
            }
        }
        let over = self.sequence_segments().saturating_sub(trim.keep) as usize;
        let mut segments = Vec::new();
        while let Some(order) = &mut trim.order
            && segments.len() < over.min(FREED_A_STEP)
            && let Some(no) = order.pop()
        {
            // It may have been emptied meanwhile.
            if !self.sequences.file.is_empty(no) {
                segments.push(no);
            }
        }
        let freed = self.sequences.free(&segments, &mut self.shared);
        match freed.is_empty() {
            true => Trimmed::Done,
            false => Trimmed::Freed(freed.into_iter().collect()),
        }
    }

    /// Looks at the next pages of an image, and goes on behind those that it skips for them.
    fn look(&mut self, image: ImageId, pages: u64, trim: &mut Trim) {
        let run = trim.page..pages.min(trim.page + PAGES_A_STEP);
        trim.page += (run.end - run.start) * trim.stride;
        let mut digests: Vec<Digest> = Vec::new();
        // What cannot be read, or went meanwhile, uses nothing.
        let mut read = |file: &mut HashFile<S::File>| {
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
            && let Ok(Some(mut file)) = HashFile::open(&self.storage, image.0)
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
    use crate::testing::SimStorage;

    fn send(m: &mut Matcher<SimStorage>, id: u64, content: u64, blocks: u64) {
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
        let (mut m, _) = Matcher::open(SimStorage::new(), config).unwrap();
        for id in [1, 2] {
            send(&mut m, id, 1, 40_000);
        }
        assert!(m.sequences.is_filling(), "{}", m.sequence_segments());
        let mut trim = m.begin_trim(20).unwrap();
        while m.trim(&mut trim) != Trimmed::Done {}
        assert_eq!(m.sequence_segments(), 20);
        assert!(!m.sequences.is_filling());
    }

    /// A large site is looked at in a sample, which is enough to tell what is used from what is not; images may go meanwhile.
    #[test]
    fn a_sample_ends_soon_and_tells_what_is_used() {
        let (mut m, _) = Matcher::open(SimStorage::new(), MatcherConfig::default()).unwrap();
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
        let mut trim = m.begin_trim_within(new, 400).unwrap();
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
