//! The process that takes a program.

mod running;
mod services;

use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_net::service::Peer;
use drover_net::{Code, Refusal};
use drover_store::machine::{Decision, MachineLock, MachineRecord, Machines, Other, Token};
use tokio::sync::watch;

use super::protocol::{MAX_NAME, MAX_PARTS, MAX_PATIENCE, MIN_PATIENCE, OpenProgram, PartOffer};
use super::target::Target;
use super::transfer::{Phase, Transfer};
use crate::error::MigrateError;
use crate::leecher::{self, Action, Event};
use crate::protocol::{Answer, Ask, Kind, MAX_WHY, OpenMove};

/// How long the last bytes may take that the seeder sent before it committed.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// What a program needs where it goes to. The calls may block.
pub trait Host: Send + Sync + 'static {
    /// Makes what its parts are copied into, in their order: new targets of these sizes, which nobody uses yet. The offer is
    /// a peer's: what is not expected is to be refused here, before anything of that size is allocated.
    ///
    /// # Errors
    /// When it cannot be taken.
    fn prepare(&self, parts: &[PartOffer]) -> Result<Vec<Target>, Refusal>;

    /// Lets the program run on here, with the state that [`Program::pause`](super::Program::pause) returned there.
    ///
    /// # Errors
    /// Why it cannot. It stays here nevertheless: by now it was taken.
    fn run(&self, state: Vec<u8>) -> Result<(), String>;

    /// The targets of the last [`Host::prepare`] are void.
    fn discard(&self, _why: &str) {}
}

/// Where a program is on its way here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Nobody brings it.
    Waiting,
    /// It is being copied.
    Coming,
    /// It runs here; some of it is still at the seeder.
    Running,
    /// All of it is here.
    Complete,
    /// It was taken, and cannot run: it was not started, or its seeder is gone with the rest. In that case a seeder that comes
    /// back makes it [`Stage::Running`] again.
    Lost(String),
}

/// Takes one program.
pub struct Leecher<H> {
    name: ImageName,
    machines: Machines,
    host: Arc<H>,
    slot: tokio::sync::Mutex<Option<Coming>>,
    stage: watch::Sender<Stage>,
}

struct Coming {
    leecher: leecher::Leecher,
    from: Other,
    parts: Vec<PartOffer>,
    /// How long it waits for a lost seeder.
    patience: Duration,
    transfer: Option<Arc<Transfer>>,
    /// The newest conversation, and the one in which it was prepared.
    conversation: u64,
    prepared: u64,
    lock: Option<MachineLock>,
    /// Closed when the host has let it run, or could not.
    run: Option<watch::Receiver<()>>,
}

impl<H: Host> Leecher<H> {
    /// Takes the program `name`; `machines` has the record of it.
    #[must_use]
    pub fn new(name: ImageName, machines: Machines, host: Arc<H>) -> Arc<Self> {
        Arc::new(Self {
            name,
            machines,
            host,
            slot: tokio::sync::Mutex::default(),
            stage: watch::Sender::new(Stage::Waiting),
        })
    }

    /// Where it is.
    #[must_use]
    pub fn stage(&self) -> watch::Receiver<Stage> {
        self.stage.subscribe()
    }

    /// Waits until all of it is here, and the seeder may end.
    ///
    /// # Errors
    /// Why it cannot run, though it was taken.
    pub async fn complete(&self) -> Result<(), MigrateError> {
        let mut stage = self.stage.subscribe();
        let over = |stage: &Stage| matches!(stage, Stage::Complete | Stage::Lost(_));
        // The sender is here.
        match stage.wait_for(over).await.as_deref() {
            Ok(Stage::Lost(why)) => Err(MigrateError::Unsupported(why.clone())),
            _ => Ok(()),
        }
    }

    /// Bytes that are still at the seeder.
    pub async fn left(&self) -> u64 {
        let slot = self.slot.lock().await;
        let transfer = slot.as_ref().and_then(|coming| coming.transfer.as_ref());
        transfer.map_or(0, |transfer| transfer.left())
    }

