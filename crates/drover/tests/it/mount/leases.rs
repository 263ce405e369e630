//! Write and read leases.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use super::{Mounts, can_mount, text};
use crate::world::{Ran, until};

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

/// Pairs a home with the far site, past the link.
fn pair_past_the_link(m: &Mounts, home: &str) {
    let ticket = m.world.run("far", &["ticket", "--advertise", &m.listen]);
    let ticket = ticket.ok().out;
    m.world
        .run(home, &["pair", ticket.trim(), "--name", "far"])
        .ok();
}

/// Mounts the image for another home, as soon as it may.
fn take_over(m: &Mounts) {
    let path = m.world.path("second");
    let mut ran: Option<Ran> = None;
    until("the lease is free", || {
        let other = ["mount", "far:web.raw", text(&path)];
        let tried = m.world.run("other", &other);
        assert!(matches!(tried.code, Some(0 | 3)), "{tried:?}");
        ran.insert(tried).code == Some(0)
    });
}

#[test]
fn a_mount_that_is_gone_for_longer_than_its_term_loses_its_lease() {
    if !can_mount("a_mount_that_is_gone_for_longer_than_its_term_loses_its_lease") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 25);
    pair_past_the_link(&m, "other");
    let path = m.world.path("disk");
    let mut args = vec!["mount", "far:web.raw", text(&path)];
    args.extend(["--push-interval", "100ms", "--lease", "2s"]);
    let ran = m.near(&args).ok();
    assert_eq!(ran.err, "", "it got what it asked for");
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    file.sync_all().unwrap();
    m.pushed();
    bytes[..4096].fill(1);
    // As long as it is connected, nobody else gets it.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let second = m.world.path("second");
    m.world
        .run("other", &["mount", "far:web.raw", text(&second)])
        .fails(3, &["holds the write lease", "out of contact for 2s"]);
    let leases = ["mounts", "leases"];
    assert!(m.world.run("far", &leases).ok().out.contains("2s"));
    m.proxy.cut();
    until("the cut is seen", || m.disk()["link"] != "up");
    file.write_all_at(&[2; 4096], 0).unwrap();
    file.sync_all().unwrap();
    take_over(&m);
    assert!(fs::read(&second).unwrap() == bytes, "what was pushed");

    // It comes back, and is told.
    m.proxy.heal();
    until("the old writer gets an error", || {
        file.write_all_at(&[3; 4096], 0)
            .and_then(|()| file.sync_all())
            .is_err()
    });
    let told = m.disk()["link"].as_str().unwrap().to_owned();
    for words in [
        "the write lease of web.raw ended at",
        "took it",
        "term, 2s",
        "data that was not pushed stays in this mount's cache",
    ] {
        assert!(told.contains(words), "{words:?} is not in {told}");
    }
    drop(file);
    m.unmount(&path, &[]).fails(1, &["--"]);
    assert!(m.disk()["dirty"].as_u64().unwrap() >= 4096, "it is kept");
    m.unmount(&path, &["--discard", "-y"]).ok();
    m.world.run("other", &["unmount", text(&second)]).ok();
    assert!(m.far_bytes("web.raw") == bytes);

    let audit = ["audit", "--json", "--image", "web.raw"];
    let events = m.world.run("far", &audit).ok().json();
    let broken = events.iter().find(|e| e["event"] == "lease-broken");
    let broken = broken.unwrap();
    assert_eq!(broken["by"], "site");
    let detail = broken["detail"].as_str().unwrap();
    assert!(
        detail.contains("out of contact for longer than 2s"),
        "{detail}"
    );
}

#[test]
fn a_site_limits_the_term_and_counts_it_from_its_restart() {
    if !can_mount("a_site_limits_the_term_and_counts_it_from_its_restart") {
        return;
    }
    let mut m = Mounts::new();
    m.raw("web.raw", 26);
    pair_past_the_link(&m, "other");
    m.kill_site();
    fs::write(m.world.path("far/config.toml"), "lease = \"3s\"\n").unwrap();
    m.start_site();
    let path = m.world.path("disk");
    let ran = m.near(&["mount", "far:web.raw", text(&path)]).ok();
    assert!(ran.err.contains("far limits leases"), "{ran:?}");
    assert!(ran.err.contains("out of contact for 3s"), "{ran:?}");
    m.proxy.cut();
    m.kill_site();
    m.start_site();
    let leases = m.world.run("far", &["mounts", "leases", "--json"]);
    assert_eq!(leases.ok().json()[0]["writer"]["term_seconds"], 3);
    take_over(&m);
    m.proxy.heal();
    until("it is told", || {
        let link = m.disk()["link"].as_str().unwrap().to_owned();
        link.contains("ended at")
    });
    m.unmount(&path, &["--discard", "-y"]).ok();
    let second = m.world.path("second");
    m.world.run("other", &["unmount", text(&second)]).ok();
}

#[test]
fn a_term_is_for_mounts_that_write_and_at_least_a_second() {
    let m = Mounts::new();
    let path = m.world.path("disk");
    for (image, options) in [
        ("far:web.raw", &["--lease", "0s"][..]),
        ("far:web.raw", &["--lease", "soon"]),
        ("far:web.raw", &["--lease", "1h", "--read-only"]),
        ("file:web.raw", &["--lease", "1h"]),
    ] {
        let args = [&["mount", image, text(&path)], options].concat();
        let ran = m.near(&args).code(2);
        assert!(ran.err.contains("--lease"), "{ran:?}");
    }
}
