//! Pushes much dirty data of a mount over a slow link that is cut repeatedly, to a site that is killed: duration,
//! retransmissions, and whether the site is always in a state that the disk really had.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use super::client::connect;
use super::lines::{Line, Net, line};
use super::model::{Differs, Model};
use super::shows::{NAME, Shown};
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::setup::Lab;
use crate::shell;
use crate::site::{Sender, Site};
use crate::watch::Watch;

const MIB: f64 = (1u64 << 20) as f64;
/// Units of the disk that are filled with random data: 3 GiB in a full run.
pub const UNITS: u64 = 3072;
pub const SMALL_UNITS: u64 = 96;
/// Number of flushes, and of the rounds between them that are written while the link is cut.
const ROUNDS: u64 = 12;
const OFFLINE: u64 = 3;
/// Duration of cuts that connections may survive.
const SHORT: Duration = Duration::from_secs(3);
/// Timeouts for the mount to notice an event, and to push everything.
const NOTICED: Duration = Duration::from_secs(180);
const BACK: Duration = Duration::from_secs(1800);
const LOOK: Duration = Duration::from_millis(200);
/// Timeout in seconds of an unmount and a merge.
const LIMIT: &str = "900";
/// Fixed port of the site, so that it can restart at the same address: the far end has its own network namespace.
const PORT: u16 = 7377;
/// Upper bound on bytes on the link per byte written: 3.6 % are headers (1500 for 1448), up to 3.2 % were overwritten
/// and may be part of two epochs, and the rest was in flight at a cut.
const MAX_TIMES: f64 = 1.15;
/// Upper bound on the memory of the mount and of the site, in MiB, independent of dirty data.
const MAX_MIB: f64 = 512.0;
/// Sampling interval of the link, and the bytes per interval below which no data is flowing.
const EVERY: Duration = Duration::from_millis(500);
const LITTLE: u64 = 16 << 10;
const LINE: Line = line(100.0, 10.0, 0.0);

pub const EXPERIMENT: Experiment = Experiment {
    name: "push",
    title: "Bringing back much that was written, over cuts and a crash of the site",
    text: "A managed mount of an empty disk (NBD, a push every second), into which one client writes 3 GiB of noise as fast as it goes: \
units of 1 MiB in a scattered order, each numbered; some are written over later, and a block of 4 KiB in each of 32 more regions again and again. It flushes \
12 times. The first three quarters are written while the link is up; at 15 % of the bytes it is cut, and the rest is written without it. Then it is cut at 35 and 65 % for \
3 s, and at 85 % until the mount says that the site is gone. At half, and not before an epoch counts, the site is killed (SIGKILL); what it has then is copied, the \
mount's right to write is broken in the copy, and its changes merged into a new image: each position must hold what the same prefix of all writes left there (*state at the kill*: up to which \
write, of how many). While the site is away `mounts --json` must say that pushes fail and why. When nothing is dirty any more the client flushes, the mount ends, and what the \
site's own merge makes is compared with the model. *Dirty* is each position once; *sent* are IP bytes to the site, both ends' handshakes included; *times* more than 1.15, or more than 512 MiB of memory, is a failure. \
*Away* is how long the link was cut or the site gone, *taken up after* the longest time from then until bytes flowed again, and *stall* the longest in which none did (less than 32 KiB a second) \
while both were there, commits included. With `--small` it is 96 MiB, and all cuts are short.",
    columns: &[
        Column::label("link", "link"),
        Column::figure("dirty_mib", "dirty, MiB", 0),
        Column::figure("written_mib_s", "written, MiB/s", 0),
        Column::figure("seconds", "seconds", 1),
        Column::figure("away_s", "away, s", 1),
        Column::figure("sent_mb", "sent, MB", 1),
        Column::figure("times", "times", 3),
        Column::figure("resumed_s", "taken up after, s", 1),
        Column::figure("stall_s", "stall, s", 1),
        Column::figure("mount_mib", "mount's memory, MiB", 0),
        Column::figure("site_mib", "site's memory, MiB", 0),
        Column::figure("state", "state at the kill", 0),
        Column::figure("writes", "of writes", 0),
    ],
    cases: |_| {
        Ok(vec![Case::new(
            LINE.slug(),
            format!("much brought back over {}", LINE.describe()),
            1,
            &[Need::Link],
        )])
    },
    run,
};

