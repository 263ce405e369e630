//! Broken links, crashed sites, stopped sources: durable data is not sent again.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use drover_teleport::progress::SendEvent;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::*;

/// When a link is cut.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// After so many bytes in all towards the site.
    After(u64),
    /// When two connections are made and something is said on each; what the site says to it is lost.
    BeforeAWord,
}

/// A link that cuts every connection once; after that it passes everything.
async fn cutting_link(to: String, when: Cut) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let left = Arc::new(AtomicU64::new(match when {
        Cut::After(budget) => budget,
        Cut::BeforeAWord => 2,
    }));
    let cut = tokio::sync::watch::channel(false).0;
    tokio::spawn(async move {
        loop {
            let (from, _) = listener.accept().await.unwrap();
            let Ok(to) = TcpStream::connect(&to).await else {
                continue;
            };
            let (left, cut) = (left.clone(), cut.clone());
            tokio::spawn(async move {
                let (mut from_read, mut from_write) = from.into_split();
                let (mut to_read, mut to_write) = to.into_split();
                let healed = *cut.borrow();
                let mut cut_here = cut.subscribe();
                let (answered, deaf) = (AtomicBool::new(false), AtomicBool::new(false));
                let up = async {
                    let mut buffer = vec![0; 16 << 10];
                    loop {
                        let n = from_read.read(&mut buffer).await.unwrap_or(0);
                        let mut counts = n as u64;
                        if when == Cut::BeforeAWord && !healed {
                            // What follows the site's part of the handshake ends it: the first thing that counts.
                            let says = answered.load(Ordering::SeqCst);
                            counts = u64::from(says && !deaf.swap(says, Ordering::SeqCst));
                        }
                        if n == 0 || to_write.write_all(&buffer[..n]).await.is_err() {
                            break;
                        }
                        if !healed
                            && counts > 0
                            && left.fetch_sub(counts, Ordering::SeqCst) <= counts
                        {
                            left.store(u64::MAX / 2, Ordering::SeqCst);
                            cut.send_replace(true);
                        }
                    }
                };
                let down = async {
                    let mut buffer = vec![0; 16 << 10];
                    loop {
                        let n = to_read.read(&mut buffer).await.unwrap_or(0);
                        if n == 0 {
                            break;
                        }
                        if !deaf.load(Ordering::SeqCst) {
                            answered.store(true, Ordering::SeqCst);
                            if from_write.write_all(&buffer[..n]).await.is_err() {
                                break;
                            }
                        }
                    }
                    let _ = from_write.shutdown().await;
                };
                tokio::select! {
                    _ = async { tokio::join!(up, down) } => {}
                    _ = cut_here.wait_for(|c| *c), if !healed => {}
                }
            });
        }
    });
    address
}

fn reconnects(client: &Client) -> usize {
    client
        .events
        .lock()
        .unwrap()
        .iter()
        .filter(|e| matches!(e, SendEvent::Reconnecting { .. }))
        .count()
}

fn no_part_left(there: &TestSite) {
    let left: Vec<_> = std::fs::read_dir(there.dir.join("work/transfers"))
        .unwrap()
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_link_is_picked_up_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let a = dir.path().join("a.raw");
    for (n, budget) in [20_000, 1_500_000, 4_000_000].into_iter().enumerate() {
        // Of a pool of its own, so that nothing of the one before matches.
        write(&a, &image(21, 9 + n as u64, 400));
        let client = Client::new();
        let address = cutting_link(there.address.clone(), Cut::After(budget)).await;
        let name = format!("cut-{budget}.raw");
        let mut items = items(&[&a]);
        items[0].name = drover_core::ImageName::new(name.clone()).unwrap();
        let reports = client
            .send_with(items, client.options(&there, &address))
            .await
            .unwrap();
        assert_eq!(reconnects(&client), 1, "budget {budget}");
        same(&a, &there.image(&name));
        let r = &reports[0];
        assert_eq!(
            r.matched_blocks + r.sent_blocks + r.zero_blocks + r.resumed_blocks,
            r.size_bytes / 4096,
            "{r:?}"
        );
        no_part_left(&there);
    }
}

