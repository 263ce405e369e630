//! Images removed, replaced or modified while they are or were mounted: no data is lost silently, and bytes of one
//! image are never served for another.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::ends::write;
use super::{Mounts, can_mount, text};
use crate::world::{same, until, wait};

const BREAK: [&str; 4] = ["mounts", "break", "web.raw", "-y"];

/// Number of write leases according to the far site.
fn leases(m: &Mounts) -> usize {
    let list = m.world.run("far", &["mounts", "leases", "--json"]);
    list.ok().json().len()
}

#[test]
fn removing_an_image_says_what_mounts_wrote_to_it_and_leaves_that() {
    if !can_mount("removing_an_image_says_what_mounts_wrote_to_it_and_leaves_that") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = m.raw("web.raw", 71);
    let overlay = m.world.path("far/mounted/overlays/web.raw");
    let words = |out: &str, verb: &str| {
        assert!(
            out.contains(verb)
                && out.contains("its changes (")
                && out.contains(" KiB) stay in")
                && out.contains(text(&overlay)),
            "{out}"
        );
    };
    let disk = m.mount("web.raw", "disk", &[]);
    write(&disk, 8192, &[7; 4096]);
    bytes[8192..][..4096].fill(7);

    // Also while no site runs, an image with pending pushes must stay.
    m.pushed();
    m.kill_site();
    let rm = ["rm", "web.raw", "-y"];
    let path = m.world.path("web.raw");
    m.world.run("far", &rm).fails(
        3,
        &["web.raw", "write lease", "`drover mounts break web.raw`"],
    );
    m.start_site();
    until("the link is back", || m.disk()["link"] == "up");
    m.world.run("far", &rm).fails(3, &["write lease"]);
    m.unmount(&disk, &[]).ok();

    let would = m.world.run("far", &["rm", "web.raw", "--dry-run"]).ok();
    words(&would.out, "would remove web.raw from the catalog");
    let would = ["rm", "web.raw", "--dry-run", "--json"];
    let would = m.world.run("far", &would).ok().json();
    assert_eq!(would[0]["written"], text(&overlay));
    words(
        &m.world.run("far", &rm).ok().out,
        "removed web.raw from the catalog",
    );
    // Indexing the same image again restores it.
    m.world.run("far", &["index", text(&path)]).ok();
    assert!(m.far_bytes("web.raw") == bytes);
}

#[test]
fn a_file_that_was_changed_in_place_is_not_shown_and_every_way_out_is_open() {
    if !can_mount("a_file_that_was_changed_in_place_is_not_shown_and_every_way_out_is_open") {
        return;
    }
    let mut m = Mounts::new();
    m.raw("web.raw", 72);
    let disk = m.mount("web.raw", "disk", &["--push-interval", "1h"]);
    m.pulled();
    write(&disk, 0, &[1; 4096]);
    m.kill_site();
    let path = m.world.path("web.raw");
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[9; 100], 70_000).unwrap();
    drop(file);
    let new = fs::read(&path).unwrap();
    m.start_site();

    until("the mount has heard of it", || {
        let link = m.disk()["link"].as_str().unwrap().to_owned();
        link.contains("was changed after it had been indexed")
    });
    m.unmount(&disk, &[])
        .fails(1, &["4.0 KiB", "drover index", "--offline", "--discard"]);
    // It must not be indexed in its present state while a mount may push to the earlier one.
    let index = ["index", text(&path)];
    m.world
        .run("far", &index)
        .fails(3, &["write lease", "`drover mounts break web.raw`"]);
    m.world.run("far", &BREAK).ok();
    m.world.run("far", &index).ok();
    m.unmount(&disk, &["--discard", "-y"]).ok();
    let disk = m.mount("web.raw", "disk", &[]);
    assert!(fs::read(&disk).unwrap() == new);
    m.unmount(&disk, &[]).ok();
    // A file that was replaced or resized is not served at all.
    File::options()
        .write(true)
        .open(&path)
        .and_then(|file| file.set_len(1 << 20))
        .unwrap();
    m.near(&["mount", "far:web.raw", text(&disk)])
        .fails(3, &["web.raw was changed", "drover index"]);
    assert_eq!(leases(&m), 0);
}

