//! The copy of a machine that runs: images of its disks, what it writes meanwhile, its memory; at the end it is paused.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_hypervisor::HypervisorError;
use drover_hypervisor::machine::{
    Capability, Channel, Machine, MigrationParameters, MigrationStatus,
};
use drover_hypervisor::qmp::Events;
use drover_teleport::Pace;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use super::{Driver, MoveEvent, Step, millis, send_images};
use crate::disks::{DiskWriter, Sent};
use crate::error::MigrateError;
use crate::memory::{self, Carried};
use crate::protocol::{Ask, SendDisks, SendMemory};

/// Bytes of disks that were written in the last round, under which the machine may be paused.
const FEW_DIRTY: u64 = 4 << 20;

/// Rounds over the disks before memory follows even if they do not become small.
const MAX_ROUNDS: u32 = 30;

/// Interval of rounds over the disks while memory is sent.
const ROUND_EVERY: Duration = Duration::from_millis(500);

/// The pause that is aimed at where none is given.
const DEFAULT_PAUSE: Duration = Duration::from_millis(300);

/// The pause that is given to QEMU as long as the disks are not ready: it is never that short.
const NOT_YET: u64 = 0;

/// How long memory may take to reach the switch.
const MEMORY_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// How long the switch of the hypervisor may take.
const SWITCH_LIMIT: Duration = Duration::from_secs(60);

/// Round trips until a call is open.
const OPENING_ROUND_TRIPS: u32 = 3;

/// The name of the descriptor of the stream in the hypervisor.
const STREAM: &str = "drover";

