//! How a site is. `drover status --json` prints it as it is; its table and the metrics are made of it.

use drover_mount::server::MountCounts;
use drover_teleport::SiteStatus;
use serde::{Deserialize, Serialize};

use crate::mounts;

/// How a running site is. Moments are seconds since 1970.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// That one runs.
    pub running: bool,
    /// `site` or `teleporter`.
    pub duty: String,
    /// What it calls itself.
    pub name: String,
    /// Its key.
    pub key: String,
    /// Its directory.
    pub home: String,
    /// The program's version.
    pub version: String,
    /// Its process.
    pub process: u32,
    /// The addresses that its tickets name.
    pub addresses: Vec<String>,
    /// Since when it is ready.
    pub started_unix: i64,
    /// How long that is.
    pub uptime_seconds: i64,
    /// Images in the catalog.
    pub images: usize,
    /// Peers in the catalog.
    pub peers: usize,
    /// Connections that are open.
    pub connections_open: i64,
    /// Sessions that are open.
    pub sessions_open: i64,
    /// What the teleport layer says of itself; none for a teleporter.
    pub site: Option<SiteStatus>,
    /// What is served to mounts of other sites; none for a teleporter.
    pub served: Option<MountCounts>,
    /// Writers' leases, where they can be read.
    pub leases: Option<usize>,
    /// What is mounted here, by processes of their own.
    pub mounts: Vec<mounts::Status>,
}
