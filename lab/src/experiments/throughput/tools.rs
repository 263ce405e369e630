//! Who carries in the throughput experiment, and what one carrying costs.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::experiments::file_name;
use crate::experiments::lines::Net;
use crate::experiments::mover::{self, By};
use crate::rivals::{Carrier, Mode, Rsync};
use crate::same::identical;
use crate::shell;
use crate::site::{Sender, Sent, Site};
use crate::watch::{Cost, cpu_of_children};

/// How long one send may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// What a daemon's own children need to be gone, so that their time is known.
const REST: Duration = Duration::from_millis(100);

/// Something that is measured: it yields one carrying or two.
#[derive(Clone, Copy)]
pub enum Tool {
    /// drover to an empty site, and the same image again.
    Drover,
    /// drover to a site that has a similar image.
    Similar,
    /// rsync.
    Rsync(Mode),
    /// A rival of the other experiments.
    Rival(By),
    /// `cp`: the floor, without a network.
    Cp,
    /// `dd` with a sync at its end: the floor of what is on disk when it is said to be.
    Dd,
}

/// One carrying.
#[derive(Clone, Debug, Default)]
pub struct Carried {
    /// From start to exit.
    pub seconds: f64,
    /// Processor time of both ends.
    pub cpu_seconds: f64,
    /// Peak memory of the sender and of the site, where they were watched.
    pub peaks: Option<(u64, u64)>,
    /// What drover said of it.
    pub sent: Option<Sent>,
    /// Whether the copy is the original.
    pub same: bool,
}

/// What is carried, by what, and where.
pub struct Job<'a> {
    /// The drover under test.
    pub drover: &'a Path,
    /// The image.
    pub image: &'a Path,
    /// One like it.
    pub similar: &'a Path,
    /// A directory of its own, which is gone afterwards.
    pub dir: &'a Path,
    /// What is between the ends.
    pub net: &'a Net,
}

impl Tool {
    /// The tools, in the order of the document; `link`: over a link, where copying alone makes no sense.
    pub fn all(link: bool, small: bool) -> Vec<Self> {
        let zstd = mover::rivals().filter(|by| by.name() == "zstd" && !small);
        let mut tools = vec![Self::Drover, Self::Similar];
        tools.extend([Self::Rsync(Mode::Whole), Self::Rsync(Mode::WholeSynced)]);
        tools.extend(zstd.map(Self::Rival));
        if !link {
            tools.extend([Self::Cp, Self::Dd]);
        }
        tools
    }

    /// What the rows of its carryings are called.
    pub fn names(&self) -> Vec<&'static str> {
        match self {
            Self::Drover => vec!["drover, first", "drover, again"],
            Self::Similar => vec!["drover, similar"],
            Self::Rsync(Mode::WholeSynced) => vec!["rsync --whole-file --sparse --fsync"],
            Self::Rsync(_) => vec!["rsync --whole-file"],
            Self::Rival(by) => vec![by.name()],
            Self::Cp => vec!["cp"],
            Self::Dd => vec!["dd conv=fsync"],
        }
    }

    /// Why it is not here, in words.
    pub fn missing(&self) -> Option<String> {
        let needs = |program: &str| (!shell::have(program)).then(|| format!("no {program}"));
        match self {
            Self::Drover | Self::Similar => None,
            Self::Rsync(_) => needs("rsync"),
            Self::Rival(by) => by.missing(),
            Self::Cp => needs("cp"),
            Self::Dd => needs("dd"),
        }
    }

    /// Carries the image once, or twice; one for each of [`Tool::names`].
    ///
    /// # Errors
    /// When something does not come to its end.
    pub fn carry(&self, job: &Job<'_>) -> Result<Vec<Carried>> {
        fs::create_dir_all(job.dir)
            .with_context(|| format!("cannot make {}", job.dir.display()))?;
        match self {
            Self::Drover => with_site(job, |end| Ok(vec![end.send(job)?, end.send(job)?])),
            Self::Similar => with_site(job, |end| {
                end.sender.begin(job.similar, &[])?.finish(PATIENCE)?;
                Ok(vec![end.send(job)?])
            }),
            Self::Rsync(mode) => by_carrier(job, || {
                Ok(Box::new(Rsync::start(*mode, job.dir, job.net.place())?))
            }),
            Self::Rival(By::Rival(rival)) => {
                by_carrier(job, || rival.start(job.net.place(), job.dir))
            }
            Self::Rival(By::Drover) => with_site(job, |end| Ok(vec![end.send(job)?])),
            Self::Cp => copied(job, |to| {
                let mut cp = Command::new("cp");
                cp.args(["--reflink=never", "--sparse=auto"]);
                cp.arg(job.image).arg(to);
                cp
            }),
            Self::Dd => copied(job, |to| {
                let mut dd = Command::new("dd");
                dd.args(["bs=1M", "conv=sparse,fsync", "status=none"]);
                dd.arg(prefixed("if=", job.image)).arg(prefixed("of=", to));
                dd
            }),
        }
    }
}

