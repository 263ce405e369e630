//! This site's images as block devices, for mounts of other sites and of this site.

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
            // The digest no longer matches the file: mounts would reuse cached chunks of the former content.
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

/// Whether the content of an image's file changed since its digest was computed, by size and modification time.
fn was_changed(record: &ImageRecord) -> bool {
    let (Some(then), Ok(now)) = (record.stamp, Stamp::of_path(&record.path)) else {
        return false;
    };
    (then.size, then.mtime_ns) != (now.size, now.mtime_ns)
}

/// The peer name of this site in leases of its own images.
const OWN_NAME: &str = "the site itself";

/// The peer as which this site mounts its own images.
pub fn own(key: PeerKey) -> Peer {
    Peer {
        key,
        name: OWN_NAME.into(),
        rights: Rights::OWNER,
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
    /// Creates a connector to the images of this home.
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
                            tracing::debug!("connection to this site's own images: {e}");
                        }
                    });
                    Ok(ours)
                }
            }
        })
    }
}
