//! Machines that migrate to this site: their disks, and the hypervisors that wait for them. Disks of programs that move to it.
//!
//! The disk of a machine that came is its image at this site, below what the machine has written since. This process
//! serves it to the hypervisor over NBD at a socket in the home, `machines/.NAME.nbd`, from the first round of the
//! migration until the machine has left again; then what was written becomes part of the image. The disk of a program is
//! only served until it has been taken: then it is an image like any other.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use drover_core::{BlockDevice, ImageName};
use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use drover_device::builder::Stack;
use drover_device::stage::{ArrivalHandle, Arriving, Journaled};
use drover_frontend::nbd;
use drover_hypervisor::Place;
use drover_migrate::program::Target;
use drover_migrate::protocol::{Kind, MountedDisk, OpenMove};
use drover_migrate::{Happened, Moves, Pending, Served, Site};
use drover_mount::MountError;
use drover_mount::client::{Client, Options};
use drover_mount::direct::RemoteDevice;
use drover_net::service::{Peer, Request};
use drover_net::{Code, PeerKey, Refusal};
use drover_storage::{Directory, HostDirectory};
use drover_store::Catalog;
use drover_store::lease::{Access, MountId};
use drover_store::machine::{MachineRecord, Machines, Move, Other, Owner, Token};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, watch};

use super::domains::InUse;
use super::in_domain::InDomain;
use super::server::Server;
use crate::audit::{Event, Record};
use crate::changes;
use crate::error::{failed, refusal_of};
use crate::home::MachineConfig;
use crate::machines::{disk_of, mount_id};
use crate::mounts::{OwnConnector, own};

mod boot;
mod built;
mod generations;
mod handed_over;
mod left;
mod lost;
mod mounts;
mod start;
mod unreadable;

use handed_over::{Fence, HandedOver};
pub(super) use left::has_changes;
use left::{freeze, give, is_held_by, merge, wait_until_free, was_left};
use start::{Why, is_listening, start};

/// How long a machine waits for what is still where it came from, without anything of it: as long as there is.
const ARRIVAL_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// The machines of a site, or the disks of programs that move to one of its domains.
pub struct SiteMachines {
    server: Arc<Server>,
    /// The domain of disks; none for machines, whose domains are in the configuration.
    disks_of: Option<String>,
    machines: Machines,
    open: Mutex<HashMap<ImageName, OpenMachine>>,
}

/// A machine whose disks are served.
struct OpenMachine {
    disks: Vec<OpenDisk>,
    served: Vec<Served>,
    server: nbd::Server,
    /// Removes the socket when it is dropped.
    listening: nbd::Listening,
    /// Keeps the domain open.
    domain: Arc<InUse>,
}

struct OpenDisk {
    image: ImageName,
    client: Arc<Client>,
    device: Arc<Arriving<Arc<dyn BlockDevice>>>,
    arrival: ArrivalHandle,
}

/// The moves of machines to a site, or of disks to one of its domains.
pub fn moves(
    server: &Arc<Server>,
    disks_of: Option<String>,
    machines: Machines,
) -> Arc<Moves<SiteMachines>> {
    Moves::new(Arc::new(SiteMachines {
        server: Arc::clone(server),
        disks_of,
        machines,
        open: Mutex::default(),
    }))
}

impl SiteMachines {
    fn config(&self, machine: &ImageName) -> Result<&MachineConfig, Refusal> {
        let known = self.server.home.config.machines.get(machine.as_str());
        known.ok_or_else(|| {
            let text = format!(
                "{0} does not expect a machine called {machine}: add [machines.{machine}] to its config.toml and restart it, or use another name",
                self.server.name
            );
            Refusal::new(Code::NotFound, text)
        })
    }

    fn domain_name(&self, machine: &ImageName) -> Result<&str, Refusal> {
        match &self.disks_of {
            Some(domain) => Ok(domain),
            None => Ok(&self.config(machine)?.domain),
        }
    }

    /// Starts the hypervisor of a machine, if it does not run.
    async fn start(&self, machine: &ImageName, place: &Place, why: Why) -> Result<(), Refusal> {
        let Place::Qmp(socket) = place else {
            return Ok(());
        };
        let config = self.config(machine)?;
        match is_listening(socket).await {
            true => Ok(()),
            false if config.build.is_some() => self.start_built(machine, socket).await,
            false => start(machine, socket, &config.start, why).await,
        }
    }

