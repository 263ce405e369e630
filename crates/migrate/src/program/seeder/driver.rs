//! Drives the state machine of a program that leaves: its record, and what is asked about it.

use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_net::{Backoff, Code, Refusal};
use drover_store::machine::{
    Decision, MachineLock, MachineRecord, Machines, Move, Owner, Seed, Token,
};
use tokio::sync::Notify;

use super::super::options::{Program, SeederOptions};
use super::super::protocol::{OpenProgram, PartOffer};
use super::super::site::{Site, call};
use crate::error::MigrateError;
use crate::protocol::{Answer, Ask, kind};
use crate::seeder::{Action, End, Event, Seeder as Machine};
use crate::talk::{Asker, Talk};

/// How long a cancellation may take that only tidies the other end.
const CANCEL_LIMIT: Duration = Duration::from_secs(3);

/// The record of a program that leaves, and the conversation about it.
pub(super) struct Driver {
    name: ImageName,
    name_there: ImageName,
    machines: Machines,
    to: Arc<dyn Site>,
    parts: Vec<PartOffer>,
    patience: Duration,
    machine: Machine,
    asker: Option<Asker>,
    /// Notified when a conversation breaks.
    lost: Arc<Notify>,
    /// Why it does not run there, though it was taken.
    trouble: String,
    /// What is paused, and runs on if it stays.
    paused: Option<Arc<dyn Program>>,
    _lock: MachineLock,
}

/// What the machine's actions lead to.
enum Next {
    /// It waits for the other end.
    Wait,
    /// The copy may begin.
    Copy,
    /// It runs there.
    There,
    /// It does not move.
    Ended(MigrateError),
}

impl Driver {
    /// Locks and changes the record. Blocks.
    pub(super) fn begin(
        parts: Vec<PartOffer>,
        options: &SeederOptions,
    ) -> Result<Self, MigrateError> {
        let lock = lock(&options.machines, &options.name)?;
        let known = options.machines.load(&options.name)?;
        let record =
            known.unwrap_or_else(|| MachineRecord::new(Seed(drover_net::random_id()), Vec::new()));
        if record.is_committed() {
            let text = format!(
                "{} was handed over, perhaps: settle that before it moves again",
                options.name
            );
            return Err(Refusal::new(Code::Held, text).into());
        }
        // One that was begun before, in a process that has ended, is another one.
        let record = match &record.under_way {
            Some(Move::Leaving(old, _)) => record.stay(*old).unwrap_or(record),
            _ => record,
        };
        Self::start(parts, options, record, lock)
    }

    fn start(
        parts: Vec<PartOffer>,
        options: &SeederOptions,
        record: MachineRecord,
        lock: MachineLock,
    ) -> Result<Self, MigrateError> {
        let mut actions = Vec::new();
        let token = Token(drover_net::random_id());
        let machine = Machine::start(&record, token, options.other(), &mut actions)?;
        for action in actions {
            if let Action::Keep(record) = action {
                options.machines.store(&options.name, &record)?;
            }
        }
        Ok(Self {
            name: options.name.clone(),
            name_there: options.name_there.clone(),
            machines: options.machines.clone(),
            to: Arc::clone(&options.to),
            parts,
            patience: options.give_up_after,
            machine,
            asker: None,
            lost: Arc::default(),
            trouble: String::new(),
            paused: None,
            _lock: lock,
        })
    }

    pub(super) fn token(&self) -> Token {
        self.machine.token()
    }

    /// Notified when the conversation breaks, also if that was before.
    pub(super) fn lost(&self) -> Arc<Notify> {
        Arc::clone(&self.lost)
    }

    /// From now on the program is paused: it runs on when the move ends, if it stays.
    pub(super) fn paused(&mut self, program: Arc<dyn Program>) {
        self.paused = Some(program);
    }

    /// Opens the conversation; the copy may begin.
    pub(super) async fn open(&mut self) -> Result<(), MigrateError> {
        let answer = self.connect().await?;
        match self.handle(Event::Opened(answer)).await? {
            Next::Copy => Ok(()),
            Next::Ended(e) => Err(e),
            Next::Wait | Next::There => Err(MigrateError::Protocol("a move")),
        }
    }

    /// Asks for something that is to be done, not decided.
    pub(super) async fn order(&self, ask: Ask) -> Result<(), MigrateError> {
        let answer = self.ask(ask).await?;
        match answer.decision {
            Decision::Open if answer.why.is_empty() => Ok(()),
            _ => Err(Refusal::new(Code::Failed, answer.why).into()),
        }
    }

    /// All was sent: hands over, and returns when the program runs there.
    ///
    /// # Errors
    /// When it stays, and runs on; or when nobody knows.
    pub(super) async fn commit(&mut self) -> Result<(), MigrateError> {
        let next = self.handle(Event::Copied).await?;
        self.decided(next).await
    }

