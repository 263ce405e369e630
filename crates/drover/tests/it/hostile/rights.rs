//! Peers that want more than they were given.

use drover_mount::protocol::{ConnectionKind, MIN_CHUNK, Open};
use drover_net::service::{encode_call, kind};
use drover_net::{Code, FrameReader, FrameWriter, Refusal, Right, Rights, decode};
use drover_store::SiteCatalog;
use drover_store::lease::{Access, MountId};
use drover_teleport::services::{ClaimBlocks, ListImages, LookAt, ShareImage, VerifyImage};

use super::*;
use crate::world::{same, until};

fn open(name: &str, access: Access) -> Vec<u8> {
    open_as(7, name, access)
}

/// By a mount with this number.
pub fn open_as(mount: u8, name: &str, access: Access) -> Vec<u8> {
    encode_call(&Open {
        mount: MountId([mount; 16]),
        connection: ConnectionKind::Front,
        link: 1,
        image: ImageName::new(name).unwrap(),
        access,
        chunk: MIN_CHUNK,
        expected: None,
        note: "hostile".into(),
        term: None,
    })
}

/// Opens a mount, and what answers.
pub async fn opened(peer: &Client, call: &[u8]) -> (FrameReader, FrameWriter, Option<Refusal>) {
    let (mut reader, mut writer) = peer.greeted().await;
    writer.send(kind::CALL, call).await.unwrap();
    writer.flush().await.unwrap();
    let frame = reader.next().await.unwrap().unwrap();
    let refusal = (frame.kind == kind::REFUSED).then(|| decode(&frame.payload).unwrap());
    (reader, writer, refusal)
}

/// A site with an image that `near` sent, and another peer called `web`.
pub fn two_peers(world: &World) -> (Site, Client) {
    let site = world.pair();
    let image = world.image("a.img", 1, 64);
    world
        .run("near", &["send", image.to_str().unwrap(), "far"])
        .ok();
    let ticket = world.run("far", &["ticket"]).ok().out;
    let peer = Client {
        identity: Identity::generate(),
        ticket: ticket.trim().parse().unwrap(),
    };
    run(peer.pair("web", vec![])).unwrap();
    (site, peer)
}

/// Gives the peer `web` other rights, as another process.
pub fn give(world: &World, rights: Rights) {
    let (catalog, _) = SiteCatalog::open(&world.path("far")).unwrap();
    let changed = catalog.change_grant("web", |grant| grant.rights = rights);
    changed.unwrap().unwrap();
}

#[test]
fn what_a_peer_sent_is_not_replaced_or_written_by_another() {
    let world = World::new();
    let (_site, peer) = two_peers(&world);
    let ticket = world.run("far", &["ticket"]).ok().out;
    world
        .run("third", &["pair", ticket.trim(), "--name", "far"])
        .ok();
    let other = world.image("b.img", 2, 64);
    let other = other.to_str().unwrap();
    world
        .run("third", &["send", other, "far", "--as", "a.img"])
        .fails(3, &["a.img", "belongs to another peer"]);
    same(&world.delivered("far", "a.img"), &world.path("a.img"));
    run(async {
        let (.., refusal) = opened(&peer, &open("a.img", Access::ReadWrite)).await;
        let refusal = refusal.expect("another's image was opened for writing");
        assert_eq!(refusal.code, Code::Denied);
        assert!(
            refusal.message.contains("belongs to another peer"),
            "{refusal}"
        );
        let (.., refusal) = opened(&peer, &open("a.img", Access::ReadOnly)).await;
        assert_eq!(refusal, None, "the right to read is for every image");
    });
    // Whoever may change everything may.
    give(
        &world,
        Rights::of(&[Right::Read, Right::Write, Right::Admin]),
    );
    let (.., refusal) = run(opened(&peer, &open("a.img", Access::ReadWrite)));
    assert_eq!(refusal, None);
    world.run("far", &["verify", "a.img"]).ok();
}

