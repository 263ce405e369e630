//! The process that a program leaves.

mod driver;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::DeviceError;
use drover_net::{FrameReader, FrameWriter};
use drover_store::machine::Token;

use super::behind::{self, Behind, Calling, Link};
use super::options::{Program, Progress, Report, SeederOptions};
use super::parts::{Blocks, Part};
use super::protocol::{BLOCK, FetchPages, MAX_PARTS, MAX_STATE, SendPages};
use super::site::call;
use crate::disks::{DiskWriter, Sent};
use crate::error::MigrateError;
use crate::protocol::{Ask, KEEP_ALIVE};

use driver::Driver;
pub use driver::{Settled, settle};

/// What is little enough to be sent in the pause, whatever the link is like, in bytes.
const LITTLE: u64 = 256 << 10;

/// A program that is being copied, and runs here. Dropping it leaves the program here; the next move begins anew.
pub struct Seeder {
    parts: Arc<[Part]>,
    options: SeederOptions,
    driver: Driver,
    pages: DiskWriter,
    sent: Arc<Sent>,
    left: Blocks,
    begun: Instant,
    rounds: u32,
    /// Bytes of the parts per second.
    rate: f64,
    /// Whether a round was begun and not ended: what it was about may not be there.
    is_torn: bool,
}

impl Seeder {
    /// Opens a move: the other end records it and makes what the parts are copied into. From here on what is written to the
    /// parts is noted.
    ///
    /// # Errors
    /// When the program cannot leave, or the other end does not take it.
    pub async fn open(parts: Vec<Part>, options: SeederOptions) -> Result<Self, MigrateError> {
        if parts.is_empty() || parts.len() > MAX_PARTS {
            let text = format!("a program has 1 to {MAX_PARTS} parts");
            return Err(MigrateError::Unsupported(text));
        }
        let largest = BLOCK * u64::from(u32::MAX);
        if let Some(part) = parts.iter().find(|part| part.device.size() > largest) {
            let text = format!("{} is too large: at most 16 TiB", part.name);
            return Err(MigrateError::Unsupported(text));
        }
        let begun = Instant::now();
        let (offers, own) = (parts.iter().map(Part::offer).collect(), options.clone());
        let driver = tokio::task::spawn_blocking(move || Driver::begin(offers, &own)).await;
        let mut driver = driver.map_err(|_| MigrateError::Stopped)??;
        let (pages, sent) = match Self::connect(&mut driver, &options).await {
            Ok(connected) => connected,
            Err(e) => return Err(driver.stay(e.to_string()).await),
        };
        let parts: Arc<[Part]> = parts.into();
        let mut seeder = Self {
            left: Blocks::none(&parts),
            parts,
            options,
            driver,
            pages,
            sent,
            begun,
            rounds: 0,
            rate: 0.0,
            is_torn: false,
        };
        let noted = seeder.off_thread(|left, parts| {
            // What was written before is in the first round.
            left.add_changes(parts)?;
            left.add_data(parts)
        });
        if let Err(e) = noted.await {
            return Err(seeder.driver.stay(e.to_string()).await);
        }
        Ok(seeder)
    }

    async fn connect(
        driver: &mut Driver,
        options: &SeederOptions,
    ) -> Result<(DiskWriter, Arc<Sent>), MigrateError> {
        driver.open().await?;
        driver.order(Ask::Begin).await?;
        driver.order(Ask::Prepare).await?;
        let request = SendPages {
            program: options.name_there.clone(),
            token: driver.token(),
        };
        let (reader, writer) = call(&options.to, &request).await?;
        let sent = Arc::<Sent>::default();
        Ok((DiskWriter::new(reader, writer, Arc::clone(&sent)), sent))
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress {
            rounds: self.rounds,
            left: self.left.bytes(),
            sent: self.sent.disk.load(Ordering::Relaxed),
            packed: self.sent.packed.load(Ordering::Relaxed),
            rate: self.rate,
            is_there: false,
        }
    }

    /// Copies the parts, then what was written meanwhile, until what is left fits into the pause, or does not become less.
    /// The program runs on. May be called again, for more rounds.
    ///
    /// Must be awaited to its end: a move whose round was dropped, or failed, is refused from then on. Drop it, and begin anew.
    ///
    /// # Errors
    /// When the connection breaks, or a part cannot be read.
    pub async fn track(&mut self) -> Result<Progress, MigrateError> {
        let mut round = 0;
        loop {
            let before = self.left.bytes();
            self.round().await?;
            round += 1;
            let progress = self.progress();
            (self.options.on_progress)(&progress);
            let left = progress.left;
            let is_stuck = left > before / 5 * 4;
            // As long as it becomes much less, another round makes the pause shorter.
            let is_enough = left <= LITTLE || self.fits(left) && left > before / 2;
            if is_enough || is_stuck || round >= self.options.max_rounds {
                return Ok(progress);
            }
        }
    }

