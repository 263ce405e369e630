//! Peers that violate the protocol, and destinations that cannot accept an image.

use std::time::Duration;

use drover_core::{Digest, ImageName};
use drover_image::Layout;
use drover_net::service::{Request, encode_call, reply_in};
use drover_net::{
    Code, ConnectOptions, FrameReader, FrameWriter, Identity, NetError, Refusal, Role, connect,
    decode, encode, greet, service,
};
use drover_teleport::protocol::{Offer, kind};
use drover_teleport::services::{JoinSession, OpenSession};

use crate::harness::*;

mod limits;

struct Raw {
    reader: FrameReader,
    writer: FrameWriter,
}

impl Raw {
    async fn dial(there: &TestSite, identity: &Identity, request: impl Request) -> Self {
        let options = ConnectOptions::named("there");
        let c = connect(&there.address, identity, &there.identity.key(), &options)
            .await
            .unwrap();
        let (mut reader, mut writer) = c.split();
        greet(&mut reader, &mut writer, Role::Client).await.unwrap();
        reader.set_idle_timeout(Some(Duration::from_secs(60)));
        let mut raw = Raw { reader, writer };
        raw.say(service::kind::CALL, &encode_call(&request)).await;
        raw
    }

    async fn session(there: &TestSite, identity: &Identity) -> (Self, [u8; 16]) {
        let session = drover_net::random_id();
        let mut raw = Raw::dial(there, identity, OpenSession { images: 1, session }).await;
        let reply = raw.reader.next().await.unwrap().unwrap();
        reply_in::<OpenSession>(&reply, "there").unwrap();
        (raw, session)
    }

    async fn say(&mut self, kind: u8, payload: &[u8]) {
        self.writer.send(kind, payload).await.unwrap();
        self.writer.flush().await.unwrap();
    }

    /// What the site says until it ends the connection.
    async fn listen(&mut self) -> Vec<(u8, Vec<u8>)> {
        let mut out = Vec::new();
        while let Ok(Some(frame)) = self.reader.next().await {
            out.push((frame.kind, frame.payload.to_vec()));
        }
        out
    }

    async fn offer(&mut self, offer: &Offer, layout: &[u8]) {
        self.say(kind::OFFER, &encode(offer)).await;
        self.say(kind::LAYOUT, layout).await;
    }
}

fn offer(name: &str, layout: &Layout) -> Offer {
    Offer {
        slot: 0,
        name: ImageName::new(name).unwrap(),
        format: "raw".into(),
        file_bytes: layout.file_len(),
        virtual_bytes: layout.file_len(),
        walk_blocks: layout.walk_blocks(),
        layout_bytes: layout.encode().len() as u64,
        stamp: Digest([1; 32]),
        dry_run: false,
    }
}

fn flat(bytes: u64) -> Layout {
    Layout::in_file_order(bytes, std::slice::from_ref(&(0..bytes)))
}

/// Whatever is sent after the handshake, the site continues and delivers nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_make_no_sense_end_the_session_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let identity = Identity::generate();
    let layout = flat(10 << 20);
    let mut rng = fastrand::Rng::with_seed(3);
    for k in [
        kind::OFFER,
        kind::LAYOUT,
        kind::BATCH,
        kind::END,
        kind::LITERAL,
        kind::NEED,
        kind::GIVE_UP,
        kind::GENERATIONS,
        kind::SKIPPED,
        kind::END_UNREAD,
        0x77,
    ] {
        for accepted in [false, true] {
            let (mut raw, _) = Raw::session(&there, &identity).await;
            if accepted {
                raw.offer(&offer("x.raw", &layout), &layout.encode()).await;
                let reply = raw.reader.next().await.unwrap().unwrap();
                assert_eq!(reply.kind, kind::ACCEPT);
            }
            let rubbish: Vec<u8> = (0..rng.usize(0..200)).map(|_| rng.u8(..)).collect();
            raw.say(k, &rubbish).await;
            raw.listen().await;
        }
    }
    assert!(!there.image("x.raw").exists());
    let a = dir.path().join("a.raw");
    write(&a, &image(1, 1, 20));
    Client::new().send(&[&a], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn literals_that_are_not_what_was_announced_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let identity = Identity::generate();
    let layout = flat(4096 * 4);
    let (mut raw, session) = Raw::session(&there, &identity).await;
    raw.offer(&offer("lie.raw", &layout), &layout.encode())
        .await;
    assert_eq!(raw.reader.next().await.unwrap().unwrap().kind, kind::ACCEPT);
    let mut data = drover_store::DataBits::new(4);
    (0..4).for_each(|i| data.set(i));
    let heads = vec![drover_core::Head::No; 4];
    let batch = drover_teleport::testing::Batch::new(0, data, heads, &[Digest([7; 32]); 4]);
    raw.say(kind::BATCH, &batch.encode()).await;
    let mut joined = Raw::dial(&there, &identity, JoinSession { session }).await;
    assert_eq!(
        joined.reader.next().await.unwrap().unwrap().kind,
        service::kind::REPLY
    );
    assert_eq!(raw.reader.next().await.unwrap().unwrap().kind, kind::NEED);
    let header = drover_teleport::testing::LiteralHeader {
        slot: 0,
        packing: drover_teleport::testing::Packing::Plain,
        runs: (0..4).collect(),
    };
    let mut frame = header.encode();
    frame.extend([1; 4096 * 4]);
    joined.say(kind::LITERAL, &frame).await;
    let heard = raw.listen().await;
    let refused = heard
        .iter()
        .find(|(k, _)| *k == kind::REFUSE)
        .expect("a refusal");
    let refusal: Refusal = decode(&refused.1).unwrap();
    assert!(
        refusal.message.contains("not what was announced"),
        "{}",
        refusal.message
    );
    assert!(!there.image("lie.raw").exists());
}

