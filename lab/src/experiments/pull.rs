//! A pull with nothing else reading: whether it fills the link also where the data shrinks on the way.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::lines::{Line, Net};
use super::mount::{connect, disk, make_disk, real_name};
use super::shows::{By, Far, Shown};
use super::{Lab, Work};
use crate::bench::{About, Case, Column, Experiment, Need, Plot, Row, Subject, Verdict};
use crate::link::Side;
use crate::link::check::traffic::Servers;
use crate::same::identical;
use crate::{report::Spread, shell, watch};

/// Bytes of noise, and how long plain TCP sends: about what the real disk puts on the link.
const NOISE: u64 = 250 << 20;
const SMALL_NOISE: u64 = 32 << 20;
const TCP_SECONDS: u32 = 8;

/// How often the counters are read, and what must have crossed meanwhile to count: words of a mount that has all are less.
const EVERY: Duration = Duration::from_millis(20);
const STEP_BYTES: u64 = 40_000;
/// With so long a pause the bytes have stopped.
const QUIET: Duration = Duration::from_secs(1);
/// Within which all must be here.
const PATIENCE: Duration = Duration::from_secs(120);
/// A request when all is compared.
const REQUEST: usize = 1 << 20;

const OF_NOISE: &str = "of_noise_percent";
const RATE: &str = "link_mbit";

const LINE: Line = Line {
    rate_mbit: 400.0,
    rtt_ms: 40.0,
    loss_percent: 0.0,
};

/// The experiment.
pub struct Pull;

static ABOUT: About = About {
    name: "pull",
    title: "A pull, and nothing else",
    text: "A disk at the far end of a link is exported at the near end with an empty cache, and nobody reads it: all that crosses the link is what \
the mount pulls by itself. The clock starts at the command, process and handshakes included, and ends when the bytes stop. *MB* are IP bytes that the \
link delivered to the near end by then, *Mbit/s* these over that time. *Cores busy* is the share of all cores of the machine, which runs both ends \
and the link. Noise does not shrink; the real disk does, so that the site must read, digest and pack more for the same bytes on the link. Wanted of it are 95 % of noise's rate, or all cores \
busy. *Plain TCP* is one connection of `iperf3` for 8 seconds, its own handshakes included. When the mount says that all is here, every byte of the device is compared with the \
image, outside the time. The three take turns.",
    columns: &[
        Column::label("link", "link"),
        Column::label("what", "what"),
        Column::figure("seconds", "seconds", 2),
        Column::figure("link_mb", "over the link, MB", 0),
        Column::figure(RATE, "at the link, Mbit/s", 0),
        Column::optional(OF_NOISE, "of noise's, %", 1),
        Column::figure("cores_percent", "cores busy, %", 0),
    ],
};

/// What crosses the link.
#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Tcp,
    Noise,
    Real,
}

impl What {
    fn name(self, lab: &Lab) -> String {
        match self {
            What::Tcp => "plain TCP".to_owned(),
            What::Noise => "drover, noise".to_owned(),
            What::Real if lab.image(real_name(lab)).is_ok() => {
                format!("drover, {}", real_name(lab))
            }
            What::Real => "drover, made, half of it repeats".to_owned(),
        }
    }
}

impl Experiment for Pull {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let once = if lab.small { 20.0 } else { 45.0 };
        Ok(vec![Case {
            id: LINE.slug(),
            what: format!("plain TCP, noise and a real disk over {}", LINE.describe()),
            seconds: once * lab.repeat.max(1) as f64,
            rank: 1,
            subject: Subject::Drover,
            needs: &[Need::Link],
        }])
    }

    fn run(&self, lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
        measure(lab)
    }

    fn plots(&self, _rows: &[Row]) -> Vec<Plot> {
        Vec::new()
    }

    fn images(&self, lab: &Lab, _case: &Case) -> Option<Vec<PathBuf>> {
        Some(lab.image(real_name(lab)).into_iter().collect())
    }
}

