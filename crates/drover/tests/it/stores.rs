//! Disks in object stores, Redis and Cassandra, through the program: real servers, crashes, two writers, stores that forget.

mod served;

use std::path::PathBuf;

use drover_device::testing::{CassandraCluster, RedisProcess};
use drover_vault::testing::S3Server;
use serde_json::Value;

use crate::mount::client::Client;
use crate::mount::{can_mount, clear_all};
use crate::world::{Ran, World, signal, until};

/// Homes and what their programs find in the environment.
struct Setting {
    world: World,
    variables: Vec<(&'static str, String)>,
}

impl Setting {
    /// With an S3 server.
    fn s3() -> Option<(Setting, S3Server)> {
        let world = World::new();
        let server = S3Server::start(&world.path("store"))?;
        let variables = vec![
            (
                "AWS_ENDPOINT_URL",
                format!("http://127.0.0.1:{}", server.port()),
            ),
            ("AWS_ALLOW_HTTP", "true".into()),
            ("AWS_ACCESS_KEY_ID", "test".into()),
            ("AWS_SECRET_ACCESS_KEY", "testsecret".into()),
            ("AWS_REGION", "us-east-1".into()),
        ];
        Some((Setting { world, variables }.begun(), server))
    }

    fn begun(self) -> Setting {
        for home in ["a", "b"] {
            self.run(home, &["init", "--name", home]).ok();
        }
        self
    }

    /// With a Redis server, and the URL of a disk in it.
    fn redis(options: &[&str]) -> Option<(Setting, RedisProcess, String)> {
        let world = World::new();
        let server = RedisProcess::start(&world.path("store"), options)?;
        let url = format!("redis://127.0.0.1:{}/3?prefix=vm1", server.port());
        let variables = Vec::new();
        Some((Setting { world, variables }.begun(), server, url))
    }

    fn run(&self, home: &str, args: &[&str]) -> Ran {
        let mut command = self.world.drover(home, args);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        Ran::of(home, args, command.output().unwrap())
    }

    fn socket(&self, home: &str) -> PathBuf {
        self.world.path(&format!("{home}.socket"))
    }

    /// Exports a disk in the background.
    fn export(&self, home: &str, disk: &str, options: &[&str]) -> Ran {
        let listen = format!("unix:{}", self.socket(home).display());
        let mut args = vec!["export", disk, "--nbd", &listen, "--background"];
        args.extend(options);
        self.run(home, &args)
    }

    /// Another one beside it.
    fn export_as(&self, home: &str, name: &str, disk: &str, options: &[&str]) -> Ran {
        let listen = format!("unix:{}", self.world.path(name).display());
        let args = ["export", disk, "--nbd", &listen, "--background"];
        self.run(home, &[&args[..], options].concat())
    }

    fn client(&self, home: &str) -> Client {
        Client::connect(&self.socket(home), "")
    }

    fn unmount(&self, home: &str, options: &[&str]) -> Ran {
        let socket = self.socket(home).display().to_string();
        self.run(home, &[&["unmount", socket.as_str()], options].concat())
    }

    fn only(&self, home: &str) -> Value {
        let mounts = self.run(home, &["mounts", "--json"]).ok().json();
        assert_eq!(mounts.len(), 1, "{mounts:?}");
        mounts[0].clone()
    }

