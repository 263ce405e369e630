//! Mounts that must fail, and caches that are damaged or belong to another image.

use std::fs;
use std::os::unix::fs::FileExt;

use super::{Mounts, can_mount, text};
use crate::world::World;

#[test]
fn strangers_and_unknown_names_get_one_line() {
    let mut m = Mounts::new();
    m.raw("web.raw", 61);
    let no_image = |image: &str, says: &[&str]| {
        m.near(&["export", image, "--nbd", "unix:s"]).fails(3, says);
    };
    no_image("far:nope", &["far has no", "nope", "`drover images far`"]);
    no_image("nope", &["this site has no", "nope", "`drover images`"]);
    m.near(&["mount", "lyon:web.raw", "d"]).fails(3, &["lyon"]);
    m.near(&["mount", "far:../x", "d"]).code(2);
    m.near(&["mount", "web.raw", "d", "--direct"]).code(2);
    m.near(&["unmount", "d"]).fails(3, &["d", "drover mounts"]);
    // No longer trusted.
    let peers = m.world.run("far", &["peers", "--json"]).ok().json();
    let name = peers[0]["name"].as_str().unwrap();
    m.world.run("far", &["peers", "forget", name, "-y"]).ok();
    m.near(&["mount", "far:web.raw", "d"]).fails(3, &["far"]);
    assert_eq!(m.list().len(), 0);
    m.kill_site();
}

#[test]
fn options_of_nothing_are_refused_or_say_what_they_mean() {
    let world = World::new();
    let refused = |option: &str, value: &str, says: &str| {
        let ran = world.run("near", &["mount", "far:web.raw", "d", option, value]);
        let ran = ran.code(2);
        let line = ran.err.lines().next().unwrap();
        assert!(line.contains(option) && line.contains(says), "{line}");
    };
    refused("--cache-size", "0", "--direct");
    refused("--window", "0", "--prefetch none");
    refused("--chunk", "0", "from 4K to 4M");
    refused("--push-interval", "0", "is not a duration");
    let help = world.run("near", &["mount", "--help"]).ok().out;
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for says in [
        "at least 16 chunks (1 MiB by default)",
        "48K to 256M; a value outside is raised or lowered",
        "0s pushes continuously",
    ] {
        assert!(help.contains(says), "{says}: {help}");
    }
}

#[test]
fn the_least_options_work() {
    if !can_mount("the_least_options_work") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 64);
    let least = [
        "--push-interval",
        "0s",
        "--window",
        "1",
        "--cache-size",
        "1",
    ];
    let disk = m.mount("web.raw", "disk", &least);
    let file = fs::File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&[7; 5000], 1 << 20).unwrap();
    bytes[1 << 20..][..5000].fill(7);
    file.sync_all().unwrap();
    drop(file);
    m.pushed();
    assert!(fs::read(&disk).unwrap() == bytes);
    m.unmount(&disk, &[]).ok();
    assert!(m.far_bytes("web.raw") == bytes);
}

#[test]
fn a_cache_of_another_image_and_a_torn_one_are_not_believed() {
    if !can_mount("a_cache_of_another_image_and_a_torn_one_are_not_believed") {
        return;
    }
    let m = Mounts::new();
    let one = m.raw("one.raw", 62);
    let two = m.raw("two.raw", 63);
    let mut caches = Vec::new();
    for image in ["one.raw", "two.raw"] {
        let disk = m.mount(image, image_file(image), &[]);
        m.pulled();
        let name = m.list()[0]["name"].as_str().unwrap().to_owned();
        m.unmount(&disk, &["--keep-cache"]).ok();
        caches.push((name.clone(), m.world.path("near/mounts").join(name)));
        // Moved aside so that the next listing does not include it.
        let (_, dir) = &caches[caches.len() - 1];
        fs::rename(dir, m.world.path(image_file(image)).with_extension("kept")).unwrap();
    }
    // Swaps the two caches.
    let kept = |image: &str| m.world.path(image_file(image)).with_extension("kept");
    for ((_, dir), image) in caches.iter().zip(["one.raw", "two.raw"]) {
        fs::rename(kept(image), dir).unwrap();
    }
    let (a, b) = (caches[0].1.join("cache"), caches[1].1.join("cache"));
    let aside = m.world.path("aside");
    fs::rename(&a, &aside).unwrap();
    fs::rename(&b, &a).unwrap();
    fs::rename(&aside, &b).unwrap();
    let path = m.world.path(image_file("one.raw"));
    // Nothing is dirty, so the cache starts over.
    let disk = m.mount("one.raw", image_file("one.raw"), &[]);
    assert!(fs::read(&disk).unwrap() == one, "the other's bytes");
    m.unmount(&disk, &["--keep-cache"]).ok();
    // A torn cache is either rejected or read correctly.
    for entry in fs::read_dir(&a).unwrap().map(Result::unwrap) {
        if entry.file_name() == "data" {
            continue;
        }
        let length = entry.metadata().unwrap().len();
        let file = fs::File::options().write(true).open(entry.path()).unwrap();
        file.set_len(length - length.min(37)).unwrap();
    }
    let ran = m.near(&["mount", "far:one.raw", text(&path)]);
    match ran.code {
        Some(0) => {
            assert!(fs::read(&path).unwrap() == one, "a torn map was believed");
            m.unmount(&path, &[]).ok();
        }
        _ => {
            ran.fails(1, &["cache"]);
        }
    }
    let disk = m.mount("two.raw", image_file("two.raw"), &[]);
    assert!(fs::read(&disk).unwrap() == two);
    m.unmount(&disk, &[]).ok();
}

fn image_file(image: &str) -> &str {
    image.strip_suffix(".raw").unwrap()
}
