use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;

use super::*;

/// Random calls on one directory against plain vectors.
fn behaves(directory: &dyn Directory, seed: u64) {
    let mut rng = Rng::with_seed(seed);
    let file = directory.create("a").unwrap();
    let mut model: Vec<u8> = Vec::new();
    for _ in 0..300 {
        let offset = rng.u64(0..20_000);
        let length = rng.u64(0..9_000);
        let range = |model: &Vec<u8>| {
            let end = (offset + length).min(model.len() as u64) as usize;
            (offset as usize).min(end)..end
        };
        match rng.u8(0..6) {
            0 | 1 => {
                let data: Vec<u8> = (0..length).map(|_| rng.u8(1..)).collect();
                file.write_at(&data, offset).unwrap();
                if length > 0 {
                    let end = (offset + length) as usize;
                    model.resize(model.len().max(end), 0);
                    model[offset as usize..end].copy_from_slice(&data);
                }
            }
            2 => {
                file.punch_hole(offset, length).unwrap();
                let range = range(&model);
                model[range].fill(0);
            }
            3 if rng.bool() => {
                file.set_len(length).unwrap();
                model.resize(length as usize, 0);
            }
            4 => match file.allocate(offset, length) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                result => result.unwrap(),
            },
            _ => file.sync().unwrap(),
        }
        assert_eq!(file.len().unwrap(), model.len() as u64, "seed {seed}");
        assert_eq!(file.is_empty().unwrap(), model.is_empty());
        let mut buffer = vec![9; length as usize];
        let count = file.read_at(&mut buffer, offset).unwrap();
        assert!(buffer[..count] == model[range(&model)], "seed {seed}");
        let exact = read_exact_at(file.as_ref(), &mut buffer, offset);
        assert_eq!(exact.is_ok(), count == buffer.len(), "seed {seed}");
    }
}

fn names_behave(directory: &dyn Directory) {
    let not_found = |result: io::Result<()>| {
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::NotFound);
    };
    not_found(directory.open("a", Access::Write).map(drop));
    not_found(directory.remove("a"));
    not_found(directory.rename("a", "b"));
    let file = directory.create("a").unwrap();
    file.write_at(b"one", 0).unwrap();
    directory.create("b").unwrap().write_at(b"two", 0).unwrap();
    directory.rename("a", "b").unwrap();
    assert_eq!(directory.list().unwrap(), ["b"]);
    let mut buffer = [0; 3];
    let reader = directory.open("b", Access::Read).unwrap();
    read_exact_at(reader.as_ref(), &mut buffer, 0).unwrap();
    assert_eq!(&buffer, b"one");
    assert!(reader.write_at(b"x", 0).is_err(), "opened for reading");
    directory.remove("b").unwrap();
    file.write_at(b"uno", 0).unwrap();
    read_exact_at(reader.as_ref(), &mut buffer, 0).unwrap();
    assert_eq!(&buffer, b"uno", "removed but open");
    directory.create("c").unwrap().write_at(b"x", 0).unwrap();
    assert!(directory.create("c").unwrap().is_empty().unwrap());
    directory.sync().unwrap();
    for name in ["", ".", "..", "a/b", "/etc/passwd", "a\0b"] {
        let error = directory.create(name).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name:?}");
    }
    let taken = |result: io::Result<Box<dyn Send + Sync>>| {
        assert_eq!(
            result.map(drop).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
    };
    let one = directory.lock("lock", Lock::Exclusive).unwrap();
    taken(directory.lock("lock", Lock::Exclusive));
    taken(directory.lock("lock", Lock::Shared));
    drop(one);
    let shared = directory.lock("lock", Lock::Shared).unwrap();
    let second = directory.lock("lock", Lock::Shared).unwrap();
    taken(directory.lock("lock", Lock::Exclusive));
    drop((shared, second));
    directory.lock("lock", Lock::Exclusive).unwrap();
}

#[test]
fn a_lock_is_free_at_once_whatever_is_forked() {
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};

    let dir = tempfile::tempdir().unwrap();
    let directory = HostDirectory::open(dir.path()).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    Command::new("true").status().unwrap();
                }
            });
        }
        let taken = (0..3000).find(|_| directory.lock("lock", Lock::Exclusive).is_err());
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(taken, None);
    });
}

#[test]
fn the_host_and_the_fake_behave_alike() {
    for seed in 0..6 {
        let dir = tempfile::tempdir().unwrap();
        behaves(&HostDirectory::open(dir.path()).unwrap(), seed);
        behaves(
            &FakeDirectory::new([512, 4096][seed as usize % 2], seed),
            seed,
        );
    }
    let dir = tempfile::tempdir().unwrap();
    names_behave(&HostDirectory::open_or_create(&dir.path().join("x/y")).unwrap());
    names_behave(&FakeDirectory::default());
}