    /// Finds or records a move.
    async fn open(
        self: &Arc<Self>,
        peer: &Peer,
        offer: &OpenProgram,
    ) -> Result<(u64, Answer), Refusal> {
        if offer.program != self.name {
            let text = format!("{} is not expected here", offer.program);
            return Err(Refusal::new(Code::NotFound, text));
        }
        let parts = &offer.parts;
        if parts.len() > MAX_PARTS || parts.iter().any(|part| part.name.len() > MAX_NAME) {
            return Err(Refusal::new(
                Code::Protocol,
                "a program has too many parts, or one has too long a name",
            ));
        }
        let from = Other {
            key: peer.key.0,
            name: peer.name.clone(),
        };
        let mut slot = self.slot.lock().await;
        if let Some(known) = slot.as_mut() {
            let is_own = known.from.key == from.key;
            if known.leecher.token() == offer.token {
                if !is_own {
                    return Err(Refusal::new(Code::Denied, "that move is not yours"));
                }
                known.conversation += 1;
                return Ok((known.conversation, known.answer_now()));
            }
            if !(known.leecher.is_over() || is_own && known.leecher.may_begin()) {
                let text = format!("{} is being received from {}", self.name, known.from.name);
                return Err(Refusal::new(Code::Held, text));
            }
        }
        // One that is over makes room for the next one, and so does one that its seeder has given up.
        let held = slot.as_mut().and_then(|old| old.lock.take());
        let (this, has_lock) = (Arc::clone(self), held.is_some());
        let (new, other) = (offer.clone(), from.clone());
        let started = tokio::task::spawn_blocking(move || this.start(&new, other, has_lock)).await;
        let started = started.unwrap_or_else(|e| Err(Refusal::new(Code::Failed, e.to_string())));
        let (leecher, actions, lock) = match started {
            Ok((leecher, actions, lock)) => (leecher, actions, held.or(lock)),
            Err(refusal) => {
                if let Some(old) = slot.as_mut() {
                    old.lock = held;
                }
                return Err(refusal);
            }
        };
        if let Some(mut old) = slot.take()
            && old.leecher.may_begin()
        {
            self.void(&mut old, "its seeder began anew").await;
        }
        // What a failed write has left may not be durable.
        if !actions
            .iter()
            .any(|action| matches!(action, Action::Keep(_)))
        {
            self.keep(leecher.record().clone()).await?;
        }
        let mut coming = Coming {
            leecher,
            from,
            parts: parts.clone(),
            patience: Duration::from_millis(offer.patience_ms).clamp(MIN_PATIENCE, MAX_PATIENCE),
            transfer: None,
            conversation: 0,
            prepared: 0,
            lock,
            run: None,
        };
        self.act_all(&mut coming, actions).await?;
        let answer = coming.leecher.answer();
        coming.release_when_over();
        *slot = Some(coming);
        Ok((0, answer))
    }

    /// Decides whether a move may begin, or go on. Takes the lock of its record, unless that is held. Blocks.
    fn start(
        &self,
        offer: &OpenProgram,
        from: Other,
        has_lock: bool,
    ) -> Result<(leecher::Leecher, Vec<Action>, Option<MachineLock>), Refusal> {
        let lock = match has_lock {
            true => None,
            false => {
                let lock = self.machines.lock(&self.name).map_err(|e| {
                    let text = format!("cannot lock the record of {}: {e}", self.name);
                    Refusal::new(Code::Io, text)
                })?;
                Some(lock.ok_or_else(|| {
                    let text = format!("{} is being moved by another process there", self.name);
                    Refusal::new(Code::Held, text)
                })?)
            }
        };
        let known = self.machines.load(&self.name)?;
        let parts = offer.parts.iter();
        let as_machine = OpenMove {
            kind: Kind::Machine,
            token: offer.token,
            machine: offer.program.clone(),
            seed: offer.seed,
            generation: offer.generation,
            disks: Vec::new(),
            memory_bytes: parts.fold(0, |sum, part| sum.saturating_add(part.size)),
            mounted: Vec::new(),
        };
        let mut actions = Vec::new();
        let leecher = leecher::Leecher::start(known.as_ref(), &as_machine, from, &mut actions)?;
        Ok((leecher, actions, lock))
    }

