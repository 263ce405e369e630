//! Snapshots in the vault of a peer, with the real program: either end is killed.

use super::*;
use crate::world::{Site, own_address, until};

/// The site `far`, which has a vault, what it calls its peer `near`, and where it listens.
fn sites(world: &World, init: &[&str]) -> (Site, String, String) {
    world
        .run("far", &[&["vault", "init", "store"], init].concat())
        .ok();
    let at = own_address().to_string();
    let site = world.process("far", &["serve", "--listen", &at]);
    world
        .run("near", &["pair", &site.ticket, "--name", "far"])
        .ok();
    let peers = world.run("far", &["peers", "--json"]).ok().json();
    let near = peers[0]["name"].as_str().unwrap().to_owned();
    (site, near, at)
}

#[test]
fn a_snapshot_goes_to_a_peer_that_it_cannot_harm() {
    let world = World::new();
    let (mut site, name, _) = sites(&world, &[]);
    let near = |args: &[&str]| world.run("near", args);
    let image = world.image("web.img", 1, 3000);
    // A right that is not given by a plain ticket.
    near(&["snapshot", "web.img", "far"]).fails(1, &["backup"]);
    let can = |rights: &str| {
        world
            .run("far", &["peers", "set", &name, "--can", rights])
            .ok()
    };
    can("backup");
    near(&["snapshot", "web.img", "nobody"]).fails(3, &["nobody"]);
    near(&["snapshot", "web.img", "far", "--vault", "store"]).code(2);
    let made = near(&["snapshot", "web.img", "far", "--json"]).ok().json();
    assert_eq!(
        made.last().unwrap()["new_bytes"],
        made.last().unwrap()["data_bytes"]
    );
    let again = near(&["snapshot", "web.img", "far", "--json"]).ok().json();
    assert_eq!(again.last().unwrap()["new_bytes"], 0);
    assert_eq!(near(&["snapshots", "far:", "--json"]).ok().json().len(), 2);
    assert_eq!(
        near(&["snapshots", "web", "far:", "--json"])
            .ok()
            .json()
            .len(),
        2
    );
    near(&["snapshots", "far:", "far:"]).code(2);
    near(&["restore", "web@latest", "again.img", "--vault", "far:"]).ok();
    same(&fs::read(&image).unwrap(), &world.path("again.img"));
    near(&["vault", "check", "--full", "--vault", "far:"]).ok();

    // It deletes nothing, and is no place for another vault.
    near(&["vault", "forget", "web", "--yes", "--vault", "far:"]).fails(1, &["may not write"]);
    near(&["vault", "init", "far:"]).fails(3, &["run the command at far"]);
    near(&["vault", "copy", "far:", "--vault", "far:"]).fails(3, &["run the command at far"]);
    // A machine of the site itself is not a peer's, to write or to see; `admin` sees it.
    world.image("db.img", 2, 500);
    world.run("far", &["snapshot", "db.img"]).ok();
    near(&["snapshot", "db.img", "far"]).fails(1, &["of another site", "--as"]);
    assert_eq!(near(&["snapshots", "far:", "--json"]).ok().json().len(), 2);
    can("backup,admin");
    assert_eq!(near(&["snapshots", "far:", "--json"]).ok().json().len(), 3);
    let audit = world.run("far", &["audit", "--json"]).ok().json();
    let backed_up = audit.iter().filter(|line| line["event"] == "backed-up");
    assert_eq!(backed_up.count(), 2);

    // The site stops, and starts again elsewhere: that is said, soon.
    site.signal("TERM");
    site.wait();
    near(&["snapshots", "far:"]).fails(1, &["far"]);
    // Nothing is left of the peer's sessions, and what is there is whole.
    for kind in ["claims", "held", "probe"] {
        assert_eq!(count(&world.path("store").join(kind)), 0, "{kind}");
    }
    world.run("far", &["vault", "check", "--full"]).ok();
}

#[test]
fn either_end_is_killed_while_a_snapshot_goes_to_a_peer() {
    let world = World::new();
    fs::write(world.path("key"), "correct horse\n").unwrap();
    let (site, name, at) = sites(&world, &["--encrypt", "--key-file", "key"]);
    world
        .run("far", &["peers", "set", &name, "--can", "backup"])
        .ok();
    world.image("web.img", 1, 9000);
    let store = world.path("store");
    let with_key = |args: &[&'static str]| [args, &["--key-file", "key"]].concat();
    let snapshot = |image: &str, machine: &str| {
        let args = [
            "snapshot",
            image,
            "far",
            "--key-file",
            "key",
            "--json",
            "--as",
            machine,
        ];
        let mut command = world.drover("near", &args);
        command.stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        command.spawn().unwrap()
    };
    let mut killed = 0;
    for objects in 1..8 {
        let before = count(&store);
        let mut child = snapshot("web.img", &format!("m{objects}"));
        let begun = std::time::Instant::now();
        while child.try_wait().unwrap().is_none() && count(&store) < before + objects {
            assert!(begun.elapsed() < PATIENCE);
        }
        let _ = child.kill();
        killed += u64::from(!child.wait().unwrap().success());
        world.run("far", &["vault", "check", "--full"]).ok();
    }
    assert!(killed >= 3, "{killed}");

    // The peer is killed, and starts again where it was: the snapshot is made all the same.
    let image = world.image("last.img", 2, 9000);
    let before = count(&store);
    let mut child = snapshot("last.img", "last");
    until("something is written", || {
        count(&store) > before + 2 || child.try_wait().unwrap().is_some()
    });
    drop(site);
    let again = world.process("far", &["serve", "--listen", &at]);
    assert!(child.wait().unwrap().success());
    let restore = ["restore", "last@latest", "again.img", "--vault", "far:"];
    world.run("near", &with_key(&restore)).ok();
    same(&fs::read(&image).unwrap(), &world.path("again.img"));
    drop(again);
}
