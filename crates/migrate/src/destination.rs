//! Takes machines that other sites send: drives the leechers.

mod hypervisor;
mod services;

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use drover_core::{BlockDevice, ImageName};
use drover_device::backend::nbd::NbdAddress;
use drover_hypervisor::machine::{Capability, Data, Machine, MigrationStatus, RunState};
use drover_net::service::{IncomingCall, Peer};
use drover_net::{Code, Refusal};
use drover_store::machine::{
    MAX_DISKS, MachineLock, MachineRecord, Machines, Move, Other, Owner, Token,
};
use parking_lot::Mutex;
use tokio::sync::watch;

use self::hypervisor::{arrived, attach};
pub use self::services::{Conversations, DiskWrites, MemoryStreams};
use crate::error::MigrateError;
use crate::leecher::{Action, Event, Leecher};
use crate::protocol::{Answer, Ask, MAX_WHY, OpenMove, kind};
use crate::talk::Talk;

/// Upper bound on moves to a site at once.
const MAX_MOVES: usize = 64;

/// A future that borrows.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A disk that is open at this site, and served to a hypervisor.
#[derive(Clone)]
pub struct Served {
    /// The disk.
    pub device: Arc<dyn BlockDevice>,
    /// The export of the NBD server that serves it.
    pub address: NbdAddress,
}

/// What becomes of a machine that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened<'a> {
    /// It is being migrated here.
    Coming,
    /// It was taken, and runs here.
    Arrived,
    /// It stays where it is; why, or empty.
    Refused(&'a str),
}

/// What a site gives to the machines that come.
pub trait Site: Send + Sync + 'static {
    /// The records of machines.
    fn machines(&self) -> &Machines;

    /// Whether the machine may come.
    ///
    /// # Errors
    /// When it may not, with the way out.
    fn allow<'a>(&'a self, peer: &'a Peer, offer: &'a OpenMove)
    -> Pending<'a, Result<(), Refusal>>;

    /// Told of what becomes of a machine.
    fn happened(&self, machine: &ImageName, from: &Other, what: Happened<'_>);

    /// Told of a peer that may not bring a machine; `address` is the peer's.
    fn refused(&self, peer: &Peer, address: &str, refusal: &Refusal);

    /// The QMP socket of the hypervisor that waits for the machine, which is started if it does not run.
    ///
    /// # Errors
    /// When there is none.
    fn incoming<'a>(&'a self, machine: &'a ImageName) -> Pending<'a, Result<PathBuf, Refusal>>;

    /// Opens the disks of the machine, and serves them as long as the site runs or until they are closed. Those that
    /// are open stay as they are.
    ///
    /// # Errors
    /// When one cannot be opened.
    fn open_disks<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<Vec<Served>, Refusal>>;

    /// Closes the disks of a machine that does not come, or will be copied anew, and drops what was written to them.
    ///
    /// # Errors
    /// When that is not possible: then it cannot come yet.
    fn discard_disks<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<(), Refusal>>;
}

/// A machine that comes, or has come in the life of this process.
struct Coming {
    leecher: Leecher,
    from: Other,
    prepared: Option<Prepared>,
    /// Until the move is over.
    lock: Option<MachineLock>,
}

impl Coming {
    /// Then other commands may move the machine, and drive its hypervisor.
    fn release_when_over(&mut self) {
        if self.leecher.is_over() {
            (self.lock, self.prepared) = (None, None);
        }
    }
}

#[derive(Clone)]
struct Prepared {
    hypervisor: Machine,
    disks: Vec<Served>,
    /// Becomes true when nothing may be written any more by the other site.
    over: Arc<watch::Sender<bool>>,
}

/// All moves to a site.
pub struct Moves<S> {
    site: Arc<S>,
    coming: Mutex<HashMap<ImageName, Arc<tokio::sync::Mutex<Option<Coming>>>>>,
}

impl<S: Site> Moves<S> {
    /// What it gives to them.
    #[must_use]
    pub fn site(&self) -> &Arc<S> {
        &self.site
    }

    /// No moves yet.
    #[must_use]
    pub fn new(site: Arc<S>) -> Arc<Self> {
        Arc::new(Self {
            site,
            coming: Mutex::default(),
        })
    }

