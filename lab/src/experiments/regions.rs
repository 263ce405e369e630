//! Memory regions that move to another process while they are written.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::frontends::example;
use super::lines::{Line, Net, line};
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::link::Side;
use crate::setup::Lab;

const PORT: u16 = 7440;

pub const EXPERIMENT: Experiment = Experiment {
    name: "regions",
    title: "Memory that moves while it is written",
    text: "`move_region`, an example of `drover-migrate`: a userfaultfd region of noise moves to another process at the other end of a link, with the options' \
defaults (a pause of 200 ms is aimed at, the rest follows). Until the pause a thread writes pages of 4 KiB at random places, as fast as the row says, and the time \
to one page each millisecond; both go on at the other end, where another thread reads a page each millisecond. *Pause* is from before the program is told to stop until the process it leaves knows that it runs \
there, *gap* from the last time in the memory until the program reads it there, by one clock: the latter is what a client sees. *Whole* is until nothing is left behind. \
*Behind* followed after the hand-over, of which *asked* was waited for; *wait* is how long the reads took there. *Sent* is over all rounds, packed. Every page is compared with what was written \
last. The authors of silo and drafter, r3map's successors, state less than 100 ms in a LAN and about 500 ms between continents.",
    columns: &[
        Column::label("link", "link"),
        Column::figure("mib", "MiB", 0),
        Column::figure("mb_s", "written, MB/s", 0),
        Column::figure("gap_ms", "gap, ms", 1),
        Column::figure("pause_ms", "pause, ms", 1),
        Column::figure("whole_s", "whole, s", 1),
        Column::figure("rounds", "rounds", 0),
        Column::figure("sent_mib", "sent, MiB", 0),
        Column::figure("behind_mib", "behind, MiB", 1),
        Column::figure("asked_mib", "asked, MiB", 1),
        Column::figure("wait_p99_ms", "wait p99, ms", 1),
        Column::figure("wait_longest_ms", "longest, ms", 1),
    ],
    cases,
    run,
};

/// Links, sizes in MiB and rates of writing in MB/s, the most important first.
fn settings() -> Vec<(Line, u64, u32, u8)> {
    let mut all = Vec::new();
    for (rate, rtts) in [(1000.0, [0.0, 10.0, 40.0]), (100.0, [0.0, 10.0, 40.0])] {
        for rtt in rtts {
            for mib in [64, 256, 1024] {
                for mb_s in [0, 10, 100] {
                    let is_long = mib == 1024 && rate < 1000.0;
                    let rank = match (mib, is_long) {
                        (64, _) => 0,
                        (_, false) => 1,
                        (_, true) => 2,
                    };
                    all.push((line(rate, rtt, 0.0), mib, mb_s, rank));
                }
            }
        }
    }
    all
}

fn id(line: Line, mib: u64, mb_s: u32) -> String {
    format!("{}-{mib}mib-{mb_s}mbs", line.slug())
}

fn cases(lab: &Lab) -> Result<Vec<Case>> {
    let all = settings()
        .into_iter()
        .filter(|(line, mib, ..)| !lab.small || (line.rtt_ms == 10.0 && *mib == 64));
    let case = |(line, mib, mb_s, rank): (Line, u64, u32, u8)| {
        let what = format!("{mib} MiB, {mb_s} MB/s written, over {}", line.describe());
        Case::new(id(line, mib, mb_s), what, rank, &[Need::Link])
    };
    Ok(all.map(case).collect())
}

/// What the process says that the region leaves.
#[derive(Deserialize)]
struct Left {
    pause_ms: f64,
    behind: f64,
    asked: f64,
    rounds: f64,
    packed: f64,
    whole_s: f64,
}

/// What the other one says.
#[derive(Deserialize)]
struct Taken {
    gap_ms: f64,
    wait_p99_ms: f64,
    wait_longest_ms: f64,
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let setting = settings()
        .into_iter()
        .find(|(line, mib, mb_s, _)| id(*line, *mib, *mb_s) == case.id);
    let (line, mib, mb_s, _) = setting.context("no such case")?;
    let mut row = Row::new([("link", line.describe())]);
    row.set("mib", mib as f64);
    row.set("mb_s", mb_s.into());
    let program = match example(lab, "move_region") {
        Ok(program) => program,
        Err(error) => return Ok(vec![row.but(Verdict::Skipped(format!("{error:#}")))]),
    };
    // A move takes seconds: over the slow link one has to be enough.
    let times = match line.rate_mbit < 1000.0 || mib > 64 {
        true => 1,
        false => lab.repeat.max(1),
    };
    let mut runs = Vec::new();
    for _ in 0..times {
        runs.push(one(lab, &program, line, mib, mb_s)?);
    }
    let mut set = |key: &str, value: &dyn Fn(&(Left, Taken)) -> f64| {
        let values: Vec<f64> = runs.iter().map(value).collect();
        row.set_all(key, &values);
    };
    const MIB: f64 = (1u64 << 20) as f64;
    set("gap_ms", &|(_, taken)| taken.gap_ms);
    set("pause_ms", &|(left, _)| left.pause_ms);
    set("whole_s", &|(left, _)| left.whole_s);
    set("rounds", &|(left, _)| left.rounds);
    set("sent_mib", &|(left, _)| left.packed / MIB);
    set("behind_mib", &|(left, _)| left.behind / MIB);
    set("asked_mib", &|(left, _)| left.asked / MIB);
    set("wait_p99_ms", &|(_, taken)| taken.wait_p99_ms);
    set("wait_longest_ms", &|(_, taken)| taken.wait_longest_ms);
    Ok(vec![row])
}

/// A process that is ended when nobody waits for it any more.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn one(lab: &Lab, program: &Path, line: Line, mib: u64, mb_s: u32) -> Result<(Left, Taken)> {
    let net = Net::like(Some(line), 1)?;
    let link = net.link().context("no link")?;
    let work = lab.work("regions")?;
    let dir = work.join("move");
    fs::create_dir_all(&dir)?;
    let address = format!("{}:{PORT}", Side::B.address());
    let start = |side: Side, mode: &str| -> Result<Running> {
        let mut command: Command = link.command(side, &program.to_string_lossy());
        command.arg(mode).arg(&dir).arg(&address);
        command.args([mib.to_string(), mb_s.to_string()]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        Ok(Running(child.context("cannot start move_region")?))
    };
    let mut taking = start(Side::B, "take")?;
    let said = taking.0.stdout.take().context("no output")?;
    let mut said = BufReader::new(said).lines();
    // Now it listens, and has made the key of both.
    said.next().context("move_region said nothing")??;
    let mut leaving = start(Side::A, "move")?;
    let output = leaving.0.stdout.take().context("no output")?;
    let left = BufReader::new(output).lines().next();
    let Some(left) = left else {
        bail!("move_region failed at the end that has the region");
    };
    let taken = said.next();
    let Some(taken) = taken.filter(|_| taking.0.wait().is_ok_and(|status| status.success())) else {
        bail!("move_region failed at the end that takes the region");
    };
    Ok((
        serde_json::from_str(&left?).context("not the line promised")?,
        serde_json::from_str(&taken?).context("not the line promised")?,
    ))
}
