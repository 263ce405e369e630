//! A background pull without other reads: whether it saturates the link, also when the data is compressed.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::client::connect;
use super::lines::{Line, Net, line};
use super::mount::{disk, make_disk, real_name};
use super::shows::{By, Far, Shown};
use crate::bench::{Case, Column, Experiment, Figure, Need, Row, Verdict};
use crate::files::identical;
use crate::link::{Link, Side};
use crate::setup::{Lab, Work};
use crate::{shell, watch};

/// Bytes of random data, and seconds of the plain TCP transfer: each about the traffic of the real disk.
const NOISE: u64 = 250 << 20;
const SMALL_NOISE: u64 = 32 << 20;
const TCP_SECONDS: &str = "8";
/// Polling interval of the counters, and the bytes per interval above which data is flowing: an idle mount sends less.
const EVERY: Duration = Duration::from_millis(20);
const STEP_BYTES: u64 = 40_000;
/// The transfer has ended after such a pause.
const QUIET: Duration = Duration::from_secs(1);
/// Timeout for a complete pull.
const PATIENCE: Duration = Duration::from_secs(120);
/// Request size of the final comparison.
const REQUEST: usize = 1 << 20;
const LINE: Line = line(400.0, 40.0, 0.0);

pub const EXPERIMENT: Experiment = Experiment {
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
        Column::figure("link_mbit", "at the link, Mbit/s", 0),
        Column::optional("of_noise_percent", "of noise's, %", 1),
        Column::figure("cores_percent", "cores busy, %", 0),
    ],
    cases: |_| {
        let what = format!("plain TCP, noise and a real disk over {}", LINE.describe());
        Ok(vec![Case::new(LINE.slug(), what, 1, &[Need::Link])])
    },
    run,
};

/// One row for each; a failed one has its error, and the others still run.
fn run(lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
    let work = lab.work("pull")?;
    let noise = work.join("noise.raw");
    make_disk(&noise, lab.either(NOISE, SMALL_NOISE), true)?;
    let real = disk(lab, &work, true)?;
    // Read it into the page cache, so that the first run does not wait for a disk.
    identical(&real, &real)?;
    let net = Net::like(Some(LINE), 1)?;
    let real_name = lab
        .image(real_name(lab))
        .map_or("made, half of it repeats", |_| real_name(lab));
    let names = [
        "plain TCP".to_owned(),
        "drover, noise".to_owned(),
        format!("drover, {real_name}"),
    ];
    let mut rows = names.map(|name| Row::new([("link", LINE.describe()), ("what", name)]));
    let mut runs: [Vec<Pulled>; 3] = Default::default();
    if !shell::have("iperf3") {
        rows[0].verdict = Verdict::Skipped("iperf3 is not installed".to_owned());
    }
    for _ in 0..lab.repeat.max(1) {
        for (what, row) in rows
            .iter_mut()
            .enumerate()
            .filter(|(_, row)| row.verdict == Verdict::Good)
        {
            let done = match what {
                0 => tcp(&net),
                1 => pull(lab, &net, &work, &noise),
                _ => pull(lab, &net, &work, &real),
            };
            match done {
                Ok(pulled) => runs[what].push(pulled),
                Err(error) => row.verdict = Verdict::failed(&error),
            }
        }
    }
    let of =
        |runs: &[Pulled], figure: fn(&Pulled) -> f64| runs.iter().map(figure).collect::<Vec<_>>();
    let noise = Figure::of(&of(&runs[1], Pulled::mbit)).map(|figure| figure.median);
    for (row, runs) in rows.iter_mut().zip(&runs) {
        row.set_all("seconds", &of(runs, |run| run.seconds));
        row.set_all("link_mb", &of(runs, |run| run.bytes as f64 / 1e6));
        row.set_all("link_mbit", &of(runs, Pulled::mbit));
        row.set_all("cores_percent", &of(runs, |run| run.cores_percent));
        let shares = of(runs, Pulled::mbit)
            .into_iter()
            .zip(noise.into_iter().cycle());
        row.set_all(
            "of_noise_percent",
            &shares
                .map(|(rate, noise)| 100.0 * rate / noise)
                .collect::<Vec<_>>(),
        );
    }
    Ok(rows.into())
}

