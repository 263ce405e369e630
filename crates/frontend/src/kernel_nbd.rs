//! The kernel's NBD client: `/dev/nbdN` on sockets connected to an NBD server (r3map §1.4.4.3 to §1.4.4.6).
//!
//! The kernel speaks only the transmission phase, so any handshake must be complete. With a socket pair and the server
//! of this crate ([`attach_local`]), neither a listener nor a handshake is needed.
//!
//! Generic netlink configures the device in one message and needs no thread blocked in the kernel; ioctls are the
//! fallback where the driver has no netlink family. Netlink replies when the device is ready; after ioctls, its size in
//! sysfs is polled. A device attached by netlink outlives the process: its requests then fail, or wait for
//! [`reconnect`] up to [`Options::dead_conn_timeout`], and [`detach_path`] removes it.

mod ioctl;
mod local;
mod netlink;
mod options;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;

use crate::kernel::{self, DEADLINE};
pub use crate::kernel::{Detach, Error, mounted_from};
pub use local::{Local, attach_local, reconnect_local};
use netlink::{Connection, Request};
use options::seconds;
pub use options::{Interface, MAX_CONNECTIONS, MAX_IDENTIFIER, Options};

const MISSING: Error = Error::Missing {
    driver: "nbd",
    module: "nbd",
};
const NO_NETLINK: &str = "this kernel's nbd has no netlink: use ioctls";

const FAMILY: &str = "nbd";
const COMMAND_CONNECT: u8 = 1;
const COMMAND_DISCONNECT: u8 = 2;
const COMMAND_RECONFIGURE: u8 = 3;
const COMMAND_STATUS: u8 = 5;
const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const DEAD_CONN_TIMEOUT: u16 = 8;
const DEVICE_LIST: u16 = 9;
const BACKEND_IDENTIFIER: u16 = 10;
const SOCKET_ITEM: u16 = 1;
const SOCKET_FD: u16 = 1;
const DEVICE_ITEM: u16 = 1;
const DEVICE_CONNECTED: u16 = 2;

/// An attached device. Dropping it detaches by force; [`Attached::detach`] reports errors.
pub struct Attached {
    path: PathBuf,
    session: Option<ioctl::Session>,
    /// The thread that set the device up, which identifies it as ours.
    owner: Option<u64>,
    attached: bool,
}

