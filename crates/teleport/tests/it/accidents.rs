//! Changes to an image, or to its name, between a stopped transfer and the next attempt: the same
//! content resumes, and received blocks are used in any case.

use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use drover_net::Identity;
use drover_teleport::TeleportError;
use drover_teleport::progress::ImageReport;

use crate::harness::*;

const BLOCKS: u64 = 8192;
const BYTES: usize = (BLOCKS * 4096) as usize;

/// Random data, with a hole of 4 MiB in it.
fn content(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes[4 << 20..8 << 20].fill(0);
    bytes
}

/// Written with its hole.
fn write_sparse(path: &Path, bytes: &[u8]) {
    let file = File::create(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    for (n, block) in bytes.chunks(4096).enumerate() {
        if block.iter().any(|b| *b != 0) {
            file.write_all_at(block, n as u64 * 4096).unwrap();
        }
    }
}

struct Try {
    dir: tempfile::TempDir,
    identity: Identity,
    there: TestSite,
    image: PathBuf,
}

impl Try {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let there = TestSite::start(&dir.path().join("there")).await;
        let image = dir.path().join("a.raw");
        Try {
            identity: Identity::generate(),
            there,
            image,
            dir,
        }
    }

    fn client(&self) -> Client {
        Client {
            identity: self.identity.clone(),
            ..Client::new()
        }
    }

    /// Sends the image until so many blocks are out, and stops.
    async fn stopped_after(&self, blocks: u64) {
        let client = self.client();
        let mut options = client.options(&self.there, &self.there.address);
        options.limit = Some(Arc::new(drover_net::RateLimit::new(12 << 20)));
        let (stop, counters) = (client.stop.clone(), client.counters.clone());
        let watch = tokio::spawn(async move {
            while counters.sent_blocks.load(Ordering::Relaxed) < blocks {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            stop.send_replace(true);
        });
        let stopped = client.send_with(items(&[&self.image]), options).await;
        assert!(
            matches!(stopped, Err(TeleportError::Stopped)),
            "{stopped:?}"
        );
        watch.await.unwrap();
    }

    async fn send(&self, path: &Path) -> ImageReport {
        let reports = self.client().send(&[path], &self.there).await.unwrap();
        same(path, &self.there.image("a.raw"));
        let left = std::fs::read_dir(self.there.dir.join("work/transfers")).unwrap();
        assert_eq!(left.count(), 0);
        let r = reports.into_iter().next().unwrap();
        let all = r.matched_blocks + r.sent_blocks + r.zero_blocks + r.resumed_blocks;
        assert_eq!(all, r.data_bytes.div_ceil(4096), "{r:?}");
        r
    }
}

/// An image of which 3,500 blocks were sent, then the accident, then the rest.
async fn resumes_after(accident: impl FnOnce(&Try) -> PathBuf) {
    let t = Try::new().await;
    write_sparse(&t.image, &content(1));
    t.stopped_after(3500).await;
    let path = accident(&t);
    let r = t.send(&path).await;
    assert!(r.resumed_blocks > 2500, "{r:?}");
    assert!(r.sent_blocks < BLOCKS - 1024 - 2500, "{r:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_path_that_is_spelled_differently() {
    resumes_after(|t| t.dir.path().join("there/../a.raw")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_permissions() {
    resumes_after(|t| {
        let only_read = std::fs::Permissions::from_mode(0o400);
        std::fs::set_permissions(&t.image, only_read).unwrap();
        t.image.clone()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_touch() {
    resumes_after(|t| {
        let file = File::options().write(true).open(&t.image).unwrap();
        file.set_modified(std::time::SystemTime::now()).unwrap();
        t.image.clone()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_the_image() {
    resumes_after(|t| {
        let copy = t.dir.path().join("copy");
        std::fs::copy(&t.image, &copy).unwrap();
        std::fs::rename(&copy, &t.image).unwrap();
        t.image.clone()
    })
    .await;
}

/// A file system calls an unwritten extent data once its pages have been read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hole_that_has_become_data_of_zeros() {
    resumes_after(|t| {
        let file = File::options().write(true).open(&t.image).unwrap();
        file.write_all_at(&vec![0; 4 << 20], 4 << 20).unwrap();
        t.image.clone()
    })
    .await;
}

/// Content that is another one at the start, has zeros where there was data and data where there
/// was a hole, and is longer or shorter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_image_takes_what_is_the_same() {
    for length in [BYTES, BYTES - 5 * 4096 - 100, BYTES + 300] {
        let t = Try::new().await;
        let mut bytes = content(2);
        write_sparse(&t.image, &bytes);
        t.stopped_after(4500).await;
        let mut rng = fastrand::Rng::with_seed(3);
        rng.fill(&mut bytes[..1 << 20]);
        rng.fill(&mut bytes[5 << 20..6 << 20]);
        // Once as a hole, once as a written block among data.
        bytes[10 << 20..12 << 20].fill(0);
        bytes[(13 << 20) + 4096..(13 << 20) + 8192].fill(0);
        bytes.resize(length, 7);
        std::fs::remove_file(&t.image).unwrap();
        write_sparse(&t.image, &bytes);
        let file = File::options().write(true).open(&t.image).unwrap();
        file.write_all_at(&[0; 4096], (13 << 20) + 4096).unwrap();
        let r = t.send(&t.image).await;
        assert!(r.resumed_blocks > 2000, "{length}: {r:?}");
    }
}

/// The image changes while it is sent: what was sent of it is not sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_changed_on_the_way_keeps_what_is_the_same() {
    let t = Try::new().await;
    write_sparse(&t.image, &content(4));
    let client = t.client();
    let mut options = client.options(&t.there, &t.there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(12 << 20)));
    let (path, counters) = (t.image.clone(), client.counters.clone());
    let change = tokio::spawn(async move {
        while counters.sent_blocks.load(Ordering::Relaxed) < 3500 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let file = File::options().write(true).open(path).unwrap();
        for at in [100_000, BYTES as u64 - 100_000] {
            file.write_all_at(b"changed", at).unwrap();
        }
    });
    let error = client.send_with(items(&[&t.image]), options).await;
    let changed = matches!(error, Err(TeleportError::SourceChanged(_)));
    assert!(changed, "{error:?}");
    change.await.unwrap();
    let r = t.send(&t.image).await;
    assert!(r.resumed_blocks > 2500, "{r:?}");
}

/// What took the place of a transfer that was stopped is resumed after the site died, as itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_took_the_place_of_a_transfer_survives_the_site() {
    let mut t = Try::new().await;
    let mut bytes = content(5);
    write_sparse(&t.image, &bytes);
    t.stopped_after(4500).await;
    // The first half is another; what had been sent of the rest stays.
    fastrand::Rng::with_seed(6).fill(&mut bytes[..2 << 20]);
    bytes[9 << 20..10 << 20].fill(0);
    write_sparse(&t.image, &bytes);
    t.stopped_after(2000).await;
    let home = t.there.dir.clone();
    let catalog = t.there.kill().await;
    t.there = TestSite::start_with(&home, catalog, 0).await;
    let r = t.send(&t.image).await;
    assert!(r.resumed_blocks > 3000, "{r:?}");
    assert!(r.sent_blocks < BLOCKS - 1280 - 3000, "{r:?}");
}
