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
    assert!(by_second.add_key(&secret("one more"), "").is_err());
    let setting = Setting::new();
    assert!(matches!(setting.vault().keys(), Err(VaultError::NoKeys(_))));
    for nothing in ["", "\n", "\r\n\n"] {
        assert!(Secret::new(nothing.as_bytes()).is_none());
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
