//! Sites that serve disks in stores to their peers.

use serde_json::Value;

use super::Setting;
use crate::world::{Site, own_address, until};

const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

impl Setting {
    /// A site called `far` that serves the disk as `big`.
    fn serve(&self, url: &str) -> Site {
        self.world.serve("far", &["--disk", &format!("big={url}")])
    }

    /// The same at an address, where it can be started again.
    fn serve_at(&self, address: &str, url: &str) -> Site {
        let disk = format!("big={url}");
        let args = ["serve", "--listen", address, "--disk", &disk];
        self.world.process("far", &args)
    }

    fn pair(&self, home: &str) {
        let ticket = self.run("far", &["ticket"]).ok().out;
        self.run(home, &["pair", ticket.trim(), "--name", "far"])
            .ok();
    }

    /// What the site says of its disk.
    fn served(&self) -> Value {
        let status = self.run("far", &["status", "--json"]).ok().json();
        status[0]["disks"][0].clone()
    }

    /// Makes the disk.
    fn make(&self, url: &str, bytes: &[u8]) {
        self.export("a", url, &["--size", "8M", "--direct"]).ok();
        let mut client = self.client("a");
        client.write(0, bytes).unwrap();
        client.flush().unwrap();
        drop(client);
        self.unmount("a", &[]).ok();
    }
}

/// Peers take turns at it, with and without a cache, and a site that is killed loses nothing.
#[test]
fn peers_write_a_disk_in_a_store_through_a_site() {
    let Some((s, _server, url)) = Setting::redis(&DURABLE) else {
        return;
    };
    let mut bytes = vec![0; 8 << 20];
    fastrand::Rng::with_seed(8).fill(&mut bytes[..2 << 20]);
    s.make(&url, &bytes[..2 << 20]);
    let address = own_address().to_string();
    let site = s.serve_at(&address, &url);
    s.pair("a");
    s.pair("b");
    let listed = s.run("a", &["images", "far", "--json"]).ok().json();
    assert_eq!(
        (
            &listed[0]["name"],
            &listed[0]["format"],
            &listed[0]["virtual_bytes"]
        ),
        (&"big".into(), &"redis".into(), &(8u64 << 20).into())
    );
    let big = s.served();
    assert_eq!(
        (&big["state"], &big["store"]),
        (&"open".into(), &url.as_str().into())
    );

    s.export("a", "far:big", &["--push-interval", "0s"]).ok();
    let mut client = s.client("a");
    assert!(client.read(0, 3 << 20).unwrap() == bytes[..3 << 20]);
    client.write(3 << 20, &[7; 300_000]).unwrap();
    bytes[3 << 20..][..300_000].fill(7);
    client.zero(0, 1 << 20).unwrap();
    bytes[..1 << 20].fill(0);
    client.flush().unwrap();
    // One writer, here as there.
    s.export("b", "far:big", &[]).fails(3, &["big"]);
    s.export("b", &url, &[])
        .fails(3, &["is in use", "the site"]);
    until("it is in the store", || {
        s.only("a")["disks"][0]["dirty"] == 0
    });
    site.signal("KILL");
    drop(site);
    client.write(5 << 20, &[8; 100_000]).unwrap();
    bytes[5 << 20..][..100_000].fill(8);
    client.flush().unwrap();
    let site = s.serve_at(&address, &url);
    until("it is in the store", || {
        let disk = s.only("a")["disks"][0].clone();
        disk["dirty"] == 0 && disk["link"] == "up"
    });
    drop(client);
    s.unmount("a", &["--keep-cache"]).ok();

    s.export("b", "far:big", &["--direct"]).ok();
    let mut client = s.client("b");
    assert!(client.read(0, 8 << 20).unwrap() == bytes);
    client.write(6_000_001, &[9; 99_999]).unwrap();
    bytes[6_000_001..][..99_999].fill(9);
    client.flush().unwrap();
    drop(client);
    s.unmount("b", &[]).ok();
    // The cache is of what was there before.
    s.export("a", "far:big", &["--read-only"]).ok();
    assert!(s.client("a").read(0, 8 << 20).unwrap() == bytes);
    s.unmount("a", &[]).ok();

    // A site that stops gives the lease back.
    assert_eq!(site.stop().0, Some(0));
    s.export("b", &url, &["--direct"]).ok();
    let mut client = s.client("b");
    assert!(client.read(0, 8 << 20).unwrap() == bytes);
    client.write(0, &[3; 4096]).unwrap();
    client.flush().unwrap();
    drop(client);
    s.unmount("b", &[]).ok();
}

