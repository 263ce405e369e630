//! A flock that the nodes of one site send to the nodes of another, each pair over a link of its own (`vmflock` §3.3 and figure 3 of
//! its issue): how the time falls with the pairs, what is sent twice, and what a node that dies costs.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use drover_core::BLOCK_SIZE_U64;
use drover_store::testing::PostgresServer;

use super::lines::{Line, line};
use super::mover::key;
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::files::identical;
use crate::link::{Link, Options, Side};
use crate::setup::Lab;
use crate::shell;
use crate::site::{Outcome, Sender, Sending, Site, Where};

const MIB: f64 = (1u64 << 20) as f64;
/// The link of each pair.
const LINE: Line = line(50.0, 40.0, 0.0);
/// Timeout of a run: nodes that die are waited for, and then their images are sent.
const DEADLINE: Duration = Duration::from_secs(900);
/// Polling interval for the halfway point.
const LOOK: Duration = Duration::from_millis(5);
/// Images of the flock.
const IMAGES: u64 = 8;

const TIMES_LINEAR: &str = "times_linear";
const TWICE: &str = "twice_percent";
const NODE_MIB: &str = "node_mib";

const NOTHING: &str = "nothing";
const KILL: &str = "a node of each site is killed half way";

pub const EXPERIMENT: Experiment = Experiment {
    name: "nodes",
    title: "A flock between the nodes of two sites",
    text: "Eight images of 190 MiB that do not compress, 160 MiB of each in all of them, are sent as one job by the nodes of one site to as many nodes of another, each pair over a link of its own; each site has a PostgreSQL database and a directory of images that its nodes share. \
The nodes that receive reach each other without a link. *Times linear* is the time of one pair over the time, divided by the pairs. *Sent twice* is what was sent beyond each different block once, as a share of that: by drover's own count of blocks; with nodes that are killed, by the \
bytes on the links beyond those of the same pairs undisturbed. Half way, a node of each site is killed (SIGKILL), of different pairs, and does not come back: the others learn that by the end of its term, 30 s. *Node* is the largest peak memory of a node. All images are compared with their originals.",
    columns: &[
        Column::label("pairs", "pairs"),
        Column::label("what", "what happens"),
        Column::label("link", "link of each"),
        Column::figure(key::DATA, "MB that differ", 1),
        Column::figure(key::BYTES, "MB on the links", 1),
        Column::figure(key::SECONDS, "seconds", 1),
        Column::optional(TIMES_LINEAR, "times linear", 2),
        Column::figure(TWICE, "sent twice %", 2),
        Column::figure(NODE_MIB, "node MiB", 1),
    ],
    cases: |lab| {
        let case = |line: Line| {
            let what = format!(
                "a flock between 1, 2 and 4 pairs of nodes, {} each",
                line.describe()
            );
            Case::new(line.slug(), what, 0, &[Need::Link])
        };
        // Of the small set it is left out: it starts a PostgreSQL server and four nodes.
        Ok(lab.either(vec![case(LINE)], Vec::new()))
    },
    run: |lab, _| run(lab),
};

/// What is measured: pairs, and whether nodes are killed.
const RUNS: [(usize, bool); 5] = [(1, false), (2, false), (4, false), (2, true), (4, true)];

/// MiB that all images have, and of its own that each has.
const COMMON: u64 = 160;
const OWN: u64 = 30;

/// What a run has shown.
struct Done {
    outcome: Outcome,
    /// Bytes on the links, both ways.
    bytes: u64,
    node_mib: f64,
}

