//! Local files and directories as disks: `file:PATH`, `dir:PATH`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::client::Client;
use super::{can_mount, clear_all, text};
use crate::world::{Ran, World, signal, until};

/// A home without peers.
pub struct Alone(World);

impl Alone {
    pub fn new() -> Alone {
        let alone = Alone(World::new());
        alone.run(&["init"]).ok();
        alone
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        self.0.run("alone", args)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    /// Exports a target in the background, on the socket of this name.
    pub fn export(&self, target: &str, socket: &str, options: &[&str]) -> Ran {
        let listen = format!("unix:{}", self.path(socket).display());
        let mut args = vec!["export", target, "--nbd", &listen, "--background"];
        args.extend(options);
        self.run(&args)
    }

    pub fn only(&self) -> Value {
        let mounts = self.run(&["mounts", "--json"]).ok().json();
        assert_eq!(mounts.len(), 1, "{mounts:?}");
        mounts[0].clone()
    }

    pub fn kill_daemon(&self) {
        let process = self.only()["process"].as_u64().unwrap();
        signal(u32::try_from(process).unwrap(), "KILL");
        until("the mount is dead", || self.only()["state"] == "dead");
    }

    pub fn raw(&self, name: &str, size: usize) -> Vec<u8> {
        let mut bytes = vec![0; size];
        fastrand::Rng::with_seed(7).fill(&mut bytes);
        fs::write(self.path(name), &bytes).unwrap();
        bytes
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        clear_all(&self.path("alone/mounts"));
    }
}

#[test]
fn a_file_is_served_and_written_in_place() {
    let a = Alone::new();
    let mut bytes = a.raw("disk.raw", 1 << 20);
    let (file, socket) = (a.path("disk.raw"), a.path("s"));
    // Relative to the directory of the command, not of the daemon.
    a.export("file:disk.raw", "s", &[]).ok();
    let mut client = Client::connect(&socket, "disk.raw");
    assert_eq!(client.size, 1 << 20);
    assert!(client.read(0, 1 << 20).unwrap() == bytes);
    client.write(5000, &[7; 3000]).unwrap();
    client.zero(65_536, 8192).unwrap();
    client.flush().unwrap();
    bytes[5000..8000].fill(7);
    bytes[65_536..][..8192].fill(0);
    assert!(fs::read(&file).unwrap() == bytes);

    let target = format!("file:{}", file.display());
    let mount = a.only();
    let disk = &mount["disks"][0];
    assert_eq!(
        (&disk["image"], &disk["mode"]),
        (&target.as_str().into(), &"file".into())
    );
    assert_eq!((&disk["dirty"], &disk["link"]), (&0.into(), &"up".into()));
    let table = a.run(&["mounts"]).ok().out;
    assert!(
        table.contains(&target) && !table.contains("here"),
        "{table}"
    );
    a.run(&["mounts", "--metrics"]).ok();

    // A second writer is refused, also by another name, and the error names the holder of the disk.
    let name = mount["name"].as_str().unwrap();
    fs::hard_link(&file, a.path("link.raw")).unwrap();
    std::os::unix::fs::symlink(&file, a.path("symlink.raw")).unwrap();
    a.export(&target, "t", &[])
        .fails(3, &["disk.raw is mounted already", name]);
    a.export("file:symlink.raw", "t", &["--read-only"])
        .fails(3, &["is mounted already", "drover unmount"]);
    a.export("file:link.raw", "t", &[]).fails(3, &["is in use"]);
    a.export(&target, "s", &[]).fails(1, &["already in use"]);

    drop(client);
    a.kill_daemon();
    // Acknowledged writes are in the file, and the lock is free.
    assert!(fs::read(&file).unwrap() == bytes);
    a.export("file:disk.raw", "s", &["--read-only"]).ok();
    let mut client = Client::connect(&socket, "");
    assert!(client.read(0, 1 << 20).unwrap() == bytes);
    assert_eq!(client.write(0, &[1]).unwrap_err().raw_os_error(), Some(1));
    // Readers can share it.
    a.export(&target, "t", &["--read-only"]).ok();
    a.export(&target, "u", &[])
        .fails(3, &["is mounted already"]);
    drop(client);
    a.run(&["unmount", "s"]).ok();
    a.run(&["unmount", "t"]).ok();
    let kept = fs::read_dir(a.path("alone/mounts")).unwrap().count();
    // The record of the killed writer, which no mount resumed: the later ones were read-only.
    assert_eq!(kept, 1);
    fs::remove_file(&file).unwrap();
    a.run(&["unmount", "s"]).ok();
    assert_eq!(a.run(&["mounts", "--json"]).ok().json().len(), 0);
}

#[test]
fn a_directory_is_created_once_and_taken_up_again() {
    let a = Alone::new();
    let socket = a.path("s");
    let size = ["--size", "64MiB", "--chunk", "256K"];
    a.export("dir:disk", "s", &[])
        .fails(1, &["there is no disk in", "--size"]);
    assert!(!a.path("disk").exists());
    a.export("dir:disk", "s", &size).ok();
    let mut client = Client::connect(&socket, "disk");
    assert_eq!(client.size, 64 << 20);
    assert!(client.read(0, 1 << 20).unwrap().iter().all(|b| *b == 0));
    client.write(262_000, &[3; 1000]).unwrap();
    client.flush().unwrap();
    assert_eq!(a.only()["disks"][0]["mode"], "directory");
    a.export("dir:disk", "t", &[])
        .fails(3, &["is mounted already"]);
    drop(client);
    a.kill_daemon();

    a.export("dir:disk", "s", &["--size", "32MiB"])
        .fails(1, &["67108864 bytes, not 33554432", "--size"]);
    a.export("dir:disk", "s", &["--size", "64MiB"])
        .fails(1, &["chunks of 256K, not 64K", "--size"]);
    for chunk in ["64K", "1M"] {
        let named = format!("chunks of 256K, not {chunk}").replace("1M", "1024K");
        a.export("dir:disk", "s", &["--chunk", chunk])
            .fails(1, &[&named, "--chunk"]);
    }
    a.export("dir:disk", "s", &["--chunk", "256K"]).ok();
    a.run(&["unmount", "s"]).ok();
    // The same target, also without a size; its chunk size is that of its creation.
    for options in [&size[..], &[]] {
        a.export("dir:disk", "s", options).ok();
        let mut client = Client::connect(&socket, "disk");
        assert_eq!(client.read(262_000, 1000).unwrap(), [3; 1000]);
        drop(client);
        a.run(&["unmount", "s"]).ok();
    }
    let sizes: Vec<u64> = fs::read_dir(a.path("disk"))
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .filter(|length| *length > 1000)
        .collect();
    assert_eq!(sizes, [256 << 10; 2]);
    assert_eq!(a.run(&["mounts", "--json"]).ok().json().len(), 0);
}

#[test]
fn what_is_no_local_disk_is_refused_with_a_way_out() {
    let a = Alone::new();
    a.raw("disk.raw", 4096);
    let refused = |target: &str, options: &[&str], code: i32, words: &[&str]| {
        a.export(target, "s", options).fails(code, words);
    };
    refused("file:none", &[], 1, &["none does not exist", "truncate"]);
    refused("file:alone", &[], 3, &["own directory"]);
    fs::create_dir(a.path("full")).unwrap();
    fs::write(a.path("full/note"), "mine").unwrap();
    refused("file:full", &[], 1, &["is a directory", "dir:"]);
    refused(
        "file:/dev/null",
        &[],
        1,
        &["neither a file nor a block device"],
    );
    refused(
        "file:disk.raw",
        &["--size", "1M"],
        2,
        &["--size", "truncate -s"],
    );
    for option in [
        &["--direct"][..],
        &["--sync", "local"],
        &["--sync", "remote"],
        &["--cache-size", "1M"],
        &["--prefetch", "sequential"],
        &["--push-interval", "5s"],
        &["--window", "1M"],
        &["--give-up-after", "10m"],
    ] {
        for target in ["file:disk.raw", "dir:new"] {
            let (_, name) = target.split_once(':').unwrap();
            refused(target, option, 2, &[option[0], name, "directly"]);
        }
    }
    // Beside an image that it means something for, it is taken.
    let mixed = &["missing.img", "--prefetch", "none", "--chunk", "64K"];
    refused("file:disk.raw", mixed, 3, &["missing.img"]);
    refused(
        "file:disk.raw",
        &["--chunk", "64K"],
        2,
        &["--chunk", "disk.raw"],
    );
    refused("dir:disk.raw", &[], 1, &["is not a directory", "file:"]);
    refused("dir:full", &[], 1, &["no disk in", "--size"]);
    refused(
        "dir:full",
        &["--size", "1MiB"],
        1,
        &["full/note", "not empty"],
    );
    fs::create_dir_all(a.path("parent/child")).unwrap();
    refused(
        "dir:parent",
        &["--size", "1MiB"],
        1,
        &["parent/child", "not empty"],
    );
    assert_eq!(names(&a.path("parent")), ["child"], "it is left as it was");
    refused(
        "dir:new",
        &["--size", "1MiB", "--read-only"],
        2,
        &["--size", "--read-only"],
    );
    // Once `new` were there it would be in the site's own directory.
    refused(
        "dir:new/../alone/images/x",
        &["--size", "1MiB"],
        2,
        &["`..`"],
    );
    assert!(!a.path("new").exists());
    refused("dir:new", &["--size", "1000"], 2, &["multiple of 512"]);
    refused("dir:new", &["--size", "1TiB"], 2, &["--chunk 256K"]);
    assert_eq!(names(&a.path("full")), ["note"], "it is left as it was");
    // Files that belong to the site itself.
    fs::create_dir_all(a.path("alone/images")).unwrap();
    fs::copy(a.path("disk.raw"), a.path("alone/images/web.raw")).unwrap();
    refused(
        "file:alone/images/web.raw",
        &["--read-only"],
        3,
        &["own directory", "by its name"],
    );
    refused(
        "dir:alone/images/new",
        &["--size", "1MiB"],
        3,
        &["own directory"],
    );
    std::os::unix::fs::symlink(a.path("alone/images"), a.path("aside")).unwrap();
    refused("file:aside/web.raw", &[], 3, &["own directory"]);
    a.run(&["index", text(&a.path("disk.raw"))]).ok();
    refused(
        "file:disk.raw",
        &[],
        3,
        &["image disk.raw", "read-only mount"],
    );
    a.export("file:disk.raw", "s", &["--read-only"]).ok();
    a.run(&["unmount", "s"]).ok();
    a.export("web.raw", "s", &["--size", "1M"])
        .fails(2, &["--size"]);
    for name in ["file", "dir"] {
        let ran = a.run(&["pair", "drover1xx", "--name", name]).code(2);
        assert!(ran.err.contains("disk of this host"), "{}", ran.err);
    }
    assert_eq!(a.run(&["mounts", "--json"]).ok().json().len(), 0);
}

#[test]
fn a_file_that_an_image_is_read_through_is_not_written() {
    let a = Alone::new();
    a.raw("base.raw", 1 << 20);
    let flat = a.raw("web-flat.vmdk", 1 << 20).len() / 512;
    let descriptor = format!(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW {flat} FLAT \"web-flat.vmdk\" 0\n"
    );
    fs::write(a.path("web.vmdk"), descriptor).unwrap();
    let image = a.path("web.vmdk");
    let index = ["index", text(&image), "--with-parts"];
    a.run(&index[..2])
        .fails(3, &["web-flat.vmdk", "--with-parts"]);
    let said = a.run(&index).ok().out;
    assert!(said.contains("web-flat.vmdk"), "{said}");
    a.export("file:web-flat.vmdk", "s", &[])
        .fails(3, &["image web.vmdk", "read-only mount"]);
    a.export("file:web-flat.vmdk", "s", &["--read-only"]).ok();
    a.export("file:base.raw", "t", &[]).ok();
    a.run(&["unmount", "s"]).ok();
    a.run(&["unmount", "t"]).ok();
}

#[test]
fn a_file_that_a_mount_writes_is_neither_indexed_nor_sent() {
    let a = Alone::new();
    let far = a.0.serve("far", &[]);
    a.run(&["pair", &far.ticket, "--name", "far"]).ok();
    let sectors = a.raw("web-flat.vmdk", 1 << 20).len() / 512;
    let descriptor = format!(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW {sectors} FLAT \"web-flat.vmdk\" 0\n"
    );
    fs::write(a.path("web.vmdk"), descriptor).unwrap();
    fs::hard_link(a.path("web-flat.vmdk"), a.path("link.raw")).unwrap();
    let files = ["web-flat.vmdk", "web.vmdk", "link.raw"].map(|name| a.path(name));
    a.export("file:web-flat.vmdk", "s", &[]).ok();
    let name = a.only()["name"].as_str().unwrap().to_owned();
    let words = ["mounted for writing", &format!("drover unmount {name}")];
    for file in files.iter().map(|file| text(file)) {
        a.run(&["index", file]).fails(3, &words);
        a.run(&["send", file, "far"]).fails(3, &words);
    }
    assert_eq!(a.run(&["images", "--json"]).ok().json().len(), 0);
    // Neither the record of a dead mount nor a read-only mount blocks others.
    a.kill_daemon();
    a.run(&["index", text(&files[2])]).ok();
    a.export("file:web-flat.vmdk", "s", &["--read-only"]).ok();
    a.run(&["index", text(&files[1]), "--with-parts"]).ok();
    a.run(&["send", text(&files[1]), "far", "--with-parts"])
        .ok();
    a.run(&["unmount", "s"]).ok();
}

#[test]
fn the_lock_is_gone_with_the_unmount() {
    let a = Alone::new();
    let file = a.path("disk.raw");
    a.raw("disk.raw", 1 << 20);
    let lock = |path: &Path| File::open(path).unwrap().try_lock();
    for how in [&[][..], &["--offline"], &["--keep-cache"]] {
        a.export("file:disk.raw", "s", &[]).ok();
        a.export("dir:disk", "t", &["--size", "1MiB"]).ok();
        assert!(lock(&file).is_err());
        a.run(&[&["unmount", "s"], how].concat()).ok();
        lock(&file).unwrap();
        a.run(&[&["unmount", "t"], how].concat()).ok();
        lock(&a.path("disk/lock")).unwrap();
        assert_eq!(a.run(&["mounts", "--json"]).ok().json().len(), 0);
    }
}

#[test]
fn a_lock_that_is_soon_released_is_waited_for() {
    let a = Alone::new();
    a.raw("disk.raw", 1 << 20);
    let held = File::open(a.path("disk.raw")).unwrap();
    held.lock().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(400));
            drop(held);
        });
        a.export("file:disk.raw", "s", &[]).ok();
    });
    a.run(&["unmount", "s"]).ok();
}

#[test]
fn a_local_disk_is_a_file_of_its_own_size() {
    if !can_mount("a_local_disk_is_a_file_of_its_own_size") {
        return;
    }
    let a = Alone::new();
    let bytes = a.raw("disk.raw", 100 << 10);
    a.run(&["mount", "file:disk.raw", "shown", "--read-only"])
        .ok();
    assert!(fs::read(a.path("shown")).unwrap() == bytes);
    a.run(&["unmount", "shown"]).ok();
    a.run(&["mount", "dir:disk", "shown", "--size", "1MiB"])
        .ok();
    let file = File::options().write(true).open(a.path("shown")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 4096).unwrap();
    file.sync_all().unwrap();
    drop(file);
    assert!(fs::read(a.path("shown")).unwrap()[4096..][..bytes.len()] == bytes);
    a.run(&["unmount", "shown"]).ok();
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}
