//! Machines that migrate between sites: what is known of them, and requests about them.

use drover_core::ImageName;
use drover_net::request;
use drover_store::machine::{MachineRecord, Move, Owner};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::home::Home;

/// Request: close the disks of a machine that has left this site.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CloseMachine {
    /// Its name.
    pub name: ImageName,
}
request!(CloseMachine: "machine.close", Manage, () => ());

/// Request: give up a move to this site, see [`drover_migrate::Moves::give_up`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RefuseMachine {
    /// The machine's name.
    pub name: ImageName,
}
request!(RefuseMachine: "machine.refuse", Manage, () => ());

/// A machine, as reported to users.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MachineInfo {
    /// Its name.
    pub name: String,
    /// `here`, `leaving`, `committed`, `coming`, `starting` or `away`.
    pub state: &'static str,
    /// The site that it goes to, comes from, or is at.
    pub peer: Option<String>,
    /// How often it has moved.
    pub generation: u64,
    /// The images of its disks at this site.
    pub disks: Vec<String>,
    /// The hypervisor that runs it at this site, where it was last moved from here.
    pub hypervisor: Option<String>,
}

impl MachineInfo {
    fn new(name: &ImageName, record: &MachineRecord) -> Self {
        let (state, peer) = match (&record.under_way, &record.owner) {
            (Some(Move::Leaving(_, to)), _) => ("leaving", Some(to)),
            (Some(Move::Committed(_, to)), _) => ("committed", Some(to)),
            (Some(Move::Coming(_, from, _)), _) => ("coming", Some(from)),
            (Some(Move::Taken(_, from)), _) => ("starting", Some(from)),
            (None, Owner::Here) => ("here", None),
            (None, Owner::There(at)) => ("away", Some(at)),
        };
        MachineInfo {
            name: name.to_string(),
            state,
            peer: peer.map(|peer| peer.name.clone()),
            generation: record.generation.0,
            disks: record.disks.iter().map(ToString::to_string).collect(),
            hypervisor: record.hypervisor.clone(),
        }
    }
}

/// The machines that have moved to or from this site, or are about to.
///
/// # Errors
/// When a record cannot be read.
pub fn list(home: &Home) -> Result<Vec<MachineInfo>> {
    let machines = home.machines();
    let mut list = Vec::new();
    for name in machines.names()? {
        // It may be forgotten meanwhile.
        if let Some(record) = machines.load(&name).map_err(Error::Refused)? {
            list.push(MachineInfo::new(&name, &record));
        }
    }
    Ok(list)
}