fn run(lab: &Lab) -> Result<Vec<Row>> {
    let label = |(pairs, killed): &(usize, bool)| {
        Row::new([
            ("pairs", pairs.to_string()),
            ("what", if *killed { KILL } else { NOTHING }.to_owned()),
            ("link", LINE.describe()),
        ])
    };
    let all = |verdict: &Verdict| {
        RUNS.iter()
            .map(|of| label(of).but(verdict.clone()))
            .collect()
    };
    let Some(server) = PostgresServer::start() else {
        let why = "PostgreSQL is not installed".to_owned();
        return Ok(all(&Verdict::Skipped(why)));
    };
    let work = lab.work("nodes")?;
    let flock = Flock::make(&work.join("origin"), COMMON, OWN)?;
    let (mut alone, mut undisturbed, mut rows) = (None, Vec::new(), Vec::new());
    for of in RUNS {
        let (pairs, killed) = of;
        let mut row = label(&of);
        let dir = work.join("run");
        let done = Cluster::start(lab, &server, &flock, &dir, pairs)
            .and_then(|cluster| cluster.send(&flock, killed));
        let done = match done {
            Ok(done) => done,
            Err(error) if format!("{error:#}").contains("feature `postgres`") => {
                let why = "this drover was built without the feature postgres".to_owned();
                return Ok(all(&Verdict::Skipped(why)));
            }
            Err(error) => {
                rows.push(row.but(Verdict::failed(&error)));
                continue;
            }
        };
        fs::remove_dir_all(&dir)?;
        let seconds = done.outcome.seconds;
        eprintln!("  {pairs} pairs, {}: {seconds:.1} s", row.label("what"));
        if pairs == 1 {
            alone = Some(seconds);
        }
        let sent: u64 = done
            .outcome
            .images
            .iter()
            .map(|image| image.sent_blocks)
            .sum();
        let beyond = match killed {
            false => {
                undisturbed.push((pairs, done.bytes));
                Some((sent * BLOCK_SIZE_U64) as f64 - flock.unique as f64)
            }
            true => {
                let before = undisturbed.iter().find(|(of, _)| *of == pairs);
                before.map(|(_, bytes)| done.bytes as f64 - *bytes as f64)
            }
        };
        row.set(key::DATA, flock.unique as f64 / 1e6);
        row.set(key::BYTES, done.bytes as f64 / 1e6);
        row.set(key::SECONDS, seconds);
        if let Some(alone) = alone.filter(|_| !killed) {
            row.set(TIMES_LINEAR, alone / seconds / pairs as f64);
        }
        match beyond {
            Some(beyond) => row.set(TWICE, (100.0 * beyond / flock.unique as f64).max(0.0)),
            None => row = row.but(Verdict::Failed("there is no undisturbed run".into())),
        }
        row.set(NODE_MIB, done.node_mib);
        rows.push(row);
    }
    Ok(rows)
}

/// The images.
struct Flock {
    dir: PathBuf,
    images: Vec<PathBuf>,
    /// Bytes of all different blocks.
    unique: u64,
}

impl Flock {
    /// Makes them, of so many MiB that all have and so many of their own.
    fn make(dir: &Path, common: u64, own: u64) -> Result<Flock> {
        fs::create_dir_all(dir)?;
        let random = |seed: u64, mib: u64, file: &mut File| -> Result<()> {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut bytes = vec![0; 1 << 20];
            for _ in 0..mib {
                rng.fill(&mut bytes);
                file.write_all(&bytes)?;
            }
            Ok(())
        };
        let mut images = Vec::new();
        for nth in 0..IMAGES {
            let path = dir.join(format!("machine-{nth}.raw"));
            let mut file = File::create(&path)?;
            random(1, common, &mut file)?;
            random(2 + nth, own, &mut file)?;
            images.push(path);
        }
        Ok(Flock {
            dir: dir.to_owned(),
            images,
            unique: (common + IMAGES * own) << 20,
        })
    }
}

/// Both sites. The links are shut down from the last to the first, whose far end is that of all.
struct Cluster {
    drover: PathBuf,
    dir: PathBuf,
    near: Vec<Site>,
    far: Vec<Site>,
    links: Vec<Link>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.near.clear();
        self.far.clear();
        while self.links.pop().is_some() {}
    }
}

