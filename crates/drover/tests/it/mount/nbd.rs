//! Exports of NBD servers as disks: `nbd://`, `nbd+unix://`.

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};

use super::client::Client;
use super::local::Alone;
use super::{can_mount, has};
use crate::world::until;

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    /// Starts nbdkit on the socket `s`.
    fn nbdkit(a: &Alone, args: &[&str]) -> Server {
        let socket = a.path("s");
        let child = Command::new("nbdkit")
            .args(["-f", "-U"])
            .arg(&socket)
            .args(args)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        until("nbdkit listens", || socket.exists());
        Server(child)
    }
}

#[test]
fn an_export_of_another_server_is_served_and_written() {
    let a = Alone::new();
    let mut bytes = a.raw("disk.raw", 1 << 20);
    // The server is drover, too.
    a.export("file:disk.raw", "s", &[]).ok();
    let target = format!("nbd+unix:///disk.raw?socket={}", a.path("s").display());
    // Relative to the directory of the command, not of the daemon.
    a.export("nbd+unix:///disk.raw?socket=s", "t", &[]).ok();
    let mut client = Client::connect(&a.path("t"), "disk.raw");
    assert_eq!(client.size, 1 << 20);
    assert!(client.read(0, 1 << 20).unwrap() == bytes);
    client.write(5000, &[7; 3000]).unwrap();
    client.zero(65_536, 8192).unwrap();
    client.flush().unwrap();
    bytes[5000..8000].fill(7);
    bytes[65_536..][..8192].fill(0);
    assert!(fs::read(a.path("disk.raw")).unwrap() == bytes);

    let listed = || a.run(&["mounts", "--json"]).ok().json();
    let disk = |listed: Vec<serde_json::Value>| {
        let disks = listed.iter().map(|mount| mount["disks"][0].clone());
        disks
            .into_iter()
            .find(|disk| disk["mode"] == "nbd")
            .unwrap()
    };
    let shown = disk(listed());
    assert_eq!(shown["image"], target);
    assert_eq!(shown["link"], "up");
    // The server goes away: an error at once, and the status says why.
    a.run(&["unmount", "s", "--lazy"]).ok();
    assert!(client.read(0, 4096).is_err());
    let link = disk(listed())["link"].as_str().unwrap().to_owned();
    assert!(
        link.starts_with(&target) && link.contains("closed the connection"),
        "{link}"
    );
    drop(client);
    a.run(&["unmount", "t"])
        .fails(1, &["the last writes may be lost"]);
    assert!(listed().is_empty());
}

#[test]
fn what_cannot_be_opened_is_refused_in_one_line() {
    let a = Alone::new();
    a.raw("disk.raw", 1 << 20);
    let uri = |export: &str| format!("nbd+unix:///{export}?socket={}", a.path("s").display());
    a.export(&uri("x"), "t", &[])
        .fails(1, &["cannot connect: no such file"]);
    a.export("file:disk.raw", "s", &["--read-only"]).ok();
    a.export(&uri("x"), "t", &[])
        .fails(3, &["no export of this name"]);
    a.export(&uri("disk.raw"), "t", &[])
        .fails(3, &["exports it read-only", "--read-only"]);
    a.export(&uri("disk.raw"), "t", &["--size", "1M"])
        .fails(2, &["--size cannot be used with nbd+unix:"]);
    for options in [
        &["--chunk", "64K"][..],
        &["--direct"],
        &["--prefetch", "none"],
    ] {
        a.export(&uri("disk.raw"), "t", options)
            .fails(2, &[options[0]]);
    }
    for bad in ["nbds://lyon/x", "nbd+unix:///x", "nbd://lyon:x/y"] {
        let ran = a.export(bad, "t", &[]).code(2);
        assert!(ran.err.contains("no NBD address"), "{}", ran.err);
    }
    a.export(&uri("disk.raw"), "t", &["--read-only"]).ok();
    let mut client = Client::connect(&a.path("t"), "disk.raw");
    assert!(client.write(0, &[1]).is_err());
    drop(client);
    a.run(&["unmount", "t"]).ok();
    a.run(&["unmount", "s"]).ok();
}

#[test]
fn an_export_that_demands_aligned_requests_is_mounted_as_a_file() {
    let test = "an_export_that_demands_aligned_requests_is_mounted_as_a_file";
    if !can_mount(test) || !has(test, &["nbdkit"]) {
        return;
    }
    let a = Alone::new();
    let _server = Server::nbdkit(
        &a,
        &[
            "--filter=blocksize-policy",
            "memory",
            "1M",
            "blocksize-minimum=512",
            "blocksize-maximum=64k",
            "blocksize-preferred=4096",
            "blocksize-error-policy=error",
        ],
    );
    a.run(&["mount", "nbd+unix:///?socket=s", "shown"]).ok();
    let shown = fs::File::options()
        .read(true)
        .write(true)
        .open(a.path("shown"))
        .unwrap();
    assert_eq!(shown.metadata().unwrap().len(), 1 << 20);
    let bytes: Vec<u8> = (0..200_000u32).map(|n| (n / 3) as u8).collect();
    shown.write_all_at(&bytes, 12_345).unwrap();
    shown.sync_all().unwrap();
    drop(shown);
    assert!(fs::read(a.path("shown")).unwrap()[12_345..][..bytes.len()] == bytes);
    a.run(&["unmount", "shown"]).ok();
    // Another mount finds what was written.
    a.run(&["mount", "nbd+unix:///?socket=s", "shown", "--read-only"])
        .ok();
    assert!(fs::read(a.path("shown")).unwrap()[12_345..][..bytes.len()] == bytes);
    a.run(&["unmount", "shown"]).ok();
}
