//! What machines share: all, popular blocks, nothing.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::*;
use crate::{Share, SnapshotId};

fn create(share: Share) -> (Setting, MemoryObjects, Vault) {
    let objects = MemoryObjects::default();
    let vault = Vault::create_shared_on(Arc::new(objects.clone()), share, None).unwrap();
    (Setting::new(), objects, vault)
}

fn backup(setting: &Setting, vault: &Vault, name: &str, blocks: &[u32], time: i64) -> Backup {
    let path = setting.image(name, &disk(blocks));
    vault
        .backup_at(&path, &machine(name), "host", time, &mut |_| {})
        .unwrap()
}

/// The machines whose containers a snapshot uses.
fn owners(vault: &Vault, id: &SnapshotId) -> BTreeSet<String> {
    let uses = vault.uses_of(id).unwrap().unwrap();
    let owners = uses.containers.values();
    owners
        .map(|(machine, _)| machine.as_str().to_owned())
        .collect()
}

#[test]
fn without_sharing_a_lost_container_touches_one_machine() {
    let (setting, objects, vault) = create(Share::Nothing);
    let blocks: Vec<u32> = (1..800).collect();
    let one = backup(&setting, &vault, "a", &blocks, 100);
    let two = backup(&setting, &vault, "b", &blocks, 200);
    assert_eq!(two.record.new_bytes, one.record.new_bytes);
    // The machine's own blocks are found, wherever they were.
    let mut moved = blocks[300..].to_vec();
    moved.extend(&blocks[..300]);
    moved.push(90_000);
    let three = backup(&setting, &vault, "b", &moved, 300);
    assert_eq!(three.record.new_bytes, 4096);
    assert_eq!(owners(&vault, &three.id), BTreeSet::from(["b".to_owned()]));
    let refused = vault.popularize(2, &mut |_| {}).unwrap_err();
    assert!(matches!(refused, VaultError::NotPopular(_)), "{refused}");

    // Exactly what only this machine's snapshots have is freed.
    let freed = vault.would_free(std::slice::from_ref(&two.id)).unwrap();
    assert_eq!(freed.garbage_bytes, 0);
    let freed = vault.forget(&[two.id, three.id]).unwrap();
    assert_eq!(freed.garbage_bytes, 800 * 4096);
    vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    assert_eq!(vault.stats().unwrap().garbage_bytes, 0);

    let four = backup(&setting, &vault, "b", &blocks, 400);
    let lost = objects
        .keys()
        .into_iter()
        .find(|k| k.starts_with("containers/a/"));
    objects.lose(&lost.unwrap());
    let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
    assert_eq!(report.problems.len(), 1);
    assert_eq!(report.problems[0].affected, [one.id]);
    assert!(content(&vault, &four.id).unwrap() == disk(&blocks));
}

#[test]
fn popular_blocks_are_stored_for_all_and_kept_for_a_while() {
    let (setting, objects, vault) = create(Share::Popular);
    // 300 blocks are everywhere, 100 in two machines, 500 of each machine.
    let blocks = |n: u32| -> Vec<u32> {
        let some = 10_000 + n / 2 * 100;
        (1..301)
            .chain(some..some + 100)
            .chain(n * 1000 + 20_000..n * 1000 + 20_500)
            .collect()
    };
    let made: Vec<_> = (0..4)
        .map(|n| {
            backup(
                &setting,
                &vault,
                &format!("m{n}"),
                &blocks(n),
                100 + i64::from(n),
            )
        })
        .collect();
    assert!(made.iter().all(|made| made.record.new_bytes == 900 * 4096));
    // 300 + 2 * 100 + 4 * 500 different ones, but for those in one place of the table: 12 % are room for nearly 300.
    let done = vault.popularize(12, &mut |_| {}).unwrap();
    assert!((2490..=2500).contains(&done.different_blocks), "{done:?}");
    assert_eq!((done.machines, done.least_machines), (4, 4));
    let added = done.added_blocks;
    assert!((298..=300).contains(&added), "{done:?}");
    let again = vault.popularize(12, &mut |_| {}).unwrap();
    assert_eq!((again.known_blocks, again.added_blocks), (added, 0));
    // Not garbage, though nothing uses it yet.
    let collected = vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    assert_eq!((collected.removed, collected.compacted), (0, 0));
    let stats = vault.stats().unwrap();
    assert_eq!(
        (stats.popular_bytes, stats.garbage_bytes),
        (added * 4096, 0)
    );

    let new = backup(&setting, &vault, "m9", &blocks(9), 500);
    assert_eq!(new.record.new_bytes, (900 - added) * 4096);
    let both: BTreeSet<String> = ["@popular".to_owned(), "m9".to_owned()].into();
    assert_eq!(owners(&vault, &new.id), both);
    assert!(restored(&vault, &new.id, setting.dir.path()).unwrap() == disk(&blocks(9)));
    // More of them are added, and nothing is moved.
    let before: Vec<String> = objects.keys();
    let more = vault.popularize(100, &mut |_| {}).unwrap();
    assert_eq!((more.known_blocks, more.least_machines), (added, 2));
    assert!(
        (490 - added..=500 - added).contains(&more.added_blocks),
        "{more:?}"
    );
    let after = objects.keys();
    assert!(before.iter().all(|key| after.contains(key)));

    // In use, they stay for ever; otherwise for 30 days.
    objects.advance(DAY * 29);
    assert_eq!(
        vault.collect(Duration::ZERO, &mut |_| {}).unwrap().removed,
        0
    );
    objects.advance(DAY * 2);
    assert_eq!(
        vault.collect(Duration::ZERO, &mut |_| {}).unwrap().removed,
        1
    );
    assert!(content(&vault, &new.id).unwrap() == disk(&blocks(9)));
    let mut ids: Vec<_> = made.into_iter().map(|made| made.id).collect();
    ids.push(new.id);
    vault.forget(&ids).unwrap();
    vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    assert_eq!(objects.keys(), ["vault"]);
}

