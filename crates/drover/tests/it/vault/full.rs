//! A vault on a full disk.

use super::*;
use crate::mount::can_mount;

/// A small file system, unmounted at the end.
struct Small(std::path::PathBuf);

impl Small {
    fn mount(&self, options: &str) -> bool {
        let mut command = std::process::Command::new("mount");
        command
            .args(["-t", "tmpfs", "-o", options, "none"])
            .arg(&self.0);
        command.output().is_ok_and(|done| done.status.success())
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(&self.0)
            .output();
    }
}

#[test]
fn a_full_disk_costs_the_snapshot_under_way_and_no_other() {
    let test = "a_full_disk_costs_the_snapshot_under_way_and_no_other";
    if !can_mount(test) {
        return;
    }
    let world = World::new();
    let small = Small(world.path("store"));
    fs::create_dir(&small.0).unwrap();
    if !small.mount("size=6m,mode=700") {
        eprintln!("SKIP {test}: no tmpfs");
        return;
    }
    let first = world.image("first.img", 1, 700);
    let second = world.image("second.img", 2, 3000);
    world.run("h", &["vault", "init", "store"]).ok();
    world.run("h", &["snapshot", "first.img"]).ok();
    let failed = world.run("h", &["snapshot", "second.img"]);
    assert_ne!(failed.code, Some(0));
    assert!(failed.err.contains("the disk is full"), "{}", failed.err);
    let listed = world.run("h", &["snapshots", "--json"]).ok().json();
    assert_eq!(listed.len(), 1);
    world.run("h", &["vault", "check", "--full"]).ok();
    world
        .run("h", &["restore", "first@latest", "again.img"])
        .ok();
    same(&fs::read(first).unwrap(), &world.path("again.img"));
    // With room, it goes on with what is there.
    assert!(small.mount("remount,size=64m"));
    world.run("h", &["snapshot", "second.img"]).ok();
    world
        .run("h", &["restore", "second@latest", "second-again.img"])
        .ok();
    same(&fs::read(second).unwrap(), &world.path("second-again.img"));
    world.run("h", &["vault", "compact", "--grace", "0s"]).ok();
    world.run("h", &["vault", "check", "--full"]).ok();
}
