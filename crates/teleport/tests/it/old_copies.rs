//! Disks that were at the site before, and come back with their generations.
#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Digest, ReadAt};
use drover_image::{Format, Layout, Outgoing};
use drover_net::service::{Request, encode_call, reply_in};
use drover_net::{ConnectOptions, FrameReader, FrameWriter, Role, connect, encode, greet, service};
use drover_storage::FakeDirectory;
use drover_store::DataBits;
use drover_store::generations::{Contents, Generations, Summary};
use drover_teleport::protocol::{Offer, kind};
use drover_teleport::services::{JoinSession, OpenSession};
use drover_teleport::testing::{Batch, Have};
use drover_teleport::{LaunchDevice, OldCopy, Snapshot, digest_of};
use proptest::prelude::*;

use crate::harness::*;

/// Ten batches and a piece.
const SIZE: usize = (80 << 20) + 12345;

fn summary() -> Summary {
    let directory = Arc::new(FakeDirectory::default());
    let contents = Contents::new(b"disk", 1, 0);
    let map = Generations::open(directory, SIZE as u64, contents).unwrap();
    map.summary().unwrap()
}

fn state(bytes: Vec<u8>, data: &[Range<u64>], generations: Option<&Summary>) -> Snapshot {
    let size = bytes.len() as u64;
    Snapshot {
        image: Arc::new(Outgoing {
            content: Arc::new(bytes),
            layout: Layout::in_file_order(size, data),
            format: Format::Raw,
            virtual_size: size,
            notes: Vec::new(),
            stamps: Vec::new(),
        }),
        stamp: Digest(blake3::hash(&drover_net::random_id()).into()),
        generations: generations.map(|of| of.encode().into()),
    }
}

fn random(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    // Zeros in the middle of a batch.
    bytes[(20 << 20) + 4096..22 << 20].fill(0);
    bytes
}

fn item(state: Snapshot) -> drover_teleport::SendItem {
    let mut item = items(&[&PathBuf::from("web-0.raw")]).remove(0);
    item.snapshot = Some(state);
    item
}

fn copy_of(there: &TestSite, old: Vec<u8>, differs: Vec<Range<u64>>, seed: Summary) {
    let old = Arc::new(old);
    there.site.reuse_old_copies(Arc::new(move |_, of| {
        let content: Arc<dyn ReadAt> = old.clone();
        let differs = differs.clone();
        (of.seed == seed.seed).then_some(OldCopy { content, differs })
    }));
}

async fn start() -> (tempfile::TempDir, TestSite) {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    (dir, there)
}

