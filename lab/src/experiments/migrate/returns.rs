//! A machine that moves, is used, and comes back: the table of dirty block tracking (§V), with what somebody would write.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use super::machine::{Disk, Start};
use super::sites::Sites;
use super::watched::{Bench, MB, Moved};
use super::{IMAGE, LINES};
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::experiments::lines::{Line, REFERENCE, line};
use crate::limit::Known;
use crate::setup::Lab;

/// The disk with the records.
const SMALL_DISK: u64 = 4 << 20;
/// What is done between two moves, as the guest and the document call it.
const USES: [(char, &str); 4] = [
    ('p', "back, PDF"),
    ('s', "back, presentation"),
    ('v', "back, video"),
    ('t', "back, text"),
];

pub const RETURN: Experiment = Experiment {
    name: "return",
    title: "A machine that is used, and comes back",
    text: "The table of the paper on dirty block tracking: a machine with a Debian disk moves to an empty site, and then, after each use, back to where it was, four times in turn. \
The guest is that of drover's tests with 384 MiB under QEMU without KVM; it writes files to the disk's own ext4: it downloads a PDF (3 MiB); downloads a presentation of 8 MiB and saves it twice; \
watches a video (60 MiB of a browser's cache); edits a text (400 KiB, saved three times). In each, a browser writes 16 MiB of cache, a quarter of it text, and 100 pages of a database, one by one; besides, a record of 4 KiB goes to a \
second disk each 10 ms. After each move the guest reads all of these files again, from the disk, and compares them. \
*Written* is what the guest wrote to files; the *limit* is what is in no 4 KiB block of the copy that the machine had left, through `zstd -3 --long=27`; *disks* is what drover sent of them, in all, \
and *x limit* its ratio. *Not read* is what generations told: with *digests*, the destination had lost its map. *x link* compares the time with that of the bytes at the link's rate and the pause.",
    columns: &[
        Column::label("link", "link"),
        Column::label("what", "move"),
        Column::label("by", "by"),
        Column::optional("written_mb", "written, MB", 1),
        Column::figure("limit_mb", "limit, MB", 1),
        Column::figure("disks_mb", "disks, MB", 1),
        Column::figure("over_limit", "x limit", 2),
        Column::figure("link_mb", "MB on the link", 1),
        Column::figure("unread_mb", "not read, MB", 0),
        Column::figure("seconds", "seconds", 1),
        Column::figure("over_link", "x link", 2),
        Column::figure("pause_ms", "pause, ms", 0),
    ],
    cases,
    run,
};

/// What a case measures: the line, and whether generations are known. The first are measured in every run.
fn all() -> Vec<(Line, &'static str)> {
    let first = [REFERENCE, line(1000.0, 0.0, 0.0)];
    let by_both = first
        .into_iter()
        .flat_map(|line| ["generations", "digests"].map(|by| (line, by)));
    let others = LINES.into_iter().filter(|line| !first.contains(line));
    by_both
        .chain(others.map(|line| (line, "generations")))
        .collect()
}

/// How many of them are measured in every run.
const FIRST: usize = 4;

fn id((line, by): (Line, &str)) -> String {
    format!("{}-{by}", line.slug())
}

fn cases(lab: &Lab) -> Result<Vec<Case>> {
    let case = |(number, setting): (usize, (Line, &str))| {
        let what = format!("by {} over {}", setting.1, setting.0.describe());
        let rank = u8::from(number >= FIRST);
        Case::new(id(setting), what, rank, &[Need::Link, Need::Library])
    };
    // The small set has no Debian image.
    let cases = all().into_iter().enumerate().map(case);
    Ok(lab.either(cases.collect(), Vec::new()))
}

/// A move, and what it had to carry.
struct Step {
    moved: Moved,
    written_mb: Option<f64>,
    limit_mb: f64,
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let setting = all().into_iter().find(|setting| id(*setting) == case.id);
    let (line, by) = setting.context("no such case")?;
    let mut steps: Vec<Vec<Step>> = Vec::new();
    let mut failed = None;
    for _ in 0..lab.repeat.max(1) {
        match tour(lab, line, by == "digests") {
            Ok(tour) => steps.push(tour),
            Err(error) => failed = Some(error),
        }
    }
    let names = ["first"].into_iter().chain(USES.map(|(_, name)| name));
    let row = |(number, name): (usize, &str)| {
        let labels = [
            ("link", line.describe()),
            ("what", name.to_owned()),
            ("by", by.to_owned()),
        ];
        let of: Vec<&Step> = steps.iter().filter_map(|tour| tour.get(number)).collect();
        let mut row = row_of(Row::new(labels), line, &of);
        if let Some(error) = &failed {
            row = row.but(Verdict::failed(error));
        }
        row
    };
    Ok(names.enumerate().map(row).collect())
}