    async fn domain(&self, machine: &ImageName) -> Result<Arc<InUse>, Refusal> {
        let name = self.domain_name(machine)?;
        InDomain(Arc::clone(&self.server)).of(name).await
    }

    fn socket(&self, machine: &ImageName) -> PathBuf {
        self.machines.directory().join(format!(".{machine}.nbd"))
    }

    /// The directory with the journal of a disk.
    fn journal(&self, machine: &ImageName, index: usize) -> PathBuf {
        let name = format!(".{machine}-{index}.journal");
        self.machines.directory().join(name)
    }

    /// Removes the journal of a disk that is not open.
    fn forget_journal(&self, machine: &ImageName, index: usize) {
        let path = self.journal(machine, index);
        match std::fs::remove_dir_all(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {e}", path.display());
            }
            _ => {}
        }
    }

    async fn open_one(
        &self,
        domain: &Arc<InUse>,
        machine: &ImageName,
        index: usize,
        mount: MountId,
        image: &ImageName,
    ) -> Result<OpenDisk, Refusal> {
        let connector = OwnConnector::Inside {
            server: Arc::clone(&domain.devices),
            peer: own(self.server.identity.key(), domain.home.domain_name()),
            stop: watch::Sender::new(false),
        };
        let mut options = Options::new(image.clone(), Access::ReadWrite);
        options.mount = mount;
        options.note = match self.kind() {
            Kind::Machine => format!("the machine {machine}"),
            Kind::Disk => format!("the move of {machine}"),
        };
        let client = Client::open(&Handle::current(), Arc::new(connector), options).await;
        let failed = |e: &dyn std::fmt::Display| {
            Refusal::new(Code::Unavailable, format!("cannot open {image}: {e}"))
        };
        let client = Arc::new(client.map_err(|e| failed(&e))?);
        let stack = Stack::over(RemoteDevice::new(Arc::clone(&client))).build();
        let stack = stack.map_err(|e| failed(&e))?;
        // QEMU writes nothing again when this process has been killed, and another one serves the disk.
        let journal = self.journal(machine, index);
        let lost = unreadable::mark_in(&journal);
        let opened = tokio::task::spawn_blocking(move || -> std::io::Result<_> {
            let boot = std::fs::read("/proc/sys/kernel/random/boot_id")?;
            let mut id = [0; 16];
            id.copy_from_slice(&blake3::hash(&boot).as_bytes()[..16]);
            let directory: Arc<dyn Directory> = Arc::new(HostDirectory::open_or_create(&journal)?);
            let journaled =
                Journaled::open(stack.device, &directory, id).map_err(std::io::Error::other)?;
            let journaled: Arc<dyn BlockDevice> = Arc::new(journaled);
            // Who reads what is still where the machine came from waits for it.
            let kept = Arriving::kept(journaled, &directory, id, ARRIVAL_LIMIT);
            let (device, arrival) = kept.map_err(std::io::Error::other)?;
            if lost.try_exists()? {
                arrival.fail(unreadable::error());
            }
            Ok((device, arrival))
        });
        let (device, arrival) = opened
            .await
            .map_err(|e| failed(&e))?
            .map_err(|e| failed(&e))?;
        Ok(OpenDisk {
            image: image.clone(),
            client,
            device: Arc::new(device),
            arrival,
        })
    }

    async fn open_machine(
        &self,
        name: &ImageName,
        record: &MachineRecord,
    ) -> Result<OpenMachine, Refusal> {
        let domain = self.domain(name).await?;
        let mut disks = Vec::new();
        for (index, image) in record.disks.iter().enumerate() {
            let mount = mount_id(self.kind(), name, record, index);
            // What others wrote is not the machine's, which comes with all of its own.
            let is_new = !is_held_by(&domain, image, mount).await;
            if is_new && matches!(record.under_way, Some(Move::Partial(..))) {
                let text = format!(
                    "the write lease of {image} was revoked before all of {name} had arrived: what it lacks is not known any more"
                );
                return Err(Refusal::new(Code::Held, text));
            }
            if is_new && record.is_committed() {
                let text = format!(
                    "the write lease of {image} was revoked before {name} had left: what has not followed it cannot be read from here any more"
                );
                return Err(Refusal::new(Code::Held, text));
            }
            if is_new && has_changes(&domain, image) {
                let text = format!(
                    "{image} has changes by mounts at {}: merge or drop them there",
                    self.server.name
                );
                return Err(Refusal::new(Code::Held, text));
            }
            // A copy that the machine left here earlier, and that it has come back to.
            let (devices, thawed) = (Arc::clone(&domain.devices), image.clone());
            let thaw = tokio::task::spawn_blocking(move || devices.thaw(&thawed));
            thaw.await.map_err(failed)?.map_err(failed)?;
            if is_new {
                self.forget_journal(name, index);
            } else if matches!(record.under_way, Some(Move::Partial(..))) {
                // A process that was to give up what is absent has not got that far.
                unreadable::unmark(&unreadable::mark_in(&self.journal(name, index)))
                    .map_err(failed)?;
            }
            disks.push(self.open_one(&domain, name, index, mount, image).await?);
        }
        let (socket, user) = self.served_at(name)?;
        let export = |(index, disk): (usize, &OpenDisk)| nbd::Export {
            name: format!("disk-{index}"),
            description: format!("{} of the machine {name} by drover", disk.image),
            read_only: false,
            device: match self.kind() == Kind::Machine || record.is_committed() {
                true => Arc::new(HandedOver::with_gate(
                    Arc::clone(&disk.device),
                    Fence::new(&self.machines, name, record),
                )),
                // It is not served any more once it was taken.
                false => Arc::clone(&disk.device) as _,
            },
        };
        let exports: Vec<_> = disks.iter().enumerate().map(export).collect();
        let served = exports.iter().zip(&disks).map(|(export, disk)| Served {
            device: Arc::clone(&export.device),
            target: Target::stored(Arc::clone(&disk.device), disk.arrival.clone()),
            address: NbdAddress {
                socket: NbdSocket::Unix(socket.clone()),
                export: export.name.clone(),
            },
        });
        let served = served.collect();
        let options = nbd::ServerOptions {
            // The home is its user's only.
            plain_unix: true,
            ..nbd::ServerOptions::default()
        };
        let listen = || -> Result<_, nbd::NbdError> {
            let server = nbd::Server::new(exports, options)?;
            let listening = server.listen_unix(&socket)?;
            Ok((server, listening))
        };
        let (server, listening) =
            listen().map_err(|e| Refusal::new(Code::Unavailable, e.to_string()))?;
        if user.is_some() {
            // Only root can change the directory.
            std::os::unix::fs::lchown(&socket, user, None).map_err(failed)?;
        }
        Ok(OpenMachine {
            disks,
            served,
            server,
            listening,
            domain,
        })
    }

    /// Closes the disks of a machine, also those that an earlier process had opened; the images whose write lease it had,
    /// and their domain.
    async fn close(
        &self,
        name: &ImageName,
        record: &MachineRecord,
    ) -> Result<(Vec<ImageName>, Arc<InUse>), Refusal> {
        let open = self.open.lock().await.remove(name);
        let (disks, domain) = match open {
            Some(machine) => {
                let (listening, server) = (machine.listening, machine.server);
                let stop = move || {
                    listening.stop();
                    server.stop();
                };
                // The panic was logged.
                let _ = tokio::task::spawn_blocking(stop).await;
                (machine.disks, machine.domain)
            }
            None => {
                let domain = self.domain(name).await?;
                let mut disks = Vec::new();
                for (index, image) in record.disks.iter().enumerate() {
                    let mount = mount_id(self.kind(), name, record, index);
                    if is_held_by(&domain, image, mount).await {
                        let opened = self.open_one(&domain, name, index, mount, image);
                        disks.push(opened.await?);
                    }
                }
                (disks, domain)
            }
        };
        let images: Vec<_> = disks.iter().map(|disk| disk.image.clone()).collect();
        let (devices, names) = (Arc::clone(&domain.devices), images.clone());
        let close = move || {
            for disk in disks {
                if let Err(e) = disk.device.flush() {
                    tracing::warn!(image = %disk.image, "its last writes may be lost: {e}");
                }
                if let Err(e) = disk.client.close_now() {
                    tracing::warn!(image = %disk.image, "its write lease was not returned: {e}");
                }
            }
            // Their connections end behind them.
            wait_until_free(&devices, &names);
        };
        // The panic was logged.
        let _ = tokio::task::spawn_blocking(close).await;
        // All of it was flushed when they were closed.
        (0..record.disks.len()).for_each(|index| self.forget_journal(name, index));
        self.forget_user(name);
        Ok((images, domain))
    }

    /// The file that says that a machine has left, and that not all of what it wrote is in its images yet.
    fn left_mark(&self, machine: &ImageName) -> PathBuf {
        self.machines.directory().join(format!(".{machine}.left"))
    }

    /// Closes the disks of a machine that has left, and makes what it wrote part of its images, so that it can come back
    /// for what changed since. Returns before that is done.
    ///
    /// # Errors
    /// [`Code::Held`] when it has not left, or is coming back.
    pub async fn left(&self, name: &ImageName) -> Result<(), Refusal> {
        if self.kind() == Kind::Machine && self.config(name).is_err() {
            // It never came here.
            return Ok(());
        }
        let lock = self.machines.lock(name).map_err(failed)?;
        let record = self.machines.load(name)?;
        let Some(record) = record.filter(|_| lock.is_some()) else {
            let text = format!("{name} is being moved, or is unknown");
            return Err(Refusal::new(Code::Held, text));
        };
        if record.owner == Owner::Here || record.under_way.is_some() {
            let text = format!("{name} has not left this site");
            return Err(Refusal::new(Code::Held, text));
        }
        if self.kind() == Kind::Disk {
            return self.disk_left(name, &record).await;
        }
        let mark = self.left_mark(name);
        let domain = self.domain(name).await?;
        let mut is_marked = mark.exists();
        for (index, image) in record.disks.iter().enumerate() {
            if !is_marked
                && is_held_by(&domain, image, mount_id(self.kind(), name, &record, index)).await
            {
                let made = drover_storage::create_private(&mark);
                made.and_then(|_| drover_storage::sync_parent(&mark))
                    .map_err(failed)?;
                is_marked = true;
            }
        }
        if !is_marked {
            return Ok(());
        }
        let (_, domain) = self.close(name, &record).await?;
        let key = self.server.identity.key();
        // Before the other site is told what they have.
        let (frozen, images) = (Arc::clone(&domain), record.disks.clone());
        let freeze_all = move || images.iter().for_each(|image| freeze(&frozen, image));
        tokio::task::spawn_blocking(freeze_all)
            .await
            .map_err(failed)?;
        tokio::task::spawn_blocking(move || {
            let here = domain.here(key);
            let has_changes = |image: &&ImageName| changes::of_image(&domain.home, image).is_some();
            let images = record.disks.iter().filter(has_changes);
            // All of them, also after one that fails.
            let failures = images.filter(|image| !merge(&here, image)).count();
            if failures == 0 {
                let _ = std::fs::remove_file(mark);
            }
            let at = match &record.owner {
                Owner::There(at) => Some(PeerKey(at.key)),
                Owner::Here => None,
            };
            for image in &record.disks {
                freeze(&domain, image);
                // Where the machine is may bring it again.
                give(&domain, image, at);
            }
        });
        Ok(())
    }

    /// Makes what was written to a disk that has left part of its image, so that it can come back for what changed since, and
    /// freezes the image. Returns before that is done.
    async fn disk_left(&self, name: &ImageName, record: &MachineRecord) -> Result<(), Refusal> {
        let (domain, name) = (self.domain(name).await?, name.clone());
        let at = match &record.owner {
            Owner::There(at) => Some(PeerKey(at.key)),
            Owner::Here => None,
        };
        let (key, left) = (self.server.identity.key(), record.hypervisor.clone());
        tokio::task::spawn_blocking(move || {
            // Another image may have its name since.
            let known = domain.catalog.by_name(&name).ok().flatten();
            if known.is_none_or(|image| Some(disk_of(&image)) != left) {
                return;
            }
            // The mount that moved it has just ended.
            wait_until_free(&domain.devices, std::slice::from_ref(&name));
            if changes::of_image(&domain.home, &name).is_some() {
                merge(&domain.here(key), &name);
            }
            freeze(&domain, &name);
            // Where it is may bring it again.
            give(&domain, &name, at);
        });
        Ok(())
    }

    /// Continues after a restart of the site.
    pub async fn restart(moves: &Arc<Moves<SiteMachines>>) {
        moves.restart().await;
        let site = moves.site();
        if site.kind() == Kind::Disk {
            forget_refused(&site.machines);
        }
        SiteMachines::look_after_mounts(site);
        for name in site.machines.names().unwrap_or_default() {
            match site.left(&name).await {
                Err(e) if e.code != Code::Held => tracing::warn!(machine = %name, "{e}"),
                _ => {}
            }
        }
    }

    /// Stops serving all disks; their leases remain.
    pub async fn stop(&self) {
        let open: Vec<_> = self.open.lock().await.drain().collect();
        let stopped = tokio::task::spawn_blocking(move || {
            for (_, machine) in open {
                machine.listening.stop();
                machine.server.stop();
            }
        });
        // The panic was logged.
        let _ = stopped.await;
    }
}

