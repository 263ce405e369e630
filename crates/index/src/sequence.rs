//! The sequence cache: every sequence ever matched for this destination, in a hash file of its own, and C2, which
//! finds them (teleportation §2.14, §2.15; `docs/format/sequence-cache.md`).
//!
//! The corresponding data file is at the destination; [`SequenceStore`]s tell it what to write where.

mod file;
mod gaps;
mod trim;

use std::io;
use std::sync::Arc;

use drover_core::{CompactIndex, Digest, Head};
use drover_storage::Directory;

use crate::cuckoo::{CacheEntry, CuckooLru};
use crate::matcher::{CacheStats, MatcherConfig, MatcherContext, Repair, SequenceStore};
use crate::page::{PER_PAGE, Page};

pub(crate) use file::{HASH, Header, SIDE, SequenceFile, on_disk, record_offset};
pub(crate) use trim::Uses;

/// File number of the sequence cache's hash file in the page cache.
pub(crate) const FILE: u32 = u32::MAX;

/// Weak heads inside sequences are entered into C2 only while it is less full than this (percent).
const GUEST_PERCENT: usize = 50;

/// From this occupancy of C2 on (percent), sequences are stored without the parts already present.
const FILLING_PERCENT: usize = 75;

/// A long sequence has an entry for each of its blocks at a multiple of this position, head or not.
const FOUND_BY: usize = 128;

/// C2 and the hash file it points into.
pub(crate) struct SequenceCache {
    pub c2: CuckooLru,
    pub file: SequenceFile,
    pub stats: CacheStats,
    pub stored: u64,
    pub stored_blocks: u64,
    pub evicted: u64,
}

/// A digest found in the sequence cache.
#[derive(Debug)]
pub(crate) struct SequenceHit {
    pub slot: u64,
    pub page: Arc<Page>,
}

impl SequenceCache {
    pub(crate) fn open(
        storage: &dyn Directory,
        config: &MatcherConfig,
        repairs: &mut Vec<Repair>,
    ) -> io::Result<Self> {
        Ok(SequenceCache {
            c2: CuckooLru::new(
                config.c2_bytes,
                usize::MAX,
                config.sequence_layout.fingerprint_bits,
            ),
            file: SequenceFile::open(storage, config.sequence_limit, repairs)?,
            stats: CacheStats::default(),
            stored: 0,
            stored_blocks: 0,
            evicted: 0,
        })
    }

    /// A segment's page, if it is in memory.
    fn in_memory(&mut self, no: u32, shared: &mut MatcherContext) -> Option<Arc<Page>> {
        let changed = self.file.in_memory(no);
        changed.or_else(|| shared.pages.get((FILE, no)))
    }

    /// A segment's page; one that is damaged or unreadable is dropped and reported, and is empty from then on.
    pub(crate) fn page(&mut self, no: u32, shared: &mut MatcherContext) -> Arc<Page> {
        if let Some(page) = self.file.in_memory(no) {
            return page;
        }
        if let Some(page) = shared.pages.get((FILE, no)) {
            shared.stats.page_hits += 1;
            return page;
        }
        shared.stats.pages_read += 1;
        let Ok(page) = self.file.read(no) else {
            shared.damaged(Repair::SequencePage(u64::from(no)));
            self.file.empty(no);
            return Arc::new(Page::empty());
        };
        let page = Arc::new(page);
        shared.pages.put((FILE, no), Arc::clone(&page));
        page
    }

    /// Looks `digest` up; a hit moves to the top of its bucket.
    pub(crate) fn lookup(
        &mut self,
        digest: &Digest,
        shared: &mut MatcherContext,
    ) -> Option<SequenceHit> {
        self.stats.lookups += 1;
        let (hit, false_matches) = self.search(digest, shared);
        self.stats.false_matches += false_matches;
        self.stats.hits += u64::from(hit.is_some());
        hit
    }

    /// Whether C2 has an entry with the digest's fingerprint. No page is read.
    pub(crate) fn may_have(&self, digest: &Digest) -> bool {
        self.c2.may_contain(self.c2.key(digest))
    }

    /// Whether C2 or the file is so full that only new parts of sequences should be stored.
    pub(crate) fn is_filling(&self) -> bool {
        self.c2.len() * 100 >= self.c2.capacity() * FILLING_PERCENT || self.file.is_filling()
    }

    fn search(
        &mut self,
        digest: &Digest,
        shared: &mut MatcherContext,
    ) -> (Option<SequenceHit>, u64) {
        let mut false_matches = 0;
        let key = self.c2.key(digest);
        if !self.c2.may_contain(key) {
            return (None, 0);
        }
        for found in self.c2.candidates(key).as_slice() {
            let page = self.page(found.payload, shared);
            if let Some(i) = page.find(digest) {
                self.c2.touch(key, found.payload);
                let slot = u64::from(found.payload) * PER_PAGE as u64 + i as u64;
                return (Some(SequenceHit { slot, page }), false_matches);
            }
            false_matches += 1;
            if !self.explains(&page, *found) {
                self.c2.remove(key, found.payload);
            }
        }
        (None, false_matches)
    }

    /// Whether the page holds a digest that can belong to the entry.
    fn explains(&self, page: &Page, entry: CacheEntry) -> bool {
        page.any(|d| {
            self.c2.fingerprint(d) == entry.fingerprint
                && self.c2.same_entry(self.c2.key(d), entry.key())
        })
    }

