//! Images mounted as files.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use super::{Mounts, can_mount, has, text};

#[test]
fn a_raw_image_is_read_and_written_and_there_for_the_next() {
    let test = "a_raw_image_is_read_and_written_and_there_for_the_next";
    if !can_mount(test) {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 1);
    let disk = m.mount("web.raw", "disk", &[]);
    assert!(fs::read(&disk).unwrap() == bytes, "another image");
    let list = m.list();
    assert_eq!(list[0]["state"], "up");
    assert_eq!(list[0]["disks"][0]["mode"], "managed");
    assert_eq!(list[0]["disks"][0]["image"], "far:web.raw");
    let shown = m.near(&["mounts"]).ok().out;
    assert!(
        shown.contains("far:web.raw") && shown.contains(text(&disk)),
        "{shown}"
    );

    let file = File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&[7; 10_000], 2_222_222).unwrap();
    file.sync_all().unwrap();
    drop(file);
    bytes[2_222_222..][..10_000].fill(7);
    assert!(
        fs::read(&disk).unwrap() == bytes,
        "what was written is not read"
    );
    m.unmount(&disk, &[]).ok();
    assert_eq!(m.list().len(), 0);
    assert!(
        !m.world
            .path("near/mounts")
            .read_dir()
            .unwrap()
            .any(|_| true)
    );
    assert!(
        m.far_bytes("web.raw") == bytes,
        "what was written is not there"
    );
    // The delivered image is unchanged.
    m.world.run("far", &["verify", "web.raw"]).ok();
}

#[test]
fn a_directory_gets_a_file_and_what_is_printed_ends_it() {
    if !can_mount("a_directory_gets_a_file_and_what_is_printed_ends_it") {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 8);
    let dir = m.world.path("dir");
    fs::create_dir(&dir).unwrap();
    for what in [dir.join("web.raw"), dir.clone()] {
        let disk = m.mount("web.raw", "dir", &["--read-only"]);
        assert_eq!(disk, dir.join("web.raw"));
        assert!(fs::read(&disk).unwrap() == bytes, "another image");
        m.unmount(&what, &[]).ok();
        assert!(dir.read_dir().unwrap().next().is_none());
    }
    m.unmount(&dir, &[]).fails(3, &["drover mounts"]);
}

#[test]
fn a_qcow2_image_is_shown_raw_and_only_its_data_crosses_the_link() {
    let test = "a_qcow2_image_is_shown_raw_and_only_its_data_crosses_the_link";
    if !can_mount(test) || !has(test, &["qemu-img"]) {
        return;
    }
    let m = Mounts::new();
    let bytes = m.qcow2("web.qcow2", 2);
    let before = m.proxy.to_near();
    let disk = m.mount("web.qcow2", "disk", &["--read-only"]);
    assert!(fs::read(&disk).unwrap() == bytes, "another image");
    m.pulled();
    let came = m.proxy.to_near() - before;
    // On a busy machine a few chunks are fetched twice, but never all 4 MiB.
    assert!(came < 3_400_000, "{came} bytes for 2.4 MB of data");
    assert!(File::options().write(true).open(&disk).is_err());
    assert_eq!(m.disk()["read_only"], true);
    m.unmount(&disk, &[]).ok();
}

#[test]
fn direct_keeps_nothing_here() {
    if !can_mount("direct_keeps_nothing_here") {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 3);
    let disk = m.mount("web.raw", "disk", &["--direct"]);
    assert!(fs::read(&disk).unwrap() == bytes, "another image");
    let file = File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&[9; 5000], 1_000_001).unwrap();
    file.sync_all().unwrap();
    bytes[1_000_001..][..5000].fill(9);
    assert_eq!(m.disk()["mode"], "direct");
    let name = m.list()[0]["name"].as_str().unwrap().to_owned();
    let kept = m.world.path("near/mounts").join(name).join("cache");
    assert!(!kept.exists(), "{}", kept.display());
    drop(file);
    m.unmount(&disk, &[]).ok();
    assert!(
        m.far_bytes("web.raw") == bytes,
        "what was written is not there"
    );
}

#[test]
fn sync_remote_flushes_are_at_the_remote_site() {
    if !can_mount("sync_remote_flushes_are_at_the_remote_site") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = m.raw("web.raw", 4);
    // Without a push in the background.
    let disk = m.mount(
        "web.raw",
        "disk",
        &["--sync", "remote", "--push-interval", "1h"],
    );
    let file = File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&[5; 4096], 8192).unwrap();
    file.sync_all().unwrap();
    bytes[8192..][..4096].fill(5);
    assert_eq!(m.disk()["dirty"], 0);
    // Kill both ends.
    drop(file);
    m.kill_site();
    m.kill_daemon();
    m.start_site();
    m.unmount(&disk, &["--discard", "-y"]).ok();
    m.world
        .run("far", &["mounts", "break", "web.raw", "-y"])
        .ok();
    assert!(m.far_bytes("web.raw") == bytes, "a flush was lost");
}