/// What is acknowledged and not forgotten comes back; references never leave the scope; a block that a machine never had
/// is new to it, unless it is popular; and all is gone in the end.
#[test]
fn as_a_plain_model() {
    for seed in 0..24u64 {
        let share = [Share::Nothing, Share::Popular, Share::All][seed as usize % 3];
        let (setting, objects, vault) = create(share);
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut kept: Vec<(SnapshotId, Vec<u32>)> = Vec::new();
        let mut had: BTreeMap<String, HashSet<u32>> = BTreeMap::new();
        for step in 0..30i64 {
            match rng.u8(..10) {
                0..6 => {
                    let name = format!("m{}", rng.u8(..4));
                    let from = rng.u32(1..200);
                    let mut blocks: Vec<u32> = (from..from + rng.u32(1..150)).collect();
                    blocks.extend((0..rng.u32(..30)).map(|_| rng.u32(1000..1_000_000)));
                    let made = backup(&setting, &vault, &name, &blocks, 100 + step);
                    let mine = had.entry(name.clone()).or_default();
                    let never = blocks
                        .iter()
                        .filter(|n| !mine.contains(n))
                        .collect::<HashSet<_>>();
                    let new = made.record.new_bytes / 4096;
                    match share {
                        Share::Nothing => assert!(new >= never.len() as u64, "seed {seed}"),
                        Share::Popular | Share::All => assert!(new <= blocks.len() as u64),
                    }
                    mine.extend(&blocks);
                    let scope: BTreeSet<String> = match share {
                        Share::Nothing => [name].into(),
                        Share::Popular => [name, "@popular".to_owned()].into(),
                        Share::All => (0..4).map(|n| format!("m{n}")).collect(),
                    };
                    assert!(owners(&vault, &made.id).is_subset(&scope), "seed {seed}");
                    kept.push((made.id, blocks));
                }
                6 if !kept.is_empty() => {
                    let (id, _) = kept.swap_remove(rng.usize(..kept.len()));
                    vault.forget(&[id]).unwrap();
                }
                7 if share == Share::Popular => {
                    vault.popularize(rng.u8(1..101), &mut |_| {}).unwrap();
                }
                _ => {
                    objects.advance(DAY * rng.u32(..20));
                    vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
                }
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
        let ids: Vec<_> = kept.into_iter().map(|(id, _)| id).collect();
        vault.forget(&ids).unwrap();
        objects.advance(DAY * 40);
        vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
        assert_eq!(objects.keys(), ["vault"], "seed {seed}");
    }
}

/// The figures of decision 0063: a fleet of twelve machines, each three versions.
#[test]
fn figures_of_a_fleet() {
    let mut stored = Vec::new();
    for share in [Share::All, Share::Popular, Share::Nothing] {
        let (setting, _, vault) = create(share);
        let mut rng = fastrand::Rng::with_seed(77);
        // Files of a system, of which each machine has most; and of its own.
        let mut disks: Vec<Vec<u32>> = (0..12u32)
            .map(|n| {
                let mut blocks = Vec::new();
                for file in 0..60u32 {
                    if rng.u8(..10) < 8 {
                        blocks.extend(file * 64 + 1..file * 64 + 1 + 16 + file % 48);
                    }
                }
                blocks.extend((0..600).map(|i| 1_000_000 * (n + 1) + i));
                blocks
            })
            .collect();
        let (mut raw, mut new) = (0, 0);
        for version in 0..3u32 {
            for (n, blocks) in disks.iter_mut().enumerate() {
                for _ in 0..40 {
                    let at = rng.usize(..blocks.len());
                    blocks[at] = rng.u32(100_000_000..);
                }
                let time = i64::from(version) * 100 + n as i64;
                let made = backup(&setting, &vault, &format!("m{n}"), blocks, time);
                (raw, new) = (raw + made.record.data_bytes, new + made.record.new_bytes);
                // The job, after some machines are there.
                if share == Share::Popular && version == 0 && n == 3 {
                    vault.popularize(20, &mut |_| {}).unwrap();
                }
            }
        }
        let stats = vault.stats().unwrap();
        println!(
            "{:7}: {} of {} MiB new, {} MiB popular, {} bytes of index",
            share.as_str(),
            new >> 20,
            raw >> 20,
            stats.popular_bytes >> 20,
            stats.index_bytes
        );
        stored.push(new + stats.popular_bytes);
    }
    assert!(stored[0] < stored[1] && stored[1] < stored[2], "{stored:?}");
}
