//! Machines that migrate to this site: their disks, and the hypervisors that wait for them.
//!
//! The disk of a machine that came is its image at this site, below what the machine has written since. This process
//! serves it to the hypervisor over NBD at a socket in the home, `machines/.NAME.nbd`, from the first round of the
//! migration until the machine has left again; then what was written becomes part of the image.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, ImageName};
use drover_device::backend::nbd::{NbdAddress, NbdSocket};
use drover_device::builder::Stack;
use drover_device::stage::Journaled;
use drover_frontend::nbd;
use drover_migrate::protocol::OpenMove;
use drover_migrate::{Happened, Moves, Pending, Served, Site};
use drover_mount::MountError;
use drover_mount::client::{Client, Options};
use drover_mount::direct::RemoteDevice;
use drover_net::service::{Exchange, Handler, Peer, Request};
use drover_net::{Code, PeerKey, Refusal};
use drover_storage::{Directory, HostDirectory};
use drover_store::Catalog;
use drover_store::lease::{Access, MountId};
use drover_store::machine::{MachineRecord, Machines, Other, Owner};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, watch};

use super::domains::InUse;
use super::in_domain::InDomain;
use super::server::Server;
use crate::audit::{Event, Record};
use crate::changes::{self, Here, Order};
use crate::error::{failed, one_line};
use crate::home::MachineConfig;
use crate::machines::{CloseMachine, RefuseMachine};
use crate::mounts::{OwnConnector, own};

/// How long a command may take until the hypervisor that it starts waits.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How often its socket is tried.
const START_POLL: Duration = Duration::from_millis(100);

/// How long the connections of disks that were closed may take to end.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// How often that is looked at.
const CLOSE_POLL: Duration = Duration::from_millis(10);

/// The machines of a site.
pub struct SiteMachines {
    server: Arc<Server>,
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
    device: Arc<dyn BlockDevice>,
}

