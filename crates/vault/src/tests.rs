//! The vault as a whole: on a store in memory with faults, and on a directory.

mod concurrent;
mod copies;
mod crash;
mod encrypted;
mod faults;
mod forget;
mod parents;
mod peer;
mod share;
mod unchanged;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use drover_core::{BLOCK_SIZE, ReadAt};

use crate::testing::MemoryObjects;
use crate::{
    Backup, Checking, Keep, Listed, Machine, Objects, Reference, Result, SessionId, SnapshotFile,
    StoreError, Vault, VaultError,
};

const DAY: Duration = Duration::from_secs(24 * 3600);

pub(crate) fn machine(name: &str) -> Machine {
    Machine::new(name).unwrap()
}

/// A disk of `blocks` blocks: of each the number of its content, 0 for zeros.
pub(crate) fn disk(contents: &[u32]) -> Vec<u8> {
    let mut out = vec![0; contents.len() * BLOCK_SIZE];
    for (block, &n) in out.chunks_exact_mut(BLOCK_SIZE).zip(contents) {
        if n != 0 {
            // Half of it compresses.
            fastrand::Rng::with_seed(u64::from(n)).fill(&mut block[..BLOCK_SIZE / 2]);
        }
    }
    out
}

struct Setting {
    dir: tempfile::TempDir,
    objects: MemoryObjects,
}

impl Setting {
    fn new() -> Self {
        let setting = Setting {
            dir: tempfile::tempdir().unwrap(),
            objects: MemoryObjects::default(),
        };
        Vault::create_on(Arc::new(setting.objects.clone())).unwrap();
        setting
    }

    fn vault(&self) -> Vault {
        Vault::open_on(Arc::new(self.objects.clone())).unwrap()
    }

    fn image(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    fn backup(&self, name: &str, content: &[u8], time: i64) -> Result<Backup> {
        let path = self.image(name, content);
        self.vault()
            .backup_at(&path, &machine(name), "host", time, &mut |_| {})
    }
}

/// A store that does not do what it should.
enum Odd {
    /// What is below this prefix is listed, but not given.
    Hides(&'static str, MemoryObjects),
    /// It says that what is below this prefix is written, and writes nothing.
    Lies(&'static str, MemoryObjects),
    /// Nothing can be removed: a host without the right to.
    Keeps(MemoryObjects),
    /// What exists is written over.
    Overwrites(MemoryObjects),
}

impl Odd {
    fn inner(&self) -> &MemoryObjects {
        match self {
            Odd::Hides(_, inner) | Odd::Lies(_, inner) => inner,
            Odd::Keeps(inner) | Odd::Overwrites(inner) => inner,
        }
    }
}

impl Objects for Odd {
    fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        match self {
            Odd::Lies(prefix, _) if key.starts_with(prefix) => return Ok(true),
            Odd::Overwrites(inner) => inner.remove(key)?,
            _ => {}
        }
        self.inner().create(key, bytes)
    }
    fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        match self {
            Odd::Hides(prefix, _) if key.starts_with(prefix) => Ok(None),
            _ => self.inner().get(key),
        }
    }
    fn get_range(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        self.inner().get_range(key, range)
    }
    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        self.inner().list(prefix)
    }
    fn remove(&self, key: &str) -> Result<(), StoreError> {
        match self {
            Odd::Keeps(_) => Err(StoreError {
                doing: "remove",
                key: key.to_owned(),
                vault: self.describe(),
                why: "permission denied".into(),
                can_retry: false,
                is_damage: false,
            }),
            _ => self.inner().remove(key),
        }
    }
    fn describe(&self) -> String {
        "odd".into()
    }
}

/// The content of a snapshot, by reads.
pub(crate) fn content(vault: &Vault, id: &crate::SnapshotId) -> Result<Vec<u8>> {
    let file = SnapshotFile::new(vault.open_snapshot(id)?);
    let mut bytes = vec![0; file.len() as usize];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => Ok(bytes),
        Err(error) => Err(*error
            .into_inner()
            .and_then(|inner| inner.downcast::<VaultError>().ok())
            .expect("an error of the vault")),
    }
}

