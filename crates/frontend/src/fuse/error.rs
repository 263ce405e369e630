//! Errors of file mounts, and the processes that keep one busy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A user of a mount or a loop device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum User {
    /// A process.
    Process {
        /// Its PID.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// A block device built on it: a loop device, or one of LVM, encryption, RAID.
    Device(PathBuf),
    /// A file system mounted from it.
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

/// A list of users, for an error message.
pub(crate) fn listed(users: &[User]) -> String {
    match users {
        [] => "a process that is not visible here".into(),
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
    /// Not a valid file name.
    #[error("{0:?} cannot be the name of a file")]
    Name(String),
    /// Files are byte-granular, this device is not.
    #[error("a device of units of {0} bytes cannot be a file: put a chunked stage on top of it")]
    Alignment(u32),
    /// The device exceeds the maximum file size.
    #[error("a device of {0} bytes is larger than a file can be")]
    Size(u64),
    /// The kernel has no FUSE.
    #[error("this machine has no FUSE: /dev/fuse: {0} (modprobe fuse)")]
    Missing(io::Error),
    /// There is a mount already.
    #[error("{} is a mount point already: unmount it first", at.display())]
    Mounted {
        /// The mount point.
        at: PathBuf,
    },
    /// There is a mount whose server is gone.
    #[error("{} is a mount whose server is gone: clear it first (drover unmount)", at.display())]
    Stale {
        /// The mount point.
        at: PathBuf,
    },
    /// The kernel refused.
    #[error("cannot mount at {}: {source}", at.display())]
    Mount {
        /// The mount point.
        at: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The setuid helper refused.
    #[error("cannot mount at {}: {said}", at.display())]
    Helper {
        /// The mount point.
        at: PathBuf,
        /// Its message.
        said: String,
    },
    /// It is in use.
    #[error("{} is in use by {}: end these programs first", at.display(), listed(users))]
    Busy {
        /// The mount point.
        at: PathBuf,
        /// The users found.
        users: Vec<User>,
    },
    /// The device did not answer in time, and the connection was aborted: it is unmounted, and writes in flight have
    /// failed.
    #[error("{} was cut off: its device did not answer for {waited:?}", at.display())]
    CutOff {
        /// The mount point.
        at: PathBuf,
        /// How long the device did not answer.
        waited: Duration,
    },
    /// The kernel refused the unmount.
    #[error("cannot unmount {}: {source}", at.display())]
    Unmount {
        /// The mount point.
        at: PathBuf,
        /// The cause.
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