/// Whoever mounts it is told when the site has lost its lease, although nothing is read or written, and not where it was.
#[test]
fn a_site_that_loses_its_lease_ends_the_mounts() {
    let Some((s, _server, url)) = Setting::redis(&["--appendonly", "no"]) else {
        return;
    };
    s.make(&url, &[1; 100_000]);
    let _site = s.serve(&url);
    s.pair("a");
    s.export("a", "far:big", &["--push-interval", "0s"]).ok();
    s.run("b", &["mounts", "break", &url, "--yes"]).ok();
    until("the site has noticed", || s.served()["state"] == "lost");
    let why = s.served()["why"].clone();
    assert!(why.as_str().unwrap().contains("lease was broken"), "{why}");
    until("the mount is told", || {
        let link = s.only("a")["disks"][0]["link"].clone();
        let link = link.as_str().unwrap();
        assert!(!link.contains("redis://"), "{link}");
        link.contains("can no longer use big")
    });
    let mut client = s.client("a");
    assert!(client.write(0, &[3; 4096]).is_err() || client.flush().is_err());
    drop(client);
    s.unmount("a", &["--discard", "--yes"]);
    s.export("b", &url, &["--direct"]).ok();
    s.unmount("b", &[]).ok();
}

#[test]
fn what_cannot_be_served_is_said() {
    let Some((s, mut server, url)) = Setting::redis(&DURABLE) else {
        return;
    };
    let serve = |disk: &str| {
        let args = ["serve", "--listen", "127.0.0.1:0", "--disk", disk];
        s.run("far", &args)
    };
    let with_password = url.replace("redis://", "redis://:hunter2@");
    for (disk, says) in [
        ("big".to_owned(), "expected NAME=URL"),
        (
            "big=/dev/sda".to_owned(),
            "not the URL of a disk in a store",
        ),
        (format!("a:b={url}"), "has no `:`"),
        (format!("big={with_password}"), "seen by other users"),
    ] {
        let refused = serve(&disk).code(2);
        assert!(refused.err.contains(says), "{refused:?}");
    }
    serve(&format!("big={url}")).fails(3, &["cannot serve big", "there is no disk", "--size"]);
    s.make(&url, &[1; 100_000]);
    // The store is away when the site starts.
    server.kill();
    let site = s.serve(&url);
    assert!(
        site.log().contains("big is not served yet"),
        "{}",
        site.log()
    );
    s.pair("a");
    let refused = s
        .export("a", "far:big", &[])
        .fails(1, &["cannot use at the moment"]);
    assert!(!refused.err.contains("redis://"), "{refused:?}");
    assert_eq!(s.served()["state"], "waiting");
    server.start_again();
    until("it is served", || s.served()["state"] == "open");
    s.export("a", "far:big", &["--read-only"]).ok();
    assert_eq!(s.client("a").read(99_998, 4).unwrap(), [1, 1, 0, 0]);
    s.unmount("a", &[]).ok();
    // Its name is taken.
    let image = s.world.image("x.img", 3, 16).display().to_string();
    s.run("a", &["send", &image, "far", "--as", "big"])
        .fails(3, &["big is a disk in a store"]);
    s.run("a", &["send", &image, "far", "--as", "other"]).ok();
    s.run(
        "far",
        &["index", &s.world.image("big", 4, 16).display().to_string()],
    )
    .fails(3, &["big is a disk in a store"]);
    drop(site);
    serve(&format!("other={url}")).fails(3, &["the site has an image called other"]);
}

/// Rights are those of images, and a disk may be served for reading only, by several sites.
#[test]
fn who_may_only_read_a_served_disk_cannot_write_it() {
    let Some((s, _server, url)) = Setting::redis(&DURABLE) else {
        return;
    };
    s.make(&url, &[6; 100_000]);
    s.run("far", &["init"]).ok();
    let config = format!("[disks.big]\nstore = \"{url}\"\nread-only = true\n");
    std::fs::write(s.world.path("far").join("config.toml"), config).unwrap();
    let address = own_address().to_string();
    let site = s.world.process("far", &["serve", "--listen", &address]);
    s.pair("a");
    s.export("a", "far:big", &[])
        .fails(3, &["for reading only"]);
    s.export("a", "far:big", &["--read-only"]).ok();
    assert_eq!(s.client("a").read(99_998, 4).unwrap(), [6, 6, 0, 0]);
    s.unmount("a", &[]).ok();
    drop(site);
    std::fs::write(s.world.path("far").join("config.toml"), "").unwrap();
    let _site = s.serve_at(&address, &url);
    let ticket = s.run("far", &["ticket", "--can", "read"]).ok().out;
    s.run("b", &["pair", ticket.trim(), "--name", "far"]).ok();
    s.export("b", "far:big", &[]).fails(3, &["write"]);
    s.export("b", "far:big", &["--read-only", "--direct"]).ok();
    assert_eq!(s.client("b").read(99_998, 4).unwrap(), [6, 6, 0, 0]);
    s.unmount("b", &[]).ok();
    s.export("a", "far:big", &[]).ok();
    let mut client = s.client("a");
    client.write(0, &[2; 4096]).unwrap();
    client.flush().unwrap();
    // A right that is taken away ends the lease.
    s.run("far", &["peers", "set", "a", "--can", "read"]).ok();
    until("the lease is broken", || {
        s.only("a")["disks"][0]["link"] != "up"
    });
    drop(client);
    s.unmount("a", &["--discard", "--yes"]);
}
