//! Throughput without a link limit, and the time spent in each stage: one image over loopback, and over an emulated
//! link without a rate. Tools take turns, so that other load on the machine affects all of them alike.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::lines::{self, Net};
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::files::identical;
use crate::rivals::{self, Carrier, Mode, Rsync};
use crate::setup::{Lab, file_name, must_be_same};
use crate::shell;
use crate::site::{Sender, Sent, Site, Stage};
use crate::watch::cpu_of_children;

const MIB: f64 = (1u64 << 20) as f64;
const LOOPBACK: &str = "loopback";
const LINK: &str = "link";
/// Timeout of a send.
const PATIENCE: Duration = Duration::from_secs(600);
/// Time for a daemon's children to exit, so that their CPU time is known.
const REST: Duration = Duration::from_millis(100);
/// Stages in the order of the data flow.
const SOURCE: &[&str] = &["read", "scan", "digest", "fetch", "compress", "send"];
const DESTINATION: &[&str] = &[
    "receive", "unpack", "verify", "write", "matching", "copy", "check", "drive", "log", "sync",
    "deliver",
];

pub const EXPERIMENT: Experiment = Experiment {
    name: "throughput",
    title: "Throughput without a limit, and where the time goes",
    text: "One image over loopback, and over a link in user space without rate and delay: by drover to an empty site \
(*first*), the same image once more (*again*), and to a site that has a similar one (*similar*); by `rsync --whole-file` to a \
daemon, bare and with `--sparse --fsync`; by zstd over a socket; and by `cp` and `dd conv=fsync`, which use no network and are what \
the machine's memory and disk allow. drover's copy is synced when it says that it is done, and so are those of the tools \
with `fsync`. Everyone reads the image from memory; dirty pages are written out before each measurement; the tools take turns. \
Data is what the image takes on disk. Cores are the processor time of both ends over the time. In user space the link \
itself takes up to a core.\n\n\
The rows of stages say what drover's pipeline did, by its own clocks: *busy* is work, disk included, as a share of the time; \
what is above 100 % is more than one thread. *Waiting* is for the stage before or behind, *socket* for the other end.",
    columns: &[
        Column::label("place", "over"),
        Column::label("by", "by"),
        Column::label("stage", "stage"),
        Column::figure("seconds", "seconds", 2),
        Column::optional("data_mb_s", "data MB/s", 0),
        Column::optional("size_mb_s", "size MB/s", 0),
        Column::optional("wire_mb", "wire MB", 1),
        Column::optional("cores", "cores", 2),
        Column::optional("sender_mib", "sender MiB", 1),
        Column::optional("site_mib", "site MiB", 1),
        Column::optional("busy_percent", "busy %", 1),
        Column::optional("wait_percent", "waiting %", 1),
        Column::optional("socket_percent", "socket %", 1),
        Column::optional("stage_mb", "through it, MB", 1),
    ],
    cases: |_| {
        Ok(vec![
            Case::new(
                LOOPBACK,
                "one image over loopback, by everyone",
                0,
                &[Need::Library],
            ),
            Case::new(
                LINK,
                "one image over a link without a rate",
                0,
                &[Need::Library, Need::Link],
            ),
        ])
    },
    run,
};

/// The tools; drover sends twice to the same site.
const TOOLS: &[&[&str]] = &[
    &["drover, first", "drover, again"],
    &["drover, similar"],
    &["rsync --whole-file"],
    &["rsync --whole-file --sparse --fsync"],
    &["zstd"],
    &["cp"],
    &["dd conv=fsync"],
];

/// The cost of a transfer.
#[derive(Clone, Debug, Default)]
pub struct Carried {
    seconds: f64,
    /// CPU time of both ends.
    cpu_seconds: f64,
    /// Peak memory of the sender and of the site, if observed.
    peaks: Option<(u64, u64)>,
    /// Drover's own report.
    sent: Option<Sent>,
}