impl Attached {
    /// The node, `/dev/nbdN`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Detaches; returns when the device is free again. A second call does nothing.
    ///
    /// # Errors
    /// [`Error`]; the device then stays attached.
    pub fn detach(&mut self, how: Detach) -> Result<(), Error> {
        if !self.attached {
            return Ok(());
        }
        // Another process may have detached it, and its number may be reused by now.
        if self.owner == owner(index_of(&self.path)?) {
            let interface = match self.session {
                Some(_) => Interface::Ioctl,
                None => Interface::Any,
            };
            match detach_by(interface, &self.path, how) {
                Ok(()) | Err(Error::NotAttached { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        self.attached = false;
        if let Some(session) = &mut self.session {
            kernel::wait_until(DEADLINE, || session.has_ended());
            session.finish();
        }
        Ok(())
    }

    /// Waits until a detach by another process is complete.
    fn wait_free(&self, timeout: Duration) {
        let is_free = || index_of(&self.path).is_ok_and(|index| self.owner != owner(index));
        kernel::wait_until(timeout, is_free);
    }

    /// Leaves the device attached: the kernel keeps the sockets. For when another process continues to serve them. A
    /// device attached by ioctls still ends with the process.
    #[must_use]
    pub fn leave(mut self) -> PathBuf {
        self.attached = false;
        self.path.clone()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Err(error) = self.detach(Detach::Force) {
            tracing::warn!(path = %self.path.display(), %error, "an NBD device stays attached");
        }
    }
}

/// Attaches a device to sockets on which a server speaks NBD's transmission phase. Returns when the device is ready
/// and its partitions are known; the server must already be running.
///
/// # Errors
/// [`Error`]; nothing stays attached then.
pub fn attach(sockets: Vec<OwnedFd>, options: &Options) -> Result<Attached, Error> {
    options.check(sockets.len())?;
    if let Some(path) = &options.device {
        index_of(path)?;
    }
    if !is_available() {
        return Err(MISSING);
    }
    if options.interface != Interface::Ioctl {
        match Connection::open(FAMILY, DEADLINE) {
            Ok(connection) => return attach_by_netlink(connection, sockets, options),
            Err(error) if !is_absent(&error) => {
                return Err(Error::kernel("ask for", Path::new("/dev/nbd"), error));
            }
            Err(_) if options.interface == Interface::Netlink => {
                return Err(Error::Unsupported(NO_NETLINK));
            }
            Err(_) => {}
        }
    }
    attach_by_ioctl(sockets, options)
}

fn attach_by_netlink(
    mut connection: Connection,
    sockets: Vec<OwnedFd>,
    options: &Options,
) -> Result<Attached, Error> {
    let asked = options.device.clone().unwrap_or_else(|| "/dev/nbd".into());
    let wanted = options.clone();
    let index = options.device.as_deref().map(index_of).transpose()?;
    let answer = kernel::within(DEADLINE, "nbd-connect", move || {
        connection.ask(
            COMMAND_CONNECT,
            |request| connect_request(request, index, &sockets, &wanted),
            |attributes| attributes.u32(INDEX),
        )
    })
    .map_err(|error| Error::kernel("start a thread for", &asked, error))?;
    let index = match answer {
        None => return Err(Error::deadline("attach", &asked)),
        Some(Ok(answered)) => answered.or(index).ok_or_else(|| {
            Error::kernel("attach", &asked, io::Error::other("the kernel names none"))
        })?,
        Some(Err(error)) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
            return Err(if options.device.is_some() {
                Error::Taken { path: asked }
            } else {
                Error::NoneFree
            });
        }
        Some(Err(error)) => return Err(Error::kernel("attach", &asked, error)),
    };
    let mut attached = Attached {
        path: format!("/dev/nbd{index}").into(),
        session: None,
        owner: owner(index),
        attached: true,
    };
    wait_ready(&mut attached, options.size)?;
    Ok(attached)
}

fn connect_request(
    request: Request,
    index: Option<u32>,
    sockets: &[OwnedFd],
    options: &Options,
) -> Request {
    let mut request = match index {
        Some(index) => request.u32(INDEX, index),
        None => request,
    };
    request = request
        .u64(SIZE_BYTES, options.size)
        .u64(BLOCK_SIZE_BYTES, options.block_size.into())
        .u64(SERVER_FLAGS, options.transmission_flags());
    if let Some(timeout) = options.timeout {
        request = request.u64(TIMEOUT, seconds(timeout));
    }
    if let Some(timeout) = options.dead_conn_timeout {
        request = request.u64(DEAD_CONN_TIMEOUT, seconds(timeout));
    }
    if let Some(name) = &options.identifier {
        request = request.text(BACKEND_IDENTIFIER, name);
    }
    with_sockets(request, sockets)
}

fn with_sockets(request: Request, sockets: &[OwnedFd]) -> Request {
    request.nested(SOCKETS, |request| {
        sockets.iter().fold(request, |request, socket| {
            let number = socket.as_raw_fd().unsigned_abs();
            request.nested(SOCKET_ITEM, |item| item.u32(SOCKET_FD, number))
        })
    })
}

fn attach_by_ioctl(sockets: Vec<OwnedFd>, options: &Options) -> Result<Attached, Error> {
    let path = match &options.device {
        Some(path) => path.clone(),
        None => first_free(Path::new("/sys/block")).ok_or(Error::NoneFree)?,
    };
    let session = ioctl::Session::start(path.clone(), sockets, options)?;
    let mut attached = Attached {
        owner: owner(index_of(&path)?),
        path,
        session: Some(session),
        attached: true,
    };
    wait_ready(&mut attached, options.size)?;
    Ok(attached)
}

/// Polls sysfs until the device has its size, a receiver and its node; then opens it, which makes the kernel scan for
/// partitions.
fn wait_ready(attached: &mut Attached, size: u64) -> Result<(), Error> {
    let path = &attached.path.clone();
    let index = index_of(path)?;
    let is_ready = || {
        read_number(index, "size") == Some(size / 512) && owner(index).is_some() && path.exists()
    };
    let session = attached.session.as_ref();
    let has_ended = || session.is_some_and(ioctl::Session::has_ended);
    kernel::wait_until(DEADLINE, || is_ready() || has_ended());
    if !is_ready() {
        return Err(Error::deadline("get ready", path));
    }
    attached.owner = owner(index);
    let own = path.clone();
    let opened = kernel::within(DEADLINE, "nbd-open", || fs::File::open(own).map(drop))
        .map_err(|error| Error::kernel("start a thread for", path, error))?;
    opened
        .ok_or_else(|| Error::deadline("read its partitions", path))?
        .map_err(|error| Error::kernel("open", path, error))
}

/// Replaces the dead sockets of an attached device: for a server restarted after a crash, while requests wait up to
/// [`Options::dead_conn_timeout`].
///
/// # Errors
/// [`Error`].
pub fn reconnect(path: &Path, sockets: Vec<OwnedFd>) -> Result<(), Error> {
    let index = index_of(path)?;
    if sockets.is_empty() || sockets.len() > MAX_CONNECTIONS {
        return Err(Error::Options(format!("{} sockets", sockets.len())));
    }
    let mut connection = open_netlink(path)?;
    let identifier = fs::read_to_string(sysfs(index, "backend")).ok();
    let answer = kernel::within(DEADLINE, "nbd-reconnect", move || {
        connection.ask(
            COMMAND_RECONFIGURE,
            |request| {
                let mut request = request.u32(INDEX, index);
                // The kernel refuses a reconnect without the right identifier.
                if let Some(name) = &identifier {
                    request = request.text(BACKEND_IDENTIFIER, name.trim_end_matches('\n'));
                }
                with_sockets(request, &sockets)
            },
            |_| None::<()>,
        )
    })
    .map_err(|error| Error::kernel("start a thread for", path, error))?;
    match answer {
        None => Err(Error::deadline("take new sockets", path)),
        Some(Ok(_)) => Ok(()),
        Some(Err(error)) => Err(gone_or("reconnect", path, error)),
    }
}

/// Whether this kernel has the driver; loads its module if needed and permitted.
#[must_use]
pub fn is_available() -> bool {
    kernel::load_module("nbd", is_present)
}

/// Whether a device is attached.
///
/// # Errors
/// [`Error`].
pub fn is_attached(path: &Path) -> Result<bool, Error> {
    let index = index_of(path)?;
    let mut connection = match open_netlink(path) {
        Ok(connection) => connection,
        Err(Error::Unsupported(_)) => return Ok(sysfs(index, "pid").exists()),
        Err(error) => return Err(error),
    };
    let connected = connection
        .ask(
            COMMAND_STATUS,
            |request| request.u32(INDEX, index),
            |attributes| {
                let list = attributes.nested(DEVICE_LIST)?;
                list.nested(DEVICE_ITEM)?.u8(DEVICE_CONNECTED)
            },
        )
        .map_err(|error| Error::kernel("ask for", path, error))?;
    Ok(connected == Some(1))
}

/// An attached NBD device, of any process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachedDevice {
    /// The node, `/dev/nbdN`.
    pub path: PathBuf,
    /// Its [`Options::identifier`].
    pub identifier: Option<String>,
}

/// The attached devices, in order. A process restarted after a crash takes its own over with [`reconnect_local`], or
/// removes them with [`detach_path`].
#[must_use]
pub fn list() -> Vec<AttachedDevice> {
    list_below(Path::new("/sys/block"))
}

fn list_below(block: &Path) -> Vec<AttachedDevice> {
    let mut found: Vec<(u32, AttachedDevice)> = fs::read_dir(block)
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let index = entry
                .file_name()
                .to_str()?
                .strip_prefix("nbd")?
                .parse()
                .ok()?;
            if !entry.path().join("pid").exists() {
                return None;
            }
            let identifier = fs::read_to_string(entry.path().join("backend")).ok();
            let found = AttachedDevice {
                path: format!("/dev/nbd{index}").into(),
                identifier: identifier.map(|text| text.trim_end_matches('\n').to_owned()),
            };
            Some((index, found))
        })
        .collect();
    found.sort_unstable_by_key(|(index, _)| *index);
    found.into_iter().map(|(_, found)| found).collect()
}

