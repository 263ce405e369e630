//! Where the disks of a machine that was handed over can be read, and what of them may be left here.
//!
//! It is recorded before the commitment, in `machines/.NAME.rest`.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, DeviceError};
use drover_device::backend::nbd::{NbdAddress, NbdOptions};
use drover_device::backend::{FileDevice, ImageDevice, NbdDevice};
use drover_hypervisor::machine::{Data, Medium};
use drover_storage::Envelope;
use drover_store::machine::Token;
use serde::{Deserialize, Serialize};

use crate::disks::DiskWriter;
use crate::error::MigrateError;
use crate::program::behind::{Answering, Behind};

/// How long a server of disks may take to start, and how often that is looked at.
const SERVER_LIMIT: Duration = Duration::from_secs(30);
const SERVER_POLL: Duration = Duration::from_millis(200);

/// The file of [`LeftDisks`].
pub(super) const FORMAT: Envelope = Envelope {
    magic: *b"DRVRREST",
    version: 1,
    max_bytes: 1 << 20,
};

/// Where the disks of a machine can be read that was handed over.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LeftDisks {
    /// The move.
    pub token: Token,
    /// They, in the machine's order.
    pub disks: Vec<LeftDisk>,
}

/// A disk, as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftDisk {
    pub size: u64,
    /// The hypervisor's export, as long as it has not ended.
    export: NbdAddress,
    data: LeftData,
}

/// Where the bytes are when the hypervisor has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum LeftData {
    /// A file of just these bytes.
    Raw(PathBuf),
    /// A file of another format.
    Image(PathBuf),
    Nbd(NbdAddress),
    /// Only the hypervisor can read them.
    Other,
}

impl LeftDisk {
    pub(super) fn new(medium: &Medium, export: NbdAddress) -> Self {
        let data = match &medium.data {
            // What a guest writes to a raw disk does not tell its format.
            Data::File(path) if path.is_absolute() && medium.format == "raw" => {
                LeftData::Raw(path.clone())
            }
            Data::File(path) if path.is_absolute() => LeftData::Image(path.clone()),
            Data::Nbd(address) if medium.format == "raw" => LeftData::Nbd(address.clone()),
            _ => LeftData::Other,
        };
        Self {
            size: medium.size,
            export,
            data,
        }
    }

    /// Opens it for reading. Blocks.
    pub(super) fn open(&self) -> Result<Arc<dyn BlockDevice>, MigrateError> {
        let nbd = |address: &NbdAddress| -> Result<Arc<dyn BlockDevice>, MigrateError> {
            let options = NbdOptions {
                read_only: true,
                ..NbdOptions::default()
            };
            Ok(Arc::new(NbdDevice::connect(address, &options)?))
        };
        let exported = nbd(&self.export);
        let of_file = |path: &Path, opened: Result<Arc<dyn BlockDevice>, DeviceError>| {
            opened.map_err(|error| MigrateError::Disk {
                disk: path.display().to_string(),
                error,
            })
        };
        let device = match (&self.data, exported) {
            (_, Ok(device)) => device,
            (LeftData::Raw(path), _) => {
                let file = File::open(path).map_err(DeviceError::from);
                let opened = file.and_then(|file| FileDevice::new(file, true));
                of_file(path, opened.map(|device| Arc::new(device) as _))?
            }
            (LeftData::Image(path), _) => {
                let opened = ImageDevice::open(path);
                of_file(path, opened.map(|device| Arc::new(device) as _))?
            }
            (LeftData::Nbd(address), _) => {
                let begun = Instant::now();
                loop {
                    match nbd(address) {
                        // The site that serves it may be starting.
                        Err(_) if begun.elapsed() < SERVER_LIMIT => std::thread::sleep(SERVER_POLL),
                        opened => break opened?,
                    }
                }
            }
            (LeftData::Other, Err(error)) => return Err(error),
        };
        if device.size() != self.size {
            return Err(MigrateError::Unsupported(format!(
                "a disk had {} bytes when its machine was handed over, and has {} now",
                self.size,
                device.size()
            )));
        }
        Ok(device)
    }
}

/// What is left of a machine, or may be.
pub(super) struct Rest {
    pub behind: Arc<Behind>,
    pub answering: Option<Answering>,
    pub pages: Option<DiskWriter>,
    pub disks: Vec<LeftDisk>,
    /// Whether something is.
    pub is_left: bool,
}

/// What was written to each disk that is to be sent.
pub type Round = Vec<(u32, Arc<dyn BlockDevice>, Vec<Range<u64>>)>;

/// The bytes of a round.
pub fn bytes_of(round: &Round) -> u64 {
    let ranges = round.iter().flat_map(|(.., ranges)| ranges);
    ranges.map(|range| range.end - range.start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn medium(format: &str, data: Data) -> Medium {
        Medium {
            node: "disk".into(),
            format: format.into(),
            size: 8192,
            read_only: false,
            data,
            backing: None,
            snapshots: 0,
            encrypted: false,
            bitmaps: Vec::new(),
        }
    }

    #[test]
    fn what_a_guest_wrote_to_a_raw_disk_does_not_tell_its_format() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let mut content = vec![7; 8192];
        content[..4].copy_from_slice(b"QFI\xfb");
        std::fs::write(&path, &content).unwrap();
        let export = || "nbd+unix:///x?socket=/none".parse::<NbdAddress>().unwrap();
        let disk = LeftDisk::new(&medium("raw", Data::File(path.clone())), export());
        let device = disk.open().unwrap();
        let mut found = vec![0; 8192];
        device.read(0, &mut found).unwrap();
        assert!(found == content);
        // One that has changed its size, or that nobody else can read.
        std::fs::write(&path, [0; 4096]).unwrap();
        assert!(disk.open().is_err());
        let other = LeftDisk::new(&medium("raw", Data::Other("rbd".into())), export());
        assert!(other.open().is_err());
    }
}
