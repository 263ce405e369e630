//! A site with a listener, a catalog in memory, and images generated from a seed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_image::Conversion;
use drover_index::ImageId;
use drover_net::service::{Exchange, Handler, IncomingCall, Peer, Services};
use drover_net::{Code, Identity, Listener, Refusal, Right, Rights};
use drover_store::{Catalog, CatalogError, ImageRecord};
use drover_teleport::progress::{Counters, ImageReport, SendEvent, WireTotals};
use drover_teleport::services::{EndFlock, OpenFlock};
use drover_teleport::{DataConnections, FlockSessions, SendItem, SendOptions, Sessions, send};
use drover_teleport::{FlockInfo, Site, SiteConfig, Supplies, TeleportError};
use tokio::sync::watch;

/// A catalog that forgets with the process.
#[derive(Default)]
pub struct MemoryCatalog {
    /// The next image cannot be entered.
    pub fail_put: std::sync::atomic::AtomicBool,
    state: std::sync::Mutex<(u64, HashMap<ImageName, ImageRecord>)>,
}

impl Catalog for MemoryCatalog {
    fn new_image_id(&self) -> Result<ImageId, CatalogError> {
        let mut s = self.state.lock().unwrap();
        s.0 += 1;
        Ok(ImageId(s.0))
    }
    fn images(&self) -> Result<Vec<ImageRecord>, CatalogError> {
        Ok(self.state.lock().unwrap().1.values().cloned().collect())
    }
    fn by_name(&self, name: &ImageName) -> Result<Option<ImageRecord>, CatalogError> {
        Ok(self.state.lock().unwrap().1.get(name).cloned())
    }
    fn put(&self, record: &ImageRecord) -> Result<Option<ImageRecord>, CatalogError> {
        if self
            .fail_put
            .swap(false, std::sync::atomic::Ordering::Relaxed)
        {
            return Err(CatalogError::Conflict(
                "the catalog is on a full disk".into(),
            ));
        }
        Ok(self
            .state
            .lock()
            .unwrap()
            .1
            .insert(record.name.clone(), record.clone()))
    }
    fn remove(&self, name: &ImageName) -> Result<Option<ImageRecord>, CatalogError> {
        Ok(self.state.lock().unwrap().1.remove(name))
    }
}

/// A site in `dir` with its own matcher.
pub fn config(dir: &Path) -> SiteConfig {
    SiteConfig {
        images_dir: dir.join("images"),
        work_dir: dir.join("work"),
        state_dir: dir.join("state"),
        teleporter: None,
        reserve_bytes: 0,
        supplies: Supplies::new(8),
        sequence_data_bytes: drover_store::sequences::SEQUENCE_DATA_BYTES,
        image_mode: 0o600,
        disk: Arc::new(drover_storage::HostDisk),
        shared: None,
    }
}

/// A listening site.
pub struct TestSite {
    pub dir: PathBuf,
    pub catalog: Arc<MemoryCatalog>,
    pub site: Arc<Site>,
    pub identity: Identity,
    pub address: String,
    stop: watch::Sender<bool>,
    accepting: tokio::task::JoinHandle<()>,
}

impl TestSite {
    pub async fn start(dir: &Path) -> Self {
        Self::start_with(dir, Arc::default(), 0).await
    }

    pub async fn start_with(dir: &Path, catalog: Arc<MemoryCatalog>, reserve_bytes: u64) -> Self {
        let config = SiteConfig {
            reserve_bytes,
            ..config(dir)
        };
        Self::start_as(config, catalog).await
    }

    pub async fn start_as(config: SiteConfig, catalog: Arc<MemoryCatalog>) -> Self {
        let dir = config.images_dir.parent().unwrap().to_path_buf();
        let given = catalog.clone();
        let opened = tokio::task::spawn_blocking(move || Site::open(config, given))
            .await
            .unwrap();
        let (site, _) = opened.unwrap();
        let identity = Identity::generate();
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), &identity)
            .await
            .unwrap();
        let address = listener.local_addr().to_string();
        let (stop, stopped) = watch::channel(false);
        let accepting = tokio::spawn(accept(listener, site.clone(), stopped));
        TestSite {
            dir,
            catalog,
            site,
            identity,
            address,
            stop,
            accepting,
        }
    }

    pub fn image(&self, name: &str) -> PathBuf {
        self.dir.join("images").join(name)
    }

    /// Ends without closing anything in order, as far as one process can.
    pub async fn kill(self) -> Arc<MemoryCatalog> {
        self.accepting.abort();
        self.stop.send_replace(true);
        tokio::time::sleep(Duration::from_millis(300)).await;
        self.catalog
    }
}

struct OfFlocks(Arc<Site>);

impl Handler<OpenFlock> for OfFlocks {
    async fn handle(
        &self,
        peer: &Peer,
        order: OpenFlock,
        _: &mut Exchange<'_, OpenFlock>,
    ) -> Result<(), Refusal> {
        Ok(self.0.open_flock(&peer.key, &peer.name, order)?)
    }
}

