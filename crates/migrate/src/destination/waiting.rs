//! The hypervisor that waits for a machine: a QEMU, or libvirt.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::{BlockDevice, ImageName};
use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use drover_hypervisor::libvirt::{Description, Domain, DomainState, Medium};
use drover_hypervisor::machine::{Machine, RunState};
use drover_hypervisor::{Hypervisor, Place};
use tokio::net::UnixStream;

use super::hypervisor as qemu;
use crate::error::MigrateError;
use crate::program::Target;
use crate::protocol::OpenMove;

/// A disk that is open at this site, and served to a hypervisor.
#[derive(Clone)]
pub struct Served {
    /// The disk.
    pub device: Arc<dyn BlockDevice>,
    /// The same, as what comes of it is written.
    pub target: Target,
    /// The export of the NBD server that serves it.
    pub address: NbdAddress,
}

/// A hypervisor that waits for a machine, has received it, or runs it.
#[derive(Clone)]
pub(super) enum Waiting {
    Qemu(Machine),
    Libvirt(Received),
    /// Nothing: it is the disk of a program.
    Image,
}

/// A machine of libvirt.
#[derive(Clone)]
pub(super) struct Received {
    domain: Domain,
    /// Where its QEMU waits for its memory.
    memory: PathBuf,
    /// Whether it has arrived, and no longer depends on the connection with libvirt.
    arrived: Arc<AtomicBool>,
}

impl Waiting {
    /// Connects; `memory` is a socket that libvirt may use.
    pub(super) async fn connect(place: &Place, memory: PathBuf) -> Result<Self, MigrateError> {
        Ok(match Hypervisor::connect(place).await? {
            Hypervisor::Qemu(machine) => Self::Qemu(machine),
            Hypervisor::Libvirt(domain) => Self::Libvirt(Received {
                domain,
                memory,
                arrived: Arc::default(),
            }),
        })
    }

    /// Gives it the disks of a machine, and lets it wait; `mounted` is where those are served that do not move.
    pub(super) async fn prepare(
        &self,
        offer: &OpenMove,
        served: &[Served],
        mounted: Vec<NbdAddress>,
    ) -> Result<(), MigrateError> {
        match self {
            Self::Qemu(machine) => {
                let moved = served.iter();
                let moved = moved.map(|disk| (disk.device.size(), disk.address.clone()));
                let sizes = offer.mounted.iter().map(|disk| disk.size);
                let disks: Vec<_> = moved.chain(sizes.zip(mounted)).collect();
                qemu::give_disks(machine, offer, &disks).await
            }
            Self::Libvirt(_) if !offer.mounted.is_empty() => {
                Err(MigrateError::Unsupported(format!(
                    "{} is of libvirt there, which cannot be given disks of a third site: add --copy-mounts",
                    offer.machine
                )))
            }
            Self::Libvirt(received) => received.prepare(offer, served).await,
            Self::Image => check_sizes(offer, served),
        }
    }

    /// Lets it read the machine's memory from a socket, and returns the other end.
    pub(super) async fn receive_stream(&self) -> Result<UnixStream, MigrateError> {
        match self {
            Self::Qemu(machine) => qemu::receive_stream(machine).await,
            Self::Libvirt(received) => {
                let connected = UnixStream::connect(&received.memory).await;
                connected.map_err(MigrateError::Stream)
            }
            Self::Image => Err(MigrateError::Protocol("memory of a disk")),
        }
    }

    /// Waits until it has all of the machine.
    pub(super) async fn arrived(&self, disks: &[Served]) -> Result<(), MigrateError> {
        match self {
            Self::Qemu(machine) => qemu::arrived(machine).await,
            Self::Libvirt(received) => received.arrived(disks).await,
            // It was flushed when the last round was.
            Self::Image => Ok(()),
        }
    }

    /// Lets a machine that was taken run.
    pub(super) async fn run(&self, name: &ImageName) -> Result<(), MigrateError> {
        let lost = |how: &str| {
            Err(MigrateError::Unsupported(format!(
                "the memory of the machine {name} was lost with its QEMU: {how}, and give the migration up there"
            )))
        };
        match self {
            Self::Qemu(machine) => match machine.status().await? {
                RunState::Running => Ok(()),
                RunState::InMigrate => lost("boot it from its disks"),
                _ => Ok(machine.cont().await?),
            },
            Self::Libvirt(received) => match received.domain.state().await? {
                DomainState::Running => Ok(()),
                DomainState::Paused | DomainState::Stalled => Ok(received.domain.resume().await?),
                _ => lost(&format!("`virsh start {name}`")),
            },
            Self::Image => Ok(()),
        }
    }

    /// Lets a machine run on whose disks could not be reached while the site was away. QEMU finds out only when it needs
    /// them, and may fail once more then.
    pub(super) async fn rouse(&self) -> Result<(), MigrateError> {
        if let Self::Libvirt(received) = self
            && received.domain.state().await? == DomainState::Stalled
        {
            received.domain.resume().await?;
        }
        Ok(())
    }

