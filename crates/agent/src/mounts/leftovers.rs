//! Cleanup of what a dead mount daemon left in the system: a stale FUSE mount, loop devices, kernel block devices.

use drover_frontend::{fuse, loopdev};

use super::kernel;
use super::record::{Front, Record, boot};
use crate::error::{Context, Result};

/// Removes what the dead daemon of the record's mount left.
///
/// # Errors
/// When something is still in use.
pub fn clear(record: &Record) -> Result<()> {
    if let Front::Kernel { driver, .. } = &record.front {
        return kernel::clear(record, *driver);
    }
    // Devices from before a reboot are gone, and their names may have been reused.
    let devices = match record.boot == boot() {
        true => record.devices.as_slice(),
        false => &[],
    };
    for device in devices {
        if let Err(e) = loopdev::detach_path(device)
            && device.symlink_metadata().is_ok()
        {
            tracing::debug!("{}: {e:#}", device.display());
        }
    }
    if let Front::File { path, .. } = &record.front
        && fuse::FileMount::is_stale(path)
    {
        fuse::FileMount::clear_stale(path)
            .with_context(|| format!("cannot clear {}", path.display()))?;
    }
    Ok(())
}
