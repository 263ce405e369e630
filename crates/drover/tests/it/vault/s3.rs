//! A vault in an object store: a real S3 server.

use drover_vault::testing::S3Server;

use super::*;
use crate::mount::clear_all;
use crate::mount::client::Client;
use crate::world::Ran;

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