    /// Asks until there is a decision.
    async fn decided(&mut self, mut next: Next) -> Result<(), MigrateError> {
        let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
        loop {
            match next {
                Next::There if self.trouble.is_empty() => return Ok(()),
                Next::There => {
                    self.gone().await?;
                    return Err(MigrateError::NotStarted {
                        machine: self.name_there.to_string(),
                        peer: self.to.name(),
                        why: std::mem::take(&mut self.trouble),
                    });
                }
                Next::Ended(e) => return Err(e),
                Next::Copy => return Err(MigrateError::Protocol("a move")),
                Next::Wait => {}
            }
            if self.asker.is_none() {
                match self.connect().await {
                    Ok(answer) => {
                        next = self.handle(Event::Opened(answer)).await?;
                        continue;
                    }
                    Err(e) => tracing::info!(program = %self.name, "{e}"),
                }
            }
            tokio::time::sleep(pauses.next_delay()).await;
            if self.asker.is_some() {
                let answer = self.ask(Ask::Commit).await;
                next = self.answered(answer).await?;
            } else {
                next = Next::Wait;
            }
        }
    }

    /// Ends the move before it is committed; the error says that it stays.
    pub(super) async fn stay(&mut self, why: String) -> MigrateError {
        if self.machine.is_over() || self.machine.is_committed() {
            return self.stayed(why);
        }
        match self.handle(Event::Abort(why.clone())).await {
            Ok(Next::Ended(e)) | Err(e) => e,
            Ok(_) => self.stayed(why),
        }
    }

    /// The process there knows nothing of what was left: whether all of it is there nevertheless.
    ///
    /// # Errors
    /// When it is not, or nobody answers.
    pub(super) async fn is_whole(&mut self) -> Result<(), MigrateError> {
        let answer = self.connect().await?;
        if answer.decision == Decision::Taken && answer.why.is_empty() {
            return Ok(());
        }
        Err(MigrateError::NotStarted {
            machine: self.name_there.to_string(),
            peer: self.to.name(),
            why: answer.why,
        })
    }

    /// It is there for good, and all of it.
    pub(super) async fn gone(&mut self) -> Result<(), MigrateError> {
        let (machines, name) = (self.machines.clone(), self.name.clone());
        let record = self.machine.record().clone();
        let stored = tokio::task::spawn_blocking(move || machines.store(&name, &record)).await;
        Ok(stored.map_err(|_| MigrateError::Stopped)??)
    }

    fn stayed(&self, why: String) -> MigrateError {
        MigrateError::Stayed {
            machine: self.name.to_string(),
            why,
            code: None,
        }
    }

    /// Does what follows from an event.
    async fn handle(&mut self, event: Event) -> Result<Next, MigrateError> {
        let mut actions = Vec::new();
        self.machine.handle(event, &mut actions);
        let mut next = Next::Wait;
        let mut released = false;
        for action in actions {
            match action {
                Action::Copy => next = Next::Copy,
                // Kept when all of it is there: until then a process that died asks again.
                Action::Keep(_) if released => {}
                Action::Keep(record) => {
                    if let Err(e) = self.keep(&record).await {
                        return Ok(e);
                    }
                }
                Action::Ask(Ask::Cancel) => {
                    let cancelled = tokio::time::timeout(CANCEL_LIMIT, self.ask(Ask::Cancel));
                    cancelled.await.ok();
                }
                Action::Ask(ask) => {
                    let answer = self.ask(ask).await;
                    next = Box::pin(self.answered(answer)).await?;
                }
                Action::Resume => {
                    if let Some(program) = self.paused.take() {
                        let resumed = tokio::task::spawn_blocking(move || program.resume());
                        resumed.await.ok();
                    }
                }
                Action::Release => released = true,
                Action::End(End::Moved) => next = Next::There,
                Action::End(End::Stayed(why)) => next = Next::Ended(self.stayed(why)),
                Action::End(End::Unknown) => {
                    let text = format!(
                        "{} and this process do not agree about where {} runs: look at both",
                        self.to.name(),
                        self.name
                    );
                    next = Next::Ended(MigrateError::Unsupported(text));
                }
            }
        }
        Ok(next)
    }

    async fn answered(
        &mut self,
        answer: Result<Answer, MigrateError>,
    ) -> Result<Next, MigrateError> {
        match answer {
            Ok(answer) => {
                if answer.decision == Decision::Taken {
                    self.trouble.clone_from(&answer.why);
                }
                match answer.decision {
                    // It is asked again later.
                    Decision::Open => Ok(Next::Wait),
                    _ => self.handle(Event::Answered(answer)).await,
                }
            }
            Err(_) => {
                self.asker = None;
                Ok(Next::Wait)
            }
        }
    }

