//! Takes machines that other sites send: drives the leechers.

mod boot;
mod broken;
mod conversation;
mod given_up;
mod hypervisor;
mod services;
mod waiting;

use std::collections::HashMap;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_device::backend::nbd::NbdAddress;
use drover_hypervisor::Place;
use drover_net::service::Peer;
use drover_net::{Code, Refusal};
use drover_store::machine::{MachineLock, MachineRecord, Machines, Move, Other, Owner, Token};
use parking_lot::Mutex;
use tokio::runtime::Handle;

pub use self::boot::boot;
pub use self::broken::Kept;
use self::given_up::GivenUp;
pub use self::services::{
    AllMoves, Conversations, DiskFetches, DiskWrites, Measures, MemoryStreams,
};
pub use self::waiting::Served;
use self::waiting::Waiting;
use crate::error::MigrateError;
use crate::leecher::{Action, Event, Leecher};
use crate::program::transfer::Transfer;
use crate::protocol::{Ask, KEEP_ALIVE, Kind, MountedDisk};

/// Upper bound on moves to a site at once.
const MAX_MOVES: usize = 64;

/// How long after a restart of the site it is looked often whether a machine was stopped meanwhile.
const ROUSE_SOON: Duration = Duration::from_secs(120);

/// How often that is.
const ROUSE_POLL: Duration = Duration::from_millis(200);

/// How often it is looked at afterwards, as long as the machine is here.
const ROUSE_LATER: Duration = Duration::from_secs(5);

/// How often it is looked whether a machine is prepared whose memory has come.
const PREPARED_POLL: Duration = Duration::from_millis(20);

/// Attempts to copy machines that were begun in this process, and calls that brought memory early.
static ATTEMPTS: AtomicU64 = AtomicU64::new(0);

/// A future that borrows.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

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

/// What a site gives to the machines that come, or to the disks of programs.
pub trait Site: Send + Sync + 'static {
    /// Which of the two. A disk has no hypervisor.
    fn kind(&self) -> Kind {
        Kind::Machine
    }

    /// The records of machines.
    fn machines(&self) -> &Machines;

    /// Whether the machine may come from this peer, with images of these names, which may not exist yet.
    ///
    /// # Errors
    /// When it may not, with the way out.
    fn allow<'a>(
        &'a self,
        peer: &'a Peer,
        machine: &'a ImageName,
        disks: &'a [ImageName],
    ) -> Pending<'a, Result<(), Refusal>>;

    /// The machine's hypervisor, which may not run.
    ///
    /// # Errors
    /// When the machine is not expected.
    fn hypervisor(&self, machine: &ImageName) -> Result<Place, Refusal>;

    /// Told of what becomes of a machine.
    fn happened(&self, machine: &ImageName, from: &Other, what: Happened<'_>);

    /// The images of a machine's disks belong to this peer from now on, who has the machine, or to this site.
    fn give_disks<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
        to: Option<&'a Peer>,
    ) -> Pending<'a, ()>;

    /// Told of a peer that may not bring a machine; `address` is the peer's.
    fn refused(&self, peer: &Peer, address: &str, refusal: &Refusal);

    /// The hypervisor that waits for the machine, which is started if it does not run.
    ///
    /// # Errors
    /// When there is none.
    fn incoming<'a>(&'a self, machine: &'a ImageName) -> Pending<'a, Result<Place, Refusal>>;

    /// Mounts the disks of a machine that comes which are images of other sites: the mounts stand by for the write leases of this
    /// peer, and are served. Those of an earlier attempt go on, or end if they are not among these.
    ///
    /// # Errors
    /// When one cannot be mounted, with the way out.
    fn stand_by<'a>(
        &'a self,
        peer: &'a Peer,
        machine: &'a ImageName,
        token: Token,
        disks: &'a [MountedDisk],
    ) -> Pending<'a, Result<(), Refusal>> {
        let _ = (peer, machine, token);
        Box::pin(async move {
            match disks {
                [] => Ok(()),
                _ => Err(Refusal::new(Code::Unsupported, "this site has no mounts")),
            }
        })
    }

    /// Where these mounts are served; they stand by still.
    ///
    /// # Errors
    /// When one does not.
    fn standing<'a>(
        &'a self,
        machine: &'a ImageName,
        disks: &'a [MountedDisk],
    ) -> Pending<'a, Result<Vec<NbdAddress>, Refusal>> {
        let _ = (machine, disks);
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Opens the disks of the machine, and serves them as long as the site runs or until they are closed. Those that
    /// are open stay as they are. Those of a machine whose move from here is committed must not be written as long as it is.
    ///
    /// # Errors
    /// When one cannot be opened.
    fn open_disks<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<Vec<Served>, Refusal>>;

    /// Closes what was opened of a disk that was taken: it is an image of this site. Done again after a restart.
    ///
    /// # Errors
    /// When that is not possible: it is tried again at the next start.
    fn keep_disk<'a>(
        &'a self,
        disk: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<(), Refusal>> {
        let _ = (disk, record);
        Box::pin(async { Ok(()) })
    }

    /// What has not arrived of a machine that runs here, and whose disks may be open, will not: who reads it gets an error from now on,
    /// also after a restart. How many bytes that are.
    ///
    /// # Errors
    /// When that cannot be made durable; [`Code::Held`] when others have its disks: then nobody knows what it was.
    fn lose_rest<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<u64, Refusal>> {
        let _ = (machine, record);
        Box::pin(async { Err(Refusal::new(Code::Unsupported, "nothing follows here")) })
    }

    /// Closes the disks of a machine that does not come, or will be copied anew, and drops what was written to them. Its mounts that
    /// stand by end, unless it will be copied `anew`.
    ///
    /// # Errors
    /// When that is not possible: then it cannot come yet.
    fn discard_disks<'a>(
        &'a self,
        machine: &'a ImageName,
        record: &'a MachineRecord,
        anew: bool,
    ) -> Pending<'a, Result<(), Refusal>>;
}