fn row_of(mut row: Row, line: Line, steps: &[&Step]) -> Row {
    let mut set = |key: &str, of: &dyn Fn(&Step) -> Option<f64>| {
        row.set_all(key, &steps.iter().filter_map(|s| of(s)).collect::<Vec<_>>());
    };
    let disks = |step: &Step| {
        let done = step.moved.done.as_ref()?;
        Some((done.image_wire_bytes + done.disk_wire_bytes) / MB)
    };
    set("written_mb", &|s| s.written_mb);
    set("limit_mb", &|s| Some(s.limit_mb));
    set("disks_mb", &disks);
    set("over_limit", &|s| Some(disks(s)? / s.limit_mb));
    set("link_mb", &|s| Some(s.moved.link_mb));
    set("unread_mb", &|s| {
        Some(s.moved.done.as_ref()?.unread_bytes / MB)
    });
    set("memory_mb", &|s| {
        Some(s.moved.done.as_ref()?.memory_bytes / MB)
    });
    set("seconds", &|s| Some(s.moved.seconds));
    set("over_link", &|s| {
        let least = s.moved.link_mb * MB / line.rate() + s.moved.pause_ms / 1e3;
        Some(s.moved.seconds / least)
    });
    set("pause_ms", &|s| Some(s.moved.pause_ms));
    row
}

/// The first move, and one back after each use.
fn tour(lab: &Lab, line: Line, forget: bool) -> Result<Vec<Step>> {
    let bench = Bench::large(lab, line)?;
    let original = lab.image(IMAGE)?;
    let files = [bench.empty_disk(SMALL_DISK)?, bench.copy(&original)?];
    let sizes = [SMALL_DISK, original.metadata()?.len()];
    let sites = bench.sites()?;
    let mut here = bench.machine(0, &files.clone().map(Disk::File), Start::Boot)?;
    let (mut machine, first) = bench.by_drover(&sites, 0, &mut here, &sizes)?;
    drop(here);
    let mut steps = vec![Step {
        moved: first,
        written_mb: None,
        limit_mb: limit(&mut Known::default(), &files)?,
    }];
    for file in &files {
        sites.run(0, &["index", &file.to_string_lossy()])?;
    }
    for (number, (kind, _)) in USES.into_iter().enumerate() {
        let from = 1 - number % 2;
        let written = machine.edit(kind)?;
        let left = match number {
            0 => files.clone(),
            _ => images(&sites, 1 - from),
        };
        let mut known = Known::default();
        for file in &left {
            known.learn(file)?;
        }
        if forget {
            sites.forget_generations(1 - from)?;
        }
        let (there, moved) = bench.by_drover(&sites, from, &mut machine, &sizes)?;
        let unread = moved.done.as_ref().map_or(0.0, |done| done.unread_bytes);
        ensure!(
            (unread == 0.0) == forget,
            "{unread} bytes were not read in move {number}"
        );
        sites.merged(from)?;
        steps.push(Step {
            moved,
            written_mb: Some(written as f64 / MB),
            limit_mb: limit(&mut known, &images(&sites, from))?,
        });
        machine = there;
    }
    // Once more, all that was ever written.
    machine.edit('t')?;
    Ok(steps)
}

fn images(sites: &Sites<'_>, side: usize) -> [PathBuf; 2] {
    ["web-0.raw", "web-1.raw"].map(|name| sites.image(side, name))
}

/// MB of what of these disks is not known.
fn limit(known: &mut Known, disks: &[PathBuf; 2]) -> Result<f64> {
    let mut bytes = 0;
    for disk in disks {
        bytes += known.add(disk)?.limit_bytes;
    }
    Ok(bytes as f64 / MB)
}