/// A link that breaks as soon as the destination was reached is no worse than one that breaks later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_is_cut_before_the_first_word_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let a = dir.path().join("a.raw");
    write(&a, &image(22, 12, 100));
    let client = Client::new();
    let address = cutting_link(there.address.clone(), Cut::BeforeAWord).await;
    client
        .send_with(items(&[&a]), client.options(&there, &address))
        .await
        .unwrap();
    assert_eq!(reconnects(&client), 1);
    same(&a, &there.image("a.raw"));
    no_part_left(&there);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_durable_is_not_sent_again_after_the_site_died() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("there");
    let there = TestSite::start(&home).await;
    let a = dir.path().join("a.raw");
    let bytes: Vec<u8> = std::iter::repeat_with({
        let mut rng = fastrand::Rng::with_seed(5);
        move || rng.u8(..)
    })
    .take(40 << 20)
    .collect();
    write(&a, &bytes);
    let client = Client::new();
    let mut options = client.options(&there, &there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(20 << 20)));
    options.give_up_after = Duration::from_millis(1);
    let counters = client.counters.clone();
    let watch = async {
        while counters.sent_blocks.load(Ordering::Relaxed) < 4000 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let send = client.send_with(items(&[&a]), options);
    tokio::select! {
        _ = watch => {}
        r = send => panic!("too quick to be cut: {r:?}"),
    }
    let catalog = there.kill().await;
    assert!(!home.join("images/a.raw").exists());
    let there = TestSite::start_with(&home, catalog, 0).await;
    let client2 = Client {
        identity: client.identity.clone(),
        ..Client::new()
    };
    let reports = client2.send(&[&a], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
    assert!(reports[0].resumed_blocks > 2000, "{reports:?}");
    assert!(reports[0].sent_blocks < 10240 - 2000, "{reports:?}");
    no_part_left(&there);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_the_source_keeps_the_transfer() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let a = dir.path().join("a.raw");
    write(&a, &image(33, 12, 300));
    let client = Client::new();
    let mut options = client.options(&there, &there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(4 << 20)));
    let (stop, counters) = (client.stop.clone(), client.counters.clone());
    tokio::spawn(async move {
        while counters.sent_blocks.load(Ordering::Relaxed) < 1000 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stop.send_replace(true);
    });
    let error = client.send_with(items(&[&a]), options).await.unwrap_err();
    assert!(
        matches!(error, drover_teleport::TeleportError::Stopped),
        "{error:?}"
    );
    assert!(!there.image("a.raw").exists());
    let client = Client {
        identity: client.identity.clone(),
        ..Client::new()
    };
    let reports = client.send(&[&a], &there).await.unwrap();
    assert!(reports[0].resumed_blocks > 500, "{reports:?}");
    same(&a, &there.image("a.raw"));
}

