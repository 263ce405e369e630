//! Moves a running machine to another site: copies its disks and its memory, and drives the seeder.

mod ahead;
mod aim;
mod backlog;
mod beside;
mod broken;
mod copy;
mod describe;
mod device;
pub(crate) mod disks;
mod domain;
mod ended;
mod expected;
mod follow_domain;
mod forward;
mod images;
mod leases;
mod leaving;
mod left;
mod left_files;
pub mod moving;
mod proof;
mod report;
mod rest;
mod resume;

use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_hypervisor::{Hypervisor, HypervisorError};
use drover_net::service::{self, Request};
use drover_net::{
    Backoff, Code, Connection, FrameReader, FrameWriter, NetError, Refusal, WireCounters,
};
use drover_store::machine::{
    Decision, MachineLock, MachineRecord, Machines, Other, Owner, Seed, Token,
};
use drover_teleport::{SendItem, SendOptions};
use tokio::sync::{Notify, watch};

use self::ahead::{Ahead, connect};
pub use self::broken::{Broken, NoAnswer, ask_once, break_move, give_up};
use self::device::Device;
use self::disks::Disks;
use self::expected::{Estimated, round_trip};
use self::images::send_images;
use self::leaving::{Leaving, check_same};
pub use self::left_files::{FollowedFile, left_files, left_mounts};
pub use self::report::{
    DiskGenerations, Expected, Heir, LeftFile, Mounted, Mounts, MoveEvent, MoveOptions, MoveReport,
    OnMove, Pause, PostCopy, Step,
};
use self::resume::{CANCEL_LIMIT, restore};
use crate::error::MigrateError;
use crate::memory::Carried;
use crate::protocol::{Answer, Ask, Kind, OpenMove, kind};
use crate::seeder::{Action, Event, Seeder};
use crate::talk::{Asker, Liveness, Talk};

/// A copy that lasted longer got somewhere: what breaks it is not what broke the one before.
const STEADY: Duration = Duration::from_secs(60);

/// Moves a machine. Returns when it runs there. `hypervisor` is `None` where the hypervisor has ended, which is only right when
/// the move is committed: then the other site is asked.
///
/// # Errors
/// When it stays here, and runs on; or, after the commitment, when it was stopped before the other site had answered: then
/// nobody runs it until the same is called again.
pub async fn migrate(
    hypervisor: Option<Hypervisor>,
    machines: &Machines,
    options: MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
) -> Result<MoveReport, MigrateError> {
    if let Some(known) = machines.load(&options.machine)?
        && known.is_partial()
    {
        // The site has it locked until all has come.
        known.leave(Token(drover_net::random_id()), destination(&options))?;
    }
    let lock = lock(machines, &options.machine)?;
    let known = machines.load(&options.machine)?;
    let is_committed = known.as_ref().is_some_and(MachineRecord::is_committed);
    if let Some(known) = &known {
        check_same(known, &options)?;
        // Before anything is done to a machine that may not leave, such as one that is still coming.
        known.leave(Token(drover_net::random_id()), destination(&options))?;
    }
    if hypervisor.is_none() && !is_committed {
        return Err(MigrateError::Unsupported(format!(
            "{} runs no machine",
            options.hypervisor
        )));
    }
    let mut disks = Disks::default();
    if let Some(hypervisor) = hypervisor.as_ref().filter(|_| !is_committed) {
        let is_leaving = known
            .as_ref()
            .is_some_and(|known| known.under_way.is_some());
        match hypervisor {
            // Of a process that was killed.
            _ if is_leaving => restore(hypervisor, &disks, None, &options.work).await?,
            Hypervisor::Libvirt(domain) => domain::restore_unknown(domain, &options.work).await?,
            Hypervisor::Qemu(_) => {}
        }
        disks = disks_of(hypervisor, &options).await?;
    }
    let names = disks.offers.iter().map(|offer| offer.image.clone());
    let known =
        known.unwrap_or_else(|| MachineRecord::new(Seed(drover_net::random_id()), names.collect()));
    let driven = Driven {
        hypervisor,
        disks,
        device: None,
    };
    drive(driven, known, lock, machines, options, on_event, stop).await
}

/// What moves: a machine, unless its hypervisor has ended, or the disk of a program.
struct Driven {
    hypervisor: Option<Hypervisor>,
    disks: Disks,
    device: Option<Box<Device>>,
}