    /// Not cancel safe, which `is_torn` tells.
    async fn round(&mut self) -> Result<(), MigrateError> {
        self.check_whole()?;
        self.is_torn = true;
        let left = std::mem::replace(&mut self.left, Blocks::none(&self.parts));
        let (begun, bytes) = (Instant::now(), left.bytes());
        for (index, part) in self.parts.iter().enumerate() {
            let device = Arc::clone(&part.device);
            let ranges = left.ranges(index);
            self.pages.send(index as u32, device, ranges).await?;
        }
        self.pages.flush().await?;
        self.pages.flushed().await?;
        // A round of little tells nothing.
        if bytes >= LITTLE || self.rate == 0.0 {
            self.rate = bytes as f64 / begun.elapsed().as_secs_f64().max(1e-6);
        }
        self.rounds += 1;
        self.off_thread(Blocks::add_changes).await?;
        self.is_torn = false;
        Ok(())
    }

    fn check_whole(&self) -> Result<(), MigrateError> {
        match self.is_torn {
            false => Ok(()),
            true => {
                let text = "a round of the copy was cut short: begin the move anew";
                Err(MigrateError::Unsupported(text.to_owned()))
            }
        }
    }

    /// Whether so much can be sent in the pause.
    fn fits(&self, left: u64) -> bool {
        let time = left as f64 / self.rate.max(1.0);
        left <= LITTLE || time <= self.options.max_pause.as_secs_f64() / 2.0
    }

    /// Changes what is left where it may block.
    async fn off_thread(
        &mut self,
        what: impl FnOnce(&mut Blocks, &[Part]) -> Result<(), (usize, DeviceError)> + Send + 'static,
    ) -> Result<(), MigrateError> {
        let (mut left, parts) = (self.left.clone(), Arc::clone(&self.parts));
        let done = tokio::task::spawn_blocking(move || (what(&mut left, &parts), left)).await;
        let (result, left) = done.map_err(|_| MigrateError::Stopped)?;
        self.left = left;
        result.map_err(|(part, error)| MigrateError::Disk {
            disk: self.parts[part].name.clone(),
            error,
        })
    }

    /// Pauses the program, hands it over, and returns when all of it is there. Goes on when nobody waits for it any more.
    ///
    /// # Errors
    /// [`MigrateError::Stayed`]: it runs on here. Otherwise it is there, but some of it could not be sent, or it did not
    /// start there; or it is unknown which, as when this process dies: see [`settle`].
    pub async fn finalize(self, program: Arc<dyn Program>) -> Result<Report, MigrateError> {
        let done = tokio::spawn(self.hand_over(program));
        done.await.map_err(|_| MigrateError::Stopped)?
    }

    pub(super) async fn hand_over(
        mut self,
        program: Arc<dyn Program>,
    ) -> Result<Report, MigrateError> {
        if let Err(e) = self.check_whole() {
            return Err(self.driver.stay(e.to_string()).await);
        }
        let request = FetchPages {
            program: self.options.name_there.clone(),
            token: self.driver.token(),
        };
        let mut fetches = match call(&self.options.to, &request).await {
            Ok(fetches) => fetches,
            Err(e) => return Err(self.driver.stay(e.to_string()).await),
        };
        let paused = Instant::now();
        self.driver.paused(Arc::clone(&program));
        let mut report = Report {
            rounds: self.rounds,
            ..Report::default()
        };
        let said = {
            let mut last = std::pin::pin!(self.last_round(&program, paused, &mut report));
            tokio::select! {
                said = &mut last => said,
                // It is made anew when it is needed.
                () = idle(&mut fetches) => last.await,
            }
        };
        if let Err(e) = said {
            return Err(self.driver.stay(e.to_string()).await);
        }
        let devices = self.parts.iter().map(|part| Arc::clone(&part.device));
        let link = Process {
            options: self.options.clone(),
            token: self.driver.token(),
            rounds: self.rounds,
            sent: Arc::clone(&self.sent),
        };
        let behind = Behind::new(
            devices.collect(),
            Arc::new(link),
            self.left.clone(),
            Arc::clone(&self.sent),
        );
        let mut answering = behind.start(fetches);
        tokio::select! {
            committed = self.driver.commit() => committed?,
            // It may wait there for what is left, before it is known here that it was taken.
            () = behind.keep(&mut answering) => {}
        }
        report.pause = paused.elapsed();
        report.behind = self.left.bytes();
        let asked = match behind.send(Ok((self.pages, answering))).await {
            Err(e) if behind::is_unknown(&e) => self.driver.is_whole().await.map(|()| 0),
            asked => asked,
        };
        // It is there, in any case.
        self.driver.gone().await?;
        report.asked = asked?;
        report.sent = self.sent.disk.load(Ordering::Relaxed);
        report.packed = self.sent.packed.load(Ordering::Relaxed);
        report.whole = self.begun.elapsed();
        Ok(report)
    }