impl Handler<EndFlock> for OfFlocks {
    async fn handle(
        &self,
        peer: &Peer,
        end: EndFlock,
        _: &mut Exchange<'_, EndFlock>,
    ) -> Result<FlockInfo, Refusal> {
        Ok(self.0.end_flock(&peer.key, &end)?)
    }
}

async fn accept(listener: Listener, site: Arc<Site>, stop: watch::Receiver<bool>) {
    let mut services = Services::new(Refusal::new(Code::Unsupported, "no such service"));
    services.add(Sessions(site.clone()));
    services.add(DataConnections(site.clone()));
    services.add(FlockSessions(site.clone()));
    services.handle::<OpenFlock>(OfFlocks(site.clone()));
    services.handle::<EndFlock>(OfFlocks(site));
    let services = Arc::new(services);
    loop {
        let Ok(pending) = listener.accept().await else {
            continue;
        };
        let (services, stop) = (services.clone(), stop.clone());
        tokio::spawn(async move {
            let connection = pending.handshake().await?;
            let peer = Peer {
                key: connection.peer().unwrap(),
                name: "here".into(),
                rights: Rights::of(&[Right::Send, Right::Read, Right::Match]).of_peer(),
                domain: "default".into(),
            };
            let call = IncomingCall::receive(connection, stop).await?;
            services.serve(peer, call).await
        });
    }
}

/// Sends as another process would.
pub struct Client {
    pub identity: Identity,
    pub events: Arc<std::sync::Mutex<Vec<SendEvent>>>,
    pub stop: watch::Sender<bool>,
    pub counters: Arc<Counters>,
}

impl Client {
    pub fn new() -> Self {
        Client {
            identity: Identity::generate(),
            events: Arc::default(),
            stop: watch::channel(false).0,
            counters: Arc::default(),
        }
    }

    pub fn options(&self, to: &TestSite, address: &str) -> SendOptions {
        SendOptions {
            identity: self.identity.clone(),
            peer: to.identity.key(),
            peer_name: "there".into(),
            addresses: vec![address.into()],
            route: Arc::default(),
            limit: None,
            dry_run: false,
            connections: None,
            compress: None,
            give_up_after: Duration::from_secs(120),
            profiles: None,
        }
    }

    pub async fn send(
        &self,
        paths: &[&Path],
        to: &TestSite,
    ) -> Result<Vec<ImageReport>, TeleportError> {
        self.send_with(items(paths), self.options(to, &to.address))
            .await
    }

    pub async fn send_with(
        &self,
        items: Vec<SendItem>,
        options: SendOptions,
    ) -> Result<Vec<ImageReport>, TeleportError> {
        let events = self.events.clone();
        let wire = Arc::new(WireTotals::default());
        let on_event = Arc::new(move |e| events.lock().unwrap().push(e));
        send(
            items,
            options,
            on_event,
            self.counters.clone(),
            wire,
            self.stop.subscribe(),
        )
        .await
    }
}

pub fn items(paths: &[&Path]) -> Vec<SendItem> {
    paths
        .iter()
        .map(|p| SendItem {
            path: p.to_path_buf(),
            name: ImageName::new(p.file_name().unwrap().to_str().unwrap()).unwrap(),
            conversion: Conversion::AsIs,
            snapshot: None,
            profile: None,
        })
        .collect()
}

/// An image of `files` "files" from a pool, with zeros between them, some of its own, and repeats.
pub fn image(seed: u64, pool_seed: u64, files: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut out = Vec::new();
    for _ in 0..files {
        let own = rng.u8(0..5) == 0;
        let which = if own {
            rng.u64(1 << 32..)
        } else {
            pool_seed * 1000 + rng.u64(0..60)
        };
        let mut content = fastrand::Rng::with_seed(which);
        let length = content.usize(100..200_000);
        let compressible = content.bool();
        let mut file: Vec<u8> = b"\x7fELF\x02\x01\x01\0".to_vec();
        file.extend((0..length).map(|i| {
            if compressible {
                (i / 64) as u8 ^ content.u8(0..4)
            } else {
                content.u8(..)
            }
        }));
        out.extend(file);
        out.resize(out.len().next_multiple_of(4096), 0);
        if rng.u8(0..6) == 0 {
            out.resize(out.len() + 4096 * rng.usize(1..40), 0);
        }
    }
    out
}

pub fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

pub fn same(a: &Path, b: &Path) {
    assert!(
        std::fs::read(a).unwrap() == std::fs::read(b).unwrap(),
        "{} and {} differ",
        a.display(),
        b.display()
    );
}

/// A file system of so many bytes in memory; `None` says why not.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    pub fn mount(at: &Path, bytes: u64) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(at)
            .output();
        match mounted {
            Ok(out) if out.status.success() => Some(SmallDisk(at.to_path_buf())),
            other => {
                eprintln!("SKIP a small disk cannot be mounted: {other:?}");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(&self.0)
            .status();
    }
}

/// Waits until a condition holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(120), "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until the matcher knows what the site has.
pub async fn caught_up(there: &TestSite) {
    until("the matcher lacks nothing", || {
        !there.site.status().catching_up
    })
    .await;
}
