//! Peers that go on with what they have begun when they may no longer.

use drover_mount::protocol::{ConnectionKind, HandOverLease, MIN_CHUNK, Open};
use drover_store::lease::{Access, MountId};

use super::*;
use crate::world::until;

/// A connection that never hangs up by itself.
struct Held {
    reader: FrameReader,
    writer: FrameWriter,
}

impl Held {
    async fn open(peer: &Client, call: &[u8]) -> Held {
        let (mut reader, mut writer) = peer.greeted().await;
        writer.send(kind::CALL, call).await.unwrap();
        writer.flush().await.unwrap();
        let frame = reader.next().await.unwrap().unwrap();
        assert_eq!(frame.kind, kind::REPLY, "{call:?}");
        Held { reader, writer }
    }

    /// Fails unless the site ends the connection, however much this end keeps it alive.
    async fn is_cut(&mut self) {
        let end = async {
            loop {
                tokio::select! {
                    frame = self.reader.next() => match frame {
                        Ok(Some(_)) => {}
                        Ok(None) | Err(NetError::Truncated { .. } | NetError::Closed { .. }) => return,
                        Err(e) => panic!("{e}"),
                    },
                    () = tokio::time::sleep(Duration::from_millis(100)) => {
                        // The site may have hung up just now.
                        let _ = self.writer.ping().await;
                    }
                }
            }
        };
        let cut = tokio::time::timeout(Duration::from_secs(15), end).await;
        assert!(cut.is_ok(), "the site serves it on");
    }
}

fn mount(number: u8, name: &str) -> Vec<u8> {
    mount_for(number, name, Access::ReadWrite)
}

