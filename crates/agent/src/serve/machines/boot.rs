//! Starting a machine from the disks of its replica.

use drover_core::ImageName;
use drover_migrate::Site;
use drover_net::{Code, Refusal};
use drover_store::machine::{Generation, MachineRecord, Owner};
use drover_store::replica::Replica;

use super::SiteMachines;
use super::start::Why;
use crate::error::failed;

/// Whether a machine that has left is the one that a replica is of.
fn is_same(known: &MachineRecord, of: &Replica) -> bool {
    let is_from = matches!(&known.owner, Owner::There(site) if site.key == of.from.key);
    known.seed == of.seed || is_from || known.disks.is_empty()
}

fn is_moved(name: &ImageName) -> Refusal {
    Refusal::new(Code::Held, format!("another process moves {name}"))
}

impl SiteMachines {
    /// Whether config.toml says how the machine of a replica from a peer of this domain is started.
    pub fn is_startable(&self, name: &ImageName, domain: &str, of: &Replica) -> bool {
        let config = self.config(name);
        config.is_ok_and(|config| {
            let is_startable = match config.build {
                Some(_) => self.is_described(name, of),
                None => !config.start.is_empty(),
            };
            config.domain == domain && is_startable
        })
    }

    /// Whether the machine of a replica could be this site's now. What is at its QMP socket is not asked.
    ///
    /// # Errors
    /// When there is another machine of that name, or a command moves it.
    pub fn may_boot(&self, name: &ImageName, of: &Replica) -> Result<(), Refusal> {
        let Some(_lock) = self.machines.lock(name).map_err(failed)? else {
            return Err(is_moved(name));
        };
        self.booted(name, of).map(drop)
    }

    /// The record of the machine of a replica when it is this site's.
    fn booted(&self, name: &ImageName, of: &Replica) -> Result<MachineRecord, Refusal> {
        let images = of.point.iter().flat_map(|point| &point.images);
        let disks: Vec<_> = images.map(|image| image.name.clone()).collect();
        let held = |text: String| Err(Refusal::new(Code::Held, text));
        match self.machines.load(name)? {
            Some(known) if known.under_way.is_some() => {
                held(format!("a machine called {name} is being moved"))
            }
            Some(known) if known.owner == Owner::Here && known.disks == disks => Ok(known),
            Some(known) if known.owner == Owner::Here => {
                held(format!("another machine called {name} is here already"))
            }
            Some(known) if !is_same(&known, of) => held(format!(
                "another machine called {name} was here before, and has moved to another site: start this one from its disks"
            )),
            Some(known) if of.booted => {
                let to = match &known.owner {
                    Owner::There(site) => site.name.as_str(),
                    Owner::Here => "another site",
                };
                held(format!(
                    "{name} was started here, and has moved to {to} since"
                ))
            }
            // It was here before, and its replica has come back.
            Some(mut known) => {
                known.generation = known.generation.next();
                known.owner = Owner::Here;
                known.disks = disks;
                Ok(known)
            }
            None => {
                let mut new = MachineRecord::new(of.seed, disks);
                // Its disks are served after a restart of the site, too.
                new.generation = Generation(1);
                Ok(new)
            }
        }
    }

    /// The machine of a replica that has taken over is this site's from now on. Done again, it is or was.
    ///
    /// # Errors
    /// When there is another machine of that name, or it has moved on.
    pub fn take_over(&self, name: &ImageName, of: &Replica) -> Result<(), Refusal> {
        let Some(_lock) = self.machines.lock(name).map_err(failed)? else {
            return Err(is_moved(name));
        };
        self.machines.store(name, &self.booted(name, of)?)
    }

    /// Serves the disks of a machine that [`SiteMachines::take_over`] has made this site's, and boots it. Done again, it does
    /// what is left to do.
    ///
    /// # Errors
    /// When it is not this site's any more, or cannot be started.
    pub async fn boot(&self, name: &ImageName, of: &Replica) -> Result<(), Refusal> {
        let Some(_lock) = self.machines.lock(name).map_err(failed)? else {
            return Err(is_moved(name));
        };
        let record = self.booted(name, of)?;
        let images = of.point.iter().flat_map(|point| &point.images);
        let devices: Vec<_> = images.map(|image| image.device.as_str()).collect();
        let served = self.open_disks(name, &record).await?;
        let place = self.hypervisor(name)?;
        self.start(name, &place, Why::Boot).await?;
        let booted = drover_migrate::boot(name, &place, &served, &devices).await;
        booted.map_err(|e| Refusal::new(Code::Failed, e.to_string()))
    }
}