/// The content of a snapshot, by a restore to a new file; the same as by reads.
pub(crate) fn restored(vault: &Vault, id: &crate::SnapshotId, dir: &Path) -> Result<Vec<u8>> {
    let path = dir.join(format!("restored-{:x}", fastrand::u64(..)));
    vault.restore(&vault.open_snapshot(id)?, &path, &mut |_| {})?;
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    assert!(
        content(vault, id)? == bytes,
        "a read is not what a restore writes"
    );
    Ok(bytes)
}

#[test]
fn a_second_snapshot_stores_only_what_is_new() {
    let setting = Setting::new();
    let vault = setting.vault();
    let mut blocks: Vec<u32> = (0..7000).map(|i| if i % 10 < 3 { 0 } else { i }).collect();
    let first = disk(&blocks);
    let one = setting.backup("web", &first, 100).unwrap();
    assert_eq!(one.record.data_bytes, 4900 * 4096);
    assert_eq!(one.record.new_bytes, 4900 * 4096);
    assert!(one.record.stored_bytes < one.record.new_bytes * 6 / 10);

    blocks[77] = 100_000;
    blocks.push(100_001);
    let mut second = disk(&blocks);
    second.truncate(second.len() - 100);
    let two = setting.backup("web", &second, 200).unwrap();
    assert_eq!(two.record.new_bytes, 2 * 4096);

    // Another machine with the same blocks in another order.
    let mut mixed: Vec<u32> = blocks[4000..].to_vec();
    mixed.extend(&blocks[..4000]);
    let three = setting.backup("db", &disk(&mixed), 300).unwrap();
    assert!(three.record.new_bytes <= 4096, "{:?}", three.record);

    let dir = setting.dir.path();
    assert!(restored(&vault, &one.id, dir).unwrap() == first);
    assert!(restored(&vault, &two.id, dir).unwrap() == second);
    assert!(restored(&vault, &three.id, dir).unwrap() == disk(&mixed));
    let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
    assert_eq!((report.snapshots, report.problems), (3, vec![]));
    let stats = vault.stats().unwrap();
    assert_eq!(
        (stats.machines, stats.snapshots, stats.garbage_bytes),
        (2, 3, 0)
    );

    // The same content has the same root, wherever it is.
    let again = setting.backup("copy", &second, 400).unwrap();
    assert_eq!(again.record.root, two.record.root);
    assert_eq!((again.record.new_bytes, again.record.stored_bytes), (0, 0));
}

#[test]
fn a_restore_into_an_older_copy_writes_only_what_differs() {
    let setting = Setting::new();
    let vault = setting.vault();
    let mut blocks: Vec<u32> = (1..2000).collect();
    blocks[500..600].fill(0);
    let wanted = disk(&blocks);
    let made = setting.backup("web", &wanted, 100).unwrap();
    let snapshot = vault.open_snapshot(&made.id).unwrap();

    blocks[3] = 70_000;
    blocks[550] = 70_001;
    blocks.extend([1, 2, 3]);
    let path = setting.image("older", &disk(&blocks));
    let done = vault.restore(&snapshot, &path, &mut |_| {}).unwrap();
    assert!(done.in_place);
    assert!(done.written_bytes <= 2 * 4096, "{done:?}");
    assert!(std::fs::read(&path).unwrap() == wanted);
    let done = vault.restore(&snapshot, &path, &mut |_| {}).unwrap();
    assert_eq!(done.written_bytes, 0);
    assert_eq!(std::fs::read_dir(setting.dir.path()).unwrap().count(), 2);
}

