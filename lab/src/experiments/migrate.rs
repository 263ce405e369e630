//! Live migration: the pause of a machine, and the whole of a migration, by drover and by QEMU's own means.

mod machine;
mod returns;
mod rival;
mod sites;
mod watched;

use std::time::Duration;

use anyhow::{Context, Result};

use self::machine::{Disk, NAMES, QEMU, Start};
pub use self::returns::RETURN;
use self::rival::CopyMode;
use self::watched::{Bench, MB, Moved};
use super::lines::{Line, REFERENCE, line};
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::rivals;
use crate::setup::{Lab, must_be_same};

/// The disk with the records: in a pause, and in a whole migration, which lasts longer.
const SMALL_DISK: u64 = 4 << 20;
const DISK: u64 = 32 << 20;
/// How long a guest writes between its way there and back.
const BETWEEN: Duration = Duration::from_secs(10);
/// The Debian image on the second disk, and what the far side may have of the same suite.
const IMAGE: &str = "bookworm-web";
const SIMILAR: &str = "bookworm-plain";

/// What both experiments say of the guest.
macro_rules! guest {
    () => {
        "The guest is that of drover's tests, 96 MiB under QEMU without KVM at either end of the link, on one machine: each 10 ms it \
writes a record of 4 KiB durably to a disk; *writing*, it changes 4 MiB of its memory with each, too. All records were verified after each migration. \
*Pause* is from STOP here to RESUME there, by the times of QEMU's events; *by the heartbeat* is the time between the last record before \
and the first after, as they arrive at the lab from the two consoles, minus the usual time between so many. \
Both have a pause of 300 ms as QEMU's aim (`downtime-limit`), no limit of bandwidth, and `auto-converge`. "
    };
}

pub const PAUSE: Experiment = Experiment {
    name: "pause",
    title: "The pause of a machine that migrates",
    text: concat!(
        guest!(),
        "For drover, a disk of 4 MiB moves too; its parts are the last writes to disks, the last of the memory with the state of devices, and the hand-over, \
in which both sites record it durably. `QEMU` is its own migration over plain TCP, with a disk that both sides have open, so that only memory moves; nothing \
guards it against running on both sides."
    ),
    columns: &[
        Column::label("link", "link"),
        Column::label("guest", "guest"),
        Column::label("by", "by"),
        Column::figure("pause_ms", "pause, ms", 0),
        Column::figure("beat_ms", "by the heartbeat, ms", 0),
        Column::optional("disks_ms", "disks, ms", 0),
        Column::optional("memory_ms", "memory, ms", 0),
        Column::optional("hand_over_ms", "hand-over, ms", 0),
        Column::figure("seconds", "seconds in all", 1),
        Column::figure("link_mb", "MB on the link", 1),
    ],
    cases: pause_cases,
    run: run_pause,
};

pub const WHOLE: Experiment = Experiment {
    name: "migrate",
    title: "A whole migration, with a Debian disk",
    text: concat!(
        guest!(),
        "Here it has a second disk, with the library's bookworm with nginx and php, which is compared with its original afterwards; the records are on the first, of 32 MiB. \
Drover moves it to an *empty* site; to one that has been sent bookworm-plain (*similar*); and, ten seconds of writing after the first, *back*, where `drover index` has been told of the files \
that were left. `blockdev-mirror` is what libvirt, Proxmox and LXD drive: NBD exports of the destination, mirrors, then memory, over plain TCP, \
without the round trips of their controllers; *write-blocking* is its mode in which each write of the guest waits for the destination, too. *Seconds* are from the command until it has ended; *MB* are IP bytes both ways, *memory* is QEMU's stream before drover compresses it; \
*records a second* before, and from the command until the pause; *held* is the time for which drover stops a machine with several disks, so that their images are of one moment, \
and the *longest gap* between two records is in the same time as *during*."
    ),
    columns: &[
        Column::label("link", "link"),
        Column::label("by", "by"),
        Column::label("what", "to"),
        Column::figure("seconds", "seconds", 1),
        Column::figure("link_mb", "MB on the link", 1),
        Column::optional("images_mb", "images, MB", 1),
        Column::optional("rounds_mb", "rounds, MB", 2),
        Column::optional("memory_mb", "memory, MB", 1),
        Column::figure("pause_ms", "pause, ms", 0),
        Column::figure("beat_ms", "by the heartbeat, ms", 0),
        Column::figure("records_before", "records a second before", 1),
        Column::figure("records_during", "during", 1),
        Column::figure("held_ms", "held, ms", 0),
        Column::figure("gap_ms", "longest gap, ms", 0),
    ],
    cases: whole_cases,
    run: run_whole,
};

