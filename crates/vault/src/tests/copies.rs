//! A vault and its copy: what moves, what an interruption leaves, and how each mends the other.

use super::crash::{FAULTS, Wanted, is_whole};
use super::*;
use crate::{Secret, SnapshotId};

fn open(objects: &MemoryObjects) -> Vault {
    Vault::open_on(Arc::new(objects.clone())).unwrap()
}

fn copy_on(vault: &Vault, objects: &MemoryObjects) -> Vault {
    vault.copy_on(Arc::new(objects.clone()), true).unwrap()
}

fn copy(vault: &Vault, to: &Vault) -> crate::Copied {
    vault.copy(to, false, &mut |_| {}).unwrap()
}

/// Every snapshot of a vault, by name and time, with what is restored of it.
fn all(vault: &Vault) -> Vec<(String, Vec<u8>)> {
    let (entries, damaged) = vault.snapshots(None).unwrap();
    assert_eq!(damaged, []);
    let content = |id: &SnapshotId| (id.to_string(), content(vault, id).unwrap());
    entries.iter().map(|entry| content(&entry.id)).collect()
}

fn is_good(vault: &Vault) {
    let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
    assert_eq!(report.problems, []);
}

#[test]
fn a_copy_moves_only_what_is_missing() {
    let setting = Setting::new();
    let vault = setting.vault();
    let contents = [
        disk(&(1..6000).collect::<Vec<_>>()),
        disk(&(3000..6500).collect::<Vec<_>>()),
        disk(&(1..7000).step_by(3).collect::<Vec<_>>()),
    ];
    for (n, content) in contents.iter().enumerate() {
        setting
            .backup(&format!("m{n}"), content, 100 + n as i64)
            .unwrap();
    }
    let other = MemoryObjects::default();
    let to = copy_on(&vault, &other);
    let done = copy(&vault, &to);
    assert_eq!((done.snapshots, done.there, done.problems.len()), (3, 0, 0));
    assert_eq!(done.containers, vault.stats().unwrap().containers);
    assert!(all(&to) == all(&vault));
    is_good(&to);
    // Without claims or holds that are left, and with the hooks: nothing is new to a backup there.
    let keys = other.keys();
    let left = |kind: &str| keys.iter().filter(|key| key.starts_with(kind)).count();
    assert_eq!((left("claims/"), left("probe/")), (0, 0));
    assert_eq!(left("hooks/"), 3);
    assert!(
        !setting
            .objects
            .keys()
            .iter()
            .any(|k| k.starts_with("held/"))
    );
    let image = setting.image("m0", &contents[0]);
    let made = to
        .backup_at(&image, &machine("m0"), "host", 500, &mut |_| {})
        .unwrap();
    assert_eq!(made.record.new_bytes, 0);

    let again = copy(&vault, &to);
    assert_eq!((again.snapshots, again.there, again.moved_bytes), (0, 3, 0));
    setting.backup("m9", &disk(&[7, 8, 90_000]), 600).unwrap();
    let more = copy(&vault, &to);
    assert_eq!((more.snapshots, more.there, more.containers), (1, 3, 1));
    // And back: the vault gets what was made at the copy.
    assert_eq!(copy(&to, &vault).snapshots, 1);
    assert!(all(&to) == all(&vault));
}

