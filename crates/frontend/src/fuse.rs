//! A device as one file, by FUSE: programs can open, map and copy it, or put a loop device on it (r3map §1.4.3).
//!
//! **Where.** The mount point may be a regular file, which then *is* the disk, or a directory, which then holds one
//! file. `fuser` serves; the mounting is done here, as the library reports errors of an unmount too coarsely and
//! unmounts by path without looking at what is mounted there.
//!
//! **Caching.** By default the file bypasses the kernel's page cache (`FOPEN_DIRECT_IO`): a read sees what the device
//! holds at that moment, whoever wrote it; a write has reached the device when it returns, and its error is its own; a
//! loop device with direct I/O does not keep bytes twice. Mappings go through the page cache and are kept coherent by
//! the kernel: it writes dirty pages back before, and drops pages after, direct requests to their range.
//! [`Options::page_cache`] turns the page cache and its read-ahead on, for a device without other writers; `O_DIRECT`
//! still bypasses it. The write-back cache stays off in both: with it, written bytes wait in the kernel, a `flush` that
//! another front end of the device is asked for would not cover them, and errors surface long after the write.
//!
//! **Threads.** [`Options::threads`] threads take requests from the kernel and serve those that need not wait for a
//! network; reads that do ([`Cost::Network`](drover_core::Cost)) go to at most [`MAX_WAITING_THREADS`] others, and
//! flushes and writes that may have to wait to as many again, so that a lost link blocks only readers of missing data,
//! and a full cache only writers. The library reads and writes the connection with plain copies; it has no splice and
//! no io_uring, and supports passthrough only to files.
//!
//! **Ends.** Nothing here waits without a deadline: an unmount that the kernel does not complete, because a device
//! hangs, is cut short by aborting the connection. After a crash of this process the mount returns `ENOTCONN`;
//! [`FileMount::is_stale`] detects this, [`FileMount::clear_stale`] cleans up, from any process.

mod error;
mod mount;
pub(crate) mod mounts;
mod options;
mod request;
mod serve;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use drover_core::BlockDevice;

pub(crate) use error::listed;
pub use error::{FuseError, User};
pub use options::{MAX_THREADS, MAX_WAITING_THREADS, Options};

use crate::retry::{RETRY_LIMIT, retry_for, within};
use mount::{How, Outcome};
use mounts::Mounted;

/// How long [`FileMount::unmount`] waits for the kernel, which waits for the device.
pub const UNMOUNT_DEADLINE: Duration = Duration::from_secs(30);
/// How long a drop, an abort or a mount table query waits for the kernel.
const SHORT: Duration = Duration::from_secs(5);

/// The kernel's read-ahead with [`Options::page_cache`], in KiB; the default of 128 is a single request on a long path.
const READ_AHEAD_KB: u32 = 4096;

/// A device mounted as a file. When dropped, it is unmounted lazily: programs that have it open can continue until they
/// close it.
pub struct FileMount {
    at: PathBuf,
    path: PathBuf,
    /// Its entry in the mount table; [`None`] once it is unmounted.
    mounted: Option<Mounted>,
    /// The mount point was created for it.
    made: bool,
    /// Closed when the last serving thread has ended.
    served: mpsc::Receiver<()>,
}

impl FileMount {
    /// Mounts `device` as a file: `at` itself if that is a file or does not exist, `at/NAME` if it is a directory.
    ///
    /// A missing file is created, and removed again on unmount.
    ///
    /// # Errors
    /// [`FuseError`].
    pub fn mount(
        at: &Path,
        device: Arc<dyn BlockDevice>,
        mut options: Options,
    ) -> Result<Self, FuseError> {
        check(device.as_ref(), &options)?;
        options.read_only |= device.capabilities().read_only;
        let failed = |source| FuseError::mounting(at, source);
        let at = absolute(at).map_err(failed)?;
        if let Some(there) = mounts::mounted_at(&at).map_err(failed)?
            && there.is_fuse()
        {
            return Err(match is_dead(&at) {
                true => FuseError::Stale { at },
                false => FuseError::Mounted { at },
            });
        }
        let made = mount::prepare(&at).map_err(failed)?;
        let mounted = Self::mount_prepared(&at, made, device, &options);
        if mounted.is_err() && made {
            mount::remove_placeholder(&at);
        }
        mounted
    }

