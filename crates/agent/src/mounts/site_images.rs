//! This site's images as block devices, for mounts of other sites and of this site.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};

use drover_core::{BlockDevice, Digest, ImageName};
use drover_device::backend::ImageDevice;
use drover_image::{ImageError, Known, Stamp, VirtualDisk};
use drover_mount::client::{ConnectError, Connecting, Connector};
use drover_mount::protocol::Open;
use drover_mount::server::{
    Absences, Arrival, Arriving, Base, Config, Happened, Images, Room, Server, WhyBroken,
};
use drover_net::service::{IncomingCall, Request};
use drover_net::{Code, Connection, Peer, PeerKey, Refusal, Right, Rights, connect_unix};
use drover_store::lease::{Access, MountId, term_text};
use drover_store::machine::Machines;
use drover_store::replica::{Records, Replica};
use drover_store::{Catalog, CatalogError, ImageRecord, SiteCatalog, changes};
use drover_teleport::{LaunchDevice, Site};
use tokio::sync::watch;

use crate::audit::{Audit, Event, Record};
use crate::disks::Disks;
use crate::error::{Error, Result, bail};
use crate::home::Home;
use crate::quota::Quotas;
use crate::remote::SocketPath;
use crate::{machines, remote, replicas, rights, site};

/// Threads that read, hash and compress for mounts.
const THREADS: usize = 4;

/// The server of this site's images for mounts. Call within a runtime.
///
/// # Errors
/// When its threads cannot be started.
pub fn site_server(home: &Home, catalog: &Arc<SiteCatalog>) -> Result<Arc<Server>> {
    let quotas = Arc::new(Quotas::new(home, catalog)?);
    limited_server(
        home,
        catalog,
        &quotas,
        Arc::default(),
        Arc::default(),
        Arc::default(),
    )
}

/// The site whose images in transit a server serves, once it is open.
pub type Receiving = Arc<OnceLock<Weak<Site>>>;

/// The same with what other parts of the site share: quotas, the mounts that have left it, what it receives, and its disks in
/// stores.
///
/// # Errors
/// As [`site_server`]'s.
pub fn limited_server(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    quotas: &Arc<Quotas>,
    absences: Arc<Absences>,
    receives: Receiving,
    stores: Arc<Disks>,
) -> Result<Arc<Server>> {
    Ok(Server::new(Config {
        images: Arc::new(SiteImages {
            of_site: OfSite::new(home, catalog),
            quotas: Arc::clone(quotas),
            own: home.identity()?.key(),
            disks: home.disks(),
            replicas: home.replicas(),
            site: home.name(),
            audit: Arc::clone(home.audit()),
            domain: home.domain_name().to_owned(),
            state: home.mounted_dir(),
            home: home.clone(),
            receives,
            stores,
        }),
        state: home.mounted_dir(),
        threads: THREADS,
        max_term: home.config.lease,
        absences,
    })?)
}

/// The disk of an image of this home.
///
/// # Errors
/// When it cannot be read, or its file was changed.
pub(crate) fn open_disk(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    record: &ImageRecord,
) -> Result<VirtualDisk> {
    if was_changed(record) {
        bail!(
            "{} was changed after it had been indexed; run `drover index` for its file",
            record.name
        );
    }
    let disk = OfSite::new(home, catalog).open(record);
    disk.map_err(|e| Error::Refused(unreadable(&record.name, e)))
}

/// The images of a catalog, as the files that others may be read from.
struct OfSite {
    catalog: Arc<SiteCatalog>,
    /// The directory for delivered images.
    images: PathBuf,
}

/// The images of a catalog.
struct SiteImages {
    of_site: OfSite,
    quotas: Arc<Quotas>,
    /// This site's key.
    own: PeerKey,
    /// Those that have moved, or are about to.
    disks: Machines,
    /// Whose disks are not written before they have taken over.
    replicas: Records<Replica>,
    site: String,
    audit: Arc<Audit>,
    domain: String,
    /// The directory of changes to images.
    state: PathBuf,
    home: Home,
    receives: Receiving,
    /// Disks in stores: images have other names.
    stores: Arc<Disks>,
}