fn run(lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
    let mut row = Row::new([("link", LINE.describe())]);
    if let Err(error) = measure(lab, &mut row) {
        row.verdict = match error.downcast_ref::<Differs>() {
            Some(_) => Verdict::Wrong(format!("{error:#}")),
            None => Verdict::failed(&error),
        };
    }
    Ok(vec![row])
}

fn measure(lab: &Lab, row: &mut Row) -> Result<()> {
    let work = lab.work("push")?;
    let model = Model::new(lab.either(UNITS, SMALL_UNITS));
    let net = Net::like(Some(LINE), 1)?;
    let flow = Flow(Mutex::new(Can::Not));
    let dir = work.join("push");
    let run = Run::start(lab, &net, &dir, &flow, &model)?;
    let (stall, resumed) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| flow.watch(&net));
        let done = run.go(row);
        flow.set(Can::Ended);
        let seen = watcher
            .join()
            .map_err(|_| anyhow!("the link's watcher panicked"))?;
        done.and(seen)
    })?;
    row.set("stall_s", stall.as_secs_f64());
    row.set("resumed_s", resumed.as_secs_f64());
    let times = row.value("times").unwrap_or(f64::INFINITY);
    if times > MAX_TIMES {
        bail!(
            "{times:.3} bytes were sent for each that was written; at most {MAX_TIMES} should be"
        );
    }
    let peak = ["mount_mib", "site_mib"]
        .into_iter()
        .filter_map(|key| row.value(key))
        .fold(0.0, f64::max);
    if peak > MAX_MIB {
        bail!("an end took {peak:.0} MiB of memory; at most {MAX_MIB} should be");
    }
    Ok(())
}

/// Both ends: a site that can be killed and restarted, and a mount of its only image.
struct Run<'a> {
    net: &'a Net,
    drover: PathBuf,
    dir: PathBuf,
    site: Mutex<Option<Site>>,
    flow: &'a Flow,
    model: &'a Model,
    small: bool,
    started: Instant,
}

