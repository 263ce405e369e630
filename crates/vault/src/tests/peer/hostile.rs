//! What a peer that was taken over writes, and what does not come of it.

use super::*;
use crate::container::{ContainerId, GROUP_BYTES, LocalIds, Packed, assemble};
use crate::names::{hooks_key, parse_container_key};
use crate::record::HookRecord;

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

/// A record without what says what it needs would keep every collection from freeing anything.
#[test]
fn a_record_comes_last_and_is_not_backdated() {
    let setting = Setting::new();
    let there = There::new(&setting.objects, "a");
    let path = setting.image("image", &disk(&(1..400).collect::<Vec<_>>()));
    let backup = |time| {
        let vault = there.vault();
        let made = vault.backup_at(&path, &machine("web"), "host", time, &mut |_| {});
        made.unwrap().id
    };
    let (first, second) = (backup(100), backup(500));
    let guard = there.guard();
    let put = |key: &str, like: &str| guard.create(key, guard.get(like).unwrap().unwrap());
    let id = |time| SnapshotId {
        machine: machine("web"),
        time,
        session: SessionId(9),
    };
    let refused = |time, why: &str| {
        let error = put(&id(time).record(), &first.record()).unwrap_err();
        assert!(error.why.contains(why), "{error}");
    };
    for time in [300, 600] {
        refused(time, "are not there");
        assert!(put(&id(time).uses(), &first.uses()).unwrap());
        refused(time, "are not there");
        assert!(put(&id(time).recipe(), &first.recipe()).unwrap());
    }
    // Of a day that is over.
    refused(300, "before the latest");
    assert!(put(&id(600).record(), &first.record()).unwrap());
    // What was said already may be said again.
    assert!(!put(&first.record(), &first.record()).unwrap());
    collect(&setting).unwrap();
    // However it came to be, one that does not say what it needs can be forgotten, and then space is freed again.
    for (id, damage) in [(&first, false), (&second, true)] {
        match damage {
            true => setting.objects.damage(&id.uses(), Vec::clear),
            false => setting.objects.lose(&id.uses()),
        }
        assert!(collect(&setting).is_err());
        setting.vault().forget(std::slice::from_ref(id)).unwrap();
        collect(&setting).unwrap();
    }
}

/// The name of a machine that the site itself backs up.
#[test]
fn a_machine_of_the_site_is_no_peers() {
    for is_encrypted in [false, true] {
        let setting = Setting::new();
        let objects = MemoryObjects::default();
        let local = match is_encrypted {
            true => {
                let secret = Secret::new(b"correct horse").unwrap();
                Vault::create_encrypted_on(Arc::new(objects.clone()), &secret, "").unwrap()
            }
            false => Vault::create_on(Arc::new(objects.clone())).unwrap(),
        };
        let path = setting.image("image", &disk(&(1..400).collect::<Vec<_>>()));
        let backup = |name| local.backup_at(&path, &machine(name), "host", 100, &mut |_| {});
        let id = ContainerId::new(SessionId(1), 0);
        let guard = There::new(&objects, "a").guard();
        // Its first snapshot is not complete yet.
        let made = backup("db").unwrap();
        let listed = of_kind(&objects, "snapshots/");
        objects.lose(&listed[0]);
        let db = listed[0].split('/').nth(1).unwrap();
        let key = format!("containers/{db}/{id}.0");
        assert!(guard.create(&key, container(id, 9)).is_err());
        assert_eq!(of_kind(&objects, "owners/"), [""; 0]);
        drop(made);
        // The peer was first.
        objects.lose(&of_kind(&objects, "recipes/")[0]);
        for kind in ["containers/", "recipes/", "uses/"] {
            of_kind(&objects, kind)
                .iter()
                .for_each(|key| objects.lose(key));
        }
        let guard = There::new(&objects, "a").guard();
        assert!(guard.create(&key, container(id, 9)).unwrap());
        let refused = backup("db").unwrap_err();
        assert!(matches!(refused, VaultError::OfPeer { .. }), "{refused}");
        assert!(backup("other").is_ok());
        // What is taken for the blocks that machines have in common is nobody's to write.
        let popular = format!("containers/{}/{id}.0", Machine::popular().component());
        assert!(is_encrypted || guard.create(&popular, container(id, 9)).is_err());
    }
}

/// The site of an encrypted vault does not know whether the blocks of a peer are what it says.
#[test]
fn an_encrypted_vault_takes_no_block_of_a_peer_for_known() {
    let setting = Setting::new();
    let secret = Secret::new(b"correct horse").unwrap();
    let here = Arc::new(setting.objects.copy());
    for kind in ["vault", "keys/"] {
        of_kind(&here, kind).iter().for_each(|key| here.lose(key));
    }
    let local = Vault::create_encrypted_on(here.clone(), &secret, "").unwrap();
    let there = There::new(&here, "a");
    let peer = Vault::open_with(there.objects(), &mut || Ok(secret.clone())).unwrap();
    let path = setting.image("image", &disk(&(1..400).collect::<Vec<_>>()));
    let new = |vault: &Vault, name| {
        let made = vault.backup_at(&path, &machine(name), "host", 100, &mut |_| {});
        made.unwrap().record.new_bytes
    };
    assert!(new(&peer, "web") > 0);
    assert!(new(&local, "own") > 0);
    // Of one's own machines they are.
    assert_eq!((new(&peer, "two"), new(&local, "three")), (0, 0));
}

/// Hooks say in which containers blocks may be: those of others are found whatever a peer says of them.
#[test]
fn hooks_are_of_their_session() {
    let setting = Setting::new();
    let wanted = disk(&(1..400).collect::<Vec<_>>());
    setting.backup("victim", &wanted, 100).unwrap();
    let objects = &setting.objects;
    let key = of_kind(objects, "containers/victim/").remove(0);
    let (_, victim, _) = parse_container_key(&key).unwrap();
    let guard = There::new(objects, "a").guard();
    let own = ContainerId::new(SessionId(1), 0);
    let key = format!("containers/evil/{own}.0");
    assert!(guard.create(&key, container(own, 9)).unwrap());
    let hooks = |containers| Bytes::from(HookRecord { containers }.encode());
    let at = hooks_key(SessionId(1));
    for wrong in [vec![(victim, vec![])], vec![(own, vec![7; 4097])]] {
        assert!(guard.create(&at, hooks(wrong.clone())).is_err());
        // Of an encrypted vault the site does not see it.
        assert!(objects.create(&at, hooks(wrong)).unwrap());
        let path = setting.image("image", &wanted);
        let made = setting
            .vault()
            .backup_at(&path, &machine("victim2"), "host", 200, &mut |_| {});
        assert_eq!(made.unwrap().record.new_bytes, 0);
        objects.lose(&at);
    }
    assert!(guard.create(&at, hooks(vec![(own, vec![7])])).unwrap());
}

/// Tags of hooks tell what others have.
#[test]
fn hooks_of_others_are_not_seen_where_nothing_is_shared() {
    let (objects, [one, two]) = that_share_nothing();
    let all = of_kind(&objects, "hooks/");
    assert_eq!(all.len(), 2);
    let (one, two) = (one.guard(), two.guard());
    let seen = |guard: &Guard| -> Vec<String> {
        let listed = guard.list("hooks").unwrap().into_iter();
        listed.map(|object| object.key).collect()
    };
    assert_eq!((seen(&one).len(), seen(&two).len()), (1, 1));
    assert_ne!(seen(&one), seen(&two));
    for key in all {
        let sees = |guard: &Guard| guard.get(&key).unwrap().is_some();
        assert!(sees(&one) != sees(&two), "{key}");
    }
}
