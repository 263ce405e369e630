//! Peers that want more space than they were given.

use crate::world::{World, same};

#[test]
fn a_peer_delivers_no_more_than_its_quota() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    let ticket = world
        .run("far", &["ticket", "--quota", "1M", "--name", "tenant"])
        .ok()
        .out;
    world
        .run("near", &["pair", ticket.trim(), "--name", "far"])
        .ok();
    let send = |name: &str, seed, blocks| {
        let image = world.image(name, seed, blocks);
        world.run("near", &["send", image.to_str().unwrap(), "far"])
    };
    send("large.img", 1, 300).fails(3, &["large.img", "may take 1.0 MiB", "has 1.0 MiB left"]);
    send("small.img", 2, 150).ok();
    send("more.img", 3, 150).fails(3, &["more.img", "may take 1.0 MiB"]);
    // A new version of what it has takes the place of the old one.
    send("small.img", 4, 200).ok();
    same(
        &world.delivered("far", "small.img"),
        &world.path("small.img"),
    );
    // What another peer sends does not count.
    let ticket = world.run("far", &["ticket"]).ok().out;
    world
        .run("other", &["pair", ticket.trim(), "--name", "far"])
        .ok();
    let image = world.image("large.img", 5, 300);
    world
        .run("other", &["send", image.to_str().unwrap(), "far"])
        .ok();
    // Given more, it may.
    world
        .run("far", &["peers", "set", "tenant", "--quota", "2M"])
        .ok();
    send("more.img", 3, 150).ok();
}
