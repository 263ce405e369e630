//! Tells the other site what a machine is made of.

use std::path::Path;

use drover_hypervisor::machine::Machine;
use drover_hypervisor::spec::Spec;
use drover_hypervisor::{CommandLine, HypervisorError};
use drover_net::{Code, NetError, service};
use drover_store::machine::Token;

use super::MoveOptions;
use super::ahead::Ahead;
use super::disks::Disks;
use crate::destination::Pending;
use crate::error::MigrateError;
use crate::protocol::DescribeMachine;

/// Whether the other site builds the hypervisor for a machine, which it is told by this connection; one that has its own for it does
/// not.
///
/// # Errors
/// When it builds one, and cannot build this, or the machine cannot be described.
pub(super) fn describe<'a>(
    machine: &'a Machine,
    disks: &'a Disks,
    options: &'a MoveOptions,
    token: Option<Token>,
    connection: Ahead,
) -> Pending<'a, Result<bool, MigrateError>> {
    Box::pin(async move {
        let (spec, why) = match read(machine, disks, options).await {
            Ok(spec) => (Some(spec), None),
            Err(e) => (None, Some(e)),
        };
        let describe = DescribeMachine {
            machine: options.name_there.clone(),
            token,
            spec,
        };
        let builds = match tell(&describe, connection).await {
            // It runs an earlier version, and has its own.
            Err(MigrateError::Net(NetError::Refused(refusal)))
                if refusal.code == Code::Unsupported =>
            {
                false
            }
            builds => builds?,
        };
        match why {
            Some(why) if builds => Err(MigrateError::Unsupported(format!(
                "{} builds the QEMU for {}, but {why}: give it `incoming` and `start` there instead",
                options.send.peer_name, options.name_there
            ))),
            _ => Ok(builds),
        }
    })
}

async fn read(
    machine: &Machine,
    disks: &Disks,
    options: &MoveOptions,
) -> Result<Spec, HypervisorError> {
    let socket = options.hypervisor.strip_prefix("qmp:").unwrap_or_default();
    let line = CommandLine::of(Path::new(socket))?;
    let moving = disks.offers.iter().map(|disk| (&disk.device, disk.size));
    let staying = disks.mounted.iter().map(|disk| (&disk.device, disk.size));
    let all = moving.chain(staying);
    let all = all.map(|(device, size)| (device.clone(), size)).collect();
    Spec::read(machine, &line, all).await
}

async fn tell(describe: &DescribeMachine, connection: Ahead) -> Result<bool, MigrateError> {
    let (mut reader, mut writer) = connection.made().await?.split();
    service::open(&mut writer, describe).await?;
    writer.flush().await?;
    Ok(service::read_reply::<DescribeMachine>(&mut reader).await?)
}
