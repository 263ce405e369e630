//! One migration: a link, a guest that is watched, and what it came to.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use drover_hypervisor::testing::Guest;

use super::machine::{Beat, Disk, Machine, NAMES, QEMU, Start};
use super::sites::{Done, Sites};
use crate::bench::Figure;
use crate::experiments::lines::{Line, Net};
use crate::setup::{Lab, Work};
use crate::shell;

/// Bytes.
pub const MB: f64 = 1e6;
/// MiB of a guest.
const MEMORY: u32 = 96;
const LARGE_MEMORY: u32 = 384;
/// How long a guest is watched before it moves.
const BEFORE: Duration = Duration::from_secs(4);
/// Records that a guest makes before it is watched, and after it has moved.
const BEATS: u64 = 20;
/// How long to look for more events of a QEMU that runs.
const MORE: Duration = Duration::from_millis(200);
/// Timeout for an event that must have been.
const EVENT: Duration = Duration::from_secs(60);

/// What a migration came to.
pub struct Moved {
    pub seconds: f64,
    pub pause_ms: f64,
    pub held_ms: f64,
    pub beat_ms: f64,
    pub link_mb: f64,
    pub records_before: f64,
    pub records_during: f64,
    pub gap_ms: f64,
    pub done: Option<Done>,
}

/// A link, a guest, and a directory for both ends.
pub struct Bench {
    net: Net,
    guest: Guest,
    /// MiB of memory, and those that change with each record.
    memory: (u32, u32),
    drover: PathBuf,
    dir: PathBuf,
    _work: Work,
}

impl Bench {
    pub fn new(lab: &Lab, line: Line, dirty: u32) -> Result<Self> {
        Self::with(lab, line, (MEMORY, dirty), Guest::build)
    }

    /// With more memory than drover keeps back while disks are compared, and a guest that can use an ext4.
    pub fn large(lab: &Lab, line: Line) -> Result<Self> {
        Self::with(lab, line, (LARGE_MEMORY, 0), Guest::build_with_ext4)
    }

    fn with(
        lab: &Lab,
        line: Line,
        memory: (u32, u32),
        build: fn(&str, &Path) -> Option<Guest>,
    ) -> Result<Self> {
        let work = lab.work("migrate")?;
        let dir = work.join("");
        // It says on standard error what is missing.
        let guest = build("migrate", &dir).context("no guest: see lab/guest/fetch.sh")?;
        Ok(Self {
            net: Net::like(Some(line), 1)?,
            guest,
            memory,
            drover: lab.binary()?,
            dir,
            _work: work,
        })
    }

    pub fn sites(&self) -> Result<Sites<'_>> {
        Sites::start(&self.drover, self.net.place(), &self.dir)
    }

    pub fn machine(&self, side: usize, disks: &[Disk], start: Start) -> Result<Machine> {
        let place = self.net.place();
        let command = match side {
            0 => place.near(Path::new(QEMU)),
            _ => place.far(Path::new(QEMU)),
        };
        let dir = self.dir.join(NAMES[side]).join("qemu");
        Machine::start(command, &dir, &self.guest, self.memory, disks, start)
    }

    pub fn empty_disk(&self, size: u64) -> Result<PathBuf> {
        self.empty_file(size, "records")
    }

    pub fn empty_file(&self, size: u64, name: &str) -> Result<PathBuf> {
        let path = self.dir.join(format!("{name}-{size}.raw"));
        File::create(&path)?.set_len(size)?;
        Ok(path)
    }

    pub fn copy(&self, image: &Path) -> Result<PathBuf> {
        let path = self.dir.join("system.raw");
        let mut cp = Command::new("cp");
        cp.args(["--sparse=always", "--reflink=auto"]);
        shell::run(cp.args([image, &path]))?;
        Ok(path)
    }

    /// Moves a machine from `side` by drover; the machine at the other one.
    pub fn by_drover(
        &self,
        sites: &Sites<'_>,
        side: usize,
        here: &mut Machine,
        sizes: &[u64],
    ) -> Result<(Machine, Moved)> {
        let disks: Vec<Disk> = sizes.iter().map(|size| Disk::Empty(*size)).collect();
        let mut there = self.machine(1 - side, &disks, Start::Wait)?;
        let moved = self.watched(here, &mut there, |here, _| {
            let done = sites.migrate(side)?;
            here.ended()?;
            Ok(Some(done))
        })?;
        Ok((there, moved))
    }

    /// Watches a guest before, during and after `migrate`.
    pub fn watched(
        &self,
        here: &mut Machine,
        there: &mut Machine,
        migrate: impl FnOnce(&mut Machine, &mut Machine) -> Result<Option<Done>>,
    ) -> Result<Moved> {
        here.wait_beat(BEATS)?;
        std::thread::sleep(BEFORE);
        let (begun, crossed) = (Instant::now(), self.net.bytes());
        let done = migrate(here, there)?;
        let seconds = begun.elapsed().as_secs_f64();
        let (out, back) = self.net.since(crossed).context("no link")?;
        let last = here.last()?;
        there.wait_beat(last.number + BEATS)?;
        let arrived = there.beats()?;
        there.verify()?;
        let first = *arrived.first().context("no record there")?;
        if !(1..=2).contains(&first.number.saturating_sub(last.number))
            || here.last()?.number != last.number
        {
            bail!("record {} here, then {} there", last.number, first.number);
        }
        let resumed = there.qmp.when("RESUME", EVENT)?;
        // Drover may hold a machine with several disks for a moment, at the beginning.
        let stops = here.qmp.all("STOP", MORE);
        let held = here.qmp.all("RESUME", MORE).into_iter().zip(&stops);
        let held: f64 = held.map(|(resumed, stopped)| resumed - stopped).sum();
        let stopped = stops.last().context("no event STOP")?;
        let beats = here.beats()?;
        let split = beats.partition_point(|beat| beat.at < begun);
        let (before, during) = beats.split_at(split);
        let watched = before.iter().rposition(|beat| begun - beat.at > BEFORE);
        let before = &before[watched.map_or(0, |at| at + 1)..];
        let usual = Figure::of(&gaps(before))
            .context("no records before")?
            .median;
        let missed = (first.number - last.number) as f64;
        let rate = |beats: &[Beat], from: Instant, to: Instant| {
            beats.len() as f64 / (to - from).as_secs_f64().max(f64::MIN_POSITIVE)
        };
        Ok(Moved {
            seconds,
            pause_ms: (resumed - stopped) * 1e3,
            // An empty sum is -0.
            held_ms: held.abs() * 1e3,
            beat_ms: millis(first.at - last.at) - missed * usual,
            link_mb: (out + back) as f64 / MB,
            records_before: rate(before, begun - BEFORE, begun),
            records_during: rate(during, begun, last.at.max(begun)),
            gap_ms: gaps(during).into_iter().fold(0.0, f64::max),
            done,
        })
    }
}

/// The times between records, in milliseconds.
fn gaps(beats: &[Beat]) -> Vec<f64> {
    let pairs = beats.windows(2);
    pairs.map(|pair| millis(pair[1].at - pair[0].at)).collect()
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
