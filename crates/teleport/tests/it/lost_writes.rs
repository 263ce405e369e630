//! Disks that lose writes: they report it once, the page cache keeps the bytes, and the next sync
//! succeeds.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drover_storage::Disk;
use drover_teleport::SiteConfig;

use crate::harness::*;

/// Loses a MiB of the partial file when it is armed and next synced.
#[derive(Debug, Default)]
struct LosingDisk {
    /// At the next sync of data, or of everything: what delivers does the latter.
    lose_data: AtomicBool,
    lose_all: AtomicBool,
    losses: AtomicU64,
    /// What memory shows and the disk does not have, by inode.
    lost: Mutex<HashMap<u64, (u64, usize)>>,
}

const LOST: usize = 1 << 20;

impl LosingDisk {
    fn sync(&self, file: &File, armed: &AtomicBool) -> io::Result<()> {
        let meta = file.metadata()?;
        if meta.len() < 8 << 20 || !armed.load(Ordering::SeqCst) {
            return file.sync_data();
        }
        let mut bytes = vec![0; LOST];
        for at in (0..meta.len()).step_by(LOST) {
            let n = file.read_at(&mut bytes, at)?;
            if bytes[..n].iter().any(|b| *b != 0) {
                armed.store(false, Ordering::SeqCst);
                self.losses.fetch_add(1, Ordering::SeqCst);
                self.lost.lock().unwrap().insert(meta.ino(), (at, n));
                return Err(io::Error::from_raw_os_error(5));
            }
        }
        Ok(())
    }

    /// Shows what the disk has.
    fn reveal(&self, file: &File) -> io::Result<()> {
        match self.lost.lock().unwrap().remove(&file.metadata()?.ino()) {
            Some((at, n)) => file.write_all_at(&vec![0; n], at),
            None => Ok(()),
        }
    }
}

impl Disk for LosingDisk {
    fn sync_data(&self, file: &File) -> io::Result<()> {
        self.sync(file, &self.lose_data)
    }
    fn sync_all(&self, file: &File) -> io::Result<()> {
        self.sync(file, &self.lose_all)
    }
    fn forget(&self, file: &File) -> io::Result<()> {
        self.reveal(file)
    }
}

/// Sends an image to a site on such a disk until it is delivered, and looks at it after the power
/// was cut. Returns how many tries failed.
async fn send_and_cut_the_power(disk: Arc<LosingDisk>, bytes_a_second: u64) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let config = SiteConfig {
        disk: disk.clone(),
        ..config(&dir.path().join("there"))
    };
    let there = TestSite::start_as(config, Arc::default()).await;
    let a = dir.path().join("a.raw");
    let mut bytes = vec![0; 40 << 20];
    fastrand::Rng::with_seed(90).fill(&mut bytes);
    write(&a, &bytes);
    let identity = Client::new().identity;
    let mut failed = 0;
    loop {
        let client = Client {
            identity: identity.clone(),
            ..Client::new()
        };
        let mut options = client.options(&there, &there.address);
        options.limit = Some(Arc::new(drover_net::RateLimit::new(bytes_a_second)));
        options.give_up_after = Duration::from_secs(60);
        match client.send_with(items(&[&a]), options).await {
            Ok(_) => break,
            Err(e) => assert!(e.to_string().contains("cannot sync"), "{e}"),
        }
        failed += 1;
        assert!(failed < 5);
    }
    let image: &Path = &there.image("a.raw");
    let file = File::options().read(true).write(true).open(image).unwrap();
    disk.reveal(&file).unwrap();
    same(&a, image);
    assert_eq!(disk.losses.load(Ordering::SeqCst), 1);
    failed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_the_disk_lost_are_never_delivered() {
    let disk = Arc::new(LosingDisk {
        lose_data: true.into(),
        ..LosingDisk::default()
    });
    // Slow enough for a sync on the way.
    assert_eq!(send_and_cut_the_power(disk, 8 << 20).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_last_sync_lost_is_never_delivered_either() {
    let disk = Arc::new(LosingDisk {
        lose_all: true.into(),
        ..LosingDisk::default()
    });
    assert_eq!(send_and_cut_the_power(disk, 1 << 30).await, 1);
}
