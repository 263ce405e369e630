//! What a series of rounds leaves in QEMU, and its removal.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::held;
use super::names::Names;
use super::server::{socket_in, stop_serving};
use crate::error::HypervisorError;
use crate::machine::Machine;

/// How long a bitmap may be busy after its export has gone.
pub const BUSY: Duration = Duration::from_secs(5);

/// Ends what a series of this name holds and offers, as a process that was killed has left it: the disks use their own nodes
/// again. What records stays, for [`Rounds::resume`](super::Rounds::resume).
///
/// # Errors
/// Those of [`Rounds::begin`](super::Rounds::begin).
pub async fn let_go(
    machine: &Machine,
    name: &str,
    directory: &Path,
) -> Result<(), HypervisorError> {
    let names = Names::new(machine, name)?;
    held::unpause(machine, &names).await?;
    stop_serving(machine, &names, &socket_in(directory)).await?;
    held::remove(machine, &names).await
}

/// Removes from QEMU what a series of rounds of this name, begun with this directory, has left there, if anything.
///
/// # Errors
/// Those of [`Rounds::begin`](super::Rounds::begin).
pub async fn clear(machine: &Machine, name: &str, directory: &Path) -> Result<(), HypervisorError> {
    let names = Names::new(machine, name)?;
    held::unpause(machine, &names).await?;
    stop_serving(machine, &names, &socket_in(directory)).await?;
    held::remove(machine, &names).await?;
    for medium in machine.nodes().await? {
        for bitmap in medium.bitmaps {
            if names.is_bitmap(&bitmap.name) {
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
