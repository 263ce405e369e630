//! Peers that want to see, remove, merge or drop what belongs to others; and those whom it belongs to, from afar.

use std::process::Stdio;

use drover_teleport::services::ShareImage;
use serde_json::Value;

use super::*;
use crate::mount::client::Client as Nbd;
use crate::mount::{Mounts, text};
use crate::world::{same, signal, until, wait};

/// A home that pairs with `far` under its own name, with these options of the ticket.
pub fn pair(world: &World, home: &str, options: &[&str]) {
    let ticket = world.run("far", &[&["ticket", "--name", home], options].concat());
    world
        .run(home, &["pair", ticket.ok().out.trim(), "--name", "far"])
        .ok();
}

/// Sends an image of a few blocks to the far site.
pub fn sent(world: &World, home: &str, name: &str, seed: u64) -> std::path::PathBuf {
    let image = world.image(name, seed, 300);
    world.run(home, &["send", text(&image), "far"]).ok();
    image
}

/// Sends part of an image, and stops.
pub fn stopped(world: &World, home: &str, name: &str) {
    world.image(name, 1, 10_240);
    let mut child = world
        .drover(home, &["send", name, "far", "--limit", "6M"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let state = |wanted: &str| {
        let list = world.run("far", &["transfers", "--json"]).ok().json();
        let found = list.iter().find(|t| t["name"] == name).cloned();
        found.is_some_and(|t| t["state"] == wanted && t["done_bytes"] != 0)
    };
    until("some of it comes", || state("under-way"));
    signal(child.id(), "TERM");
    wait(&mut child);
    until("it is stopped", || state("stopped"));
}

/// The names in a list.
fn names(list: &[Value], field: &str) -> Vec<String> {
    let mut names = Vec::from_iter(list.iter().map(|i| i[field].as_str().unwrap().to_owned()));
    names.sort();
    names
}

#[test]
fn a_peer_sees_and_removes_its_own_transfers_only() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    pair(&world, "near", &[]);
    pair(&world, "other", &[]);
    stopped(&world, "near", "near.img");
    stopped(&world, "other", "other.img");
    let list = |home: &str| {
        let list = world.run(home, &["transfers", "far", "--json"]).ok().json();
        (names(&list, "name"), list)
    };
    assert_eq!(list("near").0, ["near.img"]);
    let (found, theirs) = list("other");
    assert_eq!(found, ["other.img"]);
    // Nor by its key, which it may have learned elsewhere.
    let key = theirs[0]["key"].as_str().unwrap();
    world
        .run("near", &["transfers", "rm", key, "--at", "far", "--yes"])
        .fails(3, &["no unfinished transfer"]);
    let peer = peer_of(&world, "near");
    let request = RemoveTransfer { key: key.into() };
    let refusal = run(peer.refused(&encode_call(&request)));
    assert_eq!(refusal.code, Code::Denied, "{refusal}");
    // Whoever may change everything sees everything.
    world
        .run("far", &["peers", "set", "near", "--can", "admin"])
        .ok();
    assert_eq!(list("near").0, ["near.img", "other.img"]);
    world
        .run("near", &["transfers", "rm", key, "--at", "far", "--yes"])
        .ok();
    assert_eq!(list("near").0, ["near.img"]);
}

#[test]
fn a_peer_removes_its_own_images_and_no_others() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    world.run("far", &["domains", "add", "acme"]).ok();
    pair(&world, "near", &["--quota", "2M"]);
    pair(&world, "other", &[]);
    pair(&world, "acme", &["--domain", "acme"]);
    let mine = sent(&world, "near", "web.img", 1);
    let own = world.image("own.img", 2, 300);
    world.run("far", &["index", text(&own)]).ok();
    let rm = |home: &str, image: &str, more: &[&str]| {
        world.run(home, &[&["rm", &format!("far:{image}")], more].concat())
    };

    // Another's, the site's, and one that is in another domain or not at all.
    for how in ["--yes", "--dry-run"] {
        for image in ["web.img", "own.img"] {
            let ran = rm("other", image, &[how]).fails(
                3,
                &[image, "does not belong to your site", "right admin at"],
            );
            assert!(!ran.err.contains('/'), "a path is said: {ran:?}");
        }
        rm("near", "own.img", &[how]).fails(3, &["does not belong to your site"]);
        rm("acme", "web.img", &[how]).fails(3, &["no image called web.img"]);
        rm("near", "none.img", &[how]).fails(3, &["no image called none.img"]);
    }
    // Sharing it lets the other replace it, not remove it.
    let share = ["share", "far:web.img", "--with", "other"];
    world.run("near", &share).ok();
    rm("other", "web.img", &["--yes"]).fails(3, &["does not belong"]);
    // Nor without the right to send.
    let can = |rights: &str| {
        world
            .run("far", &["peers", "set", "near", "--can", rights])
            .ok()
    };
    can("read,write");
    rm("near", "web.img", &["--yes"]).fails(3, &["right send at", "--can send,read,write"]);
    can("send,read,write");
    same(&world.delivered("far", "web.img"), &mine);

    // Its owner: asked first, and then it has its space back.
    let would = rm("near", "web.img", &["--dry-run"]).ok().out;
    assert!(
        would.starts_with("would remove web.img at far (1.2 MiB"),
        "{would}"
    );
    rm("near", "web.img", &[]).fails(2, &["--yes"]);
    let more = world.image("more.img", 3, 300);
    world
        .run("near", &["send", text(&more), "far"])
        .fails(3, &["may take 2.0 MiB"]);
    let gone = rm("near", "web.img", &["--yes", "--json"]).ok().json();
    assert_eq!(
        (&gone[0]["removed"], &gone[0]["peer"]),
        (&true.into(), &"far".into())
    );
    world.run("near", &["send", text(&more), "far"]).ok();
    // One that may change everything removes all, but not the file of an indexed one.
    can("admin");
    rm("near", "own.img", &["--yes"]).ok();
    assert!(own.exists());
    let left = world.run("far", &["images", "--json"]).ok().json();
    assert_eq!(names(&left, "name"), ["more.img"]);
}

