//! A vault in an object store: a real S3 server.

use drover_vault::testing::S3Server;

use super::*;
use crate::mount::clear_all;
use crate::mount::client::Client;
use crate::world::{Ran, until};

/// The server; it ends with this.
struct Store(S3Server);

impl Store {
    fn start(world: &World) -> Option<Store> {
        S3Server::start(&world.path("store")).map(Store)
    }

    fn run(&self, world: &World, args: &[&str]) -> Ran {
        let output = world
            .drover("h", args)
            .env(
                "AWS_ENDPOINT_URL",
                format!("http://127.0.0.1:{}", self.0.port()),
            )
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_ACCESS_KEY_ID", "test")
            .env("AWS_SECRET_ACCESS_KEY", "testsecret")
            .env("AWS_REGION", "us-east-1")
            .output()
            .unwrap();
        Ran::of("h", args, output)
    }
}

#[test]
fn a_vault_in_an_object_store_does_what_one_in_a_directory_does() {
    let world = World::new();
    let Some(store) = Store::start(&world) else {
        return;
    };
    let run = |args: &[&str]| store.run(&world, args);
    let image = world.image("web.img", 1, 2000);
    run(&["vault", "init", "s3://none/x"]).fails(1, &["bucket"]);
    run(&["vault", "init", "ftp://vaults/x"]).fails(3, &["object stores are s3://"]);
    run(&["vault", "init", "s3://vaults/team/a"]).ok();
    run(&["vault", "init", "s3://vaults/team/a"]).fails(3, &["there is a vault"]);
    run(&["snapshots", "--vault", "s3://vaults/team/b"]).fails(3, &["there is no vault"]);
    let made = run(&["snapshot", "web.img", "--json"]).ok().json();
    let name = made.last().unwrap()["snapshot"]
        .as_str()
        .unwrap()
        .to_owned();
    let again = run(&["snapshot", "web.img", "--json"]).ok().json();
    assert_eq!(again.last().unwrap()["new_bytes"], 0);
    run(&["restore", &name, "again.img"]).ok();
    same(&fs::read(&image).unwrap(), &world.path("again.img"));

    // A disk of it, written over. It is held meanwhile.
    let listen = format!("unix:{}", world.path("s").display());
    run(&["export", &name, "--nbd", &listen, "--background"]).ok();
    let mut client = Client::connect(&world.path("s"), "");
    let mut bytes = fs::read(&image).unwrap();
    client.write(8192, &[7; 4096]).unwrap();
    client.flush().unwrap();
    bytes[8192..][..4096].fill(7);
    assert!(client.read(0, 1 << 20).unwrap() == bytes[..1 << 20]);
    drop(client);
    run(&["vault", "forget", &name, "--yes"]).fails(3, &["is in use"]);
    run(&["unmount", "s"]).ok();
    clear_all(&world.path("h/mounts"));

    run(&["vault", "forget", &name, "--yes"]).ok();
    run(&["vault", "compact", "--grace", "0s"]).ok();
    run(&["vault", "check", "--full"]).ok();
    let stats = run(&["vault", "stats", "--json"]).ok().json();
    assert_eq!(
        (&stats[0]["snapshots"], &stats[0]["vault"]),
        (&1.into(), &"s3://vaults/team/a".into())
    );
    // The server is gone.
    drop(store);
    let gone = world
        .drover("h", &["snapshots", "--vault", "s3://vaults/team/a"])
        .env("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_ACCESS_KEY_ID", "test")
        .env("AWS_SECRET_ACCESS_KEY", "testsecret")
        .output()
        .unwrap();
    Ran::of("h", &["snapshots"], gone)
        .fails(1, &["cannot read vault in the vault s3://vaults/team/a"]);
}

#[test]
fn a_disk_in_an_object_store_is_fetched_ahead_and_stays_here() {
    let world = World::new();
    let Some(store) = Store::start(&world) else {
        return;
    };
    let run = |args: &[&str]| store.run(&world, args);
    let signal = |name: &str| {
        let pid = store.0.id().to_string();
        let sent = std::process::Command::new("kill")
            .args([name, &pid])
            .status();
        assert!(sent.unwrap().success());
    };
    let here = |least: u64| {
        until("so much of the disk is here", || {
            let mounts = run(&["mounts", "--json"]).ok().json();
            let local = mounts[0]["disks"][0]["local"].as_u64();
            local.unwrap_or_else(|| panic!("{mounts:?}")) >= least
        });
    };
    let image = world.image("web.img", 1, 2000);
    let bytes = fs::read(&image).unwrap();
    run(&["vault", "init", "s3://vaults/a"]).ok();
    run(&["snapshot", "web.img"]).ok();
    let socket = world.path("s");
    let listen = format!("unix:{}", socket.display());
    let export = ["export", "web@latest", "--nbd", &listen, "--background"];

    // By default, all of it.
    run(&export).ok();
    here(bytes.len() as u64);
    signal("-STOP");
    let mut client = Client::connect(&socket, "");
    for at in (0..bytes.len()).step_by(1 << 20) {
        let end = (at + (1 << 20)).min(bytes.len());
        assert!(client.read(at as u64, end - at).unwrap() == bytes[at..end]);
    }
    drop(client);
    signal("-CONT");
    run(&["unmount", "s"]).ok();
    clear_all(&world.path("h/mounts"));

    // What the profile of an image with its content names comes first, into a cache that has no room for more.
    let part = 4 << 20..(4 << 20) + (512 << 10);
    run(&["index", "web.img"]).ok();
    let of_image = [
        "export",
        "web.img",
        "--nbd",
        &listen,
        "--background",
        "--profile",
    ];
    run(&of_image).ok();
    let mut client = Client::connect(&socket, "");
    client.read(part.start as u64, part.len()).unwrap();
    drop(client);
    run(&["unmount", "s"]).ok();
    run(&[&export[..], &["--cache-size", "512K", "--chunk", "32K"]].concat()).ok();
    here(512 << 10);
    signal("-STOP");
    let mut client = Client::connect(&socket, "");
    assert!(client.read(part.start as u64, part.len()).unwrap() == bytes[part]);
    drop(client);
    signal("-CONT");
    run(&["unmount", "s"]).ok();

    // Nothing is fetched that nobody asked for.
    for options in [&["--prefetch", "none"][..], &["--direct"]] {
        run(&[&export[..], options].concat()).ok();
        let mut client = Client::connect(&socket, "");
        assert!(client.read(0, 4096).unwrap() == bytes[..4096]);
        drop(client);
        run(&["unmount", "s"]).ok();
    }
    run(&[&export[..], &["--sync", "remote"]].concat()).fails(2, &["whose changes stay here"]);
}
