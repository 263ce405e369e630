//! Copies of a vault, and repair from them, with the real program.

use drover_vault::testing::S3Server;

use super::*;
use crate::world::Ran;

/// Exchanges a file of a vault, as a disk does that loses bits.
fn damage(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

fn first(dir: &Path) -> std::path::PathBuf {
    let mut found = Vec::new();
    files(dir, &mut found);
    found.sort();
    found.remove(0)
}

#[test]
fn a_vault_is_copied_killed_in_between_and_mended_from_its_copy() {
    let world = World::new();
    let run = |args: &[&str]| world.run("h", args);
    let help = run(&["vault", "copy", "--help"]).ok().out;
    assert!(help.contains("Examples:"), "{help}");
    let image = world.image("web.img", 1, 9000);
    run(&["vault", "init", "store"]).ok();
    run(&["snapshot", "web.img"]).ok();
    world.image("db.img", 2, 5000);
    run(&["snapshot", "db.img"]).ok();

    // Killed at every few objects.
    let (mut killed, to) = (0, world.path("copy"));
    for objects in 1..8 {
        let before = count(&to);
        let mut child = world
            .drover("h", &["vault", "copy", "copy", "--limit", "8M"])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let begun = std::time::Instant::now();
        while child.try_wait().unwrap().is_none() && count(&to) < before + objects {
            assert!(begun.elapsed() < PATIENCE);
        }
        let _ = child.kill();
        killed += u64::from(!child.wait().unwrap().success());
        if to.join("vault").exists() {
            run(&["vault", "check", "--full", "--vault", "copy"]).ok();
        }
    }
    assert!(killed >= 3, "{killed}");
    let done = run(&["vault", "copy", "copy", "--json"]).ok().json();
    let done = done.last().unwrap();
    assert_eq!(done["event"], "copied");
    assert_eq!(
        done["snapshots"].as_u64().unwrap() + done["there"].as_u64().unwrap(),
        2
    );
    let again = run(&["vault", "copy", "copy", "--json"]).ok().json();
    assert_eq!(again.last().unwrap()["moved_bytes"], 0);
    run(&["vault", "copy", "web.img"]).fails(1, &["web.img"]);
    world.run("other", &["vault", "init", "another"]).ok();
    run(&["vault", "copy", "another"]).fails(3, &["is another one"]);
    // The site has one vault, as before.
    run(&["snapshots"]).ok();
    run(&["restore", "web@latest", "web.again", "--vault", "copy"]).ok();
    same(&fs::read(&image).unwrap(), &world.path("web.again"));

    // A flipped bit, a lost container, a lost part of a recipe.
    run(&["vault", "check", "--repair"]).code(2);
    let container = first(&world.path("store/containers/web"));
    damage(&container, |bytes| *bytes.last_mut().unwrap() ^= 4);
    fs::remove_file(first(&world.path("store/containers/db"))).unwrap();
    fs::remove_file(first(&world.path("store/recipes/db"))).unwrap();
    run(&["vault", "check", "--full"]).code(1);
    let mended = ["vault", "check", "--full", "--repair", "--from", "copy"];
    let report = run(&[&mended[..], &["--json"]].concat()).ok().json();
    assert_eq!(report[0]["problems"], serde_json::json!([]));
    let repaired = report[0]["repaired"].as_array().unwrap();
    assert!(repaired.len() >= 2, "{repaired:?}");
    run(&["vault", "check", "--full"]).ok();
    run(&["restore", "web@latest", "web.mended"]).ok();
    same(&fs::read(&image).unwrap(), &world.path("web.mended"));
    run(&["restore", "db@latest", "db.mended"]).ok();
    same(
        &fs::read(world.path("db.img")).unwrap(),
        &world.path("db.mended"),
    );
    run(&["vault", "check", "--repair", "--from", "nowhere"]).fails(3, &["there is no vault"]);
}

#[test]
fn an_encrypted_vault_is_copied_to_an_object_store_and_back() {
    let world = World::new();
    let Some(server) = S3Server::start(&world.path("s3")) else {
        return;
    };
    let run = |home: &str, args: &[&str]| {
        let mut command = world.drover(home, args);
        command
            .env(
                "AWS_ENDPOINT_URL",
                format!("http://127.0.0.1:{}", server.port()),
            )
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_ACCESS_KEY_ID", "test")
            .env("AWS_SECRET_ACCESS_KEY", "testsecret")
            .env("AWS_REGION", "us-east-1");
        Ran::of(home, args, command.output().unwrap())
    };
    let image = world.image("web.img", 1, 2000);
    let init = ["vault", "init", "store", "--encrypt", "--key-file", "key"];
    run("h", &init).ok();
    run("h", &["snapshot", "web.img"]).ok();
    run("h", &["vault", "copy", "s3://vaults/far"]).ok();
    let far = ["--vault", "s3://vaults/far", "--key-file", "key"];
    run("h", &[&["vault", "check", "--full"][..], &far].concat()).ok();
    // The directory is lost; another site makes it anew from the copy.
    fs::remove_dir_all(world.path("store")).unwrap();
    run("other", &[&["vault", "copy", "store"][..], &far].concat()).ok();
    run("h", &["restore", "web@latest", "again.img"]).ok();
    same(&fs::read(&image).unwrap(), &world.path("again.img"));
}
