//! Unix sockets: the way into a site from its own machine, for its own user.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;

use crate::NetError;
use crate::connection::Connection;
use crate::error::plain;

/// A Unix socket on which a process takes local calls. Only the owner may connect (mode 0600); the
/// file goes away with the listener.
#[derive(Debug)]
pub struct LocalListener {
    socket: UnixListener,
    path: PathBuf,
    inode: (u64, u64),
}

impl LocalListener {
    /// Listens on `path`. A socket that a dead process left there is replaced; a live one is not.
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`NetError::Local`] when another process listens there, when something that is not a
    /// socket has the name, when the path is too long for a socket (about 100 bytes), or what
    /// the system reports.
    pub fn bind(path: impl Into<PathBuf>) -> Result<Self, NetError> {
        let path = path.into();
        Self::open(&path).map_err(|e| NetError::Local {
            reason: explain(&e),
            path: path.clone(),
        })
    }

    fn open(path: &Path) -> io::Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(meta) if !meta.file_type().is_socket() => {
                return Err(io::Error::other("there is a file that is not a socket"));
            }
            Ok(_) if std::os::unix::net::UnixStream::connect(path).is_ok() => {
                return Err(io::Error::other("another process is listening there"));
            }
            _ => {}
        }
        // Renamed only once its mode is set, so that no other user can connect in between.
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{}", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let _ = fs::remove_file(&temporary);
        let socket = UnixListener::bind(&temporary)?;
        let named: io::Result<_> = (|| {
            fs::set_permissions(&temporary, fs::Permissions::from_mode(0o600))?;
            let meta = fs::symlink_metadata(&temporary)?;
            fs::rename(&temporary, path)?;
            Ok((meta.dev(), meta.ino()))
        })();
        if named.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        Ok(LocalListener {
            socket,
            path: path.to_owned(),
            inode: named?,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next caller. Cancel safe.
    ///
    /// # Errors
    /// [`NetError::Local`] when the socket itself is broken.
    pub async fn accept(&self) -> Result<Connection, NetError> {
        const ENFILE: i32 = 23;
        const EMFILE: i32 = 24;
        loop {
            match self.socket.accept().await {
                Ok((stream, _)) => return Ok(Connection::from_unix(stream, "local caller")),
                Err(e) if matches!(e.raw_os_error(), Some(ENFILE | EMFILE)) => {
                    sleep(Duration::from_millis(100)).await;
                }
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(e) => {
                    return Err(NetError::Local {
                        path: self.path.clone(),
                        reason: plain(&e),
                    });
                }
            }
        }
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        // Not when another process has put its own socket there meanwhile.
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|meta| (meta.dev(), meta.ino()) == self.inode);
        if ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Connects to the process that listens on the Unix socket `path`.
///
/// # Errors
/// [`NetError::Local`] when none does.
pub async fn connect_unix(path: impl AsRef<Path>) -> Result<Connection, NetError> {
    let path = path.as_ref();
    match UnixStream::connect(path).await {
        Ok(stream) => Ok(Connection::from_unix(
            stream,
            format!("the process at {}", path.display()),
        )),
        Err(e) => Err(NetError::Local {
            path: path.to_owned(),
            reason: match e.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    "no process is listening there".into()
                }
                _ => explain(&e),
            },
        }),
    }
}

fn explain(e: &io::Error) -> String {
    if e.kind() == io::ErrorKind::InvalidInput {
        "the path is too long for a socket".into()
    } else {
        plain(e)
    }
}