/// A machine that comes, or has come in the life of this process.
struct Coming {
    leecher: Leecher,
    from: Other,
    prepared: Option<Prepared>,
    /// What it lacks, once it was taken in part.
    rest: Option<Arc<Transfer>>,
    /// The conversation that counts: the newest. What an older one still says is late.
    conversation: u64,
    /// Which attempt to copy it this is, and which call brings its memory early; 0 before the first.
    attempt: u64,
    early: u64,
    /// Since when its seeder has no conversation.
    silent: Option<Instant>,
    /// Until the move is over.
    lock: Option<MachineLock>,
}

impl Coming {
    /// Whether it comes from this peer by this move, and is not decided.
    fn is_own(&self, peer: &Peer, token: Token) -> bool {
        let is_it = self.leecher.token() == token && self.from.key == peer.key.0;
        is_it && self.leecher.may_begin()
    }

    /// Then other commands may move the machine, and drive its hypervisor.
    fn release_when_over(&mut self) {
        if self.leecher.is_over() {
            (self.lock, self.prepared, self.rest) = (None, None, None);
        }
    }
}

/// A machine by its name: what comes of it, if anything.
type Entry = Arc<tokio::sync::Mutex<Option<Coming>>>;

#[derive(Clone)]
struct Prepared {
    hypervisor: Waiting,
    /// Its disks that are mounts, and stand by.
    mounted: Vec<MountedDisk>,
    disks: Vec<Served>,
    transfer: Arc<Transfer>,
}

