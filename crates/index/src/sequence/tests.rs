use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::page::Bits;
use drover_storage::FakeDirectory;

const SEGMENT: u64 = PER_PAGE as u64;

fn digest(n: u64) -> Digest {
    Digest(*blake3::hash(&n.to_le_bytes()).as_bytes()).short()
}

fn config(c2_bytes: usize, sequence_limit: u32) -> MatcherConfig {
    MatcherConfig {
        c2_bytes,
        sequence_limit,
        ..MatcherConfig::default()
    }
}

/// A sequence cache and, slot by slot, the data file of its destination.
struct World {
    storage: FakeDirectory,
    config: MatcherConfig,
    cache: SequenceCache,
    shared: MatcherContext,
    data: HashMap<u64, Digest>,
}

impl World {
    fn new(config: MatcherConfig) -> Self {
        let storage = FakeDirectory::default();
        let mut repairs = Vec::new();
        let cache = SequenceCache::open(&storage, &config, &mut repairs).unwrap();
        assert!(repairs.is_empty());
        World {
            storage,
            config,
            cache,
            shared: MatcherContext::new(config.cached_pages),
            data: HashMap::new(),
        }
    }

    /// Stores blocks `from..to`, every seventh of which is a strong head.
    fn store(&mut self, from: u64, to: u64) -> Vec<SequenceStore> {
        let digests: Vec<Digest> = (from..to).map(digest).collect();
        let heads: Vec<Head> = (from..to)
            .map(|n| if n % 7 == 0 { Head::Strong } else { Head::No })
            .collect();
        let mut stores = Vec::new();
        let (cache, shared) = (&mut self.cache, &mut self.shared);
        cache.store(&digests, &heads, CompactIndex(from), 0, &mut stores, shared);
        let mut next = from;
        for s in &stores {
            assert_eq!(s.from.0, next, "pieces are told in order");
            next += u64::from(s.count);
            let last = s.first + u64::from(s.count) - 1;
            assert_eq!(s.first / SEGMENT, last / SEGMENT, "inside a segment");
            assert!(last / SEGMENT < u64::from(self.config.sequence_limit));
            for k in 0..u64::from(s.count) {
                self.data.insert(s.first + k, digest(s.from.0 + k));
            }
        }
        assert_eq!(next, to, "all of it");
        stores
    }

    fn lookup(&mut self, n: u64) -> Option<u64> {
        let hit = self.cache.lookup(&digest(n), &mut self.shared)?;
        assert_eq!(
            self.data.get(&hit.slot),
            Some(&digest(n)),
            "what is found is there"
        );
        Some(hit.slot)
    }

    /// Checks that every slot marked as used in the hash file matches the data file.
    fn check(&mut self) -> usize {
        let mut used = 0;
        for no in 0..self.cache.file.segments() {
            let page = self.cache.page(no, &mut self.shared);
            assert!(page.used.covers(&page.start.or(page.strong)));
            for (i, d) in page.iter() {
                let slot = u64::from(no) * SEGMENT + i as u64;
                assert_eq!(self.data.get(&slot), Some(&d), "slot {slot}");
                used += 1;
            }
        }
        used
    }

