//! The status of a site. `drover status --json` prints it as is; the table and the metrics are derived from it.

use drover_mount::server::MountCounts;
use drover_teleport::SiteStatus;
use serde::{Deserialize, Serialize};

use crate::mounts;

/// The status of a running site. Times are seconds since 1970.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// Whether a site runs: always true.
    pub running: bool,
    /// `site` or `teleporter`.
    pub duty: String,
    /// Its own name.
    pub name: String,
    /// Its key.
    pub key: String,
    /// Its home directory.
    pub home: String,
    /// The program's version.
    pub version: String,
    /// Its PID.
    pub process: u32,
    /// The addresses in its tickets.
    pub addresses: Vec<String>,
    /// When it became ready.
    pub started_unix: i64,
    /// Seconds since then.
    pub uptime_seconds: i64,
    /// Images in the catalog.
    pub images: usize,
    /// Peers in the catalog.
    pub peers: usize,
    /// Open connections.
    pub connections_open: i64,
    /// Open sessions.
    pub sessions_open: i64,
    /// Status of the teleport layer; `None` for a teleporter.
    pub site: Option<SiteStatus>,
    /// Counts of what is served to mounts of other sites; `None` for a teleporter.
    pub served: Option<MountCounts>,
    /// Number of write leases; `None` when they cannot be read.
    pub leases: Option<usize>,
    /// Mounts of this home, each served by its own process.
    pub mounts: Vec<mounts::Status>,
}
