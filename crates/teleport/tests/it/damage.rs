//! State files damaged or deleted between two runs of a site.

use std::path::Path;

use drover_teleport::Site;

use crate::harness::*;

fn files(dir: &Path, ending: &str) -> Vec<std::path::PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => out.extend(files(&path, ending)),
            false if path.to_string_lossy().ends_with(ending) => out.push(path),
            false => {}
        }
    }
    out
}

/// Losing a hash file or a map costs matches, never correctness; it is said by name. A hash file is
/// made again by itself, a map by indexing the image.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_hash_file_or_map_is_named_and_can_be_made_again() {
    for ending in [".hash", ".map"] {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("there");
        let there = TestSite::start(&home).await;
        let (a, b) = (dir.path().join("a.raw"), dir.path().join("b.raw"));
        let bytes = image(80, 17, 100);
        write(&a, &bytes);
        let client = Client::new();
        client.send(&[&a], &there).await.unwrap();
        let catalog = there.kill().await;
        let lost = files(&home.join("state"), ending);
        assert!(!lost.is_empty());
        for file in lost {
            std::fs::remove_file(file).unwrap();
        }
        let given = catalog.clone();
        let (at, image_file) = (config(&home), home.join("images/a.raw"));
        let repairs = tokio::task::spawn_blocking(move || {
            let (site, repairs) = Site::open(at.clone(), given.clone()).unwrap();
            if ending == ".map" {
                site.index_image(&image_file, &mut |_, _| {}).unwrap();
                site.close().unwrap();
                drop(site);
                let again = Site::open(at, given).unwrap().1;
                assert!(!again.iter().any(|r| r.contains("a.raw")), "{again:?}");
            }
            repairs
        });
        let repairs = repairs.await.unwrap();
        let way_out = match ending {
            ".map" => "`drover index ",
            _ => "made again",
        };
        let named = |r: &&String| r.starts_with("a.raw: ") && r.contains(way_out);
        assert_eq!(repairs.iter().filter(named).count(), 1, "{repairs:?}");
        let there = TestSite::start_with(&home, catalog, 0).await;
        caught_up(&there).await;
        let mut changed = bytes.clone();
        changed.splice(0..0, vec![1; 4096 * 5]);
        write(&b, &changed);
        let reports = client.send(&[&b], &there).await.unwrap();
        same(&b, &there.image("b.raw"));
        let r = &reports[0];
        assert!(r.matched_blocks > 20 * r.sent_blocks, "{ending}: {r:?}");
    }
}