    /// Continues after a restart of the site: serves the disks of the machines that are here, and starts those that
    /// were taken and not seen running. Errors are logged: one machine must not stop another.
    pub async fn restart(self: &Arc<Self>) {
        let names = self.site.machines().names();
        let names = names.inspect_err(|e| tracing::error!("cannot list the machines: {e}"));
        for name in names.unwrap_or_default() {
            if let Err(e) = self.restart_one(&name).await {
                tracing::error!(machine = %name, "{e}");
            }
        }
    }

    async fn restart_one(&self, name: &ImageName) -> Result<(), MigrateError> {
        let Some(record) = self.site.machines().load(name)? else {
            return Ok(());
        };
        if record.may_run() && record.generation.0 > 0 {
            self.site.open_disks(name, &record).await?;
        }
        let mut actions = Vec::new();
        let Some(mut leecher) = Leecher::restart(&record, &mut actions) else {
            return Ok(());
        };
        let mut prepared = None;
        while !actions.is_empty() {
            for action in std::mem::take(&mut actions) {
                self.act(name, &mut leecher, &mut prepared, action, &mut actions)
                    .await?;
            }
        }
        Ok(())
    }

    fn entry(&self, name: &ImageName) -> Result<Arc<tokio::sync::Mutex<Option<Coming>>>, Refusal> {
        let mut coming = self.coming.lock();
        // Those whose move is over, and that no connection uses.
        coming.retain(|_, entry| {
            Arc::strong_count(entry) > 1 || entry.try_lock().is_ok_and(|entry| entry.is_some())
        });
        if coming.len() >= MAX_MOVES && !coming.contains_key(name) {
            let text = "too many machines are on their way to this site; try again later";
            return Err(Refusal::new(Code::Busy, text));
        }
        Ok(Arc::clone(coming.entry(name.clone()).or_default()))
    }

    /// The disks and the hypervisor of a move that is being prepared.
    async fn prepared(
        &self,
        peer: &Peer,
        name: &ImageName,
        token: Token,
    ) -> Result<Prepared, Refusal> {
        let entry = self.coming.lock().get(name).cloned();
        let none = || Refusal::new(Code::OutOfOrder, "that move is not being prepared");
        let entry = entry.ok_or_else(none)?;
        let coming = entry.lock().await;
        let coming = coming.as_ref().ok_or_else(none)?;
        let own = coming.leecher.token() == token && coming.from.key == peer.key.0;
        let prepared = coming.prepared.clone().filter(|_| own);
        prepared.ok_or_else(none)
    }

    /// Serves a conversation to its end.
    async fn converse(&self, peer: &Peer, mut call: IncomingCall) -> Result<(), MigrateError> {
        let offer: OpenMove = call.request()?;
        let entry = match self.open(peer, &offer).await {
            Ok(entry) => entry,
            Err(refusal) => {
                self.site.refused(peer, call.reader.peer_text(), &refusal);
                return Ok(call.refuse(&refusal).await?);
            }
        };
        call.accept::<OpenMove>(&()).await?;
        let mut talk = Talk::new(call.reader, call.writer);
        let answer = entry.lock().await.as_ref().map(|c| c.leecher.answer());
        let Some(answer) = answer else {
            return Ok(());
        };
        talk.say(kind::ANSWER, &answer).await?;
        loop {
            let ask = talk.hear::<Ask>(kind::ASK).await;
            let mut coming = entry.lock().await;
            let is_over = coming
                .as_ref()
                .is_none_or(|coming| coming.leecher.is_over());
            let ask = match ask {
                // That is how the seeder leaves.
                Err(_) if is_over => return Ok(()),
                ask => ask?,
            };
            let Some(coming) = coming.as_mut().filter(|c| c.leecher.token() == offer.token) else {
                return Ok(());
            };
            let answer = self.answer(&offer.machine, coming, ask).await?;
            talk.say(kind::ANSWER, &answer).await?;
        }
    }

