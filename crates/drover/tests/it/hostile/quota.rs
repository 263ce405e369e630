//! Peers that want more space than they were given.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use drover_core::Digest;
use drover_image::Layout;
use drover_mount::protocol::{
    self, Coding, MAX_MOUNT_FRAME, Reply, decode_message, encode_message,
};
use drover_net::{Frame, encode};
use drover_store::lease::Access;
use drover_teleport::protocol::{GiveUp, Offer, kind as of_transfers};
use rustix::fs::statvfs;

use super::rights::{open_as, opened};
use super::*;
use crate::full::{Small, large};
use crate::mount::text;
use crate::world::same;

const BLOCK: u64 = 4096;

/// A mount for writing that makes any request.
struct Mount {
    reader: FrameReader,
    writer: FrameWriter,
}

impl Mount {
    async fn open(peer: &Client, image: &str) -> Mount {
        let call = open_as(fastrand::u8(..), image, Access::ReadWrite);
        let (mut reader, mut writer, refusal) = opened(peer, &call).await;
        assert_eq!(refusal, None);
        reader.set_max_frame(MAX_MOUNT_FRAME);
        writer.set_max_frame(MAX_MOUNT_FRAME);
        Mount { reader, writer }
    }

    async fn ask(&mut self, request: &protocol::Request) -> Result<(), Refusal> {
        use protocol::Request::{DirectWrite, Write};
        let body = match request {
            DirectWrite { length, .. } | Write { length, .. } => vec![7; *length as usize],
            _ => Vec::new(),
        };
        let head = encode_message(request);
        let sent = [&head[..], &body];
        self.writer
            .send_vectored(protocol::kind::REQUEST, &sent)
            .await
            .unwrap();
        self.writer.flush().await.unwrap();
        loop {
            let frame = self.reader.next().await.unwrap().expect("a reply");
            match decode_message::<Reply>(&frame.payload).unwrap().head {
                Reply::Arrived { .. } => {}
                Reply::Error { refusal, .. } => return Err(refusal),
                _ => return Ok(()),
            }
        }
    }

    /// Makes such requests until one is refused because there is no space; returns how many were not.
    async fn ask_all(&mut self, request: impl Fn(u64) -> protocol::Request) -> u64 {
        for n in 0..20_000 {
            if let Err(refusal) = self.ask(&request(n)).await {
                assert_eq!(refusal.code, Code::NoSpace, "{refusal}");
                return n;
            }
        }
        panic!("20,000 requests were not refused");
    }
}

fn write(offset: u64, length: u32) -> protocol::Request {
    protocol::Request::DirectWrite {
        id: 1,
        offset,
        length,
        coding: Coding::Plain,
    }
}

fn stage(offset: u64, length: u32) -> protocol::Request {
    protocol::Request::Write {
        id: 1,
        epoch: 1,
        offset,
        length,
        coding: Coding::Plain,
    }
}

fn zero(offset: u64, length: u64, keep_allocated: bool) -> protocol::Request {
    protocol::Request::DirectZero {
        id: 1,
        offset,
        length,
        keep_allocated,
        only_fast: false,
    }
}

/// A peer of the site `far` with such a ticket.
fn tenant(world: &World, name: &str, with: &[&str]) -> Client {
    let ticket = world.run("far", &[&["ticket"], with].concat()).ok().out;
    let peer = Client {
        identity: Identity::generate(),
        ticket: ticket.trim().parse().unwrap(),
    };
    run(peer.pair(name, vec![])).unwrap();
    peer
}

/// Disk space of the files in a directory.
fn used(directory: &Path) -> u64 {
    let files = fs::read_dir(directory).unwrap();
    let blocks = files.map(|file| file.unwrap().metadata().unwrap().blocks());
    blocks.sum::<u64>() * 512
}

