//! Several transfers at a site, including unfinished ones: their blocks are matched.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use drover_teleport::progress::ImageReport;

use crate::harness::*;

/// So many MiB that nothing else has.
fn unlike(seed: u64, mib: usize) -> Vec<u8> {
    let mut bytes = vec![0; mib << 20];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Sends a file under another name.
async fn send_as(client: &Client, path: &Path, name: &str, there: &TestSite) -> ImageReport {
    let mut items = items(&[path]);
    items[0].name = drover_core::ImageName::new(name).unwrap();
    let options = client.options(there, &there.address);
    let mut reports = client.send_with(items, options).await.unwrap();
    same(path, &there.image(name));
    reports.remove(0)
}

/// Begins to send a file and stops when so many of its blocks have been sent.
async fn interrupted(client: &Client, path: &Path, there: &TestSite, blocks: u64) {
    let client = Client {
        identity: client.identity.clone(),
        ..Client::new()
    };
    let mut options = client.options(there, &there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(8 << 20)));
    let (stop, counters) = (client.stop.clone(), client.counters.clone());
    tokio::spawn(async move {
        while counters.sent_blocks.load(Ordering::Relaxed) < blocks {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        stop.send_replace(true);
    });
    let stopped = client.send_with(items(&[path]), options).await;
    assert!(stopped.is_err(), "too quick to be stopped: {stopped:?}");
    // The site sees the end of the link a little later.
    while !there.site.status().transfers.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_here_is_matched_whatever_is_unfinished() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let (z, a) = (dir.path().join("z.raw"), dir.path().join("a.raw"));
    let (old, new) = (unlike(1, 16), unlike(2, 24));
    write(&z, &old);
    write(&a, &[old, new].concat());
    let (client, other) = (Client::new(), Client::new());
    client.send(&[&z], &there).await.unwrap();
    interrupted(&client, &a, &there, 1000).await;
    for name in ["b.raw", "c.raw"] {
        let report = send_as(&other, &z, name, &there).await;
        assert_eq!(report.sent_blocks, 0, "{name}: {report:?}");
    }
    // Another version of it: what came of the first is thrown away, what is here stays.
    let file = std::fs::File::options().write(true).open(&a).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH)
        .unwrap();
    interrupted(&client, &a, &there, 1000).await;
    for name in ["d.raw", "e.raw"] {
        let report = send_as(&other, &z, name, &there).await;
        assert_eq!(report.sent_blocks, 0, "{name}: {report:?}");
    }
    // And what is unfinished is finished, though what it was matched with is gone.
    for name in ["z.raw", "b.raw", "c.raw", "d.raw", "e.raw"] {
        let name = drover_core::ImageName::new(name).unwrap();
        there.site.remove(&name).unwrap();
    }
    let report = client.send(&[&a], &there).await.unwrap().remove(0);
    same(&a, &there.image("a.raw"));
    assert!(report.resumed_blocks >= 4096, "{report:?}");
    assert!(report.sent_blocks <= 24 * 256, "{report:?}");
}

/// What an unfinished transfer has brought is matched as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_unfinished_is_matched_too() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let (a, b) = (dir.path().join("a.raw"), dir.path().join("b.raw"));
    let bytes = unlike(3, 24);
    write(&a, &[bytes.clone(), unlike(4, 8)].concat());
    write(&b, &bytes);
    let client = Client::new();
    interrupted(&client, &a, &there, 3000).await;
    let report = send_as(&Client::new(), &b, "b.raw", &there).await;
    assert!(report.matched_blocks > 2000, "{report:?}");
}

/// What an unfinished transfer had brought, and what it had matched, is matched after a crash as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_unfinished_at_a_crash_is_matched_too() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("there");
    let there = TestSite::start(&home).await;
    let [z, a, b] = ["z.raw", "a.raw", "b.raw"].map(|n| dir.path().join(n));
    let (old, new) = (unlike(6, 8), unlike(7, 32));
    write(&z, &old);
    write(&a, &[old.clone(), new.clone(), unlike(8, 8)].concat());
    write(&b, &[unlike(9, 1), old, new].concat());
    let client = Client::new();
    client.send(&[&z], &there).await.unwrap();
    interrupted(&client, &a, &there, 6000).await;
    let catalog = there.kill().await;
    // As a crash leaves it: no hash file of the unfinished image is whole, no cache was saved.
    for entry in std::fs::read_dir(home.join("state/index")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("img-") && !name.contains("0001.") || name.starts_with("caches") {
            std::fs::remove_file(path).unwrap();
        }
    }
    let there = TestSite::start_with(&home, catalog, 0).await;
    caught_up(&there).await;
    let report = send_as(&Client::new(), &b, "b.raw", &there).await;
    assert!(report.matched_blocks > 2048 + 4000, "{report:?}");
    // And that one resumes.
    let report = client.send(&[&a], &there).await.unwrap().remove(0);
    same(&a, &there.image("a.raw"));
    assert!(report.resumed_blocks > 2048 + 4000, "{report:?}");
}

