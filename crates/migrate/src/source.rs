//! Moves a running machine to another site: copies its disks and its memory, and drives the seeder.

mod copy;
mod disks;
mod report;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_hypervisor::machine::{Machine, RunState, Yank};
use drover_net::service::{self, Request};
use drover_net::{Backoff, Code, ConnectOptions, FrameReader, FrameWriter, Refusal, connect_any};
use drover_store::machine::{
    Decision, MachineLock, MachineRecord, Machines, Move, Other, Seed, Token,
};
use drover_teleport::{SendItem, send};
use tokio::sync::{Notify, watch};

use self::disks::Disks;
pub use self::report::{MoveEvent, MoveOptions, MoveReport, OnMove, Pause, Step};
use crate::error::MigrateError;
use crate::protocol::{Answer, Ask, OpenMove, kind};
use crate::seeder::{Action, End, Event, Seeder};
use crate::talk::{Asker, Talk};

/// How long a migration that is cancelled may take to end by itself.
const CANCEL_LIMIT: Duration = Duration::from_secs(5);

/// How often that is looked at.
const CANCEL_POLL: Duration = Duration::from_millis(20);

/// Moves a machine. Returns when it runs there. `machine` is `None` where its hypervisor has ended, which is only right when
/// the move is committed: then the other site is asked.
///
/// # Errors
/// When it stays here, and runs on; or, after the commitment, when it was stopped before the other site had answered: then
/// nobody runs it until the same is called again.
pub async fn migrate(
    machine: Option<Machine>,
    machines: &Machines,
    options: MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
) -> Result<MoveReport, MigrateError> {
    let lock = lock(machines, &options.machine)?;
    let begun = Instant::now();
    let known = machines.load(&options.machine)?;
    let is_committed = known.as_ref().is_some_and(MachineRecord::is_committed);
    if machine.is_none() && !is_committed {
        return Err(MigrateError::Unsupported(format!(
            "{} runs no machine",
            options.hypervisor
        )));
    }
    let mut disks = Disks::default();
    if let Some(machine) = machine.as_ref().filter(|_| !is_committed) {
        if known
            .as_ref()
            .is_some_and(|known| known.under_way.is_some())
        {
            // Of a process that was killed.
            disks::clear(machine, &options.work).await;
            resume(machine).await?;
        }
        disks = Disks::of(machine, &options.machine).await?;
    }
    let names = disks.offers.iter().map(|offer| offer.image.clone());
    let mut known =
        known.unwrap_or_else(|| MachineRecord::new(Seed(drover_net::random_id()), names.collect()));
    known.hypervisor = Some(options.hypervisor.clone());
    let to = Other {
        key: options.send.peer.0,
        name: options.send.peer_name.clone(),
    };
    let mut actions = Vec::new();
    let token = Token(drover_net::random_id());
    let seeder = Seeder::start(&known, token, to, &mut actions)?;
    let mut driver = Driver {
        machine,
        machines,
        options,
        on_event,
        stop,
        disks,
        seeder,
        asker: None,
        lost: Arc::default(),
        report: MoveReport::default(),
        paused: None,
        refused: None,
        _lock: lock,
    };
    let end = driver.drive(actions).await;
    if let Some(machine) = &driver.machine {
        disks::clear(machine, &driver.options.work).await;
    }
    end?;
    let mut report = driver.report;
    report.machine = driver.options.name_there.to_string();
    report.left = driver.disks.files;
    report.seconds = begun.elapsed().as_secs_f64();
    Ok(report)
}

/// Gives up a move that no process works on any more, and lets the machine run on here. The other site is not told.
///
/// # Errors
/// When there is no such move, a process works on it, or it is committed: then only the other site can tell.
pub async fn give_up(
    machine: Option<Machine>,
    machines: &Machines,
    name: &ImageName,
    work: &Path,
) -> Result<(), MigrateError> {
    let _lock = lock(machines, name)?;
    let known = machines.load(name)?;
    match known.as_ref().and_then(|known| known.under_way.clone()) {
        Some(Move::Leaving(token, _)) => {
            if let Some(machine) = &machine {
                disks::clear(machine, work).await;
                resume(machine).await?;
            }
            if let Some(stays) = known.and_then(|known| known.stay(token)) {
                machines.store(name, &stays)?;
            }
            Ok(())
        }
        // Its memory is lost: a person boots it from its disks.
        Some(Move::Taken(token, _)) => {
            if let Some(started) = known.and_then(|known| known.started(token)) {
                machines.store(name, &started)?;
            }
            Ok(())
        }
        Some(Move::Committed(_, to)) => Err(Refusal::new(
            Code::Held,
            format!(
                "{name} is handed over to {0}, which may run it: migrate it to {0} again to find out",
                to.name
            ),
        )
        .into()),
        _ => Err(Refusal::new(Code::NotFound, format!("{name} is not leaving this site")).into()),
    }
}

