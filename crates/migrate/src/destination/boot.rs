//! Starts a machine from disks that are here, without its memory.

use drover_core::ImageName;
use drover_hypervisor::machine::RunState;
use drover_hypervisor::{Hypervisor, Place};

use super::hypervisor::attach_all;
use super::waiting::Served;
use crate::error::MigrateError;

/// Boots a machine in a QEMU that was started with empty disks and has not run yet: gives it its disks, by the names of its
/// devices where it came from. Does nothing to one that runs.
///
/// # Errors
/// When it waits for a migration, has other disks, or is of libvirt.
pub async fn boot(
    name: &ImageName,
    place: &Place,
    served: &[Served],
    devices: &[&str],
) -> Result<(), MigrateError> {
    let wrong = |text: String| Err(MigrateError::Unsupported(text));
    let Hypervisor::Qemu(machine) = Hypervisor::connect(place).await? else {
        return wrong(format!(
            "{name} is of libvirt: start it with `virsh start {name}`"
        ));
    };
    match machine.status().await? {
        RunState::Running => return Ok(()),
        RunState::Prelaunch => {}
        RunState::InMigrate => {
            return wrong(format!(
                "the QEMU of {name} was started with -incoming and waits for a migration: where DROVER_INCOMING is set, `start` in config.toml has to start it without, as `drover migrate --start-script` does"
            ));
        }
        other => {
            return wrong(format!(
                "the QEMU of {name} is {other}: it must not have run yet; start it with -S"
            ));
        }
    }
    let disks: Vec<_> = served
        .iter()
        .map(|disk| (disk.device.size(), disk.address.clone()))
        .collect();
    attach_all(&machine, name, devices, &disks).await?;
    Ok(machine.cont().await?)
}
