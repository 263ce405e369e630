//! Snapshots that are compared with the latest one of their machine.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::Share;

/// Blocks of a segment.
const SEGMENT: usize = 512;

fn backup(setting: &Setting, vault: &Vault, blocks: &[u32], time: i64) -> Backup {
    let path = setting.image("web", &disk(blocks));
    vault
        .backup_at(&path, &machine("web"), "host", time, &mut |_| {})
        .unwrap()
}

/// How often a view of a store touches containers.
fn counted(objects: &MemoryObjects) -> (MemoryObjects, Arc<AtomicU64>) {
    let count = Arc::<AtomicU64>::default();
    let counter = count.clone();
    let view = objects.with_hook(move |_, key| {
        let touched = key.starts_with("containers/");
        counter.fetch_add(u64::from(touched), Ordering::Relaxed);
        None
    });
    (view, count)
}

#[test]
fn what_is_the_same_needs_no_look_into_containers() {
    let setting = Setting::new();
    let mut blocks: Vec<u32> = (1..9000).collect();
    blocks[3000..4500].fill(0);
    let first = backup(&setting, &setting.vault(), &blocks, 100);
    let (view, touched) = counted(&setting.objects);
    let vault = Vault::open_on(Arc::new(view)).unwrap();
    let second = backup(&setting, &vault, &blocks, 200);
    assert_eq!(touched.load(Ordering::Relaxed), 0);
    assert_eq!(second.record.root, first.record.root);
    assert_eq!(second.record.data_bytes, first.record.data_bytes);
    assert_eq!(second.record.new_bytes, 0);
    assert!(content(&setting.vault(), &second.id).unwrap() == disk(&blocks));
    // One block more, at the end of a segment in the middle.
    blocks[SEGMENT * 9 - 1] = 70_000;
    let third = backup(&setting, &vault, &blocks, 300);
    assert_eq!(third.record.new_bytes, 4096);
    // The containers of that window, and the new one.
    assert!(touched.load(Ordering::Relaxed) <= 3);
    assert!(content(&vault, &third.id).unwrap() == disk(&blocks));
    let mixed = vault.uses_of(&third.id).unwrap().unwrap();
    let whole: u32 = mixed
        .containers
        .values()
        .map(|(_, used)| used.count())
        .sum();
    assert_eq!(u64::from(whole) * 4096, third.record.data_bytes);
}

/// Disks whose blocks are changed here and there, moved, removed and added, in many versions: no block is stored again
/// that was in the same segment before, none is taken for known that never was, and every version comes back.
#[test]
fn as_a_plain_model() {
    let (mut data, mut new, mut changed) = (0, 0, 0);
    for seed in 0..18u64 {
        let share = [Share::All, Share::Popular, Share::Nothing][seed as usize % 3];
        let setting = Setting::new();
        let objects = MemoryObjects::default();
        let vault = Vault::create_shared_on(Arc::new(objects.clone()), share, None).unwrap();
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut next = 1u32;
        let mut fresh = || {
            next += 1;
            next
        };
        let mut blocks: Vec<u32> = (0..rng.usize(1000..5000)).map(|_| fresh()).collect();
        let mut had: HashSet<u32> = HashSet::new();
        let mut before: Vec<u32> = Vec::new();
        let mut kept = Vec::new();
        for version in 0..10i64 {
            for _ in 0..rng.usize(..60) {
                // Pages of a database, in one place of the disk.
                let at = rng.usize(..blocks.len().min(1500));
                blocks[at] = if rng.u8(..9) == 0 { 0 } else { fresh() };
            }
            match rng.u8(..6) {
                0 => {
                    let (from, to) = (rng.usize(..blocks.len() / 2), rng.usize(..blocks.len() / 2));
                    let end = from + blocks.len() / 3;
                    blocks.copy_within(from..end, to);
                }
                1 => blocks.truncate(rng.usize(blocks.len() / 2..blocks.len())),
                2 => blocks.extend((0..rng.usize(..900)).map(|_| fresh())),
                _ => {}
            }
            let made = backup(&setting, &vault, &blocks, 100 + version);
            let mut most = 0;
            for (n, segment) in blocks.chunks(SEGMENT).enumerate() {
                let old = before.chunks(SEGMENT).nth(n).unwrap_or_default();
                let old: HashSet<&u32> = old.iter().collect();
                most += segment
                    .iter()
                    .filter(|n| **n != 0 && !old.contains(n))
                    .count() as u64;
            }
            let never: BTreeSet<_> = blocks
                .iter()
                .filter(|n| **n != 0 && !had.contains(n))
                .collect();
            let stored = made.record.new_bytes / 4096;
            let what = format!("seed {seed}, version {version}: {stored} stored");
            assert!(
                stored >= never.len() as u64 && stored <= most,
                "{what}, {most} at most"
            );
            if version > 0 {
                data += made.record.data_bytes / 4096;
                changed += never.len() as u64;
                new += stored;
            }
            had.extend(&blocks);
            before.clone_from(&blocks);
            kept.push((made.id, blocks.clone()));
            if rng.u8(..5) == 0 {
                let (id, _) = kept.swap_remove(rng.usize(..kept.len()));
                vault.forget(&[id]).unwrap();
                objects.advance(DAY * rng.u32(..3));
                vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
                // The latest one may be gone, and what only it had.
                let latest = kept.iter().max_by_key(|(id, _)| id.time);
                before = latest.map(|(_, blocks)| blocks.clone()).unwrap_or_default();
            }
        }
        for (id, blocks) in &kept {
            assert!(
                content(&vault, id).unwrap() == disk(blocks),
                "seed {seed}: {id}"
            );
        }
        let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
        assert_eq!(report.problems, [], "seed {seed}");
    }
    println!("{data} blocks, {changed} different new ones, {new} stored");
}

#[test]
fn a_parent_whose_container_is_lost_is_not_taken_over() {
    let setting = Setting::new();
    let blocks: Vec<u32> = (1..6000).collect();
    let first = backup(&setting, &setting.vault(), &blocks, 100);
    let keys = setting.objects.keys();
    let lost = keys
        .iter()
        .find(|key| key.starts_with("containers/"))
        .unwrap();
    setting.objects.lose(lost);
    let again = backup(&setting, &setting.vault(), &blocks, 200);
    assert!(again.record.new_bytes > 0);
    assert!(content(&setting.vault(), &again.id).unwrap() == disk(&blocks));
    assert!(content(&setting.vault(), &first.id).is_err());
}

#[test]
fn a_damaged_parent_is_not_needed() {
    let setting = Setting::new();
    let blocks: Vec<u32> = (1..3000).collect();
    backup(&setting, &setting.vault(), &blocks, 100);
    for key in setting.objects.keys() {
        if key.starts_with("recipes/") {
            let copy = setting.objects.copy();
            copy.damage(&key, |bytes| bytes[50] ^= 1);
            let vault = Vault::open_on(Arc::new(copy)).unwrap();
            let made = backup(&setting, &vault, &blocks, 200);
            assert_eq!(made.record.new_bytes, 0, "{key}");
            assert!(content(&vault, &made.id).unwrap() == disk(&blocks), "{key}");
        }
    }
}
