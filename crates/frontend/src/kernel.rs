//! What the kernel's two drivers for block devices in user space, [`kernel_nbd`](crate::kernel_nbd) and
//! [`ublk`](crate::ublk), have in common: loading a module, waiting with a deadline, checking for users of a device.

use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;

pub use crate::fuse::mounts::mounted_from;
use crate::loopdev::users_of;
use crate::retry::{may_pass, retry};

/// How long a driver may take to configure, start or stop a device.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);
/// How long writing back a device's page cache may take before it is detached.
const FLUSH_DEADLINE: Duration = Duration::from_secs(600);
/// Polling interval for something that is about to change; short, since readiness is a matter of milliseconds
/// (r3map §1.4.4.4 found polling to be faster than udev).
const POLL: Duration = Duration::from_millis(1);
/// For `modprobe`, which reads a few files.
const MODPROBE_DEADLINE: Duration = Duration::from_secs(20);

/// Polls until `done` is true; false if it was not by the deadline.
pub(crate) fn wait_until(deadline: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + deadline;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(POLL);
    }
}

/// Runs `work`, which may block in the kernel for long, on a thread of its own and waits until the deadline; `None` if
/// it has not returned by then. The thread is then abandoned, since it cannot be interrupted.
pub(crate) fn within<T: Send + 'static>(
    deadline: Duration,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::Builder::new().name(name.into()).spawn(move || {
        // After the deadline there is no receiver.
        let _ = sender.send(work());
    })?;
    Ok(receiver.recv_timeout(deadline).ok())
}

/// Loads a module if `present` is false and this process may; returns whether it is present then.
pub(crate) fn load_module(name: &'static str, present: impl Fn() -> bool) -> bool {
    if present() {
        return true;
    }
    for program in ["/sbin/modprobe", "/usr/sbin/modprobe"] {
        if Path::new(program).exists() {
            modprobe(program, name);
            break;
        }
    }
    // The nodes in /dev appear shortly after the module is loaded.
    wait_until(Duration::from_millis(200), present)
}

