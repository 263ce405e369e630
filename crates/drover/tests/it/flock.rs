//! Flocks: several images as one job, in step, atomically, whatever dies.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::mount::client::Client;
use crate::world::{World, own_address, same, signal, until, wait};

/// The last object that `send --json` prints.
fn end(world: &World, args: &[&str]) -> (Vec<Value>, Value) {
    let all = world.run("near", &[&["send"], args, &["--json"]].concat());
    let mut all = all.ok().json();
    let last = all.pop().unwrap();
    assert_eq!(last["event"], "done", "{last}");
    (all, last)
}

fn flocks(world: &World, home: &str, args: &[&str]) -> Vec<Value> {
    let args = [&["flock"], args, &["--json"]].concat();
    world.run(home, &args).ok().json()
}

fn states(flock: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let images = flock["images"].as_array().unwrap().iter();
    let mut all: Vec<_> = images
        .map(|image| (text(&image["name"]), text(&image["state"])))
        .collect();
    all.sort();
    all
}

fn pairs<const N: usize>(of: [(&str, &str); N]) -> Vec<(String, String)> {
    of.map(|(a, b)| (a.to_owned(), b.to_owned())).to_vec()
}

/// An image that begins with what is common to all of `seed`, and then has blocks of its own.
fn image(world: &World, name: &str, seed: u64, own: u64) {
    let common = fs::read(world.image("common.tmp", seed, 1500)).unwrap();
    let path = world.image(name, own, 500);
    let bytes = [&common[..1500 * 4096], &fs::read(&path).unwrap()].concat();
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_flock_is_sent_listed_and_kept_in_step() {
    let world = World::new();
    let far = world.pair();
    image(&world, "a.img", 1, 11);
    image(&world, "b.img", 1, 12);
    let text = "name = \"shop\"\nat-once = 2\n[[image]]\npath = \"b.img\"\nname = \"b-there.img\"\n[[image]]\npath = \"a.img\"\nstart = 1\n";
    fs::write(world.path("shop.toml"), text).unwrap();
    // What has just changed is not told from what changes again.
    std::thread::sleep(Duration::from_millis(2100));
    let file = ["--flock-file", "shop.toml", "far"];
    let (_, last) = end(&world, &file);
    let images = last["images"].as_array().unwrap();
    let sum = |key: &str| -> u64 { images.iter().map(|i| i[key].as_u64().unwrap()).sum() };
    // What both have crosses once, and counts as of the flock in one of them.
    assert!((2500..2520).contains(&sum("sent_blocks")), "{last}");
    assert!((1480..=1500).contains(&sum("flock_blocks")), "{last}");
    assert_eq!(sum("site_blocks"), 0, "{last}");
    // What crossed for one is not counted for the other, which was sent at the same time.
    for image in images {
        let wire = image["wire_sent_bytes"].as_u64().unwrap();
        let own = image["sent_blocks"].as_u64().unwrap() * 4096;
        assert!((own..own + 400_000).contains(&wire), "{last}");
    }
    same(&world.delivered("far", "a.img"), &world.path("a.img"));
    same(&world.delivered("far", "b-there.img"), &world.path("b.img"));

    let both = pairs([("a.img", "delivered"), ("b-there.img", "delivered")]);
    for (home, args, direction) in [
        ("near", &[][..], "sent"),
        ("near", &["far"], "received"),
        ("far", &[], "received"),
    ] {
        let all = flocks(&world, home, args);
        assert_eq!(all.len(), 1, "{all:?}");
        assert_eq!(
            (&all[0]["name"], &all[0]["state"]),
            (&"shop".into(), &"delivered".into())
        );
        assert_eq!(all[0]["direction"], direction);
        assert_eq!(states(&all[0]), both);
    }
    let table = world.run("far", &["flock"]).ok().out;
    assert!(
        table.starts_with("FLOCK") && table.contains("  a.img"),
        "{table}"
    );

    // A dry run of it sends nothing.
    let would = world.run(
        "near",
        &[
            "send",
            "a.img",
            "common.tmp",
            "far",
            "--flock",
            "two",
            "--dry-run",
        ],
    );
    let would = would.ok().err;
    assert!(
        would.contains("common.tmp: about") && would.contains("counts in each"),
        "{would}"
    );
    assert_eq!(flocks(&world, "far", &[]).len(), 1);
    assert_eq!(flocks(&world, "near", &[]).len(), 1);

    // Again: nothing is read. Then one has changed.
    let (events, last) = end(&world, &file);
    let unchanged = |events: &[Value]| {
        let of = events.iter().filter(|e| e["event"] == "unchanged");
        of.map(|e| e["name"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(unchanged(&events).len(), 2, "{events:?}");
    assert_eq!(last["flock"]["state"], "delivered");
    assert!(last["images"].as_array().unwrap().is_empty());
    image(&world, "a.img", 1, 13);
    let (events, last) = end(&world, &file);
    assert_eq!(unchanged(&events), ["b-there.img"]);
    let sent = last["images"][0]["sent_blocks"].as_u64().unwrap();
    assert!((500..510).contains(&sent), "{last}");
    same(&world.delivered("far", "a.img"), &world.path("a.img"));

    // The site remembers it when it is started again, and also while it does not run.
    drop(far);
    assert_eq!(states(&flocks(&world, "far", &[])[0]).len(), 2);
    let _far = world.serve("far", &[]);
    assert_eq!(flocks(&world, "far", &[])[0]["state"], "delivered");
}

#[test]
fn an_image_that_cannot_be_read_keeps_only_an_atomic_flock_back() {
    let world = World::new();
    let _far = world.pair();
    image(&world, "a.img", 1, 11);
    let with = |more: &[&str]| {
        let args = ["send", "a.img", "gone.img", "far", "--flock", "shop"];
        world.run("near", &[&args[..], more].concat())
    };
    let e = with(&["--atomic"]).fails(1, &["nothing of flock shop is sent", "gone.img"]);
    assert!(e.out.is_empty());
    assert!(flocks(&world, "far", &[]).is_empty());
    assert!(!world.path("far/images/a.img").exists());

    let part = with(&[]).fails(1, &["1 of 2 images were not delivered", "gone.img"]);
    assert!(
        part.out.contains("a.img") && part.out.contains("failed"),
        "{}",
        part.out
    );
    same(&world.delivered("far", "a.img"), &world.path("a.img"));
    let known = &flocks(&world, "far", &[])[0];
    assert_eq!(known["state"], "failed");
    assert!(known["why"].as_str().unwrap().contains("gone.img"));
    let expected = pairs([("a.img", "delivered"), ("gone.img", "failed")]);
    assert_eq!(states(known), expected);

    image(&world, "gone.img", 1, 12);
    with(&["--atomic"]).ok();
    same(&world.delivered("far", "gone.img"), &world.path("gone.img"));
    world
        .run("near", &["send", "a.img", "far", "--atomic"])
        .fails(2, &["--flock"]);
}

/// The site is killed again and again while an atomic flock arrives and gets its names: there are all of the new images, or all
/// of the old ones.
#[test]
fn a_site_that_is_killed_has_all_of_an_atomic_flock_or_nothing() {
    let world = World::new();
    let address = own_address().to_string();
    let serve = || world.process("far", &["serve", "--listen", &address]);
    let mut far = serve();
    world
        .run("near", &["pair", &far.ticket, "--name", "far"])
        .ok();
    let names = ["a.img", "b.img", "c.img"];
    let send = [
        "send", "a.img", "b.img", "c.img", "far", "--flock", "shop", "--atomic",
    ];
    let make = |round: u64| {
        for (n, name) in names.iter().enumerate() {
            image(&world, name, 7, 100 * round + n as u64);
        }
    };
    make(0);
    world.run("near", &send).ok();
    let mut rng = fastrand::Rng::with_seed(5);
    let (mut whole, mut none) = (0, 0);
    for round in 1..=5 {
        let old = names.map(|name| world.delivered("far", name));
        make(round);
        let mut child = world
            .drover("near", &send)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(rng.u64(20..900)));
        far.signal("KILL");
        drop(far);
        signal(child.id(), "KILL");
        wait(&mut child);
        far = serve();
        let now = names.map(|name| world.delivered("far", name));
        let new = names.map(|name| fs::read(world.path(name)).unwrap());
        match now == new {
            true => whole += 1,
            false => {
                assert!(
                    now == old,
                    "round {round}: some of it has changed: {}",
                    far.log()
                );
                none += 1;
            }
        }
        // It goes on from what had arrived.
        world.run("near", &send).ok();
        for name in names {
            same(&world.delivered("far", name), &world.path(name));
        }
    }
    eprintln!("{whole} times all of it was there after the kill, {none} times nothing");
    assert!(world.run("far", &["transfers"]).ok().out.is_empty());
}

#[test]
fn an_image_of_an_atomic_flock_is_launched_before_it_has_its_name() {
    let world = World::new();
    let _far = world.pair();
    let small = fs::read(world.image("a.img", 1, 100)).unwrap();
    world.image("b.img", 2, 2000);
    let args = [
        "send", "a.img", "b.img", "far", "--flock", "shop", "--atomic", "--limit", "1M",
    ];
    let mut send = world.drover("near", &args);
    let mut send = send
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let shop = || flocks(&world, "far", &[]).pop();
    until("the first is complete", || {
        shop().is_some_and(|shop| shop["images"][0]["state"] == "arrived")
    });
    let socket = world.path("a.sock");
    let nbd = format!("unix:{}", socket.display());
    world
        .run("far", &["launch", "a.img", "--nbd", &nbd, "--background"])
        .ok();
    let mut client = Client::connect(&socket, "a.img");
    assert!(client.read(4096, 200_000).unwrap() == small[4096..204_096]);
    client.write(8192, &[7; 4096]).unwrap();
    client.flush().unwrap();
    let now = shop().unwrap();
    assert_eq!(now["state"], "open", "{now}");
    assert!(!world.path("far/images/a.img").exists());
    assert_eq!(now["images"][0]["launchable"], true, "{now}");
    let mounts = world.run("far", &["mounts"]).ok().out;
    assert!(!mounts.contains("nothing has come"), "{mounts}");

    // All of them get their names while it is used.
    assert_eq!(wait(&mut send), Some(0), "{:?}", shop());
    same(&world.delivered("far", "a.img"), &world.path("a.img"));
    same(&world.delivered("far", "b.img"), &world.path("b.img"));
    assert_eq!(client.read(8192, 4096).unwrap(), [7; 4096]);
    assert!(client.read(100_000, 8192).unwrap() == small[100_000..108_192]);
    client.write(0, &[6; 4096]).unwrap();
    client.flush().unwrap();
    drop(client);
    until("the client has left", || {
        world
            .run("far", &["unmount", socket.to_str().unwrap()])
            .code
            == Some(0)
    });
    let changes = world.run("far", &["changes", "--json"]).ok().json();
    assert_eq!(changes[0]["changed_bytes"], 8192, "{changes:?}");
}

#[test]
fn a_flock_file_names_the_profile_of_an_image() {
    let world = World::new();
    let far = world.pair();
    image(&world, "a.img", 1, 11);
    image(&world, "b.img", 1, 12);
    // A boot of a disk with the same files, recorded into a file; then one of another disk.
    let record = |disk: &str, profile: &str, blocks: &[u64]| {
        let socket = world.path("s");
        let listen = format!("unix:{}", socket.display());
        let disk = format!("file:{}", world.path(disk).display());
        let profile = world.path(profile).display().to_string();
        let args = ["export", &disk, "--nbd", &listen, "--background"];
        world
            .run("near", &[&args[..], &["--record", &profile]].concat())
            .ok();
        let mut machine = Client::connect(&socket, "");
        for block in blocks {
            machine.read(block * 4096, 4096).unwrap();
        }
        drop(machine);
        let socket = socket.display().to_string();
        until("the client has left", || {
            world.run("near", &["unmount", &socket]).code == Some(0)
        });
    };
    let read = [900, 17, 1200];
    record("b.img", "boot.profile", &read);
    world.image("other.img", 99, 2000);
    record("other.img", "other.profile", &[3, 4]);
    let text = "name = \"shop\"\n[[image]]\npath = \"a.img\"\nprofile = \"boot.profile\"\n[[image]]\npath = \"b.img\"\nprofile = \"other.profile\"\n";
    fs::write(world.path("shop.toml"), text).unwrap();
    let sent = world.run("near", &["send", "--flock-file", "shop.toml", "far"]);
    let sent = sent.ok();
    let said = sent.out.clone() + &sent.err;
    assert!(
        said.contains("its profile is sent along: 12.0 KiB, 1 boot"),
        "{said}"
    );
    assert!(
        said.contains("its profile is not sent along") && said.contains("of another disk"),
        "{said}"
    );
    let shown = world.run("far", &["profile", "a.img", "--json"]).ok();
    let shown = shown.json();
    let regions = shown[0]["regions"].as_array().unwrap().iter();
    let blocks = regions.map(|region| region["offset"].as_u64().unwrap() / 4096);
    assert!(blocks.eq(read), "{shown:?}");
    assert_eq!(shown[0]["boots"], 1);
    // A file that is no profile is refused before anything is sent.
    fs::write(world.path("boot.profile"), "no profile").unwrap();
    world
        .run("near", &["send", "--flock-file", "shop.toml", "far"])
        .fails(2, &["shop.toml: boot.profile", "profile"]);
    drop(far);
}