/// What is left to send when the sender is stopped is not sent any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_source_stops_soon() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let a = dir.path().join("a.raw");
    let mut bytes = vec![0; 64 << 20];
    fastrand::Rng::with_seed(7).fill(&mut bytes);
    write(&a, &bytes);
    let client = Client::new();
    let mut options = client.options(&there, &there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(4 << 20)));
    let (stop, counters) = (client.stop.clone(), client.counters.clone());
    let stopped = tokio::spawn(async move {
        while counters.sent_blocks.load(Ordering::Relaxed) < 1000 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stop.send_replace(true);
        std::time::Instant::now()
    });
    let error = client.send_with(items(&[&a]), options).await.unwrap_err();
    let took = stopped.await.unwrap().elapsed();
    assert!(
        matches!(error, drover_teleport::TeleportError::Stopped),
        "{error:?}"
    );
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// Space that runs out is a refusal the first time it is met, and no end of the transfer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_fills_up_is_said_and_resumed_from() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    let Some(_disk) = SmallDisk::mount(&disk, 100 << 20) else {
        return;
    };
    let there = TestSite::start(&disk.join("there")).await;
    let a = dir.path().join("a.raw");
    let mut bytes = vec![0; 60 << 20];
    fastrand::Rng::with_seed(8).fill(&mut bytes);
    write(&a, &bytes);
    let client = Client::new();
    let mut options = client.options(&there, &there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(20 << 20)));
    let (filler, counters) = (disk.join("filler"), client.counters.clone());
    let fill = filler.clone();
    tokio::spawn(async move {
        while counters.sent_blocks.load(Ordering::Relaxed) < 4000 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (mut file, part) = (std::fs::File::create(fill).unwrap(), vec![1; 64 << 10]);
        while std::io::Write::write_all(&mut file, &part).is_ok() {}
    });
    let error = client.send_with(items(&[&a]), options).await.unwrap_err();
    assert_eq!(
        error.refusal(),
        Some(drover_net::Code::NoSpace),
        "{error:?}"
    );
    assert!(
        error.to_string().starts_with("a.raw: ") && error.to_string().contains("out of space"),
        "{error}"
    );
    assert_eq!(reconnects(&client), 0);
    assert!(!there.image("a.raw").exists());
    std::fs::remove_file(&filler).unwrap();
    let reports = client.send(&[&a], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
    assert!(reports[0].resumed_blocks > 2000, "{reports:?}");
    no_part_left(&there);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_changes_is_noticed_and_nothing_is_delivered() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let a = dir.path().join("a.raw");
    write(&a, &image(44, 13, 300));
    let client = Client::new();
    let mut options = client.options(&there, &there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(6 << 20)));
    let (path, counters) = (a.clone(), client.counters.clone());
    tokio::spawn(async move {
        while counters.sent_blocks.load(Ordering::Relaxed) < 500 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        scribble(&path);
    });
    let error = client.send_with(items(&[&a]), options).await.unwrap_err();
    assert!(
        matches!(error, drover_teleport::TeleportError::SourceChanged(_)),
        "{error:?}"
    );
    assert!(!there.image("a.raw").exists());
    // As it is now, it goes.
    client.send(&[&a], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
}

fn scribble(path: &Path) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    for at in (0..length).step_by(1 << 20) {
        std::os::unix::fs::FileExt::write_all_at(&file, b"changed", at).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_that_change_at_the_destination_are_not_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let (a, b) = (dir.path().join("a.raw"), dir.path().join("b.raw"));
    write(&a, &image(50, 14, 150));
    write(&b, &image(51, 14, 150));
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    scribble(&there.image("a.raw"));
    let reports = client.send(&[&b], &there).await.unwrap();
    same(&b, &there.image("b.raw"));
    assert!(reports[0].matched.invalid > 0, "{reports:?}");
    // Gone altogether, and only part of the sequence cache left.
    std::fs::remove_file(there.image("a.raw")).unwrap();
    std::fs::remove_file(there.image("b.raw")).unwrap();
    let c = dir.path().join("c.raw");
    write(&c, &image(52, 14, 150));
    client.send(&[&c], &there).await.unwrap();
    same(&c, &there.image("c.raw"));
}