/// Drives a seeder to its end.
async fn drive(
    driven: Driven,
    mut known: MachineRecord,
    lock: MachineLock,
    machines: &Machines,
    options: MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
) -> Result<MoveReport, MigrateError> {
    let begun = Instant::now();
    known.hypervisor = Some(options.hypervisor.clone());
    known.name_there = Some(options.name_there.clone());
    let mut actions = Vec::new();
    let token = Token(drover_net::random_id());
    let seeder = Seeder::start(&known, token, destination(&options), &mut actions)?;
    let leaving = Leaving::of(machines, &options);
    let files = driven.disks.files.clone();
    let files = match seeder.is_committed() {
        true => leaving.recorded(seeder.token()),
        false => leaving.record(seeder.token(), &files).map(|()| files)?,
    };
    let mut driver = Driver {
        was_committed: seeder.is_committed(),
        hypervisor: driven.hypervisor,
        device: driven.device,
        machines,
        options,
        on_event,
        stop,
        disks: driven.disks,
        seeder,
        asker: None,
        ahead: None,
        lost: Arc::default(),
        liveness: Arc::default(),
        report: MoveReport::default(),
        performing: None,
        paused: None,
        refused: None,
        broken: None,
        pauses: pauses(),
        trouble: None,
        distrusted: leaving.compares(),
        leaving,
        rest: None,
        lost_leases: None,
        given_up: None,
        writes_wait: false,
        rate: 0.0,
        memory: Arc::default(),
        _lock: lock,
    };
    if !driver.was_committed {
        // Of an earlier move.
        driver.forget_rest();
        if let Some(Hypervisor::Qemu(_)) = driver.hypervisor {
            driver.ahead = Some(Ahead::begin(&driver.options.send));
        }
    }
    let end = driver.drive(actions).await;
    // What was handed over, and is not all there, can be read as it is.
    let recorded = machines.load(&driver.options.machine);
    let is_over =
        matches!(&recorded, Ok(known) if !known.as_ref().is_some_and(MachineRecord::is_committed));
    let is_needed = !is_over && driver.has_rest();
    if !is_needed {
        driver.forget_rest();
        driver.leaving.forget();
        if let Some(Hypervisor::Qemu(machine)) = &driver.hypervisor {
            driver.disks.clear(machine, &driver.options.work).await;
        }
    }
    end?;
    driver.leaving.compared();
    let mut report = driver.report;
    report.machine = driver.options.name_there.to_string();
    report.token = Some(driver.seeder.token());
    report.left = files.iter().map(|left| left.path.clone()).collect();
    report.left_disks = files;
    report.seconds = begun.elapsed().as_secs_f64();
    Ok(report)
}

