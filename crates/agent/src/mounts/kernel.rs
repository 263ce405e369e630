//! Kernel block devices served from user space: choosing the driver, attaching, and cleanup when the serving process
//! dies.
//!
//! A ublk device disappears with its process. A device of the NBD client stays, and requests in flight block until
//! their timeout, which is long: see [`request_timeout`]. So a [`Guard`], a separate process, detaches the device when
//! the daemon is gone, and its users get I/O errors at once. The device is never reconnected to a new server: writes
//! that were acknowledged but not flushed may be lost with the process, and a file system must not continue as if they
//! were not.

use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use drover_core::BlockDevice;
use drover_frontend::kernel_nbd::{self, Detach};
use drover_frontend::{nbd, ublk};

use super::record::{Driver, Record};
use crate::error::{Context, Error, Result, bail};

/// Connections between the kernel's NBD client and the server in this process.
const CONNECTIONS: usize = 2;

/// Margin of the request timeout beyond the time that a request may wait for the link.
const MARGIN: Duration = Duration::from_secs(60);

/// Upper bound on the request timeout: it must fit in the kernel's tick counter.
const MAX_TIMEOUT: Duration = Duration::from_secs(1_000_000);

/// Chooses the driver: the requested one, else that of `device`, else the first that the kernel has.
///
/// # Errors
/// When a device of another driver is requested, or the kernel has neither.
pub fn choose(wanted: Option<Driver>, device: Option<&Path>) -> Result<Driver> {
    let named = device.map(driver_of).transpose()?;
    match (wanted, named) {
        (Some(wanted), Some(named)) if wanted != named => Err(Error::usage(
            "the requested device is a device of the other driver; omit the driver or the device",
        )),
        (Some(driver), _) | (None, Some(driver)) => Ok(driver),
        (None, None) => {
            let Err(without_ublk) = ublk::check_available() else {
                return Ok(Driver::Ublk);
            };
            if kernel_nbd::is_available() {
                return Ok(Driver::Nbd);
            }
            match without_ublk {
                ublk::Error::Missing { .. } => bail!(
                    "this kernel has neither ublk nor nbd: as root, modprobe ublk_drv (or nbd), or mount the image with a loop device, which needs neither"
                ),
                other => bail!("this kernel has no nbd (modprobe nbd), and {other}"),
            }
        }
    }
}

/// The driver of `/dev/nbdN` or `/dev/ublkbN`.
fn driver_of(device: &Path) -> Result<Driver> {
    let name = device.to_string_lossy();
    if name.starts_with("/dev/nbd") {
        Ok(Driver::Nbd)
    } else if name.starts_with("/dev/ublkb") {
        Ok(Driver::Ublk)
    } else {
        Err(Error::usage(format!(
            "{name} is not a ublk or NBD device: use /dev/ublkbN or /dev/nbdN"
        )))
    }
}

/// The identifier in sysfs by which a device is recognized as this mount's, also after a crash.
fn identifier(record: &Record) -> String {
    let id: String = record.id.iter().map(|b| format!("{b:02x}")).collect();
    format!("drover {} {id}", record.name)
}

/// The kernel's request timeout, after which it drops the connection. Every request gets a reply before that, at worst
/// an error; a write of part of a chunk waits for the link, to fetch the rest of the chunk, and for cache space.
fn request_timeout(give_up_after: Duration) -> Duration {
    give_up_after
        .saturating_mul(2)
        .saturating_add(MARGIN)
        .min(MAX_TIMEOUT)
}

/// A device of the kernel's NBD client. Drop order matters: the device is detached before the server stops.
pub struct KernelNbd {
    local: kernel_nbd::Local,
    server: nbd::Server,
    guard: Guard,
}

impl KernelNbd {
    /// Attaches `wanted`, or any free device, under the identifier of the record's mount.
    ///
    /// # Errors
    /// When it cannot be attached; nothing stays attached then.
    pub fn attach(record: &Record, wanted: Option<PathBuf>, export: nbd::Export) -> Result<Self> {
        let name = export.name.clone();
        let server = nbd::Server::new(vec![export], nbd::ServerOptions::default())?;
        let identifier = identifier(record);
        let local = kernel_nbd::attach_local(&server, &name, CONNECTIONS, |options| {
            kernel_nbd::Options {
                device: wanted,
                timeout: Some(request_timeout(record.how.give_up_after)),
                // It is never reconnected: see the module's documentation.
                dead_conn_timeout: None,
                identifier: Some(identifier.clone()),
                ..options
            }
        })?;
        let guard = Guard::start(local.path(), &identifier)?;
        Ok(KernelNbd {
            local,
            server,
            guard,
        })
    }

    /// The device node.
    pub fn path(&self) -> &Path {
        self.local.path()
    }

    /// Detaches the device and stops the server and the guard.
    ///
    /// # Errors
    /// When the device cannot be detached; it stays attached then.
    pub fn detach(&mut self, how: Detach) -> Result<()> {
        self.local.detach(how)?;
        self.server.stop();
        self.guard.dismiss();
        Ok(())
    }
}