/// Detaches a device that any process attached, also one whose server is gone. Returns when the device is free.
///
/// # Errors
/// [`Error`].
pub fn detach_path(path: &Path, how: Detach) -> Result<(), Error> {
    detach_by(Interface::Any, path, how)
}

fn detach_by(interface: Interface, path: &Path, how: Detach) -> Result<(), Error> {
    let index = index_of(path)?;
    if !is_present() {
        return Err(MISSING);
    }
    if read_number(index, "size").unwrap_or(0) == 0 && !sysfs(index, "pid").exists() {
        return Err(Error::NotAttached { path: path.into() });
    }
    if how == Detach::IfUnused {
        kernel::settle(path)?;
    }
    let own = path.to_path_buf();
    let done = kernel::within(DEADLINE, "nbd-disconnect", move || match interface {
        Interface::Ioctl => ioctl::disconnect(&own),
        Interface::Any | Interface::Netlink => disconnect(&own, index),
    })
    .map_err(|error| Error::kernel("start a thread for", path, error))?;
    done.ok_or_else(|| Error::deadline("detach", path))??;
    let is_free = || !sysfs(index, "pid").exists();
    if kernel::wait_until(DEADLINE, is_free) {
        Ok(())
    } else {
        Err(Error::deadline("become free", path))
    }
}

