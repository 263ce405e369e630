//! Ways to end a mount.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use super::{Mounts, can_mount};
use crate::world::until;

#[test]
fn a_busy_mount_stays_and_says_who_has_it_but_lazy_ends_it() {
    if !can_mount("a_busy_mount_stays_and_says_who_has_it_but_lazy_ends_it") {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 31);
    let disk = m.mount("web.raw", "disk", &[]);
    let file = File::open(&disk).unwrap();
    let me = format!("process {}", std::process::id());
    m.unmount(&disk, &[]).fails(1, &["in use", &me, "--lazy"]);
    assert_eq!(m.list()[0]["state"], "up");
    assert!(fs::read(&disk).unwrap() == bytes, "it does not go on");
    m.unmount(&disk, &["--lazy"]).ok();
    assert_eq!(m.list().len(), 0);
    let mut piece = [0; 4096];
    let stale = file.read_exact_at(&mut piece, 3 << 20);
    assert!(stale.is_err() || piece == bytes[3 << 20..][..4096]);
    drop(file);
    let again = m.mount("web.raw", "disk", &[]);
    assert!(fs::read(&again).unwrap() == bytes);
    // By its name.
    let name = m.list()[0]["name"].as_str().unwrap().to_owned();
    m.near(&["unmount", &name]).ok();
    m.near(&["unmount", &name])
        .fails(3, &["no mount", "drover mounts"]);
}

#[test]
fn offline_leaves_what_was_written_for_the_next_mount() {
    if !can_mount("offline_leaves_what_was_written_for_the_next_mount") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 32);
    let disk = m.mount("web.raw", "disk", &["--push-interval", "1h"]);
    m.pulled();
    write(&disk, 123_456, &[1; 50_000]);
    bytes[123_456..][..50_000].fill(1);
    m.proxy.cut();
    until("the cut is seen", || m.disk()["link"] != "up");
    let would = m.unmount(&disk, &["--offline", "--dry-run"]).ok();
    assert!(would.out.contains("kept for the next mount"), "{would:?}");
    assert_eq!(m.list()[0]["state"], "up");
    let ran = m.unmount(&disk, &["--offline"]).ok();
    assert!(ran.err.contains("not pushed"), "{ran:?}");
    assert_eq!(m.list()[0]["state"], "unmounted");
    assert_eq!(m.list()[0]["disks"][0]["dirty"], 53_248);
    let shown = m.near(&["mounts"]).ok().out;
    assert!(
        shown.contains("to push, its cache is kept for the next mount there"),
        "{shown}"
    );
    m.proxy.heal();
    let before = m.proxy.to_near();
    let disk = m.mount("web.raw", "disk", &[]);
    assert!(
        fs::read(&disk).unwrap() == bytes,
        "what was written is not here"
    );
    m.pulled();
    m.unmount(&disk, &[]).ok();
    let came = m.proxy.to_near() - before;
    assert!(came < 200_000, "{came} bytes came a second time");
    assert!(
        m.far_bytes("web.raw") == bytes,
        "what was written is not there"
    );
}

#[test]
fn discard_forgets_what_was_not_pushed() {
    if !can_mount("discard_forgets_what_was_not_pushed") {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 33);
    let disk = m.mount("web.raw", "disk", &["--push-interval", "1h"]);
    m.pulled();
    m.proxy.cut();
    write(&disk, 0, &[1; 65536]);
    let would = m.unmount(&disk, &["--discard", "--dry-run", "--json"]).ok();
    assert_eq!(would.json()[0]["disposition"], "discarded");
    assert_eq!(would.json()[0]["dirty"], 65536);
    // The prompt cannot be answered here.
    assert_ne!(m.unmount(&disk, &["--discard"]).code, Some(0));
    m.proxy.heal();
    until("the link is back", || m.disk()["link"] == "up");
    let ran = m.unmount(&disk, &["--discard", "-y"]).ok();
    assert!(ran.err.contains("discarded"), "{ran:?}");
    assert_eq!(m.list().len(), 0);
    assert!(
        m.far_bytes("web.raw") == bytes,
        "what was discarded is there"
    );
}

