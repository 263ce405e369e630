//! Damaged files in the home: each is either repaired, with a report, or refused with one clear line.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use crate::world::World;

#[test]
fn a_damaged_catalog_is_repaired_and_peers_are_kept() {
    let world = World::new();
    let far = world.pair();
    world.image("a.img", 1, 100);
    world.run("near", &["send", "a.img", "far"]).ok();
    far.stop();
    let path = world.path("far/catalog.db");
    let mut bytes = fs::read(&path).unwrap();
    for page in bytes.chunks_mut(4096).skip(1) {
        page.fill(0xa5);
    }
    fs::write(&path, bytes).unwrap();
    let key = world.run("far", &["init", "--json"]).ok();
    assert!(
        key.err.contains("repaired:") && key.err.contains("catalog.bak"),
        "{}",
        key.err
    );
    let ran = world.run("far", &["images", "--json"]).ok();
    assert_eq!(
        (ran.json()[0]["name"].as_str(), ran.err.as_str()),
        (Some("a.img"), ""),
        "repaired once"
    );
    assert_eq!(world.run("far", &["peers", "--json"]).ok().json().len(), 1);
    world.run("far", &["verify", "a.img"]).ok();
}

#[test]
fn a_damaged_identity_is_never_replaced() {
    let world = World::new();
    world.run("h", &["init"]).ok();
    let path = world.path("h/identity.key");
    fs::write(&path, "garbage").unwrap();
    let ran = world.run("h", &["ticket"]);
    assert!(matches!(ran.code, Some(1 | 3)), "{ran:?}");
    assert!(ran.err.contains("identity.key"), "{}", ran.err);
    assert_eq!(fs::read_to_string(&path).unwrap(), "garbage");
}

#[test]
fn a_command_that_is_killed_at_any_moment_leaves_a_sound_catalog() {
    let world = World::new();
    world.run("h", &["init"]).ok();
    let seed = fastrand::u64(..);
    let mut rng = fastrand::Rng::with_seed(seed);
    for round in 0..30 {
        let mut killed = world
            .drover("h", &["ticket"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(rng.u64(..30_000)));
        killed.kill().unwrap();
        killed.wait().unwrap();
        let ran = world.run("h", &["ticket"]).ok();
        assert!(
            !ran.err.contains("repaired"),
            "seed {seed}, round {round}: {}",
            ran.err
        );
    }
}