fn destination(options: &MoveOptions) -> Other {
    Other {
        key: options.send.peer.0,
        name: options.send.peer_name.clone(),
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
    hypervisor: &Hypervisor,
    options: MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
) -> Result<MoveReport, MigrateError> {
    let mut disks = disks_of(hypervisor, &options).await?;
    let mut notes = disks.notes();
    let described = match hypervisor {
        Hypervisor::Qemu(machine) => {
            let connection = Ahead::begin(&options.send);
            describe::describe(machine, &disks, &options, None, connection).await
        }
        Hypervisor::Libvirt(_) => Ok(false),
    };
    let built = match described {
        // A person may start it before the move.
        Err(MigrateError::Net(NetError::Refused(refusal))) if refusal.code == Code::Unavailable => {
            notes.push(refusal.to_string());
            false
        }
        described => described?,
    };
    let mut report = MoveReport {
        machine: options.name_there.to_string(),
        memory_bytes: disks.memory_bytes,
        built,
        handed_over: disks.handed_over(),
        notes,
        ..MoveReport::default()
    };
    let (of_images, on_event) = Estimated::of(on_event);
    let estimated = async {
        let items = match hypervisor {
            Hypervisor::Qemu(_) => held(&mut disks, hypervisor, &options).await?,
            // It is only read: what is written meanwhile makes the estimate less exact.
            Hypervisor::Libvirt(_) => domain::images(&disks).await?,
        };
        send_images(items, &options, on_event, stop).await
    };
    let estimated = estimated.await;
    if let Hypervisor::Qemu(machine) = hypervisor {
        disks.clear(machine, &options.work).await;
    }
    estimated?;
    let round_trip = round_trip(&options).await?;
    let measured = expected::link(&options, round_trip).await?;
    let of_images = of_images.expected(report.memory_bytes, round_trip, measured, &options);
    report.expected = Some(of_images);
    Ok(report)
}

/// The disks of a machine that can move.
async fn disks_of(hypervisor: &Hypervisor, options: &MoveOptions) -> Result<Disks, MigrateError> {
    match hypervisor {
        Hypervisor::Qemu(machine) => Disks::of(machine, options).await,
        Hypervisor::Libvirt(domain) => domain::disks(domain, &options.name_there).await,
    }
}

/// The state of all disks of now, as images to be sent.
async fn held(
    disks: &mut Disks,
    hypervisor: &Hypervisor,
    options: &MoveOptions,
) -> Result<Vec<SendItem>, MigrateError> {
    let (work, scratch) = (&options.work, &options.scratch);
    match hypervisor {
        Hypervisor::Qemu(machine) => disks.hold(machine, work, scratch).await,
        Hypervisor::Libvirt(domain) => domain::hold(disks, domain, work, scratch).await,
    }
}

/// Makes a call to the other site that stays open after its reply.
async fn call<R: Request<Reply = ()>>(
    send: &SendOptions,
    request: &R,
) -> Result<(FrameReader, FrameWriter), MigrateError> {
    let (reader, writer, _, _) = call_on_wire(send, request).await?;
    Ok((reader, writer))
}

/// The same, with what counts its bytes, and the protocol that both ends speak.
async fn call_on_wire<R: Request<Reply = ()>>(
    send: &SendOptions,
    request: &R,
) -> Result<(FrameReader, FrameWriter, Arc<WireCounters>, u16), MigrateError> {
    call_over(connect(send).await?, send, request).await
}

async fn call_over<R: Request<Reply = ()>>(
    connection: Connection,
    send: &SendOptions,
    request: &R,
) -> Result<(FrameReader, FrameWriter, Arc<WireCounters>, u16), MigrateError> {
    let wire = connection.wire();
    let (mut reader, mut writer) = connection.split();
    writer.set_rate(send.limit.clone());
    service::open(&mut writer, request).await?;
    writer.flush().await?;
    let (greeting, ()) = service::read_greeted_reply::<R>(&mut reader).await?;
    Ok((reader, writer, wire, greeting.protocol))
}

fn pauses() -> Backoff {
    Backoff::new(Duration::from_millis(250), Duration::from_secs(10))
}

struct Driver<'a> {
    hypervisor: Option<Hypervisor>,
    /// The disk of a program, if it is none of a machine.
    device: Option<Box<Device>>,
    /// Whether the move was committed when this began.
    was_committed: bool,
    machines: &'a Machines,
    options: MoveOptions,
    on_event: OnMove,
    stop: watch::Receiver<bool>,
    disks: Disks,
    seeder: Seeder,
    asker: Option<Asker>,
    /// Made beside the conversation.
    ahead: Option<Ahead>,
    /// Notified when its connection breaks.
    lost: Arc<Notify>,
    /// Whether its other end lives.
    liveness: Arc<Liveness>,
    report: MoveReport,
    /// The migration that libvirt performs.
    performing: Option<domain::Performing>,
    /// When the machine was paused.
    paused: Option<Instant>,
    /// The refusal for which the move is given up.
    refused: Option<Code>,
    /// Since when each copy broke soon.
    broken: Option<Instant>,
    /// The waits in between.
    pauses: Backoff,
    /// Whether the machine's writes wait for the link: its disks could not be copied otherwise.
    writes_wait: bool,
    /// Whether what is known of the disks' generations turned out to be wrong.
    distrusted: bool,
    /// What is remembered from one command to the next.
    leaving: Leaving,
    /// What may be left of the disks.
    rest: Option<left::Rest>,
    /// Write leases of its disks that this site did not have any more when it was taken.
    lost_leases: Option<String>,
    /// What the other site says if a person there has given up what had not followed.
    given_up: Option<String>,
    /// Bytes of disks per second in the last round that tells, or 0.
    rate: f64,
    /// What is carried of its memory.
    memory: Arc<Carried>,
    /// What is wrong with the machine where it is now.
    trouble: Option<String>,
    _lock: MachineLock,
}

