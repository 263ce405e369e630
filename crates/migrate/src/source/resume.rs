//! Ends what a move has begun at a hypervisor, so that the machine runs on.

use std::path::Path;
use std::time::{Duration, Instant};

use drover_hypervisor::Hypervisor;
use drover_hypervisor::machine::{Machine, MigrationInfo, MigrationStatus, RunState, Yank};

use super::disks::Disks;
use super::domain;
use crate::error::MigrateError;

/// How long a migration that is cancelled may take to end by itself.
pub(super) const CANCEL_LIMIT: Duration = Duration::from_secs(5);

/// How long it may take in all.
const RESUME_LIMIT: Duration = Duration::from_secs(60);

/// How often that is looked at.
const CANCEL_POLL: Duration = Duration::from_millis(20);

/// Ends what a move has begun, in this process or an earlier one, and lets the machine run.
pub(super) async fn restore(
    hypervisor: &Hypervisor,
    disks: &Disks,
    performing: Option<domain::Performing>,
    work: &Path,
) -> Result<(), MigrateError> {
    match hypervisor {
        Hypervisor::Qemu(machine) => {
            let resumed = resume(machine).await;
            disks.clear(machine, work).await;
            resumed
        }
        Hypervisor::Libvirt(domain) => domain::restore(domain, performing, work).await,
    }
}

/// Ends a migration of the hypervisor, if there is one, and lets the machine run.
pub(super) async fn resume(machine: &Machine) -> Result<(), MigrateError> {
    let begun = Instant::now();
    leave_device_state(machine).await;
    let begun_to_end = Instant::now();
    match tokio::time::timeout(CANCEL_LIMIT, machine.cancel_migration()).await {
        Ok(cancelled) => cancelled?,
        // It waits for a connection that is dead.
        Err(_) => machine.yank(&[Yank::Migration]).await?,
    }
    let mut yanked = false;
    while !machine.migration().await?.status.is_idle() {
        if begun.elapsed() > RESUME_LIMIT {
            return Err(MigrateError::TooLong {
                what: "ending its migration",
                seconds: RESUME_LIMIT.as_secs(),
            });
        }
        if begun_to_end.elapsed() > CANCEL_LIMIT && !yanked {
            machine.yank(&[Yank::Migration]).await?;
            yanked = true;
        }
        tokio::time::sleep(CANCEL_POLL).await;
    }
    // QEMU says that its migration has ended before the machine's state is settled, and refuses `cont` in between.
    loop {
        match machine.status().await? {
            RunState::PostMigrate => return Ok(machine.cont().await?),
            RunState::FinishMigrate if begun.elapsed() < RESUME_LIMIT => {
                tokio::time::sleep(CANCEL_POLL).await;
            }
            RunState::FinishMigrate => {
                return Err(MigrateError::TooLong {
                    what: "settling its state after the migration",
                    seconds: RESUME_LIMIT.as_secs(),
                });
            }
            _ => return Ok(()),
        }
    }
}

/// Waits until QEMU has sent its devices, or failed to: nobody carries its stream any more. Cancelled meanwhile it may run on
/// with disks that it has closed, and crash at the first write (7.2).
async fn leave_device_state(machine: &Machine) {
    let begun = Instant::now();
    let mut before = None;
    while begun.elapsed() < RESUME_LIMIT / 2 {
        // One that does not answer is yanked.
        let asked = tokio::time::timeout(CANCEL_LIMIT, machine.migration()).await;
        let Ok(Ok(MigrationInfo { status, .. })) = asked else {
            return;
        };
        let may_wait = match status {
            MigrationStatus::Device => true,
            // It may have been told to continue just now.
            MigrationStatus::PreSwitchover => before != Some(MigrationStatus::PreSwitchover),
            _ => false,
        };
        if !may_wait {
            return;
        }
        before = Some(status);
        tokio::time::sleep(CANCEL_POLL).await;
    }
}
