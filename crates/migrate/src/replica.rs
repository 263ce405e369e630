//! Replicas: copies of a machine that runs, or of a disk, as of one moment after another, kept at another site.
//!
//! Each round holds the state of all disks of one moment, as a move does at its beginning, and sends it as images, which the
//! other site makes the replica when all have been delivered. What is not read again: chunks that were not written since the
//! state before, which the other site has ([`Points`](drover_store::generations::Points)).

mod device;
mod held;
pub(crate) mod machine;
pub mod protocol;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{Digest, ImageName};
use drover_net::service::{self, Request};
use drover_net::{Backoff, ConnectOptions, connect_any};
use drover_store::machine::Seed;
use drover_teleport::progress::{Counters, SendEvent, WireTotals};
use drover_teleport::{SendOptions, send};
use tokio::sync::watch;

pub use self::device::DeviceDisk;
use self::held::Held;
pub use self::machine::MachineDisks;
use self::protocol::{BeginRound, CompleteRound, TellPoint};
use crate::error::MigrateError;
use crate::hooks::Hooks;

/// How long what was not written is believed to be there. After that, a round reads all of the disks.
const BELIEVED: Duration = Duration::from_secs(24 * 3600);

/// What is replicated, and how.
#[derive(Clone)]
pub struct ReplicaOptions {
    /// Connection and limits, as for sending images.
    pub send: SendOptions,
    /// The replica's name there.
    pub name_there: ImageName,
    /// Identifies what it is a replica of.
    pub seed: Seed,
    /// The interval of rounds, if there are several.
    pub every: Option<Duration>,
    /// Bring the programs into a state that is good to begin from, before it is held, and let them go on at once.
    pub hooks: Arc<dyn Hooks>,
    /// What is counted while the images are sent.
    pub counters: Arc<Counters>,
    /// Bytes on the wire while the images are sent.
    pub wire: Arc<WireTotals>,
}

/// Callback for the events of sending the images.
pub type OnSend = Arc<dyn Fn(SendEvent) + Send + Sync>;

/// What a round took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoundReport {
    /// Disks.
    pub disks: usize,
    /// Bytes of them.
    pub size: u64,
    /// Bytes on the wire.
    pub wire_bytes: u64,
    /// Bytes that were not read, since they were not written since the round before.
    pub unread_bytes: u64,
    /// When the disks were in this state.
    pub moment: Option<Instant>,
    /// How long they were held there.
    pub seconds: f64,
}

/// The disks that are replicated.
pub enum Disks {
    /// Those of a machine.
    Machine(MachineDisks),
    /// A device.
    Device(DeviceDisk),
}

impl Disks {
    /// The devices that there are now.
    async fn look(&mut self) -> Result<Vec<String>, MigrateError> {
        match self {
            Self::Machine(disks) => disks.look().await,
            Self::Device(_) => Ok(vec![String::new()]),
        }
    }

    async fn hold(&mut self, images: &[ImageName]) -> Result<Vec<Held>, MigrateError> {
        match (self, images) {
            (Self::Machine(disks), _) => disks.hold(images).await,
            (Self::Device(disk), [name]) => Ok(vec![disk.hold(name).await?]),
            (Self::Device(_), _) => Err(MigrateError::Protocol("the images of a round")),
        }
    }

    async fn rest(&mut self) {
        match self {
            Self::Machine(disks) => disks.rest().await,
            Self::Device(disk) => disk.rest(),
        }
    }

    async fn end(&mut self) {
        match self {
            Self::Machine(disks) => disks.end().await,
            Self::Device(disk) => disk.end(),
        }
    }
}

/// What is replicated, round by round.
pub struct Replication {
    disks: Disks,
    options: ReplicaOptions,
    /// When all of the disks was read.
    read: Option<Instant>,
}

impl Replication {
    /// Of which no round was made yet.
    #[must_use]
    pub fn new(disks: Disks, options: ReplicaOptions) -> Self {
        Self {
            disks,
            options,
            read: None,
        }
    }

    /// Goes on with other limits and hooks, to the same replica; what is overwritten while a round is sent goes to `scratch`.
    #[must_use]
    pub fn with(mut self, options: ReplicaOptions, scratch: PathBuf) -> Self {
        match &mut self.disks {
            Disks::Machine(disks) => disks.keep_aside_in(scratch),
            Disks::Device(disk) => disk.keep_aside_in(scratch),
        }
        Self { options, ..self }
    }

    /// Makes a round.
    ///
    /// # Errors
    /// When it is not complete: the point before remains. `Lost`: the replica has taken over.
    pub async fn round(
        &mut self,
        on_event: OnSend,
        stop: watch::Receiver<bool>,
    ) -> Result<RoundReport, MigrateError> {
        let begun = self.begin(&stop).await?;
        let ended = self.send(begun, on_event, stop.clone()).await;
        // What is held slows the machine down.
        self.disks.rest().await;
        let (complete, told, report) = ended?;
        let as_of_now = || CompleteRound {
            age_ms: report
                .moment
                .map_or(0, |moment| moment.elapsed().as_millis() as u64),
            ..complete.clone()
        };
        // If that is refused, what was delivered stays: it may be what took over, since a reply may have been lost.
        self.ask_until(as_of_now, &stop).await?;
        for tell in told {
            if let Err(e) = self.ask(&tell).await {
                tracing::info!("the next round reads all of disk {}: {e}", tell.disk);
            }
        }
        Ok(report)
    }