    /// Stores a sequence that was just matched, in pieces that each fit a segment. `from` is its first block in
    /// the image being delivered, `hit` the block that was looked up. Entries are made for each
    /// piece's first block and every 128th from there, for strong heads and the hit, and, while C2 has plenty of
    /// space, for weak heads.
    pub(crate) fn store(
        &mut self,
        digests: &[Digest],
        heads: &[Head],
        from: CompactIndex,
        hit: usize,
        out: &mut Vec<SequenceStore>,
        shared: &mut MatcherContext,
    ) {
        let mut at = 0;
        while at < digests.len() {
            let n = (digests.len() - at).min(PER_PAGE);
            let Some(place) = self.file.place(n) else {
                return;
            };
            if place.recycled {
                self.recycle(place.segment, shared);
                self.file.reserve(place.segment, n);
            }
            let damage = shared.stats.corrupt_pages;
            let mut page = self.page(place.segment, shared);
            if shared.stats.corrupt_pages > damage {
                self.file.reserve(place.segment, place.offset + n);
            }
            let writable = Arc::make_mut(&mut page);
            let piece = at..at + n;
            writable.start.set(place.offset);
            for (i, (d, h)) in digests[piece.clone()]
                .iter()
                .zip(&heads[piece.clone()])
                .enumerate()
            {
                writable.set(place.offset + i, d);
                if *h == Head::Strong {
                    writable.strong.set(place.offset + i);
                }
            }
            self.file.change(place.segment, page);
            self.stored += 1;
            self.stored_blocks += n as u64;
            out.push(SequenceStore {
                first: u64::from(place.segment) * PER_PAGE as u64 + place.offset as u64,
                from: from + at as u64,
                count: n as u32,
            });
            for i in piece {
                let key = self.c2.key(&digests[i]);
                let nth = (i - at).is_multiple_of(FOUND_BY);
                if nth || i == hit || heads[i] == Head::Strong {
                    let out = self.c2.insert(key, place.segment);
                    self.pushed_out(out, shared);
                } else if heads[i] == Head::Weak
                    && self.c2.len() * 100 < self.c2.capacity() * GUEST_PERCENT
                {
                    self.c2.insert_in_room(key, place.segment);
                }
            }
            at += n;
        }
    }

    /// Handles an eviction from C2: a sequence without any other entry is evicted as well (§2.14), if that needs no
    /// page read. Otherwise its space is reused with its segment.
    fn pushed_out(&mut self, entry: Option<CacheEntry>, shared: &mut MatcherContext) {
        let Some(entry) = entry else { return };
        self.stats.evictions += 1;
        let no = entry.payload;
        let Some(page) = self.in_memory(no, shared) else {
            return;
        };
        for (slot, _) in page
            .iter()
            .filter(|(_, d)| self.c2.same_entry(self.c2.key(d), entry.key()))
        {
            let (from, to) = sequence_around(&page, slot);
            let reachable = (from..to)
                .filter_map(|i| page.get(i))
                .any(|d| self.c2.contains(self.c2.key(&d), no));
            if !reachable {
                self.evicted += 1;
                self.file.remove(no, from, to - from, &page);
            }
        }
    }

    /// Evicts everything in a segment that is about to be reused.
    fn recycle(&mut self, no: u32, shared: &mut MatcherContext) {
        let page = self.page(no, shared);
        self.evicted += u64::from(page.start.count());
        for (_, d) in page.iter() {
            let key = self.c2.key(&d);
            self.c2.remove(key, no);
        }
        self.file.empty(no);
    }

    /// Rebuilds C2 from the hash file: entries for each sequence's first block, every 128th from there, and strong
    /// heads.
    ///
    /// # Errors
    /// Storage errors while repairs are written.
    pub(crate) fn rebuild(&mut self, shared: &mut MatcherContext) -> io::Result<()> {
        self.c2.clear();
        for no in 0..self.file.segments() {
            let page = self.page(no, shared);
            let mut start = 0;
            for (i, d) in page.iter() {
                if page.start.get(i) {
                    start = i;
                }
                if !(i - start).is_multiple_of(FOUND_BY) && !page.strong.get(i) {
                    continue;
                }
                let out = self.c2.insert(self.c2.key(&d), no);
                self.pushed_out(out, shared);
            }
            if self.file.is_busy() {
                self.flush(shared)?;
            }
        }
        self.flush(shared)
    }

    /// Writes changes; discards them if that fails.
    pub(crate) fn flush_or_forget(&mut self, shared: &mut MatcherContext) -> bool {
        if self.flush(shared).is_ok() {
            return true;
        }
        for (no, page) in self.file.abandon() {
            for (_, d) in page.iter() {
                self.c2.remove(self.c2.key(&d), no);
            }
            shared.pages.forget(FILE, Some(no));
        }
        shared.report(Repair::SequencesNotWritten);
        false
    }

    /// Writes changes.
    pub(crate) fn flush(&mut self, shared: &mut MatcherContext) -> io::Result<()> {
        self.file
            .flush(|no, page| shared.pages.put((FILE, no), page))
    }
}

/// The sequence that contains `slot`: from its start bit to the next one or a free slot.
fn sequence_around(page: &Page, slot: usize) -> (usize, usize) {
    let belongs = |i: usize| page.used.get(i);
    let starts = |i: usize| page.start.get(i);
    let mut from = slot;
    while !starts(from) && from > 0 && belongs(from - 1) {
        from -= 1;
    }
    let mut to = slot + 1;
    while to < PER_PAGE && belongs(to) && !starts(to) {
        to += 1;
    }
    (from, to)
}

#[cfg(test)]
mod tests;
