//! The most recent images' hash files, and C0 and C1, which find blocks in them
//! (teleportation §2.10, §2.13).

mod numbers;

use std::sync::Arc;

use drover_core::Digest;

use crate::cuckoo::{CuckooLru, Key};
use crate::hash_file::{Damaged, HashFile};
use crate::matcher::{
    AnchorPolicy, CacheStats, ImageId, MatcherConfig, MatcherContext, Repair, Via,
};
use crate::page::{PER_PAGE, Page};
pub(crate) use numbers::{Numbers, Region};

/// One of the recent images.
pub(crate) struct Slot {
    pub image: ImageId,
    pub file: HashFile,
    /// Whether a cursor is open on it.
    pub open: bool,
    /// Increases with every image that begins or is recalled: the lowest gives up its slot first.
    pub used: u64,
}

/// C0, C1, and the images that their entries can refer to.
pub(crate) struct Recent {
    pub c0: CuckooLru,
    pub c1: CuckooLru,
    pub c0_stats: CacheStats,
    pub c1_stats: CacheStats,
    pub slots: Vec<Option<Slot>>,
    /// Numbers of the slots' pages in entries.
    pub numbers: Numbers,
    anchors: AnchorPolicy,
}

/// A digest found in a recent image.
pub(crate) struct RecentHit {
    pub slot: u8,
    /// Compact index.
    pub index: u64,
    pub page: Arc<Page>,
    pub via: Via,
    key: Key,
    payload: u32,
}

/// In which caches a block is looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lookup {
    pub strong: bool,
    /// It is a head of either kind.
    pub head: bool,
    /// It is the block after the end of a match.
    pub boundary: bool,
}

impl Recent {
    pub(crate) fn new(config: &MatcherConfig) -> Self {
        let layout = config.recent_layout;
        let c1 = CuckooLru::new(config.c1_bytes, usize::MAX, layout.fingerprint_bits);
        // Entries evicted from C1 enter C0 without their digests, so C0's parts must not be larger than C1's.
        let c0 = CuckooLru::new(config.c0_bytes, c1.part_bytes(), layout.fingerprint_bits);
        Recent {
            c0,
            c1,
            c0_stats: CacheStats::default(),
            c1_stats: CacheStats::default(),
            slots: (0..1usize << layout.file_bits).map(|_| None).collect(),
            numbers: Numbers::new(layout.file_bits, layout.address_bits),
            anchors: config.anchors,
        }
    }

    pub(crate) fn slot_of(&self, image: ImageId) -> Option<u8> {
        let at = self
            .slots
            .iter()
            .position(|s| s.as_ref().is_some_and(|s| s.image == image))?;
        Some(at as u8)
    }

    pub(crate) fn slot(&self, slot: u8) -> Option<&Slot> {
        self.slots.get(usize::from(slot))?.as_ref()
    }