impl SiteImages {
    /// Notes an image as mounted at this node of the site, or as written by a mount, if there may be other nodes.
    fn note_mount(&self, name: &ImageName, writes: bool) -> Result<(), Refusal> {
        match (self.home.node(), &self.home.config.catalog) {
            (Some(node), _) => node.mount(&self.domain, name, writes),
            (None, None) => Ok(()),
            (None, Some(url)) => {
                let text = format!(
                    "the site at {url} may have other nodes, so {name} can only be mounted while it runs here: start it with `drover serve`"
                );
                Err(Refusal::new(Code::Unavailable, text))
            }
        }
    }

    /// Opens an image that is still arriving, if there is one of that name.
    fn arriving(&self, name: &ImageName) -> Result<Option<Base>, Refusal> {
        let Some(site) = self.receives.get().and_then(Weak::upgrade) else {
            return Ok(None);
        };
        let Some(launch) = site.launch(name)? else {
            return Ok(None);
        };
        let directory = changes::directory(&self.state, name);
        changes::mark_launched(&directory).map_err(|e| {
            let text = format!("cannot write {}: {e}", directory.display());
            Refusal::new(Code::Io, text)
        })?;
        let device = Arc::new(LaunchDevice::open(&launch)?);
        let boot = drover_teleport::boot(Arc::downgrade(&device));
        drop(tokio::runtime::Handle::current().spawn(boot));
        Ok(Some(Base {
            device: Arc::clone(&device) as Arc<dyn BlockDevice>,
            digest: changes::in_transit(launch.image()),
            arriving: Some(Arc::new(InTransit(device))),
            through: None,
        }))
    }

    /// Whether an image is not complete yet, so that only this site's own user may use it.
    fn is_arriving(&self, name: &ImageName) -> bool {
        let site = self.receives.get().and_then(Weak::upgrade);
        let entered = self.of_site.catalog.by_name(name);
        matches!(entered, Ok(None)) && site.is_some_and(|site| site.is_arriving(name))
    }

    fn record(&self, name: &ImageName) -> Result<ImageRecord, Refusal> {
        let record = self.of_site.catalog.by_name(name);
        let record = record.map_err(|e| Refusal::new(Code::Unavailable, e.to_string()))?;
        let record = record.ok_or_else(|| {
            let text = format!("there is no image called {name}");
            Refusal::new(Code::NotFound, text)
        })?;
        if was_changed(&record) {
            // The digest no longer matches the file: mounts would reuse cached chunks of the former content.
            let text = format!(
                "{name} was changed after it had been indexed; run `drover index` for its file at {}",
                self.site
            );
            return Err(Refusal::new(Code::Corrupt, text));
        }
        Ok(record)
    }
}

impl OfSite {
    fn new(home: &Home, catalog: &Arc<SiteCatalog>) -> Self {
        OfSite {
            catalog: Arc::clone(catalog),
            images: home.images_dir(),
        }
    }

    fn open(&self, record: &ImageRecord) -> std::result::Result<VirtualDisk, ImageError> {
        VirtualDisk::open_known(&record.path, self)
    }

    /// The record of the image whose file is at `path`, also by another way there.
    fn record_at(&self, path: &Path) -> Result<Option<ImageRecord>, CatalogError> {
        let Ok(real) = path.canonicalize() else {
            return Ok(None);
        };
        let name = real.file_name().and_then(OsStr::to_str);
        let Some(name) = name.and_then(|name| ImageName::new(name).ok()) else {
            return Ok(None);
        };
        let record = self.catalog.by_name(&name)?;
        Ok(record.filter(|record| record.path.canonicalize().is_ok_and(|path| path == real)))
    }
}