#[test]
fn a_site_that_cannot_be_notified_keeps_the_write_lease_and_the_way_out_is_named() {
    if !can_mount("a_site_that_cannot_be_notified_keeps_the_write_lease_and_the_way_out_is_named") {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 35);
    m.pair("other");
    let second = m.world.path("second");
    let again = ["mount", "far:web.raw", super::text(&second)];
    for (options, thrown) in [
        (&["--discard", "-y"][..], "4.0 KiB discarded"),
        (&["--keep-cache"], ""),
        (&[], ""),
    ] {
        let disk = m.mount("web.raw", "disk", &["--push-interval", "1h"]);
        m.pulled();
        if !thrown.is_empty() {
            write(&disk, 0, &[1; 4096]);
        }
        m.proxy.cut();
        until("the cut is seen", || m.disk()["link"] != "up");
        let ran = m.unmount(&disk, options).ok();
        let lines: Vec<&str> = ran.err.lines().collect();
        assert!(
            ran.err.contains(thrown)
                && lines
                    .last()
                    .is_some_and(|l| l.contains("could not notify far")
                        && l.contains("`drover mounts break web.raw` at far")),
            "{ran:?}"
        );
        m.proxy.heal();
        // The next mount gets the same message, with the way out.
        let refused = m.world.run("other", &again);
        refused.fails(3, &["`drover mounts break web.raw`", "a moment ago"]);
        m.world
            .run("far", &["mounts", "break", "web.raw", "-y"])
            .ok();
        m.world.run("other", &again).ok();
        m.world
            .run("other", &["unmount", super::text(&second)])
            .ok();
        for kept in m.list() {
            let name = kept["name"].as_str().unwrap();
            m.near(&["unmount", name, "--discard", "-y"]).ok();
        }
    }
    // A dead mount, for scripts; readers only keep writers out, for a short time.
    for (options, keeps) in [(&[][..], "write"), (&["--read-only"], "read")] {
        let disk = m.mount("web.raw", "disk", options);
        m.proxy.cut();
        until("the cut is seen", || m.disk()["link"] != "up");
        if keeps == "write" {
            m.kill_daemon();
        }
        let ran = m.unmount(&disk, &["--discard", "-y", "--json"]).ok();
        let there = &ran.json()[0]["kept_there"];
        assert_eq!(there[0]["site"], "far", "{ran:?}");
        assert_eq!(there[0]["image"], "web.raw");
        assert_eq!(there[0]["keeps"], keeps);
        assert!(
            ran.json()[0]["left"]
                .as_str()
                .unwrap()
                .contains("could not notify far"),
            "{ran:?}"
        );
        m.proxy.heal();
        if keeps == "write" {
            m.world
                .run("far", &["mounts", "break", "web.raw", "-y"])
                .ok();
        }
    }
    // One whose peer was forgotten: nobody was asked, so the lease is there.
    m.raw("db.raw", 34);
    let disk = m.mount("db.raw", "disk", &[]);
    m.kill_daemon();
    m.near(&["peers", "forget", "far", "-y"]).ok();
    let ran = m.unmount(&disk, &["--json"]).ok();
    assert_eq!(ran.json()[0]["kept_there"][0]["keeps"], "write", "{ran:?}");
}

#[test]
fn an_unmount_that_waits_for_a_push_is_overtaken_by_one_that_need_not() {
    if !can_mount("an_unmount_that_waits_for_a_push_is_overtaken_by_one_that_need_not") {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 36);
    let disk = m.mount("web.raw", "disk", &["--push-interval", "1h"]);
    m.pulled();
    write(&disk, 0, &[1; 4096]);
    m.proxy.cut();
    until("the cut is seen", || m.disk()["link"] != "up");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| m.unmount(&disk, &[]));
        until("it is ending", || m.list()[0]["state"] == "ending");
        m.unmount(&disk, &[])
            .fails(1, &["4.0 KiB are being pushed", "--offline"]);
        m.unmount(&disk, &["--offline"]).ok();
        first
            .join()
            .unwrap()
            .fails(1, &["another unmount has overtaken", "nothing is lost"]);
    });
    assert_eq!(m.list()[0]["disks"][0]["dirty"], 4096);
}

#[test]
fn a_kept_cache_fetches_nothing_twice_unless_the_image_changed() {
    if !can_mount("a_kept_cache_fetches_nothing_twice_unless_the_image_changed") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 34);
    let disk = m.mount("web.raw", "disk", &[]);
    m.pulled();
    m.unmount(&disk, &["--keep-cache"]).ok();
    let before = m.proxy.to_near();
    let disk = m.mount("web.raw", "disk", &[]);
    m.pulled();
    assert!(fs::read(&disk).unwrap() == bytes);
    let came = m.proxy.to_near() - before;
    assert!(came < 200_000, "{came} bytes came a second time");
    m.unmount(&disk, &["--keep-cache"]).ok();

    // Another mount writes meanwhile.
    let other = m.mount("web.raw", "other", &[]);
    write(&other, 70_000, &[9; 9000]);
    bytes[70_000..][..9000].fill(9);
    m.unmount(&other, &[]).ok();
    let disk = m.mount("web.raw", "disk", &[]);
    assert!(fs::read(&disk).unwrap() == bytes, "a stale cache");
    m.unmount(&disk, &["--keep-cache"]).ok();
}

#[track_caller]
pub fn write(path: &std::path::Path, at: u64, data: &[u8]) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(data, at).unwrap();
    file.sync_all().unwrap();
}
