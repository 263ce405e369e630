//! Stores that lie, and objects of a newer version.

use super::*;

/// Whatever the store has not written although it said so: no snapshot is made, or a whole one; nothing is in the way of
/// the next.
#[test]
fn a_store_that_said_it_wrote_and_did_not_is_found_out() {
    for prefix in ["containers/", "recipes/", "uses/", "snapshots/", "hooks/"] {
        let setting = Setting::new();
        let wanted = disk(&(1..400).collect::<Vec<_>>());
        let image = setting.image("web", &wanted);
        let lying = Odd::Lies(prefix, setting.objects.clone());
        let made = Vault::open_on(Arc::new(lying)).unwrap().backup_at(
            &image,
            &machine("web"),
            "host",
            100,
            &mut |_| {},
        );
        let vault = setting.vault();
        match (prefix, made) {
            // A cache.
            ("hooks/", Ok(made)) => assert!(content(&vault, &made.id).unwrap() == wanted),
            ("containers/", Err(VaultError::Overtaken(_))) => {}
            (_, Err(error)) => {
                assert!(
                    matches!(error, VaultError::Unwritten(_)),
                    "{prefix}: {error}"
                );
                assert!(error.can_retry() && !error.to_string().contains('\n'));
            }
            (_, Ok(_)) => panic!("{prefix}: a snapshot that is not there"),
        }
        let there = usize::from(prefix == "hooks/");
        assert_eq!(vault.snapshots(None).unwrap().0.len(), there, "{prefix}");
        let again = setting.backup("web", &wanted, 200).unwrap();
        assert!(content(&vault, &again.id).unwrap() == wanted, "{prefix}");
        // Days later, nothing of it is left.
        setting.objects.advance(DAY * 2);
        vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
        let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
        assert_eq!(report.problems, [], "{prefix}");
        assert_eq!(
            vault.ids("uses", None).unwrap().len(),
            1 + there,
            "{prefix}"
        );
    }
}

/// A host that may write and not delete makes snapshots and reads them, also when a deletion by another one interferes;
/// what it leaves is tidied up by who may delete.
#[test]
fn a_host_without_the_right_to_delete_makes_snapshots() {
    let setting = Setting::new();
    let wanted = disk(&(1..400).collect::<Vec<_>>());
    let image = setting.image("web", &wanted);
    let gone = setting.backup("old", &wanted, 50).unwrap();
    setting
        .vault()
        .forget(std::slice::from_ref(&gone.id))
        .unwrap();
    // Just before the uses are written, another host frees what they refer to.
    let other = setting.vault();
    let view = setting.objects.with_hook(move |_, key| {
        if key.starts_with("uses/web/") && other.containers(None).unwrap().iter().next().is_some() {
            other.collect(Duration::ZERO, &mut |_| {}).unwrap();
        }
        None
    });
    let host = Vault::open_on(Arc::new(Odd::Keeps(view))).unwrap();
    let backup = |time| {
        host.backup_at(&image, &machine("web"), "host", time, &mut |_| {})
            .unwrap()
    };
    let (one, two) = (backup(100), backup(200));
    assert_eq!(two.record.new_bytes, 0);
    assert!(content(&host, &one.id).unwrap() == wanted);
    assert!(
        setting
            .objects
            .keys()
            .iter()
            .any(|key| key.starts_with("claims/"))
    );

    setting.objects.advance(DAY * 2);
    let vault = setting.vault();
    vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    let left = |kind: &str| {
        setting
            .objects
            .keys()
            .iter()
            .filter(|key| key.starts_with(kind))
            .count()
    };
    assert_eq!((left("claims/"), left("probe/"), left("uses/")), (0, 0, 2));
    let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
    assert_eq!((report.snapshots, report.problems), (2, vec![]));
    assert!(restored(&vault, &two.id, setting.dir.path()).unwrap() == wanted);
}

/// What a newer version has written is not taken for damage, and nothing is freed.
#[test]
fn objects_of_a_newer_version_are_said_to_be() {
    let setting = Setting::new();
    let made = setting.backup("web", &disk(&[1, 2, 3]), 100).unwrap();
    let newer = |key: &str| {
        let copy = setting.objects.copy();
        copy.damage(key, |bytes| bytes[8] = 9);
        copy
    };
    let error = Vault::open_on(Arc::new(newer("vault"))).unwrap_err();
    assert!(error.to_string().contains("update drover"), "{error}");
    let open = |key: &str| Vault::open_on(Arc::new(newer(key))).unwrap();
    let error = open(&made.id.record()).snapshots(None).unwrap_err();
    assert!(matches!(error, VaultError::Newer { .. }), "{error}");
    let error = open(&made.id.recipe()).open_snapshot(&made.id).unwrap_err();
    assert!(matches!(error, VaultError::Newer { .. }), "{error}");
    setting
        .vault()
        .forget(std::slice::from_ref(&made.id))
        .unwrap();
    let objects = newer(&made.id.uses());
    let before = objects.keys();
    let vault = Vault::open_on(Arc::new(objects.clone())).unwrap();
    objects.advance(DAY);
    vault.collect(DAY * 2, &mut |_| {}).unwrap_err();
    assert_eq!(objects.keys(), before);
}