    /// Does what the seeder asks; `None` when another conversation has taken the place of this one.
    async fn asked(
        self: &Arc<Self>,
        token: Token,
        number: u64,
        ask: Ask,
    ) -> Result<Option<Answer>, MigrateError> {
        if ask == Ask::Commit {
            self.ready(token).await;
        }
        let is_this =
            |coming: &&mut Coming| coming.leecher.token() == token && coming.conversation == number;
        let mut slot = self.slot.lock().await;
        let Some(coming) = slot.as_mut().filter(is_this) else {
            return Ok(None);
        };
        let why = match self.act_on(coming, number, ask).await {
            Ok(why) => why,
            Err(refusal) => {
                // What this process knows is not what is recorded: the next conversation goes on from there.
                if let Some(mut lost) = slot.take() {
                    self.void(&mut lost, "its record could not be written")
                        .await;
                }
                return Err(refusal.into());
            }
        };
        if ask == Ask::Commit
            && let Some(mut run) = coming.run.clone()
        {
            // Connections that it needs for that are made meanwhile.
            drop(slot);
            while run.changed().await.is_ok() {}
            slot = self.slot.lock().await;
        }
        let Some(coming) = slot.as_mut().filter(is_this) else {
            return Ok(None);
        };
        coming.release_when_over();
        let mut answer = coming.leecher.answer();
        if !why.is_empty() {
            answer.why = why;
        }
        let end = answer.why.floor_char_boundary(MAX_WHY);
        answer.why.truncate(end);
        Ok(Some(answer))
    }

    /// Does what the seeder asks; why it could not be done, or nothing.
    async fn act_on(
        self: &Arc<Self>,
        coming: &mut Coming,
        number: u64,
        ask: Ask,
    ) -> Result<String, Refusal> {
        let mut events = Vec::new();
        let mut why = String::new();
        match ask {
            // Too late for all but the answer.
            _ if !coming.leecher.may_begin() => {}
            Ask::Begin => {
                events.push(Event::Copying);
                self.void(coming, "it is copied anew").await;
            }
            Ask::Prepare => {
                // Two at a time would take the memory of both.
                self.void(coming, "it is prepared anew").await;
                events.push(Event::Copying);
                match self.prepare(coming).await {
                    Ok(()) => coming.prepared = number,
                    Err(refusal) => why = refusal.to_string(),
                }
            }
            Ask::Arrived | Ask::Commit => {
                // A seeder that asks by another connection may be another process, without what is left.
                let is_same = coming.prepared == number;
                let ready = coming.transfer.as_ref().filter(|transfer| {
                    *transfer.phase().borrow() != Phase::Copying
                        && (is_same || transfer.left() == 0)
                });
                events.extend(ready.map(|transfer| match transfer.is_durable() {
                    true => Event::Ready,
                    false => Event::ReadyInPart,
                }));
            }
            Ask::Cancel => {}
        }
        events.push(Event::Asked(ask));
        for event in events {
            let mut actions = Vec::new();
            coming.leecher.handle(event, &mut actions);
            self.act_all(coming, actions).await?;
        }
        Ok(why)
    }

    /// Waits until all was said that the seeder sent before it committed. Others may ask meanwhile.
    async fn ready(&self, token: Token) {
        let phase = {
            let slot = self.slot.lock().await;
            let coming = slot.as_ref().filter(|c| c.leecher.token() == token);
            coming.and_then(|c| Some(c.transfer.as_ref()?.phase()))
        };
        if let Some(mut phase) = phase {
            let said = phase.wait_for(|phase| *phase != Phase::Copying);
            tokio::time::timeout(READY_LIMIT, said).await.ok();
        }
    }

    async fn prepare(self: &Arc<Self>, coming: &mut Coming) -> Result<(), Refusal> {
        let (host, parts) = (Arc::clone(&self.host), coming.parts.clone());
        let made = tokio::task::spawn_blocking(move || host.prepare(&parts)).await;
        let targets = made.map_err(|e| Refusal::new(Code::Failed, e.to_string()))??;
        let sizes = targets.iter().map(Target::size);
        if !sizes.eq(coming.parts.iter().map(|part| part.size)) {
            let text = format!("{} was prepared with parts of other sizes", self.name);
            return Err(Refusal::new(Code::Failed, text));
        }
        let transfer = Transfer::new(targets);
        transfer.set_patience(coming.patience);
        let (this, token) = (Arc::downgrade(self), coming.leecher.token());
        transfer.on_whole(move || this.upgrade().map_or(Ok(()), |this| this.whole(token)));
        coming.transfer = Some(transfer);
        self.stage.send_replace(Stage::Coming);
        Ok(())
    }