#[test]
fn an_owner_shares_its_image_and_no_one_else_does() {
    let world = World::new();
    let (_site, peer) = two_peers(&world);
    let share = |home: &str, image: &str, more: &[&str]| {
        world.run(home, &[&["share", image, "--with", "web"], more].concat())
    };
    // A mount that has lost its lease is told so ever after.
    let writes = |mount| run(opened(&peer, &open_as(mount, "a.img", Access::ReadWrite)));
    assert!(writes(1).2.is_some(), "it is not shared yet");
    // The other cannot share it with itself.
    let name = ImageName::new("a.img").unwrap();
    let request = ShareImage {
        name,
        with: "web".into(),
        share: true,
    };
    let refusal = run(peer.refused(&encode_call(&request)));
    assert_eq!(refusal.code, Code::Denied, "{refusal}");
    share("near", "far:a.img", &[]).ok();
    let mut mount = writes(2);
    assert_eq!(mount.2, None);
    share("near", "far:a.img", &["--stop"]).ok();
    run(async { while let Ok(Some(_)) = mount.0.next().await {} });
    assert!(writes(3).2.is_some(), "it is no longer shared");
    share("far", "a.img", &[]).ok();
    assert_eq!(writes(4).2, None, "the site's user may share it, too");
    share("near", "far:b.img", &[]).fails(3, &["b.img"]);
    let missing = world.run("far", &["share", "a.img", "--with", "nobody"]);
    missing.fails(3, &["nobody"]);
}

#[test]
fn a_refusal_names_the_right_and_how_it_is_given() {
    let world = World::new();
    let (_site, peer) = two_peers(&world);
    give(&world, Rights::of(&[Right::Match]));
    let name = ImageName::new("a.img").unwrap();
    let session = [0; 16];
    let calls = [
        (encode_call(&ListImages), "--can read,match"),
        (encode_call(&VerifyImage { name }), "--can read,match"),
        (
            encode_call(&OpenSession { images: 1, session }),
            "--can send,match",
        ),
        (encode_call(&JoinSession { session }), "--can send,match"),
        (open("a.img", Access::ReadOnly), "--can read,match"),
    ];
    run(async {
        for (call, how) in calls {
            let refusal = peer.refused(&call).await;
            assert_eq!(refusal.code, Code::Denied, "{refusal}");
            assert!(refusal.message.contains(how), "{refusal}");
        }
    });
    give(&world, Rights::of(&[Right::Read]));
    let (.., refusal) = run(opened(&peer, &open("a.img", Access::ReadWrite)));
    let refusal = refusal.unwrap();
    assert!(refusal.message.contains("--can read,write"), "{refusal}");
}

#[test]
fn a_peer_with_the_right_of_nodes_is_no_node() {
    let world = World::new();
    let (_site, peer) = two_peers(&world);
    give(&world, Rights::of(&[Right::Node]));
    let calls = [
        encode_call(&ClaimBlocks::new([1; 16], 1, "web", &[])),
        encode_call(&LookAt { runs: Vec::new() }),
    ];
    for call in calls {
        let refusal = run(peer.refused(&call));
        assert_eq!(refusal.code, Code::Denied, "{refusal}");
        assert!(
            refusal.message.contains("only nodes of this site"),
            "{refusal}"
        );
    }
}

#[test]
fn a_right_that_is_taken_away_ends_what_lives_by_it() {
    let world = World::new();
    let (site, peer) = two_peers(&world);
    let mine = world.image("mine.img", 3, 16);
    world.run("far", &["index", mine.to_str().unwrap()]).ok();
    run(async {
        let (mut reader, _writer, refusal) =
            opened(&peer, &open("mine.img", Access::ReadWrite)).await;
        assert_eq!(refusal, None);
        let leases = || {
            world
                .run("far", &["mounts", "leases", "--json"])
                .ok()
                .json()
        };
        assert_eq!(leases()[0]["writer"]["peer"], "web");
        world.run("far", &["peers", "forget", "web", "--yes"]).ok();
        // Until the connection ends: with a refusal, or without. Not because this end has waited for too long.
        let end = async { while let Ok(Some(_)) = reader.next().await {} };
        let ended = tokio::time::timeout(Duration::from_secs(10), end).await;
        assert!(ended.is_ok(), "the site serves it on");
        until("the lease is broken", || {
            let leases = leases();
            leases.iter().all(|lease| lease["writer"].is_null())
        });
        let refusal = peer.refused(&open("mine.img", Access::ReadWrite)).await;
        assert_eq!(refusal.code, Code::Untrusted);
    });
    assert_eq!(site.stop().0, Some(0));
}