/// Who moves the machine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Drover,
    Qemu,
}

impl By {
    fn slug(self) -> &'static str {
        match self {
            Self::Drover => "drover",
            Self::Qemu => "qemu",
        }
    }

    fn rival(self) -> Option<String> {
        let version = || rivals::tool_version(QEMU).unwrap_or_else(|_| "absent".to_owned());
        (self == Self::Qemu).then(|| format!("qemu {}", version()))
    }
}

/// How a machine moves as a whole.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whole {
    /// By drover to an empty site, and back.
    Drover,
    /// By drover to a site that has a similar image.
    Similar,
    /// By mirrors that copy in the background.
    Mirror,
    /// By mirrors for which the guest's writes wait, too.
    WriteBlocking,
}

impl Whole {
    const ALL: [Self; 4] = [
        Self::Drover,
        Self::Similar,
        Self::Mirror,
        Self::WriteBlocking,
    ];

    fn slug(self) -> &'static str {
        match self {
            Self::Drover => "drover",
            Self::Similar => "drover-similar",
            Self::Mirror => "qemu",
            Self::WriteBlocking => "qemu-write-blocking",
        }
    }

    fn by(self) -> By {
        match self {
            Self::Drover | Self::Similar => By::Drover,
            Self::Mirror | Self::WriteBlocking => By::Qemu,
        }
    }
}

const LINES: [Line; 6] = [
    line(1000.0, 0.0, 0.0),
    line(1000.0, 10.0, 0.0),
    line(1000.0, 40.0, 0.0),
    REFERENCE,
    line(100.0, 0.0, 0.0),
    line(100.0, 10.0, 0.0),
];
/// Of those, the first are measured in every run.
const FIRST_LINES: usize = 4;

/// What a case of the pause measures: the line, MiB of memory that change with each record, who moves.
fn pauses() -> Vec<(Line, u32, By)> {
    let mut all = Vec::new();
    for line in LINES {
        for dirty in [0, 4] {
            all.extend([By::Drover, By::Qemu].map(|by| (line, dirty, by)));
        }
    }
    all
}

fn pause_id((line, dirty, by): (Line, u32, By)) -> String {
    format!("{}-{}-{}", line.slug(), guest_name(dirty), by.slug())
}

fn guest_name(dirty: u32) -> &'static str {
    if dirty > 0 { "writing" } else { "idle" }
}

fn pause_cases(_: &Lab) -> Result<Vec<Case>> {
    let case = |setting: (Line, u32, By)| {
        let (line, dirty, by) = setting;
        let (guest, by_whom) = (guest_name(dirty), by.slug());
        let what = format!("a guest, {guest}, over {}, by {by_whom}", line.describe());
        let rank = u8::from(!LINES[..FIRST_LINES].contains(&line));
        Case {
            rival: by.rival(),
            ..Case::new(pause_id(setting), what, rank, &[Need::Link])
        }
    };
    Ok(pauses().into_iter().map(case).collect())
}