/// Creates a ublk device.
///
/// # Errors
/// When it cannot be attached; nothing stays attached then.
pub fn attach_ublk(
    record: &Record,
    wanted: Option<PathBuf>,
    device: Arc<dyn BlockDevice>,
) -> Result<ublk::Attached> {
    let can = device.capabilities();
    let options = ublk::Options {
        device: wanted,
        block_size: can.alignment.max(512),
        read_only: can.read_only,
        identifier: Some(identifier(record)),
        ..ublk::Options::default()
    };
    Ok(ublk::attach(device, &options)?)
}

/// Detaches the devices that the dead daemon of a mount left attached. They are found by their identifier: device
/// numbers may have been reused.
///
/// # Errors
/// When the device is still mounted (the kernel frees it with its last user), or for a kernel error.
pub fn clear(record: &Record, driver: Driver) -> Result<()> {
    for path in found(&identifier(record), driver)? {
        if let Some(point) = kernel_nbd::mounted_from(&path).first() {
            bail!(
                "{}, from before the crash, is still mounted at {}: unmount it first (umount {})",
                path.display(),
                point.display(),
                point.display()
            );
        }
        detach(&path, driver)?;
    }
    Ok(())
}

fn found(identifier: &str, driver: Driver) -> Result<Vec<PathBuf>> {
    match driver {
        Driver::Nbd => Ok(kernel_nbd::list()
            .into_iter()
            .filter(|found| found.identifier.as_deref() == Some(identifier))
            .map(|found| found.path)
            .collect()),
        Driver::Ublk => match ublk::find(identifier) {
            // Without the driver there are no devices.
            Err(ublk::Error::Missing { .. }) => Ok(Vec::new()),
            found => Ok(found?),
        },
    }
}

fn detach(path: &Path, driver: Driver) -> Result<()> {
    gone(match driver {
        Driver::Nbd => kernel_nbd::detach_path(path, Detach::Force),
        Driver::Ublk => ublk::detach_path(path, Detach::Force),
    })
}

/// Ignores that another process has already detached the device.
fn gone(detached: Result<(), kernel_nbd::Error>) -> Result<()> {
    match detached {
        Ok(()) | Err(kernel_nbd::Error::NotAttached { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Handle of the guard process, which detaches an NBD device when this process ends without dismissing it. It holds one
/// end of a pipe to the guard.
struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    fn start(device: &Path, identifier: &str) -> Result<Guard> {
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let mut process = Command::new(program)
            .arg("guard")
            .arg(identifier)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start the guard process of {}", device.display()))?;
        let pipe = process.stdin.take();
        Ok(Guard { process, pipe })
    }

    /// Ends the guard process once the device is detached.
    fn dismiss(&mut self) {
        drop(self.pipe.take());
        // At end of file, the guard finds no device of this mount and exits.
        if let Err(e) = self.process.wait() {
            tracing::warn!("cannot wait for the guard process: {e}");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.pipe.is_some() {
            self.dismiss();
        }
    }
}

/// `drover guard`: waits until the process that started it has ended, then detaches the device that it left attached.
///
/// # Errors
/// When the device cannot be detached.
pub fn guard(identifier: &str) -> Result<()> {
    // Ctrl-C in a terminal is for the mount daemon, which shuts down cleanly.
    rustix::process::setsid().ok();
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())
        .context("cannot wait for the process that serves the device")?;
    for path in found(identifier, Driver::Nbd)? {
        detach(&path, Driver::Nbd)?;
    }
    Ok(())
}

/// Makes this process, and all threads and processes it starts from now on, an I/O flusher: its memory allocations do
/// not wait for write-back to the disk that it serves, which would deadlock. Needs `CAP_SYS_RESOURCE`.
pub fn survive_write_back() {
    if let Err(e) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("cannot become an I/O flusher ({e}): kernel block devices need root");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_path_selects_its_driver() {
        let choose = |choice, device: &str| choose(choice, Some(Path::new(device)));
        assert_eq!(choose(None, "/dev/nbd3").unwrap(), Driver::Nbd);
        assert_eq!(choose(None, "/dev/ublkb3").unwrap(), Driver::Ublk);
        assert_eq!(choose(Some(Driver::Nbd), "/dev/nbd0").unwrap(), Driver::Nbd);
        for (choice, device) in [
            (Some(Driver::Ublk), "/dev/nbd0"),
            (Some(Driver::Nbd), "/dev/ublkb0"),
            (None, "/dev/sda"),
        ] {
            assert!(choose(choice, device).is_err(), "{device}");
        }
    }

    #[test]
    fn requests_time_out_here_before_they_do_in_the_kernel() {
        for seconds in [0, 1, 600] {
            let give_up = Duration::from_secs(seconds);
            assert!(request_timeout(give_up) >= give_up + MARGIN);
        }
        assert_eq!(request_timeout(Duration::MAX), MAX_TIMEOUT);
    }
}
