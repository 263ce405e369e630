//! What had not arrived of a machine's disks when its source was given up as lost.
//!
//! It stays absent: who reads it gets an error, as from a disk with bad sectors, until it is written over. A file beside the list of
//! what is absent, in the journal of each disk, says so after a restart, and goes with it.

use drover_core::ImageName;
use drover_migrate::Site;
use drover_net::{Code, Refusal};
use drover_store::machine::MachineRecord;

use super::SiteMachines;
use super::unreadable::{error, mark_in};
use crate::error::failed;

impl SiteMachines {
    /// Gives up what has not arrived of a machine; how many bytes that are.
    pub(super) async fn lose(
        &self,
        name: &ImageName,
        record: &MachineRecord,
    ) -> Result<u64, Refusal> {
        self.open_disks(name, record).await?;
        let open = self.open.lock().await;
        let Some(machine) = open.get(name) else {
            let text = format!("the disks of {name} are not open");
            return Err(Refusal::new(Code::Unavailable, text));
        };
        let marks: Vec<_> = (0..machine.disks.len())
            .map(|index| mark_in(&self.journal(name, index)))
            .collect();
        let mark_all = move || {
            marks.iter().try_for_each(|mark| {
                drover_storage::create_private(mark)?;
                drover_storage::sync_parent(mark)
            })
        };
        let marked = tokio::task::spawn_blocking(mark_all).await;
        marked.map_err(failed)?.map_err(failed)?;
        let mut bytes = 0;
        for disk in &machine.disks {
            bytes += disk.arrival.left();
            disk.arrival.fail(error());
        }
        Ok(bytes)
    }

    /// Whether something of a machine that is here was given up.
    pub(super) fn has_lost_some(&self, name: &ImageName, record: &MachineRecord) -> bool {
        let mut disks = 0..record.disks.len();
        disks.any(|index| mark_in(&self.journal(name, index)).exists())
    }
}
