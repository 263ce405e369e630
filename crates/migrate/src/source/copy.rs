//! The copy of a machine that runs: images of its disks, what it writes meanwhile, its memory; at the end it is paused.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_hypervisor::machine::{
    Capability, Channel, Machine, MigrationParameters, MigrationStatus,
};
use drover_hypervisor::qmp::Events;
use drover_hypervisor::{Hypervisor, HypervisorError};
use drover_net::Connection;
use drover_teleport::Pace;
use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::net::UnixStream;

use super::ahead::Ahead;
use super::aim::{Aim, DEFAULT_PAUSE, Seen, for_hypervisor};
use super::beside::{AbortOnDrop, Happened, PROOF_POLL, Sending, give_up};
use super::describe::describe;
use super::images::send_images;
use super::left::bytes_of;
use super::proof::{Proof, reader_of};
use super::{Driver, MoveEvent, PostCopy, Step, call_over, disks, domain, held, millis};
use crate::disks::{DiskWriter, Sent};
use crate::error::MigrateError;
use crate::memory::{self, Carried, Early, Gate};
use crate::protocol::{Ask, Kind, SendDisks, SendMemory};
use crate::talk::Asker;

/// Bytes of disks that were written in the last round, under which the machine may be paused.
pub(super) const FEW_DIRTY: u64 = 4 << 20;

/// Rounds over the disks before memory follows even if they do not become small.
pub(super) const MAX_ROUNDS: u32 = 30;

/// Interval of rounds over the disks while memory is sent.
pub(super) const ROUND_EVERY: Duration = Duration::from_millis(500);

/// What of the disks is little enough to be sent while the machine is paused, however slow the link.
const LITTLE: u64 = 64 << 10;

/// Rounds beside memory after which it is looked whether they become smaller, and after which they are enough.
const FEW_ROUNDS: u32 = 3;
const MANY_ROUNDS: u32 = 20;

/// The pause that is given to QEMU as long as the disks are not ready: it is never that short.
const NOT_YET: u64 = 0;

/// Interval of looking how far the memory is.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long memory may take to reach the switch.
const MEMORY_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// How long the switch of the hypervisor may take.
const SWITCH_LIMIT: Duration = Duration::from_secs(60);

/// The name of the descriptor of the stream in the hypervisor.
const STREAM: &str = "drover";

