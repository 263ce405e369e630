//! An encrypted vault: the same as a plain one for who has its key, nothing for who has not.

use super::*;
use crate::Secret;
use crate::testing::Fault;

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes()).unwrap()
}

fn open(objects: &MemoryObjects, text: &str) -> Result<Vault> {
    Vault::open_with(Arc::new(objects.clone()), &mut || Ok(secret(text)))
}

fn create(objects: &MemoryObjects) -> Vault {
    let first = secret("correct horse");
    Vault::create_encrypted_on(Arc::new(objects.clone()), &first, "the first").unwrap()
}

#[test]
fn what_is_backed_up_comes_back_and_the_store_knows_nothing_of_it() {
    let setting = Setting::new();
    let objects = MemoryObjects::default();
    let vault = create(&objects);
    let blocks: Vec<u32> = (1..5000).collect();
    let path = setting.image("secret-machine", &disk(&blocks));
    let backup = |vault: &Vault, time| {
        vault
            .backup_at(
                &path,
                &machine("secret-machine"),
                "secret-host",
                time,
                &mut |_| {},
            )
            .unwrap()
    };
    let one = backup(&vault, 100);
    let two = backup(&open(&objects, "correct horse\n").unwrap(), 200);
    assert_eq!(
        (two.record.new_bytes, two.record.root),
        (0, one.record.root)
    );
    let dir = setting.dir.path();
    assert!(restored(&vault, &two.id, dir).unwrap() == disk(&blocks));
    let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
    assert_eq!((report.snapshots, report.problems), (2, vec![]));
    // In place: what is there already is recognised by its keyed digests.
    let snapshot = vault.open_snapshot(&one.id).unwrap();
    let mut older = blocks.clone();
    older[7] = 90_000;
    older[9..100].fill(0);
    let target = setting.image("older", &disk(&older));
    let done = vault.restore(&snapshot, &target, &mut |_| {}).unwrap();
    assert_eq!(done.written_bytes, 92 * 4096);
    assert!(std::fs::read(&target).unwrap() == disk(&blocks));

    // A plain vault of the same has other roots, and neither names nor digests are in what is stored.
    let plain = setting
        .backup("secret-machine", &disk(&blocks), 100)
        .unwrap();
    assert_ne!(plain.record.root, one.record.root);
    let mut digests = Vec::new();
    drover_index::digest_blocks(&disk(&blocks[..1]), &mut digests);
    let keyed = &vault
        .open_snapshot(&one.id)
        .unwrap()
        .segment(0)
        .unwrap()
        .digests[0];
    assert_ne!(*keyed, digests[0]);
    for key in objects.keys() {
        assert!(!key.contains("secret"), "{key}");
        let bytes = crate::Objects::get(&objects, &key).unwrap().unwrap();
        let holds = |what: &[u8]| bytes.windows(what.len()).any(|w| w == what);
        assert!(!holds(b"secret-"), "{key}");
        assert!(!holds(&digests[0].0[..8]) && !holds(&keyed.0[..8]), "{key}");
    }
    vault.forget(&[one.id, two.id]).unwrap();
    vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    let left = objects.keys();
    assert!(left.len() == 2 && left[0].starts_with("keys/"), "{left:?}");
}

#[test]
fn keys_are_added_and_removed_without_writing_anything_again() {
    let objects = MemoryObjects::default();
    let vault = create(&objects);
    assert!(matches!(
        open(&objects, "wrong"),
        Err(VaultError::WrongKey(_))
    ));
    let plain = Vault::open_on(Arc::new(objects.clone()));
    assert!(matches!(plain, Err(VaultError::Encrypted(_))));
    let first = vault.keys().unwrap()[0].clone();
    assert!(first.is_used && first.label == "the first");
    assert!(matches!(
        vault.remove_key(first.id),
        Err(VaultError::LastKey(_))
    ));
    let second = vault.add_key(&secret("battery staple"), "other").unwrap();
    // Not the one that opened it: nobody knows whether the other one works.
    assert!(matches!(
        vault.remove_key(first.id),
        Err(VaultError::KeyInUse(_))
    ));
    let by_second = open(&objects, "battery staple").unwrap();
    assert_eq!(
        by_second
            .keys()
            .unwrap()
            .iter()
            .filter(|k| k.is_used)
            .count(),
        1
    );
    by_second.remove_key(first.id).unwrap();
    assert!(matches!(
        open(&objects, "correct horse"),
        Err(VaultError::WrongKey(_))
    ));
    assert!(matches!(
        by_second.remove_key(first.id),
        Err(VaultError::NoKey { .. })
    ));
    assert_eq!(by_second.keys().unwrap().len(), 1);
    // A key of one vault opens no other, whatever the store does.
    let other = MemoryObjects::default();
    create(&other);
    let key = format!("keys/{second}");
    let bytes = crate::Objects::get(&objects, &key).unwrap().unwrap();
    crate::Objects::create(&other, &key, bytes).unwrap();
    assert!(matches!(
        open(&other, "battery staple"),
        Err(VaultError::WrongKey(_))
    ));
    // No more than a vault may have, and none of a plain one.
    for n in 1..crate::keys::MAX_KEYS {
        by_second.add_key(&secret(&format!("key {n}")), "").unwrap();
    }
    assert!(matches!(
        by_second.add_key(&secret("one more"), ""),
        Err(VaultError::ManyKeys { .. })
    ));
    let long = "x".repeat(crate::keys::MAX_LABEL + 1);
    assert!(matches!(
        by_second.add_key(&secret("one more"), &long),
        Err(VaultError::LongLabel { .. })
    ));
    // What others added at the same time, or somebody else, does not keep it closed.
    let last = by_second.keys().unwrap()[1].id;
    let bytes = crate::Objects::get(&objects, &format!("keys/{last}"));
    let bytes = bytes.unwrap().unwrap();
    for n in 1..=crate::keys::MAX_KEYS as u64 {
        let key = format!("keys/{}", SessionId(n));
        crate::Objects::create(&objects, &key, bytes.clone()).unwrap();
    }
    assert!(open(&objects, "battery staple").is_ok());
    let setting = Setting::new();
    assert!(matches!(setting.vault().keys(), Err(VaultError::NoKeys(_))));
    for nothing in ["", "\n", "\r\n\n"] {
        assert!(Secret::new(nothing.as_bytes()).is_none());
    }
}