/// The images, the tools, and the network.
struct Job {
    drover: PathBuf,
    image: PathBuf,
    similar: PathBuf,
    dir: PathBuf,
    net: Net,
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let linked = case.id == LINK;
    let work = lab.work("throughput")?;
    let [image, similar] = lab.either(["bookworm-app", "bookworm-web"], ["small-one", "small-two"]);
    let job = Job {
        drover: lab.binary()?,
        image: lab.image(image)?,
        similar: lab.image(similar)?,
        dir: work.join("round"),
        net: Net::like(linked.then(|| lines::line(0.0, 0.0, 0.0)), 1)?,
    };
    // A warm-up: every tool reads the images from the page cache.
    for path in [&job.image, &job.similar] {
        identical(path, path)?;
    }
    // A plain copy cannot cross a link.
    let tools = &TOOLS[..if linked { TOOLS.len() - 2 } else { TOOLS.len() }];
    let mut done: BTreeMap<&str, Result<Vec<Carried>, Verdict>> = BTreeMap::new();
    for round in 0..lab.repeat.max(1) {
        for turn in 0..tools.len() {
            // Rotate the order in each round: dirty pages of one tool slow down the next.
            let names = tools[(round + turn) % tools.len()];
            if names
                .iter()
                .any(|name| matches!(done.get(name), Some(Err(_))))
            {
                continue;
            }
            fs::create_dir_all(&job.dir)?;
            let program = names[0].split(' ').next();
            // zstd is carried by socat.
            let carrier = (program == Some("zstd")).then_some("socat");
            let missing = program
                .into_iter()
                .chain(carrier)
                .find(|p| !p.starts_with("drover") && !shell::have(p));
            let outcome = match missing {
                Some(program) => Err(Verdict::Skipped(format!("no {program}"))),
                None => job.carry(names[0]).map_err(|error| Verdict::failed(&error)),
            };
            let _ = fs::remove_dir_all(&job.dir);
            for (nth, name) in names.iter().enumerate() {
                match &outcome {
                    Ok(carried) => {
                        eprintln!("  {name}: {:.2} s", carried[nth].seconds);
                        if let Ok(all) = done.entry(name).or_insert(Ok(Vec::new())) {
                            all.push(carried[nth].clone());
                        }
                    }
                    Err(verdict) => _ = done.insert(name, Err(verdict.clone())),
                }
            }
        }
    }
    let meta = fs::metadata(&job.image)?;
    let sizes = (meta.blocks() as f64 * 512e-6, meta.len() as f64 / 1e6);
    let place = if linked { "link, no rate" } else { LOOPBACK };
    let rows = |name: &&str| match done.remove(*name) {
        Some(Ok(carried)) => rows(place, name, &carried, sizes),
        Some(Err(verdict)) => vec![labelled(place, name, String::new()).but(verdict)],
        None => Vec::new(),
    };
    Ok(tools.iter().copied().flatten().flat_map(rows).collect())
}

fn labelled(place: &str, by: &str, stage: String) -> Row {
    Row::new([
        ("place", place.to_owned()),
        ("by", by.to_owned()),
        ("stage", stage),
    ])
}

/// A row for the whole, and one for each stage that was reported.
fn rows(place: &str, name: &str, carried: &[Carried], (data_mb, size_mb): (f64, f64)) -> Vec<Row> {
    let mut row = labelled(place, name, String::new());
    let mut set = |key: &str, of: &dyn Fn(&Carried) -> Option<f64>| {
        row.set_all(key, &carried.iter().filter_map(of).collect::<Vec<f64>>());
    };
    set("seconds", &|c| Some(c.seconds));
    set("data_mb_s", &|c| Some(data_mb / c.seconds));
    set("size_mb_s", &|c| Some(size_mb / c.seconds));
    set("cores", &|c| Some(c.cpu_seconds / c.seconds));
    set("sender_mib", &|c| Some(c.peaks?.0 as f64 / MIB));
    set("site_mib", &|c| Some(c.peaks?.1 as f64 / MIB));
    set("wire_mb", &|c| {
        Some(c.sent.as_ref()?.wire_bytes() as f64 / 1e6)
    });
    let mut rows = vec![row];
    for (end, stages) in [("source", SOURCE), ("destination", DESTINATION)] {
        for stage in stages {
            let said = carried.iter().filter_map(|c| c.sent.as_ref());
            let said =
                said.filter_map(|sent| Some((sent.seconds, *sent.stages.get(end)?.get(*stage)?)));
            let said: Vec<(f64, Stage)> = said.collect();
            let mut row = labelled(place, name, format!("{end} {stage}"));
            let mut set = |key: &str, of: &dyn Fn(&(f64, Stage)) -> f64| {
                row.set_all(key, &said.iter().map(of).collect::<Vec<f64>>());
            };
            set("seconds", &|(seconds, _)| *seconds);
            set("busy_percent", &|(s, stage)| 100.0 * stage.busy_seconds / s);
            set("wait_percent", &|(s, stage)| 100.0 * stage.wait_seconds / s);
            set("socket_percent", &|(s, stage)| {
                100.0 * stage.socket_seconds / s
            });
            set("stage_mb", &|(_, stage)| stage.bytes as f64 / 1e6);
            rows.extend((!said.is_empty()).then_some(row));
        }
    }
    rows
}

