//! Sites that are killed while mounts without a cache write to them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};

use super::client::Client;
use super::{Mounts, can_mount, text};

const BLOCK: usize = 100_000;

/// A disk as programs use it.
enum Disk {
    Nbd(Client),
    File(File),
}

impl Disk {
    fn read(&mut self, length: usize) -> Vec<u8> {
        match self {
            Disk::Nbd(disk) => disk.read(0, length).unwrap(),
            Disk::File(disk) => {
                let mut bytes = vec![0; length];
                disk.read_exact_at(&mut bytes, 0).unwrap();
                bytes
            }
        }
    }

    fn write(&mut self, at: usize, data: &[u8]) {
        match self {
            Disk::Nbd(disk) => disk.write(at as u64, data).unwrap(),
            Disk::File(disk) => disk.write_all_at(data, at as u64).unwrap(),
        }
    }

    fn zero(&mut self, at: u64, length: u32) {
        match self {
            Disk::Nbd(disk) => disk.zero(at, length).unwrap(),
            Disk::File(disk) => {
                fallocate(disk, FallocateFlags::ZERO_RANGE, at, length.into()).unwrap();
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Disk::Nbd(disk) => disk.flush(),
            Disk::File(disk) => disk.sync_all(),
        }
    }
}

/// Writes, kills the site before a flush, and flushes when it is back: nothing is lost, not even if it is killed again.
fn nothing_is_lost(m: &mut Mounts, mut bytes: Vec<u8>, disk: &mut Disk) -> Vec<u8> {
    let mut write = |disk: &mut Disk, at: usize, byte: u8| {
        disk.write(at, &[byte; BLOCK]);
        bytes[at..at + BLOCK].fill(byte);
    };
    write(disk, 0, 1);
    disk.flush().unwrap();
    // Overlapping ones: only in this order do they give the same.
    write(disk, 300_000, 2);
    write(disk, 350_000, 3);
    write(disk, 1_000_000, 4);
    disk.zero(320_000, 65_536);
    m.kill_site();
    m.start_site();
    bytes[320_000..320_000 + 65_536].fill(0);
    assert!(disk.read(bytes.len()) == bytes, "a write is lost");
    disk.flush().unwrap();
    m.kill_site();
    m.start_site();
    assert!(disk.read(bytes.len()) == bytes, "the flush lied");
    bytes
}

fn nothing_is_lost_by_nbd(m: &mut Mounts, home: &str, image: &str, options: &[&str]) {
    let bytes = m.raw("web.raw", 61);
    let socket = m.world.path("killed.sock");
    let listen = format!("unix:{}", socket.display());
    let mut args = vec!["export", image, "--nbd", &listen, "--background"];
    args.extend(options);
    m.world.run(home, &args).ok();
    let mut disk = Disk::Nbd(Client::connect(&socket, "web.raw"));
    let bytes = nothing_is_lost(m, bytes, &mut disk);
    drop(disk);
    m.world.run(home, &["unmount", text(&socket)]).ok();
    assert!(m.far_bytes("web.raw") == bytes);
}

#[test]
fn a_direct_mount_loses_nothing_with_its_site() {
    let mut m = Mounts::new();
    nothing_is_lost_by_nbd(&mut m, "near", "far:web.raw", &["--direct"]);
}

#[test]
fn a_direct_mount_as_a_file_loses_nothing_with_its_site() {
    if !can_mount("a_direct_mount_as_a_file_loses_nothing_with_its_site") {
        return;
    }
    let mut m = Mounts::new();
    let bytes = m.raw("web.raw", 63);
    let path = m.mount("web.raw", "disk", &["--direct"]);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut disk = Disk::File(file);
    let bytes = nothing_is_lost(&mut m, bytes, &mut disk);
    drop(disk);
    m.unmount(&path, &[]).ok();
    assert!(m.far_bytes("web.raw") == bytes);
}

#[test]
fn a_mount_of_an_own_image_loses_nothing_with_the_daemon() {
    let mut m = Mounts::new();
    nothing_is_lost_by_nbd(&mut m, "far", "web.raw", &[]);
}

#[test]
fn a_write_lease_that_was_revoked_meanwhile_is_told_at_the_flush() {
    let mut m = Mounts::new();
    let mut bytes = m.raw("web.raw", 62);
    let socket = m.export("web.raw", &["--direct"]);
    let mut disk = Client::connect(&socket, "web.raw");
    disk.write(0, &[1; BLOCK]).unwrap();
    m.proxy.cut();
    m.kill_site();
    m.start_site();
    m.world
        .run("far", &["mounts", "break", "web.raw", "-y"])
        .ok();
    let other = m.world.path("other.sock");
    let listen = format!("unix:{}", other.display());
    m.world
        .run(
            "far",
            &["export", "web.raw", "--nbd", &listen, "--background"],
        )
        .ok();
    let mut second = Client::connect(&other, "web.raw");
    second.write(0, &[2; BLOCK]).unwrap();
    second.flush().unwrap();
    bytes[..BLOCK].fill(2);
    m.proxy.heal();
    disk.flush().unwrap_err();
    disk.flush().unwrap_err();
    drop((disk, second));
    m.world.run("far", &["unmount", text(&other)]).ok();
    let name = m.list()[0]["name"].as_str().unwrap().to_owned();
    m.near(&["unmount", &name, "--discard", "-y"]).ok();
    assert!(m.far_bytes("web.raw") == bytes);
}