impl<'a> Run<'a> {
    /// Starts a site with an empty image, and a home that is paired with it.
    fn start(
        lab: &Lab,
        net: &'a Net,
        dir: &Path,
        flow: &'a Flow,
        model: &'a Model,
    ) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let run = Self {
            net,
            drover: lab.binary()?,
            dir: dir.canonicalize()?,
            site: Mutex::new(None),
            flow,
            model,
            small: lab.small,
            started: Instant::now(),
        };
        let image = run.dir.join(NAME);
        File::create(&image)?.set_len(model.size())?;
        let site = run.site()?;
        run.far("far", &["index", &*image.to_string_lossy()])?;
        Sender::pair(&run.drover, &run.dir.join("near"), net.place(), &site)?;
        *run.there() = Some(site);
        Ok(run)
    }

    fn there(&self) -> std::sync::MutexGuard<'_, Option<Site>> {
        self.site.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn site(&self) -> Result<Site> {
        let site = Site::start_on(&self.drover, &self.dir.join("far"), self.net.place(), PORT);
        site.context("the site does not come up")
    }

    fn go(&self, row: &mut Row) -> Result<()> {
        let mut shown = self.mount()?;
        let mut client = connect(&mut shown)?;
        let watch = Watch::start(shown.process());
        let (before, started) = (self.net.bytes(), Instant::now());
        let writes = self.model.count();
        let mut write = |rounds: std::ops::Range<u64>| -> Result<()> {
            for round in rounds {
                for n in writes * round / ROUNDS + 1..=writes * (round + 1) / ROUNDS {
                    let (at, data) = self.model.write(n);
                    client.write(at, &data)?;
                }
                client.flush()?;
            }
            Ok(())
        };
        write(0..ROUNDS - OFFLINE)?;
        let written = self.model.bytes() as f64 * (ROUNDS - OFFLINE) as f64 / ROUNDS as f64;
        row.set(
            "written_mib_s",
            written / MIB / started.elapsed().as_secs_f64(),
        );
        self.say("written with the link");
        // Waits until this share of the dirty data has been sent, or there is nothing left to send.
        let wait_for = |share: f64| {
            let bytes = (share * self.model.dirty() as f64) as u64;
            self.until("bytes flow", BACK, |disk| {
                self.net
                    .since(before)
                    .is_some_and(|(sent, _)| sent >= bytes)
                    || disk["dirty"] == 0
            })
        };
        wait_for(0.15)?;
        let mut away = self.cut(false, || write(ROUNDS - OFFLINE..ROUNDS))?;
        wait_for(0.35)?;
        away += self.cut(true, || Ok(()))?;
        wait_for(0.5)?;
        let (peak, state, gone) = self.kill()?;
        away += gone;
        wait_for(0.65)?;
        away += self.cut(true, || Ok(()))?;
        wait_for(0.85)?;
        away += self.cut(false, || Ok(()))?;
        self.until("nothing is dirty", BACK, |disk| disk["dirty"] == 0)?;
        row.set("seconds", started.elapsed().as_secs_f64());
        self.flow.set(Can::Not);
        self.say("nothing is dirty");

        client.flush()?;
        drop(client);
        let (sent, _) = self.net.since(before).context("no link")?;
        let site_peak = self
            .there()
            .as_ref()
            .map_or(0, |site| site.cost().peak_rss_bytes);
        row.set("mount_mib", watch.cost().peak_rss_bytes as f64 / MIB);
        row.set("site_mib", site_peak.max(peak) as f64 / MIB);
        row.set("dirty_mib", self.model.dirty() as f64 / MIB);
        row.set("away_s", away.as_secs_f64());
        row.set("sent_mb", sent as f64 / 1e6);
        row.set("times", sent as f64 / self.model.dirty() as f64);
        row.set("state", state as f64);
        row.set("writes", writes as f64);
        shell::run(self.near("unmount").arg(shown.socket()))?;
        drop(shown);
        let there = self.model.state_of(&self.merged("far")?, writes)?;
        if *there.start() != writes {
            return Err(Differs(format!("the last of {writes} writes is not at the site")).into());
        }
        Ok(())
    }

    fn say(&self, what: &str) {
        eprintln!("  {:6.1} s: {what}", self.started.elapsed().as_secs_f64());
    }

    /// Cuts the link, runs `meanwhile`, and heals the link after a short time or when the mount reports that the site
    /// is unreachable.
    fn cut(&self, shortly: bool, meanwhile: impl FnOnce() -> Result<()>) -> Result<Duration> {
        let link = self.net.link().context("no link to cut")?;
        let cut = Instant::now();
        self.flow.set(Can::Not);
        link.cut();
        self.say("the link is cut");
        meanwhile()?;
        if !shortly && !self.small {
            self.until_it_fails()?;
        }
        std::thread::sleep(SHORT.saturating_sub(cut.elapsed()));
        link.heal();
        self.flow.set(Can::Since(Instant::now()));
        self.say("the link is healed");
        Ok(cut.elapsed())
    }

    /// Kills the site after a commit, determines the state it has, and restarts it; returns its peak memory, the last
    /// write it has, and the downtime.
    fn kill(&self) -> Result<(u64, u64, Duration)> {
        self.until("an epoch counts", BACK, |disk| disk["epoch"] != 0)?;
        if self.disk()?["dirty"] == 0 {
            bail!("all was pushed before the site could be killed: write more");
        }
        let gone = Instant::now();
        self.flow.set(Can::Not);
        let site = self.there().take().context("no site to kill")?;
        let peak = site.cost().peak_rss_bytes;
        site.kill()?;
        self.say("the site is killed");
        self.until_it_fails()?;
        // Another mount holds the write lease; the copy of the home is not running.
        let copy = self.dir.join("copy");
        let mut cp = Command::new("cp");
        cp.args(["-a", "--sparse=always", "--reflink=auto"])
            .arg(self.dir.join("far"));
        shell::run(cp.arg(&copy))?;
        self.far("copy", &["mounts", "break", NAME, "--yes"])?;
        let state = self
            .model
            .state_of(&self.merged("copy")?, self.model.count());
        let state = *state.context("the site when it was killed")?.end();
        self.say(&format!("it had writes up to {state}"));
        if state == 0 {
            return Err(Differs("an epoch counted, and the site has none of it".into()).into());
        }
        std::fs::remove_dir_all(copy)?;
        *self.there() = Some(self.site()?);
        self.flow.set(Can::Since(Instant::now()));
        self.say("the site is back");
        Ok((peak, state, gone.elapsed()))
    }

    /// Waits until the mount reports failed pushes, their error, and that the link is down.
    fn until_it_fails(&self) -> Result<()> {
        self.until(
            "the mount says that pushes fail, and why",
            NOTICED,
            |disk| {
                disk["push_failures"].as_u64() > Some(0)
                    && disk["push_error"]
                        .as_str()
                        .is_some_and(|why| !why.is_empty())
                    && disk["link"] != "up"
                    && disk["dirty"].as_u64() > Some(0)
            },
        )
    }

    fn until(&self, what: &str, patience: Duration, is: impl Fn(&Value) -> bool) -> Result<()> {
        let started = Instant::now();
        loop {
            let disk = self.disk()?;
            if is(&disk) {
                return Ok(());
            }
            if started.elapsed() > patience {
                bail!("it did not come to this: {what}; the mount says {disk}");
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Mounts the site's image.
    fn mount(&self) -> Result<Shown> {
        let (socket, said) = (self.dir.join("near.sock"), self.dir.join("near.log"));
        let mut export = self.net.place().near(&self.drover);
        export
            .arg("export")
            .arg(format!("far:{NAME}"))
            .arg("--nbd")
            .arg(format!("unix:{}", socket.display()));
        export
            .args(["--push-interval", "1s"])
            .env("DROVER_HOME", self.dir.join("near"));
        export
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&said)?);
        Ok(Shown::new(
            export.spawn().context("drover export")?,
            socket,
            said,
        ))
    }

    /// The status of the mount's disk.
    fn disk(&self) -> Result<Value> {
        let said = shell::run(self.near("mounts").arg("--json"))?.stdout;
        let mount: Value = serde_json::from_slice(&said).context("drover mounts --json")?;
        Ok(mount["disks"][0].clone())
    }

    /// Merges the image and its changes in a home at the far end.
    fn merged(&self, home: &str) -> Result<PathBuf> {
        self.far(home, &["changes", "merge", NAME, "--as", "whole.raw"])?;
        Ok(self.dir.join(home).join("images/whole.raw"))
    }

    fn near(&self, command: &str) -> Command {
        let mut near = self.net.place().near(Path::new("timeout"));
        near.arg(LIMIT)
            .arg(&self.drover)
            .arg(command)
            .env("DROVER_HOME", self.dir.join("near"));
        near
    }

    fn far(&self, home: &str, args: &[&str]) -> Result<()> {
        let mut far = self.net.place().far(Path::new("timeout"));
        far.arg(LIMIT).arg(&self.drover).args(args);
        shell::run(far.env("DROVER_HOME", self.dir.join(home))).map(drop)
    }
}

