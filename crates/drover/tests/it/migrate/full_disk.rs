//! A destination whose disk takes nothing any more.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use drover_hypervisor::testing::Qemu;

use super::faults::Held;
use super::{Moving, Sites, goes_on};
use crate::mount::can_mount;
use crate::world::{PATIENCE, World, own_address};

/// A small file system, unmounted at the end.
struct Small(PathBuf);

impl Small {
    fn at(path: PathBuf) -> Option<Small> {
        fs::create_dir(&path).unwrap();
        let mount = ["-t", "tmpfs", "-o", "size=512m,mode=700", "none"];
        let mounted = Command::new("mount").args(mount).arg(&path).status();
        mounted.ok()?.success().then_some(Small(path))
    }

    /// Until nothing fits any more.
    fn fill(&self) {
        let mut junk = fs::File::create(self.0.join("junk")).unwrap();
        for size in [1 << 20, 4096] {
            while junk.write(&vec![1; size]).is_ok_and(|n| n > 0) {}
        }
    }

    fn free(&self) {
        fs::remove_file(self.0.join("junk")).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_at_the_destination_that_is_full() {
    let test = "a_disk_at_the_destination_that_is_full";
    if !can_mount(test) {
        return;
    }
    let world = World::new();
    let Some(small) = Small::at(world.path("far")) else {
        eprintln!("SKIP {test}: no tmpfs");
        return;
    };
    let Some(mut sites) = Sites::with(test, world, own_address(), &[]) else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;

    // In a round: a write of the disk fails.
    let mut there = sites.wait_for_it("far").await;
    let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
    moving.until("step", "memory");
    small.fill();
    fails_and_runs_on(moving, &mut here).await;
    small.free();
    there.kill();

    // When all has arrived: what is recorded of it fails.
    let held = Held::at(&mut sites, "arriving");
    there = sites.wait_for_it("far").await;
    let moving = Moving::begin(&sites, "near", "far", &[]);
    held.reached();
    small.fill();
    held.go_on();
    fails_and_runs_on(moving, &mut here).await;
    small.free();
    there.kill();

    there = sites.wait_for_it("far").await;
    Moving::begin(&sites, "near", "far", &[]).done();
    here.ended().await;
    goes_on(&here, &mut there).await;
}

async fn fails_and_runs_on(moving: Moving, here: &mut Qemu) {
    let begun = Instant::now();
    let err = moving.fails();
    assert!(begun.elapsed() < PATIENCE);
    assert!(
        err.contains("space") && !err.contains("does not run"),
        "{err}"
    );
    let beat = here.wait_said("beat", 0).await;
    here.wait_said("beat", beat + 20).await;
}