/// Replaces `web.raw` with another image, with the site's consent.
fn replace(m: &Mounts, seed: u64) -> Vec<u8> {
    m.world.run("far", &BREAK).ok();
    m.raw("web.raw", seed)
}

#[test]
fn what_was_written_offline_to_an_image_that_was_replaced_is_refused_with_the_way_out() {
    if !can_mount(
        "what_was_written_offline_to_an_image_that_was_replaced_is_refused_with_the_way_out",
    ) {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 73);
    let disk = m.mount("web.raw", "disk", &["--push-interval", "1h"]);
    m.pulled();
    write(&disk, 0, &[1; 4096]);
    m.unmount(&disk, &["--offline"]).ok();
    let new = replace(&m, 74);
    let name = m.list()[0]["name"].as_str().unwrap().to_owned();
    let way_out = format!("`drover unmount {name} --discard`");
    m.near(&["mount", "far:web.raw", text(&disk)])
        .fails(1, &["replaced at the other site", "4.0 KiB", &way_out]);
    until("it keeps nobody from the new image", || leases(&m) == 0);
    assert_eq!(m.disk()["dirty"], 4096, "it is still here");
    let ran = m.unmount(Path::new(&name), &["--discard", "-y"]).ok();
    assert!(!ran.err.contains("could not notify"), "{ran:?}");
    let disk = m.mount("web.raw", "disk", &[]);
    assert!(fs::read(&disk).unwrap() == new, "stale bytes");
    m.unmount(&disk, &[]).ok();
}

#[test]
fn a_mount_whose_image_was_replaced_says_so_and_holds_nothing() {
    if !can_mount("a_mount_whose_image_was_replaced_says_so_and_holds_nothing") {
        return;
    }
    for options in [&[][..], &["--read-only"]] {
        let m = Mounts::new();
        m.raw("web.raw", 75);
        let disk = m.mount("web.raw", "disk", options);
        m.pulled();
        m.proxy.cut();
        until("the cut is seen", || m.disk()["link"] != "up");
        let new = replace(&m, 76);
        m.proxy.heal();
        until("the mount has heard of it", || {
            let link = m.disk()["link"].as_str().unwrap().to_owned();
            link.contains("is another image at the site now; unmount it and mount it again")
                || link.contains("was revoked")
        });
        until("nothing is held", || leases(&m) == 0);
        m.unmount(&disk, &["--discard", "-y"]).ok();
        let disk = m.mount("web.raw", "disk", options);
        assert!(fs::read(&disk).unwrap() == new, "stale bytes");
        m.unmount(&disk, &[]).ok();
    }
}

#[test]
fn an_image_that_a_mount_began_to_write_is_not_replaced_by_what_was_on_its_way() {
    if !can_mount("an_image_that_a_mount_began_to_write_is_not_replaced_by_what_was_on_its_way") {
        return;
    }
    let m = Mounts::new();
    let old = m.world.image("old.img", 77, 600);
    let new = m.world.image("new.img", 78, 4096);
    let send = |image| ["send", image, "far", "--as", "x.img", "--limit", "8M"];
    m.near(&send("old.img")).ok();
    let mut sending = m.world.drover("near", &send("new.img")).spawn().unwrap();
    until("it is on its way", || {
        let status = m.world.run("far", &["status", "--json"]).ok().json();
        let done = &status[0]["domains"][0]["site"]["transfers"][0]["done_blocks"];
        done.as_u64().is_some_and(|d| d > 0)
    });
    let disk = m.mount("x.img", "disk", &[]);
    write(&disk, 4096, &[7; 4096]);
    assert_eq!(wait(&mut sending), Some(3));
    m.near(&send("new.img"))
        .fails(3, &["x.img", "write lease", "drover mounts break"]);
    m.unmount(&disk, &[]).ok();
    let mut bytes = fs::read(&old).unwrap();
    bytes[4096..8192].fill(7);
    assert!(m.far_bytes("x.img") == bytes);
    // The lease is free now; blocks that had arrived are not sent again.
    let sent = m.near(&["send", "new.img", "far", "--as", "x.img", "--json"]);
    let sent = sent.ok().json();
    let image = &sent.last().unwrap()["images"][0];
    assert_eq!(image["sent_blocks"].as_u64(), Some(0), "{image}");
    same(&m.world.delivered("far", "x.img"), &new);
}
