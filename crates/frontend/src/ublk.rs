//! A ublk server: a device as `/dev/ublkbN`, through the kernel's driver for block devices in user space.
//!
//! Participants: the *driver* queues requests, one per tag; a *queue thread* per queue waits for them on an `io_uring`;
//! a pool executes those that may block, so that a slow request delays no others; the *channel*, `/dev/ublkcN`, is read
//! and written to copy a request's data. Memory is one buffer per thread, not per tag.
//!
//! A device lives as long as its process: when that ends, for any reason, requests fail and `/dev/ublkbN` disappears.
//! [`detach_path`] removes what remains of it, and devices of other processes.
//!
//! Needs Linux 6.5. The driver's recovery, zoned devices, zero copy and unprivileged devices are not used.

mod abi;
mod control;
mod options;
mod queue;
mod request;
#[cfg(test)]
mod tests;
mod workers;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use drover_core::BlockDevice;
use rustix::io::Errno;

use crate::kernel::{self, DEADLINE};
pub use crate::kernel::{Detach, Error};
use abi::{Info, Params, command};
use control::Control;
pub use options::{MAX_QUEUE_DEPTH, MAX_QUEUES, MAX_WORKERS, Options};
use request::Target;
use workers::Workers;

const MISSING: Error = Error::Missing {
    driver: "ublk",
    module: "ublk_drv",
};

const NO_RINGS: Error = Error::Unsupported(
    "ublk needs io_uring, which is disabled (sysctl kernel.io_uring_disabled): use the kernel's NBD client",
);

/// A device that this process serves. Dropping it detaches by force; [`Attached::detach`] reports errors.
pub struct Attached {
    path: PathBuf,
    index: u32,
    token: u64,
    queues: Vec<JoinHandle<()>>,
    attached: bool,
}

impl Attached {
    /// The node, `/dev/ublkbN`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the device has been stopped, by [`detach_path`] or by the kernel.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.queues.iter().all(JoinHandle::is_finished)
    }

    /// Detaches; returns when the device is gone. A second call does nothing.
    ///
    /// # Errors
    /// [`Error`]; the device then stays attached.
    pub fn detach(&mut self, how: Detach) -> Result<(), Error> {
        if !self.attached {
            return Ok(());
        }
        if how == Detach::IfUnused && !self.is_gone() {
            kernel::settle(&self.path)?;
        }
        match self.remove() {
            // The process that stopped the device has also removed it.
            Ok(()) | Err(Error::NotAttached { .. }) => {}
            Err(error) => return Err(error),
        }
        self.attached = false;
        for queue in self.queues.drain(..) {
            if queue.is_finished() && queue.join().is_err() {
                tracing::error!("a ublk queue thread panicked");
            }
        }
        Ok(())
    }

    fn remove(&self) -> Result<(), Error> {
        if info(self.index, &self.path)?.token != self.token {
            return Ok(()); // the number may be reused by now
        }
        stop(self.index, &self.path)?;
        if !kernel::wait_until(DEADLINE, || self.is_gone()) {
            return Err(Error::deadline("finish its requests", &self.path));
        }
        delete(self.index, &self.path)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Err(error) = self.detach(Detach::Force) {
            tracing::warn!(path = %self.path.display(), %error, "a ublk device was not detached");
        }
    }
}