    fn mount_prepared(
        at: &Path,
        made: bool,
        device: Arc<dyn BlockDevice>,
        options: &Options,
    ) -> Result<Self, FuseError> {
        let failed = |source| FuseError::mounting(at, source);
        let below_directory = std::fs::metadata(at).map_err(failed)?.is_dir();
        let size = device.size();
        let disk = serve::Disk::new(device, options, below_directory);
        let connection = mount::mount(at, options)?;
        let found = mounts::mounted_at(at).map_err(failed)?;
        let (ends, served) = mpsc::channel();
        let this = Self {
            at: at.to_owned(),
            path: match below_directory {
                true => at.join(&options.name),
                false => at.to_owned(),
            },
            mounted: Some(found.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?),
            made,
            served,
        };
        let mut config = fuser::Config::default();
        config.n_threads = Some(options.threads.clamp(1, MAX_THREADS));
        config.clone_fd = true;
        // Access control is the kernel's, by the mount options.
        let session = fuser::Session::from_fd(disk, connection, fuser::SessionACL::All, config)
            .map_err(failed)?;
        std::thread::Builder::new()
            .name("fuse-session".into())
            .spawn(move || {
                let _ends = ends;
                // Our memory allocations must not wait for write-back to a disk that we serve. (Threads inherit this.)
                let _ = rustix::process::configure_io_flusher_behavior(true);
                if let Err(error) = session.run() {
                    tracing::warn!(%error, "a file mount ended with an error");
                }
            })
            .map_err(failed)?;
        if options.page_cache
            && let Some(mounted) = &this.mounted
        {
            let (major, minor) = (mounted.major, mounted.minor);
            let knob = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
            if let Err(error) = std::fs::write(&knob, READ_AHEAD_KB.to_string()) {
                tracing::debug!(knob, %error, "cannot limit the kernel's read-ahead");
            }
        }
        let (path, length) = (this.path.clone(), size);
        let seen = within(SHORT, move || {
            std::fs::metadata(path).map(|meta| meta.len())
        });
        match seen {
            Some(Ok(seen)) if seen == length => Ok(this),
            Some(Err(error)) => Err(failed(error)),
            _ => Err(failed(io::ErrorKind::TimedOut.into())),
        }
    }

    /// The path of the file that is the disk.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts if it is not in use; on return, nothing reaches the device through the mount any more. A process that
    /// has it open gets two seconds to close it; with an attached loop device the call fails at once.
    ///
    /// # Errors
    /// [`FuseError::Busy`], it stays mounted; [`FuseError::CutOff`] when the device hangs for [`UNMOUNT_DEADLINE`].
    pub fn unmount(&mut self) -> Result<(), FuseError> {
        self.unmount_within(UNMOUNT_DEADLINE)
    }

    /// The same, without waiting for processes to close it.
    ///
    /// # Errors
    /// As for [`FileMount::unmount`].
    pub fn unmount_at_once(&mut self) -> Result<(), FuseError> {
        self.unmount_with(Duration::ZERO, UNMOUNT_DEADLINE)
    }

    /// As [`FileMount::unmount`], with an explicit deadline.
    ///
    /// # Errors
    /// As for [`FileMount::unmount`].
    pub fn unmount_within(&mut self, deadline: Duration) -> Result<(), FuseError> {
        self.unmount_with(RETRY_LIMIT, deadline)
    }

    fn unmount_with(&mut self, timeout: Duration, deadline: Duration) -> Result<(), FuseError> {
        let Some(mounted) = self.current() else {
            return Ok(());
        };
        match self.unmount_idle(&mounted, timeout, deadline) {
            Outcome::Answered(Ok(())) => {}
            Outcome::Answered(Err(error)) if is_busy(&error) => {
                return Err(FuseError::Busy {
                    at: self.at.clone(),
                    users: mounts::users_of(&mounted),
                });
            }
            Outcome::Answered(Err(error)) => return Err(FuseError::unmounting(&self.at, error)),
            Outcome::Waits => return self.cut_off(&mounted, deadline),
        }
        self.gone();
        match self.served.recv_timeout(deadline) {
            Err(mpsc::RecvTimeoutError::Timeout) => Err(FuseError::CutOff {
                at: self.at.clone(),
                waited: deadline,
            }),
            _ => Ok(()),
        }
    }