    /// Drops what has arrived.
    async fn void(&self, coming: &mut Coming, why: &str) {
        if let Some(transfer) = coming.transfer.take() {
            transfer.writing.end().await;
            transfer.fail(why);
            let (host, why) = (Arc::clone(&self.host), why.to_owned());
            tokio::task::spawn_blocking(move || host.discard(&why))
                .await
                .ok();
            self.stage.send_replace(Stage::Waiting);
        }
    }

    /// Does these actions, and what follows from them.
    async fn act_all(
        self: &Arc<Self>,
        coming: &mut Coming,
        mut actions: Vec<Action>,
    ) -> Result<(), Refusal> {
        while !actions.is_empty() {
            for action in std::mem::take(&mut actions) {
                match action {
                    Action::Keep(record) => self.keep(record).await?,
                    Action::Run => {
                        if let Some(event) = self.run(coming) {
                            coming.leecher.handle(event, &mut actions);
                        }
                    }
                    Action::Discard => {
                        let why = coming.leecher.answer().why;
                        self.void(coming, &why).await;
                    }
                    // The caller sends the newest.
                    Action::Answer(_) => {}
                }
            }
        }
        Ok(())
    }

    async fn keep(&self, record: MachineRecord) -> Result<(), Refusal> {
        let (machines, name) = (self.machines.clone(), self.name.clone());
        let kept = tokio::task::spawn_blocking(move || machines.store(&name, &record)).await;
        kept.map_err(|e| Refusal::new(Code::Failed, e.to_string()))?
    }

    /// What a seeder's other calls are about.
    async fn transfer(&self, peer: &Peer, token: Token) -> Result<Arc<Transfer>, Refusal> {
        let slot = self.slot.lock().await;
        let own = slot
            .as_ref()
            .filter(|coming| coming.leecher.token() == token && coming.from.key == peer.key.0);
        let transfer = own.and_then(|coming| coming.transfer.clone());
        transfer.ok_or_else(|| {
            Refusal::new(
                Code::OutOfOrder,
                "that move is not being prepared, or is over",
            )
        })
    }

    /// The bytes can no longer come: if some are missing, the program must not be taken.
    async fn hung_up(&self, token: Token, transfer: &Arc<Transfer>) {
        let is_whole = *transfer.phase().borrow() != Phase::Copying && transfer.left() == 0;
        let mut slot = self.slot.lock().await;
        let current = slot.as_mut().filter(|coming| {
            coming.has(transfer) && coming.leecher.token() == token && coming.leecher.may_begin()
        });
        if let Some(coming) = current.filter(|_| !is_whole) {
            self.void(coming, "the connection with its seeder was lost")
                .await;
        }
        drop(slot);
        if is_whole {
            // Its seeder may have died before it could ask for that.
            let transfer = Arc::clone(transfer);
            let flushed = tokio::task::spawn_blocking(move || transfer.flush()).await;
            if let Ok(Err(e)) = flushed {
                tracing::warn!(program = %self.name, "what has arrived: {e}");
            }
        }
    }
}

impl Coming {
    fn has(&self, transfer: &Arc<Transfer>) -> bool {
        let own = self.transfer.as_ref();
        own.is_some_and(|own| Arc::ptr_eq(own, transfer))
    }

    /// What is known now. Whether it runs is not, as long as its host tries: that is asked again.
    fn answer_now(&self) -> Answer {
        let is_tried = self
            .run
            .as_ref()
            .is_some_and(|run| run.has_changed().is_ok());
        let mut answer = self.leecher.answer();
        if is_tried {
            answer.decision = Decision::Open;
        }
        answer
    }

    fn release_when_over(&mut self) {
        if self.leecher.is_over() {
            self.lock = None;
        }
    }
}

impl<H> std::fmt::Debug for Leecher<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leecher")
            .field("name", &self.name)
            .field("stage", &*self.stage.borrow())
            .finish_non_exhaustive()
    }
}