/// Two that open the vault with different keys, each removing that of the other: whatever is interleaved or fails, one
/// of the keys is left, and opens it.
#[test]
fn of_two_keys_that_are_removed_at_once_one_is_left() {
    let (mut both, mut one) = (0, 0);
    for at in 0..24 {
        for fault in [
            None,
            Some(Fault::Refuse),
            Some(Fault::LoseAnswer),
            Some(Fault::StopAfter),
        ] {
            let objects = MemoryObjects::default();
            let first = create(&objects).keys().unwrap()[0].id;
            let vault = open(&objects, "correct horse").unwrap();
            let second = vault.add_key(&secret("battery staple"), "").unwrap();
            let other = open(&objects, "battery staple").unwrap();
            let removed = Arc::new(parking_lot::Mutex::new(None));
            let its = removed.clone();
            let began = Arc::new(std::sync::atomic::AtomicU64::new(u64::MAX));
            let from = began.clone();
            let view = objects.with_hook(move |n, _| {
                let is_at = n
                    == from
                        .load(std::sync::atomic::Ordering::Relaxed)
                        .saturating_add(at);
                if is_at && its.lock().is_none() {
                    *its.lock() = Some(other.remove_key(first).is_ok());
                }
                fault.filter(|_| is_at)
            });
            let secret = secret("correct horse");
            let mine = Vault::open_with(Arc::new(view.clone()), &mut || Ok(secret.clone()));
            began.store(view.operations(), std::sync::atomic::Ordering::Relaxed);
            let mine = mine.unwrap().remove_key(second).is_ok();
            let theirs = *removed.lock();
            let opens = [
                open(&objects, "correct horse"),
                open(&objects, "battery staple"),
            ];
            let left: Vec<&Vault> = opens
                .iter()
                .filter_map(|opened| opened.as_ref().ok())
                .collect();
            assert!(!left.is_empty(), "{fault:?} at {at}: {mine} {theirs:?}");
            assert!(!(mine && theirs == Some(true)), "{fault:?} at {at}");
            both += usize::from(left.len() == 2);
            one += usize::from(left.len() == 1);
            if left.len() == 2 {
                // Marks that were left are void a day later.
                objects.advance(DAY + Duration::from_secs(1));
                opens[0].as_ref().unwrap().remove_key(second).unwrap();
                assert!(
                    !objects
                        .keys()
                        .iter()
                        .any(|key| key.starts_with("removing/"))
                );
            }
        }
    }
    assert!(both > 0 && one > 0, "{both} {one}");
}

/// A long object in the place of one that is read before anything is proved.
#[test]
fn no_more_of_a_record_is_read_than_one_may_have() {
    let objects = MemoryObjects::default();
    create(&objects);
    for key in objects.keys() {
        let copy = objects.copy();
        copy.damage(&key, |bytes| bytes.resize(100 << 20, 0));
        assert!(open(&copy, "correct horse").is_err(), "{key}");
        assert!(copy.most_read() < 1 << 20, "{key}");
    }
}

#[test]
fn every_flipped_byte_of_an_encrypted_vault_is_found_and_never_restored() {
    let setting = Setting::new();
    let objects = MemoryObjects::default();
    let vault = create(&objects);
    let wanted = disk(&(1..200).collect::<Vec<_>>());
    let path = setting.image("web", &wanted);
    let made = vault
        .backup_at(&path, &machine("web"), "host", 100, &mut |_| {})
        .unwrap();
    let mut rng = fastrand::Rng::with_seed(7);
    for key in objects.keys() {
        if key.starts_with("hooks/") {
            continue;
        }
        for _ in 0..10 {
            let copy = objects.copy();
            let mut at = 0;
            copy.damage(&key, |bytes| {
                at = rng.usize(..bytes.len());
                bytes[at] ^= 1 << rng.u8(..8);
            });
            let Ok(vault) = open(&copy, "correct horse") else {
                assert!(key == "vault" || key.starts_with("keys/"), "{key}");
                continue;
            };
            assert!(key != "vault", "byte {at}");
            let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
            assert!(!report.problems.is_empty(), "{key}, byte {at}");
            match restored(&vault, &made.id, setting.dir.path()) {
                Ok(bytes) => assert!(bytes == wanted, "{key}, byte {at}: wrong bytes restored"),
                Err(error) => assert!(!error.to_string().contains('\n')),
            }
        }
    }
}

