//! What every conversation of a site's process shares.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use drover_mount::server::{Leased, Server as DeviceServer};
use drover_net::Identity;
use drover_store::{Catalog, SiteCatalog};
use drover_teleport::Site;
use tokio::sync::{Semaphore, watch};

use super::admission::Admission;
use super::matchers::Matchers;
use crate::error::Result;
use crate::home::Home;
use crate::metrics::Metrics;
use crate::mounts;
use crate::status::Status;
use crate::text::{clean, now_unix};

/// How long the process of a mount may take to say how it is for the metrics.
const MOUNT_LIMIT: Duration = Duration::from_secs(1);

/// What this process does for its peers.
pub enum Duty {
    /// Takes images, and shows them to mounts.
    Site(Arc<Site>, Arc<DeviceServer>),
    /// Matches for other sites.
    Teleporter(Arc<Matchers>),
}

impl Duty {
    /// `site` or `teleporter`.
    pub fn name(&self) -> &'static str {
        match self {
            Duty::Site(..) => "site",
            Duty::Teleporter(_) => "teleporter",
        }
    }
}

/// What every conversation of this process shares.
pub struct Server {
    /// Its directory.
    pub home: Home,
    /// What it calls itself.
    pub name: String,
    /// Its key.
    pub identity: Identity,
    /// Images and peers.
    pub catalog: Arc<SiteCatalog>,
    /// What it does for peers.
    pub duty: Duty,
    /// Counters since the start.
    pub metrics: Arc<Metrics>,
    /// How many may be connected.
    pub admission: Admission,
    /// Permits for long jobs.
    pub jobs: Arc<Semaphore>,
    /// The addresses that its tickets name.
    pub addresses: Vec<String>,
    /// Since when it is ready, seconds since 1970.
    pub started_unix: i64,
    /// True once it is to stop.
    pub stop: watch::Receiver<bool>,
}

/// Answers what every process of a home is asked.
pub struct Common(pub Arc<Server>);

/// Answers what a site is asked.
#[derive(Clone)]
pub struct OfSite {
    pub server: Arc<Server>,
    pub site: Arc<Site>,
    pub devices: Arc<DeviceServer>,
}

impl Server {
    /// The metrics as Prometheus reads them.
    pub async fn metrics_text(self: &Arc<Self>) -> Result<String> {
        Ok(self.metrics.render(self.status().await?))
    }

    /// How this process is.
    pub async fn status(self: &Arc<Self>) -> Result<Status> {
        let server = Arc::clone(self);
        let mounts = mounts::all(&self.home, MOUNT_LIMIT).await?;
        tokio::task::spawn_blocking(move || server.look(mounts)).await?
    }

    fn look(&self, mounts: Vec<mounts::Status>) -> Result<Status> {
        let (site, served, leases) = match &self.duty {
            Duty::Site(site, devices) => {
                let held = |l: &&Leased| l.holder.is_some();
                // A lease that cannot be read is no reason to say nothing of all else.
                let leases = devices.leases().inspect_err(|e| tracing::warn!("{e}"));
                let leases = leases.ok().map(|all| all.iter().filter(held).count());
                (Some(site.status()), Some(devices.counted()), leases)
            }
            Duty::Teleporter(_) => (None, None, None),
        };
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
            images: self.catalog.images()?.len(),
            peers: self.catalog.peers()?.len(),
            connections_open: self.metrics.connections_open.load(Relaxed),
            sessions_open: self.metrics.sessions_open.load(Relaxed),
            site,
            served,
            leases,
            mounts,
        })
    }
}

/// A peer's own words for the log.
pub fn quoted(text: &str) -> String {
    clean(text).chars().take(200).collect()
}