#[test]
fn a_mount_that_never_flushes_or_commits_takes_no_more_than_its_quota() {
    const QUOTA: u64 = 1 << 20;
    type Way = fn(u64) -> protocol::Request;
    let world = World::new();
    let _site = world.serve("far", &[]);
    let ways: [(&str, Way); 4] = [
        ("a.img", |n| write(n * BLOCK, BLOCK as u32)),
        // Each byte takes a block.
        ("b.img", |n| write(n * BLOCK + 1, 1)),
        ("c.img", |n| zero(n * BLOCK + 1, 1, false)),
        ("d.img", |n| stage(n * BLOCK, BLOCK as u32)),
    ];
    for (image, way) in ways {
        let path = large(&world, image);
        world.run("far", &["index", text(&path)]).ok();
        let name = image.trim_end_matches(".img");
        let peer = tenant(&world, name, &["--quota", "1M"]);
        run(async {
            let mut mount = Mount::open(&peer, image).await;
            let done = mount.ask_all(way).await;
            assert!((200..=QUOTA / BLOCK).contains(&done), "{image}: {done}");
            // Nor after what it has taken was counted again.
            tokio::time::sleep(Duration::from_millis(1500)).await;
            let more = mount.ask_all(|n| way(done + n)).await;
            assert!(more <= 8, "{image}: {more}");
        });
        let took = used(&world.path("far/mounted/overlays").join(image));
        assert!(took <= QUOTA + (16 << 10), "{image}: {took}");
        let listed = world.run("far", &["peers", "--json"]).ok().json();
        assert!(listed.iter().any(|peer| peer["name"] == name));
    }
}

/// Offers an image of so many blocks; returns its session, and what the site answers.
async fn offered(peer: &Client, name: &str, blocks: u64) -> (FrameReader, FrameWriter, Frame) {
    let session = drover_net::random_id();
    let call = encode_call(&OpenSession { images: 1, session });
    let (mut reader, mut writer, refusal) = opened(peer, &call).await;
    assert_eq!(refusal, None);
    let bytes = blocks * BLOCK;
    let layout = Layout::in_file_order(bytes, std::slice::from_ref(&(0..bytes)));
    let encoded = layout.encode();
    let offer = Offer {
        slot: 0,
        name: ImageName::new(name).unwrap(),
        format: "raw".into(),
        file_bytes: bytes,
        virtual_bytes: bytes,
        walk_blocks: layout.walk_blocks(),
        layout_bytes: encoded.len() as u64,
        stamp: Digest([1; 32]),
        dry_run: false,
    };
    writer
        .send(of_transfers::OFFER, &encode(&offer))
        .await
        .unwrap();
    writer.send(of_transfers::LAYOUT, &encoded).await.unwrap();
    writer.flush().await.unwrap();
    let frame = reader.next().await.unwrap().expect("an answer");
    (reader, writer, frame)
}

/// Stops sending an image, and ends its session.
async fn give_up(mut reader: FrameReader, mut writer: FrameWriter) {
    let give_up = GiveUp {
        message: "later".into(),
        discard: false,
    };
    let give_up = encode(&give_up);
    writer.send(of_transfers::GIVE_UP, &give_up).await.unwrap();
    writer.send(of_transfers::GOODBYE, &[]).await.unwrap();
    writer.flush().await.unwrap();
    while let Ok(Some(_)) = reader.next().await {}
}

#[track_caller]
fn has_no_space(frame: &Frame) {
    assert_eq!(frame.kind, of_transfers::REFUSE);
    let refusal: Refusal = decode(&frame.payload).unwrap();
    assert_eq!(refusal.code, Code::NoSpace, "{refusal}");
}

#[test]
fn transfers_that_were_only_begun_count_as_what_they_were_promised() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    let peer = tenant(&world, "tenant", &["--quota", "1M"]);
    run(async {
        // Nothing of it is sent.
        let (reader, writer, frame) = offered(&peer, "a.img", 200).await;
        assert_eq!(frame.kind, of_transfers::ACCEPT);
        has_no_space(&offered(&peer, "b.img", 200).await.2);
        give_up(reader, writer).await;
        has_no_space(&offered(&peer, "b.img", 200).await.2);
        let (.., frame) = offered(&peer, "c.img", 50).await;
        assert_eq!(frame.kind, of_transfers::ACCEPT);
        // A smaller quota is for what was begun before, too.
        world
            .run("far", &["peers", "set", "tenant", "--quota", "900K"])
            .ok();
        has_no_space(&offered(&peer, "a.img", 200).await.2);
        // It may be removed, by its sender.
        let mut listed = Vec::new();
        let more = |some| listed.extend(some);
        let call = service::call(peer.connect().await, &ListTransfers, more);
        call.await.unwrap();
        let a = listed.into_iter().find(|t| t.name == "a.img").unwrap();
        let key = a.key;
        peer.ask(&RemoveTransfer { key }).await.unwrap();
        let (.., frame) = offered(&peer, "b.img", 150).await;
        assert_eq!(frame.kind, of_transfers::ACCEPT);
    });
}