/// All moves to a site.
pub struct Moves<S> {
    this: Weak<Self>,
    site: Arc<S>,
    coming: Mutex<HashMap<ImageName, Entry>>,
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
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            site,
            coming: Mutex::default(),
        })
    }

    /// Continues after a restart of the site: serves the disks of the machines that are here, or were handed over and may not be
    /// all there yet, and starts those that were taken and not seen running. Errors are logged: one machine must not stop another.
    pub async fn restart(self: &Arc<Self>) {
        let names = self.site.machines().names();
        let names = names.inspect_err(|e| tracing::error!("cannot list the machines: {e}"));
        for name in names.unwrap_or_default() {
            if let Err(e) = self.restart_one(&name).await {
                tracing::error!(machine = %name, "{e}");
            }
        }
    }

    async fn restart_one(self: &Arc<Self>, name: &ImageName) -> Result<(), MigrateError> {
        // Peers, and commands of this site, wait.
        let entry = self.entry(name)?;
        let mut coming = entry.lock().await;
        let lock = self.site.machines().lock(name);
        let Some(record) = self.site.machines().load(name)? else {
            return Ok(());
        };
        let is_machine = self.site.kind() == Kind::Machine;
        if record.is_committed() && is_machine && record.generation.0 > 0 {
            // What has not followed it is read from them, by the command that moves it.
            drop(lock);
            self.site.open_disks(name, &record).await?;
            return Ok(());
        }
        let is_here = record.may_run() && is_machine;
        let mut served = Vec::new();
        if is_here && record.generation.0 > 0 {
            served = self.site.open_disks(name, &record).await?;
        }
        if is_here {
            self.rouse(name);
        }
        let mut actions = Vec::new();
        let Some(mut leecher) = Leecher::restart(&record, &mut actions) else {
            return Ok(());
        };
        // Otherwise whoever has the lock does it.
        let (true, Ok(Some(lock))) = (coming.is_none(), lock) else {
            return Ok(());
        };
        self.act_all(name, &mut leecher, &mut None, actions).await?;
        // The rest follows, as soon as its seeder is back.
        if let (true, Some(Move::Partial(token, from))) = (is_here, record.under_way) {
            // A process that was to give it up has not got that far.
            GivenUp::of(self.site.machines(), name).remove(token)?;
            *coming = Some(Coming {
                leecher,
                from,
                prepared: None,
                rest: Some(self.transfer(name, token, &served, true)),
                conversation: 0,
                attempt: 0,
                early: 0,
                silent: None,
                lock: Some(lock),
            });
        }
        Ok(())
    }

    /// Takes what comes of the disks of a machine; `is_taken` if it has been taken.
    fn transfer(
        &self,
        name: &ImageName,
        token: Token,
        served: &[Served],
        is_taken: bool,
    ) -> Arc<Transfer> {
        let targets = served.iter().map(|disk| disk.target.clone()).collect();
        let transfer = match is_taken {
            true => Transfer::resumed(targets),
            false => Transfer::new(targets),
        };
        let (this, name, runtime) = (Weak::clone(&self.this), name.clone(), Handle::current());
        transfer.on_whole(move || match this.upgrade() {
            Some(this) => runtime.block_on(this.whole(&name, token)),
            None => Ok(()),
        });
        transfer
    }

    /// Records that all is here of a machine that was taken in part, and durable.
    async fn whole(&self, name: &ImageName, token: Token) -> Result<(), Refusal> {
        let entry = self.entry(name)?;
        let mut slot = entry.lock().await;
        let is_it = |coming: &&mut Coming| coming.leecher.token() == token;
        let Some(coming) = slot.as_mut().filter(is_it) else {
            return Ok(());
        };
        let mut actions = Vec::new();
        coming.leecher.handle(Event::Whole, &mut actions);
        let (leecher, prepared) = (&mut coming.leecher, &mut coming.prepared);
        let mut acted = self.act_all(name, leecher, prepared, actions).await;
        if acted.is_ok() && leecher.is_starting() {
            // It could not be found out whether it runs: perhaps it waited for its disks.
            let run = vec![Action::Run];
            acted = self.act_all(name, leecher, prepared, run).await;
        }
        if acted.is_err() {
            // What this process knows is not what is recorded: it begins with that when the source comes again.
            *slot = None;
        } else {
            tracing::info!(machine = %name, "all of it is here");
            coming.release_when_over();
        }
        acted.map_err(failed)
    }

    /// Looks after a machine whose disks were away.
    fn rouse(&self, name: &ImageName) {
        // One that has never come has no hypervisor of ours; QEMU's own waits by itself.
        let Ok(place @ Place::Libvirt(..)) = self.site.hypervisor(name) else {
            return;
        };
        let (name, socket) = (name.clone(), self.socket(name));
        let site = Arc::downgrade(&self.site);
        let known = move || site.upgrade()?.machines().load(&name).ok()?;
        tokio::spawn(async move {
            let begun = Instant::now();
            // Its first request may come much later, and libvirt may start after the site.
            while let Some(record) = known().filter(MachineRecord::may_run) {
                // Whoever moves it looks after it.
                if record.under_way.is_none() {
                    let waiting = Waiting::connect(&place, socket.clone());
                    let roused = async { waiting.await?.rouse().await };
                    if let Err(e) = roused.await {
                        tracing::debug!("{e}");
                    }
                }
                let soon = begun.elapsed() < ROUSE_SOON;
                tokio::time::sleep(if soon { ROUSE_POLL } else { ROUSE_LATER }).await;
            }
        });
    }

    fn entry(&self, name: &ImageName) -> Result<Entry, Refusal> {
        let mut coming = self.coming.lock();
        // Those whose move is over are in the records.
        coming.retain(|_, entry| {
            let is_under_way = |coming: &Coming| !coming.leecher.is_over();
            let is_used = |entry: &Entry| match entry.try_lock() {
                Ok(coming) => coming.as_ref().is_some_and(is_under_way),
                Err(_) => true,
            };
            Arc::strong_count(entry) > 1 || is_used(entry)
        });
        if coming.len() >= MAX_MOVES && !coming.contains_key(name) {
            let text = "too many machines are on their way to this site; try again later";
            return Err(Refusal::new(Code::Busy, text));
        }
        Ok(Arc::clone(coming.entry(name.clone()).or_default()))
    }

    /// A person of this site gives up a move to it: one that is not decided is refused, and one whose machine was taken and could
    /// not be started is over, with the machine here.
    ///
    /// # Errors
    /// [`Code::NotFound`] when there is none, [`Code::Held`] when another process works on the machine.
    pub async fn give_up(self: &Arc<Self>, name: ImageName) -> Result<(), Refusal> {
        let moves = Arc::clone(self);
        let given_up = to_the_end(async move { moves.give_up_one(&name).await });
        given_up.await.map_err(failed)?
    }

    async fn give_up_one(&self, name: &ImageName) -> Result<(), Refusal> {
        let none = || Refusal::new(Code::NotFound, format!("{name} is not coming to this site"));
        let entry = self.entry(name)?;
        let mut slot = entry.lock().await;
        let known = self.site.machines().load(name)?;
        if let Some(Move::Partial(_, from)) = known.and_then(|known| known.under_way) {
            let text = format!(
                "{name} was taken, and some of its disks is still at {0}: run the migration at {0} again",
                from.name
            );
            return Err(Refusal::new(Code::Held, text));
        }
        if slot.as_ref().is_none_or(|coming| coming.leecher.is_over()) {
            let lock = self.site.machines().lock(name);
            let lock = lock.map_err(|e| Refusal::new(Code::Io, e.to_string()))?;
            let held = || Refusal::new(Code::Held, format!("another process moves {name}"));
            let lock = lock.ok_or_else(held)?;
            let record = self.site.machines().load(name)?.ok_or_else(none)?;
            let (Some(Move::Coming(_, from, _) | Move::Taken(_, from)), Some(leecher)) = (
                record.under_way.clone(),
                Leecher::restart(&record, &mut Vec::new()),
            ) else {
                return Err(none());
            };
            *slot = Some(Coming {
                leecher,
                from,
                prepared: None,
                rest: None,
                conversation: 0,
                attempt: 0,
                early: 0,
                silent: None,
                lock: Some(lock),
            });
        }
        let mut coming = slot.take().ok_or_else(none)?;
        let event = match coming.leecher.may_begin() {
            true => Event::Asked(Ask::Cancel),
            false => Event::Running,
        };
        let mut actions = Vec::new();
        coming.leecher.handle(event, &mut actions);
        let (leecher, prepared) = (&mut coming.leecher, &mut coming.prepared);
        let acted = self.act_all(name, leecher, prepared, actions);
        acted.await.map_err(failed)?;
        coming.release_when_over();
        *slot = Some(coming);
        Ok(())
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
        let own = coming.is_own(peer, token);
        let prepared = coming.prepared.clone().filter(|_| own);
        prepared.ok_or_else(none)
    }

    /// The number of a call that brings the memory of a machine that is not prepared yet. It takes the place of an older one.
    ///
    /// # Errors
    /// When nothing of the kind comes from this peer.
    async fn attempt(&self, peer: &Peer, name: &ImageName, token: Token) -> Result<u64, Refusal> {
        let none = || Refusal::new(Code::OutOfOrder, "that move is not being prepared");
        let entry = self.coming.lock().get(name).cloned();
        let entry = entry.ok_or_else(none)?;
        let mut coming = entry.lock().await;
        let own = coming
            .as_mut()
            .filter(|coming| coming.is_own(peer, token) && coming.attempt > 0);
        let own = own.ok_or_else(none)?;
        own.early = next_attempt();
        Ok(own.early)
    }

    /// Waits until that machine is prepared; `None` when it never will be for this call: the copy has begun anew, another call has
    /// taken its place, or its seeder has been away for so long that its connection is dead.
    async fn until_prepared(
        &self,
        peer: &Peer,
        name: &ImageName,
        token: Token,
        early: u64,
    ) -> Option<Prepared> {
        loop {
            let entry = self.coming.lock().get(name).cloned()?;
            let coming = entry.lock().await;
            let own = coming
                .as_ref()
                .filter(|coming| coming.is_own(peer, token) && coming.early == early);
            let own = own?;
            if let Some(prepared) = &own.prepared {
                return Some(prepared.clone());
            }
            if own
                .silent
                .is_some_and(|since| since.elapsed() > KEEP_ALIVE.dead_after)
            {
                return None;
            }
            drop(coming);
            tokio::time::sleep(PREPARED_POLL).await;
        }
    }

    /// What comes of the disks of a move that is being prepared, or of a machine that was taken in part.
    async fn transfer_of(
        &self,
        peer: &Peer,
        name: &ImageName,
        token: Token,
    ) -> Result<Arc<Transfer>, Refusal> {
        let entry = self.coming.lock().get(name).cloned();
        if let Some(entry) = entry {
            let coming = entry.lock().await;
            let own = coming
                .as_ref()
                .filter(|coming| coming.leecher.token() == token && coming.from.key == peer.key.0);
            let transfer = own.and_then(|coming| match coming.leecher.may_begin() {
                true => Some(Arc::clone(&coming.prepared.as_ref()?.transfer)),
                false => coming.rest.clone(),
            });
            if let Some(transfer) = transfer {
                return Ok(transfer);
            }
        }
        self.taken_up(peer, name, token).await
    }

    /// The same of a machine of which this process knows nothing any more but its record: that could not be changed when all of it
    /// was there, or the site has just been started.
    async fn taken_up(
        &self,
        peer: &Peer,
        name: &ImageName,
        token: Token,
    ) -> Result<Arc<Transfer>, Refusal> {
        let known = self.site.machines().load(name)?;
        let is_partial = known.as_ref().is_some_and(|known| match &known.under_way {
            Some(Move::Partial(known, from)) => *known == token && from.key == peer.key.0,
            _ => false,
        });
        let given_up = GivenUp::of(self.site.machines(), name);
        // Also when the machine has moved on since.
        if !is_partial && given_up.has(token)? {
            let text = format!(
                "somebody broke the move of {name} there, and gave up what had not arrived"
            );
            return Err(Refusal::new(Code::Lost, text));
        }
        if !is_partial {
            return Err(Refusal::new(
                Code::OutOfOrder,
                "that move is not being prepared, or is over",
            ));
        }
        let closed = |why: &str| {
            let text = format!("the disks of {name} are not open there yet{why}");
            Refusal::new(Code::Unavailable, text)
        };
        let this = self.this.upgrade().ok_or_else(|| closed(""))?;
        if let Err(e) = this.restart_one(name).await {
            return Err(closed(&format!(": {e}")));
        }
        let entry = self.coming.lock().get(name).cloned();
        let entry = entry.ok_or_else(|| closed(""))?;
        let coming = entry.lock().await;
        let own = coming
            .as_ref()
            .filter(|coming| coming.leecher.token() == token);
        let transfer = own.and_then(|coming| coming.rest.clone());
        transfer.ok_or_else(|| closed(""))
    }

    /// Waits until all of the machine is here, and its mounts can get their leases.
    async fn arrived(
        &self,
        name: &ImageName,
        prepared: Option<&Prepared>,
    ) -> Result<(), MigrateError> {
        let none = || MigrateError::Unsupported("it was not prepared".into());
        let prepared = prepared.ok_or_else(none)?;
        prepared.hypervisor.arrived(&prepared.disks).await?;
        self.site.standing(name, &prepared.mounted).await?;
        Ok(())
    }

    /// Does these actions, and what follows from them.
    async fn act_all(
        &self,
        name: &ImageName,
        leecher: &mut Leecher,
        prepared: &mut Option<Prepared>,
        mut actions: Vec<Action>,
    ) -> Result<(), MigrateError> {
        while !actions.is_empty() {
            for action in std::mem::take(&mut actions) {
                self.act(name, leecher, prepared, action, &mut actions)
                    .await?;
            }
        }
        Ok(())
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
                crash("taken");
                match &prepared {
                    Some(prepared) if !leecher.is_partial() => {
                        prepared.transfer.writing.end().await;
                    }
                    // From now on nothing is written that is there.
                    Some(prepared) => drop(prepared.transfer.take_state()),
                    None => {}
                }
                match self.run(name, leecher.record(), prepared.as_ref()).await {
                    Ok(()) => {
                        crash("running");
                        tracing::info!(machine = %name, "it is here");
                        self.site.give_disks(name, leecher.record(), None).await;
                        self.tell(name, leecher.record(), Happened::Arrived);
                        leecher.handle(Event::Running, actions);
                    }
                    // It was taken, and stays: a person looks after it.
                    Err(e) => {
                        tracing::error!(machine = %name, "it was taken, and does not run: {e}");
                        leecher.handle(Event::NotStarted(e.to_string()), actions);
                    }
                }
            }
            Action::Discard => {
                let why = leecher.answer().why;
                self.tell(name, leecher.record(), Happened::Refused(&why));
                if let Err(e) = self.discard(name, leecher.record(), prepared, false).await {
                    tracing::warn!(machine = %name, "what was received of it was not removed: {e}");
                }
            }
            // The caller sends the newest.
            Action::Answer(_) => {}
        }
        Ok(())
    }

    fn tell(&self, name: &ImageName, record: &MachineRecord, what: Happened<'_>) {
        let from = match (&record.under_way, &record.owner) {
            (Some(Move::Coming(_, from, _) | Move::Taken(_, from) | Move::Partial(_, from)), _) => {
                from
            }
            (_, Owner::There(from)) => from,
            _ => return,
        };
        self.site.happened(name, from, what);
    }

    /// Ends what has arrived of a machine, which may be copied `anew`.
    async fn discard(
        &self,
        name: &ImageName,
        record: &MachineRecord,
        prepared: &mut Option<Prepared>,
        anew: bool,
    ) -> Result<(), Refusal> {
        match prepared.take() {
            Some(prepared) => {
                prepared.transfer.writing.end().await;
                prepared.hypervisor.abandon().await;
            }
            None if self.site.kind() == Kind::Disk => {}
            // Of an earlier process of this site, perhaps.
            None => {
                let place = self.site.hypervisor(name)?;
                if let Ok(left) = Waiting::connect(&place, self.socket(name)).await {
                    left.abandon().await;
                }
            }
        }
        self.site.discard_disks(name, record, anew).await
    }

    async fn keep(&self, name: &ImageName, record: MachineRecord) -> Result<(), MigrateError> {
        let (site, name) = (Arc::clone(&self.site), name.clone());
        let kept = tokio::task::spawn_blocking(move || site.machines().store(&name, &record));
        Ok(kept.await.map_err(|_| MigrateError::Stopped)??)
    }

    async fn run(
        &self,
        name: &ImageName,
        record: &MachineRecord,
        prepared: Option<&Prepared>,
    ) -> Result<(), MigrateError> {
        if self.site.kind() == Kind::Disk {
            return Ok(self.site.keep_disk(name, record).await?);
        }
        let hypervisor = match prepared {
            Some(prepared) => prepared.hypervisor.clone(),
            None => Waiting::connect(&self.site.hypervisor(name)?, self.socket(name)).await?,
        };
        hypervisor.run(name).await
    }

    /// The socket at which libvirt's QEMU waits for the memory of a machine.
    fn socket(&self, name: &ImageName) -> PathBuf {
        self.site
            .machines()
            .directory()
            .join(format!(".{name}.memory"))
    }
}

/// A number that no other attempt or call has.
fn next_attempt() -> u64 {
    ATTEMPTS.fetch_add(1, Ordering::Relaxed) + 1
}

/// Does something that must not end in between, also when nobody waits for it any more.
async fn to_the_end<T: Send + 'static>(
    what: impl Future<Output = T> + Send + 'static,
) -> Result<T, MigrateError> {
    tokio::spawn(what).await.map_err(|_| MigrateError::Stopped)
}

fn failed(error: MigrateError) -> Refusal {
    match error {
        MigrateError::Refused(refusal) => refusal,
        error => Refusal::new(Code::Failed, error.to_string()),
    }
}

/// Crash point for tests: the process dies as if killed when `DROVER_TEST_CRASH` names this place.
fn crash(place: &str) {
    if cfg!(debug_assertions) && std::env::var_os("DROVER_TEST_CRASH").is_some_and(|p| p == place) {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests;
