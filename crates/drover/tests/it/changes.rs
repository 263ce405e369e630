//! Tests of `drover changes`: list, drop and merge.

mod merge;
mod shared;

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::mount::ends::write;
use crate::mount::{Mounts, can_mount, text};
use crate::world::until;

/// The changes reported by the far site.
fn changes(m: &Mounts) -> Vec<Value> {
    m.world.run("far", &["changes", "--json"]).ok().json()
}

/// Unmounts; a child process of another test may briefly hold a copy of a file descriptor.
fn unmounted(m: &Mounts, disk: &Path) {
    until("it is unmounted", || m.unmount(disk, &[]).code == Some(0));
}

/// Mounts an image of the far site, writes to it, and unmounts it.
fn written(m: &Mounts, image: &str, writes: &[(u64, &[u8])]) {
    let disk = m.mount(image, "disk", &[]);
    for (offset, data) in writes {
        write(&disk, *offset, data);
    }
    unmounted(m, &disk);
}

#[test]
fn changes_are_listed_and_dropped_with_and_without_a_site() {
    if !can_mount("changes_are_listed_and_dropped_with_and_without_a_site") {
        return;
    }
    let mut m = Mounts::new();
    let bytes = m.raw("web.raw", 81);
    m.raw("db.raw", 82);
    let far = |m: &Mounts, args: &[&str]| m.world.run("far", args);
    assert!(changes(&m).is_empty());
    let none = far(&m, &["changes", "drop", "web.raw"]).ok();
    assert!(none.err.contains("nothing to drop"), "{none:?}");
    far(&m, &["changes", "drop", "nix.raw", "-y"]).fails(3, &["nix.raw", "drover images"]);

    for running in [true, false] {
        let disk = m.mount("web.raw", "disk", &["--push-interval", "100ms"]);
        let name = m.list()[0]["name"].as_str().unwrap().to_owned();
        write(&disk, 8192, &[7; 5000]);
        m.pushed();
        until("it is listed", || !changes(&m).is_empty());
        // While the lease is held, dropping is refused.
        let held = &changes(&m)[0];
        assert!(held["held_by"]["note"].as_str().unwrap().contains(&name));
        far(&m, &["changes", "drop", "web.raw", "-y"]).fails(3, &["web.raw"]);
        unmounted(&m, &disk);
        let reader = m.mount("web.raw", "disk", &["--read-only"]);
        far(&m, &["changes", "drop", "web.raw", "-y"]).fails(3, &["web.raw", "mounted"]);
        unmounted(&m, &reader);
        if !running {
            m.kill_site();
        }

        let list = changes(&m);
        assert_eq!(list.len(), 1, "{list:?}");
        let change = &list[0];
        assert_eq!(change["image"], "web.raw");
        assert_eq!(change["changed_bytes"], 8192);
        assert!(change["room_bytes"].as_u64().unwrap() >= 8192);
        assert!(change["written_unix"].as_i64().unwrap() > 1_700_000_000);
        assert!(change["held_by"].is_null() && change["problem"].is_null());
        assert!(change["by"]["note"].as_str().unwrap().contains(&name));
        let shown = far(&m, &["changes"]).ok().out;
        assert!(shown.contains("web.raw") && shown.contains("8.0 KiB") && shown.contains(&name));
        assert!(shown.contains("free"), "{shown}");
        let images = far(&m, &["images"]).ok().out;
        assert!(
            images.contains("CHANGES") && images.contains("8.0 KiB"),
            "{images}"
        );
        let images = far(&m, &["images", "--json"]).ok().json();
        let of = |name: &str| images.iter().find(|i| i["name"] == name).unwrap();
        assert_eq!(of("web.raw")["changed_bytes"], 8192);
        assert_eq!(of("db.raw")["changed_bytes"], 0);
        assert_eq!(change["base"], of("web.raw")["digest"]);
        let verified = far(&m, &["verify", "web.raw"]).ok();
        assert!(
            verified.err.contains("changes by mounts, 8.0 KiB"),
            "{verified:?}"
        );

        let drop = ["changes", "drop", "web.raw"];
        far(&m, &drop).fails(2, &["--yes"]);
        let would = far(&m, &[&drop[..], &["--dry-run"]].concat()).ok().out;
        assert!(
            would.contains("would drop") && would.contains("8.0 KiB"),
            "{would}"
        );
        let would = far(&m, &[&drop[..], &["--dry-run", "--json"]].concat());
        assert_eq!(would.ok().json()[0]["dropped"], false);
        assert_eq!(changes(&m).len(), 1);
        let dropped = far(&m, &[&drop[..], &["-y", "--json"]].concat())
            .ok()
            .json();
        assert_eq!(dropped[0]["dropped"], true);
        assert_eq!(dropped[0]["changed_bytes"], 8192);
        assert!(changes(&m).is_empty());
        let overlay = m.world.path("far/mounted/overlays/web.raw");
        assert!(!overlay.join("data").exists());
        if !running {
            m.start_site();
        }
        assert!(m.far_bytes("web.raw") == bytes);
    }
}