#[test]
fn an_image_that_is_mounted_is_not_removed_from_afar() {
    let m = Mounts::new();
    sent(&m.world, "near", "web.img", 1);
    let socket = m.export("web.img", &[]);
    let rm = |how| m.near(&["rm", "far:web.img", how]);
    let would = rm("--dry-run").ok().out;
    assert!(
        would.contains("refused at present") && would.contains("write lease"),
        "{would}"
    );
    rm("--yes").fails(3, &["web.img", "write lease"]);
    m.unmount(&socket, &[]).ok();
    rm("--yes").ok();
}

/// Writes over an image at the far site.
fn written(m: &Mounts, home: &str, image: &str) {
    let socket = m.world.path("nbd.sock");
    let (disk, listen) = (format!("far:{image}"), format!("unix:{}", text(&socket)));
    let export = ["export", &disk, "--nbd", &listen, "--background"];
    m.world.run(home, &export).ok();
    let mut client = Nbd::connect(&socket, image);
    client.write(4096, &[7; 8192]).unwrap();
    client.flush().unwrap();
    drop(client);
    m.world.run(home, &["unmount", text(&socket)]).ok();
}

#[test]
fn an_owner_merges_and_drops_the_changes_to_its_image_and_no_one_else_does() {
    let m = Mounts::new();
    let world = &m.world;
    m.pair("other");
    pair(world, "acme", &["--can", "send,read,write,admin"]);
    world.run("far", &["domains", "add", "acme"]).ok();
    world
        .run("far", &["peers", "set", "acme", "--domain", "acme"])
        .ok();
    let image = sent(world, "near", "web.img", 1);
    written(&m, "near", "web.img");
    let changes = |home: &str| {
        let list = world.run(home, &["changes", "far", "--json"]).ok().json();
        names(&list, "image")
    };
    assert_eq!(changes("near"), ["web.img"]);
    let listed = world.run("near", &["changes", "far", "--json"]).ok().json();
    assert_eq!(
        (&listed[0]["changed_bytes"], &listed[0]["directory"]),
        (&8192.into(), &"".into())
    );
    let shown = world.run("near", &["changes", "far"]).ok().out;
    assert!(
        shown.contains("web.img") && shown.contains("free"),
        "{shown}"
    );
    let ask = |home: &str, what: &[&str]| {
        let args = [&["changes", what[0], "far:web.img"], &what[1..]].concat();
        world.run(home, &args)
    };
    for home in ["other", "acme"] {
        assert_eq!(changes(home), [""; 0], "{home}");
    }
    let refused = [
        &["merge"][..],
        &["merge", "--dry-run"],
        &["merge", "--as", "stolen.img"],
    ];
    for what in refused {
        ask("other", what).fails(3, &["web.img", "does not belong to your site"]);
        ask("acme", what).fails(3, &["no image called web.img"]);
    }
    ask("acme", &["drop", "--yes"]).fails(3, &["no image called web.img"]);
    // A peer that leaves this program's list aside.
    let name = ImageName::new("web.img").unwrap();
    let request = encode_call(&changes::DropChanges {
        name,
        earlier: false,
    });
    let stranger = peer_of(world, "other");
    let refusal = run(stranger.refused(&request));
    assert_eq!(refusal.code, Code::Denied, "{refusal}");
    assert!(!refusal.message.contains('/'), "{refusal}");
    assert_eq!(changes("near"), ["web.img"]);

    // A new image belongs to whom it was made for, and counts against its quota.
    let key = peer_of(world, "near").identity.key().to_string();
    let peers = world.run("far", &["peers", "--json"]).ok().json();
    let near = peers.iter().find(|peer| peer["key"] == key).unwrap();
    let near = near["name"].as_str().unwrap();
    let quota = |size: &str| {
        world
            .run("far", &["peers", "set", near, "--quota", size])
            .ok()
    };
    quota("1500K");
    ask("near", &["merge", "--as", "copy.img"]).fails(3, &["may take 1.5 MiB"]);
    quota("none");
    ask("near", &["merge", "--as", "copy.img"]).ok();
    world
        .run("other", &["rm", "far:copy.img", "--yes"])
        .fails(3, &["does not belong"]);
    world.run("near", &["rm", "far:copy.img", "--yes"]).ok();
    let merged = ask("near", &["merge", "--json"]).ok().json();
    assert_eq!(merged[0]["merged"], true);
    assert!(merged[0]["free_bytes"].is_null(), "{merged:?}");
    let mut bytes = fs::read(&image).unwrap();
    bytes[4096..][..8192].fill(7);
    assert!(world.delivered("far", "web.img") == bytes);
    assert_eq!(changes("near"), [""; 0]);

    written(&m, "near", "web.img");
    ask("near", &["drop"]).fails(2, &["--yes"]);
    ask("near", &["drop", "--yes"]).ok();
    assert_eq!(changes("near"), [""; 0]);
    let none = ask("near", &["drop", "--yes"]).ok();
    assert!(none.err.contains("nothing to drop"), "{none:?}");
}

