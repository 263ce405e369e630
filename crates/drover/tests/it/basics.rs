//! Commands that need no other site.

use std::fs;

use crate::world::World;

const COMMANDS: &[&str] = &[
    "init",
    "serve",
    "ticket",
    "pair",
    "send",
    "images",
    "index",
    "verify",
    "rm",
    "status",
    "space",
    "teleporter",
    "peers",
    "digest",
    "completions",
    "man",
];

#[test]
fn help_has_examples_and_usage_errors_have_their_code() {
    let world = World::new();
    for command in COMMANDS {
        let ran = world.run("h", &[command, "--help"]).ok();
        assert!(
            ran.out.contains("Examples:") && ran.out.contains(&format!("drover {command}")),
            "{}",
            ran.out
        );
        world.run("h", &[command, "--no-such-option"]).code(2);
    }
    let bare = world.run("h", &[]).code(2);
    assert!(bare.err.contains("Examples:"), "{}", bare.err);
    assert!(!bare.err.contains("mount-daemon"), "{}", bare.err);
    let mut plain = world.drover("h", &[]);
    let plain = plain.env_remove("DROVER_HOME").output().unwrap();
    assert_eq!(plain.status.code(), Some(2));
    let said = String::from_utf8(plain.stderr).unwrap();
    assert!(
        said.contains("Usage:") && said.contains("Examples:"),
        "{said}"
    );
    world.run("h", &["fly"]).code(2);
    let wrong = world.run("h", &["send", "x", "lyon", "--connections", "9"]);
    let wrong = wrong.code(2).err;
    assert!(
        wrong.contains("'9' for '--connections <N>': must be from 1 to 8"),
        "{wrong}"
    );
    assert!(!wrong.contains("Usage:"), "{wrong}");
    let mut odd = world.drover("h", &["man", "pages"]);
    let odd = odd.env("DROVER_LOG", "((").output().unwrap();
    let said = String::from_utf8(odd.stderr).unwrap();
    assert_eq!(odd.status.code(), Some(2), "{said}");
    assert!(said.starts_with("drover: DROVER_LOG=((: "), "{said}");
    assert!(!world.path("h").exists(), "looking at help makes nothing");
}

#[test]
fn completions_and_man_pages_know_every_command() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = world.run("h", &["completions", shell]).ok().out;
        for command in COMMANDS {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
    world.run("h", &["man", "pages/man1"]).ok();
    let dir = world.path("pages/man1");
    assert!(
        fs::read_to_string(dir.join("drover.1"))
            .unwrap()
            .contains("Exit codes")
    );
    for command in COMMANDS {
        let page = fs::read_to_string(dir.join(format!("drover-{command}.1"))).unwrap();
        assert!(page.contains(".SH SYNOPSIS"), "{command}");
    }
}

#[test]
fn init_makes_a_home_once_and_for_good() {
    let world = World::new();
    let made = world
        .run(
            "h",
            &[
                "init",
                "--name",
                "lyon",
                "--listen",
                "127.0.0.1:9999",
                "--json",
            ],
        )
        .ok()
        .json();
    assert_eq!(made[0]["name"], "lyon");
    assert_eq!(made[0]["new"], true);
    let again = world.run("h", &["init", "--json"]).ok().json();
    assert_eq!(
        (&again[0]["key"], &again[0]["new"]),
        (&made[0]["key"], &false.into())
    );
    world
        .run("h", &["init", "--name", "nice"])
        .fails(2, &["config.toml exists already"]);
    let ticket = world.run("h", &["ticket", "--json"]).ok().json();
    assert_eq!(ticket[0]["addresses"][0], "127.0.0.1:9999");
    let ticket = world
        .run(
            "h",
            &["ticket", "--advertise", "lyon.example.net", "--json"],
        )
        .ok()
        .json();
    assert_eq!(ticket[0]["addresses"][0], "lyon.example.net:9999");
}

#[test]
fn commands_that_only_look_do_not_make_a_home() {
    let world = World::new();
    for args in [
        &["images"][..],
        &["peers"],
        &["status"],
        &["verify", "x.img"],
        &["rm", "x.img", "--yes"],
        &["send", "x", "lyon"],
    ] {
        world
            .run("nowhere", args)
            .fails(1, &["nowhere", "does not exist", "drover init"]);
    }
    assert!(!world.path("nowhere").exists());
}

