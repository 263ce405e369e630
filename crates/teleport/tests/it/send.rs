//! Images are delivered unchanged.

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_arrive_and_the_second_costs_less() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let (a, b) = (dir.path().join("a.raw"), dir.path().join("b.raw"));
    write(&a, &image(1, 7, 150));
    let mut second = image(2, 7, 150);
    second.truncate(second.len() - 1000); // Not a whole number of blocks.
    write(&b, &second);
    let client = Client::new();
    let reports = client.send(&[&a, &b], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
    same(&b, &there.image("b.raw"));
    assert_eq!(reports.len(), 2);
    for r in &reports {
        let blocks = r.matched_blocks + r.sent_blocks + r.zero_blocks;
        assert_eq!(blocks, r.size_bytes.div_ceil(4096), "{r:?}");
    }
    assert!(
        reports[1].matched_blocks > reports[1].sent_blocks,
        "{:?}",
        reports[1]
    );
    assert!(reports[1].wire_sent_bytes < reports[0].wire_sent_bytes);
    reports.iter().for_each(stages_add_up);
    let (first, second) = (&reports[0].stages, &reports[1].stages);
    assert!(first.destination.write.bytes > second.destination.write.bytes);
    assert!(first.destination.copy.bytes < second.destination.copy.bytes);
    let name = drover_core::ImageName::new("a.raw").unwrap();
    let (expected, found) = there.site.verify(&name, &mut |_, _| {}).unwrap();
    assert_eq!(expected, found);
    assert_eq!(expected, reports[0].digest);
}