/// The traffic of a pull.
#[derive(Debug, PartialEq)]
pub struct Pulled {
    pub seconds: f64,
    pub bytes: u64,
    pub cores_percent: f64,
}

/// Counter values: time, bytes from the far end, and used and total CPU time.
pub type Sample = (f64, u64, (u64, u64));

impl Pulled {
    fn mbit(&self) -> f64 {
        self.bytes as f64 * 8e-6 / self.seconds
    }

    /// Evaluates the samples from the first to the last one with data flowing.
    pub fn of(samples: &[Sample]) -> Option<Self> {
        let first = samples.first()?;
        let last = samples
            .windows(2)
            .rfind(|pair| pair[1].1 - pair[0].1 > STEP_BYTES)?[1];
        let cores = last.2.1.checked_sub(first.2.1).filter(|cores| *cores > 0)?;
        Some(Self {
            seconds: last.0 - first.0,
            bytes: last.1 - first.1,
            cores_percent: 100.0 * (last.2.0 - first.2.0) as f64 / cores as f64,
        })
    }
}

/// Samples the counters until no data has flowed for a while and `over` confirms the end. The time of `start` is
/// included.
fn count<T>(
    net: &Net,
    start: impl FnOnce() -> Result<T>,
    mut over: impl FnMut(&mut T) -> Result<bool>,
) -> Result<(T, Pulled)> {
    let (started, mut samples) = (Instant::now(), Vec::new());
    let mut look = || -> Result<u64> {
        let (_, bytes) = net.bytes().context("there is no link")?;
        let cores = watch::cores().context("/proc/stat does not tell of the cores")?;
        samples.push((started.elapsed().as_secs_f64(), bytes, cores));
        Ok(bytes)
    };
    let mut before = look()?;
    let mut it = start()?;
    let mut moved = Instant::now();
    loop {
        std::thread::sleep(EVERY);
        let bytes = look()?;
        if bytes - before > STEP_BYTES {
            moved = Instant::now();
        }
        before = bytes;
        if moved.elapsed() > QUIET {
            if over(&mut it)? {
                break;
            }
            // The query takes time itself, so not on every sample.
            moved = Instant::now();
        }
        if started.elapsed() > PATIENCE {
            bail!("not all was here after {} s", PATIENCE.as_secs());
        }
    }
    Ok((
        it,
        Pulled::of(&samples).context("nothing crossed the link")?,
    ))
}

/// `iperf3` at one end of a link; killed when dropped.
pub struct Iperf(Child);

impl Iperf {
    /// Starts it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(link: &Link, side: Side, args: &[&str]) -> Result<Self> {
        let mut command: Command = link.command(side, "iperf3");
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Ok(Self(command.spawn().context("iperf3")?))
    }
}

impl Drop for Iperf {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A single TCP connection from the far end.
fn tcp(net: &Net) -> Result<Pulled> {
    let link = net.link().context("there is no link")?;
    let _server = Iperf::start(link, Side::B, &["-s", "-1"])?;
    // The server listens by then, so the client connects at the first attempt.
    std::thread::sleep(QUIET);
    let client = || {
        Iperf::start(
            link,
            Side::A,
            &["-c", Side::B.address(), "-R", "-t", TCP_SECONDS],
        )
    };
    let (_, pulled) = count(net, client, |client| Ok(client.0.try_wait()?.is_some()))?;
    Ok(pulled)
}

/// Pulls a whole image, and verifies it afterwards.
fn pull(lab: &Lab, net: &Net, work: &Work, image: &Path) -> Result<Pulled> {
    let dir = work.join("ends");
    // Left over from a failed run.
    let _ = std::fs::remove_dir_all(&dir);
    let far = Far::start(net, &lab.binary()?, &dir, image, By::Managed)?;
    let near = far
        .near(By::Managed)?
        .with(["--read-only", "--prefetch", "sequential"]);
    let whole = |shown: &mut Shown| shown.check().map(|()| near.is_whole());
    let (mut shown, pulled) = count(net, || near.start(), whole)?;
    compare(&mut shown, image)?;
    Ok(pulled)
}

/// Fails unless the device equals the image.
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
