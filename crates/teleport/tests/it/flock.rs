//! Flocks: every block crosses once, it is known where each came from, and an atomic one comes as a whole or not at all.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::ImageName;
use drover_teleport::progress::ImageReport;
use drover_teleport::{
    FlockOrder, FlockSent, FlockState, ImageState, SendLane, TeleportError, send_flock,
};

use crate::harness::*;

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn order(paths: &[&Path], atomic: bool) -> FlockOrder {
    FlockOrder {
        name: name("shop"),
        atomic,
        items: items(paths),
        unchanged: Vec::new(),
        failed: Vec::new(),
    }
}

async fn send_order(
    client: &Client,
    order: FlockOrder,
    lanes: usize,
    there: &TestSite,
) -> Result<FlockSent, TeleportError> {
    let events = client.events.clone();
    let lane = SendLane {
        on_event: Arc::new(move |e| events.lock().unwrap().push(e)),
        counters: Arc::default(),
    };
    let lanes = (0..lanes)
        .map(|_| SendLane {
            counters: Arc::default(),
            ..lane.clone()
        })
        .collect();
    let options = client.options(there, &there.address);
    let stop = client.stop.subscribe();
    send_flock(order, options, lanes, Arc::default(), stop).await
}

/// Blocks of random data: block `n` of pool `pool`, for each n.
fn blocks(pool: u64, which: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let mut out = Vec::new();
    for n in which {
        let mut block = [0; 4096];
        fastrand::Rng::with_seed(pool << 32 | n).fill(&mut block);
        // A head now and then, as where a file starts.
        if n % 16 == 0 {
            block[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
        }
        out.extend(block);
    }
    out
}

/// A flock of three images: each has data of its own, repeats of that, what two of them have, what all have, and what the image
/// `old` at the site has.
fn flock(dir: &Path) -> (PathBuf, [PathBuf; 3]) {
    let old = dir.join("old.raw");
    write(&old, &blocks(9, 0..1500));
    let images = [1, 2, 3].map(|n| {
        let path = dir.join(format!("image-{n}.raw"));
        let parts = [
            blocks(n, 0..900),
            blocks(7, 0..1200),
            vec![0; 1 << 20],
            blocks(n, 320..720),
            blocks(8, (n * 400)..(n * 400 + 800)),
            blocks(9, (n * 160)..(n * 160 + 640)),
            blocks(7, 0..320),
        ];
        write(&path, &parts.concat());
        path
    });
    (old, images)
}

/// The distinct blocks that are not zeros.
fn distinct(paths: &[&Path]) -> HashSet<Vec<u8>> {
    let mut all = HashSet::new();
    for path in paths {
        let bytes = std::fs::read(path).unwrap();
        all.extend(bytes.chunks(4096).map(<[u8]>::to_vec));
    }
    all.remove(&vec![0; 4096]);
    all
}

fn sum(reports: &[ImageReport], of: impl Fn(&ImageReport) -> u64) -> u64 {
    reports.iter().map(of).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_block_crosses_once_also_when_images_travel_at_once() {
    for lanes in [1, 3] {
        let dir = tempfile::tempdir().unwrap();
        let there = TestSite::start(&dir.path().join("there")).await;
        let (old, images) = flock(dir.path());
        let paths: Vec<&Path> = images.iter().map(PathBuf::as_path).collect();
        let client = Client::new();
        client.send(&[&old], &there).await.unwrap();
        let sent = send_order(&client, order(&paths, false), lanes, &there)
            .await
            .unwrap();
        for path in &paths {
            same(
                path,
                &there.image(path.file_name().unwrap().to_str().unwrap()),
            );
        }
        let known = distinct(&[&old]);
        let needed = distinct(&paths).difference(&known).count() as u64;
        let crossed = sum(&sent.reports, |r| r.sent_blocks);
        assert!(
            crossed <= needed + needed / 50,
            "{lanes} at once: {crossed} blocks crossed, {needed} differ: {:?}",
            sent.reports
        );
        // Where they came from: 400 and 320 repeats in each, 640 of the site.
        assert_eq!(sent.info.record.state, FlockState::Delivered);
        let origins = |of: fn(&drover_teleport::protocol::Origins) -> u64| {
            sum(&sent.reports, |r| of(r.origins.as_ref().unwrap()))
        };
        let (own, flock, site) = (
            origins(|o| o.own),
            origins(|o| o.flock),
            origins(|o| o.site),
        );
        for report in &sent.reports {
            let origins = report.origins.unwrap();
            let matched = origins.own + origins.flock + origins.site;
            assert_eq!(matched, report.matched_blocks, "{report:?}");
            assert_eq!(report.zero_blocks, 256);
        }
        assert!(
            (1900..=1920).contains(&site),
            "{lanes}: of the site: {site}"
        );
        assert!(own >= 1150, "{lanes}: repeats: {own}");
        assert!(flock >= 3000, "{lanes}: of the flock: {flock}");
        // What is known there is what was reported here.
        for image in &sent.info.record.images {
            let report = sent.reports.iter().find(|r| r.name == image.name.as_str());
            let report = report.unwrap();
            assert_eq!(image.state, ImageState::Delivered);
            assert_eq!(image.digest, report.digest);
            assert_eq!(image.blocks.flock, report.origins.unwrap().flock);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_cannot_be_read_keeps_only_an_atomic_flock_back() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let (_, images) = flock(dir.path());
    let gone = dir.path().join("gone.raw");
    let paths = [images[0].as_path(), &gone, &images[1]];
    let client = Client::new();
    let e = send_order(&client, order(&paths, true), 1, &there)
        .await
        .unwrap_err();
    assert!(e.to_string().contains("gone.raw"), "{e}");
    assert!(there.site.list().is_empty(), "nothing is delivered");
    let record = there.site.flocks().remove(0).record;
    assert_eq!(record.state, FlockState::Failed);
    assert_eq!(record.images[0].state, ImageState::Arrived);
    assert!(record.why.contains("gone.raw"), "{}", record.why);

    // What arrived is not sent again.
    write(&gone, &blocks(4, 0..300));
    let sent = send_order(&client, order(&paths, true), 2, &there)
        .await
        .unwrap();
    assert_eq!(sent.info.record.state, FlockState::Delivered);
    let first = sent
        .reports
        .iter()
        .find(|r| r.name == "image-1.raw")
        .unwrap();
    assert!(first.waits && first.sent_blocks == 0, "{first:?}");
    for path in paths {
        same(
            path,
            &there.image(path.file_name().unwrap().to_str().unwrap()),
        );
    }

    // Without it the others are delivered, and it is said which was not.
    std::fs::remove_file(&gone).unwrap();
    write(&images[0], &blocks(5, 0..300));
    let sent = send_order(&client, order(&paths, false), 1, &there)
        .await
        .unwrap();
    assert_eq!(sent.failed.len(), 1);
    assert_eq!(sent.failed[0].0, "gone.raw");
    assert_eq!(sent.info.record.state, FlockState::Failed);
    let states: Vec<ImageState> = sent.info.record.images.iter().map(|i| i.state).collect();
    let expected = [
        ImageState::Delivered,
        ImageState::Failed,
        ImageState::Unchanged,
    ];
    assert_eq!(states, expected);
    same(&images[0], &there.image("image-1.raw"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_site_that_stops_goes_on_with_the_flock() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("there");
    let there = TestSite::start(&home).await;
    let (_, images) = flock(dir.path());
    let gone = dir.path().join("gone.raw");
    let paths = [images[0].as_path(), &images[1], &gone];
    let client = Client::new();
    let failed = send_order(&client, order(&paths, true), 1, &there).await;
    assert!(failed.is_err());
    let catalog = there.kill().await;
    let there = TestSite::start_with(&home, catalog, 0).await;
    let record = there.site.flocks().remove(0).record;
    assert_eq!(record.state, FlockState::Failed);
    assert!(there.site.list().is_empty());
    let paths = &paths[..2];
    let sent = send_order(&client, order(paths, true), 2, &there)
        .await
        .unwrap();
    assert_eq!(
        sum(&sent.reports, |r| r.sent_blocks),
        0,
        "{:?}",
        sent.reports
    );
    assert_eq!(there.site.list().len(), 2);
    assert!(there.site.unfinished().unwrap().is_empty());
}

/// A source that says it sends a flock, and sends something else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_that_were_not_announced_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let (old, _) = flock(dir.path());
    let client = Client::new();
    let announced = FlockOrder {
        unchanged: vec![(name("old.raw"), drover_core::Digest([1; 32]))],
        ..order(&[], false)
    };
    let e = send_order(&client, announced, 1, &there).await.unwrap_err();
    assert!(e.to_string().contains("changed at the destination"), "{e}");
    client.send(&[&old], &there).await.unwrap();
    let digest = there.site.list()[0].digest;
    let announced = FlockOrder {
        unchanged: vec![(name("old.raw"), digest)],
        ..order(&[], true)
    };
    let sent = send_order(&client, announced, 1, &there).await.unwrap();
    assert_eq!(sent.info.record.state, FlockState::Delivered);
    assert_eq!(sent.info.record.images[0].state, ImageState::Unchanged);
}