    /// Leaves nothing behind here.
    pub async fn end(&mut self) {
        self.disks.end().await;
    }

    async fn begin(
        &mut self,
        stop: &watch::Receiver<bool>,
    ) -> Result<protocol::Begun, MigrateError> {
        let devices = self.disks.look().await?;
        let disks = devices.len();
        let begin = BeginRound {
            name: self.options.name_there.clone(),
            seed: self.options.seed,
            is_machine: matches!(self.disks, Disks::Machine(_)),
            disks: devices,
            every_seconds: self.options.every.map(|every| every.as_secs()),
        };
        let begun = self.ask_until(|| begin.clone(), stop).await?;
        match begun.images.len() == disks {
            true => Ok(begun),
            false => Err(MigrateError::Protocol("the images of a round")),
        }
    }

    /// Holds the state of now, and sends it.
    async fn send(
        &mut self,
        begun: protocol::Begun,
        on_event: OnSend,
        stop: watch::Receiver<bool>,
    ) -> Result<(CompleteRound, Vec<TellPoint>, RoundReport), MigrateError> {
        let moment = Instant::now();
        let held = self.hold(&begun.images).await?;
        let size = held.iter().map(|held| held.generations.size).sum();
        let is_believed = self.read.is_some_and(|read| read.elapsed() < BELIEVED);
        let (mut items, mut told) = (Vec::new(), Vec::new());
        for (
            disk,
            Held {
                mut item,
                generations,
            },
        ) in (0..).zip(held)
        {
            let generations = generations.encode();
            if let Some(snapshot) = item.snapshot.as_mut().filter(|_| is_believed) {
                snapshot.generations = Some(generations.as_slice().into());
            }
            items.push(item);
            told.push(TellPoint {
                name: self.options.name_there.clone(),
                round: begun.round,
                disk,
                generations,
            });
        }
        let mut options = self.options.send.clone();
        if is_believed {
            // An earlier round has brought them.
            options.profiles = None;
        }
        let reports = send(
            items,
            options,
            on_event,
            Arc::clone(&self.options.counters),
            Arc::clone(&self.options.wire),
            stop,
        );
        let reports = reports.await?;
        let digest = |name: &ImageName| {
            let report = reports.iter().find(|report| report.name == name.as_str());
            report.map(|report| report.digest)
        };
        let digests: Option<Vec<Digest>> = begun.images.iter().map(digest).collect();
        if !is_believed {
            self.read = Some(moment);
        }
        let report = RoundReport {
            disks: begun.images.len(),
            size,
            wire_bytes: reports.iter().map(|report| report.wire_sent_bytes).sum(),
            unread_bytes: reports
                .iter()
                .map(|report| report.unread_blocks * drover_core::BLOCK_SIZE_U64)
                .sum(),
            moment: Some(moment),
            seconds: moment.elapsed().as_secs_f64(),
        };
        let complete = CompleteRound {
            name: self.options.name_there.clone(),
            round: begun.round,
            age_ms: 0,
            digests: digests.ok_or(MigrateError::Stopped)?,
        };
        Ok((complete, told, report))
    }

    async fn hold(&mut self, images: &[ImageName]) -> Result<Vec<Held>, MigrateError> {
        let paused = self.run("paused", |hooks| hooks.pause(&|| false)).await;
        let held = match paused {
            Ok(()) => self.disks.hold(images).await,
            Err(e) => Err(e),
        };
        self.run("resumed", |hooks| hooks.resume()).await.and(held)
    }

    /// Runs a hook.
    async fn run(
        &self,
        what: &'static str,
        hook: fn(&dyn Hooks) -> Result<(), String>,
    ) -> Result<(), MigrateError> {
        let hooks = Arc::clone(&self.options.hooks);
        let done = tokio::task::spawn_blocking(move || hook(&*hooks)).await;
        let done = done.map_err(|_| MigrateError::Stopped)?;
        done.map_err(|why| MigrateError::Hook { what, why })
    }

    /// Asks until there is an answer, as long as a lost connection is tried again; the request is made for each attempt.
    async fn ask_until<R: Request>(
        &self,
        request: impl Fn() -> R,
        stop: &watch::Receiver<bool>,
    ) -> Result<R::Reply, MigrateError> {
        let mut stop = stop.clone();
        tokio::select! {
            answered = self.ask_again(request) => answered,
            Ok(_) = stop.wait_for(|stop| *stop) => Err(MigrateError::Stopped),
        }
    }

    async fn ask_again<R: Request>(
        &self,
        request: impl Fn() -> R,
    ) -> Result<R::Reply, MigrateError> {
        let begun = Instant::now();
        let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(10));
        loop {
            match self.ask(&request()).await {
                Err(e) if e.retryable() && begun.elapsed() < self.options.send.give_up_after => {
                    tokio::time::sleep(backoff.next_delay()).await;
                }
                answered => return answered,
            }
        }
    }

    async fn ask<R: Request>(&self, request: &R) -> Result<R::Reply, MigrateError> {
        let send = &self.options.send;
        let options = ConnectOptions::named(&send.peer_name);
        let connection = connect_any(&send.addresses, &send.identity, &send.peer, &options).await?;
        Ok(service::call(connection, request, |_| {}).await?)
    }
}