fn run_pause(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let mut all = pauses().into_iter();
    let setting = all.find(|setting| pause_id(*setting) == case.id);
    let (line, dirty, by) = setting.context("no such case")?;
    let by_whom = match by {
        By::Drover => "drover",
        By::Qemu => "QEMU, shared storage",
    };
    let row = Row::new([
        ("link", line.describe()),
        ("guest", guest_name(dirty).to_owned()),
        ("by", by_whom.to_owned()),
    ]);
    let measured = (0..lab.repeat.max(1)).map(|_| {
        let bench = Bench::new(lab, line, dirty)?;
        let disk = bench.empty_disk(SMALL_DISK)?;
        match by {
            By::Drover => {
                let sites = bench.sites()?;
                let mut here = bench.machine(0, &[Disk::File(disk)], Start::Boot)?;
                bench
                    .by_drover(&sites, 0, &mut here, &[SMALL_DISK])
                    .map(|moved| moved.1)
            }
            By::Qemu => {
                let disk = || [Disk::Shared(disk.clone())];
                let mut here = bench.machine(0, &disk(), Start::Boot)?;
                let mut there = bench.machine(1, &disk(), Start::WaitAndRun)?;
                bench.watched(&mut here, &mut there, |here, there| {
                    rival::with_shared_storage(here, there).map(|()| None)
                })
            }
        }
    });
    Ok(vec![row_of(row, measured.collect())])
}

/// What the cases of a whole migration measure, the reference line first.
fn wholes() -> impl Iterator<Item = (Line, Whole)> {
    let others = LINES.into_iter().filter(|line| *line != REFERENCE);
    let lines = std::iter::once(REFERENCE).chain(others);
    lines.flat_map(|line| Whole::ALL.map(|whole| (line, whole)))
}

fn whole_id((line, whole): (Line, Whole)) -> String {
    format!("{}-{}", line.slug(), whole.slug())
}

fn whole_cases(lab: &Lab) -> Result<Vec<Case>> {
    let case = |setting: (Line, Whole)| {
        let (line, whole) = setting;
        let what = format!(
            "a guest with a Debian disk over {}: {}",
            line.describe(),
            whole.slug()
        );
        let rank = u8::from(line != REFERENCE);
        Case {
            rival: whole.by().rival(),
            ..Case::new(whole_id(setting), what, rank, &[Need::Link, Need::Library])
        }
    };
    // The small set has no Debian image.
    Ok(lab.either(wholes().map(case).collect(), Vec::new()))
}

fn run_whole(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let setting = wholes().find(|setting| whole_id(*setting) == case.id);
    let (line, whole) = setting.context("no such case")?;
    let row = |by: &str, to: &str| {
        let labels = [
            ("link", line.describe()),
            ("by", by.to_owned()),
            ("what", to.to_owned()),
        ];
        Row::new(labels)
    };
    let repeats = 0..lab.repeat.max(1);
    let (name, mode) = match whole {
        Whole::Drover | Whole::Similar => {
            return Ok(by_drover(lab, line, whole == Whole::Similar, row));
        }
        Whole::Mirror => ("blockdev-mirror", CopyMode::Background),
        Whole::WriteBlocking => ("blockdev-mirror, write-blocking", CopyMode::WriteBlocking),
    };
    let moved = repeats.map(|_| mirrored(lab, line, mode)).collect();
    Ok(vec![row_of(row(name, "empty"), moved)])
}

fn by_drover(lab: &Lab, line: Line, similar: bool, row: impl Fn(&str, &str) -> Row) -> Vec<Row> {
    let (mut first, mut back) = (Vec::new(), Vec::new());
    for _ in 0..lab.repeat.max(1) {
        match there_and_back(lab, line, similar) {
            Ok((there, here)) => {
                first.push(Ok(there));
                back.extend(here.map(Ok));
            }
            Err(error) => first.push(Err(error)),
        }
    }
    let to = if similar { "similar" } else { "empty" };
    let mut rows = vec![row_of(row("drover", to), first)];
    if !similar {
        rows.push(row_of(row("drover", "back"), back));
    }
    rows
}

