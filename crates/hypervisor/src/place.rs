//! How a machine's hypervisor is found.

use std::path::PathBuf;

use crate::error::HypervisorError;
use crate::libvirt::{Domain, Uri};
use crate::machine::Machine;

/// Where the hypervisor of a machine is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A QEMU, at its QMP socket.
    Qmp(PathBuf),
    /// A libvirt of this host, by the machine's name there.
    Libvirt(Uri, String),
}

/// The hypervisor of a machine.
#[derive(Clone, Debug)]
pub enum Hypervisor {
    /// A QEMU that no other program manages.
    Qemu(Machine),
    /// libvirt.
    Libvirt(Domain),
}

impl Hypervisor {
    /// Connects.
    ///
    /// # Errors
    /// When it cannot be reached, or does not know the machine.
    pub async fn connect(place: &Place) -> Result<Self, HypervisorError> {
        match place {
            Place::Qmp(socket) => Ok(Self::Qemu(Machine::connect(socket).await?)),
            Place::Libvirt(uri, name) => Ok(Self::Libvirt(Domain::open(uri, name).await?)),
        }
    }
}