/// A row for each; what fails says why, and the others go on.
fn measure(lab: &Lab) -> Result<Vec<Row>> {
    let work = lab.work("pull")?;
    let noise = work.join("noise.raw");
    make_disk(&noise, if lab.small { SMALL_NOISE } else { NOISE }, true)?;
    let real = disk(lab, &work, true)?;
    // Into the page cache, so that the first run does not wait for a disk.
    identical(&real, &real)?;
    let net = Net::like(Some(LINE), 1)?;
    let mut rows = Vec::new();
    let mut runs: [Vec<Pulled>; 3] = Default::default();
    let all = [What::Tcp, What::Noise, What::Real];
    for what in all {
        let labels = [("link", LINE.describe()), ("what", what.name(lab))];
        rows.push(Row::new(labels));
    }
    if !shell::have("iperf3") {
        rows[0].verdict = Verdict::Skipped("iperf3 is not installed".to_owned());
    }
    for _ in 0..lab.repeat.max(1) {
        for ((what, row), runs) in all.into_iter().zip(&mut rows).zip(&mut runs) {
            if row.verdict != Verdict::Good {
                continue;
            }
            let done = match what {
                What::Tcp => tcp(&net),
                What::Noise => pull(lab, &net, &work, &noise),
                What::Real => pull(lab, &net, &work, &real),
            };
            match done {
                Ok(pulled) => {
                    eprintln!("  {}: {:.0} Mbit/s", what.name(lab), pulled.mbit());
                    runs.push(pulled);
                }
                Err(error) => row.verdict = Verdict::Failed(format!("{error:#}")),
            }
        }
    }
    fill(&mut rows, &runs);
    Ok(rows)
}

/// What was measured, in the rows of it; the second is noise.
fn fill(rows: &mut [Row], runs: &[Vec<Pulled>; 3]) {
    let rates = |runs: &[Pulled]| runs.iter().map(Pulled::mbit).collect::<Vec<f64>>();
    let noise = Spread::of(&rates(&runs[1])).map(|spread| spread.median);
    for (row, runs) in rows.iter_mut().zip(runs) {
        let mut figures: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for run in runs {
            let mut add = |key, value| figures.entry(key).or_default().push(value);
            add("seconds", run.seconds);
            add("link_mb", run.bytes as f64 / 1e6);
            add(RATE, run.mbit());
            add("cores_percent", run.cores_percent);
            if let Some(noise) = noise {
                add(OF_NOISE, 100.0 * run.mbit() / noise);
            }
        }
        for (key, values) in &figures {
            row.set_all(key, values);
        }
    }
}

/// What crossed the link until the bytes stopped.
#[derive(Debug, PartialEq)]
struct Pulled {
    seconds: f64,
    bytes: u64,
    cores_percent: f64,
}

impl Pulled {
    fn mbit(&self) -> f64 {
        self.bytes as f64 * 8e-6 / self.seconds
    }

    /// From the first sample to the last one before which a step's bytes had come.
    fn of(samples: &[Sample]) -> Option<Self> {
        let first = samples.first()?;
        let moved = |pair: &&[Sample]| pair[1].bytes - pair[0].bytes > STEP_BYTES;
        let last = samples.windows(2).rfind(moved)?[1];
        let cores = last.cores.1.checked_sub(first.cores.1).filter(|c| *c > 0)?;
        Some(Self {
            seconds: last.at - first.at,
            bytes: last.bytes - first.bytes,
            cores_percent: 100.0 * (last.cores.0 - first.cores.0) as f64 / cores as f64,
        })
    }
}

/// The counters at some time.
#[derive(Clone, Copy)]
struct Sample {
    at: f64,
    /// Bytes from the far end.
    bytes: u64,
    /// Processor time that was used, and all.
    cores: (u64, u64),
}

/// Reads the counters of a link and of the machine.
struct Counters<'a> {
    net: &'a Net,
    started: Instant,
    samples: Vec<Sample>,
}

impl<'a> Counters<'a> {
    fn start(net: &'a Net) -> Result<Self> {
        let (started, samples) = (Instant::now(), Vec::new());
        let mut counters = Self {
            net,
            started,
            samples,
        };
        counters.look()?;
        Ok(counters)
    }

    fn look(&mut self) -> Result<()> {
        let (_, bytes) = self.net.bytes()?.context("there is no link")?;
        self.samples.push(Sample {
            at: self.started.elapsed().as_secs_f64(),
            bytes,
            cores: watch::cores().context("/proc/stat does not tell of the cores")?,
        });
        Ok(())
    }

    /// Until nothing has crossed for a while and `over` says so, too.
    fn until(&mut self, mut over: impl FnMut() -> Result<bool>) -> Result<()> {
        let (mut moved, mut before) = (Instant::now(), 0);
        loop {
            std::thread::sleep(EVERY);
            self.look()?;
            let bytes = self.samples.last().map_or(0, |sample| sample.bytes);
            if bytes - before > STEP_BYTES {
                moved = Instant::now();
            }
            before = bytes;
            if moved.elapsed() > QUIET {
                if over()? {
                    return Ok(());
                }
                // Asking takes time of its own, so not at every look.
                moved = Instant::now();
            }
            if self.started.elapsed() > PATIENCE {
                bail!("not all was here after {} s", PATIENCE.as_secs());
            }
        }
    }

    fn pulled(&self) -> Result<Pulled> {
        Pulled::of(&self.samples).context("nothing crossed the link")
    }
}