impl Driver<'_> {
    /// Copies all of the machine; at the end it is paused.
    pub(super) async fn copy(&mut self) -> Result<(), MigrateError> {
        let mut stop = self.stop.clone();
        let stopped = async move {
            if stop.wait_for(|stop| *stop).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let libvirt = match &self.hypervisor {
            Some(Hypervisor::Libvirt(domain)) => Some(domain.clone()),
            _ => None,
        };
        let stalled = async move {
            match libvirt {
                Some(domain) => domain::stalled(&domain).await,
                // QEMU's own machines write to their disks all the time.
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            copied = self.copy_all() => copied,
            () = stopped => Err(MigrateError::Stopped),
            error = stalled => Err(error),
        }
    }

    async fn copy_all(&mut self) -> Result<(), MigrateError> {
        self.step(Step::Images);
        self.order(Ask::Begin).await?;
        if let Some(Hypervisor::Qemu(machine)) = &self.hypervisor {
            // Before anything is sent.
            let token = Some(self.seeder.token());
            let ahead = self.ahead.take();
            let connection = ahead.unwrap_or_else(|| Ahead::begin(&self.options.send));
            let described = describe(machine, &self.disks, &self.options, token, connection);
            self.report.built = described.await?;
        }
        let mut items = match &mut self.device {
            Some(device) => device.hold().await?,
            None => {
                let hypervisor = self.hypervisor()?.clone();
                held(&mut self.disks, &hypervisor, &self.options).await?
            }
        };
        if let Some(Hypervisor::Qemu(machine)) = &self.hypervisor {
            self.disks.forget_inconsistent(machine).await;
        }
        // All that was written before the disks were held is recorded by now.
        if let Some(known) = self
            .options
            .generations
            .clone()
            .filter(|_| !self.distrusted)
        {
            for (disk, item) in (0..).zip(&mut items) {
                let mut of = known.of(disk).await;
                if of.is_none() {
                    let recorded = self.disks.recorded(disk as usize).await;
                    let unread = |e: &_| tracing::warn!("what QEMU recorded of disk {disk}: {e}");
                    of = recorded.inspect_err(unread).unwrap_or_default();
                }
                if let (Some(state), Some(of)) = (&mut item.snapshot, of) {
                    state.generations = Some(of.into());
                }
            }
        }
        let stop = self.stop.clone();
        let (reader, on_event) = reader_of(&items, self.on_event.clone());
        let (happened, on_event) = Happened::noted(&items, on_event);
        self.memory = Arc::default();
        let beside = self.may_go_beside(&items);
        let images = send_images(items, &self.options, on_event, stop);
        let (sent, mut memory) = match &beside {
            Some(machine) => self.send_beside(machine, &happened, images).await?,
            None => (images.await?, None),
        };
        self.report.image_wire_bytes = sent.wire_bytes;
        self.report.unread_bytes = sent.unread_bytes;
        let reader = std::mem::take(&mut *reader.lock());
        let mut proof = reader.compare(sent.unread);
        // Sending images survives cuts: then the conversation is opened again, and memory begun anew.
        let is_open = self.asker.as_ref().is_some_and(Asker::is_open) && !happened.was_cut();
        if let Some(machine) = &beside
            && let Some(lost) = memory.take_if(|memory| !is_open || !memory.is_open())
        {
            give_up(machine, lost, &MigrateError::Lost).await?;
        }
        if sent.unread_bytes == 0 {
            self.prove(&mut proof).await?;
        }
        if !is_open {
            self.connect().await?;
        }
        let (lost, liveness) = (self.lost.clone(), self.liveness.clone());
        let followed = async {
            if self.device.is_some() {
                return self.follow_device().await;
            }
            match self.hypervisor()?.clone() {
                Hypervisor::Qemu(machine) => self.follow(&machine, &mut proof, memory).await,
                Hypervisor::Libvirt(domain) => {
                    self.prove(&mut proof).await?;
                    self.follow_domain(&domain).await
                }
            }
        };
        tokio::select! {
            followed = followed => followed,
            () = lost.notified() => Err(MigrateError::Lost),
            () = liveness.lost() => Err(MigrateError::Lost),
        }
    }

    /// Copies what follows the images. Its `memory` may be on its way.
    async fn follow(
        &mut self,
        machine: &Machine,
        proof: &mut Proof,
        memory: Option<Sending>,
    ) -> Result<(), MigrateError> {
        let send = self.options.send.clone();
        let [writes, fetches] = [(); 2].map(|()| Ahead::begin(&send));
        self.order(Ask::Prepare).await?;
        self.step(Step::Disks);
        let request = SendDisks {
            kind: Kind::Machine,
            machine: self.options.name_there.clone(),
            token: self.seeder.token(),
        };
        let sent = Arc::new(Sent::default());
        let writes = async { call_over(writes.made().await?, &send, &request).await };
        let (writes, ()) = tokio::try_join!(writes, self.offer_rest(&sent, fetches))?;
        let mut writer = DiskWriter::new(writes.0, writes.1, sent.clone());
        // Memory follows the first round as a rule.
        let for_memory = memory.is_none().then(|| Ahead::begin(&send));
        let at_once = self.rest.is_some() && self.options.post_copy == PostCopy::AtOnce;
        let mut before = u64::MAX;
        for _ in 0..if at_once { 0 } else { MAX_ROUNDS } {
            let bytes = self.round(&mut writer).await?;
            let is_stuck = self.rest.is_some() && bytes > before / 5 * 4;
            if bytes < FEW_DIRTY || is_stuck {
                break;
            }
            before = bytes;
        }

        self.prepare_leases().await?;
        self.step(Step::Memory);
        let sending = match (memory, for_memory) {
            (Some(sending), _) => sending,
            (None, connection) => {
                if proof.is_pending() && self.disks.memory_bytes <= memory::BUFFERED_MEMORY {
                    // None of it could be sent before.
                    self.prove(proof).await?;
                }
                let gate = Arc::new(Gate::new(proof.is_pending()));
                let connection = connection.unwrap_or_else(|| Ahead::begin(&send));
                self.begin_memory(machine, connection, gate).await?
            }
        };
        let (mut events, carried, gate) = sending.into_parts();
        self.until_proved(machine, &mut events, proof, &gate)
            .await?;
        match at_once {
            true => self.wait_for_switch(machine, &mut events).await?,
            false => self.until_switch(machine, &mut events, &mut writer).await?,
        }
        let paused = Instant::now();
        self.set_paused(Some(paused));
        self.step(Step::Switch);
        let last = self.disks.next_round().await?;
        let bytes = bytes_of(&last);
        if self.rest.is_some() && bytes > 0 && (at_once || !self.fits(bytes)) {
            self.leave(&last, &mut writer).await?;
            writer.flush().await?;
        } else {
            self.rest = None;
            disks::send(last, &mut writer).await?;
        }
        self.report.rounds += 1;
        self.report.pause.disks_ms = millis(paused);
        let switched = Instant::now();
        machine.continue_migration().await?;
        // Round trips of the pause that do not wait for each other.
        let completed = MigrationStatus::Completed;
        tokio::try_join!(
            async {
                let switch = machine.wait_migration(&mut events, &completed, SWITCH_LIMIT);
                switch.await?;
                // QEMU has closed the disks.
                self.record_rest().await
            },
            writer.flushed(),
            self.order(Ask::Arrived),
        )?;
        self.report.pause.memory_ms = millis(switched);
        drop(carried);
        self.report.memory_bytes = self.memory.stream.load(Ordering::Relaxed);
        self.report.memory_wire_bytes = self.memory.packed.load(Ordering::Relaxed);
        self.report.disk_bytes = sent.disk.load(Ordering::Relaxed);
        self.report.disk_wire_bytes = sent.packed.load(Ordering::Relaxed);
        self.goes_on_with(writer);
        Ok(())
    }

    fn longest_pause(&self) -> Duration {
        self.options.max_pause.unwrap_or(DEFAULT_PAUSE)
    }

    /// Whether so much of the disks can be sent while the machine is paused.
    fn fits(&self, bytes: u64) -> bool {
        let seconds = match self.rate {
            // No round was large enough to tell.
            0.0 => 0.0,
            rate => bytes as f64 / rate,
        };
        bytes <= LITTLE || bytes < FEW_DIRTY && seconds <= self.longest_pause().as_secs_f64()
    }

    fn note_rate(&mut self, bytes: u64, begun: Instant) {
        if bytes > LITTLE {
            self.rate = bytes as f64 / begun.elapsed().as_secs_f64().max(1e-6);
        }
    }

    /// Waits until what was delivered is proved; then its state is needed no more.
    async fn prove(&mut self, proof: &mut Proof) -> Result<(), MigrateError> {
        proof.done().await?;
        match &self.device {
            Some(device) => {
                device.release();
                Ok(())
            }
            None => self.disks.release().await,
        }
    }

    /// The same while memory is sent, but not all of it: the state must be released before the hypervisor switches.
    async fn until_proved(
        &mut self,
        machine: &Machine,
        events: &mut Events,
        proof: &mut Proof,
        gate: &Gate,
    ) -> Result<(), MigrateError> {
        while proof.is_pending() {
            let switch = MigrationStatus::PreSwitchover;
            let waited = machine.wait_migration(events, &switch, PROOF_POLL);
            match waited.await {
                Ok(()) => return Err(MigrateError::TooEarly),
                Err(HypervisorError::NotSeen { .. }) => {}
                Err(e) => return Err(e.into()),
            }
            if proof.is_finished() {
                self.prove(proof).await?;
            } else if let Some(ram) = machine.migration().await?.ram {
                gate.admit(ram.remaining);
                (self.on_event)(MoveEvent::Memory(ram));
            }
        }
        gate.open();
        Ok(())
    }

    pub(super) fn step(&self, step: Step) {
        (self.on_event)(MoveEvent::Step(step));
    }

    /// Sends what was written to the disks since the last round; bytes.
    async fn round(&mut self, writer: &mut DiskWriter) -> Result<u64, MigrateError> {
        let begun = Instant::now();
        let bytes = self.send_round(writer).await?;
        writer.flushed().await?;
        self.note_rate(bytes, begun);
        self.disks.confirm().await?;
        Ok(bytes)
    }

    /// The same without waiting until it is safe there.
    async fn send_round(&mut self, writer: &mut DiskWriter) -> Result<u64, MigrateError> {
        let bytes = self.disks.send_round(writer).await?;
        self.report.rounds += 1;
        (self.on_event)(MoveEvent::Round {
            round: self.report.rounds,
            bytes,
        });
        Ok(bytes)
    }

    /// Lets the hypervisor send its memory, by this connection.
    pub(super) async fn begin_memory(
        &self,
        machine: &Machine,
        connection: Ahead,
        gate: Arc<Gate>,
    ) -> Result<Sending, MigrateError> {
        machine.set_capabilities(&Capability::NEEDED, true).await?;
        // A guest that writes faster than the link is slowed down until it fits.
        machine
            .set_capabilities(&[Capability::AutoConverge], true)
            .await?;
        let parameters = MigrationParameters {
            max_bandwidth: Some(0),
            downtime_limit: Some(NOT_YET),
            ..MigrationParameters::default()
        };
        machine.set_parameters(&parameters).await?;
        let request = SendMemory {
            machine: self.options.name_there.clone(),
            token: self.seeder.token(),
        };
        let connection = connection.made().await?;
        let pace = self.pace(&connection);
        let called = call_over(connection, &self.options.send, &request).await?;
        let (reader, mut writer, ..) = called;
        // What waits here when the machine is paused makes the pause longer.
        writer.keep_little_unsent();
        let (ours, theirs) = UnixStream::pair().map_err(MigrateError::Stream)?;
        let theirs = theirs.into_std().map_err(MigrateError::Stream)?;
        // What it has written there it takes for sent.
        set_socket_send_buffer_size(&theirs, memory::HYPERVISOR_BUFFER)
            .map_err(|e| MigrateError::Stream(e.into()))?;
        machine.pass_descriptor(STREAM, theirs).await?;
        let (sent, passes) = (Arc::clone(&self.memory), Arc::clone(&gate));
        let early = Early::default();
        let carry = memory::carry(ours, early, reader, writer, pace, sent, passes);
        let carried = AbortOnDrop(tokio::spawn(carry));
        let events = machine.events();
        machine.migrate(&Channel::Descriptor(STREAM.into())).await?;
        Ok(Sending::new(events, carried, gate))
    }

    /// How well memory is compressed that goes over this connection.
    pub(super) fn pace(&self, connection: &Connection) -> Pace {
        let send = &self.options.send;
        match send.compress {
            Some(effort) => Pace::fixed(effort),
            None => {
                let limit = send.limit.as_ref().map(|limit| limit.bytes_per_second());
                Pace::of_link(connection.round_trip().unwrap_or_default(), limit)
            }
        }
    }

    /// Sends the disks' rounds until the hypervisor has paused the machine for the switch, which it may do once the disks
    /// are ready: little is written to them between two rounds, or they will not become so. Then the rest can follow later,
    /// or the pause is as long as it takes.
    async fn until_switch(
        &mut self,
        machine: &Machine,
        events: &mut Events,
        writer: &mut DiskWriter,
    ) -> Result<(), MigrateError> {
        let (mut rounds, mut before) = (0, u64::MAX);
        let never = self.options.post_copy == PostCopy::Never;
        let switch = MigrationStatus::PreSwitchover;
        let mut waiting = Waiting::begin();
        loop {
            let begun = Instant::now();
            let sent = self.send_round(writer).await?;
            tokio::select! {
                flushed = writer.flushed() => flushed?,
                // The last round follows at once, with all of this one.
                switched = machine.wait_migration(events, &switch, MEMORY_LIMIT) => return Ok(switched?),
            }
            self.note_rate(sent, begun);
            self.disks.confirm().await?;
            rounds += 1;
            let is_stuck = rounds >= FEW_ROUNDS && sent > before / 5 * 4 || rounds >= MANY_ROUNDS;
            // Not for one burst: the pause may be long.
            let in_one_piece = never && is_stuck && rounds >= 2 * FEW_ROUNDS;
            let may_switch = sent < FEW_DIRTY || self.rest.is_some() && is_stuck || in_one_piece;
            if waiting.aim.is_none() && may_switch {
                waiting.allow_switch(self, machine).await?;
            }
            before = sent;
            if waiting.is_over(self, machine, events).await? {
                return Ok(());
            }
        }
    }

    /// As [`Self::until_switch`] without rounds: all of it follows later.
    async fn wait_for_switch(
        &mut self,
        machine: &Machine,
        events: &mut Events,
    ) -> Result<(), MigrateError> {
        let mut waiting = Waiting::begin();
        waiting.allow_switch(self, machine).await?;
        while !waiting.is_over(self, machine, events).await? {}
        Ok(())
    }
}

/// A wait for the switch.
struct Waiting {
    begun: Instant,
    /// The pause that the hypervisor may make, once it may switch.
    aim: Option<Aim>,
}

impl Waiting {
    fn begin() -> Self {
        Self {
            begun: Instant::now(),
            aim: None,
        }
    }

    /// Lets the hypervisor switch as soon as the pause will be short.
    async fn allow_switch(
        &mut self,
        driver: &Driver<'_>,
        machine: &Machine,
    ) -> Result<(), MigrateError> {
        driver.prepare_leases().await?;
        let aim = self.aim.insert(Aim::new(driver.longest_pause()));
        give_pause(machine, aim, &driver.memory).await
    }

    /// Waits for some time; whether the hypervisor has paused the machine.
    async fn is_over(
        &mut self,
        driver: &Driver<'_>,
        machine: &Machine,
        events: &mut Events,
    ) -> Result<bool, MigrateError> {
        let begun = Instant::now();
        let mut last = None;
        while begun.elapsed() < ROUND_EVERY {
            let switch = MigrationStatus::PreSwitchover;
            match machine.wait_migration(events, &switch, LOOK_EVERY).await {
                Ok(()) => return Ok(true),
                Err(HypervisorError::NotSeen { .. }) => {}
                Err(e) => return Err(e.into()),
            }
            last = machine.migration().await?.ram;
            let (Some(ram), Some(aim)) = (&last, &mut self.aim) else {
                continue;
            };
            let seen = Seen {
                at: self.begun.elapsed(),
                passes: ram.dirty_sync_count,
                remaining: ram.remaining,
            };
            if aim.note(seen) {
                give_pause(machine, aim, &driver.memory).await?;
            }
        }
        if let Some(ram) = last {
            (driver.on_event)(MoveEvent::Memory(ram));
        }
        match self.begun.elapsed() > MEMORY_LIMIT {
            false => Ok(false),
            true => Err(MigrateError::TooLong {
                what: "copying memory",
                seconds: MEMORY_LIMIT.as_secs(),
            }),
        }
    }
}

async fn give_pause(machine: &Machine, aim: &Aim, memory: &Carried) -> Result<(), MigrateError> {
    let pause = for_hypervisor(aim.pause(), memory.window.behind());
    let parameters = MigrationParameters {
        downtime_limit: Some((pause.as_millis() as u64).max(1)),
        ..MigrationParameters::default()
    };
    Ok(machine.set_parameters(&parameters).await?)
}