/// Neither place brings back what was deleted in the other, unless that is asked for.
#[test]
fn what_was_deleted_in_one_place_stays_so() {
    for is_encrypted in [false, true] {
        let setting = Setting::new();
        let vault = match is_encrypted {
            false => setting.vault(),
            true => {
                let secret = Secret::new(b"correct").unwrap();
                let objects = Arc::new(MemoryObjects::default());
                Vault::create_encrypted_on(objects, &secret, "first").unwrap()
            }
        };
        let make = |n: u32, time| {
            let image = setting.image("web", &disk(&[n, n + 1]));
            let made = vault.backup_at(&image, &machine("web"), "host", time, &mut |_| {});
            made.unwrap().id
        };
        // Before there is a copy, nothing is remembered.
        vault.forget(&[make(5, 50)]).unwrap();
        assert_eq!(vault.objects.list("dropped").unwrap(), []);
        let (one, two) = (make(10, 100), make(20, 200));
        let other = MemoryObjects::default();
        let to = copy_on(&vault, &other);
        assert_eq!(copy(&vault, &to).snapshots, 2);
        let there = to.snapshots(None).unwrap().0;
        to.forget(std::slice::from_ref(&there[0].id)).unwrap();
        to.collect(Duration::ZERO, &mut |_| {}).unwrap();
        vault.forget(std::slice::from_ref(&two)).unwrap();
        vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
        make(30, 300);
        let done = copy(&vault, &to);
        assert_eq!((done.snapshots, done.there, done.dropped), (1, 0, 1));
        let back = copy(&to, &vault);
        assert_eq!((back.snapshots, back.there, back.dropped), (0, 1, 1));
        // Deleted in both: neither has it.
        vault.forget(std::slice::from_ref(&one)).unwrap();
        assert_eq!(copy(&vault, &to).dropped, 0);
        // It is wanted after all, and from then on there like others.
        let done = to.copy(&vault, true, &mut |_| {}).unwrap();
        assert_eq!((done.snapshots, done.dropped), (1, 0));
        assert_eq!(copy(&to, &vault).there, 2);
        is_good(&to);
        is_good(&vault);
        let names: Vec<i64> = all_times(&vault);
        assert_eq!(names, [200, 300]);
        assert!(
            !other
                .keys()
                .iter()
                .any(|key| key.contains("dropped/web") && is_encrypted)
        );
    }
}

fn all_times(vault: &Vault) -> Vec<i64> {
    let entries = vault.snapshots(None).unwrap().0;
    entries.iter().map(|entry| entry.id.time).collect()
}

/// Each is compacted by itself; what one lacks then comes from the other, under the same ids.
#[test]
fn containers_that_were_compacted_differently_are_put_together() {
    let setting = Setting::new();
    let vault = setting.vault();
    let one = setting
        .backup("a", &disk(&(1..3000).collect::<Vec<_>>()), 100)
        .unwrap();
    let low = disk(&(1..1000).collect::<Vec<_>>());
    let high = disk(&(2000..3000).collect::<Vec<_>>());
    let two = setting.backup("low", &low, 200).unwrap();
    let other = MemoryObjects::default();
    let to = copy_on(&vault, &other);
    copy(&vault, &to);
    // At the copy, only the low blocks are left; here, only the high ones.
    let three = setting.backup("high", &high, 300).unwrap();
    assert_eq!(three.record.new_bytes, 0);
    vault.forget(&[one.id.clone(), two.id.clone()]).unwrap();
    assert_eq!(
        vault
            .collect(Duration::ZERO, &mut |_| {})
            .unwrap()
            .compacted,
        1
    );
    let there: Vec<_> = to.snapshots(Some(&machine("a"))).unwrap().0;
    to.forget(std::slice::from_ref(&there[0].id)).unwrap();
    assert_eq!(
        to.collect(Duration::ZERO, &mut |_| {}).unwrap().compacted,
        1
    );

    let done = copy(&vault, &to);
    assert_eq!(
        (done.snapshots, done.containers, done.problems),
        (1, 1, vec![])
    );
    is_good(&to);
    let names: Vec<_> = all(&to).into_iter().map(|(_, bytes)| bytes).collect();
    assert!(names == [high, low]);
    // One container, one generation of it.
    let containers = other
        .keys()
        .into_iter()
        .filter(|k| k.starts_with("containers/"));
    assert_eq!(containers.count(), 1);
}

