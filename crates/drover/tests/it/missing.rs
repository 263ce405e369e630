//! A missing image: every command fails with the same exit code.

use crate::world::{Ran, World};

/// Expects one line that names the image, and the right exit code.
#[track_caller]
fn missing(ran: Ran) {
    ran.fails(3, &["nope.img"]);
}

/// Commands that need an image of this home.
const OWN: &[&[&str]] = &[
    &["rm", "nope.img", "--yes"],
    &["rm", "nope.img", "--dry-run"],
    &["verify", "nope.img"],
    &["verify", "nope.img", "--json"],
    &["mounts", "break", "nope.img", "--yes"],
    &["mounts", "break", "nope.img", "--yes", "--json"],
    &["changes", "drop", "nope.img", "--yes"],
    &["changes", "drop", "nope.img", "--dry-run"],
    &["changes", "drop", "nope.img", "--earlier", "--yes"],
    &["changes", "merge", "nope.img"],
    &["changes", "merge", "nope.img", "--as", "x.img"],
    &["changes", "merge", "nope.img", "--dry-run"],
    &["mount", "nope.img", "d"],
    &["mount", "nope.img", "d", "--foreground"],
    &["export", "nope.img", "--nbd", "unix:s"],
    &["export", "nope.img", "--nbd", "unix:s", "--background"],
];

#[test]
fn a_missing_image_has_one_exit_code_here() {
    let world = World::new();
    world.run("far", &["init"]).ok();
    for args in OWN {
        missing(world.run("far", args));
    }
    let _site = world.serve("far", &[]);
    for args in OWN {
        missing(world.run("far", args));
    }
    assert!(!world.path("d").exists());
}

#[test]
fn a_missing_image_has_one_exit_code_at_a_peer() {
    let world = World::new();
    let _site = world.pair();
    for args in [
        &["verify", "nope.img", "far"][..],
        &["mount", "far:nope.img", "d"],
        &["mount", "far:nope.img", "d", "--read-only"],
        &["mount", "far:nope.img", "d", "--direct"],
        &["export", "far:nope.img", "--nbd", "unix:s"],
        &["export", "far:nope.img", "--nbd", "unix:s", "--background"],
    ] {
        missing(world.run("near", args));
    }
    // Without root or a driver, that error comes first.
    let ran = world.run("near", &["attach", "far:nope.img"]);
    if ran.err.contains("nope.img") {
        missing(ran);
    } else {
        eprintln!("SKIP attach: {}", ran.err.trim());
    }
    let mounts = world.run("near", &["mounts", "--json"]).ok();
    assert!(mounts.out.is_empty(), "{mounts:?}");
}

#[test]
fn a_missing_file_is_a_failure() {
    let world = World::new();
    let _site = world.pair();
    for args in [
        &["send", "nope.img", "far"][..],
        &["send", "nope.img", "far", "--dry-run"],
        &["index", "nope.img"],
        &["digest", "nope.img"],
    ] {
        world.run("near", args).fails(1, &["nope.img"]);
    }
}
