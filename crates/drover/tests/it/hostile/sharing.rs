//! Peers that keep what was shared with them, and those that have others pay for it.

use std::process::Stdio;

use drover_store::lease::Access;
use drover_store::{Catalog, SiteCatalog};

use super::ownership::{pair, sent};
use super::rights::{open_as, opened};
use super::*;
use crate::world::{same, until, wait};

/// The keys of peers that the image of `near` is shared with.
fn shared(world: &World) -> usize {
    let (catalog, _) = SiteCatalog::open(&world.path("far")).unwrap();
    let name = ImageName::new("a.img").unwrap();
    catalog.by_name(&name).unwrap().unwrap().shared.len()
}

fn share(world: &World, with: &str, more: &[&str]) {
    let args = ["share", "far:a.img", "--with", with];
    world.run("near", &[&args, more].concat()).ok();
}

/// Another peer sends an image in the place of that of `near`; `meanwhile` is called before it has arrived, which makes the
/// site refuse it. Returns what the sender is told.
fn cut_short(world: &World, meanwhile: impl FnOnce()) -> String {
    world.image("b.img", 2, 10_240);
    let send = ["send", "b.img", "far", "--as", "a.img", "--limit", "6M"];
    let mut child = world
        .drover("other", &send)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("some of it comes", || {
        let list = world.run("far", &["transfers", "--json"]).ok().json();
        list.iter().any(|t| t["done_bytes"] != 0)
    });
    meanwhile();
    assert_eq!(wait(&mut child), Some(3));
    let mut says = String::new();
    std::io::Read::read_to_string(&mut child.stderr.unwrap(), &mut says).unwrap();
    says
}

#[test]
fn what_is_no_longer_shared_when_it_has_arrived_is_not_delivered() {
    let world = World::new();
    let site = world.serve("far", &[]);
    pair(&world, "near", &[]);
    pair(&world, "other", &[]);
    let image = sent(&world, "near", "a.img", 1);
    share(&world, "other", &[]);
    let says = cut_short(&world, || share(&world, "other", &["--stop"]));
    assert!(says.contains("belongs to another peer"), "{says}");
    same(&world.delivered("far", "a.img"), &image);
    world.run("far", &["verify", "a.img"]).ok();
    // Shared again, it goes on where it was.
    share(&world, "other", &[]);
    world
        .run("other", &["send", "b.img", "far", "--as", "a.img"])
        .ok();
    same(&world.delivered("far", "a.img"), &world.path("b.img"));
    assert_eq!(site.stop().0, Some(0));
}

#[test]
fn the_owners_quota_is_asked_again_when_an_image_has_arrived() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    pair(&world, "near", &["--quota", "80M"]);
    pair(&world, "other", &[]);
    let image = sent(&world, "near", "a.img", 1);
    share(&world, "other", &[]);
    let set = ["peers", "set", "near", "--quota"];
    let says = cut_short(&world, || {
        world.run("far", &[&set[..], &["20M"]].concat()).ok();
    });
    assert!(
        says.contains("more space there than the peer may"),
        "{says}"
    );
    same(&world.delivered("far", "a.img"), &image);
    world.run("far", &[&set[..], &["80M"]].concat()).ok();
    world
        .run("other", &["send", "b.img", "far", "--as", "a.img"])
        .ok();
    same(&world.delivered("far", "a.img"), &world.path("b.img"));
}

#[test]
fn what_a_peer_puts_in_the_place_of_anothers_image_counts_for_the_owner() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    pair(&world, "near", &["--quota", "2M"]);
    pair(&world, "other", &[]);
    sent(&world, "near", "a.img", 1);
    share(&world, "other", &[]);
    let replace = |name: &str, blocks| {
        world.image(name, 2, blocks);
        world.run("other", &["send", name, "far", "--as", "a.img"])
    };
    replace("large.img", 600).fails(3, &["a.img", "more space there than the peer may"]);
    replace("small.img", 400).ok();
    world.image("b.img", 3, 200);
    world
        .run("near", &["send", "b.img", "far"])
        .fails(3, &["b.img", "may take 2.0 MiB"]);
    // The site's own image becomes that of the peer that replaces it.
    let own = world.image("own.img", 4, 300);
    fs::copy(&own, world.path("far/images/own.img")).unwrap();
    let own = world.path("far/images/own.img");
    world.run("far", &["index", own.to_str().unwrap()]).ok();
    sent(&world, "other", "own.img", 5);
    world
        .run("near", &["send", "b.img", "far", "--as", "own.img"])
        .fails(3, &["own.img", "belongs to another peer"]);
}

#[test]
fn a_peer_that_left_has_nothing_that_was_shared_with_it() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    pair(&world, "near", &[]);
    sent(&world, "near", "a.img", 1);
    world.run("far", &["domains", "add", "acme"]).ok();
    let ticket = |peer: &Client| {
        let ticket = world.run("far", &["ticket", "--name", "web"]).ok().out;
        Client {
            identity: peer.identity.clone(),
            ticket: ticket.trim().parse().unwrap(),
        }
    };
    let far = world.run("far", &["ticket"]).ok().out;
    let mut peer = Client {
        identity: Identity::generate(),
        ticket: far.trim().parse().unwrap(),
    };
    for (mount, leaves) in [
        (1, &["peers", "forget", "web", "--yes"][..]),
        (2, &["peers", "set", "web", "--domain", "acme"]),
    ] {
        peer = ticket(&peer);
        run(peer.pair("web", vec![])).unwrap();
        share(&world, "web", &[]);
        assert_eq!(shared(&world), 1);
        world.run("far", leaves).ok();
        until("nothing is shared with it", || shared(&world) == 0);
        // It returns.
        peer = ticket(&peer);
        run(peer.pair("web", vec![])).unwrap();
        let call = open_as(mount, "a.img", Access::ReadWrite);
        let (.., refusal) = run(opened(&peer, &call));
        let refusal = refusal.expect("what was shared with it before is still");
        assert!(refusal.message.contains("belongs to another"), "{refusal}");
    }
    // What it may no longer have can be taken away by its name, wherever it is.
    world
        .run("far", &["peers", "set", "web", "--domain", "acme"])
        .ok();
    share(&world, "web", &["--stop"]);
}
