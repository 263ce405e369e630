//! The hypervisor that waits for a machine: its disks, and the stream of its memory.

use std::time::Duration;

use drover_core::ImageName;
use drover_device::backend::nbd::NbdAddress;
use drover_hypervisor::HypervisorError;
use drover_hypervisor::machine::{
    Capability, Channel, Data, Machine, Medium, MigrationStatus, Node, RunState, Yank,
};
use drover_hypervisor::spec::disk_node;
use drover_store::machine::MAX_DISKS;
use tokio::net::UnixStream;

use crate::error::MigrateError;
use crate::protocol::OpenMove;

/// How long the destination's hypervisor may take to report that it has everything.
const ARRIVAL: Duration = Duration::from_secs(60);

/// How long a hypervisor that is not needed any more may take to say what it does.
const ANSWER: Duration = Duration::from_secs(5);

/// How long the hypervisor holds requests while the site that serves its disks is restarted.
const RECONNECT: Duration = Duration::from_secs(300);

/// The name of the descriptor of the stream in the hypervisor.
const STREAM: &str = "drover";

/// Gives a hypervisor that waits the disks of a machine, in the order of the offer: their sizes, and where they are served.
pub(super) async fn give_disks(
    machine: &Machine,
    offer: &OpenMove,
    served: &[(u64, NbdAddress)],
) -> Result<(), MigrateError> {
    let name = &offer.machine;
    let wrong = |text: String| Err(MigrateError::Unsupported(text));
    let status = machine.status().await?;
    if status != RunState::InMigrate {
        return wrong(format!(
            "the machine {name} there is {status} and does not wait for a migration: start it with -S -incoming defer"
        ));
    }
    machine.set_capabilities(&Capability::NEEDED, true).await?;
    let moved = offer.disks.iter().map(|disk| disk.device.as_str());
    let mounted = offer.mounted.iter().map(|disk| disk.device.as_str());
    let devices: Vec<_> = moved.chain(mounted).collect();
    attach_all(machine, name, &devices, served).await
}

/// Gives a hypervisor in which no machine has run yet the disks of one, by the names of its devices where it came from.
pub(super) async fn attach_all(
    machine: &Machine,
    name: &ImageName,
    devices: &[&str],
    served: &[(u64, NbdAddress)],
) -> Result<(), MigrateError> {
    let wrong = |text: String| Err(MigrateError::Unsupported(text));
    let found = machine.disks().await?.into_iter();
    let found: Vec<_> = found
        .filter_map(|disk| Some((disk.name, disk.medium?)))
        .filter(|(_, medium)| !medium.read_only)
        .collect();
    if found.len() != served.len() || devices.len() != served.len() {
        return wrong(format!(
            "the machine {name} has {} writable disks there, and {} here",
            found.len(),
            served.len()
        ));
    }
    for (n, ((size, address), offered)) in served.iter().zip(devices).enumerate() {
        let same = |(device, _): &&(String, Medium)| {
            // With one there is no doubt.
            device == offered || served.len() == 1
        };
        // In a QEMU that was built here, a device may have no name.
        let built = found.iter().find(|(_, medium)| medium.node == disk_node(n));
        let Some((device, medium)) = built.or_else(|| found.iter().find(same)) else {
            let there: Vec<_> = found.iter().map(|(device, _)| device.as_str()).collect();
            return wrong(format!(
                "the machine {name} has no disk called {} there, but {}: give the devices the same id",
                offered,
                there.join(", ")
            ));
        };
        if medium.size != *size {
            return wrong(format!(
                "the disk {device} of the machine {name} has {} bytes there, and {} here",
                medium.size, size
            ));
        }
        if medium.data != Data::Nbd(address.clone()) {
            attach(machine, n, &medium.node, address).await?;
        }
    }
    Ok(())
}

/// Ends a hypervisor that has begun to receive a machine, or has received it, and did not run it. One that has read nothing
/// can wait for the next attempt.
pub(super) async fn abandon(machine: &Machine) {
    let received = async {
        let status = machine.status().await?;
        let info = machine.migration().await?;
        Ok::<_, HypervisorError>(match status {
            RunState::InMigrate => info.status != MigrationStatus::None,
            RunState::Paused => info.status == MigrationStatus::Completed,
            _ => false,
        })
    };
    // One that does not answer is ended by who has started it, if by anybody.
    let received = tokio::time::timeout(ANSWER, received).await;
    if matches!(received, Ok(Ok(true))) {
        // It would wait for the server of its disks, which an earlier process of this site was.
        for n in 0..MAX_DISKS {
            let connection = Yank::BlockNode(node_name(n));
            if machine.yank(&[connection]).await.is_err() {
                break;
            }
        }
        machine.quit().await.ok();
    }
}

/// Gives a raw block node of a hypervisor that waits the bytes of a disk.
async fn attach(
    machine: &Machine,
    n: usize,
    node: &str,
    disk: &NbdAddress,
) -> Result<(), MigrateError> {
    let file = node_name(n);
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

/// What the block node of a disk is called.
fn node_name(n: usize) -> String {
    format!("drover-{n}")
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
