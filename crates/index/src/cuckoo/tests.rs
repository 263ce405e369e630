use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;

fn digest(n: u64) -> Digest {
    Digest(*blake3::hash(&n.to_le_bytes()).as_bytes())
}

fn small() -> CuckooLru {
    CuckooLru::new(3 * 64 * BUCKET_BYTES, usize::MAX, 8)
}

#[test]
fn budgets_that_are_no_power_of_two_are_used_up() {
    for mib in [1, 3, 4, 5, 7, 12, 16, 24, 48, 100] {
        let c = CuckooLru::new(mib << 20, usize::MAX, 8);
        assert_eq!(c.bytes(), mib << 20, "{mib} MiB");
    }
    let odd = CuckooLru::new(10_000_000, usize::MAX, 8);
    assert!(odd.bytes() > 9_700_000, "{}", odd.bytes());
    assert_eq!(CuckooLru::new(12 << 20, 4 << 20, 8).parts, 3);
    assert_eq!(CuckooLru::new(16 << 20, 4 << 20, 8).parts, 4);
}

fn save(c: &CuckooLru) -> Vec<u8> {
    let mut saved = Vec::new();
    let sink = |b: &[u8]| {
        saved.extend_from_slice(b);
        Ok::<_, ()>(())
    };
    c.save(sink).unwrap();
    saved
}

/// Loads from bytes as if zeros followed them.
fn load(c: &mut CuckooLru, mut bytes: &[u8]) {
    let source = |b: &mut [u8]| {
        let (now, rest) = bytes.split_at(b.len().min(bytes.len()));
        b.fill(0);
        b[..now.len()].copy_from_slice(now);
        bytes = rest;
        Ok::<_, ()>(())
    };
    c.load(source).unwrap();
}

