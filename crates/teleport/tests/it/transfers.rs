//! Unfinished transfers at a site: listing, removal and expiry, but never while in use.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use drover_net::Identity;
use drover_teleport::TeleportError;
use drover_teleport::progress::Counters;
use drover_teleport::{TransferState, Unfinished};

use crate::harness::*;

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

struct Stopped {
    dir: tempfile::TempDir,
    there: TestSite,
    identity: Identity,
}

impl Stopped {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let there = TestSite::start(&dir.path().join("there")).await;
        let stopped = Stopped {
            identity: Identity::generate(),
            dir,
            there,
        };
        let mut bytes = vec![0; 24 << 20];
        fastrand::Rng::with_seed(30).fill(&mut bytes);
        write(&stopped.image(), &bytes);
        stopped
    }

    fn image(&self) -> std::path::PathBuf {
        self.dir.path().join("a.raw")
    }

    /// Sends some of it, does something, and stops.
    async fn some(&self, meanwhile: impl AsyncFnOnce()) {
        self.some_of(2500, 8 << 20, async |_: &Counters| meanwhile().await)
            .await;
    }

    /// The same with so many blocks, and so many bytes a second.
    async fn some_of(&self, blocks: u64, rate: u64, meanwhile: impl AsyncFnOnce(&Counters)) {
        let client = Client {
            identity: self.identity.clone(),
            ..Client::new()
        };
        let mut options = client.options(&self.there, &self.there.address);
        options.limit = Some(Arc::new(drover_net::RateLimit::new(rate)));
        let path = self.image();
        let sent = client.send_with(items(&[&path]), options);
        let watch = async {
            while client.counters.sent_blocks.load(Ordering::Relaxed) < blocks {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            meanwhile(&client.counters).await;
            client.stop.send_replace(true);
        };
        let (sent, ()) = tokio::join!(sent, watch);
        assert!(matches!(sent, Err(TeleportError::Stopped)), "{sent:?}");
        // The site learns of it a moment later.
        for _ in 0..6000 {
            if self.only().await.state == TransferState::Stopped {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("it goes on");
    }

    async fn list(&self) -> Vec<Unfinished> {
        let site = self.there.site.clone();
        let list = tokio::task::spawn_blocking(move || site.unfinished());
        list.await.unwrap().unwrap()
    }

    async fn only(&self) -> Unfinished {
        let list = self.list().await;
        assert_eq!(list.len(), 1, "{list:?}");
        list.into_iter().next().unwrap()
    }

    async fn remove(&self, key: &str) -> Result<Unfinished, TeleportError> {
        let (site, key) = (self.there.site.clone(), key.to_owned());
        let removed = tokio::task::spawn_blocking(move || site.remove_transfer(&key));
        removed.await.unwrap()
    }

    async fn expire(&self, after: Duration) -> usize {
        let site = self.there.site.clone();
        let expired = tokio::task::spawn_blocking(move || site.expire_transfers(after));
        expired.await.unwrap().unwrap().len()
    }

    async fn send(&self) -> drover_teleport::progress::ImageReport {
        let client = Client {
            identity: self.identity.clone(),
            ..Client::new()
        };
        let path = self.image();
        let mut reports = client.send(&[&path], &self.there).await.unwrap();
        same(&path, &self.there.image("a.raw"));
        reports.remove(0)
    }

    fn transfers(&self) -> std::path::PathBuf {
        self.there.dir.join("work/transfers")
    }
}

fn entries(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_unfinished_is_listed_and_can_be_removed() {
    let t = Stopped::new().await;
    assert!(t.list().await.is_empty());
    t.some(async || {
        let live = t.only().await;
        assert_eq!(live.state, TransferState::UnderWay);
        let refused = t.remove(&live.key).await.unwrap_err();
        assert!(refused.refusal().is_some(), "{refused}");
        assert_eq!(t.expire(Duration::ZERO).await, 0);
    })
    .await;
    let left = t.only().await;
    assert_eq!((left.name.as_str(), left.peer.as_str()), ("a.raw", "here"));
    assert_eq!(left.sender, t.identity.key());
    assert_eq!(left.total_bytes, 24 << 20);
    assert!(
        left.done_bytes > 4 << 20 && left.done_bytes < 24 << 20,
        "{left:?}"
    );
    // A key names nothing else.
    for key in ["", "..", "../transfers", "0123"] {
        let none = t.remove(key).await.unwrap_err();
        assert!(none.refusal().is_some(), "{none}");
    }
    assert_eq!(t.remove(&left.key).await.unwrap(), left);
    assert!(t.list().await.is_empty());
    assert_eq!(entries(&t.transfers()), 0);
    let report = t.send().await;
    assert_eq!(report.resumed_blocks, 0, "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_goes_on_is_as_far_as_it_is_at_both_ends() {
    let t = Stopped::new().await;
    t.some(async || {}).await;
    // The site has the digests of all of it, and not half of the blocks.
    let before = t.only().await;
    assert!(before.done_bytes < before.total_bytes, "{before:?}");
    t.some_of(100, 1 << 20, async |counters: &Counters| {
        let now = t.only().await;
        assert_eq!(now.state, TransferState::UnderWay);
        assert!(now.done_bytes >= 4 << 20, "{now:?}");
        assert!(now.done_bytes < now.total_bytes, "{now:?}");
        let done = Counters::get(&counters.done_blocks) * 4096;
        assert!(done < now.total_bytes, "{done} of {}", now.total_bytes);
    })
    .await;
    t.send().await;
    assert!(t.list().await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nothing_comes_to_expires() {
    let t = Stopped::new().await;
    t.some(async || {}).await;
    assert_eq!(t.expire(WEEK).await, 0);
    let old = SystemTime::now() - WEEK - Duration::from_secs(60);
    let dir = t.transfers().join(t.only().await.key);
    for name in ["log", "image.part"] {
        let file = std::fs::File::options().write(true).open(dir.join(name));
        file.unwrap().set_modified(old).unwrap();
    }
    // Not while it is in progress, however old it is.
    assert_eq!(t.expire(WEEK + Duration::from_secs(3600)).await, 0);
    assert_eq!(t.expire(WEEK).await, 1);
    assert_eq!(entries(&t.transfers()), 0);
    let report = t.send().await;
    assert_eq!(report.resumed_blocks, 0, "{report:?}");
}

/// The catalog fails when the file has its name: the one before it gets that back, and sent again it is delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_file_that_the_catalog_did_not_take_leaves_the_one_before_it() {
    let stopped = Stopped::new().await;
    let client = || Client {
        identity: stopped.identity.clone(),
        ..Client::new()
    };
    let (path, there) = (stopped.image(), &stopped.there);
    client().send(&[&path], there).await.unwrap();
    let before = std::fs::read(&path).unwrap();
    let mut bytes = vec![0; 24 << 20];
    fastrand::Rng::with_seed(31).fill(&mut bytes);
    write(&path, &bytes);
    there.catalog.fail_put.store(true, Ordering::Relaxed);
    let failed = client().send(&[&path], there).await.unwrap_err();
    assert!(failed.to_string().contains("full disk"), "{failed}");
    let name = drover_core::ImageName::new("a.raw").unwrap();
    let (expected, found) = there.site.verify(&name, &mut |_, _| {}).unwrap();
    assert_eq!(expected, found);
    assert!(std::fs::read(there.image("a.raw")).unwrap() == before);
    let waiting = stopped.only().await;
    assert_eq!(waiting.state, TransferState::Whole);
    assert_eq!(entries(&stopped.transfers().join(waiting.key)), 2);
    let reports = client().send(&[&path], there).await.unwrap();
    assert_eq!(reports[0].sent_blocks, 0);
    let (expected, found) = there.site.verify(&name, &mut |_, _| {}).unwrap();
    assert_eq!(expected, found);
    same(&path, &there.image("a.raw"));
    assert!(there.site.unfinished().unwrap().is_empty());
}

/// A site stopped between the naming and the catalog, and another peer's image has taken the name since: that is not
/// entered as the other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_file_that_was_replaced_before_it_was_entered_is_forgotten() {
    let stopped = Stopped::new().await;
    let (path, there) = (stopped.image(), &stopped.there);
    there.catalog.fail_put.store(true, Ordering::Relaxed);
    Client::new().send(&[&path], there).await.unwrap_err();
    assert!(!there.image("a.raw").exists());
    let part = stopped.transfers().join(stopped.only().await.key);
    // It had the name, until the other image took it.
    std::fs::remove_file(part.join("image.part")).unwrap();
    let mut bytes = vec![0; 24 << 20];
    fastrand::Rng::with_seed(32).fill(&mut bytes);
    write(&path, &bytes);
    Client::new().send(&[&path], there).await.unwrap();
    let (dir, home) = (stopped.dir, stopped.there.dir.clone());
    let catalog = stopped.there.kill().await;
    let there = TestSite::start_with(&home, catalog, 0).await;
    let name = drover_core::ImageName::new("a.raw").unwrap();
    let (expected, found) = there.site.verify(&name, &mut |_, _| {}).unwrap();
    assert_eq!(expected, found);
    same(&dir.path().join("a.raw"), &there.image("a.raw"));
    assert!(there.site.unfinished().unwrap().is_empty());
}