/// A link of so many bytes a second for each of several senders at once, each with its own image.
async fn at_once(paths: &[std::path::PathBuf], there: &TestSite, limit: u64) -> Vec<ImageReport> {
    let mut sends = Vec::new();
    for path in paths {
        let client = Client::new();
        let mut options = client.options(there, &there.address);
        options.limit = Some(Arc::new(drover_net::RateLimit::new(limit)));
        let items = items(&[path]);
        sends.push(tokio::spawn(async move {
            client.send_with(items, options).await.unwrap().remove(0)
        }));
    }
    let mut reports = Vec::new();
    for (send, path) in sends.into_iter().zip(paths) {
        reports.push(send.await.unwrap());
        same(
            path,
            &there.image(path.file_name().unwrap().to_str().unwrap()),
        );
    }
    reports
}

/// An image of which a quarter is unique, in runs, and the rest is shared by all.
fn alike(seed: u64, mib: usize) -> Vec<u8> {
    let mut bytes = unlike(1000, mib);
    let own = unlike(seed, mib);
    for at in (0..bytes.len()).step_by(1 << 20) {
        let stretch = at..at + (256 << 10);
        bytes[stretch.clone()].copy_from_slice(&own[stretch]);
    }
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_similar_images_at_once_match_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let paths = [1, 2].map(|n| dir.path().join(format!("{n}.raw")));
    for (n, path) in paths.iter().enumerate() {
        write(path, &alike(n as u64, 24));
    }
    let reports = at_once(&paths, &there, 24 << 20).await;
    let sent: u64 = reports.iter().map(|r| r.sent_blocks).sum();
    // What is in both crosses the link once.
    let least = 24 * (256 + 64);
    assert!(
        sent >= least && sent < least + least / 10,
        "{sent} of {least}: {reports:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn similar_images_sent_at_once_cost_little_more_than_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..6)
        .map(|n| dir.path().join(format!("{n}.raw")))
        .collect();
    for (n, path) in paths.iter().enumerate() {
        write(path, &image(n as u64, 77, 250));
    }
    let there = TestSite::start(&dir.path().join("one-by-one")).await;
    let mut one_by_one = 0;
    for path in &paths {
        let reports = at_once(std::slice::from_ref(path), &there, 1 << 30).await;
        one_by_one += reports[0].sent_blocks;
    }
    let there = TestSite::start(&dir.path().join("at-once")).await;
    let reports = at_once(&paths, &there, 40 << 20).await;
    let sent: u64 = reports.iter().map(|r| r.sent_blocks).sum();
    println!("one by one {one_by_one} blocks, at once {sent}");
    assert!(
        sent <= one_by_one + one_by_one / 10,
        "{sent} against {one_by_one}: {reports:?}"
    );
}

/// Fills a file system but for so many bytes.
fn fill(filler: &Path, spare: u64) {
    let options = std::fs::File::options().append(true).create(true).clone();
    let mut file = options.open(filler).unwrap();
    while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
    let full = file.metadata().unwrap().len();
    file.set_len(full.saturating_sub(spare)).unwrap();
}

/// An image whose matching failed takes no place at the matcher.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn matching_goes_on_after_the_matchers_disk_was_full() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("there");
    let index = home.join("state/index");
    let Some(_disk) = SmallDisk::mount(&index, 4 << 20) else {
        return;
    };
    let there = TestSite::start(&home).await;
    let z = dir.path().join("z.raw");
    write(&z, &unlike(5, 8));
    let client = Client::new();
    client.send(&[&z], &there).await.unwrap();
    let filler = index.join("filler");
    // An image can be begun, and nothing can be written of it; or it cannot be begun.
    for (spare, seed) in [(4 << 10, 100), (0, 200)] {
        for n in seed..seed + 40 {
            fill(&filler, spare);
            let path = dir.path().join(format!("{n}.raw"));
            write(&path, &unlike(n, 1));
            client.send(&[&path], &there).await.unwrap();
            same(&path, &there.image(&format!("{n}.raw")));
            // Or it would be read again when there is room, and take its place.
            let name = drover_core::ImageName::new(format!("{n}.raw")).unwrap();
            there.site.remove(&name).unwrap();
        }
        std::fs::remove_file(&filler).unwrap();
        let report = send_as(&client, &z, &format!("z-{seed}.raw"), &there).await;
        assert_eq!(report.sent_blocks, 0, "{spare}: {report:?}");
        let y = dir.path().join(format!("y-{seed}.raw"));
        write(&y, &unlike(seed + 50, 2));
        client.send(&[&y], &there).await.unwrap();
        let report = send_as(&client, &y, &format!("x-{seed}.raw"), &there).await;
        assert_eq!(report.sent_blocks, 0, "{spare}: {report:?}");
    }
}
