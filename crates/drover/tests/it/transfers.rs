//! Interrupted transfers: listed here and at a peer, removed, and expired by the site.

use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::world::{Site, World, signal, until, wait};

fn list(world: &World, home: &str, args: &[&str]) -> Vec<Value> {
    let args = [&["transfers"], args, &["--json"]].concat();
    world.run(home, &args).ok().json()
}

/// Sends part of an image of 40 MiB and stops.
fn stopped(world: &World, name: &str, seed: u64) {
    world.image(name, seed, 10_240);
    let mut child = world
        .drover("near", &["send", name, "far", "--limit", "6M"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("some of it comes", || {
        let found = list(world, "near", &["far"]);
        let of_name = found.iter().find(|t| t["name"] == name);
        of_name.is_some_and(|t| t["done_bytes"].as_u64().unwrap() > 4 << 20)
    });
    signal(child.id(), "TERM");
    wait(&mut child);
    until("it is stopped", || {
        let found = list(world, "near", &["far"]);
        found
            .iter()
            .any(|t| t["name"] == name && t["state"] == "stopped")
    });
}

#[test]
fn what_was_stopped_is_listed_and_removed_here_and_at_a_peer() {
    let world = World::new();
    let far: Site = world.pair();
    world
        .run("near", &["transfers", "far"])
        .ok()
        .out
        .is_empty()
        .then_some(())
        .unwrap();
    stopped(&world, "a.img", 1);
    stopped(&world, "b.img", 2);
    let there = list(&world, "near", &["far"]);
    assert_eq!(there, list(&world, "far", &[]));
    assert_eq!(there.len(), 2, "{there:?}");
    assert_eq!(there[0]["name"], "b.img");
    assert_eq!(there[0]["total_bytes"], 10_240 * 4096);
    let table = world.run("far", &["transfers"]).ok().out;
    assert!(
        table.starts_with("NAME") && table.contains("a.img"),
        "{table}"
    );
    assert!(list(&world, "near", &[]).is_empty());

    let rm = |home: &str, args: &[&str]| world.run(home, &[&["transfers", "rm"], args].concat());
    let dry = rm("near", &["a.img", "--at", "far", "--dry-run"]).ok().out;
    assert!(
        dry.starts_with("would remove the transfer of a.img to far"),
        "{dry}"
    );
    rm("near", &["a.img", "--at", "far"]).fails(2, &["--yes"]);
    rm("near", &["c.img", "--at", "far", "--yes"]).fails(3, &["c.img", "drover transfers far"]);
    rm("near", &["a.img", "--yes"]).fails(3, &["a.img"]);
    let gone = rm("near", &["a.img", "--at", "far", "--yes", "--json"])
        .ok()
        .json();
    assert_eq!(
        (&gone[0]["name"], &gone[0]["removed"]),
        (&"a.img".into(), &true.into())
    );
    // Transfers of another site cannot be removed remotely.
    let ticket = world.run("far", &["ticket"]).ok().out;
    world
        .run("other", &["pair", ticket.trim(), "--name", "far"])
        .ok();
    rm("other", &["b.img", "--at", "far", "--yes"]).fails(3, &["b.img"]);
    let key = list(&world, "far", &[])[0]["key"]
        .as_str()
        .unwrap()
        .to_owned();
    rm("far", &[&key, "--yes"]).ok();
    assert!(list(&world, "far", &[]).is_empty(), "{}", far.log());

    // The same without a running site.
    stopped(&world, "c.img", 3);
    drop(far);
    assert_eq!(list(&world, "far", &[])[0]["name"], "c.img");
    rm("far", &["c.img", "--yes"]).ok();
    assert!(list(&world, "far", &[]).is_empty());
}

/// Makes the transfer in a directory eight days old.
fn age(dir: &Path) {
    let days = std::time::Duration::from_secs(8 * 24 * 3600);
    let then = std::time::SystemTime::now() - days;
    for name in ["log", "image.part"] {
        let file = std::fs::File::options().write(true).open(dir.join(name));
        file.unwrap().set_modified(then).unwrap();
    }
}

#[test]
fn a_site_removes_what_nothing_comes_to() {
    let world = World::new();
    let far = world.pair();
    stopped(&world, "a.img", 4);
    drop(far);
    let dirs = || std::fs::read_dir(world.path("far/work/transfers")).unwrap();
    let dir = dirs().next().unwrap().unwrap().path();
    age(&dir);
    let config = world.path("far/config.toml");
    let kept = "keep-unfinished = \"9d\"\n";
    std::fs::write(&config, kept).unwrap();
    let far = world.serve("far", &[]);
    assert_eq!(list(&world, "far", &[]).len(), 1);
    drop(far);
    std::fs::write(&config, "").unwrap();
    let far = world.serve("far", &[]);
    until("it expires", || dirs().count() == 0);
    until("it is said", || {
        far.log().contains("nothing was received for too long")
    });
}

/// Of domains that nobody uses, too.
#[test]
fn a_site_removes_what_nothing_comes_to_from_every_domain() {
    let world = World::new();
    let far = world.serve("far", &[]);
    world.run("far", &["domains", "add", "acme"]).ok();
    let ticket = world.run("far", &["ticket", "--domain", "acme"]).ok().out;
    let pair = ["pair", ticket.trim(), "--name", "far"];
    world.run("near", &pair).ok();
    stopped(&world, "a.img", 5);
    drop(far);
    let dirs = || std::fs::read_dir(world.path("far/domains/acme/work/transfers")).unwrap();
    age(&dirs().next().unwrap().unwrap().path());
    let far = world.serve("far", &[]);
    until("it expires", || dirs().count() == 0);
    until("it is said", || {
        far.log().contains("nothing was received for too long")
    });
}

/// A transfer with a damaged log is known only by its key, with and without a running site.
#[test]
fn what_is_damaged_is_listed_and_removed_by_its_key() {
    let world = World::new();
    let key = "00112233445566778899aabbccddeeff";
    let dir = world.path("far/work/transfers").join(key);
    let damage = || {
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("log"), "x").unwrap();
        std::fs::write(dir.join("image.part"), [1; 8192]).unwrap();
    };
    let far = world.pair();
    for site in [Some(far), None] {
        damage();
        let found = list(&world, "far", &[]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (&found[0]["key"], &found[0]["name"]),
            (&key.into(), &key.into())
        );
        assert_eq!(found[0]["state"], "damaged");
        let table = world.run("far", &["transfers"]).ok().out;
        assert!(table.contains(key) && table.contains("damaged"), "{table}");
        world.run("far", &["transfers", "rm", key, "--yes"]).ok();
        assert!(!dir.exists() && list(&world, "far", &[]).is_empty());
        drop(site);
    }
}