#[test]
fn prefetch_none_fetches_what_is_read_and_a_recorded_profile_is_taken() {
    let test = "prefetch_none_fetches_what_is_read_and_a_recorded_profile_is_taken";
    if !can_mount(test) {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 5);
    let order = m.world.path("order");
    // Relative to the directory of the command, not of the daemon.
    let options = ["--prefetch", "none", "--read-only", "--record", "order"];
    let disk = m.mount("web.raw", "disk", &options);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(
        m.disk()["received"].as_u64().unwrap() / 10_000,
        0,
        "{}",
        m.disk()
    );
    let file = File::open(&disk).unwrap();
    let mut piece = [0; 4096];
    for at in [1 << 20, 64 << 10, 3 << 20] {
        file.read_exact_at(&mut piece, at).unwrap();
        assert!(piece == bytes[usize::try_from(at).unwrap()..][..4096]);
    }
    drop(file);
    let disk_now = m.disk();
    assert!(disk_now["local"].as_u64().unwrap() < 2 << 20, "{disk_now}");
    m.unmount(&disk, &[]).ok();
    assert!(fs::read(&order).unwrap().starts_with(b"DRVRPRF\0"));

    let options = ["--prefetch", "order", "--read-only"];
    let disk = m.mount("web.raw", "disk", &options);
    m.pulled();
    assert!(fs::read(&disk).unwrap() == bytes);
    m.unmount(&disk, &[]).ok();

    // An invalid profile.
    fs::write(&order, "rubbish\n").unwrap();
    let path = m.world.path("disk");
    let mut args = vec!["mount", "far:web.raw", text(&path)];
    args.extend(options);
    m.near(&args).fails(1, &["order"]);
    fs::remove_file(&order).unwrap();
    m.near(&args)
        .fails(1, &["order", "no such file or directory"]);
    assert_eq!(m.list().len(), 0);
}

#[test]
fn a_mount_is_ready_when_enough_of_it_is_here() {
    if !can_mount("a_mount_is_ready_when_enough_of_it_is_here") {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 7);
    let disk = m.mount("web.raw", "disk", &["--wait-local", "100%"]);
    let now = m.disk();
    assert_eq!(now["local"], now["size"], "{now}");
    assert!(fs::read(&disk).unwrap() == bytes);
    m.unmount(&disk, &[]).ok();
}

#[test]
fn a_mount_that_fails_at_the_last_step_holds_nothing() {
    if !can_mount("a_mount_that_fails_at_the_last_step_holds_nothing") {
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 7);
    fs::write(m.world.path("order"), "rubbish\n").unwrap();
    let args = ["mount", "far:web.raw", "disk"];
    m.near(&[&args[..], &["--prefetch", "order"]].concat())
        .fails(1, &["order"]);
    m.near(&[&args[..], &["--record", "none/order"]].concat())
        .fails(1, &["cannot write the profile", "none"]);
    assert_eq!(m.list().len(), 0);
    // Another mount can write at once.
    let disk = m.mount("web.raw", "other", &[]);
    m.unmount(&disk, &[]).ok();
}

#[test]
fn a_cache_smaller_than_the_image_and_other_chunks_read_the_same() {
    let test = "a_cache_smaller_than_the_image_and_other_chunks_read_the_same";
    if !can_mount(test) {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 6);
    let disk = m.mount("web.raw", "disk", &["--cache-size", "1MiB", "--read-only"]);
    for _ in 0..2 {
        assert!(fs::read(&disk).unwrap() == bytes, "another image");
    }
    let name = m.list()[0]["name"].as_str().unwrap().to_owned();
    let cache = m.world.path("near/mounts").join(name).join("cache");
    let used: u64 = fs::read_dir(cache)
        .unwrap()
        .map(|e| std::os::unix::fs::MetadataExt::blocks(&e.unwrap().metadata().unwrap()) * 512)
        .sum();
    assert!(used < 2 << 20, "a cache of 1 MiB holds {used} bytes");
    m.unmount(&disk, &[]).ok();
    for chunk in ["4K", "1M"] {
        let disk = m.mount("web.raw", "disk", &["--chunk", chunk, "--read-only"]);
        assert!(fs::read(&disk).unwrap() == bytes, "chunks of {chunk}");
        m.unmount(&disk, &[]).ok();
    }
    m.near(&["mount", "far:web.raw", "d", "--chunk", "96K"])
        .code(2);
}
