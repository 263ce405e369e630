//! What a series of rounds leaves in QEMU, and its removal.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::names::Names;
use crate::error::{HypervisorError, plain};
use crate::machine::Machine;

/// How long a bitmap may be busy after its export has gone.
pub const BUSY: Duration = Duration::from_secs(5);

/// Removes from QEMU what a series of rounds of this name, begun with this directory, has left there, if anything.
///
/// # Errors
/// Those of [`Rounds::begin`](super::Rounds::begin).
pub async fn clear(machine: &Machine, name: &str, directory: &Path) -> Result<(), HypervisorError> {
    let names = Names::new(machine, name)?;
    stop_serving(machine, &names, &socket_in(directory)).await?;
    for medium in machine
        .disks()
        .await?
        .into_iter()
        .filter_map(|disk| disk.medium)
    {
        for bitmap in medium.bitmaps {
            if names.number_of(&bitmap.name).is_some() {
                machine
                    .remove_bitmap(&medium.node, &bitmap.name, BUSY)
                    .await?;
            }
        }
    }
    // It stays where others keep files in it, or have made it for us.
    let _ = fs::remove_dir(directory);
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
    let ours = delete_exports(machine, names, |_| true).await?;
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

/// Ends the exports of rounds with these numbers; whether there were any of the series.
pub async fn delete_exports(
    machine: &Machine,
    names: &Names,
    which: impl Fn(u64) -> bool,
) -> Result<bool, HypervisorError> {
    let mut any = false;
    for id in machine.exports().await? {
        if let Some(number) = names.number_of_export(&id) {
            any = true;
            if which(number) {
                machine.delete_export(&id).await?;
            }
        }
    }
    Ok(any)
}