    /// Finds or records the move.
    async fn open(
        &self,
        peer: &Peer,
        offer: &OpenMove,
    ) -> Result<Arc<tokio::sync::Mutex<Option<Coming>>>, Refusal> {
        check(offer)?;
        self.site.allow(peer, offer).await?;
        let name = &offer.machine;
        let entry = self.entry(name)?;
        let mut coming = entry.lock().await;
        let from = Other {
            key: peer.key.0,
            name: peer.name.clone(),
        };
        if let Some(known) = coming.as_ref()
            && known.leecher.token() == offer.token
        {
            if known.from != from {
                return Err(Refusal::new(Code::Denied, "that move is not yours"));
            }
            drop(coming);
            return Ok(entry);
        }
        // A move that is over makes room for the next one, and so does one that its seeder has given up.
        if let Some(mut old) = coming.take()
            && !old.leecher.is_over()
            && old.from.key == from.key
        {
            self.discard(name, old.leecher.record(), &mut old.prepared)
                .await?;
        }
        let lock = self.site.machines().lock(name).map_err(|e| {
            let text = format!("cannot lock the record of the machine {name}: {e}");
            Refusal::new(Code::Io, text)
        })?;
        let lock = lock.ok_or_else(|| {
            let text = format!("{name} is being moved here by another command");
            Refusal::new(Code::Held, text)
        })?;
        let known = self.site.machines().load(name)?;
        let mut actions = Vec::new();
        let mut leecher = Leecher::start(known.as_ref(), offer, from.clone(), &mut actions)?;
        let mut prepared = None;
        for action in std::mem::take(&mut actions) {
            let done = self
                .act(name, &mut leecher, &mut prepared, action, &mut actions)
                .await;
            done.map_err(|e| Refusal::new(Code::Failed, e.to_string()))?;
        }
        if !leecher.is_over() {
            self.tell(name, leecher.record(), Happened::Coming);
        }
        *coming = Some(Coming {
            leecher,
            from,
            prepared,
            lock: Some(lock),
        });
        if let Some(coming) = coming.as_mut() {
            coming.release_when_over();
        }
        drop(coming);
        Ok(entry)
    }

    async fn answer(
        &self,
        name: &ImageName,
        coming: &mut Coming,
        ask: Ask,
    ) -> Result<Answer, MigrateError> {
        let mut events = Vec::new();
        let done = match ask {
            Ask::Begin if coming.leecher.may_begin() => {
                events.push(Event::Copying);
                let record = coming.leecher.record();
                let discarded = self.discard(name, record, &mut coming.prepared);
                discarded.await.map_err(MigrateError::from)
            }
            Ask::Prepare => match self.prepare(name, coming.leecher.record()).await {
                Ok(prepared) => {
                    coming.prepared = Some(prepared);
                    Ok(())
                }
                Err(e) => Err(e),
            },
            Ask::Arrived => {
                let arrived = self.arrived(coming.prepared.as_ref()).await;
                arrived.map(|()| events.push(Event::Ready))
            }
            Ask::Commit => {
                // From the decision on nobody else has it.
                if let Err(e) = self.arrived(coming.prepared.as_ref()).await {
                    events.push(Event::Lost(e.to_string()));
                }
                Ok(())
            }
            Ask::Begin | Ask::Cancel => Ok(()),
        };
        events.push(Event::Asked(ask));
        let mut answer = coming.leecher.answer();
        for event in events {
            let mut actions = Vec::new();
            coming.leecher.handle(event, &mut actions);
            while !actions.is_empty() {
                for action in std::mem::take(&mut actions) {
                    if let Action::Answer(said) = &action {
                        answer = said.clone();
                    }
                    let (leecher, prepared) = (&mut coming.leecher, &mut coming.prepared);
                    self.act(name, leecher, prepared, action, &mut actions)
                        .await?;
                }
            }
        }
        coming.release_when_over();
        if let Err(e) = done {
            // It stays open: the seeder may begin anew.
            answer.why = e.to_string();
        }
        let end = answer.why.floor_char_boundary(MAX_WHY);
        answer.why.truncate(end);
        Ok(answer)
    }

    /// Waits until all of the machine is here.
    async fn arrived(&self, prepared: Option<&Prepared>) -> Result<(), MigrateError> {
        match prepared {
            Some(prepared) => arrived(&prepared.hypervisor).await,
            None => Err(MigrateError::Unsupported("it was not prepared".into())),
        }
    }

    async fn act(
        &self,
        name: &ImageName,
        leecher: &mut Leecher,
        prepared: &mut Option<Prepared>,
        action: Action,
        actions: &mut Vec<Action>,
    ) -> Result<(), MigrateError> {
        match action {
            Action::Keep(record) => self.keep(name, record).await?,
            Action::Run => {
                if let Some(prepared) = &prepared {
                    let _ = prepared.over.send(true);
                }
                self.run(name, prepared.as_ref()).await?;
                tracing::info!(machine = %name, "it runs here");
                self.tell(name, leecher.record(), Happened::Arrived);
                leecher.handle(Event::Running, actions);
            }
            Action::Discard => {
                let why = leecher.answer().why;
                self.tell(name, leecher.record(), Happened::Refused(&why));
                if let Err(e) = self.discard(name, leecher.record(), prepared).await {
                    tracing::warn!(machine = %name, "what was received of it was not removed: {e}");
                }
            }
            // The caller sends it.
            Action::Answer(_) => {}
        }
        Ok(())
    }