impl Driver<'_> {
    /// Runs the seeder to its end.
    async fn drive(&mut self, mut actions: Vec<Action>) -> Result<(), MigrateError> {
        let mut backoff = pauses();
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
                    (failing, backoff) = (None, pauses());
                    self.note(&answer);
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
                    self.wait(&e, backoff.next_delay(), &mut actions).await?;
                }
            }
        }
    }

    /// Waits before the next attempt. When a person wants it to stop, it does so at once: the move ends, or, if it is
    /// committed, stays as it is.
    async fn wait(
        &mut self,
        error: &MigrateError,
        delay: Duration,
        next: &mut Vec<Action>,
    ) -> Result<(), MigrateError> {
        (self.on_event)(MoveEvent::Reconnecting {
            error: error.to_string(),
        });
        let stopped = tokio::select! {
            () = tokio::time::sleep(delay) => false,
            stopped = self.stop.wait_for(|stop| *stop) => {
                drop(stopped);
                true
            }
        };
        let is_frozen = self
            .device
            .as_ref()
            .is_some_and(|device| device.is_frozen());
        match stopped {
            true if !self.seeder.is_committed() => {
                self.seeder.handle(Event::Abort("stopped".into()), next);
            }
            // Somebody waits for it: the other site is asked until there is an answer.
            true if is_frozen => tokio::time::sleep(delay).await,
            true => return Err(MigrateError::Stopped),
            false => {}
        }
        Ok(())
    }

    /// A machine that was taken and does not run.
    fn note(&mut self, answer: &Answer) {
        let is_trouble = answer.decision == Decision::Taken && !answer.why.is_empty();
        if is_trouble && self.seeder.is_committed() {
            self.trouble = Some(answer.why.clone());
        }
    }

    /// Whether its disks may still have layers: who gives it up, or moves it again, ends that first, and the move stays under
    /// way until then.
    fn is_unrestored(&self) -> bool {
        matches!(self.hypervisor, Some(Hypervisor::Libvirt(_))) && self.trouble.is_some()
    }

    /// Makes a record durable.
    async fn keep(
        &mut self,
        record: &MachineRecord,
        next: &mut Vec<Action>,
    ) -> Result<(), MigrateError> {
        let stays = self.seeder.is_over() && record.owner == Owner::Here;
        if stays && record.under_way.is_none() && self.is_unrestored() {
            return Ok(());
        }
        let Err(e) = self.machines.store(&self.options.machine, record) else {
            return Ok(());
        };
        if record.is_committed() {
            // It may be recorded nevertheless: only when the other site has refused it for good it runs on here.
            let mut answer = self.ask(Ask::Cancel).await?;
            answer.why = e.to_string();
            self.seeder.handle(Event::Answered(answer), next);
            return Ok(());
        }
        match stays {
            true => self.stays_unstored(&e),
            false => Err(e.into()),
        }
    }

    /// Does one action. Some when the move is over.
    async fn act(
        &mut self,
        action: Action,
        next: &mut Vec<Action>,
    ) -> Result<Option<Result<(), MigrateError>>, MigrateError> {
        match action {
            Action::Keep(record) => self.keep(&record, next).await?,
            Action::Copy => {
                let begun = Instant::now();
                match self.copy().await {
                    Ok(()) => self.seeder.handle(Event::Copied, next),
                    Err(e) => {
                        self.undo().await;
                        self.distrusted |=
                            matches!(e, MigrateError::OldCopy(_) | MigrateError::TooEarly);
                        self.writes_wait |= matches!(e, MigrateError::TooFast);
                        if let MigrateError::OldCopy(disk) = &e {
                            self.leaving.compare(disk);
                        }
                        self.refused = e.code();
                        if begun.elapsed() > STEADY {
                            (self.broken, self.pauses) = (None, pauses());
                        }
                        let since = *self.broken.get_or_insert_with(Instant::now);
                        // On what is left of this one there is no other.
                        let patient = self.trouble.is_none()
                            && since.elapsed() < self.options.send.give_up_after;
                        match e.retryable() && patient {
                            // The copy begins anew, with what has arrived.
                            true => {
                                self.asker = None;
                                let delay = self.pauses.next_delay();
                                self.wait(&e, delay, next).await?;
                            }
                            false => self.seeder.handle(Event::Abort(e.to_string()), next),
                        }
                    }
                }
            }
            Action::Ask(Ask::Cancel) if !self.seeder.is_committed() => {
                if self.is_unrestored() {
                    return Ok(None);
                }
                // It only tidies the other site: the next move does that too.
                if self.asker.is_none() {
                    let connected = tokio::time::timeout(CANCEL_LIMIT, self.connect());
                    connected.await.ok();
                }
                // One that is busy says that it lives, and may be busy for long.
                let answered = tokio::time::timeout(CANCEL_LIMIT, self.ask(Ask::Cancel));
                if answered.await.is_err() {
                    self.asker = None;
                }
            }
            Action::Ask(ask) => {
                // A broken connection is made again, and then the question is asked again.
                match self.ask(ask).await {
                    Ok(answer) => {
                        if answer.decision == Decision::Open {
                            tokio::time::sleep(self.pauses.next_delay()).await;
                        }
                        self.note(&answer);
                        self.seeder.handle(Event::Answered(answer), next);
                    }
                    Err(_) => self.asker = None,
                }
            }
            Action::Resume => self.undo().await,
            Action::Release => {
                if let Some(paused) = self.paused {
                    let pause = &mut self.report.pause;
                    pause.total_ms = millis(paused);
                    let parts = pause.hook_ms + pause.disks_ms + pause.memory_ms;
                    pause.hand_over_ms = pause.total_ms - parts;
                }
                if let Some(device) = &mut self.device {
                    device.gone().await;
                }
                self.record_taken().await?;
                self.follow_rest().await?;
                let keep =
                    self.options.keep_source || self.trouble.is_some() || self.given_up.is_some();
                match self.hypervisor.as_ref().filter(|_| !keep) {
                    Some(Hypervisor::Qemu(machine)) => {
                        if !self.report.handed_over.is_empty() {
                            // It would wait for their servers.
                            machine.yank_disks().await.ok();
                        }
                        machine.quit().await.ok();
                    }
                    Some(Hypervisor::Libvirt(domain)) => {
                        domain::leave(domain, &self.options.work).await;
                    }
                    None => {}
                }
            }
            Action::End(end) => {
                self.forget_taken();
                return Ok(Some(self.ended(end)));
            }
        }
        Ok(None)
    }

    /// Opens the conversation, or uses the open one; the leecher's first answer.
    async fn connect(&mut self) -> Result<Answer, MigrateError> {
        let (kind, disks) = match &self.device {
            Some(device) => (Kind::Disk, device.offers()),
            None => (Kind::Machine, self.disks.offers.clone()),
        };
        let offer = OpenMove {
            kind,
            token: self.seeder.token(),
            machine: self.options.name_there.clone(),
            seed: self.seeder.record().seed,
            generation: self.seeder.record().generation,
            disks,
            memory_bytes: self.disks.memory_bytes,
            mounted: self.disks.mounted.clone(),
        };
        self.asker = None;
        let called = call_on_wire(&self.options.send, &offer).await?;
        let (reader, mut writer, wire, protocol) = called;
        // What is said must not wait for what is sent: silence is taken for a lost link.
        writer.set_rate(None);
        let mut talk = Talk::new(reader, writer);
        let answer = talk.hear(kind::ANSWER).await?;
        self.lost = Arc::default();
        let is_paused = self.paused.is_some();
        self.liveness = Arc::new(Liveness::of(wire, protocol, is_paused));
        self.asker = Some(Asker::new(talk, self.lost.clone()));
        Ok(answer)
    }

    async fn ask(&self, ask: Ask) -> Result<Answer, MigrateError> {
        let asker = self.asker.as_ref().ok_or(MigrateError::Lost)?;
        tokio::select! {
            answer = asker.ask(ask) => answer,
            () = self.liveness.lost() => Err(MigrateError::Lost),
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

    /// The machine is paused since then, or runs.
    fn set_paused(&mut self, since: Option<Instant>) {
        self.paused = since;
        self.liveness.set_paused(since.is_some());
    }

    /// The hypervisor, without which nothing can be copied.
    fn hypervisor(&self) -> Result<&Hypervisor, MigrateError> {
        let ended = || MigrateError::Unsupported(format!("{} has ended", self.options.hypervisor));
        self.hypervisor.as_ref().ok_or_else(ended)
    }

    /// Ends what the copy began, and lets the machine run on.
    async fn undo(&mut self) {
        self.forget_rest();
        if let Some(device) = &mut self.device {
            self.trouble = device.stay(self.was_committed).await;
            self.set_paused(None);
        }
        if let Some(hypervisor) = &self.hypervisor {
            let performing = self.performing.take();
            self.trouble =
                match restore(hypervisor, &self.disks, performing, &self.options.work).await {
                    Ok(()) => None,
                    Err(MigrateError::Hypervisor(HypervisorError::Closed { .. })) => {
                        Some("it does not run: its QEMU has ended: boot it from its disks".into())
                    }
                    Err(e) => Some(match hypervisor {
                        Hypervisor::Qemu(_) => format!("it does not run: {e}: continue it in QEMU"),
                        Hypervisor::Libvirt(_) => {
                            format!("{e}: look at it with virsh, then give the move up")
                        }
                    }),
                };
            self.set_paused(None);
        }
    }
}

fn millis(since: Instant) -> u64 {
    since.elapsed().as_millis() as u64
}