#[test]
fn a_copy_of_an_encrypted_vault_has_its_keys() {
    let setting = Setting::new();
    let (objects, other) = (MemoryObjects::default(), MemoryObjects::default());
    let secret = |text: &str| Secret::new(text.as_bytes()).unwrap();
    let vault =
        Vault::create_encrypted_on(Arc::new(objects.clone()), &secret("correct"), "first").unwrap();
    vault.add_key(&secret("battery"), "second").unwrap();
    let wanted = disk(&(1..900).collect::<Vec<_>>());
    let image = setting.image("secret-machine", &wanted);
    vault
        .backup_at(&image, &machine("secret-machine"), "host", 100, &mut |_| {})
        .unwrap();
    let to = copy_on(&vault, &other);
    assert_eq!(copy(&vault, &to).snapshots, 1);
    assert!(!other.keys().iter().any(|key| key.contains("secret")));
    let by = |text: &str| Vault::open_with(Arc::new(other.clone()), &mut || Ok(secret(text)));
    for text in ["correct", "battery"] {
        assert!(all(&by(text).unwrap()) == all(&vault));
    }
    assert!(matches!(by("horse"), Err(VaultError::WrongKey(_))));
    is_good(&to);
    // Flipped bits and lost objects, of an encrypted copy.
    let key = other
        .keys()
        .into_iter()
        .find(|k| k.starts_with("containers/"))
        .unwrap();
    other.damage(&key, |bytes| bytes[70_000] ^= 1);
    let report = to
        .check_and_repair(Checking::Full, Some(&vault), &mut |_, _| {})
        .unwrap();
    assert_eq!((report.repaired.len(), report.problems), (1, vec![]));
    assert!(all(&to) == all(&vault));
}

#[test]
fn another_vault_is_no_copy() {
    let (one, two) = (Setting::new(), Setting::new());
    let refused = one.vault().copy_on(Arc::new(two.objects.clone()), true);
    assert!(matches!(refused, Err(VaultError::OtherVault { .. })));
    let empty = MemoryObjects::default();
    let none = one.vault().copy_on(Arc::new(empty.clone()), false);
    assert!(matches!(none, Err(VaultError::NoVault(_))));
    assert_eq!(empty.keys(), Vec::<String>::new());
}

/// A copy that is stopped at every operation there, in four ways: what is there is whole, and the next one completes it,
/// at once or after a collection has tidied up days later.
#[test]
fn a_copy_that_is_stopped_at_every_operation_goes_on() {
    let setting = Setting::new();
    let vault = setting.vault();
    let first = disk(&(1..600).collect::<Vec<_>>());
    let second = disk(&(300..1200).collect::<Vec<_>>());
    setting.backup("one", &first, 100).unwrap();
    let other = MemoryObjects::default();
    copy(&vault, &copy_on(&vault, &other));
    setting.backup("two", &second, 200).unwrap();
    let kept = open(&other).snapshots(None).unwrap().0[0].id.clone();
    let mut runs = 0;
    for fault in FAULTS {
        for at in 0.. {
            let there = other.copy();
            let view = there.with_hook(move |number, _| (number == at).then_some(fault));
            let done = vault
                .copy_on(Arc::new(view.clone()), false)
                .and_then(|to| vault.copy(&to, false, &mut |_| {}));
            let what = format!("{fault:?} at {at}");
            let wanted: Wanted = vec![(kept.clone(), first.clone())];
            is_whole(&there, &wanted, &second, &what);
            for days in [0, 2] {
                let there = there.copy();
                there.advance(DAY * days);
                if days > 0 {
                    open(&there).collect(Duration::ZERO, &mut |_| {}).unwrap();
                    is_whole(&there, &wanted, &second, &what);
                }
                let to = copy_on(&vault, &there);
                let again = copy(&vault, &to);
                assert_eq!(
                    (again.problems.len(), again.snapshots + again.there),
                    (0, 2),
                    "{what}"
                );
                assert!(all(&to) == all(&vault), "{what}");
                assert!(done.is_err() || again.snapshots == 0, "{what}");
            }
            runs += 1;
            if view.operations() <= at {
                assert!(done.is_ok(), "{what}");
                break;
            }
        }
    }
    println!("{runs} runs, 0 lost");
    assert!(runs > 80, "{runs}");
}

