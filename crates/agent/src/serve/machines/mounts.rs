//! Disks of machines that are images of other sites: this site mounts them, too.

use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_device::backend::nbd::NbdAddress;
use drover_migrate::Site;
use drover_migrate::protocol::{Kind, MountedDisk};
use drover_net::Refusal;
use drover_net::service::Peer;
use drover_store::machine::Token;
use tokio::task::JoinSet;

use super::SiteMachines;
use crate::error::{Error, one_line, refusal_of};
use crate::mounts::of_machine::Coming;

/// How often it is looked whether the process of a mount has ended. QEMU waits for five minutes.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The same while one cannot be started.
const LOOK_SELDOM: Duration = Duration::from_secs(60);

impl SiteMachines {
    /// The mounts of a machine.
    pub(super) fn mounts<'a>(&'a self, machine: &'a ImageName) -> Result<Coming<'a>, Refusal> {
        let (beside, user) = self.served_at(machine)?;
        Ok(Coming {
            home: &self.server.home,
            domain: self.domain_name(machine)?,
            beside,
            machine,
            user,
        })
    }

    /// As [`Site::stand_by`].
    pub(super) async fn mount(
        &self,
        peer: &Peer,
        machine: &ImageName,
        token: Token,
        disks: &[MountedDisk],
    ) -> Result<(), Refusal> {
        if self.kind() == Kind::Disk {
            return Ok(());
        }
        let mounts = self.mounts(machine)?;
        let done = mounts.stand_by(peer, token, disks).await;
        done.map_err(refusal_of)
    }

    /// As [`Site::standing`].
    pub(super) async fn mounted(
        &self,
        machine: &ImageName,
        disks: &[MountedDisk],
    ) -> Result<Vec<NbdAddress>, Refusal> {
        if disks.is_empty() {
            return Ok(Vec::new());
        }
        let standing = self.mounts(machine)?.standing(disks).await;
        standing.map_err(refusal_of)
    }

    /// Goes on with the mounts of machines that are here, whose processes have ended, as long as the site runs.
    pub(super) fn look_after_mounts(site: &Arc<SiteMachines>) {
        if site.kind() != Kind::Machine {
            return;
        }
        let site = Arc::downgrade(site);
        tokio::spawn(async move {
            let mut pause = LOOK_EVERY;
            while let Some(here) = site.upgrade() {
                let mut all = JoinSet::new();
                for name in here.machines.names().unwrap_or_default() {
                    let here = Arc::clone(&here);
                    all.spawn(async move { here.restart_mounts(&name).await });
                }
                drop(here);
                pause = match all.join_all().await.into_iter().all(|done| done) {
                    true => LOOK_EVERY,
                    // What a site refuses is not asked for all the time.
                    false => (pause * 2).min(LOOK_SELDOM),
                };
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Whether those of a machine that is here are up.
    async fn restart_mounts(&self, name: &ImageName) -> bool {
        let is_here = matches!(self.machines.load(name), Ok(Some(record)) if record.may_run());
        if !is_here || self.config(name).is_err() {
            return true;
        }
        let restarted = async { self.mounts(name).map_err(Error::Refused)?.restart().await };
        if let Err(e) = restarted.await {
            tracing::warn!(machine = %name, "{}", one_line(&e));
            return false;
        }
        true
    }
}
