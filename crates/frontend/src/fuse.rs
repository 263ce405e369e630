//! A device as one file, by FUSE: what a program can open, map, copy from and put a loop device on (r3map §1.4.3).
//!
//! **Where.** The mount point may be a regular file, which then *is* the disk, or a directory, which then holds one
//! file. `fuser` serves; the mounting is done here, as the library reports errors of an unmount too coarsely and
//! unmounts by path without looking at what is mounted there.
//!
//! **Caching.** By default the file bypasses the kernel's page cache (`FOPEN_DIRECT_IO`): a read sees what the device
//! holds at that moment, whoever wrote it; a write has reached the device when it returns, and its error is its own;
//! a loop device with direct I/O does not keep bytes twice. Mappings go through the page cache and are kept
//! coherent by the kernel: it writes dirty pages back before, and drops pages after, direct requests to their range.
//! [`Options::page_cache`] turns the page cache and its read-ahead on, for a device that nobody else writes; `O_DIRECT` still
//! bypasses it. The write-back cache stays off in both: with it, written bytes wait in the kernel, a `flush`
//! that another front end of the device is asked for would not cover them, and errors surface long after the write.
//!
//! **Threads.** [`Options::threads`] threads take requests from the kernel and serve those that need not wait for a
//! network; reads that do ([`Cost::Network`](drover_core::Cost)) go to at most [`Options::waiting_threads`] others, and
//! to as many again flushes and writes that may have to wait, so that a lost link blocks only who reads what is not here,
//! and a cache without room only who writes.
//! The library reads and writes the connection with plain copies; it has no splice and no io_uring, and passes through only to files.
//!
//! **Ends.** Nothing here waits without a deadline: an unmount that the kernel does not answer, because a
//! device hangs, is cut short by aborting the connection. After a crash of this process the mount answers
//! `ENOTCONN`; [`FileMount::is_stale`] tells, [`FileMount::clear_stale`] tidies up, from any process.

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
pub use options::{MAX_THREADS, Options};

use crate::retry::{RETRY_LIMIT, retry_for, within};
use mount::{How, Outcome};
use mounts::Mounted;

/// How long [`FileMount::unmount`] waits for the kernel, which waits for the device.
pub const UNMOUNT_DEADLINE: Duration = Duration::from_secs(30);
/// How long a drop, an abort or a look at a mount waits for the kernel.
const SHORT: Duration = Duration::from_secs(5);

/// What the kernel reads ahead with [`Options::page_cache`], in KiB; it would be 128, a single request over a long way.
const READ_AHEAD_KB: u32 = 4096;

/// A device that is mounted as a file. Dropped, it is unmounted lazily: who has it open goes on until he closes it.
pub struct FileMount {
    at: PathBuf,
    path: PathBuf,
    /// What the mount table says of it; [`None`] once it is unmounted.
    mounted: Option<Mounted>,
    /// The mount point was made for it.
    made: bool,
    /// Ends when the last thread that serves has ended.
    served: mpsc::Receiver<()>,
}