    /// Makes a record durable. A commitment that may be recorded or not is cancelled, and what follows from that returned.
    async fn keep(&mut self, record: &MachineRecord) -> Result<(), Next> {
        let (machines, name, new) = (self.machines.clone(), self.name.clone(), record.clone());
        let stored = tokio::task::spawn_blocking(move || machines.store(&name, &new)).await;
        let error = match stored {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(refusal)) => MigrateError::from(refusal),
            Err(_) => MigrateError::Stopped,
        };
        if !record.is_committed() {
            // It stays, which the next move finds out again.
            return match record.owner == Owner::Here && record.may_run() {
                true => Ok(()),
                false => Err(Next::Ended(error)),
            };
        }
        // Only when the other end has refused it for good it runs on here.
        match self.ask(Ask::Cancel).await {
            Ok(mut answer) => {
                answer.why = error.to_string();
                let next = Box::pin(self.handle(Event::Answered(answer))).await;
                Err(next.unwrap_or_else(Next::Ended))
            }
            Err(_) => Err(Next::Ended(error)),
        }
    }

    /// Opens the conversation; the leecher's first answer.
    async fn connect(&mut self) -> Result<Answer, MigrateError> {
        let offer = OpenProgram {
            token: self.machine.token(),
            program: self.name_there.clone(),
            seed: self.machine.record().seed,
            generation: self.machine.record().generation,
            parts: self.parts.clone(),
            patience_ms: self.patience.as_millis().try_into().unwrap_or(u64::MAX),
        };
        self.asker = None;
        let (reader, writer) = call(&self.to, &offer).await?;
        let mut talk = Talk::new(reader, writer);
        let answer: Answer = talk.hear(kind::ANSWER).await?;
        if answer.decision == Decision::Taken {
            self.trouble.clone_from(&answer.why);
        }
        self.asker = Some(Asker::new(talk, Arc::clone(&self.lost)));
        Ok(answer)
    }

    async fn ask(&self, ask: Ask) -> Result<Answer, MigrateError> {
        match &self.asker {
            Some(asker) => asker.ask(ask).await,
            None => Err(MigrateError::Lost),
        }
    }
}

/// Where a program is, after a process that had it, or was about to get it, has died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Here: what it had in memory is lost, and it may be started anew from its devices.
    Here,
    /// In the process of this name.
    There(String),
    /// Nowhere as a whole: it was taken here from the process of this name and ran, and the process that it ran in has died
    /// before all had come. What it had in memory is lost, and its devices here lack blocks: it must not be started from them.
    Incomplete(String),
}

/// Finds out which process has a program, when a new process begins, and ends the move that an earlier one had begun. Where
/// only the other end knows, since the program was handed over, perhaps, it is asked until it answers; `other` is where it
/// went, with the options of that move.
///
/// # Errors
/// When a record cannot be read or written, another process works on it, the two records do not agree, or `other` is missing.
pub async fn settle(
    machines: &Machines,
    name: &ImageName,
    other: Option<&SeederOptions>,
) -> Result<Settled, MigrateError> {
    let lock = lock(machines, name)?;
    let Some(record) = machines.load(name)? else {
        return Ok(Settled::Here);
    };
    let keep = |record: Option<MachineRecord>| -> Result<(), MigrateError> {
        match record {
            Some(record) => Ok(machines.store(name, &record)?),
            None => Ok(()),
        }
    };
    match record.under_way.clone() {
        Some(Move::Leaving(token, _)) => keep(record.stay(token))?,
        Some(Move::Taken(token, _)) => keep(record.started(token))?,
        Some(Move::Coming(token, from, _)) => {
            keep(record.refuse(token))?;
            return Ok(Settled::There(from.name));
        }
        Some(Move::Partial(_, from)) => return Ok(Settled::Incomplete(from.name)),
        Some(Move::Committed(_, to)) => {
            let Some(options) = other else {
                let text = format!("{name} was handed over, perhaps: {} must be asked", to.name);
                return Err(Refusal::new(Code::Held, text).into());
            };
            let mut driver = Driver::start(Vec::new(), options, record, lock)?;
            return match driver.decided(Next::Wait).await {
                Ok(()) => {
                    driver.gone().await?;
                    Ok(Settled::There(options.to.name()))
                }
                Err(MigrateError::NotStarted { peer, .. }) => Ok(Settled::There(peer)),
                Err(MigrateError::Stayed { .. }) => Ok(Settled::Here),
                Err(e) => Err(e),
            };
        }
        None => {
            if let Owner::There(other) = record.owner {
                return Ok(Settled::There(other.name));
            }
        }
    }
    Ok(Settled::Here)
}

fn lock(machines: &Machines, name: &ImageName) -> Result<MachineLock, MigrateError> {
    let failed = |error| MigrateError::File {
        what: format!("cannot lock the record of {name}"),
        error,
    };
    let lock = machines.lock(name).map_err(failed)?;
    lock.ok_or_else(|| {
        let text = format!("{name} is being moved by another process");
        Refusal::new(Code::Held, text).into()
    })
}