    pub(crate) fn slot_mut(&mut self, slot: u8) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(slot))?.as_mut()
    }

    /// Removes an image and all entries that refer to it.
    pub(crate) fn release(&mut self, slot: u8, shared: &mut MatcherContext) -> Option<Slot> {
        let gone = self.slots.get_mut(usize::from(slot))?.take()?;
        self.sweep(slot);
        shared.pages.forget(u32::from(slot), None);
        Some(gone)
    }

    /// Removes all entries that refer to a slot.
    pub(crate) fn sweep(&mut self, slot: u8) {
        let numbers = &self.numbers;
        let keep = |payload: u32| numbers.page(payload).is_some_and(|(s, _)| s != slot);
        self.c0.retain(keep);
        self.c1.retain(keep);
        self.numbers.take_back(slot);
    }

    /// The payload of an entry for a block of a slot. Blocks beyond the range that entries can address are not
    /// entered.
    fn payload(&mut self, slot: u8, index: u64, digest: &Digest) -> Option<u32> {
        let page = index / PER_PAGE as u64;
        let number = match self.numbers.find(slot, page) {
            Some(number) => number,
            None => self.number(slot, page)?,
        };
        Some(self.numbers.payload(number, digest))
    }

    /// Assigns a number to a page. If numbers grow by a bit, entries lose a bit of their digests.
    fn number(&mut self, slot: u8, page: u64) -> Option<u32> {
        let before = self.numbers.used_bits();
        let given = self.numbers.give(slot, page);
        let taken = (before..self.numbers.used_bits()).fold(0, |bits, i| bits | 1 << i);
        if taken != 0 {
            self.c0.clear_bits(taken);
            self.c1.clear_bits(taken);
        }
        given.then(|| self.numbers.find(slot, page)).flatten()
    }

    /// A page of a recent image. `None` past its end; a page that is damaged or unreadable is reported and treated as
    /// empty from then on.
    pub(crate) fn page(
        &mut self,
        slot: u8,
        no: u64,
        shared: &mut MatcherContext,
    ) -> Option<Arc<Page>> {
        let s = self.slots.get_mut(usize::from(slot))?.as_mut()?;
        if !s.file.is_settled(no) {
            return s.file.page(no).ok().flatten().map(Arc::new);
        }
        let key = (u32::from(slot), u32::try_from(no).ok()?);
        if let Some(page) = shared.pages.get(key) {
            shared.stats.page_hits += 1;
            return Some(page);
        }
        shared.stats.pages_read += 1;
        let page = match s.file.page(no) {
            Ok(page) => page?,
            Err(Damaged) => {
                shared.damaged(Repair::ImagePage(s.image, no));
                Page::empty()
            }
        };
        let page = Arc::new(page);
        shared.pages.put(key, Arc::clone(&page));
        Some(page)
    }

    /// Looks `digest` up, in C1 first.
    pub(crate) fn lookup(
        &mut self,
        digest: &Digest,
        ask: Lookup,
        shared: &mut MatcherContext,
    ) -> Option<RecentHit> {
        let key1 = self.c1.key(digest);
        self.c1_stats.lookups += 1;
        if self.c1.may_contain(key1)
            && let Some(hit) = self.verify(Via::C1, key1, digest, shared)
        {
            return Some(hit);
        }
        self.c0_stats.lookups += 1;
        // Entries evicted from C1 are not at the place in C0 that their digest gives.
        if ask.strong || ask.boundary {
            let adopted = self.c0.adopted_key(key1);
            if self.c0.may_contain(adopted)
                && let Some(hit) = self.verify(Via::C0, adopted, digest, shared)
            {
                return Some(hit);
            }
        }
        if ask.strong {
            return None;
        }
        let key0 = self.c0.key(digest);
        if !self.c0.may_contain(key0) {
            return None;
        }
        let via = if ask.head { Via::C0 } else { Via::Anchor };
        self.verify(via, key0, digest, shared)
    }

    fn cache(&mut self, via: Via) -> (&mut CuckooLru, &mut CacheStats) {
        match via {
            Via::C1 => (&mut self.c1, &mut self.c1_stats),
            _ => (&mut self.c0, &mut self.c0_stats),
        }
    }

    /// Reads the pages to which entries with the fingerprint point.
    fn verify(
        &mut self,
        via: Via,
        key: Key,
        digest: &Digest,
        shared: &mut MatcherContext,
    ) -> Option<RecentHit> {
        let candidates = self.cache(via).0.candidates(key);
        for found in candidates.as_slice() {
            if !self.numbers.agrees(found.payload, digest) {
                continue;
            }
            let place = self.numbers.page(found.payload);
            let page = place.and_then(|(slot, no)| Some((slot, no, self.page(slot, no, shared)?)));
            let Some((slot, no, page)) = page else {
                self.cache(via).0.remove(key, found.payload);
                continue;
            };
            if let Some(i) = page.find(digest) {
                self.cache(via).1.hits += 1;
                return Some(RecentHit {
                    slot,
                    index: no * PER_PAGE as u64 + i as u64,
                    page,
                    via,
                    key,
                    payload: found.payload,
                });
            }
            self.cache(via).1.false_matches += 1;
            // An entry that matches no digest of its page is stale or damaged.
            if !self.explains(via, &page, key) {
                self.cache(via).0.remove(key, found.payload);
            }
        }
        None
    }

    fn explains(&self, via: Via, page: &Page, key: Key) -> bool {
        page.any(|d| {
            if self.c0.fingerprint(d) != key.fingerprint {
                return false;
            }
            let key1 = self.c1.key(d);
            match via {
                Via::C1 => self.c1.same_entry(key1, key),
                _ => {
                    self.c0.same_entry(self.c0.key(d), key)
                        || self.c0.same_entry(self.c0.adopted_key(key1), key)
                }
            }
        })
    }

    /// Marks the entry as used.
    pub(crate) fn touch(&mut self, hit: &RecentHit) {
        self.cache(hit.via).0.touch(hit.key, hit.payload);
    }

    /// Inserts a strong head, or the block at which a match ended, into C1; an entry evicted by it moves to C0.
    pub(crate) fn insert_c1(&mut self, digest: &Digest, slot: u8, index: u64) {
        let Some(payload) = self.payload(slot, index, digest) else {
            return;
        };
        let Some(out) = self.c1.insert(self.c1.key(digest), payload) else {
            return;
        };
        self.c1_stats.evictions += 1;
        let key = self.c0.adopted_key(out.key());
        let out = self.c0.insert(key, out.payload);
        self.c0_stats.evictions += u64::from(out.is_some());
    }

    /// Inserts a weak head into C0.
    pub(crate) fn insert_c0(&mut self, digest: &Digest, slot: u8, index: u64) {
        if let Some(payload) = self.payload(slot, index, digest) {
            let out = self.c0.insert(self.c0.key(digest), payload);
            self.c0_stats.evictions += u64::from(out.is_some());
        }
    }

    /// How full C0 is, in percent of its limit for anchors; 100 when anchors are disabled.
    fn filled_for_anchors(&self) -> usize {
        match self.anchors {
            AnchorPolicy::Off => 100,
            AnchorPolicy::FreeSlots { stop_percent, .. } => {
                let allowed = self.c0.capacity() * usize::from(stop_percent) / 100;
                self.c0.len() * 100 / allowed.max(1)
            }
        }
    }

    /// Whether anchors are still admitted.
    pub(crate) fn has_room_for_anchors(&self) -> bool {
        self.filled_for_anchors() < 100
    }

    /// Inserts a block that is no head into C0 if there is space for anchors; returns whether it was admitted.
    ///
    /// The fuller C0 is, the fewer are admitted, selected by their digests.
    pub(crate) fn insert_anchor(&mut self, digest: &Digest, slot: u8, index: u64) -> bool {
        let shift = match self.filled_for_anchors() {
            0..70 => 0,
            70..85 => 1,
            85..93 => 2,
            93..100 => 3,
            _ => return false,
        };
        sampled(digest, shift)
            && self
                .payload(slot, index, digest)
                .is_some_and(|p| self.c0.insert_in_room(self.c0.key(digest), p))
    }
}

/// Selects one in `2^shift` digests (at most one in 2^16).
pub(crate) fn sampled(digest: &Digest, shift: u8) -> bool {
    let bits = u16::from_le_bytes([digest.0[8], digest.0[9]]);
    bits.trailing_zeros() >= u32::from(shift)
}
