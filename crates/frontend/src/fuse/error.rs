//! Errors of file mounts, and the processes that keep one busy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Who keeps a mount or a loop device busy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum User {
    /// A process.
    Process {
        /// Its number.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// A block device that is made of it: a loop device, or one of LVM, encryption, RAID.
    Device(PathBuf),
    /// A file system that is mounted from it.
    Mounted(PathBuf),
}

impl User {
    pub(crate) fn process(pid: u32) -> Self {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        Self::Process {
            pid,
            name: name.trim().to_owned(),
        }
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, name } => write!(f, "{name} (process {pid})"),
            Self::Device(device) => write!(f, "{}", device.display()),
            Self::Mounted(point) => write!(f, "the file system at {}", point.display()),
        }
    }
}

/// Users in a row, for an error.
pub(crate) fn listed(users: &[User]) -> String {
    match users {
        [] => "somebody who cannot be seen from here".into(),
        users => users
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", "),
    }
}

/// Why a device could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// A name that cannot be a file's.
    #[error("{0:?} cannot be the name of a file")]
    Name(String),
    /// A file has bytes, this device has not.
    #[error("a device of units of {0} bytes cannot be a file: put a chunked stage on top of it")]
    Alignment(u32),
    /// A file cannot be as large.
    #[error("a device of {0} bytes is larger than a file can be")]
    Size(u64),
    /// The kernel has no FUSE.
    #[error("this machine has no FUSE: /dev/fuse: {0} (modprobe fuse)")]
    Missing(io::Error),
    /// A mount is in place there.
    #[error("{} is a mount point already: unmount it first", at.display())]
    Mounted {
        /// Where.
        at: PathBuf,
    },
    /// A mount whose server is gone is in place there.
    #[error("{} is a mount whose server is gone: clear it first (drover unmount)", at.display())]
    Stale {
        /// Where.
        at: PathBuf,
    },
    /// The kernel refused.
    #[error("cannot mount at {}: {source}", at.display())]
    Mount {
        /// Where.
        at: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The helper that mounts for users refused.
    #[error("cannot mount at {}: {said}", at.display())]
    Helper {
        /// Where.
        at: PathBuf,
        /// What it said.
        said: String,
    },
    /// It is in use.
    #[error("{} is in use by {}: end these programs, or unmount lazily", at.display(), listed(users))]
    Busy {
        /// Where.
        at: PathBuf,
        /// By whom, as far as can be seen.
        users: Vec<User>,
    },
    /// The device did not answer in time, and the connection was cut: it is unmounted, and writes under way have failed.
    #[error("{} was cut off: its device did not answer for {waited:?}", at.display())]
    CutOff {
        /// Where.
        at: PathBuf,
        /// For how long.
        waited: Duration,
    },
    /// The kernel does not unmount it.
    #[error("cannot unmount {}: {source}", at.display())]
    Unmount {
        /// Where.
        at: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl FuseError {
    pub(super) fn mounting(at: &Path, source: io::Error) -> Self {
        let no_fuse = [libc::ENODEV, libc::ENXIO];
        match source.raw_os_error() {
            Some(number) if no_fuse.contains(&number) => Self::Missing(source),
            Some(libc::ENOENT) if !Path::new("/dev/fuse").exists() => Self::Missing(source),
            _ => Self::Mount {
                at: at.to_owned(),
                source,
            },
        }
    }

    pub(super) fn unmounting(at: &Path, source: io::Error) -> Self {
        Self::Unmount {
            at: at.to_owned(),
            source,
        }
    }
}