/// Damage in one place of a container is that of the snapshots that use what is there, and of no other.
#[test]
fn damage_is_of_the_snapshots_that_use_what_is_damaged() {
    for is_encrypted in [false, true] {
        let setting = Setting::new();
        let objects = MemoryObjects::default();
        let vault = match is_encrypted {
            true => create(&objects),
            false => Vault::create_on(Arc::new(objects.clone())).unwrap(),
        };
        let backup = |blocks: std::ops::Range<u32>, time| {
            let path = setting.image("web", &disk(&blocks.collect::<Vec<_>>()));
            let made = vault.backup_at(&path, &machine("web"), "host", time, &mut |_| {});
            made.unwrap().id
        };
        // All of it, its first part, its last part: of one container.
        let all = backup(1..4000, 100);
        let (first, last) = (backup(1..1000, 200), backup(3000..4000, 300));
        let container = |key: &String| key.starts_with("containers/");
        let containers: Vec<_> = objects.keys().into_iter().filter(container).collect();
        assert_eq!(containers.len(), 1);
        for (from_the_end, hit) in [(false, &first), (true, &last)] {
            let copy = objects.copy();
            copy.damage(&containers[0], |bytes| {
                // Not the head, which takes 128 KiB, nor the pieces that it is in.
                let at = match from_the_end {
                    true => bytes.len() - 1000,
                    false => 200_000,
                };
                bytes[at] ^= 1;
            });
            let vault = match is_encrypted {
                true => open(&copy, "correct horse").unwrap(),
                false => Vault::open_on(Arc::new(copy)).unwrap(),
            };
            let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
            let affected: Vec<_> = report.problems.iter().flat_map(|p| &p.affected).collect();
            assert_eq!(affected, [&all, hit], "{is_encrypted} {from_the_end}");
        }
    }
}

/// A vault is created, or not, but never without a key; what is stored under another name is not taken for it.
#[test]
fn a_creation_that_is_interrupted_leaves_a_vault_with_a_key_or_none() {
    let mut runs = 0;
    for at in 0..20 {
        for fault in [
            Fault::Refuse,
            Fault::LoseAnswer,
            Fault::StopBefore,
            Fault::StopAfter,
        ] {
            let objects = MemoryObjects::default();
            let view = objects.with_hook(move |n, _| (n == at).then_some(fault));
            let made = Vault::create_encrypted_on(Arc::new(view), &secret("correct horse"), "");
            match open(&objects, "correct horse") {
                Ok(vault) => assert_eq!(vault.keys().unwrap().len(), 1),
                Err(VaultError::NoVault(_)) => {
                    assert!(made.is_err());
                    // What is left of it is in nobody's way.
                    let again = create(&objects.copy());
                    assert_eq!(again.keys().unwrap().len(), 1);
                }
                Err(error) => panic!("{fault:?} at {at}: {error}"),
            }
            runs += 1;
        }
    }
    println!("{runs} runs");

    let setting = Setting::new();
    let objects = MemoryObjects::default();
    let vault = create(&objects);
    let path = setting.image("web", &disk(&[1, 2, 3]));
    let backup = |name: &str, time| {
        let made = vault.backup_at(&path, &machine(name), "host", time, &mut |_| {});
        made.unwrap().id
    };
    backup("web", 100);
    backup("web", 200);
    // Lost hooks only cost time.
    for key in objects
        .keys()
        .iter()
        .filter(|key| key.starts_with("hooks/"))
    {
        objects.damage(key, |bytes| bytes[40] ^= 1);
    }
    let path_again = setting.image("again", &disk(&[3, 2, 1]));
    let again = vault.backup_at(&path_again, &machine("db"), "host", 300, &mut |_| {});
    assert_eq!(again.unwrap().record.new_bytes, 0);
    vault
        .forget(
            &vault
                .ids("snapshots", Some(&machine("db")))
                .unwrap()
                .into_iter()
                .collect::<Vec<_>>(),
        )
        .unwrap();
    vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    // The records of two snapshots exchanged by the store.
    let records: Vec<String> = objects
        .keys()
        .into_iter()
        .filter(|k| k.starts_with("snapshots/"))
        .collect();
    let get = |key: &String| crate::Objects::get(&objects, key).unwrap().unwrap();
    let (a, b) = (get(&records[0]), get(&records[1]));
    objects.damage(&records[0], |bytes| *bytes = b.to_vec());
    objects.damage(&records[1], |bytes| *bytes = a.to_vec());
    let (entries, damaged) = vault.snapshots(None).unwrap();
    assert_eq!((entries.len(), damaged.len()), (0, 2));
}