    /// Ends one that has begun to receive a machine, or has received it, and did not run it.
    pub(super) async fn abandon(&self) {
        match self {
            Self::Qemu(machine) => qemu::abandon(machine).await,
            Self::Libvirt(received) => received.abandon().await,
            Self::Image => {}
        }
    }
}

impl Received {
    async fn prepare(&self, offer: &OpenMove, served: &[Served]) -> Result<(), MigrateError> {
        let name = &offer.machine;
        let state = self.domain.state().await?;
        if state != DomainState::Off {
            return Err(MigrateError::Unsupported(format!(
                "the machine {name} of libvirt there is not off: `virsh destroy {name}`, if it is an old copy"
            )));
        }
        let there = self.domain.describe(true).await?;
        check_disks(&there, offer, served)?;
        // Of a QEMU that was killed.
        let _ = std::fs::remove_file(&self.memory);
        Ok(self.domain.receive(&self.memory).await?)
    }

    async fn arrived(&self, disks: &[Served]) -> Result<(), MigrateError> {
        if !self.arrived.load(Ordering::Acquire) {
            self.domain.arrived().await?;
            self.arrived.store(true, Ordering::Release);
        } else if self.domain.state().await? != DomainState::Paused {
            return Err(MigrateError::Unsupported("its QEMU has ended".into()));
        }
        let disks = disks.to_vec();
        let flush = move || {
            disks.iter().try_for_each(|disk| {
                disk.device.flush().map_err(|error| MigrateError::Disk {
                    disk: disk.address.export.clone(),
                    error,
                })
            })
        };
        let flushed = tokio::task::spawn_blocking(flush).await;
        flushed.map_err(|_| MigrateError::Stopped)?
    }

    async fn abandon(&self) {
        let is_paused = async {
            let is_paused = self.domain.state().await? == DomainState::Paused;
            let live = self.domain.describe(false).await?;
            Ok::<_, MigrateError>(is_paused && self.is_ours(&live))
        };
        if !is_paused.await.unwrap_or(false) {
            return;
        }
        let ended = match self.arrived.load(Ordering::Acquire) {
            true => self.domain.destroy().await,
            false => match self.domain.refuse().await {
                Ok(()) => Ok(()),
                // Of an earlier process of this site.
                Err(_) => self.domain.destroy().await,
            },
        };
        if let Err(e) = ended {
            tracing::warn!("{e}");
        }
        let _ = std::fs::remove_file(&self.memory);
    }

    /// Whether its disks are those that this site serves: the socket of its memory is beside theirs.
    fn is_ours(&self, machine: &Description) -> bool {
        let directory = self.memory.parent();
        let mut writable = machine.disks.iter().filter(|disk| disk.writable);
        writable.any(|disk| match &disk.medium {
            Medium::Nbd { socket, .. } => socket.parent() == directory,
            _ => false,
        })
    }
}

/// Checks that the images that were sent are as large as the disks that move.
fn check_sizes(offer: &OpenMove, served: &[Served]) -> Result<(), MigrateError> {
    for (disk, served) in offer.disks.iter().zip(served) {
        let size = served.device.size();
        if disk.size != size {
            return Err(MigrateError::Unsupported(format!(
                "{} has {size} bytes there, and {} here",
                disk.image, disk.size
            )));
        }
    }
    Ok(())
}

/// Checks that a machine as it is defined here has the disks that were offered, and finds each where this site serves it.
fn check_disks(
    there: &Description,
    offer: &OpenMove,
    served: &[Served],
) -> Result<(), MigrateError> {
    let name = &offer.machine;
    let wrong = |text: String| Err(MigrateError::Unsupported(text));
    let writable: Vec<_> = there.disks.iter().filter(|disk| disk.writable).collect();
    if writable.len() != served.len() || offer.disks.len() != served.len() {
        return wrong(format!(
            "the machine {name} has {} writable disks there, and {} here",
            writable.len(),
            served.len()
        ));
    }
    check_sizes(offer, served)?;
    for (offered, served) in offer.disks.iter().zip(served) {
        let Some(disk) = writable.iter().find(|disk| disk.target == offered.device) else {
            let there: Vec<_> = writable.iter().map(|disk| disk.target.as_str()).collect();
            return wrong(format!(
                "the machine {name} has no disk called {} there, but {}: give the disks the same target",
                offered.device,
                there.join(", ")
            ));
        };
        let NbdAddress {
            socket: NbdSocket::Unix(socket),
            export,
        } = &served.address
        else {
            return Err(MigrateError::Protocol("the disks"));
        };
        let expected = Medium::Nbd {
            socket: socket.clone(),
            export: export.clone(),
        };
        if disk.medium != expected || disk.format != "raw" || !disk.waits {
            return wrong(format!(
                "the disk {} of the machine {name} must be drover's there: `virsh edit {name}`, and give it type='network', \
                 <driver name='qemu' type='raw' error_policy='stop'/> and <source protocol='nbd' name='{export}'><host \
                 transport='unix' socket='{}'/></source>",
                disk.target,
                socket.display()
            ));
        }
    }
    Ok(())
}
