//! A directory of many image files that are known, and indexed when a similar image is sent.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::world::{World, same};

/// Files in the directory.
const FILES: u64 = 200;

/// The one that the sent image was made from.
const BASE: u64 = 117;

/// Bytes of the files that only one of the systems has.
const OWN_BYTES: usize = 400_000;

fn mke2fs() -> Option<&'static str> {
    let found = ["mke2fs", "/usr/sbin/mke2fs", "/sbin/mke2fs"]
        .into_iter()
        .find(|program| Command::new(program).arg("-V").output().is_ok());
    if found.is_none() {
        eprintln!("SKIP: mke2fs (Debian: e2fsprogs) is not installed");
    }
    found
}

/// An image of a small operating system, number `n`, with `more` bytes beside it.
fn system(mke2fs: &str, tree: &Path, file: &Path, n: u64, more: usize) {
    let _ = fs::remove_dir_all(tree);
    for directory in ["etc", "usr", "var/lib/dpkg"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
    }
    let release = format!("ID=system{n}\nVERSION_ID=\"{n}\"\nPRETTY_NAME=\"System {n} (test)\"\n");
    fs::write(tree.join("etc/os-release"), release).unwrap();
    let package =
        |i: u64| format!("Package: p{i}\nStatus: install ok installed\nVersion: {n}.{i}\n\n");
    let status: String = (0..60).map(package).collect();
    fs::write(tree.join("var/lib/dpkg/status"), status).unwrap();
    let mut own = vec![0; OWN_BYTES];
    fastrand::Rng::with_seed(n).fill(&mut own);
    fs::write(tree.join("usr/own"), own).unwrap();
    if more > 0 {
        let mut bytes = vec![0; more];
        fastrand::Rng::with_seed(1000 + n).fill(&mut bytes);
        fs::write(tree.join("usr/more"), bytes).unwrap();
    }
    let made = Command::new(mke2fs)
        .args([
            "-q",
            "-F",
            "-t",
            "ext4",
            "-b",
            "4096",
            "-O",
            "^has_journal",
            "-d",
        ])
        .args([tree, file])
        .arg("2M")
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
}

#[test]
fn of_many_known_files_the_similar_one_is_indexed_when_an_image_is_sent() {
    let Some(mke2fs) = mke2fs() else { return };
    let world = World::new();
    let (library, tree) = (world.path("library"), world.path("tree"));
    fs::create_dir(&library).unwrap();
    for n in 0..FILES {
        system(
            mke2fs,
            &tree,
            &library.join(format!("system-{n}.raw")),
            n,
            0,
        );
    }
    // Neither is taken: one has a backing file, one is no image that can be read.
    fs::write(library.join("a:b.raw"), b"x").unwrap();
    fs::write(library.join("cut.qcow2"), b"QFI\xfb\0\0\0\x03").unwrap();
    let sent = world.path("web.raw");
    system(mke2fs, &tree, &sent, BASE, 100_000);

    let far = world.pair();
    let path = library.to_str().unwrap();
    let index = ["index", path, "--json"];
    let taken = world.run("far", &index).ok().json();
    let taken = &taken[0];
    assert_eq!(
        (&taken["looked"], &taken["skipped"]),
        (&FILES.into(), &2.into()),
        "{taken}"
    );
    let all = FILES * (2 << 20);
    let read = taken["read_bytes"].as_u64().unwrap();
    assert!(read < all / 10, "{read} of {all}");
    let again = world.run("far", &index).ok().json();
    assert_eq!(
        (
            &again[0]["looked"],
            &again[0]["unchanged"],
            &again[0]["read_bytes"]
        ),
        (&0.into(), &FILES.into(), &0.into())
    );
    assert_eq!(world.run("far", &["images", "--json"]).ok().out, "");
    let known = world.run("far", &["images", "--known", "--json"]).ok();
    let known = known.json();
    assert_eq!(known.len() as u64, FILES);
    assert_eq!(known[0]["packages"], 60, "{}", known[0]);

    // They are known after a restart, too.
    drop(far);
    let far = world.serve("far", &[]);
    world
        .run("near", &["pair", &far.ticket, "--name", "far2"])
        .ok();
    let lines = world
        .run("near", &["send", "web.raw", "far2", "--json"])
        .ok();
    let lines = lines.json();
    let image = &lines.last().unwrap()["images"][0];
    let matched = image["matched_blocks"].as_u64().unwrap();
    assert!(matched >= OWN_BYTES as u64 / 4096, "{image}");
    let sent_blocks = image["sent_blocks"].as_u64().unwrap();
    assert!(sent_blocks < 60, "{image}");
    same(&world.delivered("far", "web.raw"), &sent);

    let images = world.run("far", &["images", "--json"]).ok().json();
    let names: Vec<_> = images.iter().map(|i| i["name"].as_str().unwrap()).collect();
    let base = format!("system-{BASE}.raw");
    assert_eq!(names, [&base, "web.raw"], "no other was read");
    assert_eq!(images[1]["system_name"], format!("System {BASE} (test)"));
    assert_eq!(images[1]["file_system"], "ext4");
    let table = world.run("far", &["images"]).ok();
    assert!(table.out.contains("System 117 (test)"), "{table:#?}");
    assert!(table.err.contains("199 more files are known"), "{table:#?}");
    let similar = ["images", "--similar", "web.raw", "--json"];
    let similar = world.run("far", &similar).ok().json();
    assert_eq!(similar.len(), 1, "{similar:?}");
    assert_eq!(similar[0]["name"], base.as_str());
    // By all blocks of both.
    let part = similar[0]["similarity"].as_f64().unwrap();
    assert!((0.6..0.95).contains(&part), "{part}");
    let packages = ["images", "--packages", "web.raw", "--json"];
    let packages = world.run("far", &packages).ok().json();
    assert_eq!(packages.len(), 60);
    assert_eq!(packages[0]["name"], "p0");
    // What was removed is not known either.
    world.run("far", &["rm", &base, "--yes"]).ok();
    let known = world.run("far", &["images", "--known", "--json"]).ok();
    assert_eq!(known.json().len() as u64, FILES - 1);
    assert!(library.join(base).exists());
}

#[test]
fn a_directory_is_read_at_once_if_that_is_asked_for() {
    let world = World::new();
    fs::create_dir(world.path("library")).unwrap();
    for n in 0..3 {
        world.image(&format!("library/{n}.img"), n, 40);
    }
    let known = world.run("h", &["index", "library"]).ok();
    assert!(known.out.contains("3 files looked at"), "{known:#?}");
    assert_eq!(world.run("h", &["images", "--json"]).ok().out, "");
    let indexed = world.run("h", &["index", "--now", "library", "--json"]);
    assert_eq!(indexed.ok().json().len(), 3);
    assert_eq!(world.run("h", &["images", "--json"]).ok().json().len(), 3);
    assert_eq!(
        world.run("h", &["images", "--known", "--json"]).ok().out,
        ""
    );
    let taken = world.run("h", &["index", "library", "--json"]).ok().json();
    assert_eq!(taken[0]["indexed"], 3);
}