fn forget_refused(disks: &Machines) {
    if let Err(e) = disks.forget_refused() {
        tracing::warn!("records of disks that never came are left: {e}");
    }
}

impl Site for SiteMachines {
    fn kind(&self) -> Kind {
        match self.disks_of {
            Some(_) => Kind::Disk,
            None => Kind::Machine,
        }
    }

    fn machines(&self) -> &Machines {
        &self.machines
    }

    fn allow<'a>(
        &'a self,
        peer: &'a Peer,
        machine: &'a ImageName,
        disks: &'a [ImageName],
    ) -> Pending<'a, Result<(), Refusal>> {
        Box::pin(async move {
            if self.domain_name(machine)? != peer.domain {
                let text = format!(
                    "{} expects the machine {machine} from peers of another domain",
                    self.server.name
                );
                return Err(Refusal::new(Code::Denied, text));
            }
            // None if its seeder only asks what was decided.
            if self.kind() == Kind::Disk && disks.iter().any(|image| image != machine) {
                return Err(Refusal::new(
                    Code::Protocol,
                    "a disk is one image of its name",
                ));
            }
            let domain = self.domain(machine).await?;
            for image in disks {
                let known = domain.catalog.by_name(image);
                let known = known.map_err(|e| Refusal::new(Code::Unavailable, e.to_string()))?;
                if known.is_some_and(|image| !image.may_be_changed_by(&peer.key, peer.rights)) {
                    let text = format!(
                        "{} has another image called {image}: move the {} under another name",
                        self.server.name,
                        match self.kind() {
                            Kind::Machine => "machine",
                            Kind::Disk => "disk",
                        }
                    );
                    return Err(Refusal::new(Code::Denied, text));
                }
            }
            Ok(())
        })
    }

    fn happened(&self, machine: &ImageName, from: &Other, what: Happened<'_>) {
        if let (Kind::Disk, Happened::Refused(_)) = (self.kind(), what) {
            // Any name will do for a disk: what is remembered of them has a limit.
            let disks = self.machines.clone();
            tokio::task::spawn_blocking(move || forget_refused(&disks));
        }
        if self.kind() == Kind::Machine {
            let migrations = &self.server.metrics.migrations;
            match what {
                Happened::Coming => {}
                Happened::Arrived => drop(migrations.arrived.fetch_add(1, Relaxed)),
                Happened::Refused(_) => drop(migrations.refused.fetch_add(1, Relaxed)),
            }
        }
        let event = match (what, self.kind()) {
            (Happened::Coming, Kind::Machine) => Event::MachineComing,
            (Happened::Arrived, Kind::Machine) => Event::MachineArrived,
            (Happened::Refused(_), Kind::Machine) => Event::MachineRefused,
            (Happened::Coming, Kind::Disk) => Event::DiskComing,
            (Happened::Arrived, Kind::Disk) => Event::DiskArrived,
            (Happened::Refused(_), Kind::Disk) => Event::DiskRefused,
        };
        let record = Record::new(event)
            .by_peer(&from.name, PeerKey(from.key))
            .in_domain(self.domain_name(machine).unwrap_or_default());
        let record = match self.kind() {
            Kind::Machine => record.machine(machine),
            Kind::Disk => record.image(machine),
        };
        let record = match what {
            Happened::Refused(why) => record.detail(why),
            _ => record,
        };
        // A peer that tries again and again causes no more than a few lines.
        match what {
            Happened::Arrived => self.server.home.audit().write(record),
            _ => self.server.home.audit().write_limited(record),
        }
    }

    fn give_disks<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
        to: Option<&'a Peer>,
    ) -> Pending<'a, ()> {
        Box::pin(async move {
            let Ok(domain) = self.domain(machine).await else {
                return;
            };
            let (images, to) = (record.disks.clone(), to.map(|peer| peer.key));
            let before = match &record.owner {
                Owner::There(at) => Some(PeerKey(at.key)),
                Owner::Here => None,
            };
            let given = tokio::task::spawn_blocking(move || {
                // Others may have sent images of these names since.
                let is_its = |image: &&ImageName| to.is_none() || was_left(&domain, image, before);
                let images = images.iter().filter(is_its);
                images.for_each(|image| give(&domain, image, to));
            });
            // The panic was logged.
            let _ = given.await;
        })
    }

    fn refused(&self, peer: &Peer, address: &str, refusal: &Refusal) {
        let record = Record::refused(OpenMove::SERVICE, refusal, None);
        let record = record.by(peer).from(address);
        self.server.home.audit().write_limited(record);
    }

    fn hypervisor(&self, machine: &ImageName) -> Result<Place, Refusal> {
        Ok(self.config(machine)?.hypervisor(machine.as_str()))
    }

    fn incoming<'a>(&'a self, machine: &'a ImageName) -> Pending<'a, Result<Place, Refusal>> {
        Box::pin(async move {
            let place = self.hypervisor(machine)?;
            self.start(machine, &place, Why::Incoming).await?;
            Ok(place)
        })
    }

    fn open_disks<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<Vec<Served>, Refusal>> {
        Box::pin(async move {
            let mut open = self.open.lock().await;
            if let Some(known) = open.get(machine) {
                return Ok(known.served.clone());
            }
            let opened = self.open_machine(machine, record).await?;
            let served = opened.served.clone();
            open.insert(machine.clone(), opened);
            Ok(served)
        })
    }

    fn keep_disk<'a>(
        &'a self,
        disk: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let (_, domain) = self.close(disk, record).await?;
            for (index, image) in record.disks.iter().enumerate() {
                let mount = mount_id(Kind::Disk, disk, record, index);
                if is_held_by(&domain, image, mount).await {
                    let text = format!("the write lease of {image} was not returned");
                    return Err(Refusal::new(Code::Unavailable, text));
                }
            }
            Ok(())
        })
    }

    fn stand_by<'a>(
        &'a self,
        peer: &'a Peer,
        machine: &'a ImageName,
        token: Token,
        disks: &'a [MountedDisk],
    ) -> Pending<'a, Result<(), Refusal>> {
        Box::pin(self.mount(peer, machine, token, disks))
    }

    fn standing<'a>(
        &'a self,
        machine: &'a ImageName,
        disks: &'a [MountedDisk],
    ) -> Pending<'a, Result<Vec<NbdAddress>, Refusal>> {
        Box::pin(self.mounted(machine, disks))
    }

    fn lose_rest<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<u64, Refusal>> {
        Box::pin(self.lose(machine, record))
    }

    fn discard_disks<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
        anew: bool,
    ) -> Pending<'a, Result<(), Refusal>> {
        Box::pin(async move {
            self.end_built(machine, record).await;
            if !anew && self.kind() == Kind::Machine {
                let ended = self.mounts(machine)?.end_standing().await;
                ended.map_err(refusal_of)?;
            }
            // Its way back brings all of it.
            let has_left = self.left_mark(machine).exists();
            let (mut images, domain) = self.close(machine, record).await?;
            if has_left {
                let has_changes =
                    |image: &&ImageName| changes::of_image(&domain.home, image).is_some();
                images = record.disks.iter().filter(has_changes).cloned().collect();
            }
            let mark = self.left_mark(machine);
            let is_away = record.owner != Owner::Here;
            let dropped = tokio::task::spawn_blocking(move || {
                for image in images {
                    domain.devices.drop_changes(&image)?;
                    if is_away {
                        freeze(&domain, &image);
                    }
                }
                let _ = std::fs::remove_file(mark);
                Ok(())
            });
            let dropped: Result<(), MountError> = dropped.await.map_err(failed)?;
            dropped.map_err(failed)
        })
    }
}
