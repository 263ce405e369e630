//! The status of a site. `drover status --json` prints it as is; the table and the metrics are derived from it.

use drover_mount::server::MountCounts;
use drover_teleport::SiteStatus;
use serde::{Deserialize, Serialize};

use crate::disks::DiskStatus;
use crate::mounts;
use crate::replicas::ReplicaInfo;

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
    /// Images of all domains.
    pub images: usize,
    /// Peers in the catalog; 0 while it cannot be read, which the domains tell of.
    pub peers: usize,
    /// Open connections.
    pub connections_open: i64,
    /// Open sessions.
    pub sessions_open: i64,
    /// Its domains, the default one first; none for a teleporter.
    pub domains: Vec<DomainStatus>,
    /// Mounts of this home, each served by its own process.
    pub mounts: Vec<mounts::Status>,
    /// Disks in stores that it serves.
    pub disks: Vec<DiskStatus>,
}

/// The status of a domain. Counts are since the domain was opened.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct DomainStatus {
    /// Its name.
    pub name: String,
    /// Images in its catalog.
    pub images: usize,
    /// Unfinished transfers, also those in progress.
    pub unfinished: usize,
    /// Number of write leases; `None` when they cannot be read.
    pub leases: Option<usize>,
    /// What peers take of the site's disks: those that have taken something, and those with a quota.
    pub peers: Vec<Taken>,
    /// The replicas that it keeps, and those that it sends.
    pub replicas: Vec<ReplicaInfo>,
    /// Why the rest is not known.
    pub problem: Option<String>,
    /// Status of the teleport layer; `None` while the domain is closed.
    pub site: Option<SiteStatus>,
    /// Counts of what is served to mounts of other sites; `None` while the domain is closed.
    pub served: Option<MountCounts>,
}

impl DomainStatus {
    /// Memory of the matcher in bytes; `None` while the domain is closed, and with a teleporter on another host.
    pub fn matcher_bytes(&self) -> Option<u64> {
        let counts = &self.site.as_ref()?.matcher;
        let memory = counts.iter().find(|(name, _)| name == "memory")?;
        Some(memory.1)
    }
}

/// What a peer takes of a site's disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// Its name.
    pub peer: String,
    /// Bytes of its images, its unfinished transfers, and what its mounts have written.
    pub taken_bytes: u64,
    /// Bytes that it may take; `None` for no limit.
    pub quota_bytes: Option<u64>,
}
