//! Much that was written into a mount, brought back over a slow link that is cut, to a site that is killed: how long it
//! takes, what is sent twice, and whether the site is at all times at a state that the disk really had.

mod ends;
mod flow;
mod model;

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::ends::Ends;
use self::flow::Flow;
use self::model::{Differs, Model};
use super::Lab;
use super::lines::{Line, Net};
use super::mount::connect;
use crate::bench::{About, Case, Column, Experiment, Need, Plot, Row, Subject, Verdict};

const MIB: f64 = (1u64 << 20) as f64;

/// Units of the disk that are filled with noise: 3 GiB, or little.
const UNITS: u64 = 3072;
const SMALL_UNITS: u64 = 96;

/// Flushes, and how many of the rounds between them are written while the link is cut.
const ROUNDS: usize = 12;
const OFFLINE: usize = 3;

/// Cuts that the connections may well live through.
const SHORT: Duration = Duration::from_secs(3);
/// How long the mount may take to notice anything, and to bring all of it back.
const NOTICED: Duration = Duration::from_secs(180);
const BACK: Duration = Duration::from_secs(1800);
const LOOK: Duration = Duration::from_millis(200);

/// What may cross the link for a byte that was written: 3.6 % are headers (1500 for 1448), up to 3.2 % were written over
/// and may be part of two epochs, and the rest is what was on its way at a cut.
const MOST_TIMES: f64 = 1.15;
/// What the mount and the site may take of memory, in MiB, however much is dirty.
const MOST_MIB: f64 = 512.0;

/// The experiment.
pub struct Push;

static ABOUT: About = About {
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
};

const LINE: Line = Line {
    rate_mbit: 100.0,
    rtt_ms: 10.0,
    loss_percent: 0.0,
};

impl Experiment for Push {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let size = if lab.small { "96 MiB" } else { "3 GiB" };
        Ok(vec![Case {
            id: LINE.slug(),
            what: format!("{size} brought back over {}", LINE.describe()),
            seconds: if lab.small { 45.0 } else { 540.0 },
            rank: if lab.small { 1 } else { 2 },
            subject: Subject::Drover,
            needs: &[Need::Link],
        }])
    }

    fn run(&self, lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
        let mut row = Row::new([("link", LINE.describe())]);
        if let Err(error) = measure(lab, &mut row) {
            row.verdict = match error.downcast_ref::<Differs>() {
                Some(_) => Verdict::Wrong(format!("{error:#}")),
                None => Verdict::Failed(format!("{error:#}")),
            };
        }
        Ok(vec![row])
    }

    fn plots(&self, _rows: &[Row]) -> Vec<Plot> {
        Vec::new()
    }
}

fn measure(lab: &Lab, row: &mut Row) -> Result<()> {
    let work = lab.work("push")?;
    let model = Model::new(if lab.small { SMALL_UNITS } else { UNITS });
    let net = Net::like(Some(LINE), 1)?;
    let mut run = Run {
        ends: Ends::start(&net, &lab.binary()?, &work.join("push"), model.size())?,
        flow: Flow::new(),
        model: &model,
        net: &net,
        small: lab.small,
    };
    let flow = Flow::clone(&run.flow);
    let (figures, (stall, resumed)) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| flow.watch(&net));
        let figures = run.go();
        flow.end();
        let seen = watcher.join();
        let seen = seen.map_err(|_| anyhow::anyhow!("the link's watcher panicked"))?;
        anyhow::Ok((figures?, seen?))
    })?;
    let state = *figures.state.end();
    row.set("dirty_mib", model.dirty() as f64 / MIB);
    row.set("written_mib_s", figures.written_mib_s);
    row.set("seconds", figures.seconds);
    row.set("away_s", figures.away.as_secs_f64());
    row.set("sent_mb", figures.sent as f64 / 1e6);
    let times = figures.sent as f64 / model.dirty() as f64;
    row.set("times", times);
    row.set("stall_s", stall.as_secs_f64());
    row.set("resumed_s", resumed.as_secs_f64());
    let peaks = [figures.mount_mib, figures.site_mib];
    row.set("mount_mib", peaks[0]);
    row.set("site_mib", peaks[1]);
    row.set("state", state as f64);
    row.set("writes", model.count() as f64);
    if times > MOST_TIMES {
        bail!(
            "{times:.3} bytes were sent for each that was written; at most {MOST_TIMES} should be"
        );
    }
    if let Some(peak) = peaks.into_iter().find(|peak| *peak > MOST_MIB) {
        bail!("an end took {peak:.0} MiB of memory; at most {MOST_MIB} should be");
    }
    Ok(())
}

/// What a run measured.
struct Figures {
    written_mib_s: f64,
    seconds: f64,
    away: Duration,
    sent: u64,
    mount_mib: f64,
    site_mib: f64,
    /// Writes of which the site had all and nothing else when it was killed.
    state: RangeInclusive<u64>,
}

struct Run<'a> {
    ends: Ends<'a>,
    flow: Flow,
    model: &'a Model,
    net: &'a Net,
    small: bool,
}