#[test]
fn changes_to_an_image_that_is_gone_belong_to_who_wrote_them() {
    let m = Mounts::new();
    let world = &m.world;
    m.pair("other");
    sent(world, "near", "web.img", 1);
    written(&m, "near", "web.img");
    world.run("near", &["rm", "far:web.img", "--yes"]).ok();
    // Another takes the name; what was written before is not its own.
    sent(world, "other", "web.img", 2);
    let drop = |home: &str, more: &[&str]| {
        world.run(
            home,
            &[&["changes", "drop", "far:web.img", "--yes"], more].concat(),
        )
    };
    let none = drop("other", &[]).ok();
    assert!(none.err.contains("nothing to drop"), "{none:?}");
    let request = |earlier| {
        let name = ImageName::new("web.img").unwrap();
        encode_call(&changes::DropChanges { name, earlier })
    };
    let other = peer_of(world, "other");
    let refusal = run(other.refused(&request(false)));
    assert_eq!(refusal.code, Code::Denied, "{refusal}");
    // Its first mount sets them aside.
    written(&m, "other", "web.img");
    let refusal = run(other.refused(&request(true)));
    assert_eq!(refusal.code, Code::Denied, "{refusal}");
    drop("near", &["--earlier"]).ok();
    let left = world.run("far", &["changes", "--json"]).ok().json();
    assert_eq!((left.len(), &left[0]["earlier"]), (1, &false.into()));
    drop("other", &[]).ok();
}

#[test]
fn no_request_of_a_peer_is_about_another_domain() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    world.run("far", &["domains", "add", "acme"]).ok();
    pair(&world, "near", &[]);
    pair(
        &world,
        "acme",
        &["--domain", "acme", "--can", "send,read,write,admin"],
    );
    sent(&world, "near", "web.img", 1);
    let peer = peer_of(&world, "acme");
    let name = || ImageName::new("web.img").unwrap();
    let (dry_run, earlier) = (false, false);
    let order = changes::Order {
        name: name(),
        rename: None,
        to: None,
        drop: false,
        dry_run,
    };
    let calls = [
        encode_call(&VerifyImage { name: name() }),
        encode_call(&RemoveImage {
            name: name(),
            dry_run,
        }),
        encode_call(&ShareImage {
            name: name(),
            with: "near".into(),
            share: true,
        }),
        encode_call(&changes::DropChanges {
            name: name(),
            earlier,
        }),
        encode_call(&order),
    ];
    for call in calls {
        let refusal = run(peer.refused(&call));
        assert_eq!(refusal.code, Code::NotFound, "{refusal}");
    }
    for list in [["images", "far"], ["changes", "far"], ["transfers", "far"]] {
        assert_eq!(world.run("acme", &list).ok().out, "", "{list:?}");
    }
}

/// A client with the key of a home.
pub fn peer_of(world: &World, home: &str) -> Client {
    let ticket = world.run("far", &["ticket"]).ok().out;
    let home = drover_agent::home::Home::existing(world.path(home)).unwrap();
    Client {
        identity: home.identity().unwrap(),
        ticket: ticket.trim().parse().unwrap(),
    }
}
