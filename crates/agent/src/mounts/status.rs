//! The status of a mount, for people, scripts and metrics.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The status of a mount.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// Its path, address or device.
    pub place: String,
    /// Its block devices.
    pub devices: Vec<PathBuf>,
    /// PID of its daemon; 0 when there is none.
    pub process: u32,
    /// Start time, seconds since 1970.
    pub since_unix: i64,
    /// Its state.
    pub state: MountState,
    /// Its disks.
    pub disks: Vec<DiskStatus>,
}

/// The state of a mount.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MountState {
    /// It is served by its daemon.
    #[default]
    Up,
    /// It fills its cache, and waits for the write lease.
    Standby,
    /// It is being unmounted.
    Ending,
    /// Its daemon is gone; mounting again at the same place resumes it, unmounting removes it.
    Dead,
    /// It was unmounted and its cache kept; as with `Dead`, mounting resumes it and unmounting removes it.
    Unmounted,
    /// Its daemon is running but does not reply.
    Silent,
    /// Its record is unusable; its cache still exists.
    Damaged,
}

/// The status of one disk.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Its target.
    pub image: String,
    /// `direct`, `managed`, `own`, `launched` (its own, still arriving), `file`, `directory` or `nbd`.
    pub mode: String,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Size in bytes.
    pub size: u64,
    /// Cached bytes, in whole chunks, including zeros; of an image that is still arriving, its share that is here.
    pub local: u64,
    /// Dirty bytes: not yet pushed to the other site.
    pub dirty: u64,
    /// Bytes of chunks being fetched.
    pub in_flight: u64,
    /// Bytes received on the link.
    pub received: u64,
    /// Bytes sent on the link.
    pub sent: u64,
    /// Fetch rate, in chunk bytes per second.
    pub rate: f64,
    /// Estimated seconds until the disk is complete.
    pub seconds_left: Option<f64>,
    /// The last epoch committed at the other site.
    pub epoch: u64,
    /// `up`, or why the other site or the NBD server is unreachable.
    pub link: String,
    /// Bytes of the push in progress.
    pub pushing: u64,
    /// Bytes of that push that have arrived and are not sent again.
    pub pushed: u64,
    /// Consecutive failed pushes.
    pub push_failures: u64,
    /// The error of the last failed push.
    pub push_error: Option<String>,
    /// Blocks of it that were recorded for a profile, while that goes on.
    #[serde(default)]
    pub profiled: Option<u64>,
    /// An error of background work, for users.
    pub trouble: Option<String>,
}

impl DiskStatus {
    /// Percentage of the disk that is cached.
    pub fn percent(&self) -> u64 {
        match self.size {
            0 => 100,
            size => (u128::from(self.local) * 100 / u128::from(size)) as u64,
        }
    }
}