fn disconnect(path: &Path, index: u32) -> Result<(), Error> {
    match open_netlink(path) {
        Ok(mut connection) => connection
            .ask(
                COMMAND_DISCONNECT,
                |request| request.u32(INDEX, index),
                |_| None::<()>,
            )
            .map(|_| ())
            .map_err(|error| gone_or("detach", path, error)),
        Err(Error::Unsupported(_)) => ioctl::disconnect(path),
        Err(error) => Err(error),
    }
}

fn open_netlink(path: &Path) -> Result<Connection, Error> {
    Connection::open(FAMILY, DEADLINE).map_err(|error| {
        if !is_absent(&error) {
            Error::kernel("ask for", path, error)
        } else if is_present() {
            Error::Unsupported(NO_NETLINK)
        } else {
            MISSING
        }
    })
}

fn gone_or(what: &'static str, path: &Path, error: io::Error) -> Error {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::INVAL | Errno::NODEV) => Error::NotAttached { path: path.into() },
        _ => Error::kernel(what, path, error),
    }
}

fn is_absent(error: &io::Error) -> bool {
    error.raw_os_error().map(Errno::from_raw_os_error) == Some(Errno::NOENT)
}

/// Whether the driver is present: its parameters exist for a module and a built-in driver alike.
fn is_present() -> bool {
    Path::new("/sys/module/nbd").exists()
}

/// The number of `/dev/nbdN`.
fn index_of(path: &Path) -> Result<u32, Error> {
    path.to_str()
        .and_then(|text| text.strip_prefix("/dev/nbd"))
        .filter(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|digits| digits.parse().ok())
        // The kernel's number is signed.
        .filter(|index| i32::try_from(*index).is_ok())
        .ok_or_else(|| Error::WrongPath {
            path: path.into(),
            expected: "an NBD device (/dev/nbdN)",
        })
}

/// The thread that set a device up, while it is attached.
fn owner(index: u32) -> Option<u64> {
    read_number(index, "pid")
}

fn sysfs(index: u32, name: &str) -> PathBuf {
    format!("/sys/block/nbd{index}/{name}").into()
}

fn read_number(index: u32, name: &str) -> Option<u64> {
    let text = fs::read_to_string(sysfs(index, name)).ok()?;
    text.trim().parse().ok()
}

/// The first device below `block` without size and receiver.
fn first_free(block: &Path) -> Option<PathBuf> {
    let mut free: Vec<u32> = fs::read_dir(block)
        .ok()?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name();
            let index = name.to_str()?.strip_prefix("nbd")?.parse().ok()?;
            let size = fs::read_to_string(entry.path().join("size")).ok()?;
            (size.trim() == "0" && !entry.path().join("pid").exists()).then_some(index)
        })
        .collect();
    free.sort_unstable();
    Some(format!("/dev/nbd{}", free.first()?).into())
}