/// A migration to a far site, and, if nothing is there before, back.
fn there_and_back(lab: &Lab, line: Line, similar: bool) -> Result<(Moved, Option<Moved>)> {
    let bench = Bench::new(lab, line, 4)?;
    let original = lab.image(IMAGE)?;
    let files = [bench.empty_disk(DISK)?, bench.copy(&original)?];
    let sizes = [DISK, original.metadata()?.len()];
    let sites = bench.sites()?;
    if similar {
        let image = lab.image(SIMILAR)?;
        sites.run(0, &["send", &image.to_string_lossy(), NAMES[1]])?;
    }
    let disks = files.clone().map(Disk::File);
    let mut here = bench.machine(0, &disks, Start::Boot)?;
    let (mut there, first) = bench.by_drover(&sites, 0, &mut here, &sizes)?;
    drop(here);
    if similar {
        drop(there);
        must_be_same(&original, &sites.image(1, "web-1.raw"))?;
        return Ok((first, None));
    }
    std::thread::sleep(BETWEEN);
    for file in &files {
        sites.run(0, &["index", &file.to_string_lossy()])?;
    }
    let (back, second) = bench.by_drover(&sites, 1, &mut there, &sizes)?;
    drop((there, back));
    for side in [0, 1] {
        must_be_same(&original, &sites.image(side, "web-1.raw"))?;
    }
    Ok((first, Some(second)))
}

fn mirrored(lab: &Lab, line: Line, mode: CopyMode) -> Result<Moved> {
    let bench = Bench::new(lab, line, 4)?;
    let original = lab.image(IMAGE)?;
    let files = [bench.empty_disk(DISK)?, bench.copy(&original)?];
    let size = original.metadata()?.len();
    let copies = [
        bench.empty_file(DISK, "copy")?,
        bench.empty_file(size, "copy")?,
    ];
    let mut here = bench.machine(0, &files.map(Disk::File), Start::Boot)?;
    let mut there = bench.machine(1, &copies.clone().map(Disk::File), Start::Wait)?;
    let moved = bench.watched(&mut here, &mut there, |here, there| {
        rival::with_mirrors(here, there, 2, mode).map(|()| None)
    })?;
    drop((here, there));
    must_be_same(&original, &copies[1])?;
    Ok(moved)
}

/// Completes a row with all measurements, or with the first failure.
fn row_of(mut row: Row, measured: Vec<Result<Moved>>) -> Row {
    let measured: Vec<Moved> = match measured.into_iter().collect() {
        Ok(measured) => measured,
        Err(error) => return row.but(Verdict::failed(&error)),
    };
    let mut set = |key: &str, of: &dyn Fn(&Moved) -> Option<f64>| {
        row.set_all(key, &measured.iter().filter_map(of).collect::<Vec<_>>());
    };
    set("seconds", &|m| Some(m.seconds));
    set("pause_ms", &|m| Some(m.pause_ms));
    set("beat_ms", &|m| Some(m.beat_ms));
    set("link_mb", &|m| Some(m.link_mb));
    set("records_before", &|m| Some(m.records_before));
    set("records_during", &|m| Some(m.records_during));
    set("held_ms", &|m| Some(m.held_ms));
    set("gap_ms", &|m| Some(m.gap_ms));
    set("disks_ms", &|m| Some(m.done.as_ref()?.pause.disks_ms));
    set("memory_ms", &|m| Some(m.done.as_ref()?.pause.memory_ms));
    set("hand_over_ms", &|m| {
        Some(m.done.as_ref()?.pause.hand_over_ms)
    });
    set("reported_ms", &|m| Some(m.done.as_ref()?.pause.total_ms));
    set("rounds", &|m| Some(m.done.as_ref()?.rounds));
    set("images_mb", &|m| {
        Some(m.done.as_ref()?.image_wire_bytes / MB)
    });
    set("rounds_mb", &|m| {
        Some(m.done.as_ref()?.disk_wire_bytes / MB)
    });
    set("memory_mb", &|m| Some(m.done.as_ref()?.memory_bytes / MB));
    row
}