/// Batches of zeros are complete at once, those between them are not: the log must not mind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_with_long_stretches_of_zeros_are_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let a = dir.path().join("a.raw");
    let mut bytes = vec![0; 100 << 20];
    let mut rng = fastrand::Rng::with_seed(6);
    // Written, so no holes: the walk meets them as batches without data.
    for part in bytes.chunks_mut(8 << 20).step_by(2) {
        rng.fill(&mut part[..4 << 20]);
    }
    write(&a, &bytes);
    let client = Client::new();
    let mut options = client.options(&there, &there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(10 << 20)));
    let (stop, counters) = (client.stop.clone(), client.counters.clone());
    tokio::spawn(async move {
        while counters.sent_blocks.load(Ordering::Relaxed) < 2500 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stop.send_replace(true);
    });
    client.send_with(items(&[&a]), options).await.unwrap_err();
    let client = Client {
        identity: client.identity.clone(),
        ..Client::new()
    };
    let reports = client.send(&[&a], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
    assert!(reports[0].resumed_blocks > 1500, "{reports:?}");
    assert!(reports[0].sent_blocks < 7 * 1024 - 1500, "{reports:?}");
    no_part_left(&there);
}

/// What was zero when the image came is part of it too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_changed_where_it_was_zero_is_not_taken_for_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let a = dir.path().join("a.raw");
    let mut bytes = image(60, 15, 40);
    let zeros = bytes.len().next_multiple_of(4096);
    bytes.resize(zeros + 200_000, 0);
    write(&a, &bytes);
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    let reports = client.send(&[&a], &there).await.unwrap();
    assert!(reports[0].matched.in_place > 0, "{reports:?}");
    let file = std::fs::File::options()
        .write(true)
        .open(there.image("a.raw"))
        .unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"changed", zeros as u64 + 5000).unwrap();
    let reports = client.send(&[&a], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
    assert_eq!(reports[0].sent_blocks, 0, "{reports:?}");
}

/// A session that takes over matches as the one before did: what that one leaves behind at the
/// teleporter is gone before the new one begins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_takes_over_goes_on_matching() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let (a, b) = (dir.path().join("a.raw"), dir.path().join("b.raw"));
    let mut rng = fastrand::Rng::with_seed(70);
    let mut bytes = vec![0; (12 + 120) << 20];
    rng.fill(&mut bytes);
    write(&a, &bytes[12 << 20..]);
    write(&b, &bytes);
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    let client = Client::new();
    let mut options = client.options(&there, &there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(4 << 20)));
    options.give_up_after = Duration::from_millis(1);
    let counters = client.counters.clone();
    let second = Client {
        identity: client.identity.clone(),
        ..Client::new()
    };
    let takeover = async {
        while counters.sent_blocks.load(Ordering::Relaxed) < 1000 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        second.send(&[&b], &there).await
    };
    let (first, reports) = tokio::join!(client.send_with(items(&[&b]), options), takeover);
    assert!(first.is_err(), "{first:?}");
    let report = &reports.unwrap()[0];
    same(&b, &there.image("b.raw"));
    // Of a batch that was matched when the first session ended, the sequence cache was promised
    // blocks that it never got: they are found wrong, and sent.
    assert!(report.sent_blocks <= 12 * 256 + 2048, "{report:?}");
}

/// What other transfers have left costs a new one nothing: their logs are not even opened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_send_does_not_read_what_others_left() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    // Which looks at what was left.
    caught_up(&there).await;
    let left = there.dir.join("work/transfers/left");
    std::fs::create_dir(&left).unwrap();
    let log = left.join("log");
    let made = std::process::Command::new("mkfifo").arg(&log).status();
    assert!(made.unwrap().success());
    let opened = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (fifo, seen) = (log.clone(), opened.clone());
    // Opening a pipe for writing waits for a reader.
    let waiting = std::thread::spawn(move || {
        std::fs::File::options().write(true).open(fifo).unwrap();
        seen.store(true, Ordering::SeqCst);
    });
    let a = dir.path().join("a.raw");
    write(&a, &image(90, 19, 40));
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    // The same image, compared in place, and another one under its name.
    client.send(&[&a], &there).await.unwrap();
    write(&a, &image(91, 20, 40));
    client.send(&[&a], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
    assert!(!opened.load(Ordering::SeqCst), "another's log was read");
    assert!(left.exists());
    drop(std::fs::File::open(&log).unwrap());
    waiting.join().unwrap();
}