impl Cluster {
    fn start(
        lab: &Lab,
        server: &PostgresServer,
        flock: &Flock,
        dir: &Path,
        pairs: usize,
    ) -> Result<Cluster> {
        let _ = fs::remove_dir_all(dir);
        fs::create_dir_all(dir.join("shared"))?;
        // Of the nodes of an earlier run, whose database is another.
        for left in [".drover-site", ".drover-work"] {
            let left = flock.dir.join(left);
            let _ = fs::remove_dir_all(&left).or_else(|_| fs::remove_file(&left));
        }
        let line = LINE;
        let mut cluster = Cluster {
            drover: lab.binary()?,
            dir: dir.canonicalize()?,
            near: Vec::new(),
            far: Vec::new(),
            links: Vec::new(),
        };
        let options = |nth: usize| Options {
            name: format!("lab-{}-{nth}", std::process::id()),
            rtt_ms: line.rtt_ms,
            rate_mbit: line.rate_mbit,
            number: nth as u8,
            ..Options::default()
        };
        for nth in 0..pairs {
            let link = match cluster.links.first() {
                None => Link::up(&options(0))?,
                Some(first) => first.up_beside(&options(nth))?,
            };
            cluster.links.push(link);
        }
        let catalogs = [server.new_database(), server.new_database()];
        for nth in 0..pairs {
            for (side, site, images) in [
                (Side::A, "near", flock.dir.clone()),
                (Side::B, "far", cluster.dir.join("shared")),
            ] {
                let catalog = &catalogs[usize::from(side == Side::B)];
                let home = cluster.home(site, nth);
                let mut init = Command::new(&cluster.drover);
                shell::run(init.arg("init").env("DROVER_HOME", &home))?;
                let config = format!(
                    "images = {images:?}\nnode = \"{site}-{nth}\"\nname = \"{site}\"\ncatalog = {catalog:?}\n"
                );
                fs::write(home.join("config.toml"), config)?;
                if nth > 0 {
                    let key = |nth| cluster.home(site, nth).join("identity.key");
                    fs::copy(key(0), key(nth))?;
                }
                let command = cluster.command(nth, side);
                let listen = format!("{}:0", options(nth).address(side));
                let node = Site::start_by(command, &home, &listen)
                    .with_context(|| format!("node {nth} of {site}"))?;
                match side {
                    Side::A => cluster.near.push(node),
                    Side::B => cluster.far.push(node),
                }
            }
        }
        Ok(cluster)
    }

    fn home(&self, site: &str, nth: usize) -> PathBuf {
        self.dir.join(format!("{site}-{nth}"))
    }

    fn command(&self, nth: usize, side: Side) -> Command {
        self.links[nth].command(side, &self.drover.to_string_lossy())
    }

    fn bytes(&self) -> u64 {
        let of = |link: &Link| link.traffic().a_to_b.bytes_out + link.traffic().b_to_a.bytes_out;
        self.links.iter().map(of).sum()
    }

    fn send(mut self, flock: &Flock, killed: bool) -> Result<Done> {
        let first = self.links.first().context("no link")?;
        let place = Where::Over(first);
        let home = self.home("near", 0);
        let site = self.far.first().context("no node")?;
        let sender = Sender::pair(&self.drover, &home, place, site)?;
        rustix::fs::sync();
        let before = self.bytes();
        let mut sending = sender.begin_flock(&flock.images)?;
        let mut dead = Vec::new();
        if killed {
            self.wait_for(&mut sending, before + flock.unique / 2)?;
            // Not the node that the command runs at, and not of the same pair.
            dead.extend(self.near.pop());
            dead.push(self.far.remove(0));
            dead.drain(..).try_for_each(Site::kill)?;
        }
        let outcome = sending.finish(DEADLINE)?;
        let bytes = self.bytes() - before;
        for image in &flock.images {
            let name = image.file_name().context("a name")?;
            ensure!(
                identical(image, &self.dir.join("shared").join(name))?,
                "{} is not its original",
                name.display()
            );
        }
        let peaks = self.near.iter().chain(&self.far);
        let peak = peaks.map(|node| node.cost().peak_rss_bytes).max();
        Ok(Done {
            outcome,
            bytes,
            node_mib: peak.unwrap_or(0) as f64 / MIB,
        })
    }

    /// Waits until so many bytes have crossed the links.
    fn wait_for(&self, sending: &mut Sending, bytes: u64) -> Result<()> {
        let started = Instant::now();
        while self.bytes() < bytes {
            if !sending.runs() {
                bail!("it ended before it was half way");
            }
            ensure!(started.elapsed() < DEADLINE, "it never came half way");
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}