/// Every byte is in its stage, and no thread has been at it for longer than the image took.
fn stages_add_up(r: &drover_teleport::progress::ImageReport) {
    let (source, there) = (&r.stages.source, &*r.stages.destination);
    let blocks = |n: u64| n * 4096;
    assert_eq!(source.read.bytes, blocks(r.size_bytes.div_ceil(4096)));
    let data = blocks(r.matched_blocks + r.sent_blocks);
    assert_eq!((source.digest.bytes, there.matching.bytes), (data, data));
    for stage in [source.fetch, source.compress, there.unpack, there.write] {
        assert_eq!(stage.bytes, blocks(r.sent_blocks), "{r:?}");
        assert!(stage.busy_ns > 0, "{r:?}");
    }
    assert_eq!(there.copy.bytes, blocks(r.matched_blocks), "{r:?}");
    assert!(source.send.bytes > 0 && there.receive.bytes > 0);
    assert!(there.log.busy_ns > 0 && there.sync.busy_ns > 0 && there.deliver.busy_ns > 0);
    let of_one = |stages: &[drover_teleport::StageTime]| {
        let ns = stages.iter().map(|s| s.busy_ns + s.wait_ns + s.socket_ns);
        ns.sum::<u64>() as f64 / 1e9
    };
    let walk = of_one(&[source.read, source.scan, source.digest]);
    assert!(walk > 0.0 && walk <= r.seconds, "{walk} s of {r:?}");
    // The driver itself ends before the file is delivered.
    let driver = of_one(&[there.drive, there.log, there.deliver]);
    assert!(driver > 0.0 && driver <= r.seconds, "{driver} s of {r:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_image_again_sends_no_block() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let a = dir.path().join("a.raw");
    write(&a, &image(3, 8, 120));
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    for _ in 0..3 {
        let reports = client.send(&[&a], &there).await.unwrap();
        assert_eq!(reports[0].sent_blocks, 0, "{reports:?}");
        let blocks = reports[0].matched_blocks + reports[0].zero_blocks;
        assert_eq!(blocks, reports[0].size_bytes.div_ceil(4096));
        assert_eq!(reports[0].matched.in_place, reports[0].matched_blocks);
        same(&a, &there.image("a.raw"));
    }
    // And under another name.
    let mut again = items(&[&a]);
    again[0].name = drover_core::ImageName::new("c.raw").unwrap();
    let reports = client
        .send_with(again, client.options(&there, &there.address))
        .await
        .unwrap();
    assert_eq!(reports[0].sent_blocks, 0, "{reports:?}");
    same(&a, &there.image("c.raw"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_changed_a_little_is_replaced_at_little_cost() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let a = dir.path().join("a.raw");
    let mut bytes = image(4, 8, 300);
    write(&a, &bytes);
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    let length = bytes.len();
    // At the end, in the middle, at the very start, and with the file here meddled with as well.
    for (round, at) in [length - 5, length / 2, 0, length / 3]
        .into_iter()
        .enumerate()
    {
        bytes[at] ^= 0x55;
        write(&a, &bytes);
        if round == 3 {
            let file = std::fs::File::options()
                .write(true)
                .open(there.image("a.raw"))
                .unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, b"meddled", 100).unwrap();
        }
        let reports = client.send(&[&a], &there).await.unwrap();
        let r = &reports[0];
        same(&a, &there.image("a.raw"));
        assert!(r.sent_blocks <= 2, "round {round}: {r:?}");
        assert_eq!(r.resumed_blocks, 0);
        let blocks = r.matched_blocks + r.sent_blocks + r.zero_blocks;
        assert_eq!(blocks, r.size_bytes.div_ceil(4096), "{r:?}");
    }
    assert_eq!(
        std::fs::read_dir(there.dir.join("work/transfers"))
            .unwrap()
            .count(),
        0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_images_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let client = Client::new();
    for (n, bytes) in [
        vec![],
        vec![1],
        vec![0; 4096],
        vec![0; 10_000_001],
        vec![9; 4097],
    ]
    .iter()
    .enumerate()
    {
        let path = dir.path().join(format!("odd-{n}.img"));
        write(&path, bytes);
        client.send(&[&path], &there).await.unwrap();
        same(&path, &there.image(&format!("odd-{n}.img")));
    }
    // A large hole costs nothing.
    let path = dir.path().join("sparse.img");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(40 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[5; 10_000], 30 << 30).unwrap();
    let r = client.send(&[&path], &there).await.unwrap();
    assert!(r[0].wire_sent_bytes < 50_000, "{r:?}");
    let there = there.image("sparse.img");
    assert_eq!(std::fs::metadata(&there).unwrap().len(), 40 << 30);
    let mut back = vec![0; 10_000];
    std::os::unix::fs::FileExt::read_exact_at(
        &std::fs::File::open(&there).unwrap(),
        &mut back,
        30 << 30,
    )
    .unwrap();
    assert!(back == [5; 10_000]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_sources_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let paths: Vec<_> = (0..4)
        .map(|n| dir.path().join(format!("s{n}.raw")))
        .collect();
    for (n, p) in paths.iter().enumerate() {
        write(p, &image(10 + n as u64, 9, 80));
    }
    let clients: Vec<_> = paths.iter().map(|_| Client::new()).collect();
    let sends = clients.iter().zip(&paths).map(|(c, p)| {
        let there = &there;
        async move { c.send(&[p], there).await.unwrap() }
    });
    let mut all = Vec::new();
    for s in sends {
        all.push(s);
    }
    let results = join_all(all).await;
    assert_eq!(results.len(), 4);
    for p in &paths {
        same(p, &there.image(p.file_name().unwrap().to_str().unwrap()));
    }
}

async fn join_all<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut pinned: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut out: Vec<Option<F::Output>> = pinned.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (f, slot) in pinned.iter_mut().zip(&mut out) {
            if slot.is_none()
                && let std::task::Poll::Ready(v) = f.as_mut().poll(cx)
            {
                *slot = Some(v);
            }
        }
        if out.iter().all(Option::is_some) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    out.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_says_what_would_cross_and_changes_nothing() {
    use drover_teleport::progress::SendEvent;
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let (a, b) = (dir.path().join("a.raw"), dir.path().join("b.raw"));
    write(&a, &image(1, 7, 150));
    write(&b, &image(2, 7, 150));
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    let mut found = Vec::new();
    for _ in 0..2 {
        let dry = drover_teleport::SendOptions {
            dry_run: true,
            ..client.options(&there, &there.address)
        };
        let reports = client.send_with(items(&[&b]), dry).await.unwrap();
        assert!(reports.is_empty());
        let last = client.events.lock().unwrap().pop().unwrap();
        let SendEvent::Estimated {
            estimate,
            wire_bytes,
            ..
        } = last
        else {
            panic!("{last:?}")
        };
        found.push((estimate, wire_bytes));
    }
    assert_eq!(found[0], found[1]);
    assert!(!there.image("b.raw").exists());
    let (estimate, wire_bytes) = &found[0];
    let r = client.send(&[&b], &there).await.unwrap().remove(0);
    // The dry run does not see what the image repeats of itself across batches.
    assert!(
        estimate.sent_blocks >= r.sent_blocks && estimate.matched_blocks > r.matched_blocks / 2,
        "{estimate:?} {r:?}"
    );
    let real = r.wire_sent_bytes as f64;
    assert!(
        (0.6..1.8).contains(&(*wire_bytes as f64 / real)),
        "{wire_bytes} {real}"
    );
}

/// An image that is refused, and one that cannot be read, keep none of the others back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_image_does_not_keep_the_others_back() {
    let dir = tempfile::tempdir().unwrap();
    let there = TestSite::start(&dir.path().join("there")).await;
    let paths: Vec<_> = ["a.raw", "b.raw", "c.raw", "d.raw", "e.raw"]
        .iter()
        .map(|name| dir.path().join(name))
        .collect();
    for (n, path) in paths.iter().enumerate() {
        write(path, &image(100 + n as u64, 30 + n as u64, 40));
    }
    // The name is taken there by a file that is not the site's.
    let external = dir.path().join("else").join("b.raw");
    std::fs::create_dir(dir.path().join("else")).unwrap();
    write(&external, &[1; 8192]);
    let site = there.site.clone();
    let indexed = tokio::task::spawn_blocking(move || site.index_image(&external, &mut |_, _| {}));
    indexed.await.unwrap().unwrap();
    std::fs::remove_file(&paths[4]).unwrap();
    let client = Client::new();
    let paths: Vec<&std::path::Path> = paths.iter().map(|p| p.as_path()).collect();
    let error = client.send(&paths, &there).await.unwrap_err();
    let said = error.to_string();
    assert!(
        said.starts_with("2 of 5 images were not delivered; b.raw: "),
        "{said}"
    );
    assert_eq!(error.refusal(), Some(drover_net::Code::Denied));
    for n in [0, 2, 3] {
        let name = paths[n].file_name().unwrap().to_str().unwrap();
        same(paths[n], &there.image(name));
    }
    let failed: Vec<String> = client
        .events
        .lock()
        .unwrap()
        .iter()
        .filter_map(|e| match e {
            drover_teleport::progress::SendEvent::Failed { name, .. } => Some(name.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(failed, ["b.raw", "e.raw"]);
    // One alone fails as it is.
    let error = Client::new().send(&paths[1..2], &there).await.unwrap_err();
    assert!(!error.to_string().contains("of 1"), "{error}");
}