impl Known for OfSite {
    fn is_foreign(&self, image: &Path) -> bool {
        match self.record_at(image) {
            // What was indexed elsewhere is the administrator's, who was told what it is read from.
            Ok(Some(record)) => !record.external,
            Ok(None) => match (image.canonicalize(), self.images.canonicalize()) {
                (Ok(image), Ok(images)) => image.starts_with(images),
                _ => true,
            },
            Err(_) => true,
        }
    }

    /// Only images of this site. Every other condition on what an image may be read from belongs here.
    fn part(&self, path: &Path) -> Result<Option<Stamp>, String> {
        match self.record_at(path) {
            Ok(Some(record)) => Ok(record.stamp),
            Ok(None) => Err("is not an image of this site".into()),
            Err(e) => Err(format!("cannot be looked up: {e}")),
        }
    }
}

/// The refusal for an image that cannot be opened, without paths of this host.
fn unreadable(name: &ImageName, error: ImageError) -> Refusal {
    let (file, error) = match error {
        ImageError::In { path, source } => (path.file_name().map(OsStr::to_owned), *source),
        error => (None, error),
    };
    let code = match error {
        ImageError::NotFollowed { .. } | ImageError::OutsideDirectory { .. } => Code::Denied,
        _ => Code::Unavailable,
    };
    let file = file.filter(|file| file.to_str() != Some(name.as_str()));
    let file = file.map_or_else(String::new, |file| format!("{}: ", file.to_string_lossy()));
    Refusal::new(code, format!("{name}: {file}{error}"))
}

/// An image in transit, for the server of mounts.
struct InTransit(Arc<LaunchDevice>);

impl Arriving for InTransit {
    fn is_complete(&self) -> bool {
        self.0.launch().is_delivered()
    }

    fn wait(&self, offset: u64, length: u64) -> Option<Arrival> {
        match self.0.is_here(offset, length) {
            true => None,
            false => Some(Box::pin(Arc::clone(&self.0).arrival(offset, length))),
        }
    }
}

impl Images for SiteImages {
    fn allow(&self, name: &ImageName, peer: &Peer, access: Access) -> Result<(), Refusal> {
        if let Some(disk) = self.stores.get(name) {
            return disk.allow(peer, access);
        }
        if self.is_arriving(name) {
            return match peer.key == self.own {
                true => Ok(()),
                false => {
                    let text = format!(
                        "{name} is still being sent to {}: until it is complete only the user of that site can use it",
                        self.site
                    );
                    Err(Refusal::new(Code::Denied, text))
                }
            };
        }
        if access == Access::ReadOnly {
            return Ok(());
        }
        rights::must_have(peer, Right::Write, &self.site)?;
        match self.record(name)? {
            record if record.may_be_changed_by(&peer.key, peer.rights) => Ok(()),
            _ => {
                let text = format!(
                    "{name} belongs to another peer of {}: it can only be mounted read-only",
                    self.site
                );
                Err(Refusal::new(Code::Denied, text))
            }
        }
    }

    fn allow_now(&self, name: &ImageName, peer: &Peer) -> Result<(), Refusal> {
        if peer.key == self.own {
            return self.allow(name, peer, Access::ReadWrite);
        }
        let now = self.quotas.peer_now(&peer.key);
        let now = now.map_err(|e| Refusal::new(Code::Unavailable, e.to_string()))?;
        let rights = match now {
            Some(now) if now.domain == self.domain => now.rights.of_peer(),
            _ => Rights::STRANGER,
        };
        let peer = Peer {
            rights,
            ..peer.clone()
        };
        self.allow(name, &peer, Access::ReadWrite)
    }

