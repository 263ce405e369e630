//! File systems on the loop device, and SQLite on one of them while the link is cut repeatedly.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{Mounts, can_mount, has, text, tool, tried};
use crate::world::until;

/// A mounted file system; unmounted at the end.
struct Tree<'a>(&'a Path);

impl<'a> Tree<'a> {
    fn mount(device: &Path, at: &'a Path, options: &str) -> Tree<'a> {
        fs::create_dir_all(at).unwrap();
        tool("mount", &["-o", options, text(device), text(at)]);
        Tree(at)
    }
}

impl Drop for Tree<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).output();
    }
}

fn file_system(kind: &str, size: u64, check: &[&str]) {
    let test = format!("file systems: {kind}");
    let make = format!("mkfs.{kind}");
    if !can_mount(&test) || !has(&test, &[&make, check[0]]) {
        return;
    }
    if kind != "ext4" && tried("modprobe", &[kind]).code != Some(0) {
        let known = fs::read_to_string("/proc/filesystems").unwrap();
        if !known.contains(kind) {
            eprintln!("SKIP {test}: this kernel has no {kind}");
            return;
        }
    }
    let m = Mounts::new();
    m.empty("disk.raw", size);
    let device = m.mount("disk.raw", "disk", &["--device"]);
    assert!(device.starts_with("/dev"), "{}", device.display());
    tool(&make, &["-q", text(&device)]);
    let at = m.world.path("tree");
    let mut noise = vec![0; 3 << 20];
    fastrand::Rng::with_seed(71).fill(&mut noise);
    {
        let _tree = Tree::mount(&device, &at, "noatime");
        fs::write(at.join("noise"), &noise).unwrap();
        fs::create_dir(at.join("many")).unwrap();
        for i in 0..50 {
            fs::write(at.join(format!("many/{i}")), format!("file {i}")).unwrap();
        }
        m.unmount(&device, &[]).fails(1, &["use"]);
    }
    tool(check[0], &[&check[1..], &[text(&device)]].concat());
    until("nothing uses the device", || {
        m.unmount(&device, &[]).code == Some(0)
    });
    // The device number may have been reused.
    let backing = Path::new("/sys/block")
        .join(device.file_name().unwrap())
        .join("loop/backing_file");
    let behind = fs::read_to_string(backing).unwrap_or_default();
    assert!(!behind.starts_with(text(&m.world.path(""))), "{behind}");

    m.pair("other");
    let path = m.world.path("again");
    let args = [
        "mount",
        "far:disk.raw",
        text(&path),
        "--device",
        "--read-only",
    ];
    let device = m.world.run("other", &args).ok().out;
    let device = Path::new(device.trim());
    {
        let _tree = Tree::mount(device, &at, "ro");
        assert!(
            fs::read(at.join("noise")).unwrap() == noise,
            "{kind}: other bytes"
        );
        for i in 0..50 {
            let got = fs::read_to_string(at.join(format!("many/{i}"))).unwrap();
            assert_eq!(got, format!("file {i}"));
        }
    }
    until("nothing uses the device", || {
        m.world.run("other", &["unmount", text(device)]).code == Some(0)
    });
}

#[test]
fn ext4_on_the_loop_device() {
    file_system("ext4", 32 << 20, &["fsck.ext4", "-fn"]);
}

#[test]
fn xfs_on_the_loop_device() {
    file_system("xfs", 320 << 20, &["xfs_repair", "-n"]);
}

#[test]
fn btrfs_on_the_loop_device() {
    file_system("btrfs", 160 << 20, &["btrfs", "check"]);
}

/// A partition table comes from the image, which may be hostile.
#[test]
fn partitions_are_looked_for_only_when_asked() {
    if !can_mount("partitions_are_looked_for_only_when_asked") {
        return;
    }
    let m = Mounts::new();
    m.empty("disk.raw", 1 << 20);
    for (options, scans) in [
        (&["--device"][..], "0"),
        (&["--device", "--partitions"], "1"),
    ] {
        let device = m.mount("disk.raw", "disk", options);
        let name = device.file_name().unwrap();
        let scan = Path::new("/sys/block").join(name).join("loop/partscan");
        assert_eq!(fs::read_to_string(&scan).unwrap().trim(), scans);
        until("nothing uses the device", || {
            m.unmount(&device, &[]).code == Some(0)
        });
    }
    m.near(&["mount", "far:disk.raw", "disk", "--partitions"])
        .code(2);
}

#[test]
fn sqlite_commits_through_cuts_of_the_link() {
    let test = "sqlite_commits_through_cuts_of_the_link";
    if !can_mount(test) || !has(test, &["mkfs.ext4", "sqlite3"]) {
        return;
    }
    let m = Mounts::new();
    m.empty("db.raw", 32 << 20);
    let options = ["--device", "--push-interval", "100ms"];
    let device = m.mount("db.raw", "disk", &options);
    tool("mkfs.ext4", &["-q", text(&device)]);
    let at = m.world.path("tree");
    let rows = 300;
    {
        let _tree = Tree::mount(&device, &at, "noatime");
        let db = at.join("rows.db");
        let mut shell = Command::new("timeout")
            .args(["300", "sqlite3", text(&db)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut say = shell.stdin.take().unwrap();
        say.write_all(b"PRAGMA journal_mode=DELETE; PRAGMA synchronous=FULL; CREATE TABLE t(i INTEGER PRIMARY KEY, b BLOB);\n")
            .unwrap();
        let writer = std::thread::spawn(move || {
            for i in 0..rows {
                writeln!(say, "INSERT INTO t VALUES({i}, zeroblob(500));").unwrap();
                if i % 10 == 0 {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        });
        let mut cuts = 0;
        while shell.try_wait().unwrap().is_none() {
            m.proxy.cut();
            std::thread::sleep(Duration::from_millis(150));
            m.proxy.heal();
            std::thread::sleep(Duration::from_millis(250));
            cuts += 1;
        }
        writer.join().unwrap();
        assert!(shell.wait().unwrap().success());
        assert!(cuts > 1, "only {cuts} cuts");
        assert_eq!(
            tool(
                "sqlite3",
                &[text(&db), "PRAGMA integrity_check; SELECT count(*) FROM t"]
            ),
            format!("ok\n{rows}\n")
        );
    }
    tool("fsck.ext4", &["-fn", text(&device)]);
    until("nothing uses the device", || {
        m.unmount(&device, &[]).code == Some(0)
    });
    // The remote site has every row.
    let device = m.mount("db.raw", "disk", &["--device", "--read-only"]);
    {
        let _tree = Tree::mount(&device, &at, "ro");
        let db = format!("file:{}?immutable=1", at.join("rows.db").display());
        assert_eq!(
            tool(
                "sqlite3",
                &[&db, "PRAGMA integrity_check; SELECT count(*) FROM t"]
            ),
            format!("ok\n{rows}\n")
        );
    }
    until("nothing uses the device", || {
        m.unmount(&device, &[]).code == Some(0)
    });
}
