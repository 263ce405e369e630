//! A loop device on a file, usually one that [`fuse`](crate::fuse) serves: the disk as `/dev/loopN`.
//!
//! It is attached with direct I/O, so that data is cached once, in the loop device's own page cache, and with
//! `AUTOCLEAR`: the kernel detaches it when it is no longer open. [`LoopDevice`] holds it open.
//!
//! **After a crash** of this process the device is detached with its last user, at once if there is none. That must
//! also work when this process serves the backing file itself, and would not with one table of open files: closing the
//! loop device writes dirty pages back, to a file whose server is dead but whose connection to the kernel has not been
//! closed yet, so the dying process would wait for itself forever. Therefore a thread with its own table of open files
//! (`CLOSE_RANGE_UNSHARE`) holds the loop device: the kernel closes the two tables independently, the connection ends,
//! and the write-back fails.

pub(crate) mod backing;
mod error;
mod holder;
mod options;
mod sys;
mod users;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::retry::{RETRY_LIMIT, retry, within};
pub use backing::find_by_backing;
use backing::{backing_of, node};
pub use error::LoopError;
use holder::Holder;
pub use options::{DEADLINE, Options};
pub(crate) use users::users_of;
use users::{busy, claim};

/// How long detaching may take after the last user: a program that probes new devices may have it open.
const LINGER: Duration = Duration::from_secs(5);

/// A loop device attached to a file. Once dropped, the kernel detaches it when its last user is gone.
pub struct LoopDevice {
    path: PathBuf,
    file: PathBuf,
    direct_io: bool,
    holder: Option<Holder>,
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
        let (holder, attached) = Holder::start(&file, options)?;
        if options.read_ahead > 0 {
            // Failure only costs speed. The kernel resets it when the device is detached.
            let knob = format!("/sys/block/loop{}/queue/read_ahead_kb", attached.number);
            if let Err(error) = std::fs::write(&knob, (options.read_ahead / 1024).to_string()) {
                tracing::debug!(knob, %error, "the kernel reads ahead as far as it wants");
            }
        }
        Ok(Self {
            path: node(attached.number),
            file,
            direct_io: attached.direct_io,
            holder: Some(holder),
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

    /// Whether it bypasses the page cache of the file.
    #[must_use]
    pub fn has_direct_io(&self) -> bool {
        self.direct_io
    }

    /// Flushes and detaches it if it is unused. A process that has it open gets two seconds to close it: udev may probe
    /// it, and a forked child has its parent's files until it execs. It fails at once if it is mounted, or has a device
    /// on it.
    ///
    /// # Errors
    /// [`LoopError::Busy`] or [`LoopError::Unflushed`], and it stays attached; [`LoopError::Hung`] after [`DEADLINE`].
    pub fn detach(&mut self) -> Result<(), LoopError> {
        self.detach_within(RETRY_LIMIT)
    }

    /// The same without waiting for processes to close it.
    ///
    /// # Errors
    /// As for [`LoopDevice::detach`].
    pub fn detach_at_once(&mut self) -> Result<(), LoopError> {
        self.detach_within(Duration::ZERO)
    }

    fn detach_within(&mut self, timeout: Duration) -> Result<(), LoopError> {
        let Some(holder) = &self.holder else {
            return Ok(());
        };
        holder.detach(&self.path, timeout)?;
        self.holder = None;
        wait_until_gone(&self.path)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Some(holder) = self.holder.take()
            && !holder.let_go(LINGER)
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
            .field("attached", &self.holder.is_some())
            .finish_non_exhaustive()
    }
}

/// Detaches a loop device of another process, usually a dead one: data that cannot be written back because the file's
/// server is gone is discarded. A process that has it open gets two seconds, as with [`LoopDevice::detach`].
///
/// # Errors
/// [`LoopError::Busy`]; [`LoopError::Hung`] after [`DEADLINE`].
pub fn detach_path(device: &Path) -> Result<(), LoopError> {
    let name = Path::new(device.file_name().unwrap_or_default());
    if backing_of(name).is_none() {
        return Ok(());
    }
    let path = device.to_owned();
    let done = within(DEADLINE, move || {
        let exclusive = retry(|| claim(&path), LoopError::may_pass)?;
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
