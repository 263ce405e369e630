//! This site's images as devices: served to mounts of other sites, and of this site.

use std::path::PathBuf;
use std::sync::Arc;

use drover_core::{Digest, ImageName};
use drover_device::backend::ImageDevice;
use drover_image::{Stamp, VirtualDisk};
use drover_mount::client::{ConnectError, Connecting, Connector};
use drover_mount::server::{Base, Config, Images, Server};
use drover_net::service::IncomingCall;
use drover_net::{Code, Connection, Peer, PeerKey, Refusal, Rights, connect_unix};
use drover_store::{Catalog, ImageRecord, SiteCatalog};
use tokio::sync::watch;

use crate::error::{Result, bail};
use crate::home::Home;
use crate::remote::SocketPath;
use crate::{remote, site};

/// Threads that read, hash and compress for mounts.
const THREADS: usize = 4;

/// The server of this site's images for mounts. Call within a runtime.
///
/// # Errors
/// When its threads cannot be started.
pub fn site_server(home: &Home, catalog: &Arc<SiteCatalog>) -> Result<Arc<Server>> {
    Ok(Server::new(Config {
        images: Arc::new(SiteImages {
            catalog: Arc::clone(catalog),
            site: home.name(),
        }),
        state: home.mounted_dir(),
        threads: THREADS,
    })?)
}

/// The images of a catalog.
struct SiteImages {
    catalog: Arc<SiteCatalog>,
    site: String,
}

impl SiteImages {
    fn record(&self, name: &ImageName) -> Result<ImageRecord, Refusal> {
        let record = self.catalog.by_name(name);
        let record = record.map_err(|e| Refusal::new(Code::Unavailable, e.to_string()))?;
        let record = record.ok_or_else(|| {
            let text = format!("there is no image called {name}");
            Refusal::new(Code::NotFound, text)
        })?;
        if was_changed(&record) {
            // The digest no longer matches the file: mounts would reuse cached chunks of other bytes.
            let path = record.path.display();
            let text = format!(
                "{name}: its file {path} was changed after it had been indexed; run `drover index {path}` at {} again",
                self.site
            );
            return Err(Refusal::new(Code::Corrupt, text));
        }
        Ok(record)
    }
}

impl Images for SiteImages {
    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        let record = self.record(name)?;
        let unreadable =
            |e: &dyn std::fmt::Display| Refusal::new(Code::Unavailable, format!("{name}: {e}"));
        let disk = VirtualDisk::open(&record.path).map_err(|e| unreadable(&e))?;
        Ok(Base {
            device: Arc::new(ImageDevice::new(disk)),
            digest: record.digest,
        })
    }

    fn digest(&self, name: &ImageName) -> Result<Digest, Refusal> {
        Ok(self.record(name)?.digest)
    }
}

/// Whether an image's file changed since its digest was computed. (Its path and owner may have changed.)
fn was_changed(record: &ImageRecord) -> bool {
    let (Some(then), Ok(now)) = (record.stamp, Stamp::of_path(&record.path)) else {
        return false;
    };
    (then.size, then.mtime_ns) != (now.size, now.mtime_ns)
}

/// The name of this site in its own leases.
const OWN_NAME: &str = "the site itself";

/// The peer that stands for mounts of this site's images on this site.
pub fn own(key: PeerKey) -> Peer {
    Peer {
        key,
        name: OWN_NAME.into(),
        rights: Rights::OWNER,
    }
}

/// Connections to this site's own images, under the same leases as those of peers: to the running site, or within this
/// process when none runs at the start.
pub enum OwnConnector {
    /// A running site. If it restarts, connections wait for it.
    Running(PathBuf),
    /// No running site: this process serves the image to itself.
    Inside {
        /// The server.
        server: Arc<Server>,
        /// The identity of the caller.
        peer: Peer,
        /// Never set; dropping it would close the connections.
        stop: watch::Sender<bool>,
    },
}

impl OwnConnector {
    /// Creates a connector within this home.
    ///
    /// # Errors
    /// When another program holds the home and accepts no connections.
    pub async fn new(home: &Home) -> Result<OwnConnector> {
        if remote::Call::local(home).await?.is_some() {
            return Ok(OwnConnector::Running(home.socket()));
        }
        if home.used_by()?.is_some() {
            bail!("a site is starting in this directory; try again");
        }
        let catalog = Arc::new(site::open_catalog(home)?);
        Ok(OwnConnector::Inside {
            server: site_server(home, &catalog)?,
            peer: own(home.identity()?.key()),
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
                            tracing::debug!("a lane of this site's own: {e}");
                        }
                    });
                    Ok(ours)
                }
            }
        })
    }
}