    fn tell(&self, name: &ImageName, record: &MachineRecord, what: Happened<'_>) {
        let from = match (&record.under_way, &record.owner) {
            (Some(Move::Coming(_, from) | Move::Taken(_, from)), _) => from,
            (_, Owner::There(from)) => from,
            _ => return,
        };
        self.site.happened(name, from, what);
    }

    /// Ends what has arrived of a machine.
    async fn discard(
        &self,
        name: &ImageName,
        record: &MachineRecord,
        prepared: &mut Option<Prepared>,
    ) -> Result<(), Refusal> {
        if let Some(prepared) = prepared.take() {
            let _ = prepared.over.send(true);
            let hypervisor = &prepared.hypervisor;
            // One that has read nothing can wait for the next attempt.
            let waits = hypervisor
                .migration()
                .await
                .is_ok_and(|info| info.status == MigrationStatus::None);
            if !waits {
                hypervisor.quit().await.ok();
            }
        }
        self.site.discard_disks(name, record).await
    }

    async fn keep(&self, name: &ImageName, record: MachineRecord) -> Result<(), MigrateError> {
        let (site, name) = (Arc::clone(&self.site), name.clone());
        let kept = tokio::task::spawn_blocking(move || site.machines().store(&name, &record));
        Ok(kept.await.map_err(|_| MigrateError::Stopped)??)
    }

    async fn run(&self, name: &ImageName, prepared: Option<&Prepared>) -> Result<(), MigrateError> {
        let machine = match prepared {
            Some(prepared) => prepared.hypervisor.clone(),
            None => Machine::connect(self.site.incoming(name).await?).await?,
        };
        match machine.status().await? {
            RunState::Running => Ok(()),
            RunState::InMigrate => Err(MigrateError::Unsupported(format!(
                "the memory of the machine {name} was lost with its QEMU: boot it from its disks, and give the migration up here"
            ))),
            _ => Ok(machine.cont().await?),
        }
    }

    /// Opens the disks, and gives them to the hypervisor that waits.
    async fn prepare(
        &self,
        name: &ImageName,
        record: &MachineRecord,
    ) -> Result<Prepared, MigrateError> {
        let served = self.site.open_disks(name, record).await?;
        let machine = Machine::connect(self.site.incoming(name).await?).await?;
        let status = machine.status().await?;
        if status != RunState::InMigrate {
            return Err(MigrateError::Unsupported(format!(
                "the machine {name} here is {status} and does not wait for a migration: start it with -S -incoming defer"
            )));
        }
        machine.set_capabilities(&Capability::NEEDED, true).await?;
        let found = machine.disks().await?.into_iter();
        let found: Vec<_> = found
            .filter_map(|disk| disk.medium)
            .filter(|medium| !medium.read_only)
            .collect();
        if found.len() != served.len() {
            return Err(MigrateError::Unsupported(format!(
                "the machine {name} has {} writable disks here, and {} where it comes from",
                found.len(),
                served.len()
            )));
        }
        for (n, (medium, disk)) in found.iter().zip(&served).enumerate() {
            if medium.size != disk.device.size() {
                return Err(MigrateError::Unsupported(format!(
                    "disk {n} of the machine {name} has {} bytes here, and {} where it comes from",
                    medium.size,
                    disk.device.size()
                )));
            }
            let is_ours = medium.data == Data::Nbd(disk.address.clone());
            if !is_ours {
                attach(&machine, n, &medium.node, &disk.address).await?;
            }
        }
        Ok(Prepared {
            hypervisor: machine,
            disks: served,
            over: Arc::new(watch::Sender::new(false)),
        })
    }
}

/// Checks an offer for its form.
fn check(offer: &OpenMove) -> Result<(), Refusal> {
    let bad = |text: &str| Err(Refusal::new(Code::Protocol, text));
    if offer.disks.len() > MAX_DISKS {
        return bad("a machine has too many disks");
    }
    let names: HashSet<_> = offer.disks.iter().map(|disk| &disk.image).collect();
    if names.len() != offer.disks.len() {
        return bad("two disks of a machine have the same name");
    }
    Ok(())
}