fn prefixed(prefix: &str, path: &Path) -> std::ffi::OsString {
    let mut out = std::ffi::OsString::from(prefix);
    out.push(path);
    out
}

/// A site and its sender.
struct Ends<'a> {
    site: Site,
    sender: Sender<'a>,
}

fn with_site(
    job: &Job<'_>,
    act: impl FnOnce(&Ends<'_>) -> Result<Vec<Carried>>,
) -> Result<Vec<Carried>> {
    let place = job.net.place();
    let site = Site::start(job.drover, &job.dir.join("site"), place)?;
    let sender = Sender::pair(job.drover, &job.dir.join("sender"), place, &site)?;
    act(&Ends { site, sender })
}

impl Ends<'_> {
    fn send(&self, job: &Job<'_>) -> Result<Carried> {
        settle();
        self.site.forget_peak();
        let before = self.site.cost();
        let outcome = self.sender.begin(job.image, &[])?.finish(PATIENCE)?;
        let site = self.site.cost();
        let Cost {
            peak_rss_bytes,
            cpu_seconds,
        } = outcome.cost;
        Ok(Carried {
            seconds: outcome.seconds,
            cpu_seconds: cpu_seconds + site.cpu_seconds - before.cpu_seconds,
            peaks: Some((peak_rss_bytes, site.peak_rss_bytes)),
            sent: outcome.images.into_iter().next(),
            same: arrived(job, &self.site.image(&file_name(job.image)))?,
        })
    }
}

fn by_carrier<'a>(
    job: &Job<'_>,
    start: impl FnOnce() -> Result<Box<dyn Carrier + 'a>>,
) -> Result<Vec<Carried>> {
    settle();
    let before = cpu_of_children();
    let mut carrier = start()?;
    let seconds = carrier.carry(job.image, None)?;
    let delivered = carrier.delivered(job.image);
    // Before the comparison: what it has at the far end goes with it.
    let same = arrived(job, &delivered)?;
    std::thread::sleep(REST);
    drop(carrier);
    Ok(vec![Carried {
        seconds,
        cpu_seconds: cpu_of_children() - before,
        same,
        ..Carried::default()
    }])
}

fn copied(job: &Job<'_>, command: impl FnOnce(&Path) -> Command) -> Result<Vec<Carried>> {
    settle();
    let to = job.dir.join("copy");
    let before = cpu_of_children();
    let started = Instant::now();
    shell::run(&mut command(&to))?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(vec![Carried {
        seconds,
        cpu_seconds: cpu_of_children() - before,
        same: arrived(job, &to)?,
        ..Carried::default()
    }])
}

/// Whether the copy is the original; one that is not there is not.
fn arrived(job: &Job<'_>, copy: &Path) -> Result<bool> {
    Ok(copy.is_file() && identical(job.image, copy)?)
}

/// Writes out what others left in memory: nobody pays for what another wrote.
fn settle() {
    rustix::fs::sync();
}