/// Before every operation on either side, a collection runs there, or a snapshot that is being copied is forgotten.
#[test]
fn collections_on_both_sides_hollow_out_no_copy() {
    let setting = Setting::new();
    for (n, name) in ["a", "b", "c"].into_iter().enumerate() {
        let from = 1 + 400 * n as u32;
        let blocks: Vec<u32> = (from..from + 900).collect();
        setting
            .backup(name, &disk(&blocks), 100 + n as i64)
            .unwrap();
    }
    let before = all(&setting.vault());
    let mut runs = 0;
    for at in 0.. {
        let (here, there) = (setting.objects.copy(), MemoryObjects::default());
        copy_on(&open(&here), &there);
        let disturb = |objects: &MemoryObjects, which: u64| {
            let vault = open(objects);
            let mut ids: Vec<_> = vault.snapshots(None).unwrap().0;
            if which == 0 && ids.len() == 3 {
                // Refused if it is held by the copy: then it stays.
                let _ = vault.forget(&[ids.remove(0).id]);
            }
            vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
        };
        let (h, t) = (here.clone(), there.clone());
        let from = here.with_hook(move |number, _| {
            if number == at {
                disturb(&h, 0);
            }
            None
        });
        let to = there.with_hook(move |number, _| {
            if number == at || number == at + 7 {
                disturb(&t, 1);
            }
            None
        });
        let vault = Vault::open_on(Arc::new(from.clone())).unwrap();
        let target = vault.copy_on(Arc::new(to.clone()), false).unwrap();
        let done = vault.copy(&target, false, &mut |_| {}).unwrap();
        assert_eq!(done.problems, [], "{at}");
        open(&there).collect(Duration::ZERO, &mut |_| {}).unwrap();
        is_good(&open(&there));
        let left = all(&open(&here));
        let copied = all(&open(&there));
        assert!(left.iter().all(|entry| copied.contains(entry)), "{at}");
        assert!(copied.iter().all(|entry| before.contains(entry)), "{at}");
        runs += 1;
        if from.operations() <= at && to.operations() <= at {
            break;
        }
    }
    println!("{runs} runs, 0 lost");
}

/// Any one object of a copy lost, cut off, or with a flipped bit: the vault mends it.
#[test]
fn every_object_that_is_damaged_or_lost_is_repaired_from_a_copy() {
    let setting = Setting::new();
    let vault = setting.vault();
    let contents = [
        disk(&(1..400).collect::<Vec<_>>()),
        disk(&(200..900).collect::<Vec<_>>()),
    ];
    setting.backup("one", &contents[0], 100).unwrap();
    setting.backup("two", &contents[1], 200).unwrap();
    let other = MemoryObjects::default();
    copy(&vault, &copy_on(&vault, &other));
    let whole = all(&vault);
    let mut rng = fastrand::Rng::with_seed(3);
    for key in other.keys() {
        // A cache; and without this nothing opens.
        if key.starts_with("hooks/") || key == "vault" {
            continue;
        }
        for damage in 0..6 {
            let damaged = other.copy();
            match damage {
                0 => damaged.lose(&key),
                1 => damaged.damage(&key, |bytes| bytes.truncate(bytes.len() / 2)),
                _ => damaged.damage(&key, |bytes| {
                    let at = rng.usize(..bytes.len());
                    bytes[at] ^= 1 << rng.u8(..8);
                }),
            }
            let to = open(&damaged);
            let what = format!("{key}, {damage}");
            let report = to
                .check_and_repair(Checking::Full, Some(&vault), &mut |_, _| {})
                .unwrap();
            assert_eq!(report.problems, [], "{what}");
            // A record that is lost is not missed, but copied again.
            let is_lost = damage == 0 && key.starts_with("snapshots/");
            // That there are copies is said again by the next one.
            let is_word = key == "copied";
            assert_eq!(
                report.repaired.len(),
                usize::from(!is_lost && !is_word),
                "{what}"
            );
            assert_eq!(copy(&vault, &to).snapshots, u64::from(is_lost), "{what}");
            assert!(all(&to) == whole, "{what}");
            is_good(&to);
            // Nothing that is left stands in the way of deletion, once the grace is over.
            damaged.advance(DAY * 2);
            to.collect(DAY, &mut |_| {}).unwrap();
            assert!(all(&to) == whole, "{what}");
        }
    }
    // A copy that has it damaged as well mends nothing, and makes nothing worse.
    let key = other
        .keys()
        .into_iter()
        .find(|k| k.starts_with("containers/"))
        .unwrap();
    let (bad, worse) = (other.copy(), other.copy());
    bad.damage(&key, |bytes| *bytes.last_mut().unwrap() ^= 1);
    worse.lose(&key);
    let report = open(&bad)
        .check_and_repair(Checking::Full, Some(&open(&worse)), &mut |_, _| {})
        .unwrap();
    assert_eq!((report.problems.len(), report.repaired.len()), (1, 0));
    // Half of it is better than nothing; the rest comes from a third one.
    let report = open(&worse)
        .check_and_repair(Checking::Full, Some(&open(&bad)), &mut |_, _| {})
        .unwrap();
    assert_eq!((report.problems.len(), report.repaired.len()), (1, 1));
    let report = open(&worse)
        .check_and_repair(Checking::Full, Some(&vault), &mut |_, _| {})
        .unwrap();
    assert_eq!((report.problems.len(), report.repaired.len()), (0, 1));
    assert!(all(&open(&worse)) == whole);
}

