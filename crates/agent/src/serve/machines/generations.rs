//! The generations of machines' disks, and what of them has not arrived.

use std::sync::Arc;

use drover_core::ImageName;
use drover_migrate::protocol::TellGenerations;
use drover_net::service::Peer;
use drover_net::{Code, Refusal};
use drover_store::generations::Summary;

use super::SiteMachines;
use crate::error::failed;
use crate::serve::domains::InUse;

impl SiteMachines {
    /// The generations of a machine's disk that is served here, or was frozen when the machine left; encoded.
    pub async fn generations(
        &self,
        name: &ImageName,
        disk: u32,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        let Some((domain, image)) = self.disk(name, disk).await? else {
            return Ok(None);
        };
        let record = self.machines.load(name)?;
        let runs = record.is_some_and(|record| record.may_run());
        let asked = tokio::task::spawn_blocking(move || domain.devices.generations(&image));
        let known = asked.await.map_err(failed)?;
        let known = known.filter(|known| runs || known.over);
        Ok(known.map(|known| known.encode()))
    }

    /// Bytes of the disks of a machine that have not arrived, if they are open.
    pub async fn missing(&self, name: &ImageName) -> Option<u64> {
        let open = self.open.lock().await;
        let disks = &open.get(name)?.disks;
        Some(disks.iter().map(|disk| disk.arrival.left()).sum())
    }

    /// The image of a machine's disk, if the machine is served here, or is elsewhere.
    async fn disk(
        &self,
        name: &ImageName,
        disk: u32,
    ) -> Result<Option<(Arc<InUse>, ImageName)>, Refusal> {
        if let Some(machine) = self.open.lock().await.get(name) {
            let disk = machine.disks.get(disk as usize);
            return Ok(disk.map(|disk| (Arc::clone(&machine.domain), disk.image.clone())));
        }
        let record = self.machines.load(name)?;
        let record = record.filter(|record| !record.may_run() && self.config(name).is_ok());
        match record.and_then(|record| record.disks.get(disk as usize).cloned()) {
            Some(image) => Ok(Some((self.domain(name).await?, image))),
            None => Ok(None),
        }
    }

    /// Takes what the site that a machine came from says of the generations of a disk.
    pub async fn told_generations(
        &self,
        peer: &Peer,
        told: TellGenerations,
    ) -> Result<(), Refusal> {
        let name = &told.machine;
        let record = self.machines.load(name)?;
        let is_its = self.config(name)?.domain == peer.domain
            && record.is_some_and(|record| record.came_by(told.token));
        if !is_its {
            let text = format!("the machine {name} did not come here by that move");
            return Err(Refusal::new(Code::OutOfOrder, text));
        }
        let of = Summary::decode(&told.generations);
        let of = of.map_err(|e| Refusal::new(Code::Protocol, e.to_string()))?;
        let Some((domain, image)) = self.disk(name, told.disk).await? else {
            return Ok(());
        };
        let adopt = move || domain.devices.adopt_generations(&image, &of);
        let adopted = tokio::task::spawn_blocking(adopt).await.map_err(failed)?;
        adopted.map_err(failed)
    }
}