impl FileMount {
    /// Shows `device` as a file: `at` itself if that is a file or does not exist, `at/NAME` if it is a directory.
    ///
    /// A file that does not exist is made, and removed again when it is unmounted.
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
        // The kernel lets in whom the mount options say.
        let session = fuser::Session::from_fd(disk, connection, fuser::SessionACL::All, config)
            .map_err(failed)?;
        std::thread::Builder::new()
            .name("fuse-session".into())
            .spawn(move || {
                let _ends = ends;
                // Memory that we ask for must not be freed by writing to a disk that we serve. (Threads inherit it.)
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
                tracing::debug!(knob, %error, "the kernel reads ahead as far as it wants");
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

    /// The file that is the disk.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts it if nobody uses it; when it returns, nothing of the mount reaches the device any more. A process that
    /// has it open gets two seconds to close it; a loop device that is attached to it is refused at once.
    ///
    /// # Errors
    /// [`FuseError::Busy`], and it stays mounted; [`FuseError::CutOff`] when the device hangs for [`UNMOUNT_DEADLINE`].
    pub fn unmount(&mut self) -> Result<(), FuseError> {
        self.unmount_within(UNMOUNT_DEADLINE)
    }

    /// The same, but nobody gets time to close it.
    ///
    /// # Errors
    /// As for [`FileMount::unmount`].
    pub fn unmount_at_once(&mut self) -> Result<(), FuseError> {
        self.unmount_with(Duration::ZERO, UNMOUNT_DEADLINE)
    }

    /// As [`FileMount::unmount`], with a deadline of one's own.
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

    /// Unmounts it if nobody uses it, and tries again where somebody does who may be gone in a moment.
    fn unmount_idle(&self, mounted: &Mounted, timeout: Duration, deadline: Duration) -> Outcome {
        let attempt = || match mount::unmount(&self.at, How::Idle, deadline) {
            Outcome::Answered(Err(error)) if is_busy(&error) => Err(error),
            outcome => Ok(outcome),
        };
        let may_pass = |_: &io::Error| !mounts::carries_devices(mounted);
        retry_for(timeout, attempt, may_pass).unwrap_or_else(|error| Outcome::Answered(Err(error)))
    }

    /// Takes it out of sight at once. Who has it open goes on until he closes it, as long as this process lives.
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

    /// Unmounts it whoever uses it, and though the device hangs: requests under way fail, and all that come.
    ///
    /// # Errors
    /// [`FuseError::Unmount`].
    pub fn abort(&mut self) -> Result<(), FuseError> {
        let Some(mounted) = self.current() else {
            return Ok(());
        };
        // By number first: a user may do that to his own mounts, unmounting by force is for root.
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

    /// The kernel waits for the device: ends that.
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

    /// The mount, if it still is the one that is there: another that took its place is not ours to unmount.
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

    /// Whether a FUSE mount is at `at` whose server is gone (or whose connection was cut).
    #[must_use]
    pub fn is_stale(at: &Path) -> bool {
        absolute(at).is_ok_and(|at| {
            mounts::mounted_at(&at).is_ok_and(|there| there.is_some_and(|m| m.is_fuse()))
                && is_dead(&at)
        })
    }

    /// Takes mounts whose server is gone away from `at`, and the file that was made to be mounted on. Does nothing
    /// where there is none. Loop devices on it are to be detached before: see
    /// [`loopdev::find_by_backing`](crate::loopdev::find_by_backing).
    ///
    /// # Errors
    /// [`FuseError::Unmount`]; [`FuseError::Mounted`] for a mount that is alive.
    pub fn clear_stale(at: &Path) -> Result<(), FuseError> {
        /// One over the other, each left by a crash.
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
            tracing::warn!(%error, "a file mount stays behind");
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

/// The path without symbolic links on the way, as the mount table has it; the last part is not looked at, as it may
/// be a mount that hangs.
fn absolute(at: &Path) -> io::Result<PathBuf> {
    let at = std::path::absolute(at)?;
    if let (Some(parent), Some(name)) = (at.parent(), at.file_name()) {
        let plain = parent.canonicalize()?.join(name);
        // Nothing hangs at a link's own.
        return match std::fs::read_link(&plain) {
            Ok(_) => plain.canonicalize(),
            Err(_) => Ok(plain),
        };
    }
    Ok(at)
}

/// Whether nobody answers behind a FUSE mount.
fn is_dead(at: &Path) -> bool {
    let at = at.to_owned();
    // What the kernel remembers is no sign of life.
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
        // Cut off, it can still be unmounted, and the file that was made for it goes.
        let result = mount.cut_off(&mounted, SHORT);
        assert!(
            matches!(result, Err(FuseError::CutOff { .. })),
            "{result:?}"
        );
        assert!(!at.exists());
        assert!(matches!(mount.unmount(), Ok(())));
    }
}
