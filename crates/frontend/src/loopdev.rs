//! A loop device on a file, as a rule one that [`fuse`](crate::fuse) serves: the disk as `/dev/loopN`.
//!
//! It is attached with direct I/O, so that bytes are kept once, by the loop device's own page cache, and with
//! `AUTOCLEAR`: the kernel detaches it when nobody has it open any more. [`LoopDevice`] holds it open.
//!
//! **After a crash** of this process the device goes with its last user, at once if there is none. That must also work
//! when this process serves the backing file itself, and it would not if its files were closed in one go: closing the
//! loop device writes dirty pages back, to a file whose server is dead but whose connection to the kernel is still
//! open, as it is next in the row: the dying process would wait for itself for ever. Therefore a thread with a table of
//! open files of its own (`CLOSE_RANGE_UNSHARE`) holds the loop device: the kernel closes the two tables
//! independently, the connection ends, and the write-back gets its error.

mod keeper;
mod sys;

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::fuse::{User, listed, mounts};
use crate::patience::{PATIENCE, may_pass, patiently};
use keeper::Keeper;

/// How long attaching and detaching wait for the kernel.
pub const DEADLINE: Duration = Duration::from_secs(30);
/// How long a device may take to go after its last user: a program that probes new devices may have it open.
const LINGER: Duration = Duration::from_secs(5);

/// How a file becomes a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// No writes.
    pub read_only: bool,
    /// Past the page cache of the backing file. Where the file cannot do that, the kernel goes through it: see
    /// [`LoopDevice::has_direct_io`].
    pub direct_io: bool,
    /// Bytes in a logical block: 512 or 4096.
    pub block_size: u32,
    /// Partitions become devices (`/dev/loopNp1`).
    pub partitions: bool,
    /// Bytes that the kernel reads ahead at most, in whole KiB; 0: what it thinks best, with many kernels 128 KiB, a
    /// trickle where the bytes come from far away.
    pub read_ahead: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            read_only: false,
            direct_io: true,
            block_size: 512,
            partitions: true,
            read_ahead: 4 << 20,
        }
    }
}

/// Why a loop device could not be attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// Not a block size that a disk has.
    #[error("{0} bytes are not a block size of a loop device: 512 or 4096 are")]
    BlockSize(u32),
    /// The kernel has no loop devices, or does not let us.
    #[error("no loop device can be had: {0} (as root: modprobe loop)")]
    Missing(io::Error),
    /// The file cannot be attached.
    #[error("cannot attach {} to a loop device: {source}", file.display())]
    Attach {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others were quicker each time.
    #[error("cannot attach {}: other programs took every free loop device", file.display())]
    Contended {
        /// The file.
        file: PathBuf,
    },
    /// It is in use.
    #[error("{} is in use by {}: end that first", device.display(), listed(users))]
    Busy {
        /// The device.
        device: PathBuf,
        /// By whom, as far as can be seen.
        users: Vec<User>,
    },
    /// What was written to it does not get to the file; it stays attached.
    #[error("what was written to {} cannot be written back: {source}", device.display())]
    Unflushed {
        /// The device.
        device: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be detached.
    #[error("cannot detach {}: {source}", device.display())]
    Detach {
        /// The device.
        device: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The backing file does not answer; a thread waits on.
    #[error("{} did not answer for {waited:?}: its backing file hangs", device.display())]
    Hung {
        /// The device or the file.
        device: PathBuf,
        /// For how long.
        waited: Duration,
    },
}

impl LoopError {
    /// Whether it may be another moment later: nothing but processes is in the way.
    fn may_pass(&self) -> bool {
        matches!(self, Self::Busy { users, .. } if may_pass(users))
    }
}

/// A loop device that is attached to a file. Dropped, it is let go: the kernel detaches it when its last user is gone.
pub struct LoopDevice {
    path: PathBuf,
    file: PathBuf,
    direct_io: bool,
    keeper: Option<Keeper>,
}

impl LoopDevice {
    /// Attaches `file` to a free loop device.
    ///
    /// # Errors
    /// [`LoopError`].
    pub fn attach(file: &Path, options: Options) -> Result<Self, LoopError> {
        if !matches!(options.block_size, 512 | 4096) {
            return Err(LoopError::BlockSize(options.block_size));
        }
        let file = std::path::absolute(file).map_err(|source| LoopError::Attach {
            file: file.to_owned(),
            source,
        })?;
        let (keeper, attached) = Keeper::start(&file, options)?;
        if options.read_ahead > 0 {
            // Slower without, but no reason to fail. The kernel forgets it when the device is detached.
            let knob = format!("/sys/block/loop{}/queue/read_ahead_kb", attached.number);
            if let Err(error) = std::fs::write(&knob, (options.read_ahead / 1024).to_string()) {
                tracing::debug!(knob, %error, "the kernel reads ahead as far as it wants");
            }
        }
        Ok(Self {
            path: node(attached.number),
            file,
            direct_io: attached.direct_io,
            keeper: Some(keeper),
        })
    }

    /// The device, `/dev/loopN`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file it is attached to.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Whether it goes past the page cache of the file.
    #[must_use]
    pub fn has_direct_io(&self) -> bool {
        self.direct_io
    }

    /// Writes back what was written to it and detaches it, if nobody uses it. A process that has it open gets two
    /// seconds to close it: udev may probe it, and a child of any program has its parent's files until it runs its own.
    /// What is mounted from it or made of it is refused at once.
    ///
    /// # Errors
    /// [`LoopError::Busy`] or [`LoopError::Unflushed`], and it stays; [`LoopError::Hung`] after [`DEADLINE`].
    pub fn detach(&mut self) -> Result<(), LoopError> {
        self.detach_within(PATIENCE)
    }

    /// The same, but nobody gets time to close it.
    ///
    /// # Errors
    /// As for [`LoopDevice::detach`].
    pub fn detach_at_once(&mut self) -> Result<(), LoopError> {
        self.detach_within(Duration::ZERO)
    }

    fn detach_within(&mut self, patience: Duration) -> Result<(), LoopError> {
        let Some(keeper) = &self.keeper else {
            return Ok(());
        };
        keeper.detach(&self.path, patience)?;
        self.keeper = None;
        wait_until_gone(&self.path)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.take()
            && !keeper.let_go(LINGER)
        {
            tracing::warn!(device = %self.path.display(), "a loop device does not get its bytes written back");
        }
    }
}

impl fmt::Debug for LoopDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopDevice")
            .field("path", &self.path)
            .field("file", &self.file)
            .field("attached", &self.keeper.is_some())
            .finish_non_exhaustive()
    }
}