/// What one was promised is not free for another.
#[test]
fn transfers_under_way_are_not_promised_the_same_space() {
    let Some(small) = Small::new("transfers_under_way_are_not_promised_the_same_space") else {
        return;
    };
    small.run(&["init"]).ok();
    fs::write(small.home.join("config.toml"), "reserve = \"32MiB\"\n").unwrap();
    let _site = small.world.serve("far", &[]);
    let peers = ["one", "two"].map(|name| tenant(&small.world, name, &[]));
    let blocks = (30 << 20) / BLOCK;
    run(async {
        let (reader, writer, frame) = offered(&peers[0], "a.img", blocks).await;
        assert_eq!(frame.kind, of_transfers::ACCEPT);
        has_no_space(&offered(&peers[1], "b.img", blocks).await.2);
        let (.., frame) = offered(&peers[1], "c.img", blocks / 10).await;
        assert_eq!(frame.kind, of_transfers::ACCEPT);
        // It has stopped: when it is resumed, the space is asked for again.
        give_up(reader, writer).await;
        let (_other, _writer, frame) = offered(&peers[1], "b.img", blocks).await;
        assert_eq!(frame.kind, of_transfers::ACCEPT);
        has_no_space(&offered(&peers[0], "a.img", blocks).await.2);
    });
}

#[test]
fn a_mount_leaves_free_what_the_site_keeps_free() {
    const KEPT: u64 = 32 << 20;
    const PIECE: u32 = 256 << 10;
    let Some(small) = Small::new("a_mount_leaves_free_what_the_site_keeps_free") else {
        return;
    };
    small.run(&["init"]).ok();
    fs::write(small.home.join("config.toml"), "reserve = \"32MiB\"\n").unwrap();
    for image in ["a.img", "b.img"] {
        let path = large(&small.world, image);
        small.run(&["index", text(&path)]).ok();
    }
    let _site = small.world.serve("far", &[]);
    let peer = tenant(&small.world, "tenant", &[]);
    let free = || {
        let fs = statvfs(&small.home).unwrap();
        fs.f_bavail * fs.f_frsize
    };
    // The site has a log, too.
    let is_kept = |what: &str| assert!(free() >= KEPT - (64 << 10), "{what}: {}", free());
    let at = |n| n * u64::from(PIECE);
    run(async {
        // More than half of what is to spare: there is no space for the copy.
        let mut mount = Mount::open(&peer, "a.img").await;
        let pieces = (free() - KEPT) / 5 * 3 / u64::from(PIECE);
        for n in 0..pieces {
            mount.ask(&stage(at(n), PIECE)).await.unwrap();
        }
        let commit = protocol::Request::Commit {
            id: 1,
            epoch: 1,
            covers: at(pieces),
        };
        let refusal = mount.ask(&commit).await.unwrap_err();
        assert_eq!(refusal.code, Code::NoSpace, "{refusal}");
        is_kept("commit");
        mount.ask_all(|n| stage(at(pieces + n), PIECE)).await;
        is_kept("stage");
        // What it staged goes.
        mount
            .ask(&protocol::Request::Close { id: 1 })
            .await
            .unwrap();

        let mut mount = Mount::open(&peer, "b.img").await;
        let written = mount.ask_all(|n| write(at(n), PIECE)).await;
        mount
            .ask_all(|n| zero(at(written) + n * BLOCK + 1, 1, false))
            .await;
        is_kept("zeroes");
        for request in [
            write(at(written) + PIECE as u64, BLOCK as u32),
            zero(at(written), 8 << 20, true),
        ] {
            let refusal = mount.ask(&request).await.unwrap_err();
            assert_eq!(refusal.code, Code::NoSpace, "{refusal}");
        }
        // What is there can be written, and given back.
        mount.ask(&write(0, PIECE)).await.unwrap();
        let flush = protocol::Request::DirectFlush { id: 1 };
        mount.ask(&flush).await.unwrap();
        is_kept("flush");
        let before = free();
        let trim = protocol::Request::DirectTrim {
            id: 1,
            offset: 0,
            length: 8 << 20,
        };
        mount.ask(&trim).await.unwrap();
        assert!(free() > before + (4 << 20));
        mount
            .ask(&write(at(written) + PIECE as u64, BLOCK as u32))
            .await
            .unwrap();
    });
}

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
