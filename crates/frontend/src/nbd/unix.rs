//! The file of a unix socket: ownership, and when it may be removed.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::error::NbdError;

/// How long another server may take to bind in the same directory.
const RETRY_LIMIT: Duration = Duration::from_secs(2);
/// Listen backlog.
const BACKLOG: i32 = 128;

/// A socket file created by this process; removed on drop if it is still the same.
pub(super) struct SocketFile {
    path: PathBuf,
    id: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == self.id);
        if same && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "nbd: cannot remove the socket file");
        }
    }
}

/// Listens at `path`, from the first moment for this user alone. A socket file without a listener is replaced.
pub(super) fn bind(path: &Path) -> Result<(UnixListener, SocketFile), NbdError> {
    let bad = |source: io::Error| NbdError::Bind {
        address: path.display().to_string(),
        source,
    };
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // Two servers that find the same stale file must not remove each other's fresh one.
    let directory = std::fs::File::open(directory).map_err(bad)?;
    lock(&directory).map_err(bad)?;
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(bad(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(bad(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "it exists and is not a socket; choose another path, or remove it",
            )));
        }
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => return Err(NbdError::InUse(path.into())),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(bad)?;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(NbdError::InUse(path.into()));
            }
            Err(error) => return Err(bad(error)),
        },
    }
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|e| bad(e.into()))?;
    let made = listen(&socket, path).map_err(|e| bad(e.into()))?;
    Ok((UnixListener::from(socket), made))
}

fn listen(socket: &OwnedFd, path: &Path) -> rustix::io::Result<SocketFile> {
    // The file gets its mode from the socket at creation.
    rustix::fs::fchmod(socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(socket, &SocketAddrUnix::new(path)?)?;
    let made = rustix::fs::lstat(path)?;
    let file = SocketFile {
        path: path.into(),
        id: (made.st_dev, made.st_ino),
    };
    rustix::net::listen(socket, BACKLOG)?;
    Ok(file)
}

fn lock(directory: &std::fs::File) -> io::Result<()> {
    let deadline = Instant::now() + RETRY_LIMIT;
    loop {
        match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error.into()),
        }
    }
}