    fn kill_daemon(&self, home: &str) {
        let process = self.only(home)["process"].as_u64().unwrap();
        signal(u32::try_from(process).unwrap(), "KILL");
        until("the mount is dead", || self.only(home)["state"] == "dead");
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        for home in ["a", "b"] {
            clear_all(&self.world.path(home).join("mounts"));
        }
    }
}

const DISK: &str = "s3://vaults/team/disk";

#[test]
fn a_disk_in_an_object_store_has_a_cache_and_outlives_a_kill() {
    let Some((s, _server)) = Setting::s3() else {
        return;
    };
    s.export("a", DISK, &[]).fails(
        3,
        &[
            "there is no disk at s3://vaults/team/disk",
            "--size SIZE makes one",
        ],
    );
    s.export("a", "s3://none/disk", &["--size", "8M"])
        .fails(1, &["s3://none/disk"]);
    s.export("a", DISK, &["--size", "100"])
        .fails(2, &["multiple of 512"]);
    s.export("a", DISK, &["--size", "8M", "--window", "1M"])
        .fails(2, &["--window"]);
    s.export("a", DISK, &["--size", "8M"]).ok();
    let shown = s.only("a");
    let disk = &shown["disks"][0];
    assert_eq!(
        (&disk["image"], &disk["mode"], &disk["size"]),
        (&DISK.into(), &"managed".into(), &(8u64 << 20).into())
    );
    let mut bytes = vec![0; 8 << 20];
    fastrand::Rng::with_seed(3).fill(&mut bytes[..3 << 20]);
    let mut client = s.client("a");
    client.write(0, &bytes[..3 << 20]).unwrap();
    client.write(5_000_123, &[9; 777]).unwrap();
    bytes[5_000_123..][..777].fill(9);
    client.flush().unwrap();
    // Two writers.
    s.export("b", DISK, &[]).fails(
        3,
        &["is in use", "drover mounts break 's3://vaults/team/disk'"],
    );
    s.run("a", &["mounts", "break", DISK, "--yes"])
        .fails(3, &["is mounted here"]);
    // In the middle of what is not flushed.
    client.write(4 << 20, &[1; 100_000]).unwrap();
    s.kill_daemon("a");
    drop(client);
    s.export("a", DISK, &[]).ok();
    let mut client = s.client("a");
    assert!(client.read(0, 3 << 20).unwrap() == bytes[..3 << 20]);
    assert_eq!(client.read(5_000_123, 777).unwrap(), [9; 777]);
    client.zero(4 << 20, 1 << 20).unwrap();
    bytes[4 << 20..5 << 20].fill(0);
    // The part of it that is in there is zero now.
    client.write(5_000_123, &[9; 777]).unwrap();
    bytes[5_000_123..][..777].fill(9);
    client.flush().unwrap();
    drop(client);
    s.unmount("a", &[]).ok();

    // Elsewhere, all of it.
    s.export("b", DISK, &["--size", "9M"])
        .fails(3, &["has 8388608 bytes, not 9437184"]);
    s.export("b", DISK, &["--read-only", "--direct"]).ok();
    let mut client = s.client("b");
    assert!(client.read(0, 8 << 20).unwrap() == bytes);
    assert!(client.write(0, &[1]).is_err());
    drop(client);
    s.unmount("b", &[]).ok();
}

/// Without a cache: after a crash the disk is as the last flush left it, for whoever breaks the lease.
#[test]
fn a_disk_without_a_cache_is_as_it_was_flushed() {
    let Some((s, _server)) = Setting::s3() else {
        return;
    };
    s.export("a", DISK, &["--size", "16M", "--direct"]).ok();
    let mut client = s.client("a");
    let value = |round: u8| vec![round; 300_000];
    for round in 1..5 {
        client.write(1_000_000, &value(round)).unwrap();
        client.flush().unwrap();
    }
    client.write(1_000_000, &value(77)).unwrap();
    s.kill_daemon("a");
    drop(client);

    s.run("b", &["mounts", "break", DISK]).fails(2, &["--yes"]);
    let broken = s.run("b", &["mounts", "break", DISK, "--yes"]).ok();
    assert!(broken.err.contains("revoked the write lease"), "{broken:?}");
    s.export("b", DISK, &["--direct"]).ok();
    let mut client = s.client("b");
    assert!(client.read(1_000_000, 300_000).unwrap() == value(4));
    client.write(0, b"theirs").unwrap();
    client.flush().unwrap();
    // The first one cannot come back meanwhile.
    s.export("a", DISK, &["--direct"]).fails(3, &["is in use"]);
    drop(client);
    s.unmount("b", &[]).ok();
    s.export("a", DISK, &["--direct"]).ok();
    assert_eq!(s.client("a").read(0, 6).unwrap(), b"theirs");
    s.unmount("a", &[]).ok();
}

/// Keys in a profile file that are replaced: pushes fail, are repeated, and go on with the next ones.
#[test]
fn credentials_that_expire_in_the_middle() {
    let Some((mut s, server)) = Setting::s3() else {
        return;
    };
    let (keys, config) = (s.world.path("credentials"), s.world.path("config"));
    let write_keys = |secret: &str| {
        let text = format!(
            "[other]\n[work]\naws_access_key_id = test\naws_secret_access_key = {secret}\n"
        );
        let new = keys.with_extension("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, &keys).unwrap();
    };
    let endpoint = format!("http://127.0.0.1:{}", server.port());
    let profile = format!("[profile work]\nregion = us-east-1\nendpoint_url = {endpoint}\n");
    s.variables = vec![
        ("AWS_PROFILE", "work".into()),
        ("AWS_SHARED_CREDENTIALS_FILE", keys.display().to_string()),
        ("AWS_CONFIG_FILE", config.display().to_string()),
        ("AWS_ALLOW_HTTP", "true".into()),
    ];
    s.export("a", DISK, &["--size", "4M"])
        .fails(1, &["no profile work"]);
    std::fs::write(&config, profile).unwrap();
    write_keys("wrong");
    s.export("a", DISK, &["--size", "4M"])
        .fails(1, &["credentials"]);
    write_keys("testsecret");
    s.export("a", DISK, &["--size", "4M", "--push-interval", "0s"])
        .ok();
    write_keys("wrong");
    let mut client = s.client("a");
    until("a push fails", || {
        client.write(0, &[fastrand::u8(..); 8192]).unwrap();
        client.flush().unwrap();
        let why = s.only("a")["disks"][0]["link"].clone();
        why.as_str().is_some_and(|why| why.contains("credentials"))
    });
    client.write(8192, &[7; 8192]).unwrap();
    client.flush().unwrap();
    drop(client);
    write_keys("testsecret");
    s.unmount("a", &[]).ok();
    s.export("b", DISK, &["--direct", "--read-only"]).ok();
    assert_eq!(s.client("b").read(8192, 8192).unwrap(), [7; 8192]);
    s.unmount("b", &[]).ok();
}

/// One host writes with a cache, the next one without; only one at a time.
#[test]
fn a_disk_in_cassandra_goes_from_host_to_host() {
    let world = World::new();
    let Some(mut cluster) = CassandraCluster::start(&world.path("store"), 1) else {
        return;
    };
    let url = format!("cassandra://{}/disks/vm1", cluster.at(0));
    let variables = Vec::new();
    let s = Setting { world, variables }.begun();
    s.export("a", &url.replace("disks", "nowhere"), &[])
        .fails(1, &["no keyspace nowhere"]);
    s.export("a", &url, &[])
        .fails(3, &["there is no disk", "--size SIZE makes one"]);
    let exported = s.export("a", &url, &["--size", "4M"]).ok();
    assert!(exported.err.contains("one copy"), "{exported:?}");
    let mut bytes = vec![0; 4 << 20];
    fastrand::Rng::with_seed(4).fill(&mut bytes[..1 << 20]);
    let mut client = s.client("a");
    client.write(0, &bytes[..1 << 20]).unwrap();
    client.flush().unwrap();
    s.export("b", &url, &[]).fails(3, &["is in use"]);
    // What is not pushed stays in the cache of a mount that is killed, whatever becomes of the server.
    cluster.kill(0);
    client.write(2 << 20, &[7; 100_000]).unwrap();
    bytes[2 << 20..][..100_000].fill(7);
    client.flush().unwrap();
    s.kill_daemon("a");
    drop(client);
    cluster.start_again(0);
    s.export("a", &url, &[]).ok();
    s.unmount("a", &[]).ok();
    s.export("b", &url, &["--direct"]).ok();
    let mut client = s.client("b");
    assert!(client.read(0, 4 << 20).unwrap() == bytes);
    client.write(3_000_001, &[9; 5000]).unwrap();
    client.flush().unwrap();
    assert_eq!(client.read(3_000_000, 3).unwrap(), [0, 9, 9]);
    drop(client);
    s.unmount("b", &[]).ok();
}

/// The server goes away: a mount begins and goes on from its cache, and pushes when the server is back.
#[test]
fn a_disk_in_redis_can_be_used_offline() {
    let durable = ["--appendonly", "yes", "--appendfsync", "always"];
    let Some((s, mut server, url)) = Setting::redis(&durable) else {
        return;
    };
    let exported = s
        .export("a", &url, &["--size", "4M", "--push-interval", "1h"])
        .ok();
    assert!(!exported.err.contains("appendonly"), "{exported:?}");
    let mut client = s.client("a");
    let bytes: Vec<u8> = (0..4 << 20).map(|i| (i / 4096 % 251) as u8).collect();
    client.write(0, &bytes).unwrap();
    client.flush().unwrap();
    drop(client);
    s.unmount("a", &["--keep-cache"]).ok();
    s.export("a", &url, &["--push-interval", "1h"]).ok();
    until("all of it is here", || {
        s.only("a")["disks"][0]["local"] == 4 << 20
    });
    s.unmount("a", &["--offline"]).ok();

    server.kill();
    s.export("a", &url, &["--push-interval", "1h"]).ok();
    let mut client = s.client("a");
    assert!(client.read(0, 4 << 20).unwrap() == bytes);
    client.write(8192, &[255; 4096]).unwrap();
    client.flush().unwrap();
    let link = s.only("a")["disks"][0]["link"].clone();
    assert!(
        link.as_str().unwrap().contains("redis://127.0.0.1"),
        "{link}"
    );
    server.start_again();
    until("the server is reached", || {
        s.only("a")["disks"][0]["link"] == "up"
    });
    drop(client);
    s.unmount("a", &[]).ok();
    s.export("b", &url, &["--direct", "--read-only"]).ok();
    let mut client = s.client("b");
    assert_eq!(client.read(8192, 4096).unwrap(), [255; 4096]);
    assert!(client.read(12_288, 100_000).unwrap() == bytes[12_288..112_288]);
    drop(client);
    s.unmount("b", &[]).ok();
}

/// A server that keeps all in memory says so, and what it has lost is an error and not zeros.
#[test]
fn a_redis_that_forgets_is_noticed() {
    let Some((s, mut server, url)) = Setting::redis(&["--appendonly", "no"]) else {
        return;
    };
    let exported = s.export("a", &url, &["--size", "4M", "--direct"]).ok();
    assert!(
        exported.err.contains("keeps the disk in memory"),
        "{exported:?}"
    );
    let mut client = s.client("a");
    client.write(0, &[5; 100_000]).unwrap();
    client.flush().unwrap();
    server.kill();
    server.start_again();
    assert!(client.read(0, 4096).is_err());
    assert!(client.write(0, &[1; 4096]).is_err() || client.flush().is_err());
    let link = s.only("a")["disks"][0]["link"].clone();
    assert!(link.as_str().unwrap().contains("lost"), "{link}");
    drop(client);
    s.unmount("a", &["--discard", "--yes"]).ok();
    s.export("a", &url, &[]).fails(3, &["there is no disk"]);
    // A password in a URL is refused, and not repeated.
    let with = url.replace("redis://", "redis://:hunter2@");
    let refused = s.export("a", &with, &[]).code(2);
    assert!(
        !refused.err.contains("hunter2") && refused.err.contains("REDISCLI_AUTH"),
        "{refused:?}"
    );
}

/// The command that made a disk makes no other one where the first was lost, and what is left in the cache stays.
#[test]
fn a_disk_that_was_lost_is_not_made_again() {
    let Some((s, mut server, url)) = Setting::redis(&["--appendonly", "no"]) else {
        return;
    };
    s.export("a", &url, &["--size", "4M"]).ok();
    let mut client = s.client("a");
    client.write(0, &[5; 100_000]).unwrap();
    client.flush().unwrap();
    drop(client);
    s.unmount("a", &["--keep-cache"]).ok();

    // Begun before the server is back, without the disk.
    server.kill();
    s.export("a", &url, &["--size", "4M"]).ok();
    let mut client = s.client("a");
    assert_eq!(client.read(0, 4096).unwrap(), [5; 4096]);
    server.start_again();
    until("the loss is noticed", || {
        let link = s.only("a")["disks"][0]["link"].clone();
        link.as_str()
            .is_some_and(|link| link.contains("there is no disk"))
    });
    until("it stops", || client.write(0, &[1; 4096]).is_err());
    drop(client);
    s.unmount("a", &["--offline"]).ok();
    let lost = ["there is no disk", "mounted here", "--discard"];
    s.export("a", &url, &["--size", "4M"]).fails(3, &lost);

    // Somebody makes another one.
    s.export("b", &url, &["--size", "4M", "--direct"]).ok();
    s.unmount("b", &[]).ok();
    let another = ["another disk was made", "--discard"];
    s.export("a", &url, &[]).fails(3, &another);
    s.unmount("a", &["--discard", "--yes"]).ok();
    s.export("a", &url, &["--size", "4M"]).ok();
    assert_eq!(s.client("a").read(0, 4096).unwrap(), [0; 4096]);
    s.unmount("a", &[]).ok();
}

/// An unmount with nothing to push keeps the cache of a disk that its store has lost meanwhile.
#[test]
fn the_cache_of_a_lost_disk_is_kept_when_it_is_unmounted() {
    let Some((s, mut server, url)) = Setting::redis(&["--appendonly", "no"]) else {
        return;
    };
    s.export("a", &url, &["--size", "4M", "--push-interval", "0s"])
        .ok();
    let mut client = s.client("a");
    client.write(0, &[5; 100_000]).unwrap();
    client.flush().unwrap();
    until("it is in the store", || {
        s.only("a")["disks"][0]["dirty"] == 0
    });
    drop(client);
    server.kill();
    server.start_again();
    s.unmount("a", &[]).ok();
    let lost = ["there is no disk", "mounted here", "--discard"];
    s.export("a", &url, &["--size", "4M"]).fails(3, &lost);
    s.unmount("a", &["--discard", "--yes"]).ok();
}

/// A mount that has nothing to do hears of its broken lease, too.
#[test]
fn an_idle_mount_says_that_its_lease_was_broken() {
    let Some((s, _server, url)) = Setting::redis(&["--appendonly", "no"]) else {
        return;
    };
    s.export("a", &url, &["--size", "4M"]).ok();
    s.export_as(
        "a",
        "idle",
        &url.replace("vm1", "vm2"),
        &["--size", "4M", "--direct"],
    )
    .ok();
    let links = || -> Vec<String> {
        let mounts = s.run("a", &["mounts", "--json"]).ok().json();
        let link = |mount: &Value| mount["disks"][0]["link"].as_str().unwrap().to_owned();
        mounts.iter().map(link).collect()
    };
    assert_eq!(links(), ["up", "up"]);
    s.run("b", &["mounts", "break", &url, "--yes"]).ok();
    s.run(
        "b",
        &["mounts", "break", &url.replace("vm1", "vm2"), "--yes"],
    )
    .ok();
    until("both are told", || {
        links().iter().all(|link| link.contains("lease was broken"))
    });
    let mut client = s.client("a");
    assert!(client.write(0, &[1; 4096]).is_err() || client.flush().is_err());
    drop(client);
    s.unmount("a", &["--discard", "--yes"]).ok();
}

/// A mount whose lease was broken stops, although it has a cache that could take writes.
#[test]
fn a_mount_without_its_lease_acknowledges_nothing() {
    let Some((s, _server, url)) = Setting::redis(&["--appendonly", "no"]) else {
        return;
    };
    s.export("a", &url, &["--size", "4M", "--push-interval", "0s"])
        .ok();
    let mut client = s.client("a");
    client.write(0, &[1; 4096]).unwrap();
    client.flush().unwrap();
    s.run("b", &["mounts", "break", &url, "--yes"]).ok();
    until("it is noticed", || {
        client.write(0, &[fastrand::u8(..); 4096]).is_err() || client.flush().is_err()
    });
    until("it stops", || {
        (0..5).all(|_| client.write(0, &[3; 4096]).is_err() && client.flush().is_err())
    });
    assert_ne!(s.only("a")["disks"][0]["link"], "up");
    drop(client);
    s.unmount("a", &["--discard", "--yes"]).ok();
}

#[test]
fn a_disk_in_an_object_store_is_a_file() {
    if !can_mount("a_disk_in_an_object_store_is_a_file") {
        return;
    }
    let Some((s, _server)) = Setting::s3() else {
        return;
    };
    let path = s.world.path("disk").display().to_string();
    s.run("a", &["mount", DISK, &path, "--size", "32M"]).ok();
    let made = std::process::Command::new("mke2fs")
        .args(["-q", "-F", &path])
        .status();
    if made.is_ok_and(|made| made.success()) {
        let checked = std::process::Command::new("e2fsck")
            .args(["-fn", &path])
            .output();
        assert!(checked.unwrap().status.success());
    }
    let before = std::fs::read(&path).unwrap();
    s.run("a", &["unmount", &path]).ok();
    s.run(
        "a",
        &[
            "mount",
            DISK,
            &path,
            "--prefetch",
            "none",
            "--chunk",
            "128K",
        ],
    )
    .ok();
    assert!(std::fs::read(&path).unwrap() == before);
    s.run("a", &["unmount", &path]).ok();
}