    /// Everything before the commitment. The program is paused, or that failed.
    async fn last_round(
        &mut self,
        program: &Arc<dyn Program>,
        paused: Instant,
        report: &mut Report,
    ) -> Result<(), MigrateError> {
        let pause = Arc::clone(program);
        let state = tokio::task::spawn_blocking(move || pause.pause()).await;
        let state = state.map_err(|_| MigrateError::Stopped)?;
        let state = state.map_err(|error| MigrateError::File {
            what: "the program cannot be paused".into(),
            error,
        })?;
        if state.len() > MAX_STATE {
            let text = "the program's own state is larger than 1 MiB".to_owned();
            return Err(MigrateError::Unsupported(text));
        }
        self.off_thread(Blocks::add_changes).await?;
        report.stop = paused.elapsed();
        let lost = self.driver.lost();
        tokio::select! {
            said = self.say_all(&state) => said?,
            // It must not wait, paused, for a link that is dead.
            () = lost.notified() => return Err(MigrateError::Lost),
        }
        report.send = paused.elapsed() - report.stop;
        Ok(())
    }

    /// Sends what fits into the pause, names the rest, and sends the program's own state.
    async fn say_all(&mut self, state: &[u8]) -> Result<(), MigrateError> {
        use super::protocol::kind;
        if !self.options.post_copy || self.fits(self.left.bytes()) {
            for (index, part) in self.parts.iter().enumerate() {
                let device = Arc::clone(&part.device);
                let ranges = self.left.ranges(index);
                self.pages.send(index as u32, device, ranges).await?;
            }
            self.left = Blocks::none(&self.parts);
        }
        for left in self.left.named() {
            let named = drover_net::encode(&left);
            self.pages.say(kind::LEFT, &named).await?;
        }
        self.pages.say(kind::STATE, state).await?;
        if !self.options.post_copy {
            // All of it is there before it is taken, and stays there.
            self.pages.flush().await?;
            self.pages.flushed().await?;
        }
        Ok(())
    }

    /// Gives the move up: the program stays.
    pub async fn abort(mut self) {
        let _stays = self.driver.stay("it was given up".into()).await;
    }
}

/// The process that a program has gone to.
struct Process {
    options: SeederOptions,
    token: Token,
    rounds: u32,
    sent: Arc<Sent>,
}

impl Link for Process {
    fn name(&self) -> String {
        self.options.name.to_string()
    }

    fn give_up_after(&self) -> Duration {
        self.options.give_up_after
    }

    fn names_what_it_lacks(&self) -> bool {
        false
    }

    fn pages(&self) -> Calling<'_> {
        Box::pin(async {
            let request = SendPages {
                program: self.options.name_there.clone(),
                token: self.token,
            };
            call(&self.options.to, &request).await
        })
    }

    fn fetches(&self) -> Calling<'_> {
        Box::pin(async {
            let request = FetchPages {
                program: self.options.name_there.clone(),
                token: self.token,
            };
            call(&self.options.to, &request).await
        })
    }

    fn tell(&self, left: u64) {
        (self.options.on_progress)(&Progress {
            rounds: self.rounds,
            left,
            sent: self.sent.disk.load(Ordering::Relaxed),
            packed: self.sent.packed.load(Ordering::Relaxed),
            is_there: true,
            ..Progress::default()
        });
    }

    fn broke(&self, _: &MigrateError) {}
}

/// Shows that a connection is used still; returns when it is broken. Cancel safe.
async fn idle(connection: &mut (FrameReader, FrameWriter)) {
    let (reader, writer) = connection;
    KEEP_ALIVE.apply(reader, writer);
    tokio::select! {
        // Nothing is waited for yet.
        _ = reader.next() => {}
        _ = writer.ping_when_idle(KEEP_ALIVE.ping_every) => {}
    }
}

impl std::fmt::Debug for Seeder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seeder")
            .field("name", &self.options.name)
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}