/// Loop devices whose backing file is `file`, also those that other processes attached.
///
/// The kernel names the file by its path at that time: to be asked before a mount that the file is on is taken away.
///
/// # Errors
/// When `/sys/block` cannot be read.
pub fn find_by_backing(file: &Path) -> io::Result<Vec<PathBuf>> {
    find(|backing| backing == file)
}

/// Loop devices whose backing file is at or below `place`.
pub(crate) fn find_under(place: &Path) -> io::Result<Vec<PathBuf>> {
    find(|backing| backing.starts_with(place))
}

fn find(wanted: impl Fn(&Path) -> bool) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        if let Some(backing) = backing_of(Path::new(&name))
            && wanted(&backing)
        {
            found.push(Path::new("/dev").join(name));
        }
    }
    found.sort();
    Ok(found)
}

/// Detaches a loop device that another process attached, as one that is dead by now: bytes that cannot be
/// written back, because the file's server is gone, are given up. Who only has it open gets two seconds, as with
/// [`LoopDevice::detach`].
///
/// # Errors
/// [`LoopError::Busy`]; [`LoopError::Hung`] after [`DEADLINE`].
pub fn detach_path(device: &Path) -> Result<(), LoopError> {
    let name = Path::new(device.file_name().unwrap_or_default());
    if backing_of(name).is_none() {
        return Ok(());
    }
    let path = device.to_owned();
    let done = crate::fuse::within(DEADLINE, move || {
        let exclusive = patiently(|| claim(&path), LoopError::may_pass)?;
        if let Err(error) = rustix::fs::fsync(&exclusive) {
            tracing::warn!(device = %path.display(), %error, "bytes are given up that cannot be written back");
        }
        sys::clear(&exclusive).map_err(|source| LoopError::Detach {
            device: path.clone(),
            source,
        })
    });
    done.unwrap_or_else(|| {
        Err(LoopError::Hung {
            device: device.to_owned(),
            waited: DEADLINE,
        })
    })?;
    wait_until_gone(device)
}

/// Opens a device so that nobody can mount it at the same time.
fn claim(device: &Path) -> Result<std::fs::File, LoopError> {
    match sys::open_exclusively(device) {
        Ok(file) => Ok(file),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(busy(device)),
        Err(source) => Err(LoopError::Detach {
            device: device.to_owned(),
            source,
        }),
    }
}

/// Who uses a block device, as far as can be seen.
pub(crate) fn users_of(device: &Path) -> Vec<User> {
    let mounted = mounts::mounted_from(device).into_iter().map(User::Mounted);
    let mut users: Vec<User> = mounted.collect();
    users.extend(stacked_on(device).into_iter().map(User::Device));
    users.extend(mounts::openers_of(device));
    users
}

/// Block devices that are made of this one or of a partition of it: loop devices (`mount -o loop,offset=…`), and what
/// the kernel lists as holders (LVM, encryption, RAID). No process has the device open for them.
fn stacked_on(device: &Path) -> Vec<PathBuf> {
    let mut found = find(|backing| mounts::is_or_in(backing, device)).unwrap_or_default();
    let own = Path::new("/sys/block").join(device.file_name().unwrap_or_default());
    let parts = std::fs::read_dir(&own).into_iter().flatten().flatten();
    let places = parts.map(|entry| entry.path()).chain([own.clone()]);
    for holders in places.map(|place| place.join("holders")) {
        let holders = std::fs::read_dir(holders).into_iter().flatten().flatten();
        found.extend(holders.map(|entry| Path::new("/dev").join(entry.file_name())));
    }
    found
}

fn busy(device: &Path) -> LoopError {
    LoopError::Busy {
        device: device.to_owned(),
        users: users_of(device),
    }
}

fn wait_until_gone(device: &Path) -> Result<(), LoopError> {
    let name = Path::new(device.file_name().unwrap_or_default());
    let start = Instant::now();
    while backing_of(name).is_some() {
        if start.elapsed() > LINGER {
            return Err(busy(device));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn node(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

/// The file behind `/sys/block/NAME`, if that is an attached loop device.
fn backing_of(name: &Path) -> Option<PathBuf> {
    let file = Path::new("/sys/block").join(name).join("loop/backing_file");
    let mut text = std::fs::read(file).ok()?;
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    Some(PathBuf::from(OsString::from_vec(text)))
}