#[test]
fn snapshots_have_names() {
    let setting = Setting::new();
    let vault = setting.vault();
    let find = |text: &str| vault.find(&Reference::parse(text).unwrap());
    assert!(matches!(
        find("web@latest"),
        Err(VaultError::NoSnapshot { .. })
    ));
    let one = setting.backup("web", &disk(&[1]), 1_795_168_800).unwrap();
    let two = setting.backup("web", &disk(&[2]), 1_795_168_900).unwrap();
    assert_eq!(find("web@latest").unwrap().id, two.id);
    assert_eq!(find("web@2026-11-20T10:00:00Z").unwrap().id, one.id);
    assert_eq!(find(&format!("web@{}", two.id.session)).unwrap().id, two.id);
    let ambiguous = find("web@2026-11-20").unwrap_err().to_string();
    assert!(
        ambiguous.contains("web@2026-11-20T10:00:00Z"),
        "{ambiguous}"
    );
    let none = find("web@2025").unwrap_err().to_string();
    assert!(none.contains("web@2026-11-20T10:01:40Z"), "{none}");

    // A clock that was set back: the newest is still the latest, and it is said.
    let three = setting.backup("web", &disk(&[3]), 1_700_000_000).unwrap();
    assert_eq!(find("web@latest").unwrap().id, three.id);
    assert!(three.notes[0].contains("clock"), "{:?}", three.notes);
}

#[test]
fn what_is_forgotten_is_freed_exactly() {
    let setting = Setting::new();
    let vault = setting.vault();
    // The second snapshot shares 4,000 of 10,000 blocks with the first.
    let first: Vec<u32> = (1..=10_000).collect();
    let second: Vec<u32> = (6001..=12_000).collect();
    let one = setting.backup("web", &disk(&first), 100).unwrap();
    let two = setting.backup("web", &disk(&second), 200).unwrap();
    let would = vault.would_free(std::slice::from_ref(&one.id)).unwrap();
    assert_eq!(would.garbage_bytes, 6000 * 4096);
    assert_eq!(would.dead_containers, 1);
    let ids = [one.id];
    assert_eq!(vault.forget(&ids).unwrap(), would);
    assert_eq!(vault.snapshots(None).unwrap().0.len(), 1);

    let collect = |grace| vault.collect(grace, &mut |_| {}).unwrap();
    let before = vault.stats().unwrap();
    assert_eq!(collect(DAY).removed, 0);
    setting.objects.advance(DAY);
    let done = collect(DAY);
    assert_eq!((done.snapshots, done.removed), (1, 1), "{done:?}");
    // Blocks 4,097 to 8,192: half of them are garbage, or nearly.
    let after = vault.stats().unwrap();
    assert_eq!(
        after.garbage_bytes + 4096 * 4096,
        6000 * 4096 - u64::from(done.compacted > 0) * (6001 - 4097) * 4096
    );
    assert_eq!(
        before.container_bytes - after.container_bytes,
        done.freed_bytes
    );
    assert!(restored(&vault, &two.id, setting.dir.path()).unwrap() == disk(&second));

    // A third shares a few blocks of each container: the rest goes when the second does.
    let third: Vec<u32> = (6001..=12_000).step_by(10).collect();
    let three = setting.backup("db", &disk(&third), 300).unwrap();
    assert_eq!(three.record.new_bytes, 0);
    vault.forget(std::slice::from_ref(&two.id)).unwrap();
    setting.objects.advance(DAY);
    let done = collect(Duration::ZERO);
    assert!(done.compacted >= 1, "{done:?}");
    assert_eq!(vault.stats().unwrap().garbage_bytes, 0);
    assert!(restored(&vault, &three.id, setting.dir.path()).unwrap() == disk(&third));
    // What is left is still found, in the containers that were written again.
    let four = setting.backup("db", &disk(&third), 400).unwrap();
    assert_eq!(four.record.new_bytes, 0);
    assert_eq!(
        vault
            .check(Checking::Full, &mut |_, _| {})
            .unwrap()
            .problems,
        vec![]
    );

    vault.forget(&[three.id, four.id]).unwrap();
    collect(Duration::ZERO);
    let left: Vec<String> = setting.objects.keys();
    assert_eq!(left, ["vault"]);
}