    fn may_be_written(&self, name: &ImageName, mount: MountId) -> Result<(), Refusal> {
        if self.stores.get(name).is_some() {
            return Ok(());
        }
        machines::may_be_written(&self.disks, name, Some(mount))?;
        replicas::may_be_written(&self.replicas, name)?;
        self.note_mount(name, true)
    }

    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        if let Some(disk) = self.stores.get(name) {
            return disk.base();
        }
        // Other nodes are not told of names that there are not.
        if self.home.node().is_some() && !self.is_arriving(name) {
            self.record(name)?;
        }
        self.note_mount(name, false)?;
        let record = match self.record(name) {
            Err(refusal) if refusal.code == Code::NotFound => {
                return self.arriving(name)?.ok_or(refusal);
            }
            record => record?,
        };
        let disk = self.of_site.open(&record);
        let disk = disk.map_err(|e| unreadable(name, e))?;
        Ok(Base {
            device: Arc::new(ImageDevice::new(disk)),
            digest: changes::digest_for_mounts(&self.state, &record),
            arriving: None,
            through: None,
        })
    }

    fn room(&self, peer: &PeerKey, bytes: u64) -> Result<Room, Refusal> {
        // The site's own user decides about its disks.
        if *peer == self.own {
            return Ok(Box::new(()));
        }
        let taken = self.quotas.take(peer, bytes).inspect_err(|refusal| {
            let record = Record::refused(Open::SERVICE, refusal, None)
                .by_peer(&self.quotas.name_of(peer), *peer)
                .in_domain(&self.domain);
            self.audit.write_limited(record);
        })?;
        Ok(Box::new(taken))
    }

    fn happened(&self, name: &ImageName, what: &Happened) {
        if let Some(node) = self.home.node() {
            match what {
                Happened::Opened { .. } => node.connected(&self.domain, name, true),
                Happened::Closed { .. } => node.connected(&self.domain, name, false),
                _ => {}
            }
        }
        let record = match what {
            Happened::Opened { peer, from, access } => Record::new(Event::MountOpened)
                .by(peer)
                .from(from)
                .detail(access_text(*access)),
            Happened::Refused {
                peer,
                from,
                access,
                refusal,
            } => {
                // The site's own user is told on the terminal.
                if !refusal.code.is_decision() || peer.rights.has(Right::Manage) {
                    return;
                }
                let writes = *access != Access::ReadOnly;
                let lacks = writes && !peer.rights.has(Right::Write);
                let right = Some(Right::Write).filter(|_| lacks);
                let record = Record::refused(Open::SERVICE, refusal, right);
                record.by(peer).from(from)
            }
            Happened::Closed {
                peer,
                access,
                written,
                time,
            } => {
                let record = Record::new(Event::MountClosed).by(peer).took(*time);
                let record = record.detail(access_text(*access));
                match access {
                    Access::ReadOnly | Access::Standby => record,
                    Access::ReadWrite => record.bytes(*written),
                }
            }
            Happened::HandedOver { from, to } => {
                let record = Record::new(Event::LeaseHandedOver)
                    .by(from)
                    .about(&to.name, to.key)
                    .in_domain(&self.domain)
                    .image(name);
                return self.audit.write(record);
            }
            Happened::LeaseBroken { holder, why } => {
                let record = Record::new(Event::LeaseBroken)
                    .about(&holder.peer_name, PeerKey(holder.peer))
                    .in_domain(&self.domain)
                    .image(name);
                return self.audit.write(match why {
                    WhyBroken::ByUser => record,
                    WhyBroken::RightLost => {
                        record.by_site().detail("its holder may not write any more")
                    }
                    WhyBroken::TermOver => {
                        let term = term_text(holder.term.unwrap_or_default());
                        let text = format!("its holder was out of contact for longer than {term}, and another mount took it");
                        record.by_site().detail(text)
                    }
                });
            }
        };
        // A link that comes and goes causes no more than a few lines.
        self.audit
            .write_limited(record.in_domain(&self.domain).image(name));
    }

    fn digest(&self, name: &ImageName) -> Result<Digest, Refusal> {
        if let Some(disk) = self.stores.get(name) {
            return disk.digest();
        }
        match self.record(name) {
            Ok(record) => Ok(changes::digest_for_mounts(&self.state, &record)),
            Err(refusal) if refusal.code == Code::NotFound => {
                let site = self
                    .receives
                    .get()
                    .and_then(Weak::upgrade)
                    .ok_or(refusal.clone())?;
                let launch = site.launch(name)?.ok_or(refusal)?;
                Ok(changes::in_transit(launch.image()))
            }
            Err(refusal) => Err(refusal),
        }
    }
}

