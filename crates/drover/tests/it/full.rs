//! A home on a completely full file system: cleanup commands must still work.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::mount::{can_mount, clear_all, text};
use crate::world::{Ran, World, until};

/// The full size of the reserve.
const RESERVE: u64 = 8 << 20;

/// A world whose home `far` is on its own small file system, unmounted at the end.
pub struct Small {
    pub world: World,
    pub home: PathBuf,
}

impl Small {
    /// `None`, with a message, where no file system can be mounted.
    pub fn new(test: &str) -> Option<Small> {
        if !can_mount(test) {
            return None;
        }
        let world = World::new();
        let home = world.path("far");
        fs::create_dir(&home).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=96m,mode=700", "none"])
            .arg(&home)
            .output()
            .unwrap();
        if !mounted.status.success() {
            let err = String::from_utf8_lossy(&mounted.stderr);
            eprintln!("SKIP {test}: no tmpfs: {err}");
            return None;
        }
        Some(Small { world, home })
    }

    /// Fills the file system completely.
    pub fn fill(&self) {
        let junk = File::options()
            .create(true)
            .append(true)
            .open(self.home.join("junk"))
            .unwrap();
        for size in [1 << 20, 1 << 12, 512, 1] {
            let bytes = vec![1; size];
            while (&junk).write(&bytes).is_ok_and(|n| n > 0) {}
        }
        assert!((&junk).write(&[1; 1 << 12]).is_err(), "there is room left");
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        self.world.run("far", args)
    }

    fn reserve(&self) -> u64 {
        let about = self.home.join("reserve").metadata();
        about.map_or(0, |about| about.len().min(about.blocks() * 512))
    }

    /// Writes to one of the home's own images through a mount until the disk is full, and leaves the mount's write
    /// lease behind.
    fn filled_by_a_mount(&self, image: &str) {
        let path = self.world.path("disk");
        self.run(&["mount", image, text(&path)]).ok();
        let disk = File::options().write(true).open(&path).unwrap();
        let mut noise = vec![0; 1 << 20];
        let mut rng = fastrand::Rng::with_seed(7);
        let mut at = 0;
        loop {
            rng.fill(&mut noise);
            assert!(at < 200 << 20, "200 MiB fit into 96");
            let wrote = disk.write_all_at(&noise, at).and_then(|()| disk.sync_all());
            if wrote.is_err() {
                break;
            }
            at += 1 << 20;
        }
        drop(disk);
        let mounts = self.run(&["mounts", "--json"]).ok().json();
        let process = mounts[0]["process"].as_u64().unwrap();
        crate::world::signal(u32::try_from(process).unwrap(), "KILL");
        let _ = Command::new("umount").arg("-l").arg(&path).output();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        clear_all(&self.home.join("mounts"));
        let _ = Command::new("umount").arg("-l").arg(&self.home).output();
    }
}

/// An image with space to write to, outside of the small file system.
pub fn large(world: &World, name: &str) -> PathBuf {
    let path = world.image(name, 5, 10);
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(256 << 20)
        .unwrap();
    path
}

fn indexed(small: &Small, names: &[&str]) {
    for (seed, name) in names.iter().enumerate() {
        let path = small.world.image(name, seed as u64, 50);
        small.run(&["index", text(&path)]).ok();
    }
}

