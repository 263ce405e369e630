//! Profiles that images are sent with.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_net::RateLimit;
use drover_store::Catalog;
use drover_store::profile::{FirstRead, Profile, Profiles};
use drover_teleport::{LaunchDevice, SendItem, Site, TeleportError};

use crate::harness::{Client, TestSite, items, write};

/// Bytes of a batch of the walk.
const BATCH: u64 = 8 << 20;

/// What a boot reads, far behind, in runs and single blocks, backwards.
fn boot() -> Vec<u64> {
    let runs = [
        3 * BATCH + 40_960,
        3 * BATCH - 65_536,
        2 * BATCH,
        BATCH + 12_288,
    ];
    let runs = runs.map(|at| at / BLOCK_SIZE_U64);
    let single = (0..40).map(|n| (2 * BATCH + 500_000) / BLOCK_SIZE_U64 + n * 7);
    runs.into_iter()
        .flat_map(|at| at..at + 24)
        .chain(single)
        .collect()
}

fn profile(bytes: &Vec<u8>) -> Profile {
    let read = |(n, block)| FirstRead {
        block,
        at_ms: n as u32,
    };
    let reads: Vec<FirstRead> = boot().into_iter().enumerate().map(read).collect();
    Profile::of_boot(bytes, &reads).unwrap()
}

/// Four batches of data.
fn bytes(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4 * BATCH as usize];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

fn item(dir: &std::path::Path, bytes: &[u8], profile: Option<Profile>) -> SendItem {
    let path = dir.join("web.raw");
    write(&path, bytes);
    let mut item = items(&[&path]).remove(0);
    item.profile = profile.map(Arc::new);
    item
}

/// Sends the image slowly, until what its profile lists is there; returns how many of its blocks are by then.
async fn until_the_profile_is_here(there: &TestSite, client: &Client, item: SendItem) -> u64 {
    let profile = item.profile.clone().unwrap();
    let order: Vec<Range<u64>> = profile.order(profile.disk_bytes());
    let mut options = client.options(there, &there.address);
    options.limit = Some(Arc::new(RateLimit::new(1_500_000)));
    let sending = client.send_with(vec![item], options);
    let site: Arc<Site> = there.site.clone();
    let watching = tokio::task::spawn_blocking(move || {
        let name = ImageName::new("web.raw").unwrap();
        let launch = loop {
            match site.launch(&name).unwrap() {
                Some(launch) => break launch,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let device = LaunchDevice::open(&launch).unwrap();
        // Nothing is asked for by looking.
        while !order
            .iter()
            .all(|part| device.is_here(part.start, part.end - part.start))
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        launch.status().done_bytes / BLOCK_SIZE_U64
    });
    let stop = async {
        let here = watching.await.unwrap();
        client.stop.send_replace(true);
        here
    };
    let (sent, here) = tokio::join!(sending, stop);
    assert!(matches!(sent, Err(TeleportError::Stopped)), "{sent:?}");
    client.stop.send_replace(false);
    here
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_profile_lists_is_there_first_and_the_image_is_the_same() {
    for other in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let there = TestSite::start(&dir.path().join("there")).await;
        let client = Client::new();
        if other {
            // Now the site has an image, and asks only for what is announced.
            let small = dir.path().join("small.raw");
            write(&small, &vec![3; 100_000]);
            client.send(&[&small], &there).await.unwrap();
        }
        let bytes = bytes(7);
        let listed = profile(&bytes);
        let item = item(dir.path(), &bytes, Some(listed.clone()));
        let here = until_the_profile_is_here(&there, &client, item.clone()).await;
        let all = 4 * BATCH / BLOCK_SIZE_U64;
        let least = listed.entries().len() as u64;
        eprintln!("{here} of {all} blocks are there when the {least} of the profile are");
        assert!(here >= least && here < all / 2, "{here} of {all}");
        // The rest comes as ever, resumed.
        let options = client.options(&there, &there.address);
        let report = client
            .send_with(vec![item], options)
            .await
            .unwrap()
            .remove(0);
        assert_eq!(report.resumed_blocks + report.sent_blocks, all);
        assert!(std::fs::read(there.image("web.raw")).unwrap() == bytes);
        let image = there.catalog.by_name(&ImageName::new("web.raw").unwrap());
        let image = image.unwrap().unwrap().id;
        let kept = Profiles::beside(&there.dir.join("state/maps"))
            .load(image)
            .unwrap();
        assert_eq!(kept, Some(listed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_profile_that_counts_more_boots_stays_with_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let client = Client::new();
    let first = bytes(8)[..600_000].to_vec();
    let boots = |bytes: &Vec<u8>, count: u8| {
        let reads = [FirstRead { block: 9, at_ms: 3 }];
        let mut all = Profile::of_boot(bytes, &reads).unwrap();
        for _ in 1..count {
            all.merge(&Profile::of_boot(bytes, &reads).unwrap());
        }
        all
    };
    let mut other = first.clone();
    other[..4096].fill(5);
    // A new image, one that replaces it, the same once more, one without a profile, a later one.
    for (bytes, sent, kept) in [
        (&first, Some(3), 3),
        (&other, Some(1), 3),
        (&other, Some(5), 5),
        (&other, Some(4), 5),
        (&first, None, 5),
        (&first, Some(9), 9),
    ] {
        let item = item(dir.path(), bytes, sent.map(|count| boots(bytes, count)));
        let options = client.options(&there, &there.address);
        client.send_with(vec![item], options).await.unwrap();
        let image = there.catalog.by_name(&ImageName::new("web.raw").unwrap());
        let image = image.unwrap().unwrap().id;
        let found = Profiles::beside(&there.dir.join("state/maps")).load(image);
        let found = found.unwrap().expect("a profile");
        assert_eq!(found.boots(), kept, "sent {sent:?}");
    }
}
