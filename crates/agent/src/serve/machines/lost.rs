//! What had not arrived of a machine's disks when its source was given up as lost.
//!
//! Where something is absent, it stays absent: who reads it gets an error, as from a disk with bad sectors, until it is written over. A file beside the list of
//! what is absent, in the journal of each disk, says so after a restart, and goes with it.

use std::sync::Arc;

use drover_core::{BlockDevice, ImageName};
use drover_migrate::Site;
use drover_net::{Code, Refusal};
use drover_store::machine::MachineRecord;

use super::SiteMachines;
use super::unreadable::{error, mark, mark_in};
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
        let mut bytes = 0;
        let (mut marks, mut whole) = (Vec::new(), Vec::new());
        for (index, disk) in machine.disks.iter().enumerate() {
            match disk.arrival.left() {
                0 => whole.push(Arc::clone(&disk.device)),
                left => {
                    bytes += left;
                    marks.push(mark_in(&self.journal(name, index)));
                }
            }
        }
        let kept = tokio::task::spawn_blocking(move || -> Result<(), Refusal> {
            // What has arrived is not absent again after a crash.
            for disk in whole {
                disk.flush()
                    .map_err(|e| Refusal::new(Code::Io, e.to_string()))?;
            }
            mark(&marks).map_err(failed)
        });
        kept.await.map_err(failed)??;
        for disk in machine.disks.iter().filter(|disk| disk.arrival.left() > 0) {
            disk.arrival.fail(error());
        }
        Ok(bytes)
    }
}