/// One connection from the far end.
fn tcp(net: &Net) -> Result<Pulled> {
    let link = net.link().context("there is no link")?;
    let servers = Servers::start(link)?;
    // They listen by then, and the client need not knock twice.
    std::thread::sleep(QUIET);
    let mut counters = Counters::start(net)?;
    std::thread::scope(|scope| {
        let stream = scope.spawn(|| servers.tcp(link, Side::B, 1, TCP_SECONDS, 0));
        counters.until(|| Ok(stream.is_finished()))?;
        let ended = stream.join();
        ended.map_err(|_| anyhow::anyhow!("the stream panicked"))?
    })?;
    counters.pulled()
}

/// A pull of a whole image, which is compared afterwards.
fn pull(lab: &Lab, net: &Net, work: &Work, image: &Path) -> Result<Pulled> {
    let dir = work.join("ends");
    // What a run that failed left.
    let _ = std::fs::remove_dir_all(&dir);
    let pulled = {
        let far = Far::start(net, &lab.binary()?, &dir, image, By::Managed)?;
        let near = far.near(By::Managed)?;
        let near = near.with(["--read-only", "--prefetch", "sequential"]);
        let mut counters = Counters::start(net)?;
        let mut shown = near.start()?;
        counters.until(|| shown.check().map(|()| near.is_whole()))?;
        compare(&mut shown, image)?;
        counters.pulled()?
    };
    std::fs::remove_dir_all(&dir)?;
    Ok(pulled)
}

/// Fails unless the device has the bytes of the image.
fn compare(shown: &mut Shown, image: &Path) -> Result<()> {
    let mut original = File::open(image)?;
    let size = original.metadata()?.len();
    let mut client = connect(shown)?;
    if client.size() != size {
        bail!("it is of {} bytes, the image of {size}", client.size());
    }
    let (mut pulled, mut expected) = (vec![0; REQUEST], vec![0; REQUEST]);
    for at in (0..size).step_by(REQUEST) {
        let take = (size - at).min(REQUEST as u64) as usize;
        client.read(at, &mut pulled[..take])?;
        original.read_exact(&mut expected[..take])?;
        if pulled[..take] != expected[..take] {
            bail!("what was pulled is not the image, at {at}");
        }
    }
    shown.check()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: f64, bytes: u64, cores: (u64, u64)) -> Sample {
        Sample { at, bytes, cores }
    }

    #[test]
    fn a_pull_ends_when_the_bytes_stop() {
        let samples = [
            sample(0.0, 1_000, (50, 100)),
            sample(1.0, 2_000, (60, 120)),
            sample(2.0, 5_001_000, (110, 220)),
            // A mount that has all still says that it is there.
            sample(3.0, 5_002_000, (110, 420)),
            sample(4.0, 5_003_000, (110, 620)),
        ];
        let pulled = Pulled::of(&samples).unwrap();
        assert_eq!((pulled.seconds, pulled.bytes), (2.0, 5_000_000));
        assert_eq!((pulled.mbit(), pulled.cores_percent), (20.0, 50.0));
        assert_eq!(Pulled::of(&samples[..2]), None);
        assert_eq!(Pulled::of(&[]), None);
    }

    #[test]
    fn a_pause_amid_a_pull_is_part_of_it() {
        let mib = 1 << 20;
        let bytes = [0, mib, mib, mib, 2 * mib, 2 * mib];
        let samples: Vec<Sample> = (0..)
            .zip(bytes)
            .map(|(n, b)| sample(n.into(), b, (0, n as u64 + 1)))
            .collect();
        assert_eq!(Pulled::of(&samples).unwrap().seconds, 4.0);
    }

    #[test]
    fn each_is_held_against_noise() {
        let pulled = |bytes| Pulled {
            seconds: 8.0,
            bytes,
            cores_percent: 40.0,
        };
        let runs = [
            vec![pulled(9)],
            vec![pulled(8), pulled(10), pulled(12)],
            vec![],
        ];
        let mut rows = vec![Row::default(); 3];
        fill(&mut rows, &runs);
        let of_noise = |row: &Row| row.value(OF_NOISE).map(f64::round);
        assert_eq!(of_noise(&rows[0]), Some(90.0));
        assert_eq!(of_noise(&rows[1]), Some(100.0));
        assert_eq!(of_noise(&rows[2]), None);
        let mut rows = vec![Row::default(); 3];
        fill(&mut rows, &[vec![pulled(9)], vec![], vec![]]);
        assert_eq!(rows[0].value(RATE).zip(rows[0].value(OF_NOISE)), None);
        assert_eq!(rows[0].value("link_mb"), Some(9e-6));
    }
}