/// Whether data should be flowing over the link.
#[derive(Clone, Copy)]
enum Can {
    /// No: the link or the site is down, or there is nothing to send.
    Not,
    /// Yes, since then, but none has flowed yet.
    Since(Instant),
    /// Yes, and last seen flowing then.
    Flows(Instant),
    Ended,
}

/// The state of the link, shared by the thread that cuts it and the one that samples it.
struct Flow(Mutex<Can>);

impl Flow {
    fn set(&self, can: Can) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = can;
    }

    /// Samples until the end; returns the longest time without data while the link was up, and the longest time to
    /// resume after a cut.
    fn watch(&self, net: &Net) -> Result<(Duration, Duration)> {
        let mut longest = (Duration::ZERO, Duration::ZERO);
        let sent = || anyhow::Ok(net.bytes().context("no link")?.0);
        let (mut last, mut began) = (sent()?, false);
        loop {
            std::thread::sleep(EVERY);
            let (sent, now) = (sent()?, Instant::now());
            let flows = sent - std::mem::replace(&mut last, sent) > LITTLE;
            let mut can = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match *can {
                Can::Ended => return Ok(longest),
                Can::Since(then) if flows => longest.1 = longest.1.max(now - then),
                Can::Flows(then) => longest.0 = longest.0.max((now - then).saturating_sub(EVERY)),
                _ => {}
            }
            // The first data of all is not a resumption.
            if flows && !(began && matches!(*can, Can::Not)) {
                *can = Can::Flows(now);
                began = true;
            }
        }
    }
}