#[test]
fn a_link_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let outside = tempfile::NamedTempFile::new().unwrap();
    std::os::unix::fs::symlink(outside.path(), dir.path().join("a")).unwrap();
    let directory = HostDirectory::open(dir.path()).unwrap();
    assert!(directory.open("a", Access::Read).is_err());
    assert!(directory.create("a").is_err());
}

/// Each sector of what was not synced has one of the contents it had, and each of them is found.
#[test]
fn a_crash_loses_any_part_of_what_was_not_synced() {
    let fake = FakeDirectory::new(512, 0);
    let file = fake.create("a").unwrap();
    file.write_at(&[1; 1024], 0).unwrap();
    file.sync().unwrap();
    fake.sync().unwrap();
    file.write_at(&[2; 1024], 0).unwrap();
    file.write_at(&[3; 1024], 512).unwrap();
    let mut found = std::collections::BTreeSet::new();
    for seed in 0..1500 {
        let bytes = fake.after_crash(seed).bytes("a").unwrap();
        assert!(
            bytes.len() == 1024 || bytes.len() == 1536,
            "{}",
            bytes.len()
        );
        let sectors: Vec<u8> = bytes.chunks(512).map(|s| s[0]).collect();
        assert!(
            bytes.chunks(512).all(|s| s.iter().all(|b| *b == s[0])),
            "torn"
        );
        assert!([1, 2].contains(&sectors[0]), "{sectors:?}");
        assert!([1, 2, 3].contains(&sectors[1]), "{sectors:?}");
        assert!(
            sectors.get(2).is_none_or(|s| [0, 3].contains(s)),
            "{sectors:?}"
        );
        found.insert(sectors);
    }
    assert_eq!(found.len(), 2 * 3 * 3, "{found:?}");
    file.sync().unwrap();
    assert_eq!(fake.after_crash(1).bytes("a").unwrap()[512..], [3; 1024]);
}

#[test]
fn names_that_were_not_synced_are_lost_from_some_change_on() {
    let fake = FakeDirectory::default();
    fake.create("a").unwrap();
    fake.sync().unwrap();
    fake.create("b").unwrap();
    fake.rename("b", "a").unwrap();
    fake.create("c").unwrap();
    let mut found = std::collections::BTreeSet::new();
    for seed in 0..100 {
        found.insert(fake.after_crash(seed).list().unwrap());
    }
    let found: Vec<String> = found.iter().map(|names| names.join(" ")).collect();
    assert_eq!(found, ["a", "a b", "a c"]);
    assert_eq!(fake.after_kill().list().unwrap(), ["a", "c"]);
}

#[test]
fn after_the_power_failed_nothing_works() {
    let fake = FakeDirectory::default();
    let file = fake.create("a").unwrap();
    file.write_at(b"a", 0).unwrap();
    file.sync().unwrap();
    fake.sync().unwrap();
    fake.cut_power_at(fake.steps() + 1);
    file.write_at(b"b", 0).unwrap();
    assert!(!fake.is_off());
    assert!(file.sync().is_err());
    assert!(fake.is_off() && file.read_at(&mut [0], 0).is_err() && fake.list().is_err());
    let found: Vec<_> = (0..50)
        .map(|s| fake.after_crash(s).bytes("a").unwrap())
        .collect();
    assert!(found.contains(&b"a".to_vec()) && found.contains(&b"b".to_vec()));
}

#[test]
fn a_full_fake_takes_what_fits() {
    let fake = FakeDirectory::default();
    fake.set_capacity(Some(2048));
    let file = fake.create("a").unwrap();
    let error = file.write_at(&[1; 4096], 0).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert_eq!((file.len().unwrap(), fake.used()), (2048, 2048));
    file.write_at(&[2; 2048], 0).unwrap();
    file.punch_hole(0, 1024).unwrap();
    assert_eq!(fake.used(), 1024);
    file.allocate(8192, 1024).unwrap();
    assert!(file.write_at(&[3; 512], 0).is_err());
    file.write_at(&[3; 1024], 8192).unwrap();
}

#[test]
fn a_failed_sync_is_not_mended_by_the_next() {
    let failing = Arc::new(AtomicBool::new(true));
    let mut lost = 0;
    for seed in 0..20 {
        failing.store(true, Ordering::Relaxed);
        let fake = FakeDirectory::new(512, seed);
        let file = fake.create("a").unwrap();
        fake.sync().unwrap();
        let fail = Arc::clone(&failing);
        fake.set_faults(move |operation, name| {
            let now = operation == Operation::Sync && name == "a" && fail.load(Ordering::Relaxed);
            now.then_some(io::ErrorKind::Other)
        });
        file.write_at(&[1; 4096], 0).unwrap();
        assert!(file.sync().is_err());
        failing.store(false, Ordering::Relaxed);
        file.sync().unwrap();
        assert_eq!(fake.bytes("a").unwrap(), [1; 4096], "it can still be read");
        lost += usize::from(fake.after_crash(seed).bytes("a").unwrap() != [1; 4096]);
    }
    assert!(lost > 10, "{lost}");
}
