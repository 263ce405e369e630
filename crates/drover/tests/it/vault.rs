//! Snapshots in a vault, with the real program.

mod copies;
mod encrypted;
mod files;
mod full;
mod operations;
mod peers;
mod s3;

use std::fs;
use std::path::Path;

use crate::world::{PATIENCE, World, same};

/// Every file below a directory but unfinished ones.
fn files(dir: &Path, out: &mut Vec<std::path::PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        match entry.path().is_dir() {
            true => files(&entry.path(), out),
            false => out.push(entry.path()),
        }
    }
}

fn count(dir: &Path) -> usize {
    let mut found = Vec::new();
    files(dir, &mut found);
    found.len()
}

#[test]
fn a_snapshot_is_made_listed_restored_and_deleted() {
    let world = World::new();
    for command in [
        &["vault"][..],
        &["snapshot"],
        &["snapshots"],
        &["restore"],
        &["vault", "forget"],
    ] {
        let help = world.run("h", &[command, &["--help"]].concat()).ok().out;
        assert!(help.contains("Examples:"), "{help}");
    }
    let image = world.image("web.img", 1, 3000);
    world
        .run("h", &["snapshot", "web.img", "--vault", "nowhere"])
        .fails(3, &["nowhere", "drover vault init"]);
    world.run("h", &["vault", "init", "store"]).ok();
    world
        .run("h", &["vault", "init", "store"])
        .fails(3, &["there is a vault"]);
    world
        .run("h", &["restore", "web@latest", "x.img"])
        .fails(3, &["no snapshot web@latest"]);

    let made = world
        .run("h", &["snapshot", "web.img", "--json"])
        .ok()
        .json();
    let made = made.last().unwrap();
    assert_eq!(made["event"], "snapshot");
    assert_eq!(made["new_bytes"], made["data_bytes"]);
    let again = world
        .run("h", &["snapshot", "web.img", "--json"])
        .ok()
        .json();
    assert_eq!(again.last().unwrap()["new_bytes"], 0);
    assert_eq!(again.last().unwrap()["root"], made["root"]);

    let listed = world.run("h", &["snapshots", "web", "--json"]).ok().json();
    assert_eq!(listed.len(), 2);
    let table = world.run("h", &["snapshots"]).ok().out;
    assert!(table.contains("NAME") && table.contains("web"), "{table}");
    let day = &listed[0]["time"].as_str().unwrap()[..4];
    world
        .run("h", &["restore", &format!("web@{day}"), "x.img"])
        .fails(2, &["ambiguous", listed[1]["time"].as_str().unwrap()]);
    world.run("h", &["restore", "web", "x.img"]).code(2);

    let first = format!("web@{}", listed[0]["time"].as_str().unwrap());
    world.run("h", &["restore", &first, "again.img"]).ok();
    same(&fs::read(&image).unwrap(), &world.path("again.img"));
    let mut changed = fs::read(&image).unwrap();
    changed[5000] ^= 1;
    fs::write(world.path("again.img"), &changed).unwrap();
    world
        .run("h", &["restore", &first, "again.img"])
        .fails(2, &["--yes"]);
    let restored = world
        .run("h", &["restore", &first, "again.img", "--yes", "--json"])
        .ok()
        .json();
    let restored = restored.last().unwrap();
    assert_eq!(
        (&restored["written_bytes"], &restored["in_place"]),
        (&4096.into(), &true.into())
    );
    same(&fs::read(&image).unwrap(), &world.path("again.img"));

    world.run("h", &["vault", "forget"]).code(2);
    let dry = world
        .run("h", &["vault", "forget", "--keep-last", "1", "--dry-run"])
        .ok()
        .out;
    assert!(
        dry.contains(&first) && dry.contains("would be deleted"),
        "{dry}"
    );
    world
        .run("h", &["vault", "forget", "web"])
        .fails(2, &["--yes"]);
    world
        .run("h", &["vault", "forget", "--keep-last", "1", "--yes"])
        .ok();
    let compacted = world
        .run("h", &["vault", "compact", "--grace", "0s", "--json"])
        .ok()
        .json();
    assert_eq!(
        (&compacted[0]["snapshots"], &compacted[0]["removed"]),
        (&1.into(), &0.into())
    );
    world
        .run("h", &["restore", "web@latest", "latest.img"])
        .ok();
    same(&fs::read(&image).unwrap(), &world.path("latest.img"));
    let stats = world.run("h", &["vault", "stats", "--json"]).ok().json();
    assert_eq!(
        (&stats[0]["snapshots"], &stats[0]["garbage_bytes"]),
        (&1.into(), &0.into())
    );

    // A damaged container is found, and nothing of it is restored.
    world.run("h", &["vault", "check", "--full"]).ok();
    let mut containers = Vec::new();
    files(&world.path("store/containers"), &mut containers);
    let mut bytes = fs::read(&containers[0]).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 8;
    fs::remove_file(&containers[0]).unwrap();
    fs::write(&containers[0], bytes).unwrap();
    let found = world.run("h", &["vault", "check", "--full"]).code(1);
    assert!(found.out.contains("web@"), "{}", found.out);
    world
        .run("h", &["restore", "web@latest", "bad.img"])
        .fails(1, &["damaged"]);
    assert!(!world.path("bad.img").exists());
}

#[test]
fn a_snapshot_that_is_killed_at_every_object_leaves_the_vault_as_it_was() {
    let world = World::new();
    let first = world.image("first.img", 1, 1000);
    world.image("second.img", 2, 6000);
    world.run("h", &["vault", "init", "store"]).ok();
    world.run("h", &["snapshot", "first.img"]).ok();
    let store = world.path("store");
    let mut killed = 0;
    for object in 0..12 {
        let before = count(&store);
        let mut child = world
            .drover(
                "h",
                &["snapshot", "second.img", "--as", &format!("m{object}")],
            )
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let begun = std::time::Instant::now();
        while child.try_wait().unwrap().is_none() && count(&store) < before + object {
            assert!(begun.elapsed() < PATIENCE);
        }
        let _ = child.kill();
        killed += u64::from(!child.wait().unwrap().success());
        let report = world
            .run("h", &["vault", "check", "--full", "--json"])
            .ok()
            .json();
        assert_eq!(
            report[0]["problems"],
            serde_json::json!([]),
            "object {object}"
        );
    }
    assert!(killed >= 3, "{killed}");
    world
        .run("h", &["restore", "first@latest", "again.img"])
        .ok();
    same(&fs::read(first).unwrap(), &world.path("again.img"));
    // The next one is made as if nothing had happened, and what is there is used.
    world.run("h", &["snapshot", "second.img"]).ok();
    world
        .run("h", &["restore", "second@latest", "second-again.img"])
        .ok();
    same(
        &fs::read(world.path("second.img")).unwrap(),
        &world.path("second-again.img"),
    );
    world.run("h", &["vault", "compact", "--grace", "0s"]).ok();
    world.run("h", &["vault", "check", "--full"]).ok();
}