/// The moves to a site.
pub fn moves(server: &Arc<Server>) -> Arc<Moves<SiteMachines>> {
    Moves::new(Arc::new(SiteMachines {
        server: Arc::clone(server),
        machines: server.home.machines(),
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

    async fn domain(&self, machine: &ImageName) -> Result<Arc<InUse>, Refusal> {
        let name = &self.config(machine)?.domain;
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
        options.note = format!("the machine {machine}");
        let client = Client::open(&Handle::current(), Arc::new(connector), options).await;
        let failed = |e: &dyn std::fmt::Display| {
            Refusal::new(Code::Unavailable, format!("cannot open {image}: {e}"))
        };
        let client = Arc::new(client.map_err(|e| failed(&e))?);
        let stack = Stack::over(RemoteDevice::new(Arc::clone(&client))).build();
        let stack = stack.map_err(|e| failed(&e))?;
        // QEMU writes nothing again when this process has been killed, and another one serves the disk.
        let journal = self.journal(machine, index);
        let journaled = tokio::task::spawn_blocking(move || -> std::io::Result<_> {
            let boot = std::fs::read("/proc/sys/kernel/random/boot_id")?;
            let mut id = [0; 16];
            id.copy_from_slice(&blake3::hash(&boot).as_bytes()[..16]);
            let directory: Arc<dyn Directory> = Arc::new(HostDirectory::open_or_create(&journal)?);
            Journaled::open(stack.device, &directory, id).map_err(std::io::Error::other)
        });
        let journaled = journaled.await.map_err(|e| failed(&e))?;
        Ok(OpenDisk {
            image: image.clone(),
            client,
            device: Arc::new(journaled.map_err(|e| failed(&e))?),
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
            let mount = mount_id(name, record, index);
            // What others wrote is not the machine's, which comes with all of its own.
            let is_new = !is_held_by(&domain, image, mount).await;
            if is_new && changes::of_image(&domain.home, image).is_some() {
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
            }
            disks.push(self.open_one(&domain, name, index, mount, image).await?);
        }
        let socket = self.socket(name);
        let export = |(index, disk): (usize, &OpenDisk)| nbd::Export {
            name: format!("disk-{index}"),
            description: format!("{} of the machine {name} by drover", disk.image),
            read_only: false,
            device: Arc::clone(&disk.device),
        };
        let exports: Vec<_> = disks.iter().enumerate().map(export).collect();
        let served = exports.iter().map(|export| Served {
            device: Arc::clone(&export.device),
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
                    let mount = mount_id(name, record, index);
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
            let begun = Instant::now();
            let is_open = |name| devices.leased(name).is_ok_and(|leased| leased.is_some());
            while names.iter().any(is_open) && begun.elapsed() < CLOSE_LIMIT {
                std::thread::sleep(CLOSE_POLL);
            }
        };
        // The panic was logged.
        let _ = tokio::task::spawn_blocking(close).await;
        // All of it was flushed when they were closed.
        (0..record.disks.len()).for_each(|index| self.forget_journal(name, index));
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
        if self.config(name).is_err() {
            // It never came here.
            return Ok(());
        }
        let lock = self.machines.lock(name).map_err(failed)?;
        let record = self.machines.load(name)?;
        let Some(record) = record.filter(|_| lock.is_some()) else {
            let text = format!("the machine {name} is being moved, or is unknown");
            return Err(Refusal::new(Code::Held, text));
        };
        if record.owner == Owner::Here || record.under_way.is_some() {
            let text = format!("the machine {name} has not left this site");
            return Err(Refusal::new(Code::Held, text));
        }
        let mark = self.left_mark(name);
        let domain = self.domain(name).await?;
        let mut is_marked = mark.exists();
        for (index, image) in record.disks.iter().enumerate() {
            if !is_marked && is_held_by(&domain, image, mount_id(name, &record, index)).await {
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
        tokio::task::spawn_blocking(move || {
            let here = domain.here(key);
            let has_changes = |image: &&ImageName| changes::of_image(&domain.home, image).is_some();
            let images = record.disks.iter().filter(has_changes);
            // All of them, also after one that fails.
            let failures = images.filter(|image| !merge(&here, image)).count();
            if failures == 0 {
                let _ = std::fs::remove_file(mark);
            }
            record.disks.iter().for_each(|image| freeze(&domain, image));
        });
        Ok(())
    }

    /// Continues after a restart of the site.
    pub async fn restart(moves: &Arc<Moves<SiteMachines>>) {
        moves.restart().await;
        let site = moves.site();
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

impl Site for SiteMachines {
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
            if self.config(machine)?.domain != peer.domain {
                let text = format!(
                    "{} expects the machine {machine} from peers of another domain",
                    self.server.name
                );
                return Err(Refusal::new(Code::Denied, text));
            }
            let domain = self.domain(machine).await?;
            for image in disks {
                let known = domain.catalog.by_name(image);
                let known = known.map_err(|e| Refusal::new(Code::Unavailable, e.to_string()))?;
                if known.is_some_and(|image| !image.may_be_changed_by(&peer.key, peer.rights)) {
                    let text = format!(
                        "{} has another image called {image}: move the machine under another name",
                        self.server.name
                    );
                    return Err(Refusal::new(Code::Denied, text));
                }
            }
            Ok(())
        })
    }

    fn happened(&self, machine: &ImageName, from: &Other, what: Happened<'_>) {
        let record = match what {
            Happened::Coming => Record::new(Event::MachineComing),
            Happened::Arrived => Record::new(Event::MachineArrived),
            Happened::Refused(why) => Record::new(Event::MachineRefused).detail(why),
        };
        let domain = self.config(machine).map(|config| config.domain.as_str());
        let record = record
            .by_peer(&from.name, PeerKey(from.key))
            .in_domain(domain.unwrap_or_default())
            .machine(machine);
        // A peer that tries again and again causes no more than a few lines.
        match what {
            Happened::Arrived => self.server.home.audit().write(record),
            _ => self.server.home.audit().write_limited(record),
        }
    }

    fn refused(&self, peer: &Peer, address: &str, refusal: &Refusal) {
        let record = Record::refused(OpenMove::SERVICE, refusal, None);
        let record = record.by(peer).from(address);
        self.server.home.audit().write_limited(record);
    }

    fn hypervisor(&self, machine: &ImageName) -> Result<PathBuf, Refusal> {
        Ok(self.config(machine)?.incoming.clone())
    }

    fn incoming<'a>(&'a self, machine: &'a ImageName) -> Pending<'a, Result<PathBuf, Refusal>> {
        Box::pin(async move {
            let config = self.config(machine)?;
            if !is_listening(&config.incoming).await {
                start(machine, config).await?;
            }
            Ok(config.incoming.clone())
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

    fn discard_disks<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<(), Refusal>> {
        Box::pin(async move {
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

/// The mount of a disk: the same after a restart, so that it gets its write lease back. No other machine has it, whatever seed
/// and disks its source claims.
fn mount_id(machine: &ImageName, record: &MachineRecord, index: usize) -> MountId {
    let mut hasher = blake3::Hasher::new_derive_key("drover machine disk mount");
    hasher.update(&record.seed.0);
    hasher.update(&(index as u64).to_le_bytes());
    hasher.update(machine.as_str().as_bytes());
    let mut mount = [0; 16];
    mount.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    MountId(mount)
}

/// Whether the write lease of an image is that of a machine's disk.
async fn is_held_by(domain: &Arc<InUse>, image: &ImageName, mount: MountId) -> bool {
    let (domain, image) = (Arc::clone(domain), image.clone());
    let leased = tokio::task::spawn_blocking(move || domain.devices.leased(&image)).await;
    let holder = leased
        .ok()
        .and_then(|leased| leased.ok()?)
        .and_then(|leased| leased.holder);
    holder.is_some_and(|holder| holder.mount == mount)
}

/// Keeps what a machine that is elsewhere has left here from being started: it is an old copy.
fn freeze(domain: &InUse, image: &ImageName) {
    if let Err(e) = domain.devices.freeze(image) {
        tracing::warn!(image = %image, "it is not protected from being written: {e}");
    }
}

/// Makes what a machine wrote part of its image; whether that was done.
fn merge(here: &Here, image: &ImageName) -> bool {
    let order = Order {
        name: image.clone(),
        rename: None,
        to: None,
        drop: false,
        dry_run: false,
    };
    let stop = AtomicBool::new(false);
    match changes::merge(here, &order, None, &mut |_, _| {}, &stop) {
        Ok(_) => tracing::info!(image = %image, "it has what its machine wrote"),
        Err(e) => {
            tracing::warn!(image = %image, "its changes were not merged: {}", one_line(&e));
            return false;
        }
    }
    true
}

async fn is_listening(socket: &Path) -> bool {
    tokio::net::UnixStream::connect(socket).await.is_ok()
}

/// Starts the hypervisor that is to receive a machine.
async fn start(machine: &ImageName, config: &MachineConfig) -> Result<(), Refusal> {
    let socket = config.incoming.display();
    let failed = |text: String| Err(Refusal::new(Code::Unavailable, text));
    let Some((program, arguments)) = config.start.split_first() else {
        return failed(format!(
            "no QEMU waits for the machine {machine} at {socket}: start it there with -S -incoming defer, or set `start` in config.toml"
        ));
    };
    let command = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0)
        .spawn();
    let mut child = match command {
        Ok(child) => child,
        Err(e) => {
            return failed(format!(
                "cannot start the QEMU for the machine {machine}: {program}: {e}"
            ));
        }
    };
    let begun = Instant::now();
    let mut ended = None;
    while begun.elapsed() < START_LIMIT {
        if is_listening(&config.incoming).await {
            // It is reaped when it ends.
            std::thread::spawn(move || child.wait());
            return Ok(());
        }
        match child.try_wait() {
            Ok(Some(status)) if !status.success() => {
                return failed(format!(
                    "the QEMU for the machine {machine} was not started: {program} ended with {status}"
                ));
            }
            Ok(status) => ended = status.or(ended),
            Err(_) => {}
        }
        tokio::time::sleep(START_POLL).await;
    }
    // The next attempt starts another one.
    if ended.is_none() {
        let group = rustix::process::Pid::from_child(&child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        std::thread::spawn(move || child.wait());
    }
    failed(format!(
        "{program} has started no QEMU for the machine {machine} that listens at {socket} within {} s",
        START_LIMIT.as_secs()
    ))
}

/// Handles requests about the machines of a site.
#[derive(Clone)]
pub struct OfMachines(pub Arc<Moves<SiteMachines>>);

impl Handler<CloseMachine> for OfMachines {
    async fn handle(
        &self,
        _: &Peer,
        CloseMachine { name }: CloseMachine,
        _: &mut Exchange<'_, CloseMachine>,
    ) -> Result<(), Refusal> {
        self.0.site().left(&name).await
    }
}

impl Handler<RefuseMachine> for OfMachines {
    async fn handle(
        &self,
        _: &Peer,
        RefuseMachine { name }: RefuseMachine,
        _: &mut Exchange<'_, RefuseMachine>,
    ) -> Result<(), Refusal> {
        self.0.give_up(name).await
    }
}
