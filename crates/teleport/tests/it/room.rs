//! Freeing sequence data.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use drover_core::ImageName;
use drover_teleport::SiteConfig;

use crate::harness::*;

pub fn allocated(dir: &Path) -> u64 {
    let about = dir.join("work/sequences.data").metadata().unwrap();
    about.blocks() * 512
}

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

pub async fn remove(there: &TestSite, gone: &str) {
    let (site, gone) = (there.site.clone(), name(gone));
    let remove = move || site.remove(&gone).unwrap();
    tokio::task::spawn_blocking(remove).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequence_data_gives_room_back_when_images_go() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("there");
    // Of this, 2 MiB may stay whatever goes.
    let limited = || SiteConfig {
        sequence_data_bytes: 256 << 20,
        ..config(&dir)
    };
    let there = TestSite::start_as(limited(), Default::default()).await;
    let client = Client::new();
    let mut files = Vec::new();
    for (file, seed, pool) in [("a", 1, 7), ("b", 2, 7), ("c", 3, 8), ("d", 4, 8)] {
        let path = tmp.path().join(file);
        write(&path, &image(seed, pool, 120));
        client.send(&[&path], &there).await.unwrap();
        files.push(path);
    }
    until("all is copied", || {
        there.site.status().pending_sequences == 0
    })
    .await;
    let (all, known) = (allocated(&dir), there.site.sequence_data_used().unwrap());
    assert!(all > 5 << 20 && known >= all, "{all} of {known}");
    for gone in ["a", "b", "c"] {
        remove(&there, gone).await;
    }
    // What the one that is left shares with the next is there all the same.
    let path = tmp.path().join("e");
    write(&path, &image(3, 8, 120));
    let report = client.send(&[&path], &there).await.unwrap().remove(0);
    assert!(report.matched_blocks > report.sent_blocks, "{report:?}");
    same(&path, &there.image("e"));
    for gone in ["d", "e"] {
        remove(&there, gone).await;
    }
    until("room came back", || allocated(&dir) <= 2 << 20).await;
    assert!(there.site.sequence_data_used().unwrap() <= 2 << 20);

    // And it is used again.
    for file in &files {
        client.send(&[file], &there).await.unwrap();
        same(
            file,
            &there.image(file.file_name().unwrap().to_str().unwrap()),
        );
    }
    until("all is copied again", || {
        there.site.status().pending_sequences == 0
    })
    .await;
    assert!(allocated(&dir) > 4 << 20, "{}", allocated(&dir));

    // A lower limit holds from the next start on.
    let catalog = there.catalog.clone();
    tokio::task::spawn_blocking({
        let site = there.site.clone();
        move || site.close().unwrap()
    })
    .await
    .unwrap();
    there.kill().await;
    let limited = SiteConfig {
        sequence_data_bytes: 2 << 20,
        ..limited()
    };
    let there = TestSite::start_as(limited, catalog).await;
    assert!(allocated(&dir) <= 2 << 20, "{}", allocated(&dir));
    let path = tmp.path().join("f");
    write(&path, &image(5, 7, 120));
    client.send(&[&path], &there).await.unwrap();
    same(&path, &there.image("f"));
    until("all is copied at last", || {
        there.site.status().pending_sequences == 0
    })
    .await;
    assert!(allocated(&dir) <= 2 << 20, "{}", allocated(&dir));
}