fn lock(machines: &Machines, name: &ImageName) -> Result<MachineLock, MigrateError> {
    let failed = |error| MigrateError::File {
        what: format!("cannot lock the record of the machine {name}"),
        error,
    };
    let lock = machines.lock(name).map_err(failed)?;
    let mut lock = lock.ok_or_else(|| {
        let text = format!("{name} is being migrated by another process");
        Refusal::new(Code::Held, text)
    })?;
    lock.sign().map_err(failed)?;
    Ok(lock)
}

/// Checks whether a machine can move, and what its disks would cost: `options.send.dry_run` must be set.
///
/// # Errors
/// When it cannot move, or the other site does not say.
pub async fn estimate(
    machine: &Machine,
    options: MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
) -> Result<MoveReport, MigrateError> {
    let mut disks = Disks::of(machine, &options.machine).await?;
    let report = MoveReport {
        machine: options.name_there.to_string(),
        memory_bytes: disks.memory_bytes,
        ..MoveReport::default()
    };
    let estimated = async {
        let items = disks.hold(machine, &options.work, &options.scratch).await?;
        send_images(items, &options, on_event, stop).await
    };
    let estimated = estimated.await;
    disks::clear(machine, &options.work).await;
    estimated.map(|_| report)
}

/// Sends the images of the disks; bytes on the wire.
async fn send_images(
    items: Vec<SendItem>,
    options: &MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
) -> Result<u64, MigrateError> {
    let reports = send(
        items,
        options.send.clone(),
        Arc::new(move |event| on_event(MoveEvent::Send(event))),
        Arc::clone(&options.counters),
        Arc::clone(&options.wire),
        stop,
    );
    Ok(reports
        .await?
        .iter()
        .map(|report| report.wire_sent_bytes)
        .sum())
}

/// Ends a migration of the hypervisor, if there is one, and lets the machine run.
async fn resume(machine: &Machine) -> Result<(), MigrateError> {
    machine.cancel_migration().await?;
    let begun = Instant::now();
    while !machine.migration().await?.status.is_idle() {
        if begun.elapsed() > CANCEL_LIMIT {
            // It waits for a connection that is dead.
            machine.yank(&[Yank::Migration]).await?;
        }
        tokio::time::sleep(CANCEL_POLL).await;
    }
    match machine.status().await? {
        RunState::PostMigrate | RunState::FinishMigrate => Ok(machine.cont().await?),
        _ => Ok(()),
    }
}

struct Driver<'a> {
    machine: Option<Machine>,
    machines: &'a Machines,
    options: MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
    disks: Disks,
    seeder: Seeder,
    asker: Option<Asker>,
    /// Notified when its connection breaks.
    lost: Arc<Notify>,
    report: MoveReport,
    /// When the machine was paused.
    paused: Option<Instant>,
    /// The refusal for which the move is given up.
    refused: Option<Code>,
    _lock: MachineLock,
}

