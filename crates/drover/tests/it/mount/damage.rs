//! Damaged state of mounts and sites: bytes of one image are never served for another, written data is never hidden,
//! and each error names the way out.

use std::fs;
use std::path::PathBuf;

use super::ends::write;
use super::{Mounts, can_mount, text};
use crate::world::until;

/// The directory of the near home's only mount.
fn place(m: &Mounts) -> PathBuf {
    let mounts = fs::read_dir(m.world.path("near/mounts")).unwrap();
    let mut found: Vec<_> = mounts.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Damages a file: sets another version, or flips a byte.
fn damage(path: &PathBuf, version: bool) {
    let mut bytes = fs::read(path).unwrap();
    let at = match version {
        true => 8,
        false => bytes.len() / 2,
    };
    bytes[at] ^= 0x40;
    fs::write(path, bytes).unwrap();
}

/// The cache itself identifies its image.
#[test]
fn a_cache_is_not_used_for_another_image_whatever_else_is_damaged() {
    if !can_mount("a_cache_is_not_used_for_another_image_whatever_else_is_damaged") {
        return;
    }
    for version in [true, false] {
        let m = Mounts::new();
        m.raw("web.raw", 81);
        m.mount("web.raw", "disk", &["--read-only"]);
        m.pulled();
        m.kill_daemon();
        damage(&place(&m).join("known"), version);
        // An image of the same name and size that was never written to.
        let new = m.raw("web.raw", 82);
        let disk = m.mount("web.raw", "disk", &["--read-only"]);
        assert!(fs::read(&disk).unwrap() == new, "stale bytes");
        m.unmount(&disk, &[]).ok();
    }
}

#[test]
fn without_what_was_known_nothing_is_mounted_from_memory_and_nothing_is_lost() {
    if !can_mount("without_what_was_known_nothing_is_mounted_from_memory_and_nothing_is_lost") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 83);
    let disk = m.mount("web.raw", "disk", &["--push-interval", "1h"]);
    m.pulled();
    write(&disk, 8192, &[5; 4096]);
    bytes[8192..][..4096].fill(5);
    m.unmount(&disk, &["--offline"]).ok();
    damage(&place(&m).join("known"), false);
    m.proxy.cut();
    m.near(&["mount", "far:web.raw", text(&disk)]).fails(
        1,
        &["known", "damaged", "while the other site is reachable"],
    );
    assert_eq!(m.disk()["dirty"], 4096, "it is still here");
    m.proxy.heal();
    let disk = m.mount("web.raw", "disk", &[]);
    assert!(fs::read(&disk).unwrap() == bytes);
    m.pushed();
    m.unmount(&disk, &[]).ok();
    assert!(m.far_bytes("web.raw") == bytes);
}

#[test]
fn a_mount_whose_record_is_damaged_is_listed_with_the_way_out() {
    if !can_mount("a_mount_whose_record_is_damaged_is_listed_with_the_way_out") {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 84);
    let disk = m.mount("web.raw", "disk", &["--push-interval", "1h"]);
    m.pulled();
    write(&disk, 0, &[6; 4096]);
    m.unmount(&disk, &["--offline"]).ok();
    let place = place(&m);
    let good = fs::read(place.join("record.json")).unwrap();
    fs::write(place.join("record.json"), &good[..good.len() / 2]).unwrap();
    let listed = m.list();
    assert_eq!(listed.len(), 1, "it is hidden");
    assert_eq!(listed[0]["state"], "damaged");
    assert_eq!(listed[0]["disks"][0]["dirty"], 4096);
    let shown = m.near(&["mounts"]).ok().out;
    for word in ["damaged", "4.0 KiB to push", "record.json"] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
    // No other image can be mounted over it at the same place.
    m.near(&["mount", "far:web.raw", text(&disk)])
        .fails(1, &["record.json", "damaged"]);
    fs::write(place.join("record.json"), good).unwrap();
    let disk = m.mount("web.raw", "disk", &[]);
    m.pushed();
    m.unmount(&disk, &[]).ok();
}

#[test]
fn a_damaged_lease_hides_nothing_and_is_replaced_by_a_break() {
    if !can_mount("a_damaged_lease_hides_nothing_and_is_replaced_by_a_break") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = m.raw("web.raw", 85);
    let disk = m.mount("web.raw", "disk", &[]);
    write(&disk, 4096, &[8; 4096]);
    bytes[4096..8192].fill(8);
    m.pushed();
    m.unmount(&disk, &[]).ok();
    m.kill_site();
    let lease = m.world.path("far/mounted/overlays/web.raw/lease");
    damage(&lease, false);
    m.start_site();
    m.near(&["mount", "far:web.raw", text(&disk)])
        .fails(3, &["lease", "damaged", "drover mounts break"]);
    let listed = m.world.run("far", &["mounts", "leases", "--json"]).ok();
    let problem = &listed.json()[0]["problem"];
    assert!(problem.as_str().unwrap().contains("damaged"), "{problem}");
    let broken = ["mounts", "break", "web.raw", "-y"];
    let ran = m.world.run("far", &broken).ok();
    assert!(ran.err.contains("damaged lease"), "{ran:?}");
    assert!(m.far_bytes("web.raw") == bytes);
    // A deleted file does not hide it either.
    m.kill_site();
    fs::remove_file(&lease).unwrap();
    m.start_site();
    until("the site is back", || {
        m.world.run("far", &["status"]).code == Some(0)
    });
    assert!(m.far_bytes("web.raw") == bytes);
}