fn modprobe(program: &str, name: &str) {
    let child = Command::new(program)
        .args(["-q", name])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    match child {
        Ok(mut child) => {
            if !wait_until(MODPROBE_DEADLINE, || !matches!(child.try_wait(), Ok(None))) {
                // The caller checks again anyway, so failures do not matter.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        Err(error) => tracing::debug!(program, name, %error, "modprobe does not run"),
    }
}

/// Flushes a device's page cache and checks that nothing has it open exclusively (a mount, an array, swap). A process
/// that does so briefly, like mkfs, gets two seconds.
///
/// # Errors
/// [`Error::Busy`], [`Error::Flush`], [`Error::Deadline`].
pub(crate) fn settle(path: &Path) -> Result<(), Error> {
    let own = path.to_path_buf();
    let settled = within(FLUSH_DEADLINE, "device-flush", move || {
        let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or(0);
        let mut options = std::fs::File::options();
        options.read(true).custom_flags(exclusive);
        let may_pass = |error: &io::Error| is_busy(error) && may_pass(&users_of(&own));
        retry(|| options.open(&own), may_pass)?.sync_all()
    })
    .map_err(|error| Error::kernel("start a thread for", path, error))?;
    match settled {
        None => Err(Error::deadline("flush", path)),
        Some(Ok(())) => Ok(()),
        Some(Err(error)) if is_busy(&error) => Err(Error::Busy {
            path: path.into(),
            users: listed(&mounted_from(path)),
        }),
        Some(Err(error)) => Err(Error::Flush {
            path: path.into(),
            error,
        }),
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

/// Mount points, formatted for [`Error::Busy`].
fn listed(points: &[PathBuf]) -> String {
    if points.is_empty() {
        return String::new();
    }
    let points: Vec<String> = points.iter().map(|p| p.display().to_string()).collect();
    format!(" (mounted at {})", points.join(", "))
}

/// Whether a device that is in use is detached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detach {
    /// Flush first; a device that is mounted, or that cannot be flushed, stays attached.
    #[default]
    IfUnused,
    /// Detach at once. Unwritten data is lost, and users of the device see I/O errors.
    Force,
}

/// Why a device was not attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no such driver and its module cannot be loaded.
    #[error(
        "this kernel has no {driver} driver: load it (modprobe {module}), or use another kind of device"
    )]
    Missing {
        /// The driver.
        driver: &'static str,
        /// The module it comes in.
        module: &'static str,
    },
    /// The driver is too old, or lacks a needed feature; the text says which, and the way out.
    #[error("{0}")]
    Unsupported(&'static str),
    /// No device is free.
    #[error("no free /dev/nbdN: detach one, or load nbd with a larger nbds_max")]
    NoneFree,
    /// Invalid or contradictory options.
    #[error("cannot attach: {0}")]
    Options(String),
    /// The server refused the device's connections.
    #[error(transparent)]
    Server(#[from] crate::nbd::NbdError),
    /// Not the path of a device of this driver.
    #[error("{path} is not {expected}")]
    WrongPath {
        /// The path given.
        path: PathBuf,
        /// What it must be.
        expected: &'static str,
    },
    /// The device is in use.
    #[error("{path} is in use{users}: unmount it first")]
    Busy {
        /// The device.
        path: PathBuf,
        /// Where it is mounted, as far as can be seen: empty, or ` (mounted at ...)`.
        users: String,
    },
    /// A device with that number is already attached.
    #[error("{path} is already attached: choose another, or none for the first free one")]
    Taken {
        /// The device.
        path: PathBuf,
    },
    /// The page cache of the device could not be written.
    #[error("cannot flush {path}: {error}; detach it by force to discard what was not written")]
    Flush {
        /// The device.
        path: PathBuf,
        /// Error of the flush.
        error: io::Error,
    },
    /// Nothing is attached there.
    #[error("nothing is attached at {path}")]
    NotAttached {
        /// The device.
        path: PathBuf,
    },
    /// Not root.
    #[error("attaching and detaching {path} needs root (CAP_SYS_ADMIN)")]
    NotPermitted {
        /// The device.
        path: PathBuf,
    },
    /// The kernel did not complete it in time.
    #[error("{path} did not {what} in time")]
    Deadline {
        /// What it did not complete.
        what: &'static str,
        /// The device.
        path: PathBuf,
    },
    /// The kernel refused.
    #[error("cannot {what} {path}: {error}")]
    Kernel {
        /// What was being done.
        what: &'static str,
        /// The device.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

impl Error {
    pub(crate) fn kernel(what: &'static str, path: &Path, error: io::Error) -> Self {
        let path = path.to_path_buf();
        match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::PERM | Errno::ACCESS) => Self::NotPermitted { path },
            Some(Errno::TIMEDOUT) => Self::Deadline { what, path },
            _ => Self::Kernel { what, path, error },
        }
    }

    pub(crate) fn deadline(what: &'static str, path: &Path) -> Self {
        Self::Deadline {
            what,
            path: path.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_ends_a_wait_and_a_call() {
        let begin = Instant::now();
        assert!(!wait_until(Duration::from_millis(20), || false));
        assert!(begin.elapsed() >= Duration::from_millis(20));
        let mut looks = 0;
        assert!(wait_until(Duration::from_secs(60), || {
            looks += 1;
            looks == 3
        }));
        assert_eq!(looks, 3);
        let late = within(Duration::from_millis(10), "late", || {
            thread::sleep(Duration::from_millis(200));
        });
        assert!(late.unwrap().is_none());
        let soon = within(Duration::from_secs(60), "soon", || 5);
        assert_eq!(soon.unwrap(), Some(5));
    }

    #[test]
    fn a_busy_device_names_its_mount_points() {
        assert_eq!(listed(&[]), "");
        let error = Error::Busy {
            path: "/dev/nbd0".into(),
            users: listed(&["/mnt".into(), "/srv/a b".into()]),
        };
        assert_eq!(
            error.to_string(),
            "/dev/nbd0 is in use (mounted at /mnt, /srv/a b): unmount it first"
        );
    }

    #[test]
    fn a_module_that_does_not_exist_is_not_there_after_loading() {
        assert!(!load_module("drover_no_such_module", || false));
        assert!(load_module("drover_no_such_module", || true));
    }

    #[test]
    fn who_has_a_device_for_a_moment_is_waited_for() {
        use crate::loopdev::{LoopDevice, Options};
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let mut disk = match LoopDevice::attach(file.path(), Options::default()) {
            Ok(disk) => disk,
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap();
        let mut options = std::fs::File::options();
        let held = options.read(true).custom_flags(exclusive).open(disk.path());
        let held = held.unwrap();
        let holder = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(held);
        });
        settle(disk.path()).unwrap();
        holder.join().unwrap();
        let held = options.open(disk.path()).unwrap();
        let error = settle(disk.path()).unwrap_err();
        assert!(matches!(error, Error::Busy { .. }), "{error}");
        drop(held);
        disk.detach().unwrap();
    }

    #[test]
    fn an_unused_file_is_settled() {
        let file = tempfile::NamedTempFile::new().unwrap();
        settle(file.path()).unwrap();
        let error = settle(Path::new("/nonexistent/device")).unwrap_err();
        assert!(error.to_string().contains("by force"), "{error}");
    }
}