    fn reopen(&mut self) {
        self.cache.flush(&mut self.shared).unwrap();
        let mut repairs = Vec::new();
        self.cache = SequenceCache::open(&self.storage, &self.config, &mut repairs).unwrap();
        assert!(repairs.is_empty(), "{repairs:?}");
        self.shared = MatcherContext::new(self.config.cached_pages);
        self.cache.rebuild(&mut self.shared).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn two_sequences_never_share_a_slot(
        lengths in proptest::collection::vec(1u64..800, 1..60),
        small_c2: bool,
        limit in 1u32..20,
        reopen in 0usize..60,
    ) {
        let c2 = if small_c2 { 256 } else { 64 << 10 };
        let mut w = World::new(config(c2, limit));
        let mut next = 0;
        for (i, len) in lengths.iter().enumerate() {
            let stores = w.store(next, next + len);
            // The newest one is found, unless its own strong heads evicted its entries from a tiny C2, or its own
            // later pieces took the place of the first.
            let last = stores.last().expect("stored").from.0;
            if !small_c2 {
                prop_assert!(w.lookup(last).is_some());
            }
            next += len;
            if i % 3 == 0 {
                w.cache.flush(&mut w.shared).unwrap();
            }
            if i == reopen {
                w.reopen();
            }
            w.check();
        }
        let used = w.check();
        prop_assert!(used <= limit as usize * PER_PAGE);
        w.reopen();
        let again = w.check();
        // Filling a tiny C2 evicts entries, and with them sequences.
        prop_assert!(if small_c2 { again <= used } else { again == used }, "{} of {}", again, used);
    }
}

#[test]
fn sequences_fill_the_tail_then_gaps_of_their_size() {
    let mut w = World::new(config(64 << 10, 100));
    let first = |s: Vec<SequenceStore>| s[0].first;
    assert_eq!(first(w.store(0, 312)), 0);
    assert_eq!(first(w.store(1000, 1020)), 312, "the rest of the segment");
    assert_eq!(
        first(w.store(2000, 2050)),
        340,
        "does not fit: a new segment, a gap of 8 stays"
    );
    assert_eq!(first(w.store(3000, 3007)), 390, "7 is not 8");
    assert_eq!(first(w.store(4000, 4008)), 332, "8 is");
    let long = w.store(5000, 5724);
    let pieces: Vec<(u64, u32)> = long.iter().map(|s| (s.first, s.count)).collect();
    assert_eq!(
        pieces,
        [(680, 340), (1020, 340), (397, 44)],
        "whole segments, then the rest"
    );
}

#[test]
fn what_c2_pushes_out_is_evicted_with_its_last_entry() {
    let mut w = World::new(config(1 << 10, 1000));
    let slots = w.cache.c2.capacity() as u64;
    // Each sequence has a first block and one or two strong heads.
    for i in 0..slots * 2 {
        w.store(i * 100, i * 100 + 10);
    }
    assert!(w.cache.evicted > 0);
    // Every remaining sequence is reachable; every unreachable one was evicted.
    let mut left = 0;
    for no in 0..w.cache.file.segments() {
        let page = w.cache.page(no, &mut w.shared);
        for slot in (0..PER_PAGE).filter(|i| page.start.get(*i)) {
            let (from, to) = sequence_around(&page, slot);
            assert_eq!((from, to - from), (slot, 10));
            let entries = (from..to)
                .filter_map(|i| page.get(i))
                .filter(|d| w.cache.c2.contains(w.cache.c2.key(d), no))
                .count();
            assert!(entries > 0, "segment {no} slot {slot}");
            left += 1;
        }
    }
    assert_eq!(left + w.cache.evicted, w.cache.stored);
    // Evictions freed space: the file holds little more than the remaining sequences.
    let used = w.check() as u64;
    assert_eq!(used, left * 10);
    assert!(u64::from(w.cache.file.segments()) * SEGMENT < used * 3 / 2 + 2 * SEGMENT);
}

#[test]
fn at_the_limit_the_oldest_segment_is_used_again() {
    let mut w = World::new(config(64 << 10, 3));
    for i in 0..3 {
        w.store(i * 1000, i * 1000 + SEGMENT);
    }
    assert_eq!(w.lookup(0), Some(0));
    let fourth = w.store(9000, 9100);
    assert_eq!((fourth[0].first, fourth[0].count), (0, 100));
    assert_eq!(w.lookup(0), None, "evicted with its segment");
    assert_eq!(w.lookup(1000), Some(SEGMENT));
    assert_eq!(
        w.store(9500, 9740)[0].first,
        100,
        "the rest of it is filled"
    );
    assert_eq!(w.store(9800, 9801)[0].first, SEGMENT);
    assert_eq!(w.lookup(1000), None);
    assert_eq!(w.cache.evicted, 2);
    w.check();
}

#[test]
fn start_bits_bound_a_sequence() {
    let mut page = Page::empty();
    page.used = Bits::range(0, 11);
    page.used.clear(3, 4);
    [0, 4, 8].into_iter().for_each(|i| page.start.set(i));
    assert_eq!(sequence_around(&page, 2), (0, 3));
    assert_eq!(sequence_around(&page, 4), (4, 8));
    assert_eq!(sequence_around(&page, 7), (4, 8));
    assert_eq!(sequence_around(&page, 10), (8, 11));
    page.used = Bits::range(0, PER_PAGE);
    assert_eq!(sequence_around(&page, 127), (8, PER_PAGE));
}

/// Where a stored sequence is found.
fn found_at(w: &mut World, n: u64) -> Option<u32> {
    Some((w.lookup(n)? / SEGMENT) as u32)
}

#[test]
fn trimming_frees_what_is_used_least_first_and_of_equals_the_oldest() {
    let mut w = World::new(config(64 << 10, 100));
    for i in 0..6 {
        w.store(i * 1000, i * 1000 + SEGMENT);
    }
    assert_eq!(w.cache.file.occupied(), 6);
    let mut uses = Uses::default();
    for (sequence, times) in [(1, 3), (4, 1)] {
        (0..times).for_each(|_| w.cache.count_uses(&digest(sequence * 1000), &mut uses));
    }
    let mut order = w.cache.by_use(&uses);
    order.reverse();
    assert_eq!(order, [0, 2, 3, 5, 4, 1]);
    assert!(w.cache.free(&order[..3], &mut w.shared));
    // Empty segments come first, up to the size of the destination's file.
    assert_eq!(w.cache.by_use(&uses), [1, 4, 5]);
    assert_eq!(w.cache.empty(8), [7, 6, 3, 2, 0]);
    assert_eq!(w.cache.file.occupied(), 3);
    for i in 0..6 {
        let gone = [0, 2, 3].contains(&i);
        assert_eq!(found_at(&mut w, i * 1000).is_none(), gone, "sequence {i}");
    }
    // Freed segments are reused before the file grows, also after a restart.
    w.reopen();
    assert_eq!(w.cache.file.occupied(), 3);
    assert_eq!(w.store(9000, 9000 + SEGMENT)[0].first, 0);
    assert_eq!(w.cache.file.segments(), 6);
    w.check();
}

#[test]
fn nothing_new_goes_to_what_is_held_back() {
    let mut w = World::new(config(64 << 10, 4));
    for i in 0..3 {
        w.store(i * 1000, i * 1000 + SEGMENT - 10);
    }
    assert_eq!(w.store(5000, 5010)[0].first / SEGMENT, 0);
    // The rest of a segment, a whole one, one that does not exist yet, and the one to be reused next.
    w.cache.file.hold(1);
    assert!(w.cache.free(&[1], &mut w.shared));
    w.cache.file.hold(3);
    w.cache.file.hold(0);
    assert_eq!(w.store(6000, 6010)[0].first / SEGMENT, 2);
    assert_eq!(found_at(&mut w, 0), Some(0));
    // No segment is left.
    w.cache.file.hold(2);
    let mut stores = Vec::new();
    let (cache, shared) = (&mut w.cache, &mut w.shared);
    cache.store(
        &[digest(7000)],
        &[Head::Strong],
        CompactIndex(0),
        0,
        &mut stores,
        shared,
    );
    assert_eq!(stores, []);
    w.cache.file.release(&[1, 3]);
    assert_eq!(w.store(8000, 8000 + SEGMENT)[0].first / SEGMENT, 1);
    assert_eq!(w.store(9000, 9000 + SEGMENT)[0].first / SEGMENT, 3);
    w.cache.file.release_all();
    w.store(10_000, 10_000 + SEGMENT);
    w.check();
}

#[test]
fn trimming_works_on_a_full_disk_and_says_when_it_cannot() {
    let mut w = World::new(config(64 << 10, 100));
    w.store(0, 2 * SEGMENT);
    w.cache.flush(&mut w.shared).unwrap();
    w.storage.set_capacity(Some(0));
    assert!(w.cache.free(&[0], &mut w.shared));
    w.storage.cut_power_at(w.storage.steps());
    assert!(!w.cache.free(&[1], &mut w.shared));
}

#[test]
fn trimming_to_a_lower_limit_is_for_good() {
    let mut w = World::new(config(64 << 10, 100));
    for i in 0..6 {
        w.store(i * 1000, i * 1000 + SEGMENT);
    }
    w.config.sequence_limit = 2;
    w.reopen();
    assert_eq!((w.cache.file.segments(), w.cache.file.occupied()), (2, 2));
    w.config.sequence_limit = 100;
    w.reopen();
    assert_eq!((w.cache.file.segments(), w.cache.file.occupied()), (2, 2));
    for i in 0..6 {
        assert_eq!(w.lookup(i * 1000).is_some(), i < 2, "sequence {i}");
    }
    w.check();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// What trimming frees agrees with a plain table, and the remaining sequences are found as before.
    #[test]
    fn trimming_at_any_moment_leaves_what_is_left_whole(
        lengths in proptest::collection::vec(1u64..800, 1..40),
        trims in proptest::collection::vec((0usize..40, 0u32..12), 0..6),
        limit in 2u32..20,
    ) {
        let mut w = World::new(config(64 << 10, limit));
        let mut next = 0;
        for (i, len) in lengths.iter().enumerate() {
            w.store(next, next + len);
            next += len;
            for (_, keep) in trims.iter().filter(|(at, _)| *at == i) {
                let held = (0..w.cache.file.segments())
                    .filter(|no| !w.cache.page(*no, &mut w.shared).used.is_empty())
                    .count() as u32;
                prop_assert_eq!(w.cache.file.occupied(), held);
                let mut order = w.cache.by_use(&Uses::default());
                let over = held.saturating_sub(*keep) as usize;
                let least = order.split_off(order.len() - over);
                prop_assert!(w.cache.free(&least, &mut w.shared));
                prop_assert_eq!(w.cache.file.occupied(), held.min(*keep));
                for no in least {
                    prop_assert!(w.cache.page(no, &mut w.shared).used.is_empty());
                }
            }
            w.check();
        }
        let used = w.check();
        w.reopen();
        prop_assert_eq!(w.check(), used);
    }
}
