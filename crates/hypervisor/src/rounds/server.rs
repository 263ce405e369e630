//! QEMU's NBD server while a series of rounds uses it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use drover_storage::make_private_dir;
use rustix::process::geteuid;

use super::names::Names;
use crate::error::{HypervisorError, plain};
use crate::machine::Machine;

/// Starts it, on a socket that only the owner of the directory can reach.
pub async fn start_serving(machine: &Machine, socket: &Path) -> Result<(), HypervisorError> {
    let local = |e: io::Error| HypervisorError::Local {
        path: socket.display().to_string(),
        reason: plain(&e),
    };
    let directory = socket.parent().unwrap_or(socket);
    make_private_dir(directory).map_err(local)?;
    let found = fs::metadata(directory).map_err(local)?;
    if found.uid() != geteuid().as_raw() || found.mode() & 0o077 != 0 {
        return Err(HypervisorError::Local {
            path: directory.display().to_string(),
            reason: "other users can enter this directory: name one of your own, of mode 0700"
                .into(),
        });
    }
    let listener = UnixListener::bind(socket).map_err(local)?;
    let started = machine.start_nbd_server(listener).await;
    if let Err(e) = started {
        let _ = fs::remove_file(socket);
        return Err(e);
    }
    Ok(())
}

/// Where the server's socket is.
pub fn socket_in(directory: &Path) -> PathBuf {
    directory.join("nbd.sock")
}

/// Ends our exports; the server too, if it is ours (it is when the exports or the socket are) and nobody else exports by it.
pub async fn stop_serving(
    machine: &Machine,
    names: &Names,
    socket: &Path,
) -> Result<(), HypervisorError> {
    let ours = delete_exports(machine, |id| names.is_export(id)).await?;
    if (ours || socket.exists()) && machine.exports().await?.is_empty() {
        // It is not there when QEMU was started anew.
        match machine.stop_nbd_server().await {
            Err(HypervisorError::Refused { .. }) | Ok(()) => {}
            Err(e) => return Err(e),
        }
    }
    match fs::remove_file(socket) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(HypervisorError::Local {
            path: socket.display().to_string(),
            reason: plain(&e),
        }),
        _ => Ok(()),
    }
}

/// Ends these exports; whether there were any.
pub async fn delete_exports(
    machine: &Machine,
    which: impl Fn(&str) -> bool,
) -> Result<bool, HypervisorError> {
    let mut any = false;
    for id in machine.exports().await? {
        if which(&id) {
            any = true;
            machine.delete_export(&id).await?;
        }
    }
    Ok(any)
}
