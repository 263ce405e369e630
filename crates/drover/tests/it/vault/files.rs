//! Single files out of snapshots.

use std::fs;
use std::process::Command;

use crate::world::{World, same};

/// A disk with an ext4 that has these files; none, with a SKIP, where it cannot be made.
fn ext4(world: &World, name: &str) -> Option<()> {
    let programs = ["mke2fs", "/usr/sbin/mke2fs", "/sbin/mke2fs"];
    let mut programs = programs.into_iter();
    let Some(mke2fs) = programs.find(|one| Command::new(one).arg("-V").output().is_ok()) else {
        eprintln!("SKIP: mke2fs (Debian: e2fsprogs) is not installed");
        return None;
    };
    let tree = world.path("tree");
    fs::create_dir_all(tree.join("etc")).unwrap();
    fs::write(tree.join("etc/fstab"), "/dev/vda / ext4\n").unwrap();
    std::os::unix::fs::symlink("../etc/fstab", tree.join("etc/link")).unwrap();
    let mut big = vec![0; 3 << 20];
    fastrand::Rng::with_seed(9).fill(&mut big[1 << 20..]);
    big.truncate((3 << 20) - 77);
    fs::write(tree.join("big"), &big).unwrap();
    let made = Command::new(mke2fs)
        .args(["-q", "-F", "-t", "ext4", "-d"])
        .args([&tree, &world.path(name)])
        .arg("16M")
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    Some(())
}

#[test]
fn a_single_file_comes_out_of_a_snapshot() {
    let world = World::new();
    let Some(()) = ext4(&world, "web.raw") else {
        return;
    };
    world.run("h", &["vault", "init", "store"]).ok();
    world.run("h", &["snapshot", "web.raw"]).ok();
    let restore = |what: &str, more: &[&str]| {
        let args = [&["restore", what, "out"], more].concat();
        world.run("h", &args)
    };
    restore("web@latest:/etc/link", &[]).ok();
    assert_eq!(fs::read(world.path("out")).unwrap(), b"/dev/vda / ext4\n");
    restore("web@latest:/big", &[]).fails(2, &["--yes"]);
    let done = restore("web@latest:/big", &["--yes", "--json"]).ok().json();
    assert_eq!(done[0]["file_bytes"], (3 << 20) - 77);
    let big = fs::read(world.path("tree/big")).unwrap();
    same(&big, &world.path("out"));
    restore("web@latest:/etc/nothing", &["--yes"]).fails(3, &["no such file"]);
    restore("web@latest:/etc", &["--yes"]).fails(3, &["no regular file"]);
    same(&big, &world.path("out"));

    // One that was in use is not read without its journal.
    let mut disk = fs::read(world.path("web.raw")).unwrap();
    disk[1024 + 0x60] |= 4;
    fs::write(world.path("web.raw"), disk).unwrap();
    world.run("h", &["snapshot", "web.raw"]).ok();
    restore("web@latest:/big", &["--yes"]).fails(3, &["in use", "drover mount web@"]);
    fs::write(world.path("text"), "no file system here".repeat(500)).unwrap();
    world.run("h", &["snapshot", "text"]).ok();
    restore("text@latest:/big", &["--yes"]).fails(3, &["no ext2, ext3 or ext4"]);
}