/// A container that is damaged in one place, of which the copy has some blocks only: nothing that is good is thrown away.
#[test]
fn what_is_good_of_a_damaged_container_is_kept() {
    let secret = || Secret::new(b"correct").unwrap();
    // Which blocks the copy has, where the container is damaged, and whether the copy has all that is lost.
    let flip = |at: usize| move |bytes: &mut Vec<u8>| bytes[at] ^= 1;
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() - 100);
    let longer = |bytes: &mut Vec<u8>| bytes.extend([7; 100]);
    type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);
    let cases: [(bool, Range<u32>, Damage<'_>, bool); 8] = [
        (true, 1..1000, &flip(140_000), true),
        (true, 1..1000, &flip(300_000), true),
        (true, 2000..3000, &flip(300_000), false),
        (true, 2000..3000, &cut, true),
        (true, 2000..3000, &longer, true),
        (false, 2000..3000, &cut, true),
        (false, 1..1000, &cut, false),
        (false, 1..1000, &longer, true),
    ];
    for (n, (is_encrypted, part, damage, is_mended)) in cases.into_iter().enumerate() {
        let setting = Setting::new();
        let objects = match is_encrypted {
            true => MemoryObjects::default(),
            false => setting.objects.clone(),
        };
        let vault = match is_encrypted {
            true => Vault::create_encrypted_on(Arc::new(objects.clone()), &secret(), "a").unwrap(),
            false => open(&objects),
        };
        let backup = |name: &str, blocks: Range<u32>, time| {
            let image = setting.image(name, &disk(&blocks.collect::<Vec<_>>()));
            let made = vault.backup_at(&image, &machine(name), "host", time, &mut |_| {});
            made.unwrap().id
        };
        let whole = backup("a", 1..3000, 100);
        let some = backup("b", part, 200);
        let before = all(&vault);
        let to = copy_on(&vault, &MemoryObjects::default());
        copy(&vault, &to);
        let there = to.snapshots(Some(&whole.machine)).unwrap().0;
        to.forget(&[there[0].id.clone()]).unwrap();
        let collected = to.collect(Duration::ZERO, &mut |_| {}).unwrap();
        assert_eq!(collected.compacted, 1, "{n}");
        let keys = objects.keys();
        let mut containers = keys.iter().filter(|k| k.starts_with("containers/"));
        objects.damage(containers.next().unwrap(), damage);
        let report = vault
            .check_and_repair(Checking::Full, Some(&to), &mut |_, _| {})
            .unwrap();
        let found = (report.repaired.len(), report.problems.len());
        match is_mended {
            true => {
                assert_eq!(found, (1, 0), "{n}");
                assert!(all(&vault) == before, "{n}");
                is_good(&vault);
            }
            // What the copy has is good here as well: it is not put in place of all.
            false => {
                assert_eq!(found, (0, 1), "{n}");
                assert!(content(&vault, &some).unwrap() == before[1].1, "{n}");
                let (file, good) = (
                    &before[0].1,
                    SnapshotFile::new(vault.open_snapshot(&whole).unwrap()),
                );
                let mut read = vec![0; 1000 * 4096];
                good.read_exact_at(&mut read, 1000 * 4096).unwrap();
                assert!(read[..] == file[1000 * 4096..2000 * 4096], "{n}");
            }
        }
    }
}
