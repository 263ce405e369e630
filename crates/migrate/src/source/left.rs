//! Where the disks of a machine that was handed over can be read, and what of them may be left here.
//!
//! It is recorded before the commitment, in `machines/.NAME.rest`.

use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::{BlockDevice, DeviceError};
use drover_device::backend::nbd::{NbdAddress, NbdOptions};
use drover_device::backend::{FileDevice, ImageDevice, NbdDevice};
use drover_hypervisor::machine::{Data, Medium};
use drover_storage::Envelope;
use drover_store::machine::Token;
use serde::{Deserialize, Serialize};

use super::report::Mounted;
use crate::disks::DiskWriter;
use crate::error::MigrateError;
use crate::program::behind::{Answering, Behind};

/// The file of [`LeftDisks`].
pub(super) const FORMAT: Envelope = Envelope {
    magic: *b"DRVRREST",
    version: 3,
    max_bytes: 1 << 20,
};

/// That the destination has said that it runs a machine whose move is not at its end: its token, in `machines/.NAME.taken`.
pub(super) const TAKEN: Envelope = Envelope {
    magic: *b"DRVRTAKN",
    version: 1,
    max_bytes: 64,
};

/// Where the disks of a machine can be read that was handed over.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LeftDisks {
    /// The move.
    pub token: Token,
    /// They, in the machine's order; none if nothing of them is left here.
    pub disks: Vec<LeftDisk>,
    /// The mounts of this site whose write leases are to be handed over.
    pub mounts: Vec<Mounted>,
}

/// A disk, as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftDisk {
    pub size: u64,
    /// The hypervisor's export, as long as it has not ended.
    export: NbdAddress,
    data: LeftData,
    /// The file of the bytes, if they are in one.
    stamp: Option<Stamp>,
}