impl Driver<'_> {
    /// Runs the seeder to its end.
    async fn drive(&mut self, mut actions: Vec<Action>) -> Result<(), MigrateError> {
        let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(10));
        let mut failing: Option<Instant> = None;
        loop {
            let mut next = Vec::new();
            for action in std::mem::take(&mut actions) {
                if let Some(end) = self.act(action, &mut next).await? {
                    return end;
                }
            }
            actions = next;
            if !actions.is_empty() {
                continue;
            }
            // Nothing to do without the other site.
            match self.connect().await {
                Ok(answer) => {
                    (failing, backoff) = (
                        None,
                        Backoff::new(Duration::from_millis(250), Duration::from_secs(10)),
                    );
                    self.seeder.handle(Event::Opened(answer), &mut actions);
                }
                Err(e) => {
                    let since = *failing.get_or_insert_with(Instant::now);
                    let patient = self.seeder.is_committed()
                        || (e.retryable() && since.elapsed() < self.options.send.give_up_after);
                    if !patient {
                        self.refused = e.code();
                        self.seeder
                            .handle(Event::Abort(e.to_string()), &mut actions);
                        continue;
                    }
                    self.wait(&e, backoff.next_delay()).await?;
                }
            }
        }
    }

    /// Waits before the next attempt; stops at once, with the move as it is, when a person wants it.
    async fn wait(&mut self, error: &MigrateError, delay: Duration) -> Result<(), MigrateError> {
        (self.on_event)(MoveEvent::Reconnecting {
            error: error.to_string(),
        });
        tokio::select! {
            () = tokio::time::sleep(delay) => Ok(()),
            _ = self.stop.wait_for(|stop| *stop) => Err(MigrateError::Stopped),
        }
    }

    /// Does one action. Some when the move is over.
    async fn act(
        &mut self,
        action: Action,
        next: &mut Vec<Action>,
    ) -> Result<Option<Result<(), MigrateError>>, MigrateError> {
        match action {
            Action::Keep(record) => self.machines.store(&self.options.machine, &record)?,
            Action::Copy => {
                let copied = self.copy().await;
                match copied {
                    Ok(()) => self.seeder.handle(Event::Copied, next),
                    Err(e) => {
                        self.undo().await;
                        self.refused = e.code();
                        let why = e.to_string();
                        match e.retryable() {
                            // The copy begins anew, with what has arrived.
                            true => {
                                self.asker = None;
                                (self.on_event)(MoveEvent::Reconnecting { error: why });
                            }
                            false => self.seeder.handle(Event::Abort(why), next),
                        }
                    }
                }
            }
            Action::Ask(Ask::Cancel) if !self.seeder.is_committed() => {
                // It only tidies the other site: the next move does that too.
                if self.asker.is_none() {
                    let connected = tokio::time::timeout(CANCEL_LIMIT, self.connect());
                    connected.await.ok();
                }
                self.ask(Ask::Cancel).await.ok();
            }
            Action::Ask(ask) => {
                // A broken connection is made again, and then the question is asked again.
                match self.ask(ask).await {
                    Ok(answer) => self.seeder.handle(Event::Answered(answer), next),
                    Err(_) => self.asker = None,
                }
            }
            Action::Resume => self.undo().await,
            Action::Release => {
                if let Some(paused) = self.paused {
                    let pause = &mut self.report.pause;
                    pause.total_ms = millis(paused);
                    pause.hand_over_ms = pause.total_ms - pause.disks_ms - pause.memory_ms;
                }
                if let Some(machine) = self.machine.as_ref().filter(|_| !self.options.keep_source) {
                    machine.quit().await.ok();
                }
            }
            Action::End(end) => {
                return Ok(Some(match end {
                    End::Moved => Ok(()),
                    End::Stayed(why) => Err(MigrateError::Stayed {
                        machine: self.options.machine.to_string(),
                        why,
                        code: self.refused,
                    }),
                    End::Unknown => Err(MigrateError::Unsupported(format!(
                        "{} and this site do not agree about where {} runs: look at both",
                        self.options.send.peer_name, self.options.machine
                    ))),
                }));
            }
        }
        Ok(None)
    }

    /// Opens the conversation, or uses the open one; the leecher's first answer.
    async fn connect(&mut self) -> Result<Answer, MigrateError> {
        let offer = OpenMove {
            token: self.seeder.token(),
            machine: self.options.name_there.clone(),
            seed: self.seeder.record().seed,
            generation: self.seeder.record().generation,
            disks: self.disks.offers.clone(),
            memory_bytes: self.disks.memory_bytes,
        };
        self.asker = None;
        let (reader, writer) = self.call(&offer).await?;
        let mut talk = Talk::new(reader, writer);
        let answer = talk.hear(kind::ANSWER).await?;
        self.lost = Arc::default();
        self.asker = Some(Asker::new(talk, self.lost.clone()));
        Ok(answer)
    }

    /// Makes a call that stays open after its reply.
    async fn call<R: Request<Reply = ()>>(
        &self,
        request: &R,
    ) -> Result<(FrameReader, FrameWriter), MigrateError> {
        let send = &self.options.send;
        let options = ConnectOptions::named(&send.peer_name);
        let connection = connect_any(&send.addresses, &send.identity, &send.peer, &options).await?;
        let (mut reader, mut writer) = connection.split();
        writer.set_rate(send.limit.clone());
        service::open(&mut writer, request).await?;
        writer.flush().await?;
        service::read_reply::<R>(&mut reader).await?;
        Ok((reader, writer))
    }

    async fn ask(&self, ask: Ask) -> Result<Answer, MigrateError> {
        match &self.asker {
            Some(asker) => asker.ask(ask).await,
            None => Err(MigrateError::Lost),
        }
    }

    /// Asks for something that is to be done, not decided.
    async fn order(&self, ask: Ask) -> Result<(), MigrateError> {
        let answer = self.ask(ask).await?;
        match answer.decision {
            Decision::Open if answer.why.is_empty() => Ok(()),
            _ => Err(Refusal::new(Code::Failed, answer.why).into()),
        }
    }

    /// The hypervisor, without which nothing can be copied.
    fn machine(&self) -> Result<&Machine, MigrateError> {
        let ended = || MigrateError::Unsupported(format!("{} has ended", self.options.hypervisor));
        self.machine.as_ref().ok_or_else(ended)
    }

    /// Ends what the copy began, and lets the machine run on.
    async fn undo(&mut self) {
        if let Some(machine) = &self.machine {
            if let Err(e) = resume(machine).await {
                tracing::error!("the machine could not be resumed: {e}");
            }
            self.paused = None;
            disks::clear(machine, &self.options.work).await;
        }
    }
}

fn millis(since: Instant) -> u64 {
    since.elapsed().as_millis() as u64
}