async fn send(
    client: &Client,
    there: &TestSite,
    state: Snapshot,
) -> drover_teleport::progress::ImageReport {
    let options = client.options(there, &there.address);
    let mut reports = client.send_with(vec![item(state)], options).await.unwrap();
    reports.remove(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_may_differ_is_read() {
    let (_dir, there) = start().await;
    let client = Client::new();
    let (old, seed) = (random(1), summary());
    let mut new = old.clone();
    new[(33 << 20) + 5..(33 << 20) + 9000].fill(3);
    // A hole now, of what the copy has data: it is not in the walk at all.
    new[50 << 20..52 << 20].fill(0);
    let differs = vec![33 << 20..34 << 20, 50 << 20..52 << 20];
    copy_of(&there, old, differs, seed.clone());
    let data = [0..50 << 20, 52 << 20..SIZE as u64];
    let sent = state(new.clone(), &data, Some(&seed));
    let report = send(&client, &there, sent.clone()).await;
    assert!(std::fs::read(there.image("web-0.raw")).unwrap() == new);
    // Of the two batches that have what differs, only that is sent, apart from digests.
    assert_eq!(
        report.unread_blocks,
        report.matched_blocks + report.zero_blocks + report.sent_blocks - 2048
    );
    assert!(
        report.sent_blocks == 3 && report.wire_sent_bytes < 100 << 10,
        "{report:?}"
    );
    assert_eq!(
        report.matched.in_place, report.matched_blocks,
        "all else is at the same place there"
    );
    assert_eq!(
        digest_of(&sent.image, &|| false).unwrap(),
        Some(report.digest)
    );
    // It is an image like any other.
    let record = there.site.list().remove(0);
    let name = drover_core::ImageName::new("web-0.raw").unwrap();
    assert_eq!(
        there.site.verify(&name, &mut |_, _| {}).unwrap(),
        (record.digest, report.digest)
    );
    // Of another line, or without one, all is read.
    for generations in [Some(summary()), None] {
        let sent = state(new.clone(), &data, generations.as_ref());
        assert_eq!(send(&client, &there, sent).await.unread_blocks, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_not_what_it_should_be_is_noticed() {
    let (_dir, there) = start().await;
    let client = Client::new();
    let (mut old, seed) = (random(2), summary());
    let new = old.clone();
    old[70 << 20] ^= 1;
    copy_of(&there, old, vec![], seed.clone());
    let sent = state(new.clone(), &[0..SIZE as u64], Some(&seed));
    let report = send(&client, &there, sent.clone()).await;
    let digest = digest_of(&sent.image, &|| false).unwrap();
    assert_ne!(digest, Some(report.digest));
    assert_eq!(
        there.site.list()[0].digest,
        report.digest,
        "the site is told what it has"
    );
    // Digests mend it.
    let report = send(&client, &there, state(new.clone(), &[0..SIZE as u64], None)).await;
    assert_eq!((digest, report.sent_blocks), (Some(report.digest), 1));
    assert!(std::fs::read(there.image("web-0.raw")).unwrap() == new);
    // One of another size is of no use.
    copy_of(&there, new[1..].to_vec(), vec![], seed.clone());
    let sent = state(new, &[0..SIZE as u64], Some(&seed));
    assert_eq!(send(&client, &there, sent).await.unread_blocks, 0);
}

#[test]
fn whatever_differs_the_image_is_that_of_the_source() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (_dir, there) = runtime.block_on(start());
    let client = Client::new();
    let ranges = proptest::collection::vec((0..80u64, 1..3u64, any::<bool>()), 0..6);
    let config = ProptestConfig {
        cases: 12,
        ..ProptestConfig::default()
    };
    let (old, seed) = (random(3), summary());
    proptest!(config, |(ranges in ranges, hole in 0..70u64)| {
        let mut new = old.clone();
        let mut chunks = std::collections::BTreeSet::new();
        for (first, count, zero) in ranges {
            for chunk in first..(first + count).min(80) {
                let start = (chunk << 20) as usize;
                match zero {
                    true => new[start..start + 70_000].fill(0),
                    false => fastrand::Rng::with_seed(chunk).fill(&mut new[start + 9..start + 70_000]),
                }
                chunks.insert(chunk);
            }
        }
        // What is a hole may differ from the copy, too.
        new[(hole << 20) as usize..((hole + 1) << 20) as usize].fill(0);
        chunks.insert(hole);
        let differs = chunks.iter().map(|chunk| chunk << 20..(chunk + 1) << 20).collect();
        copy_of(&there, old.clone(), differs, seed.clone());
        let data = [0..hole << 20, (hole + 1) << 20..SIZE as u64];
        let sent = state(new.clone(), &data, Some(&seed));
        runtime.block_on(send(&client, &there, sent));
        prop_assert!(std::fs::read(there.image("web-0.raw")).unwrap() == new);
    });
}

struct Raw {
    reader: FrameReader,
    writer: FrameWriter,
}

impl Raw {
    async fn dial(there: &TestSite, client: &Client, request: impl Request) -> Raw {
        let options = ConnectOptions::named("there");
        let key = there.identity.key();
        let connection = connect(&there.address, &client.identity, &key, &options);
        let (mut reader, mut writer) = connection.await.unwrap().split();
        greet(&mut reader, &mut writer, Role::Client).await.unwrap();
        let mut raw = Raw { reader, writer };
        raw.say(service::kind::CALL, &encode_call(&request)).await;
        raw
    }

    /// A session, and its first data connection.
    async fn session(there: &TestSite) -> (Raw, Raw) {
        let (client, session) = (Client::new(), drover_net::random_id());
        let mut control = Raw::dial(there, &client, OpenSession { images: 1, session }).await;
        reply_in::<OpenSession>(&control.hear().await.unwrap(), "there").unwrap();
        let mut data = Raw::dial(there, &client, JoinSession { session }).await;
        assert_eq!(data.hear().await.unwrap().kind, service::kind::REPLY);
        (control, data)
    }

    async fn say(&mut self, kind: u8, payload: &[u8]) {
        self.writer.send(kind, payload).await.unwrap();
        self.writer.flush().await.unwrap();
    }

    async fn hear(&mut self) -> Option<drover_net::Frame> {
        self.reader.next().await.ok()?
    }

    async fn offer(&mut self, generations: Option<&[u8]>) {
        let layout = Layout::in_file_order(SIZE as u64, std::slice::from_ref(&(0..SIZE as u64)));
        if let Some(generations) = generations {
            self.say(kind::GENERATIONS, generations).await;
        }
        let offer = Offer {
            slot: 0,
            name: drover_core::ImageName::new("web-0.raw").unwrap(),
            format: "raw".into(),
            file_bytes: SIZE as u64,
            virtual_bytes: SIZE as u64,
            walk_blocks: layout.walk_blocks(),
            layout_bytes: layout.encode().len() as u64,
            stamp: Digest([1; 32]),
            dry_run: false,
        };
        self.say(kind::OFFER, &encode(&offer)).await;
        self.say(kind::LAYOUT, &layout.encode()).await;
    }

    /// The refusal with which the session ends.
    async fn refused(&mut self) -> String {
        while let Some(frame) = self.hear().await {
            if frame.kind == kind::REFUSE {
                let refusal: drover_net::Refusal = drover_net::decode(&frame.payload).unwrap();
                return refusal.message;
            }
        }
        panic!("it is not refused");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_does_not_wait_for_the_source_where_an_old_copy_has_it() {
    let (_dir, there) = start().await;
    let (old, seed) = (random(5), summary());
    copy_of(&there, old.clone(), vec![0..1], seed.clone());
    let (mut control, _data) = Raw::session(&there).await;
    control.offer(Some(&seed.encode())).await;
    while control.hear().await.unwrap().kind != kind::ACCEPT {}
    // The source says nothing more.
    let site = there.site.clone();
    let read = tokio::task::spawn_blocking(move || {
        let name = drover_core::ImageName::new("web-0.raw").unwrap();
        let launch = loop {
            match site.launch(&name).unwrap() {
                Some(launch) => break launch,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let device = LaunchDevice::open(&launch).unwrap();
        let mut read = vec![1; 40_000];
        // The last first, with zeros between.
        for at in [SIZE - 40_000, (22 << 20) - 20_000, 9 << 20] {
            let begun = Instant::now();
            while !device.is_here(at as u64, 40_000) {
                assert!(begun.elapsed() < Duration::from_secs(60), "{at} waits");
                std::thread::sleep(Duration::from_millis(5));
            }
            device.read(at as u64, &mut read).unwrap();
            assert!(read == old[at..at + 40_000], "{at}");
        }
        assert!(!device.is_here(0, 4096), "that differs");
    });
    read.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_skips_only_what_the_destination_has() {
    let (_dir, there) = start().await;
    let (old, seed) = (random(4), summary());
    copy_of(&there, old, vec![0..1], seed.clone());
    let good = seed.encode();
    let number = |n: u64| n.to_le_bytes().to_vec();
    type Case<'a> = (Option<&'a [u8]>, u8, Vec<u8>, &'a str);
    let cases: [Case<'_>; 7] = [
        (None, kind::SKIPPED, number(0), "skipped batch 0"),
        (None, kind::END_UNREAD, vec![], "nothing was known"),
        (Some(&good), kind::SKIPPED, number(0), "skipped batch 0"),
        (Some(&good), kind::SKIPPED, number(1), "not the next"),
        (
            Some(&good),
            kind::SKIPPED,
            number(u64::MAX),
            "skipped batch",
        ),
        (Some(&good), kind::SKIPPED, vec![1], "malformed number"),
        (Some(&good), kind::END_UNREAD, vec![], "ended after batch"),
    ];
    for (generations, kind, payload, why) in cases {
        let (mut control, mut data) = Raw::session(&there).await;
        control.offer(generations).await;
        if generations.is_some() {
            let have = control.hear().await.unwrap();
            assert_eq!(have.kind, drover_teleport::protocol::kind::HAVE);
            let have = Have::decode(&have.payload).unwrap();
            assert_eq!(have.batches.iter().collect::<Vec<_>>(), [(1, 10)]);
        }
        assert_eq!(
            control.hear().await.unwrap().kind,
            drover_teleport::protocol::kind::ACCEPT
        );
        data.say(kind, &payload).await;
        let refused = control.refused().await;
        assert!(refused.contains(why), "{refused}");
    }
    // What it was told of, sent all the same: the destination may be writing there.
    copy_of(&there, random(4), vec![], seed.clone());
    let (mut control, mut data) = Raw::session(&there).await;
    control.offer(Some(&good)).await;
    let zeros = Batch::new(0, DataBits::new(2048), vec![], &[]);
    data.say(kind::BATCH, &zeros.encode()).await;
    let refused = control.refused().await;
    assert!(
        refused.contains("batch 0 was sent, which is here"),
        "{refused}"
    );
    // Rubbish, and generations twice.
    let (mut control, _data) = Raw::session(&there).await;
    control.offer(Some(&good[1..])).await;
    let refused = control.refused().await;
    assert!(refused.contains("generations"), "{refused}");
    let (mut control, _data) = Raw::session(&there).await;
    control.say(kind::GENERATIONS, &good).await;
    control.offer(Some(&good)).await;
    while control.hear().await.is_some() {}
    assert!(!there.image("web-0.raw").exists());
}