fn mount_for(number: u8, name: &str, access: Access) -> Vec<u8> {
    encode_call(&Open {
        mount: MountId([number; 16]),
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

/// A site called `far` with an image of its own, and a peer called `web`.
fn site_and_peer(world: &World, rights: &str) -> (Site, Client) {
    let site = world.serve("far", &[]);
    let image = world.image("own.img", 3, 16);
    world.run("far", &["index", image.to_str().unwrap()]).ok();
    let peer = joins(world, &["--can", rights]);
    run(peer.pair("web", vec![])).unwrap();
    (site, peer)
}

/// A client with a new ticket of the site.
fn joins(world: &World, ticket: &[&str]) -> Client {
    let ticket = world.run("far", &[&["ticket"], ticket].concat()).ok().out;
    Client {
        identity: Identity::generate(),
        ticket: ticket.trim().parse().unwrap(),
    }
}

/// Waits until nobody has a write lease.
fn lease_is_broken(world: &World) {
    until("the lease is broken", || {
        let ran = world.run("far", &["mounts", "leases", "--json"]).ok();
        ran.json().iter().all(|lease| lease["writer"].is_null())
    });
}

#[test]
fn a_forgotten_peers_session_ends_with_its_data_connections() {
    let world = World::new();
    let (site, peer) = site_and_peer(&world, "send");
    run(async {
        let session = drover_net::random_id();
        let open = encode_call(&OpenSession { images: 1, session });
        let join = encode_call(&JoinSession { session });
        let mut held = vec![Held::open(&peer, &open).await];
        for _ in 0..3 {
            held.push(Held::open(&peer, &join).await);
        }
        world.run("far", &["peers", "forget", "web", "--yes"]).ok();
        for connection in &mut held {
            connection.is_cut().await;
        }
        assert_eq!(peer.refused(&open).await.code, Code::Untrusted);
    });
    assert_eq!(site.stop().0, Some(0));
}

#[test]
fn without_the_right_to_write_a_lease_is_broken_and_reading_goes_on() {
    let world = World::new();
    let (_site, peer) = site_and_peer(&world, "read,write");
    run(async {
        let _mount = Held::open(&peer, &mount(1, "own.img")).await;
        world
            .run("far", &["peers", "set", "web", "--can", "read"])
            .ok();
        lease_is_broken(&world);
        let refusal = peer.refused(&mount(2, "own.img")).await;
        assert!(refusal.message.contains("--can read,write"), "{refusal}");
        peer.ask(&ListImages).await.unwrap();
    });
}

#[test]
fn without_the_right_to_write_a_mount_that_stands_by_gets_no_lease() {
    let world = World::new();
    let (_site, heir) = site_and_peer(&world, "read,write");
    let writer = joins(&world, &["--can", "read,write"]);
    run(async {
        writer.pair("writer", vec![]).await.unwrap();
        let _mount = Held::open(&writer, &mount(1, "own.img")).await;
        let stand_by = mount_for(2, "own.img", Access::Standby);
        let mut standing = Held::open(&heir, &stand_by).await;
        let hand_over = |commit| HandOverLease {
            image: ImageName::new("own.img").unwrap(),
            mount: MountId([1; 16]),
            link: 1,
            token: [1; 16],
            to: None,
            to_mount: None,
            commit,
        };
        assert_eq!(
            writer.ask(&hand_over(false)).await.unwrap(),
            "web (hostile)"
        );
        world
            .run("far", &["peers", "set", "web", "--can", "read"])
            .ok();
        // Also before the site has told the other.
        let refusal = writer.refused(&encode_call(&hand_over(true))).await;
        assert!(
            matches!(refusal.code, Code::Denied | Code::OutOfOrder),
            "{refusal}"
        );
        standing.is_cut().await;
        let refusal = writer.refused(&encode_call(&hand_over(true))).await;
        assert_eq!(refusal.code, Code::OutOfOrder, "{refusal}");
        assert_eq!(heir.refused(&stand_by).await.code, Code::Denied);
        let leases = world.run("far", &["mounts", "leases", "--json"]).ok();
        assert_eq!(leases.json()[0]["writer"]["peer"], "writer");
    });
}

#[test]
fn what_only_an_admin_may_write_ends_with_that_right() {
    let world = World::new();
    let (_site, peer) = site_and_peer(&world, "read,write,admin");
    let owner = world.run("far", &["ticket", "--name", "near"]).ok().out;
    world
        .run("near", &["pair", owner.trim(), "--name", "far"])
        .ok();
    let image = world.image("theirs.img", 4, 16);
    world
        .run("near", &["send", image.to_str().unwrap(), "far"])
        .ok();
    run(async {
        let _mount = Held::open(&peer, &mount(1, "theirs.img")).await;
        let set = ["peers", "set", "web", "--can", "read,write"];
        world.run("far", &set).ok();
        lease_is_broken(&world);
        let refusal = peer.refused(&mount(2, "theirs.img")).await;
        assert_eq!(refusal.code, Code::Denied, "{refusal}");
        // What the site itself owns may still be written.
        Held::open(&peer, &mount(3, "own.img")).await;
    });
}

#[test]
fn a_peer_that_is_moved_to_another_domain_leaves_the_first() {
    let world = World::new();
    let (_site, peer) = site_and_peer(&world, "read,write");
    world.run("far", &["domains", "add", "acme"]).ok();
    run(async {
        let mut mounted = Held::open(&peer, &mount(1, "own.img")).await;
        world
            .run("far", &["peers", "set", "web", "--domain", "acme"])
            .ok();
        mounted.is_cut().await;
        lease_is_broken(&world);
        let refusal = peer.refused(&mount(2, "own.img")).await;
        assert_eq!(refusal.code, Code::NotFound, "{refusal}");
    });
}

#[test]
fn a_peer_that_pairs_again_keeps_no_more_than_the_new_ticket_gives() {
    let world = World::new();
    let (_site, peer) = site_and_peer(&world, "send,read,write");
    run(async {
        let mut mounted = Held::open(&peer, &mount(1, "own.img")).await;
        let session = drover_net::random_id();
        let open = encode_call(&OpenSession { images: 1, session });
        let mut session = Held::open(&peer, &open).await;
        let again = Client {
            ticket: joins(&world, &["--can", "match"]).ticket,
            ..peer
        };
        again.pair("web", vec![]).await.unwrap();
        session.is_cut().await;
        mounted.is_cut().await;
        lease_is_broken(&world);
    });
}