#[test]
fn mistakes_in_the_configuration_name_their_line() {
    let world = World::new();
    world.run("h", &["init"]).ok();
    fs::write(world.path("h/config.toml"), "# mine\nlimit = \"fast\"\n").unwrap();
    world
        .run("h", &["images"])
        .fails(1, &["config.toml, line 2", "fast"]);
}

#[test]
fn an_image_is_indexed_checked_and_forgotten_without_a_site_running() {
    let world = World::new();
    let path = world.image("a.img", 1, 500);
    let indexed = world.run("h", &["index", "a.img", "--json"]).ok().json();
    assert_eq!(indexed[0]["name"], "a.img");
    assert_eq!(
        indexed[0]["path"],
        path.canonicalize().unwrap().to_str().unwrap()
    );
    let digest = world.run("h", &["digest", "a.img"]).ok().out;
    assert_eq!(
        digest.split_whitespace().next(),
        indexed[0]["digest"].as_str()
    );
    let list = world.run("h", &["images", "--json"]).ok().json();
    assert_eq!(list[0]["digest"], indexed[0]["digest"]);
    assert_eq!(list[0]["size_bytes"], 500 * 4096 + (1 << 20));
    let good = world.run("h", &["verify", "a.img", "--json"]).ok().json();
    assert_eq!(good[0]["good"], true);

    world.run("h", &["rm", "a.img"]).fails(2, &["--yes"]);
    let would = world.run("h", &["rm", "a.img", "--dry-run"]).ok().out;
    assert!(
        would.contains("its file") && would.contains("stays"),
        "{would}"
    );
    world.run("h", &["rm", "a.img", "--yes"]).ok();
    assert!(path.exists(), "an indexed file is not drover's to remove");
    assert_eq!(world.run("h", &["images", "--json"]).ok().out, "");
    world.run("h", &["verify", "a.img"]).fails(3, &["a.img"]);
    world
        .run("h", &["rm", "a.img", "--yes"])
        .fails(3, &["a.img", "drover images"]);
}

#[test]
fn a_changed_image_is_found_out() {
    let world = World::new();
    let path = world.image("a.img", 1, 100);
    world.run("h", &["index", "a.img"]).ok();
    let mut bytes = fs::read(&path).unwrap();
    bytes[5000] ^= 1;
    fs::write(&path, bytes).unwrap();
    let bad = world
        .run("h", &["verify", "a.img", "--json"])
        .fails(1, &["a.img", "has changed", "send or index it again"]);
    assert_eq!(bad.json()[0]["good"], false);
}

#[test]
fn names_that_leave_their_directory_are_usage_errors() {
    let world = World::new();
    world.run("h", &["init"]).ok();
    world.image("a.img", 1, 1);
    let long = "x".repeat(4096);
    for bad in [
        "../a.img",
        "..",
        "a/b",
        "new\nline",
        "",
        ".hidden",
        long.as_str(),
    ] {
        world
            .run("h", &["send", "a.img", "lyon", "--as", bad])
            .code(2);
        world.run("h", &["rm", bad, "--yes"]).code(2);
        world.run("h", &["verify", bad]).code(2);
    }
    world.image("a:b.img", 1, 1);
    world
        .run("h", &["index", "a:b.img"])
        .fails(2, &["a:b.img", "cannot contain ':'", "rename"]);
    world
        .run("h", &["send", "a:b.img", "lyon"])
        .fails(2, &["cannot contain ':'", "--as"]);
    world
        .run("h", &["send", "a.img", "lyon"])
        .fails(3, &["no peer is called", "drover pair"]);
    world
        .run("h", &["pair", "drover1rubbish"])
        .fails(2, &["ticket"]);
    world.run("h", &["pair", "rubbish"]).fails(2, &["drover1"]);
}

#[test]
fn nothing_that_is_no_image_is_indexed() {
    let world = World::new();
    world
        .run("h", &["index", "gone.img"])
        .fails(1, &["gone.img"]);
    assert!(!world.path("h").exists(), "no site is made for nothing");
    fs::create_dir(world.path("empty")).unwrap();
    world
        .run("h", &["index", "empty"])
        .fails(2, &["no files to index"]);
}
