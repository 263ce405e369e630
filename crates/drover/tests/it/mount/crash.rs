//! Mount daemons that are killed.

use std::fs;

use super::ends::write;
use super::{Mounts, can_mount};

#[test]
fn after_a_kill_the_cache_is_taken_up() {
    if !can_mount("after_a_kill_the_cache_is_taken_up") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 41);
    let disk = m.mount("web.raw", "disk", &["--push-interval", "1h"]);
    m.pulled();
    // The cache map is saved every five seconds.
    std::thread::sleep(std::time::Duration::from_millis(5500));
    write(&disk, 100_000, &[4; 100_000]);
    bytes[100_000..][..100_000].fill(4);
    m.kill_daemon();
    let shown = m.near(&["mounts"]).ok().out;
    assert!(shown.contains("dead"), "{shown}");
    // The far site does not have the data yet, and keeps the lease.
    let before = m.proxy.to_near();
    let disk = m.mount("web.raw", "disk", &[]);
    assert!(fs::read(&disk).unwrap() == bytes, "a flushed write is lost");
    m.pulled();
    m.unmount(&disk, &[]).ok();
    let came = m.proxy.to_near() - before;
    assert!(came < 200_000, "{came} bytes came a second time");
    assert!(m.far_bytes("web.raw") == bytes);
}

#[test]
fn a_killed_loop_device_is_replaced() {
    if !can_mount("a_killed_loop_device_is_replaced") {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 42);
    let device = m.mount("web.raw", "disk", &["--device", "--read-only"]);
    assert!(fs::read(&device).unwrap() == bytes);
    m.kill_daemon();
    let device = m.mount("web.raw", "disk", &["--device", "--read-only"]);
    assert!(fs::read(&device).unwrap() == bytes);
    m.unmount(&device, &[]).ok();
    assert_eq!(m.list().len(), 0);
}

#[test]
fn a_dead_mount_can_be_thrown_away() {
    if !can_mount("a_dead_mount_can_be_thrown_away") {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 43);
    let disk = m.mount("web.raw", "disk", &[]);
    m.kill_daemon();
    m.unmount(&disk, &["--discard", "-y"]).ok();
    assert_eq!(m.list().len(), 0);
    assert!(fs::metadata(&disk).is_ok_and(|d| d.len() == 0) || !disk.exists());
}