/// What tells whether a file was written since, or is another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    boot: [u8; 16],
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(about: &Metadata) -> std::io::Result<Self> {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id")?;
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::hash(&boot).as_bytes()[..16]);
        Ok(Self {
            boot: id,
            device: about.dev(),
            inode: about.ino(),
            modified: (about.mtime(), about.mtime_nsec()),
            changed: (about.ctime(), about.ctime_nsec()),
        })
    }

    /// Whether a file that has this stamp now is the one that had `earlier`, and was not written since.
    fn continues(&self, earlier: &Self) -> bool {
        // A file system may have another number after a restart of the computer, and after a power cut older times.
        let is_same = self.inode == earlier.inode
            && (self.device == earlier.device || self.boot != earlier.boot);
        is_same && self.modified <= earlier.modified && self.changed <= earlier.changed
    }
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
            stamp: None,
        }
    }

    pub(super) fn file(&self) -> Option<&Path> {
        match &self.data {
            LeftData::Raw(path) | LeftData::Image(path) => Some(path),
            LeftData::Nbd(_) | LeftData::Other => None,
        }
    }

    /// Notes how its file is now that nobody writes to it any more. Blocks.
    pub(super) fn stamp(&mut self) {
        let about = self.file().and_then(|path| std::fs::metadata(path).ok());
        // That a block device was not written its times do not tell.
        let about = about.filter(Metadata::is_file);
        self.stamp = about.and_then(|about| Stamp::of(&about).ok());
    }

    /// Checks that its file is as it was.
    fn check_file(&self, path: &Path) -> Result<(), MigrateError> {
        let wrong = |what: &str| {
            Err(MigrateError::Unsupported(format!(
                "{} {what}: put it back as it was then, and add --trust-files",
                path.display()
            )))
        };
        let Some(earlier) = &self.stamp else {
            return wrong(
                "is no file of which is known whether it was written since the machine was handed over",
            );
        };
        let now = std::fs::metadata(path).and_then(|about| Stamp::of(&about));
        match now {
            Ok(now) if now.continues(earlier) => Ok(()),
            Ok(_) => wrong("was written, or replaced, since the machine was handed over"),
            Err(error) => Err(MigrateError::Disk {
                disk: path.display().to_string(),
                error: error.into(),
            }),
        }
    }

    /// Opens it for reading. Blocks. A file that was written, or replaced, since it was stamped is refused, unless files are to be
    /// trusted.
    ///
    /// # Errors
    /// When it cannot be read now; [`is_away`] of one whose server does not run.
    pub(super) fn open(&self, trust_files: bool) -> Result<Arc<dyn BlockDevice>, MigrateError> {
        let nbd = |address: &NbdAddress| -> Result<Arc<dyn BlockDevice>, MigrateError> {
            let options = NbdOptions {
                read_only: true,
                ..NbdOptions::default()
            };
            Ok(Arc::new(NbdDevice::connect(address, &options)?))
        };
        let exported = nbd(&self.export);
        if let (Err(_), Some(path), false) = (&exported, self.file(), trust_files) {
            self.check_file(path)?;
        }
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
            (LeftData::Nbd(address), _) => nbd(address)?,
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

/// Whether a disk cannot be read because its server does not run: the site that serves it may be starting.
pub(super) fn is_away(error: &MigrateError) -> bool {
    matches!(error, MigrateError::Nbd(e) if e.is_transient())
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
    use std::time::Duration;

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
        let raw = || LeftDisk::new(&medium("raw", Data::File(path.clone())), export());
        let mut disk = raw();
        disk.stamp();
        let device = disk.open(false).unwrap();
        let mut found = vec![0; 8192];
        device.read(0, &mut found).unwrap();
        assert!(found == content);
        // One that has changed its size, or that nobody else can read.
        std::fs::write(&path, [0; 4096]).unwrap();
        assert!(disk.open(true).is_err());
        let other = LeftDisk::new(&medium("raw", Data::Other("rbd".into())), export());
        assert!(other.open(true).is_err());
    }

    fn export() -> NbdAddress {
        "nbd+unix:///x?socket=/none".parse().unwrap()
    }

    #[test]
    fn a_file_that_was_written_or_replaced_since_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [1; 8192]).unwrap();
        let stamped = || {
            let mut disk = LeftDisk::new(&medium("raw", Data::File(path.clone())), export());
            // Its times are those of a clock that ticks every few milliseconds.
            std::thread::sleep(Duration::from_millis(30));
            disk.stamp();
            disk
        };
        let refused = |disk: &LeftDisk| {
            let error = disk.open(false).map(drop).unwrap_err().to_string();
            assert!(error.contains("--trust-files"), "{error}");
            disk.open(true).unwrap();
        };
        let disk = stamped();
        disk.open(false).unwrap();
        std::thread::sleep(Duration::from_millis(30));
        let before = std::fs::metadata(&path).unwrap().modified().unwrap();
        std::fs::write(&path, [2; 8192]).unwrap();
        refused(&disk);
        // As `rsync --times` does.
        let file = File::options().write(true).open(&path).unwrap();
        file.set_modified(before).unwrap();
        refused(&disk);

        let disk = stamped();
        disk.open(false).unwrap();
        let aside = directory.path().join("aside");
        std::fs::copy(&path, &aside).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        refused(&disk);
        std::fs::remove_file(&path).unwrap();
        assert!(disk.open(false).is_err());
        // Without a stamp, as of a block device, nothing is known.
        std::fs::write(&path, [1; 8192]).unwrap();
        refused(&LeftDisk::new(
            &medium("raw", Data::File(path.clone())),
            export(),
        ));
    }

    #[test]
    fn only_a_server_that_does_not_run_is_waited_for() {
        let away = LeftDisk::new(&medium("raw", Data::Nbd(export())), export());
        assert!(is_away(&away.open(false).map(drop).unwrap_err()));
        // Nobody brings it back.
        let gone = Data::File("/nowhere/disk".into());
        let gone = LeftDisk::new(&medium("raw", gone), export());
        assert!(!is_away(&gone.open(true).map(drop).unwrap_err()));
    }

    #[test]
    fn a_restart_of_the_computer_is_no_change() {
        let stamp = Stamp {
            boot: [1; 16],
            device: 7,
            inode: 8,
            modified: (100, 5),
            changed: (100, 6),
        };
        let with = |change: &dyn Fn(&mut Stamp)| {
            let mut now = stamp.clone();
            change(&mut now);
            now.continues(&stamp)
        };
        assert!(with(&|_| {}));
        assert!(with(&|now| (now.boot, now.device) = ([2; 16], 9)));
        // What a power cut left of it.
        assert!(with(&|now| (now.modified, now.changed) = ((99, 9), (99, 9))));
        assert!(!with(&|now| now.device = 9));
        assert!(!with(&|now| (now.boot, now.inode) = ([2; 16], 9)));
        assert!(!with(&|now| now.modified = (100, 6)));
        assert!(!with(&|now| now.changed = (101, 0)));
    }
}