#[test]
fn a_cache_of_what_was_dropped_is_not_taken_for_the_image() {
    if !can_mount("a_cache_of_what_was_dropped_is_not_taken_for_the_image") {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 83);
    let disk = m.mount("web.raw", "disk", &[]);
    write(&disk, 0, &[9; 65536]);
    m.unmount(&disk, &["--keep-cache"]).ok();
    m.world
        .run("far", &["changes", "drop", "web.raw", "-y"])
        .ok();
    // The first edition and epoch of another mount must not match those of the cache.
    let disk = m.mount("web.raw", "other", &[]);
    write(&disk, 1 << 20, &[8; 4096]);
    unmounted(&m, &disk);
    let disk = m.mount("web.raw", "disk", &[]);
    let mut expected = bytes;
    expected[1 << 20..][..4096].fill(8);
    assert!(fs::read(&disk).unwrap() == expected);
    unmounted(&m, &disk);
}

#[test]
fn what_was_written_over_an_earlier_image_is_listed_and_dropped() {
    if !can_mount("what_was_written_over_an_earlier_image_is_listed_and_dropped") {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 84);
    written(&m, "web.raw", &[(0, &[5; 4096])]);
    let new = m.raw("web.raw", 85);
    // Until the new image is mounted, the old changes are in the directory its own would use; they do not belong to it.
    let images = m.world.run("far", &["images", "--json"]).ok().json();
    assert_eq!(images[0]["changed_bytes"], 0);
    let verified = m.world.run("far", &["verify", "web.raw"]).ok();
    assert!(!verified.err.contains("changes"), "{verified:?}");
    let earlier = ["changes", "drop", "web.raw", "--earlier", "-y"];
    let none = m.world.run("far", &earlier).ok();
    assert!(none.err.contains("without --earlier"), "{none:?}");
    assert!(m.far_bytes("web.raw") == new);
    let list = changes(&m);
    assert_eq!(list.len(), 1, "{list:?}");
    assert_eq!(list[0]["earlier"], true);
    let shown = m.world.run("far", &["changes"]).ok().out;
    assert!(shown.contains("of an earlier image"), "{shown}");
    let none = m.world.run("far", &["changes", "drop", "web.raw", "-y"]);
    assert!(none.ok().err.contains("--earlier drops"));
    assert_eq!(changes(&m).len(), 1);
    m.world.run("far", &earlier).ok();
    assert!(changes(&m).is_empty());

    // Also for an image that was removed.
    written(&m, "web.raw", &[(0, &[5; 4096])]);
    let gone = m.world.run("far", &["rm", "web.raw", "-y"]).ok();
    assert!(gone.out.contains("drover changes drop web.raw"), "{gone:?}");
    let shown = m.world.run("far", &["changes"]).ok().out;
    assert!(shown.contains("image removed"), "{shown}");
    m.world
        .run("far", &["changes", "drop", "web.raw", "-y"])
        .ok();
    assert!(changes(&m).is_empty());
    m.index("web.raw");
    let path = m.world.path("web.raw");
    assert!(m.far_bytes("web.raw") == fs::read(text(&path)).unwrap());
}