/// Attaches `device` as a block device. Returns when the kernel has scanned it for partitions and it can be used.
///
/// # Errors
/// [`Error`]; nothing stays attached then.
pub fn attach(device: Arc<dyn BlockDevice>, options: &Options) -> Result<Attached, Error> {
    options.check()?;
    let params = options.params(&*device)?;
    let wanted = options.device.as_deref().map(index_of).transpose()?;
    check_available()?;

    let asked = Info {
        queues: options.queues,
        depth: options.depth,
        longest: params.longest,
        device: wanted.unwrap_or(abi::ANY_DEVICE),
        features: abi::FEATURE_IOCTL_ENCODE | abi::FEATURE_USER_COPY,
        token: options
            .identifier
            .as_deref()
            .map_or_else(random_token, token),
    };
    let path = options.device.clone();
    let path = path.unwrap_or_else(|| "/dev/ublkb".into());
    let answer = control(
        "add",
        &path,
        command::ADD_DEV,
        asked.device,
        0,
        asked.encode().to_vec(),
    )
    .map_err(|error| match error {
        Error::Kernel { error, .. } if is(&error, Errno::EXIST) => {
            Error::Taken { path: path.clone() }
        }
        other => other,
    })?;
    let got = Info::decode(&answer).ok_or_else(|| {
        Error::kernel(
            "add",
            &path,
            io::Error::other("the driver's reply is too short"),
        )
    })?;
    // From here on, a drop removes the device.
    let mut attached = Attached {
        path: format!("/dev/ublkb{}", got.device).into(),
        index: got.device,
        token: asked.token,
        queues: Vec::new(),
        attached: true,
    };
    serve(&mut attached, device, &params, &got, options.workers)?;
    Ok(attached)
}

/// Starts the queue threads and the device.
fn serve(
    attached: &mut Attached,
    device: Arc<dyn BlockDevice>,
    params: &Params,
    got: &Info,
    workers: usize,
) -> Result<(), Error> {
    let path = attached.path.clone();
    let index = attached.index;
    control(
        "set the parameters of",
        &path,
        command::SET_PARAMS,
        index,
        0,
        params.encode().to_vec(),
    )?;
    let channel = PathBuf::from(format!("/dev/ublkc{index}"));
    if !kernel::wait_until(DEADLINE, || channel.exists()) {
        return Err(Error::deadline("appear", &channel));
    }
    let channel = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&channel)
        .map_err(|error| Error::kernel("open", &channel, error))?;
    let target = Arc::new(Target {
        channel,
        device,
        longest: params.longest,
    });
    let pool = Arc::new(Workers::new(target.clone(), workers));
    let (sender, receiver) = mpsc::sync_channel(usize::from(got.queues));
    for number in 0..got.queues {
        let (target, pool, ready, depth) =
            (target.clone(), pool.clone(), sender.clone(), got.depth);
        let thread = thread::Builder::new()
            .name(format!("ublk-queue-{number}"))
            .spawn(move || queue::run(number, depth, target, pool, &ready))
            .map_err(|error| Error::kernel("start a thread for", &path, error))?;
        attached.queues.push(thread);
    }
    // Only the threads keep the channel open: when they end, the process that stopped the device can delete it.
    drop((target, pool));
    for _ in 0..got.queues {
        match receiver.recv_timeout(DEADLINE) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(Error::kernel("serve a queue of", &path, error)),
            Err(_) => return Err(Error::deadline("take its queues", &path)),
        }
    }
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let process = u64::from(process.unsigned_abs());
    control(
        "start",
        &path,
        command::START_DEV,
        index,
        process,
        Vec::new(),
    )?;
    if kernel::wait_until(DEADLINE, || path.exists()) {
        Ok(())
    } else {
        Err(Error::deadline("appear", &path))
    }
}

/// Detaches a device of any process, or removes what remains of one whose process is gone.
/// Returns when the device is gone.
///
/// # Errors
/// [`Error`].
pub fn detach_path(path: &Path, how: Detach) -> Result<(), Error> {
    let index = index_of(path)?;
    if !is_present() {
        return Err(MISSING);
    }
    info(index, path)?;
    // Without a node it has no users.
    if how == Detach::IfUnused && path.exists() {
        kernel::settle(path)?;
    }
    stop(index, path)?;
    delete(index, path)
}

/// Whether this kernel has a recent enough driver; loads its module if needed and permitted.
///
/// # Errors
/// [`Error`]: what is missing.
pub fn check_available() -> Result<(), Error> {
    if !kernel::load_module("ublk_drv", is_present) {
        return Err(MISSING);
    }
    check_features()
}