    /// Unmounts if it is not in use, and retries while the users may be gone soon.
    fn unmount_idle(&self, mounted: &Mounted, timeout: Duration, deadline: Duration) -> Outcome {
        let attempt = || match mount::unmount(&self.at, How::Idle, deadline) {
            Outcome::Answered(Err(error)) if is_busy(&error) => Err(error),
            outcome => Ok(outcome),
        };
        let may_pass = |_: &io::Error| !mounts::carries_devices(mounted);
        retry_for(timeout, attempt, may_pass).unwrap_or_else(|error| Outcome::Answered(Err(error)))
    }

    /// Detaches the mount at once. Programs that have it open can continue until they close it, as long as this process
    /// lives.
    ///
    /// # Errors
    /// [`FuseError::Unmount`].
    pub fn unmount_lazy(&mut self) -> Result<(), FuseError> {
        let Some(mounted) = self.current() else {
            return Ok(());
        };
        match mount::unmount(&self.at, How::Lazy, SHORT) {
            Outcome::Answered(Ok(())) => {
                self.gone();
                Ok(())
            }
            Outcome::Answered(Err(error)) => Err(FuseError::unmounting(&self.at, error)),
            Outcome::Waits => self.cut_off(&mounted, SHORT),
        }
    }

    /// Unmounts even if it is in use and the device hangs: requests in flight and later ones fail.
    ///
    /// # Errors
    /// [`FuseError::Unmount`].
    pub fn abort(&mut self) -> Result<(), FuseError> {
        let Some(mounted) = self.current() else {
            return Ok(());
        };
        // By connection number first: users may abort their own mounts, but a forced unmount needs root.
        let _ = mount::abort(mounted.minor);
        match mount::unmount(&self.at, How::Abort, SHORT) {
            Outcome::Answered(Ok(())) => {
                self.gone();
                Ok(())
            }
            Outcome::Answered(Err(error)) => Err(FuseError::unmounting(&self.at, error)),
            Outcome::Waits => Err(FuseError::unmounting(
                &self.at,
                io::ErrorKind::TimedOut.into(),
            )),
        }
    }

    /// The kernel waits for the device: aborts the connection.
    fn cut_off(&mut self, mounted: &Mounted, waited: Duration) -> Result<(), FuseError> {
        mount::abort(mounted.minor).map_err(|error| FuseError::unmounting(&self.at, error))?;
        if self.current().is_some() {
            self.abort()?;
        }
        self.gone();
        Err(FuseError::CutOff {
            at: self.at.clone(),
            waited,
        })
    }

    /// The mount, if it is still in place: another one that has replaced it is not ours to unmount.
    fn current(&mut self) -> Option<Mounted> {
        let ours = self.mounted.clone()?;
        match mounts::mounted_at(&self.at) {
            Ok(there) if there.as_ref() != Some(&ours) => {
                self.gone();
                None
            }
            _ => Some(ours),
        }
    }

    fn gone(&mut self) {
        self.mounted = None;
        if self.made && matches!(mounts::mounted_at(&self.at), Ok(None)) {
            mount::remove_placeholder(&self.at);
        }
    }

    /// Whether there is a FUSE mount at `at` whose server is gone (or whose connection was aborted).
    #[must_use]
    pub fn is_stale(at: &Path) -> bool {
        absolute(at).is_ok_and(|at| {
            mounts::mounted_at(&at).is_ok_and(|there| there.is_some_and(|m| m.is_fuse()))
                && is_dead(&at)
        })
    }