impl Job {
    /// Transfers the image once, or twice.
    fn carry(&self, tool: &str) -> Result<Vec<Carried>> {
        let place = self.net.place();
        match tool {
            "drover, first" | "drover, similar" => {
                let site = Site::start(&self.drover, &self.dir.join("site"), place)?;
                let sender = Sender::pair(&self.drover, &self.dir.join("sender"), place, &site)?;
                if tool == "drover, similar" {
                    sender.begin(&self.similar, &[])?.finish(PATIENCE)?;
                    return Ok(vec![self.send(&site, &sender)?]);
                }
                Ok(vec![self.send(&site, &sender)?, self.send(&site, &sender)?])
            }
            "rsync --whole-file" => {
                self.by(|| Ok(Box::new(Rsync::start(Mode::Whole, &self.dir, place)?)))
            }
            "zstd" => self.by(|| rivals::ALL[0].start(place, &self.dir)),
            "cp" => self.copied(|to| {
                let mut cp = Command::new("cp");
                cp.args(["--reflink=never", "--sparse=auto"])
                    .arg(&self.image)
                    .arg(to);
                cp
            }),
            "dd conv=fsync" => self.copied(|to| {
                let mut dd = Command::new("dd");
                dd.args(["bs=1M", "conv=sparse,fsync", "status=none"]);
                dd.arg(format!("if={}", self.image.display()))
                    .arg(format!("of={}", to.display()));
                dd
            }),
            _ => self.by(|| Ok(Box::new(Rsync::start(Mode::WholeSynced, &self.dir, place)?))),
        }
    }

    fn send(&self, site: &Site, sender: &Sender<'_>) -> Result<Carried> {
        rustix::fs::sync();
        site.forget_peak();
        let before = site.cost();
        let outcome = sender.begin(&self.image, &[])?.finish(PATIENCE)?;
        let after = site.cost();
        must_be_same(&self.image, &site.image(&file_name(&self.image)))?;
        Ok(Carried {
            seconds: outcome.seconds,
            cpu_seconds: outcome.cost.cpu_seconds + after.cpu_seconds - before.cpu_seconds,
            peaks: Some((outcome.cost.peak_rss_bytes, after.peak_rss_bytes)),
            sent: outcome.images.into_iter().next(),
        })
    }

    fn by<'a>(
        &self,
        start: impl FnOnce() -> Result<Box<dyn Carrier + 'a>>,
    ) -> Result<Vec<Carried>> {
        rustix::fs::sync();
        let before = cpu_of_children();
        let mut carrier = start()?;
        let seconds = carrier.carry(&self.image, None)?;
        // Before it is shut down, which removes the far end's files.
        must_be_same(&self.image, &carrier.delivered(&self.image))?;
        std::thread::sleep(REST);
        drop(carrier);
        let cpu_seconds = cpu_of_children() - before;
        Ok(vec![Carried {
            seconds,
            cpu_seconds,
            ..Carried::default()
        }])
    }

    fn copied(&self, command: impl FnOnce(&Path) -> Command) -> Result<Vec<Carried>> {
        rustix::fs::sync();
        let to = self.dir.join("copy");
        let (before, started) = (cpu_of_children(), Instant::now());
        shell::run(&mut command(&to)).context("a plain copy")?;
        let seconds = started.elapsed().as_secs_f64();
        let cpu_seconds = cpu_of_children() - before;
        must_be_same(&self.image, &to)?;
        Ok(vec![Carried {
            seconds,
            cpu_seconds,
            ..Carried::default()
        }])
    }
}