/// The devices attached with this [`Options::identifier`], including remains of dead ones, in order. A process
/// restarted after a crash removes its own with [`detach_path`].
///
/// # Errors
/// [`Error`].
pub fn find(identifier: &str) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for index in channels(Path::new("/dev")) {
        let path = PathBuf::from(format!("/dev/ublkb{index}"));
        match info(index, &path) {
            Ok(info) if info.token == token(identifier) => found.push(path),
            Ok(_) | Err(Error::NotAttached { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Numbers of the channels in `directory`: one per device, even if its node is gone.
fn channels(directory: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_prefix("ublkc")?.parse().ok()
        })
        .collect();
    numbers.sort_unstable();
    numbers
}

/// Whether a device, or what remains of one, is attached.
///
/// # Errors
/// [`Error`].
pub fn is_attached(path: &Path) -> Result<bool, Error> {
    match info(index_of(path)?, path) {
        Ok(_) => Ok(true),
        Err(Error::NotAttached { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn info(index: u32, path: &Path) -> Result<Info, Error> {
    let room = vec![0; Info::SIZE];
    let answer = control("query", path, command::GET_DEV_INFO, index, 0, room)?;
    Info::decode(&answer)
        .ok_or_else(|| Error::kernel("query", path, io::Error::other("the reply is too short")))
}

fn stop(index: u32, path: &Path) -> Result<(), Error> {
    control("stop", path, command::STOP_DEV, index, 0, Vec::new()).map(|_| ())
}

/// Waits until the last thread of the server has ended.
fn delete(index: u32, path: &Path) -> Result<(), Error> {
    control("delete", path, command::DEL_DEV, index, 0, Vec::new()).map(|_| ())
}

fn control(
    what: &'static str,
    path: &Path,
    command: u32,
    device: u32,
    data: u64,
    buffer: Vec<u8>,
) -> Result<Vec<u8>, Error> {
    let node = Path::new(control::PATH);
    let opened = std::fs::File::options().read(true).write(true).open(node);
    let node = opened.map_err(|error| match error {
        error if is(&error, Errno::NOENT) => MISSING,
        error => Error::kernel("reach the driver for", path, error),
    })?;
    let control = Control::new(node).map_err(|error| match error {
        error if is(&error, Errno::PERM) || is(&error, Errno::NOSYS) => NO_RINGS,
        error => Error::kernel("make a ring for", path, error),
    })?;
    control
        .run(command, device, data, buffer, DEADLINE)
        .map_err(|error| match error {
            error if is(&error, Errno::NODEV) => Error::NotAttached { path: path.into() },
            error => Error::kernel(what, path, error),
        })
}

fn check_features() -> Result<(), Error> {
    const OLD: Error = Error::Unsupported(
        "this kernel's ublk is too old (it needs Linux 6.5): use the kernel's NBD client",
    );
    let path = Path::new(control::PATH);
    let answer = control("query", path, command::GET_FEATURES, 0, 0, vec![0; 8]);
    let features = match answer {
        Ok(bytes) => bytes.try_into().map_or(0, u64::from_ne_bytes),
        Err(Error::Kernel { error, .. })
            if is(&error, Errno::OPNOTSUPP) || is(&error, Errno::INVAL) =>
        {
            return Err(OLD);
        }
        Err(error) => return Err(error),
    };
    let needed = abi::FEATURE_IOCTL_ENCODE | abi::FEATURE_USER_COPY;
    if features & needed == needed {
        Ok(())
    } else {
        Err(OLD)
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

fn is_present() -> bool {
    Path::new(control::PATH).exists()
}

/// Identifies the devices of an identifier across processes: FNV-1a.
fn token(identifier: &str) -> u64 {
    identifier
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

/// Identifies a device without an identifier as ours: a number unique to it.
fn random_token() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one("ublk")
}

/// The number of `/dev/ublkbN`.
fn index_of(path: &Path) -> Result<u32, Error> {
    path.to_str()
        .and_then(|text| text.strip_prefix("/dev/ublkb"))
        .filter(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|digits| digits.parse().ok())
        // Device numbers have 20 bits for it.
        .filter(|index| *index < 1 << 20)
        .ok_or_else(|| Error::WrongPath {
            path: path.into(),
            expected: "a ublk device (/dev/ublkbN)",
        })
}