/// The cache's guarantees over random operations: nothing is found that was not inserted or was removed; nothing
/// inserted is missing unless it was returned as evicted.
#[derive(Debug, Clone)]
enum Op {
    Insert(u64),
    InRoom(u64),
    Touch(u64),
    Remove(u64),
    RetainEven,
    SaveLoad,
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0u64..2000;
    prop_oneof![
        20 => n.clone().prop_map(Op::Insert),
        8 => n.clone().prop_map(Op::InRoom),
        4 => n.clone().prop_map(Op::Touch),
        4 => n.prop_map(Op::Remove),
        1 => Just(Op::RetainEven),
        1 => Just(Op::SaveLoad),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn agrees_with_a_plain_map(ops in proptest::collection::vec(op(), 0..3000)) {
        let mut cache = small();
        // Entry -> digest number, where entries are identified as far as a cache can distinguish them.
        let ident = |c: &CuckooLru, f: CacheEntry| {
            let other = c.other(f.bucket, f.fingerprint);
            (f.bucket.min(other), f.fingerprint, f.payload)
        };
        let found = |c: &CuckooLru, n: u64| {
            let k = c.key(&digest(n));
            CacheEntry { bucket: k.bucket, fingerprint: k.fingerprint, payload: n as u32 }
        };
        let mut model: HashMap<(u32, u32, u32), u64> = HashMap::new();
        for o in ops {
            match o {
                Op::Insert(n) => {
                    let out = cache.insert(cache.key(&digest(n)), n as u32);
                    model.insert(ident(&cache, found(&cache, n)), n);
                    if let Some(out) = out {
                        prop_assert!(model.remove(&ident(&cache, out)).is_some(), "pushed out what was not there");
                    }
                }
                Op::InRoom(n) => {
                    let before = cache.len();
                    if cache.insert_in_room(cache.key(&digest(n)), n as u32) {
                        model.insert(ident(&cache, found(&cache, n)), n);
                    } else {
                        prop_assert_eq!(before, cache.len());
                    }
                }
                Op::Touch(n) => {
                    let key = cache.key(&digest(n));
                    cache.touch(key, n as u32);
                    if let Some((b, at)) = cache.position(key, n as u32) {
                        prop_assert_eq!(at, 0, "on top of bucket {}", b);
                    }
                }
                Op::Remove(n) => {
                    let was = model.remove(&ident(&cache, found(&cache, n))).is_some();
                    prop_assert_eq!(cache.remove(cache.key(&digest(n)), n as u32), was);
                }
                Op::RetainEven => {
                    cache.retain(|p| p % 2 == 0);
                    model.retain(|_, n| *n % 2 == 0);
                }
                Op::SaveLoad => {
                    let mut again = small();
                    load(&mut again, &save(&cache));
                    prop_assert_eq!(&again.buckets, &cache.buckets);
                    prop_assert_eq!(&again.guests.0, &cache.guests.0);
                    cache = again;
                }
            }
            prop_assert_eq!(cache.len(), model.len());
        }
        for n in 0..2000 {
            let key = cache.key(&digest(n));
            let there = cache.candidates(key).as_slice().iter().any(|f| f.payload == n as u32);
            prop_assert_eq!(there, model.contains_key(&ident(&cache, found(&cache, n))), "{}", n);
            prop_assert!(!there || cache.may_contain(key));
        }
        // Free slots are at the end of each bucket.
        for b in &cache.buckets {
            let used = b.0.iter().take_while(|e| **e != 0).count();
            prop_assert!(b.0[used..].iter().all(|e| *e == 0));
            prop_assert_eq!(used, b.used());
        }
    }

    #[test]
    fn any_snapshot_loads(bytes in proptest::collection::vec(any::<u8>(), 0..4000)) {
        let mut c = small();
        load(&mut c, &bytes);
        let n = c.buckets.iter().map(Bucket::used).sum::<usize>();
        prop_assert_eq!(c.len(), n);
        for n in 0..500 {
            c.insert(c.key(&digest(n)), n as u32);
        }
        c.retain(|_| false);
        prop_assert_eq!(c.len(), 0);
        prop_assert!(c.guests.0.iter().all(|g| *g == 0));
    }
}

/// §2.8 reports 93 %.
#[test]
fn load_factor_before_the_first_eviction() {
    for bytes in [1 << 20, 3 << 20] {
        let mut c = CuckooLru::new(bytes, 1 << 20, 8);
        let mut n = 0;
        while c.insert(c.key(&digest(n)), n as u32 & 0xff_ffff).is_none() {
            n += 1;
        }
        let load = c.len() as f64 / c.capacity() as f64;
        eprintln!("load factor before the first eviction: {load:.4}");
        assert!(load > 0.93, "{load}");
        // It keeps filling up after that.
        for n in n..n + c.capacity() as u64 {
            c.insert(c.key(&digest(n)), n as u32 & 0xff_ffff);
        }
        let full = c.len() as f64 / c.capacity() as f64;
        eprintln!("load factor in the long run: {full:.4}");
        assert!(full > 0.97, "{full}");
    }
}

/// §2.12 computes 8/256 = 3 %.
#[test]
fn false_matches_in_a_full_cache() {
    let mut c = CuckooLru::new(3 << 20, 1 << 20, 8);
    for n in 0..2 * c.capacity() as u64 {
        c.insert(c.key(&digest(n)), n as u32 & 0xff_ffff);
    }
    let asked = 400_000u64;
    let matched: usize = (0..asked)
        .map(|n| c.candidates(c.key(&digest(1 << 40 | n))).as_slice().len())
        .sum();
    let rate = matched as f64 / asked as f64;
    eprintln!("false matches per lookup: {rate:.4}");
    assert!((0.025..0.035).contains(&rate), "{rate}");
}

/// Compares evictions with true LRU: a skewed load on a cache that holds a quarter of the working set.
#[test]
fn eviction_is_close_to_lru() {
    let mut c = CuckooLru::new(48 << 10, usize::MAX, 8);
    let capacity = c.capacity();
    let mut rng = fastrand::Rng::with_seed(3);
    let (mut lru, mut stamp) = (HashMap::new(), VecDeque::new());
    let (mut ours, mut theirs, mut oldest_first) = (0u32, 0u32, 0u32);
    let asked = 400_000u64;
    for t in 0..asked {
        let u = rng.f64();
        let n = (u * u * u * capacity as f64 * 4.0) as u64;
        let key = c.key(&digest(n));
        if c.contains(key, n as u32) {
            ours += 1;
            c.touch(key, n as u32);
        } else if let Some(out) = c.insert(key, n as u32) {
            // The evicted entry was used less recently than half of all entries.
            let mut ages: Vec<u64> = Vec::new();
            if t % 50 == 0 {
                ages.extend(lru.values().copied());
                ages.sort_unstable();
                let age = lru.get(&u64::from(out.payload)).copied().unwrap_or(0);
                oldest_first += u32::from(ages.get(ages.len() / 2).is_none_or(|m| age <= *m));
            }
        }
        theirs += u32::from(lru.insert(n, t).is_some());
        stamp.push_back((n, t));
        while lru.len() > capacity {
            let (n, t) = stamp.pop_front().expect("every use is stamped");
            if lru.get(&n) == Some(&t) {
                lru.remove(&n);
            }
        }
    }
    let share = f64::from(ours) / f64::from(theirs);
    eprintln!("hits compared with true LRU: {share:.3}; older half first: {oldest_first}");
    assert!(share > 0.95, "{share}");
    assert!(oldest_first > 0);
}

#[test]
fn anchors_go_first() {
    let mut c = CuckooLru::new(64 << 10, usize::MAX, 8);
    let anchors = c.capacity() as u64 / 2;
    let heads = c.capacity() as u64 * 3 / 4;
    let admitted = (0..anchors)
        .filter(|&n| c.insert_in_room(c.key(&digest(n)), n as u32))
        .count() as u64;
    assert!(admitted > anchors * 95 / 100, "{admitted} of {anchors}");
    let mut heads_lost = 0;
    for n in anchors..anchors + heads {
        let out = c.insert(c.key(&digest(n)), n as u32);
        heads_lost += usize::from(out.is_some_and(|o| u64::from(o.payload) >= anchors));
    }
    let kept = c.len();
    eprintln!(
        "heads lost: {heads_lost} of {heads}, kept {kept} of {}",
        c.capacity()
    );
    assert!(kept as f64 > c.capacity() as f64 * 0.95);
    eprintln!("heads lost: {heads_lost} of {heads}");
    // With heads alone the cache would be three quarters full and lose none.
    assert!(heads_lost < heads as usize / 100, "{heads_lost} of {heads}");
}

#[test]
fn an_entry_moves_between_caches_without_its_digest() {
    let c1 = CuckooLru::new(1 << 20, usize::MAX, 8);
    let c0 = CuckooLru::new(3 << 20, c1.part_bytes(), 8);
    for n in 0..5000 {
        let k = c1.key(&digest(n));
        let from_first = c0.adopted_key(k);
        let from_second = c0.adopted_key(Key {
            bucket: c1.other(k.bucket, k.fingerprint),
            ..k
        });
        assert_eq!(
            from_first.bucket,
            c0.other(from_second.bucket, from_second.fingerprint),
            "both buckets of C1 lead to the same pair of C0"
        );
        assert!((from_first.bucket as usize) < c0.buckets.len());
    }
}
