//! Mounting and unmounting: by mount(2), which accepts a file or a directory as mount point, or, for unprivileged
//! callers, through `fusermount3`.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use super::error::FuseError;
use super::options::Options;

/// The helper for unprivileged mounts.
const HELPER: &str = "fusermount3";

/// Contents of a placeholder file created as a mount point: it explains itself to users who find it after a crash, and
/// is recognised by drover.
const PLACEHOLDER: &[u8] =
    b"A mount point of drover. Nothing is mounted here now; this file can be removed.\n";

/// Creates `at` if it does not exist. Returns whether it is a placeholder file, created now or before a crash.
pub(super) fn prepare(at: &Path) -> io::Result<bool> {
    let made = OpenOptions::new().write(true).create_new(true).open(at);
    match made {
        Ok(mut file) => file.write_all(PLACEHOLDER).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(is_placeholder(at)),
        Err(error) => Err(error),
    }
}

fn is_placeholder(at: &Path) -> bool {
    let sized = std::fs::symlink_metadata(at)
        .is_ok_and(|meta| meta.is_file() && meta.len() == PLACEHOLDER.len() as u64);
    sized && std::fs::read(at).is_ok_and(|content| content == PLACEHOLDER)
}

/// Removes a placeholder file created by [`prepare`], and nothing else.
pub(super) fn remove_placeholder(at: &Path) {
    if is_placeholder(at) {
        let _ = std::fs::remove_file(at);
    }
}

/// Mounts at `at`, which exists, and returns the connection to the kernel.
pub(super) fn mount(at: &Path, options: &Options) -> Result<OwnedFd, FuseError> {
    let not_allowed = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    match mount_directly(at, options) {
        Err(error) if not_allowed(&error) && !rustix::process::geteuid().is_root() => {
            mount_by_helper(at, options)
        }
        done => done.map_err(|error| FuseError::mounting(at, error)),
    }
}

fn mount_directly(at: &Path, options: &Options) -> io::Result<OwnedFd> {
    let place = std::fs::metadata(at)?;
    let connection = File::options().read(true).write(true).open("/dev/fuse")?;
    let mut data = format!(
        "fd={},rootmode={:o},user_id={},group_id={},default_permissions",
        connection.as_raw_fd(),
        // The root's type must be that of the mount point.
        place.mode() & 0o170_000,
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    if options.allow_other {
        data.push_str(",allow_other");
    }
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    if options.read_only {
        flags |= MountFlags::RDONLY;
    }
    let data = CString::new(data)?;
    rustix::mount::mount(
        options.name.as_str(),
        at,
        "fuse.drover",
        flags,
        data.as_c_str(),
    )?;
    Ok(connection.into())
}

/// `fusermount3` mounts for its caller and sends the connection over a socket, which is its standard input here.
fn mount_by_helper(at: &Path, options: &Options) -> Result<OwnedFd, FuseError> {
    let failed = |error| FuseError::mounting(at, error);
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let name = options.name.replace('\\', "\\\\").replace(',', "\\,");
    let mut list = format!("fsname={name},subtype=drover,default_permissions,nosuid,nodev,noatime");
    if options.read_only {
        list.push_str(",ro");
    }
    if options.allow_other {
        list.push_str(",allow_other");
    }
    let helper = Command::new(HELPER)
        .args(["-o", &list, "--"])
        .arg(at)
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| FuseError::Helper {
            at: at.to_owned(),
            said: format!("{HELPER}: {error}; install it, or mount as root"),
        })?;
    if !helper.status.success() {
        return Err(FuseError::Helper {
            at: at.to_owned(),
            said: String::from_utf8_lossy(&helper.stderr).trim().to_owned(),
        });
    }
    ours.set_read_timeout(Some(Duration::from_secs(5)))
        .map_err(failed)?;
    receive(&ours)
        .map_err(failed)?
        .ok_or_else(|| FuseError::Helper {
            at: at.to_owned(),
            said: format!("{HELPER} sent no connection"),
        })
}

fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            return Ok(fds.next());
        }
    }
    Ok(None)
}

/// How to unmount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// Only if it is not in use.
    Idle,
    /// Detached now, gone with its last user.
    Lazy,
    /// Requests in flight and later ones fail.
    Abort,
}

/// The outcome of an unmount.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The kernel's result.
    Answered(io::Result<()>),
    /// No result before the deadline: a thread waits for the kernel, which waits for the device.
    Waits,
}

/// Unmounts `at`, on a separate thread: unmounting writes dirty pages back, which takes as long as the device does.
pub(super) fn unmount(at: &Path, how: How, deadline: Duration) -> Outcome {
    let (answer, answered) = mpsc::channel();
    let place = at.to_owned();
    let thread = std::thread::Builder::new()
        .name("fuse-unmount".into())
        .spawn(move || {
            let _ = answer.send(unmount_now(&place, how));
        });
    if let Err(error) = thread {
        return Outcome::Answered(Err(error));
    }
    match answered.recv_timeout(deadline) {
        Ok(result) => Outcome::Answered(result),
        Err(_) => Outcome::Waits,
    }
}

fn unmount_now(at: &Path, how: How) -> io::Result<()> {
    let flags = UnmountFlags::NOFOLLOW
        | match how {
            How::Idle => UnmountFlags::empty(),
            How::Lazy => UnmountFlags::DETACH,
            How::Abort => UnmountFlags::DETACH | UnmountFlags::FORCE,
        };
    match rustix::mount::unmount(at, flags) {
        Err(Errno::PERM) => unmount_by_helper(at, how),
        done => Ok(done?),
    }
}

fn unmount_by_helper(at: &Path, how: How) -> io::Result<()> {
    let mut helper = Command::new(HELPER);
    helper.arg("-u").arg("-q");
    if how != How::Idle {
        helper.arg("-z");
    }
    let output = helper.arg("--").arg(at).stdin(Stdio::null()).output()?;
    match output.status.success() {
        true => Ok(()),
        false if String::from_utf8_lossy(&output.stderr).contains("busy") => {
            Err(Errno::BUSY.into())
        }
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(io::Error::other(format!("{HELPER}: {}", said.trim())))
        }
    }
}

/// Aborts a FUSE connection by its number: every request in flight and later one fails at once. Works even if the mount
/// has no path any more.
pub(super) fn abort(connection: u32) -> io::Result<()> {
    let usual = PathBuf::from(format!("/sys/fs/fuse/connections/{connection}/abort"));
    match std::fs::write(&usual, b"1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => abort_unmounted(connection),
        done => done,
    }
}

/// As [`abort`], where the control file system is not mounted: through a detached mount of it.
fn abort_unmounted(connection: u32) -> io::Result<()> {
    let context = rustix::mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&context)?;
    let root = rustix::mount::fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )?;
    let file = rustix::fs::openat(
        &root,
        format!("{connection}/abort"),
        OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    rustix::io::write(&file, b"1")?;
    Ok(())
}
