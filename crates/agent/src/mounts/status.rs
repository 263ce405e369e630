//! How a mount is, for people, scripts and metrics.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How a mount is.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub place: String,
    /// Devices that belong to it.
    pub devices: Vec<PathBuf>,
    /// The process that keeps it; 0 when none does.
    pub process: u32,
    /// Since when, seconds since 1970.
    pub since_unix: i64,
    /// What it is doing.
    pub state: State,
    /// Its disks.
    pub disks: Vec<DiskStatus>,
}

/// What a mount is doing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It can be used.
    #[default]
    Up,
    /// It is ending.
    Ending,
    /// Its process is gone; mounting there again takes it up, unmounting clears it away.
    Dead,
    /// It was ended and its cache kept; the same can be done.
    Unmounted,
    /// Its process is there and does not answer.
    Silent,
    /// What is written down of it cannot be used; its cache is there.
    Damaged,
}

/// How one disk is.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DiskStatus {
    /// What it shows.
    pub image: String,
    /// `direct`, `managed` or `own`.
    pub mode: String,
    /// Takes no writes.
    pub read_only: bool,
    /// Bytes of the disk.
    pub size: u64,
    /// Chunks' bytes that are here, zeros included.
    pub local: u64,
    /// Bytes written here that the other site does not have.
    pub dirty: u64,
    /// Chunks' bytes under way.
    pub in_flight: u64,
    /// Bytes that arrived on the link.
    pub received: u64,
    /// Bytes that left on the link.
    pub sent: u64,
    /// Chunks' bytes arriving in a second.
    pub rate: f64,
    /// Seconds until all is here, as it goes now.
    pub seconds_left: Option<f64>,
    /// The last state of the disk that the other site has.
    pub epoch: u64,
    /// `up`, or why the other site cannot be reached.
    pub link: String,
    /// Bytes of the push that is under way.
    pub pushing: u64,
    /// Those of them that have arrived: they are not sent again.
    pub pushed: u64,
    /// How often pushes failed since one succeeded.
    pub push_failures: u64,
    /// Why the last of them did.
    pub push_error: Option<String>,
    /// What went wrong in the background, for a person.
    pub trouble: Option<String>,
}

impl DiskStatus {
    /// How much is here, in hundredths of the disk.
    pub fn percent(&self) -> u64 {
        match self.size {
            0 => 100,
            size => (u128::from(self.local) * 100 / u128::from(size)) as u64,
        }
    }
}