fn access_text(access: Access) -> &'static str {
    match access {
        Access::ReadOnly => "read-only",
        Access::ReadWrite => "writing",
        Access::Standby => "standing by",
    }
}

/// Whether the content of an image's file changed since its digest was computed, by size and modification time.
pub(crate) fn was_changed(record: &ImageRecord) -> bool {
    let (Some(then), Ok(now)) = (record.stamp, Stamp::of_path(&record.path)) else {
        return false;
    };
    (then.size, then.mtime_ns) != (now.size, now.mtime_ns)
}

/// The peer name of this site in leases of its own images.
const OWN_NAME: &str = "the site itself";

/// The peer as which this site mounts its own images.
pub fn own(key: PeerKey, domain: &str) -> Peer {
    Peer {
        key,
        name: OWN_NAME.into(),
        rights: Rights::OWNER,
        domain: domain.to_owned(),
    }
}

/// Connects mounts to this site's own images, under the same leases as peers: to the running site, or to a server
/// within this process if no site runs at the start.
pub enum OwnConnector {
    /// The control socket of the running site. If the site restarts, mounts reconnect.
    Running(PathBuf),
    /// No running site: this process serves the image to itself.
    Inside {
        /// The server.
        server: Arc<Server>,
        /// This site, as the client.
        peer: Peer,
        /// Never set; dropping it would close the connections.
        stop: watch::Sender<bool>,
    },
}

impl OwnConnector {
    /// Creates a connector to the images of this home, which is that of a domain.
    ///
    /// # Errors
    /// When another program holds the home and accepts no connections.
    pub async fn new(home: &Home) -> Result<OwnConnector> {
        if remote::Call::local(home).await?.is_some() {
            return Ok(OwnConnector::Running(home.socket()));
        }
        let site = home.of_site();
        if home.used_by()?.is_some()
            || site.is_some_and(|site| matches!(site.used_by(), Ok(Some(_))))
        {
            bail!("a site is starting in this directory; try again");
        }
        let catalog = Arc::new(site::open_catalog(home)?);
        Ok(OwnConnector::Inside {
            server: site_server(home, &catalog)?,
            peer: own(home.identity()?.key(), home.domain_name()),
            stop: watch::Sender::new(false),
        })
    }
}

impl Connector for OwnConnector {
    fn connect(&self) -> Connecting<'_> {
        let lost = |e: &dyn std::fmt::Display| ConnectError::lost(e.to_string());
        Box::pin(async move {
            match self {
                OwnConnector::Running(socket) => {
                    let socket = SocketPath::of(socket).map_err(|e| lost(&e))?;
                    connect_unix(socket.path()).await.map_err(|e| lost(&e))
                }
                OwnConnector::Inside { server, peer, stop } => {
                    let (ours, theirs) = Connection::pair().map_err(|e| lost(&e))?;
                    let (server, peer, stop) = (Arc::clone(server), peer.clone(), stop.subscribe());
                    tokio::spawn(async move {
                        let served = async {
                            let call = IncomingCall::receive(theirs, stop).await?;
                            server.serve_connection(peer, call).await
                        };
                        if let Err(e) = served.await {
                            tracing::debug!("connection to this site's own images: {e}");
                        }
                    });
                    Ok(ours)
                }
            }
        })
    }
}