/// The first data connection and the control connection are two: a batch may overtake its offer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_may_come_before_their_offer() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let identity = Identity::generate();
    let layout = flat(4096 * 4);
    let (mut raw, session) = Raw::session(&there, &identity).await;
    let mut joined = Raw::dial(&there, &identity, JoinSession { session }).await;
    assert_eq!(
        joined.reader.next().await.unwrap().unwrap().kind,
        service::kind::REPLY
    );
    let mut data = drover_store::DataBits::new(4);
    (0..4).for_each(|i| data.set(i));
    let heads = vec![drover_core::Head::No; 4];
    let batch = drover_teleport::testing::Batch::new(0, data, heads, &[Digest([7; 32]); 4]);
    joined.say(kind::BATCH, &batch.encode()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    raw.offer(&offer("late.raw", &layout), &layout.encode())
        .await;
    assert_eq!(raw.reader.next().await.unwrap().unwrap().kind, kind::ACCEPT);
    assert_eq!(raw.reader.next().await.unwrap().unwrap().kind, kind::NEED);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_connection_of_another_peer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let (_raw, session) = Raw::session(&there, &Identity::generate()).await;
    let mut joined = Raw::dial(&there, &Identity::generate(), JoinSession { session }).await;
    let reply = joined.reader.next().await.unwrap().unwrap();
    let refused = reply_in::<JoinSession>(&reply, "there");
    assert!(
        matches!(&refused, Err(NetError::Refused(r)) if r.code == Code::Denied),
        "{refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_site_without_room_says_so_before_anything_is_sent() {
    let dir = tempfile::tempdir().unwrap();
    let there =
        TestSite::start_with(&dir.path().join("there"), Default::default(), u64::MAX / 2).await;
    let a = dir.path().join("a.raw");
    write(&a, &image(1, 1, 50));
    let client = Client::new();
    let error = client.send(&[&a], &there).await.unwrap_err();
    assert_eq!(error.refusal(), Some(Code::NoSpace), "{error}");
    assert_eq!(
        client
            .counters
            .sent_blocks
            .load(std::sync::atomic::Ordering::Relaxed),
        0
    );
}

/// The window, the order and the size of batches are the destination's to enforce.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layouts_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let identity = Identity::generate();
    let layout = flat(10 << 20);
    let good = offer("l.raw", &layout);
    let bad = [
        Offer {
            walk_blocks: 7,
            ..good.clone()
        },
        Offer {
            file_bytes: 5,
            ..good.clone()
        },
        Offer {
            format: "floppy".into(),
            ..good.clone()
        },
    ];
    for offer in bad {
        let (mut raw, _) = Raw::session(&there, &identity).await;
        raw.offer(&offer, &layout.encode()).await;
        let reply = raw.reader.next().await.unwrap().unwrap();
        assert_eq!(reply.kind, kind::REFUSE, "{offer:?}");
    }
    let (mut raw, _) = Raw::session(&there, &identity).await;
    let mut encoded = layout.encode();
    let middle = encoded.len() / 2;
    encoded[middle] ^= 1;
    raw.offer(&good, &encoded).await;
    assert_eq!(raw.reader.next().await.unwrap().unwrap().kind, kind::REFUSE);
}
