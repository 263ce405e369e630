//! The hypervisor that waits for a machine: its disks, and the stream of its memory.

use std::time::Duration;

use drover_device::backend::nbd::NbdAddress;
use drover_hypervisor::machine::{Channel, Machine, MigrationStatus, Node};
use tokio::net::UnixStream;

use crate::error::MigrateError;

/// How long the destination's hypervisor may take to report that it has everything.
const ARRIVAL: Duration = Duration::from_secs(60);

/// How long the hypervisor holds requests while the site that serves its disks is restarted.
const RECONNECT: Duration = Duration::from_secs(300);

/// The name of the descriptor of the stream in the hypervisor.
const STREAM: &str = "drover";

/// Gives a raw block node of a hypervisor that waits the bytes of a disk.
pub(super) async fn attach(
    machine: &Machine,
    n: usize,
    node: &str,
    disk: &NbdAddress,
) -> Result<(), MigrateError> {
    let file = format!("drover-{n}");
    let nbd = Node::Nbd {
        name: file.clone(),
        address: disk.clone(),
        reconnect: RECONNECT,
    };
    machine.add_node(&nbd).await?;
    let raw = Node::Raw {
        name: node.to_owned(),
        file,
    };
    Ok(machine.reopen_node(&raw).await?)
}

/// Waits until the hypervisor has all of the machine.
pub(super) async fn arrived(machine: &Machine) -> Result<(), MigrateError> {
    let mut events = machine.events();
    if machine.migration().await?.status == MigrationStatus::Completed {
        return Ok(());
    }
    let wanted = MigrationStatus::Completed;
    Ok(machine
        .wait_migration(&mut events, &wanted, ARRIVAL)
        .await?)
}

/// Lets the hypervisor read its stream from a socket, and returns the other end.
pub(super) async fn receive_stream(machine: &Machine) -> Result<UnixStream, MigrateError> {
    let (ours, theirs) = UnixStream::pair().map_err(MigrateError::Stream)?;
    let theirs = theirs.into_std().map_err(MigrateError::Stream)?;
    machine.pass_descriptor(STREAM, theirs).await?;
    let stream = Channel::Descriptor(STREAM.into());
    machine.migrate_incoming(&stream).await?;
    Ok(ours)
}
