//! Write and read leases.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use super::{Mounts, can_mount, text};
use crate::world::until;

#[test]
fn one_writer_and_the_refusal_of_the_second_names_the_holder() {
    if !can_mount("one_writer_and_the_refusal_of_the_second_names_the_holder") {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 21);
    m.pair("other");
    let disk = m.mount("web.raw", "disk", &[]);
    let name = m.list()[0]["name"].as_str().unwrap().to_owned();
    for (home, options) in [
        ("other", &[][..]),
        ("other", &["--read-only"]),
        ("near", &[]),
    ] {
        let path = m.world.path("second");
        let mut args = vec!["mount", "far:web.raw", text(&path)];
        args.extend(options);
        m.world
            .run(home, &args)
            .fails(3, &["web.raw", &name, "unmount it there", "break"]);
        assert!(!path.exists(), "{} is left", path.display());
        assert_eq!(
            m.world.run(home, &["mounts", "--json"]).json().len(),
            usize::from(home == "near")
        );
    }
    let leases = m
        .world
        .run("far", &["mounts", "leases", "--json"])
        .ok()
        .json();
    assert_eq!(leases[0]["image"], "web.raw");
    assert!(
        leases[0]["writer"]["note"]
            .as_str()
            .unwrap()
            .contains(&name)
    );
    assert!(
        m.world
            .run("far", &["mounts", "leases"])
            .ok()
            .out
            .contains(&name)
    );

    // The image itself is unchanged meanwhile.
    m.world
        .run("far", &["rm", "web.raw", "-y"])
        .fails(3, &["web.raw", &name]);
    let dir = m.world.path("newer");
    fs::create_dir(&dir).unwrap();
    let newer = dir.join("web.raw");
    fs::write(&newer, vec![3; 1 << 20]).unwrap();
    m.near(&["send", text(&newer), "far"])
        .fails(3, &["web.raw"]);
    m.unmount(&disk, &[]).ok();
    let leases = m
        .world
        .run("far", &["mounts", "leases", "--json"])
        .ok()
        .json();
    assert!(leases.iter().all(|l| l["writer"].is_null()), "{leases:?}");
    let path = m.world.path("second");
    m.world
        .run("other", &["mount", "far:web.raw", text(&path)])
        .ok();
    m.world.run("other", &["unmount", text(&path)]).ok();
    m.world.run("far", &["rm", "web.raw", "-y"]).ok();
}

#[test]
fn readers_share_and_keep_writers_out() {
    if !can_mount("readers_share_and_keep_writers_out") {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 23);
    let one = m.mount("web.raw", "one", &["--read-only"]);
    let two = m.mount("web.raw", "two", &["--read-only"]);
    assert!(fs::read(&one).unwrap() == bytes && fs::read(&two).unwrap() == bytes);
    let path = m.world.path("three");
    m.near(&["mount", "far:web.raw", text(&path)])
        .fails(3, &["web.raw", "read"]);
    m.unmount(&one, &[]).ok();
    m.unmount(&two, &[]).ok();
    let three = m.mount("web.raw", "three", &[]);
    m.unmount(&three, &[]).ok();
}

#[test]
fn a_broken_lease_ends_the_old_writer_and_lets_the_next_write() {
    if !can_mount("a_broken_lease_ends_the_old_writer_and_lets_the_next_write") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 24);
    m.pair("other");
    let disk = m.mount("web.raw", "disk", &["--push-interval", "100ms"]);
    let file = File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    file.sync_all().unwrap();
    m.pushed();
    bytes[..4096].fill(1);
    m.proxy.cut();
    until("the cut is seen", || m.disk()["link"] != "up");
    file.write_all_at(&[2; 4096], 0).unwrap();
    file.sync_all().unwrap();
    let broken = |options: &[&str]| {
        let mut args = vec!["mounts", "break", "web.raw", "-y"];
        args.extend(options);
        m.world.run("far", &args).ok()
    };
    let ran = broken(&[]);
    assert!(
        ran.err.contains("revoked the write lease of web.raw"),
        "{ran:?}"
    );
    // The lease is free now; breaking it again says so.
    assert!(broken(&[]).err.contains("nobody held the write lease"));
    let lines = broken(&["--json"]).json();
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0]["image"], "web.raw");
    assert!(lines[0]["writer"].is_null(), "{lines:?}");
    m.proxy.heal();
    let path = m.world.path("second");
    m.world
        .run("other", &["mount", "far:web.raw", text(&path)])
        .ok();
    assert!(fs::read(&path).unwrap() == bytes);
    until("the old writer gets an error", || {
        file.write_all_at(&[3; 4096], 0)
            .and_then(|()| file.sync_all())
            .is_err()
    });
    let shown = m.near(&["mounts"]).ok().out;
    assert!(
        shown.contains("lease") || shown.contains("right to write"),
        "{shown}"
    );
    drop(file);
    // It cannot push, and the error names the way out.
    m.unmount(&disk, &[]).fails(1, &["--"]);
    m.unmount(&disk, &["--discard", "-y"]).ok();
    assert_eq!(m.list().len(), 0);
    let name = m.world.run("other", &["mounts", "--json"]).ok().json()[0]["name"].clone();
    let writer = &broken(&["--json"]).json()[0]["writer"];
    let note = writer["note"].as_str().unwrap();
    assert!(note.contains(name.as_str().unwrap()), "{writer}");
    assert!(writer["since_unix"].as_u64().unwrap() > 1_700_000_000);
    let second = ["unmount", text(&path), "--discard", "-y"];
    m.world.run("other", &second).ok();
    assert!(m.far_bytes("web.raw") == bytes);

    let audit = ["audit", "--json", "--image", "web.raw"];
    let events = m.world.run("far", &audit).ok().json();
    let of = |event: &str| Vec::from_iter(events.iter().filter(|e| e["event"] == event));
    let (opened, closed, broken) = (of("mount-opened"), of("mount-closed"), of("lease-broken"));
    assert_eq!(opened[0]["detail"], "writing");
    assert_eq!(opened[0]["key"], closed[0]["key"]);
    assert_eq!(closed[0]["bytes"], 4096, "what was pushed: {closed:?}");
    assert_eq!(broken[0]["key"], opened[0]["key"]);
    assert_eq!(broken[1]["key"], opened[1]["key"]);
    assert_ne!(opened[0]["key"], opened[1]["key"]);
}