/// Runs each cleanup command on a disk that has been filled again.
fn clears_up(small: &Small, way: &str) {
    let run = |args: &[&str]| {
        small.fill();
        let ran = small.run(args).ok();
        let reserve = small.reserve();
        assert!(reserve >= RESERVE / 4, "{way} {args:?}: {reserve} are left");
        ran
    };
    let ticket = run(&["ticket", "--advertise", "127.0.0.1:1"]).out;
    assert!(ticket.starts_with("drover1"), "{ticket}");
    let broken = run(&["mounts", "break", "disk.img", "--yes"]).err;
    assert!(
        broken.contains("revoked the write lease of disk.img"),
        "{broken}"
    );
    run(&["rm", "a.img", "--yes"]);
    run(&["changes"]);
    let dropped = run(&["changes", "drop", "disk.img", "--yes"]).out;
    assert!(
        dropped.contains("dropped the changes to disk.img"),
        "{dropped}"
    );
    assert!(
        small.run(&["changes", "--json"]).ok().out.is_empty(),
        "{way}"
    );
    run(&["rm", "disk.img", "--yes"]);
    run(&["peers", "forget", "near", "--yes"]);
    fs::remove_file(small.home.join("junk")).unwrap();
    let list = small.run(&["images", "--json"]).ok().json();
    let names: Vec<_> = list
        .iter()
        .map(|i| i["name"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["b.img"], "{way}");
}

fn paired(small: &Small) {
    let ticket = small.run(&["ticket", "--advertise", "127.0.0.1:1"]).ok();
    drop(ticket);
    small.world.run("near", &["init", "--name", "near"]).ok();
    let site = small.world.serve("near", &[]);
    small.run(&["pair", &site.ticket, "--name", "near"]).ok();
}

#[test]
fn a_full_disk_is_cleared_up_without_a_site() {
    let Some(small) = Small::new("a_full_disk_is_cleared_up_without_a_site") else {
        return;
    };
    small.run(&["init"]).ok();
    assert_eq!(small.reserve(), RESERVE);
    paired(&small);
    indexed(&small, &["a.img", "b.img"]);
    let path = large(&small.world, "disk.img");
    small.run(&["index", text(&path)]).ok();
    small.filled_by_a_mount("disk.img");
    assert_eq!(small.reserve(), RESERVE, "a mount does not get it");
    clears_up(&small, "no site runs");
    small.run(&["rm", "b.img", "--yes"]).ok();
    assert_eq!(small.reserve(), RESERVE, "whole when there is room again");
}

#[test]
fn a_full_disk_is_cleared_up_by_a_running_site() {
    let Some(small) = Small::new("a_full_disk_is_cleared_up_by_a_running_site") else {
        return;
    };
    small.run(&["init"]).ok();
    paired(&small);
    indexed(&small, &["a.img", "b.img"]);
    let path = large(&small.world, "disk.img");
    small.run(&["index", text(&path)]).ok();
    let _site = small.world.serve("far", &[]);
    small.filled_by_a_mount("disk.img");
    clears_up(&small, "a site runs");
    until("the site makes the reserve whole", || {
        small.reserve() == RESERVE
    });
}

#[test]
fn a_site_starts_on_a_full_disk_so_that_it_can_be_cleaned_up() {
    let Some(small) = Small::new("a_site_starts_on_a_full_disk_so_that_it_can_be_cleaned_up")
    else {
        return;
    };
    small.run(&["init"]).ok();
    indexed(&small, &["a.img"]);
    small.fill();
    let _site = small.world.serve("far", &[]);
    small.fill();
    small.run(&["images"]).ok();
    small.run(&["rm", "a.img", "--yes"]).ok();
}

#[test]
fn looking_on_a_full_disk_takes_nothing_of_the_reserve() {
    let Some(small) = Small::new("looking_on_a_full_disk_takes_nothing_of_the_reserve") else {
        return;
    };
    small.run(&["init"]).ok();
    indexed(&small, &["a.img"]);
    small.fill();
    for args in [
        &["images"][..],
        &["mounts"],
        &["peers"],
        &["space"],
        &["mounts", "leases"],
    ] {
        small.run(args).ok();
        assert_eq!(small.reserve(), RESERVE, "{args:?}");
    }
    // The purpose of the reserve.
    fs::remove_file(small.home.join("reserve")).unwrap();
    small.fill();
    small.run(&["ticket", "--advertise", "127.0.0.1:1"]).code(1);
    small.run(&["images"]).ok();
}

/// Sequence data is evicted to make space for an incoming image.
#[test]
fn sequence_data_makes_room_for_an_image() {
    let Some(small) = Small::new("sequence_data_makes_room_for_an_image") else {
        return;
    };
    small.run(&["init"]).ok();
    fs::write(small.home.join("config.toml"), "reserve = \"1MiB\"\n").unwrap();
    let site = small.world.serve("far", &[]);
    small
        .world
        .run("near", &["pair", &site.ticket, "--name", "far"])
        .ok();
    // Of 96 MiB: two similar images of 20 MiB, 20 MiB of shared sequences, and the reserve.
    small.world.image("a.img", 1, 5000);
    let near = |args: &[&str]| small.world.run("near", args);
    near(&["send", "a.img", "far"]).ok();
    near(&["send", "a.img", "far", "--as", "b.img"]).ok();
    let sequences = || {
        let space = small.run(&["space", "--json"]).ok().json();
        let items = space[0]["items"].as_array().unwrap().clone();
        let item = items.iter().find(|i| i["kind"] == "sequence_data");
        item.unwrap()["disk_bytes"].as_u64().unwrap()
    };
    until("what they share is copied", || sequences() > 19 << 20);
    // Evicting all of it would not be enough: it stays.
    small.world.image("huge.img", 2, 20_000);
    near(&["send", "huge.img", "far"]).fails(3, &["huge.img", "needs"]);
    assert!(sequences() > 19 << 20);
    let large = small.world.image("large.img", 3, 9000);
    near(&["send", "large.img", "far"]).ok();
    assert!(sequences() < 16 << 20, "{}", sequences());
    crate::world::same(&small.world.delivered("far", "large.img"), &large);
    near(&["verify", "b.img", "far"]).ok();
}

#[test]
fn a_directory_that_is_no_home_gets_no_reserve() {
    let world = World::new();
    let typo = world.path("typo");
    fs::create_dir(&typo).unwrap();
    for args in [
        &["images"][..],
        &["rm", "a.img", "--yes"],
        &["peers", "forget", "lyon", "--yes"],
    ] {
        world.run("typo", args);
        assert!(!reserve_of(&typo).exists(), "{args:?}");
    }
    world.run("home", &["init"]).ok();
    assert_eq!(
        reserve_of(&world.path("home")).metadata().unwrap().len(),
        RESERVE
    );
}

fn reserve_of(home: &Path) -> PathBuf {
    home.join("reserve")
}
