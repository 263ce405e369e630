//! A host that is gone, or a store that fails, at every operation: the vault is as before, or as after.

use super::*;
use crate::testing::Fault;

/// What a vault must still have: snapshots and their content.
pub(super) type Wanted = Vec<(crate::SnapshotId, Vec<u8>)>;

/// Every snapshot of `wanted` is there, whole, and nothing else is but `maybe`; and the vault can be used.
pub(super) fn is_whole(objects: &MemoryObjects, wanted: &Wanted, maybe: &[u8], what: &str) {
    let vault = Vault::open_on(Arc::new(objects.clone())).unwrap();
    let (entries, damaged) = vault.snapshots(None).unwrap();
    assert_eq!(damaged, [], "{what}");
    for (id, bytes) in wanted {
        assert!(content(&vault, id).unwrap() == *bytes, "{what}: {id}");
    }
    for entry in entries {
        if !wanted.iter().any(|(id, _)| *id == entry.id) {
            assert!(
                content(&vault, &entry.id).unwrap() == maybe,
                "{what}: {}",
                entry.id
            );
        }
    }
    let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
    assert_eq!(report.problems, [], "{what}");
}

/// Days later, after collections: what was acknowledged is still there, and nothing of the rest.
pub(super) fn settles(objects: &MemoryObjects, wanted: &Wanted, maybe: &[u8], what: &str) {
    let vault = Vault::open_on(Arc::new(objects.clone())).unwrap();
    for days in [0, 2, 9] {
        objects.advance(DAY * days);
        vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    }
    // Nothing that a collection did wrong is mended by the next one.
    is_whole(objects, wanted, maybe, what);
    let leftovers = |kind: &str| vault.ids(kind, None).unwrap();
    let made = vault.snapshots(None).unwrap().0.len();
    assert_eq!(leftovers("uses").len(), made, "{what}");
    assert_eq!(leftovers("recipes").len(), made, "{what}");
    assert!(
        !objects
            .keys()
            .iter()
            .any(|k| k.starts_with("claims/") || k.starts_with("marks/")),
        "{what}"
    );
    assert_eq!(vault.stats().unwrap().garbage_bytes, 0, "{what}");
}

pub(super) const FAULTS: [Fault; 4] = [
    Fault::Refuse,
    Fault::LoseAnswer,
    Fault::StopBefore,
    Fault::StopAfter,
];

#[test]
fn a_backup_is_stopped_at_every_operation() {
    let setting = Setting::new();
    let first = disk(&(1..600).collect::<Vec<_>>());
    let one = setting.backup("web", &first, 100).unwrap();
    // A segment as before, another one changed; one container full, one begun.
    let second: Vec<u32> = (1..520).chain(700..4900).collect();
    let second = disk(&second);
    let path = setting.image("new", &second);
    let mut runs = 0;
    for fault in FAULTS {
        for at in 0.. {
            let copy = setting.objects.copy();
            let view = copy.with_hook(move |number, _| (number == at).then_some(fault));
            let made = Vault::open_on(Arc::new(view.clone()))
                .and_then(|v| v.backup_at(&path, &machine("web"), "host", 200, &mut |_| {}));
            let what = format!("{fault:?} at {at}");
            let mut wanted = vec![(one.id.clone(), first.clone())];
            if let Ok(made) = &made {
                wanted.push((made.id.clone(), second.clone()));
            }
            is_whole(&copy, &wanted, &second, &what);
            settles(&copy, &wanted, &second, &what);
            runs += 1;
            if view.operations() <= at {
                assert!(made.is_ok());
                break;
            }
        }
    }
    println!("{runs} runs, 0 lost");
    assert!(runs > 80, "{runs}");
}

#[test]
fn a_deletion_is_stopped_at_every_operation() {
    let setting = Setting::new();
    let contents = [
        disk(&(1..600).collect::<Vec<_>>()),
        disk(&(500..1500).collect::<Vec<_>>()),
        disk(&(580..1500).step_by(5).collect::<Vec<_>>()),
    ];
    let made: Vec<_> = contents
        .iter()
        .enumerate()
        .map(|(i, c)| setting.backup(&format!("m{i}"), c, 100).unwrap().id)
        .collect();
    // An interrupted backup, and a forgotten snapshot.
    let path = setting.image("broken", &disk(&(7000..7500).collect::<Vec<_>>()));
    let view = setting.objects.with_hook(|_, key| {
        key.starts_with("snapshots/broken/")
            .then_some(Fault::StopBefore)
    });
    Vault::open_on(Arc::new(view))
        .unwrap()
        .backup_at(&path, &machine("broken"), "host", 100, &mut |_| {})
        .unwrap_err();
    setting.vault().forget(&made[..1]).unwrap();
    setting.vault().forget(&made[1..2]).unwrap();
    setting.objects.advance(DAY * 2);
    let wanted: Wanted = vec![(made[2].clone(), contents[2].clone())];
    let mut runs = 0;
    for fault in FAULTS {
        for at in 0.. {
            let copy = setting.objects.copy();
            let view = copy.with_hook(move |number, _| (number == at).then_some(fault));
            let done = Vault::open_on(Arc::new(view.clone()))
                .and_then(|v| v.collect(Duration::ZERO, &mut |_| {}));
            let what = format!("{fault:?} at {at}");
            is_whole(&copy, &wanted, &[], &what);
            settles(&copy, &wanted, &[], &what);
            runs += 1;
            if view.operations() <= at {
                assert_eq!(done.unwrap().aborted, 1);
                break;
            }
        }
    }
    println!("{runs} runs, 0 lost");
    assert!(runs > 80, "{runs}");
}
