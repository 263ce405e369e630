//! What a peer that was taken over writes, and what does not come of it.

use super::*;
use crate::container::{ContainerId, GROUP_BYTES, LocalIds, Packed, assemble};
use crate::names::parse_container_key;

/// A good container of that number, with blocks of its own.
fn container(id: ContainerId, blocks: u16) -> Bytes {
    let content = disk(
        &(0..u32::from(blocks))
            .map(|n| n + 90_000)
            .collect::<Vec<_>>(),
    );
    let mut digests = Vec::new();
    drover_index::digest_blocks(&content, &mut digests);
    let mut present = LocalIds::default();
    (0..blocks).for_each(|n| present.insert(n));
    let groups: Vec<_> = content.chunks(GROUP_BYTES).map(Packed::new).collect();
    assemble(id, 0, &digests, &present, &groups).into()
}

fn of_kind(objects: &MemoryObjects, prefix: &str) -> Vec<String> {
    let mut keys = objects.keys();
    keys.retain(|key| key.starts_with(prefix));
    keys
}

fn collect(setting: &Setting) -> crate::Result<crate::Collected> {
    setting.objects.advance(DAY * 2);
    setting.vault().collect(Duration::ZERO, &mut |_| {})
}

fn has_no_problem(setting: &Setting) {
    let report = setting.vault().check(Checking::Full, &mut |_, _| {});
    assert_eq!(report.unwrap().problems, vec![]);
}

/// The number of another machine's container is free to choose; the container is another one all the same.
#[test]
fn a_container_is_of_its_machine_whatever_its_number() {
    let setting = Setting::new();
    let wanted = disk(&(1..400).collect::<Vec<_>>());
    let victim = setting.backup("victim", &wanted, 100).unwrap();
    let objects = &setting.objects;
    let key = of_kind(objects, "containers/victim/").remove(0);
    let (_, id, _) = parse_container_key(&key).unwrap();
    let guard = There::new(objects, "a").guard();
    let evil = format!("containers/evil/{id}.0");
    assert!(guard.create(&evil, container(id, 1000)).unwrap());
    // What the victim uses is not what the peer's is kept for, and what becomes of that is not what becomes of this.
    for _ in 0..3 {
        collect(&setting).unwrap();
        assert!(content(&setting.vault(), &victim.id).unwrap() == wanted);
    }
    assert_eq!(of_kind(objects, "containers/evil/"), [""; 0]);
    assert!(guard.create(&evil, container(id, 1000)).unwrap());
    has_no_problem(&setting);
    let copy = MemoryObjects::default();
    let there = setting
        .vault()
        .copy_on(Arc::new(copy.clone()), true)
        .unwrap();
    let copied = setting.vault().copy(&there, false, &mut |_| {}).unwrap();
    assert_eq!((copied.snapshots, copied.problems), (1, vec![]));
    assert!(there.snapshots(None).unwrap().0.len() == 1);
    // A container of the machine's own is still used, and that of the peer for nobody's snapshot.
    let again = setting.backup("victim", &wanted, 200).unwrap();
    assert_eq!(again.record.new_bytes, 0);
    has_no_problem(&setting);
}

/// A container that is gone when the snapshot is committed is not one that another machine has under its number.
#[test]
fn what_is_gone_is_gone_whoever_has_its_number() {
    let setting = Setting::new();
    let wanted = disk(&(1..400).collect::<Vec<_>>());
    setting.backup("victim", &wanted, 100).unwrap();
    let inner = setting.objects.clone();
    let key = of_kind(&inner, "containers/victim/").remove(0);
    let (_, id, _) = parse_container_key(&key).unwrap();
    let there = There::new(&inner, "a");
    let hooked = setting.objects.with_hook(move |_, now| {
        if now.starts_with("uses/third/") && of_kind(&inner, "containers/evil/").is_empty() {
            let evil = format!("containers/evil/{id}.0");
            assert!(there.guard().create(&evil, container(id, 1000)).unwrap());
            inner.lose(&key);
        }
        None
    });
    let path = setting.image("third", &wanted);
    let vault = Vault::open_on(Arc::new(hooked)).unwrap();
    let made = vault.backup_at(&path, &machine("third"), "host", 200, &mut |_| {});
    assert!(content(&setting.vault(), &made.unwrap().id).unwrap() == wanted);
}