    /// Removes stale mounts from `at`, and the placeholder file that was created as the mount point. Does nothing if
    /// there are none. Loop devices on it must be detached first: see
    /// [`loopdev::find_by_backing`](crate::loopdev::find_by_backing).
    ///
    /// # Errors
    /// [`FuseError::Unmount`]; [`FuseError::Mounted`] for a live mount.
    pub fn clear_stale(at: &Path) -> Result<(), FuseError> {
        /// Stacked mounts, each left by a crash.
        const DEPTH: usize = 16;
        let at = absolute(at).map_err(|error| FuseError::unmounting(at, error))?;
        for _ in 0..DEPTH {
            let there =
                mounts::mounted_at(&at).map_err(|error| FuseError::unmounting(&at, error))?;
            if !there.is_some_and(|there| there.is_fuse()) {
                mount::remove_placeholder(&at);
                return Ok(());
            }
            if !is_dead(&at) {
                return Err(FuseError::Mounted { at });
            }
            match mount::unmount(&at, How::Lazy, SHORT) {
                Outcome::Answered(Ok(())) => {}
                Outcome::Answered(Err(error)) => return Err(FuseError::unmounting(&at, error)),
                Outcome::Waits => {
                    let error = io::ErrorKind::TimedOut.into();
                    return Err(FuseError::unmounting(&at, error));
                }
            }
        }
        Err(FuseError::Mounted { at })
    }
}

impl Drop for FileMount {
    fn drop(&mut self) {
        if let Err(error) = self.unmount_lazy() {
            tracing::warn!(%error, "a file mount was not removed");
        }
    }
}

impl fmt::Debug for FileMount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileMount")
            .field("path", &self.path)
            .field("mounted", &self.mounted)
            .finish_non_exhaustive()
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY)
}

fn check(device: &dyn BlockDevice, options: &Options) -> Result<(), FuseError> {
    let name = options.name.as_str();
    let bad = name.contains(['/', '\0', '\n']) || matches!(name, "" | "." | "..");
    if bad || name.len() > 255 {
        return Err(FuseError::Name(name.to_owned()));
    }
    let capabilities = device.capabilities();
    if capabilities.alignment != 1 || capabilities.longest == 0 {
        return Err(FuseError::Alignment(capabilities.alignment));
    }
    match i64::try_from(device.size()) {
        Ok(_) => Ok(()),
        Err(_) => Err(FuseError::Size(device.size())),
    }
}

/// The path with symbolic links resolved, as in the mount table; the last component is not accessed, as it may be a
/// mount that hangs.
fn absolute(at: &Path) -> io::Result<PathBuf> {
    let at = std::path::absolute(at)?;
    if let (Some(parent), Some(name)) = (at.parent(), at.file_name()) {
        let plain = parent.canonicalize()?.join(name);
        // Reading the link itself cannot hang.
        return match std::fs::read_link(&plain) {
            Ok(_) => plain.canonicalize(),
            Err(_) => Ok(plain),
        };
    }
    Ok(at)
}

/// Whether the server of a FUSE mount is gone.
fn is_dead(at: &Path) -> bool {
    let at = at.to_owned();
    // The kernel's cached attributes are no sign of life.
    let asked = rustix::fs::AtFlags::STATX_FORCE_SYNC | rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    let answer = within(SHORT, move || {
        rustix::fs::statx(rustix::fs::CWD, &at, asked, rustix::fs::StatxFlags::SIZE).map(drop)
    });
    matches!(
        answer,
        Some(Err(
            rustix::io::Errno::NOTCONN | rustix::io::Errno::CONNABORTED
        ))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_device::backend::MemoryDevice;

    #[test]
    fn a_connection_is_cut_by_its_number_alone() {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            eprintln!("SKIP a_connection_is_cut_by_its_number_alone: only root may mount");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("disk");
        let device = Arc::new(MemoryDevice::new(4096));
        let mut mount = FileMount::mount(&at, device, Options::default()).unwrap();
        let mounted = mount.current().unwrap();
        mount::abort(mounted.minor).unwrap();
        assert!(FileMount::is_stale(&at));
        assert!(mount::abort(u32::MAX).is_err());
        // After an abort it can still be unmounted, and the placeholder file is removed.
        let result = mount.cut_off(&mounted, SHORT);
        assert!(
            matches!(result, Err(FuseError::CutOff { .. })),
            "{result:?}"
        );
        assert!(!at.exists());
        assert!(matches!(mount.unmount(), Ok(())));
    }
}