impl Run<'_> {
    fn go(&mut self) -> Result<Figures> {
        let mut shown = self.ends.mount()?;
        let mut client = connect(&mut shown)?;
        let watch = crate::watch::Watch::start(shown.process());
        let before = self.net.bytes()?;
        let started = Instant::now();
        let mut write = |rounds: std::ops::Range<usize>| -> Result<()> {
            for round in rounds {
                let writes = self.model.count();
                let number = |round: usize| writes * round as u64 / ROUNDS as u64;
                for n in number(round) + 1..=number(round + 1) {
                    let (at, data) = self.model.write(n);
                    client.write(at, &data)?;
                }
                client.flush()?;
            }
            Ok(())
        };
        write(0..ROUNDS - OFFLINE)?;
        let written = self.model.bytes() as f64 * (ROUNDS - OFFLINE) as f64 / ROUNDS as f64;
        let written_mib_s = written / MIB / started.elapsed().as_secs_f64();
        self.say("written with the link", started);
        let mut away = Duration::ZERO;

        self.wait_for(before, 0.15)?;
        away += self.cut(started, || write(ROUNDS - OFFLINE..ROUNDS))?;
        self.wait_for(before, 0.35)?;
        away += self.cut_shortly(started)?;
        self.wait_for(before, 0.5)?;
        let (state, gone) = self.kill(started)?;
        away += gone;
        self.wait_for(before, 0.65)?;
        away += self.cut_shortly(started)?;
        self.wait_for(before, 0.85)?;
        away += self.cut(started, || Ok(()))?;
        self.until("nothing is dirty", BACK, |disk| disk["dirty"] == 0)?;
        let seconds = started.elapsed().as_secs_f64();
        self.flow.away();
        self.say("nothing is dirty", started);

        client.flush()?;
        drop(client);
        let mount_mib = watch.cost().peak_rss_bytes as f64 / MIB;
        let (sent, _) = self.net.since(before)?.context("no link")?;
        self.ends.unmount(shown)?;
        let whole = self.ends.merged()?;
        let all = self.model.count();
        let there = self.model.state_of(&whole, all)?;
        if *there.start() != all {
            return Err(Differs(format!("the last of {all} writes is not at the site")).into());
        }
        Ok(Figures {
            written_mib_s,
            seconds,
            away,
            sent,
            mount_mib,
            site_mib: self.ends.site_peak() as f64 / MIB,
            state,
        })
    }

    fn say(&self, what: &str, started: Instant) {
        eprintln!("  {:6.1} s: {what}", started.elapsed().as_secs_f64());
    }

    /// Waits until this share of what is dirty has been sent; no longer than there is something to send.
    fn wait_for(&self, before: Option<(u64, u64)>, share: f64) -> Result<()> {
        let bytes = (share * self.model.dirty() as f64) as u64;
        let sent = || anyhow::Ok(self.net.since(before)?.context("no link")?.0);
        self.until("bytes flow", BACK, |disk| {
            sent().is_ok_and(|sent| sent >= bytes) || disk["dirty"] == 0
        })
    }

    /// Cuts the link, does something, and heals it when the mount has noticed that the site is gone.
    fn cut(&self, started: Instant, meanwhile: impl FnOnce() -> Result<()>) -> Result<Duration> {
        let link = self.net.link().context("no link to cut")?;
        let cut = Instant::now();
        self.flow.away();
        link.cut()?;
        self.say("the link is cut", started);
        meanwhile()?;
        if !self.small {
            self.until_it_fails()?;
        }
        std::thread::sleep(SHORT.saturating_sub(cut.elapsed()));
        link.heal()?;
        self.flow.back();
        self.say("the link is healed", started);
        Ok(cut.elapsed())
    }

    fn cut_shortly(&self, started: Instant) -> Result<Duration> {
        let link = self.net.link().context("no link to cut")?;
        self.flow.away();
        link.cut()?;
        std::thread::sleep(SHORT);
        link.heal()?;
        self.flow.back();
        self.say("the link was cut shortly", started);
        Ok(SHORT)
    }

    /// Kills the site once an epoch counts, looks at what it has, and starts it again.
    fn kill(&mut self, started: Instant) -> Result<(RangeInclusive<u64>, Duration)> {
        self.until("an epoch counts", BACK, |disk| disk["epoch"] != 0)?;
        if self.ends.disk()?["dirty"] == 0 {
            bail!("all was pushed before the site could be killed: write more");
        }
        let gone = Instant::now();
        self.flow.away();
        self.ends.kill()?;
        self.say("the site is killed", started);
        self.until_it_fails()?;
        let state = self
            .model
            .state_of(&self.ends.merged_copy()?, self.model.count())
            .context("the site when it was killed")?;
        self.say(&format!("it had writes up to {}", state.end()), started);
        if *state.end() == 0 {
            return Err(Differs("an epoch counted, and the site has none of it".into()).into());
        }
        self.ends.remove_copy()?;
        self.ends.back()?;
        self.flow.back();
        self.say("the site is back", started);
        Ok((state, gone.elapsed()))
    }

    /// Waits until the mount says of itself that pushes fail, why, and that there is no link.
    fn until_it_fails(&self) -> Result<()> {
        self.until(
            "the mount says that pushes fail, and why",
            NOTICED,
            |disk| {
                let why = disk["push_error"].as_str().unwrap_or_default();
                disk["push_failures"].as_u64() > Some(0)
                    && !why.is_empty()
                    && disk["link"] != "up"
                    && disk["dirty"].as_u64() > Some(0)
            },
        )
    }

    fn until(
        &self,
        what: &str,
        patience: Duration,
        mut is: impl FnMut(&serde_json::Value) -> bool,
    ) -> Result<()> {
        let started = Instant::now();
        loop {
            let disk = self.ends.disk()?;
            if is(&disk) {
                return Ok(());
            }
            if started.elapsed() > patience {
                bail!("it did not come to this: {what}; the mount says {disk}");
            }
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::model::{BLOCK, UNIT};
    use super::*;

    #[test]
    fn little_is_written_over() {
        for units in [UNITS, SMALL_UNITS] {
            let model = Model::new(units);
            let over = model.bytes() as f64 / model.dirty() as f64;
            assert!(over > 1.02 && over < 1.05, "{over}");
            assert_eq!(model.size() % UNIT, 0);
            assert!(model.dirty().is_multiple_of(BLOCK) && model.dirty() < model.size());
        }
    }
}