/// Carries the hypervisor's stream. When it ends the hypervisor finds its socket closed, and does not wait for a link that is
/// dead.
struct AbortOnDrop(JoinHandle<Result<(), MigrateError>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Driver<'_> {
    /// Copies all of the machine; at the end it is paused.
    pub(super) async fn copy(&mut self) -> Result<(), MigrateError> {
        let mut stop = self.stop.clone();
        let stopped = async move {
            if stop.wait_for(|stop| *stop).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            copied = self.copy_all() => copied,
            () = stopped => Err(MigrateError::Stopped),
        }
    }

    async fn copy_all(&mut self) -> Result<(), MigrateError> {
        self.step(Step::Images);
        let machine = self.machine()?.clone();
        self.order(Ask::Begin).await?;
        let items = self
            .disks
            .hold(&machine, &self.options.work, &self.options.scratch)
            .await?;
        // Sending images survives cuts: the conversation is opened again afterwards.
        self.asker = None;
        let (on_event, stop) = (self.on_event.clone(), self.stop.clone());
        self.report.image_wire_bytes = send_images(items, &self.options, on_event, stop).await?;
        self.disks.release().await?;
        self.connect().await?;
        let lost = self.lost.clone();
        tokio::select! {
            followed = self.follow(&machine) => followed,
            () = lost.notified() => Err(MigrateError::Lost),
        }
    }

    /// Copies what follows the images.
    async fn follow(&mut self, machine: &Machine) -> Result<(), MigrateError> {
        self.order(Ask::Prepare).await?;
        self.step(Step::Disks);
        let request = SendDisks {
            machine: self.options.name_there.clone(),
            token: self.seeder.token(),
        };
        let (reader, writer) = self.call(&request).await?;
        let sent = Arc::new(Sent::default());
        let mut writer = DiskWriter::new(reader, writer, sent.clone());
        for _ in 0..MAX_ROUNDS {
            if self.round(&mut writer).await? < FEW_DIRTY {
                break;
            }
        }

        self.step(Step::Memory);
        let memory = Arc::new(Carried::default());
        let (mut events, carried) = self.begin_memory(&memory).await?;
        self.until_switch(&mut events, &mut writer).await?;
        let paused = Instant::now();
        self.paused = Some(paused);
        self.step(Step::Switch);
        self.disks.send_round(&mut writer).await?;
        self.report.rounds += 1;
        self.report.pause.disks_ms = millis(paused);
        let switched = Instant::now();
        machine.continue_migration().await?;
        // Round trips of the pause that do not wait for each other.
        let completed = MigrationStatus::Completed;
        tokio::try_join!(
            async {
                let switch = machine.wait_migration(&mut events, &completed, SWITCH_LIMIT);
                Ok(switch.await?)
            },
            writer.flushed(),
            self.order(Ask::Arrived),
        )?;
        self.report.pause.memory_ms = millis(switched);
        drop(carried);
        self.report.memory_bytes = memory.stream.load(Ordering::Relaxed);
        self.report.memory_wire_bytes = memory.packed.load(Ordering::Relaxed);
        self.report.disk_bytes = sent.disk.load(Ordering::Relaxed);
        self.report.disk_wire_bytes = sent.packed.load(Ordering::Relaxed);
        Ok(())
    }

    fn step(&self, step: Step) {
        (self.on_event)(MoveEvent::Step(step));
    }

    /// Sends what was written to the disks since the last round; bytes.
    async fn round(&mut self, writer: &mut DiskWriter) -> Result<u64, MigrateError> {
        let bytes = self.send_round(writer).await?;
        writer.flushed().await?;
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

    /// Lets the hypervisor send its memory.
    async fn begin_memory(
        &self,
        sent: &Arc<Carried>,
    ) -> Result<(Events, AbortOnDrop), MigrateError> {
        let machine = self.machine()?;
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
        let opening = Instant::now();
        let (reader, mut writer) = self.call(&request).await?;
        // What waits here when the machine is paused makes the pause longer.
        writer.keep_little_unsent();
        let send = &self.options.send;
        let pace = match send.compress {
            Some(effort) => Pace::fixed(effort),
            None => {
                let limit = send.limit.as_ref().map(|limit| limit.bytes_per_second());
                Pace::of_link(opening.elapsed() / OPENING_ROUND_TRIPS, limit)
            }
        };
        let (ours, theirs) = UnixStream::pair().map_err(MigrateError::Stream)?;
        let theirs = theirs.into_std().map_err(MigrateError::Stream)?;
        machine.pass_descriptor(STREAM, theirs).await?;
        let sent = sent.clone();
        let carry = memory::carry(ours, reader, writer, pace, sent);
        let carried = AbortOnDrop(tokio::spawn(carry));
        let events = machine.events();
        machine.migrate(&Channel::Descriptor(STREAM.into())).await?;
        Ok((events, carried))
    }

    /// Sends the disks' rounds until the hypervisor has paused the machine for the switch, which it may do once the disks
    /// are ready.
    async fn until_switch(
        &mut self,
        events: &mut Events,
        writer: &mut DiskWriter,
    ) -> Result<(), MigrateError> {
        let machine = self.machine()?.clone();
        let begun = Instant::now();
        let mut allowed = false;
        let switch = MigrationStatus::PreSwitchover;
        loop {
            let sent = self.send_round(writer).await?;
            tokio::select! {
                flushed = writer.flushed() => flushed?,
                // The last round follows at once, with all of this one.
                switched = machine.wait_migration(events, &switch, MEMORY_LIMIT) => return Ok(switched?),
            }
            self.disks.confirm().await?;
            if sent < FEW_DIRTY && !allowed {
                allowed = true;
                let pause = self.options.max_pause.unwrap_or(DEFAULT_PAUSE);
                let parameters = MigrationParameters {
                    downtime_limit: Some(pause.as_millis() as u64),
                    ..MigrationParameters::default()
                };
                machine.set_parameters(&parameters).await?;
            }
            let waited = machine.wait_migration(events, &switch, ROUND_EVERY);
            match waited.await {
                Ok(()) => return Ok(()),
                Err(HypervisorError::NotSeen { .. }) => {}
                Err(e) => return Err(e.into()),
            }
            if let Some(ram) = machine.migration().await?.ram {
                (self.on_event)(MoveEvent::Memory(ram));
            }
            if begun.elapsed() > MEMORY_LIMIT {
                return Err(MigrateError::TooLong {
                    what: "copying memory",
                    seconds: MEMORY_LIMIT.as_secs(),
                });
            }
        }
    }
}
