//! State shared by all connections of a serving process.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use drover_net::{Identity, PeerKey, Shares};
use drover_store::SiteCatalog;
use tokio::sync::watch;

use super::domains::{Domain, Domains, InUse};
use super::matchers::Matchers;
use super::owners::Sockets;
use super::strangers::StrangerLog;
use super::trust::Trust;
use crate::error::Result;
use crate::home::Home;
use crate::metrics::Metrics;
use crate::mounts;
use crate::status::Status;
use crate::text::{clean, now_unix};

/// Timeout for a mount daemon's status when collecting metrics.
const MOUNT_LIMIT: Duration = Duration::from_secs(1);

/// The role of this process.
pub enum Duty {
    /// A site: receives images, and serves them to mounts. Its default domain.
    Site(Arc<Domain>),
    /// A standalone teleporter: matches for other sites.
    Teleporter(Arc<Matchers>),
}

impl Duty {
    /// `site` or `teleporter`.
    pub fn name(&self) -> &'static str {
        match self {
            Duty::Site(_) => "site",
            Duty::Teleporter(_) => "teleporter",
        }
    }
}

/// State shared by all connections of this process.
pub struct Server {
    /// Its home.
    pub home: Home,
    /// Its own name.
    pub name: String,
    /// Its key.
    pub identity: Identity,
    /// Images and peers.
    pub catalog: Arc<SiteCatalog>,
    /// Its role.
    pub duty: Duty,
    /// Counters since the start.
    pub metrics: Arc<Metrics>,
    /// Places for the connections of known peers.
    pub places: Shares<PeerKey>,
    /// Log lines about the others.
    pub strangers: StrangerLog,
    /// The calls of peers.
    pub trust: Trust,
    /// The domains beside the default one.
    pub domains: Domains,
    /// Their Unix sockets.
    pub sockets: Sockets,
    /// Places for long jobs.
    pub jobs: Shares<PeerKey>,
    /// The addresses to put into its tickets.
    pub addresses: Vec<String>,
    /// Held while a replica's record is changed.
    pub replicas: Arc<tokio::sync::Mutex<()>>,
    /// When it became ready, seconds since 1970.
    pub started_unix: i64,
    /// True once it is to stop.
    pub stop: watch::Receiver<bool>,
}

/// Handles the requests common to sites and teleporters.
pub struct Common(pub Arc<Server>);

/// Handles the requests to a domain of a site.
#[derive(Clone)]
pub struct OfSite {
    pub server: Arc<Server>,
    pub domain: Arc<InUse>,
}

impl Server {
    /// The metrics in OpenMetrics text.
    pub async fn metrics_text(self: &Arc<Self>) -> Result<String> {
        let failed = self.home.audit().failed();
        self.metrics.audit_failed.store(failed, Relaxed);
        Ok(self.metrics.render(self.status().await?))
    }

    /// The status of this process.
    pub async fn status(self: &Arc<Self>) -> Result<Status> {
        let server = Arc::clone(self);
        let mounts = mounts::all(&self.home, MOUNT_LIMIT).await?;
        tokio::task::spawn_blocking(move || server.look(mounts)).await?
    }

    fn look(&self, mounts: Vec<mounts::Status>) -> Result<Status> {
        let domains = self.look_at_domains()?;
        Ok(Status {
            running: true,
            duty: self.duty.name().into(),
            name: self.name.clone(),
            key: self.identity.key().to_string(),
            home: self.home.dir().display().to_string(),
            version: env!("CARGO_PKG_VERSION").into(),
            process: std::process::id(),
            addresses: self.addresses.clone(),
            started_unix: self.started_unix,
            uptime_seconds: (now_unix() - self.started_unix).max(0),
            images: domains.iter().map(|domain| domain.images).sum(),
            peers: self.catalog.peers().map_or(0, |peers| peers.len()),
            connections_open: self.metrics.connections_open.load(Relaxed),
            sessions_open: self.metrics.sessions_open.load(Relaxed),
            domains,
            mounts,
            disks: match &self.duty {
                Duty::Site(domain) => domain.stores.status(),
                Duty::Teleporter(_) => Vec::new(),
            },
        })
    }
}

/// Quotes text from a peer for the log.
pub fn quoted(text: &str) -> String {
    clean(text).chars().take(200).collect()
}