#[test]
fn what_is_held_is_not_forgotten_and_what_was_forgotten_is_not_held() {
    let setting = Setting::new();
    let vault = setting.vault();
    let wanted = disk(&(1..3000).collect::<Vec<_>>());
    let made = setting.backup("web", &wanted, 100).unwrap();
    let ids = [made.id.clone()];
    let hold = vault
        .hold(&made.id, SessionId(7), "web-1f on paris")
        .unwrap();
    let refused = vault.forget(&ids).unwrap_err().to_string();
    assert!(refused.contains("web-1f on paris"), "{refused}");
    // One that was forgotten by somebody who had looked before.
    vault
        .put_own(&made.id.tombstone(), b"forgotten".to_vec())
        .unwrap();
    let collect = || vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    assert_eq!((collect().snapshots, collect().removed), (0, 0));
    assert!(restored(&vault, &made.id, setting.dir.path()).unwrap() == wanted);
    assert!(matches!(
        vault.hold(&made.id, SessionId(8), "another"),
        Err(VaultError::NoSnapshot { .. })
    ));
    drop(hold);
    assert_eq!(vault.held().unwrap(), vec![]);
    assert_eq!(collect().snapshots, 1);
    assert_eq!(setting.objects.keys(), ["vault"]);
    assert!(matches!(
        vault.hold(&made.id, SessionId(9), "late"),
        Err(VaultError::NoSnapshot { .. })
    ));
    assert_eq!(setting.objects.keys(), ["vault"]);
}

#[test]
fn a_holder_that_was_killed_is_void_a_day_later_or_comes_again() {
    let setting = Setting::new();
    let vault = setting.vault();
    let made = setting.backup("web", &disk(&[1, 2, 3]), 100).unwrap();
    let ids = [made.id.clone()];
    let session = SessionId(7);
    // Killed: nothing is released.
    let forsake = |hold: crate::Hold| std::mem::forget(hold);
    forsake(vault.hold(&made.id, session, "killed").unwrap());
    setting.objects.advance(DAY - Duration::from_secs(1));
    assert!(matches!(vault.forget(&ids), Err(VaultError::Held { .. })));
    let again = vault.hold(&made.id, session, "again").unwrap();
    let held = vault.held().unwrap();
    assert_eq!((held.len(), held[0].holder.as_str()), (1, "again"));
    setting.objects.advance(Duration::from_secs(3600));
    assert!(matches!(vault.forget(&ids), Err(VaultError::Held { .. })));
    drop(again);
    forsake(vault.hold(&made.id, session, "killed").unwrap());
    setting.objects.advance(DAY);
    vault.forget(&ids).unwrap();
    let done = vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    assert_eq!(done.snapshots, 1);
    assert_eq!(setting.objects.keys(), ["vault"]);
}

#[test]
fn every_flipped_byte_is_found_and_never_restored() {
    let setting = Setting::new();
    let wanted = disk(&(1..200).collect::<Vec<_>>());
    let made = setting.backup("web", &wanted, 100).unwrap();
    let mut rng = fastrand::Rng::with_seed(7);
    for key in setting.objects.keys() {
        if key.starts_with("hooks/") {
            // A cache: losing it loses duplicates.
            continue;
        }
        for _ in 0..20 {
            let copy = setting.objects.copy();
            let mut at = 0;
            copy.damage(&key, |bytes| {
                at = rng.usize(..bytes.len());
                bytes[at] ^= 1 << rng.u8(..8);
            });
            let Ok(vault) = Vault::open_on(Arc::new(copy)) else {
                assert_eq!(key, "vault");
                continue;
            };
            let report = vault.check(Checking::Full, &mut |_, _| {});
            let noticed = report.as_ref().is_ok_and(|r| !r.problems.is_empty()) || report.is_err();
            assert!(noticed, "{key}, byte {at}");
            match restored(&vault, &made.id, setting.dir.path()) {
                Ok(bytes) => assert!(bytes == wanted, "{key}, byte {at}: wrong bytes restored"),
                Err(error) => assert!(!error.to_string().contains('\n')),
            }
        }
    }
}

#[test]
fn hooks_that_are_lost_are_made_again_from_the_containers() {
    let setting = Setting::new();
    let content = disk(&(1..5000).collect::<Vec<_>>());
    setting.backup("web", &content, 100).unwrap();
    for key in setting.objects.keys() {
        if key.starts_with("hooks/") {
            setting.objects.damage(&key, |bytes| bytes.truncate(9));
        }
    }
    let again = setting.backup("db", &content, 200).unwrap();
    assert_eq!(again.record.new_bytes, 0);
}

#[test]
fn without_its_uses_a_snapshot_stops_deletion() {
    let setting = Setting::new();
    let made = setting.backup("web", &disk(&[1, 2, 3]), 100).unwrap();
    let vault = setting.vault();
    vault.objects.remove(&made.id.uses()).unwrap();
    setting.objects.advance(DAY * 30);
    assert!(matches!(
        vault.collect(Duration::ZERO, &mut |_| {}),
        Err(VaultError::Missing { .. })
    ));
    assert!(restored(&vault, &made.id, setting.dir.path()).is_ok());
}

/// A store that lists what it does not give: what a snapshot needs is not taken for garbage.
#[test]
fn uses_that_are_listed_and_not_given_stop_deletion() {
    let setting = Setting::new();
    let wanted = disk(&[1, 2, 3]);
    let made = setting.backup("web", &wanted, 100).unwrap();
    setting.objects.advance(DAY * 30);
    let forgetful = Vault::open_on(Arc::new(Odd::Hides("uses/", setting.objects.clone()))).unwrap();
    let error = forgetful.collect(Duration::ZERO, &mut |_| {}).unwrap_err();
    assert!(matches!(error, VaultError::Missing { .. }), "{error}");
    assert!(forgetful.forget(std::slice::from_ref(&made.id)).is_err());
    let vault = setting.vault();
    assert!(restored(&vault, &made.id, setting.dir.path()).unwrap() == wanted);
}

/// Who mounts a snapshot while it is computed what forgetting it frees is seen.
#[test]
fn a_snapshot_that_is_held_since_the_first_look_is_not_forgotten() {
    let setting = Setting::new();
    let made = setting.backup("web", &disk(&[1, 2, 3]), 100).unwrap();
    let hold = Arc::new(parking_lot::Mutex::new(None));
    let (held, vault, id) = (hold.clone(), setting.vault(), made.id.clone());
    let view = setting.objects.with_hook(move |_, key| {
        if key.starts_with("containers") && held.lock().is_none() {
            *held.lock() = Some(vault.hold(&id, SessionId(7), "a mount").unwrap());
        }
        None
    });
    let forgetting = Vault::open_on(Arc::new(view)).unwrap();
    let error = forgetting
        .forget(std::slice::from_ref(&made.id))
        .unwrap_err();
    assert!(matches!(error, VaultError::Held { .. }), "{error}");
    assert!(!setting.objects.keys().contains(&made.id.tombstone()));
    drop(hold.lock().take());
    setting.vault().forget(&[made.id]).unwrap();
}

#[test]
fn a_store_that_overwrites_is_refused() {
    let refused = Vault::create_on(Arc::new(Odd::Overwrites(MemoryObjects::default())));
    assert!(matches!(refused, Err(VaultError::Unconditional(_))));
}

#[test]
fn on_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("vault");
    assert!(matches!(Vault::open(&at), Err(VaultError::NoVault(_))));
    let vault = Vault::create(&at).unwrap();
    assert!(matches!(Vault::create(&at), Err(VaultError::Exists(_))));
    assert!(matches!(
        Vault::create(dir.path()),
        Err(VaultError::NotEmpty(_))
    ));
    let image = dir.path().join("disk.raw");
    let wanted = disk(&(0..5000).collect::<Vec<_>>());
    std::fs::write(&image, &wanted).unwrap();
    let made = vault
        .backup(&image, &machine("a b"), "host", &mut |_| {})
        .unwrap();
    let vault = Vault::open(&at).unwrap();
    assert!(restored(&vault, &made.id, dir.path()).unwrap() == wanted);
    vault.forget(&[made.id]).unwrap();
    let done = vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    assert_eq!(done.removed, 2);
    assert_eq!(vault.stats().unwrap(), crate::Stats::default());
    assert!(Keep::default().is_nothing());
}
