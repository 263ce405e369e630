//! Memory per terabyte: a synthetic walk over up to 8 TiB of digests through the matcher, in a process of its
//! own whose resident memory is what the kernel says (teleportation §2.5, §3.8).

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use drover_core::BLOCK_SIZE_U64;
use drover_index::{Matcher, MatcherConfig};
use drover_storage::HostDirectory;
use serde::{Deserialize, Serialize};

use super::matching::{self, percent};
use super::synthetic::{self, Model, Regrown, Statistics, UNIT};
use super::{Lab, Work};
use crate::bench::{
    About, Axis, Case, Column, Experiment, Kind, Need, Plot, Point, Row, Subject, Verdict,
};
use crate::shell;

/// The experiment.
pub struct Memory;

static ABOUT: About = About {
    name: "memory",
    title: "Memory per terabyte",
    text: "\
32 synthetic images of 256 GiB of data go through the matcher one after the other: every block's \
digest is made, looked up as drover would, and matched or remembered; nothing is sampled or left out. The digests are drawn with a fixed seed from the library's \
statistics (see *Cache sizes*); copies are of any earlier part of any image, so that a cache has to hold everything to find them all. A hash file is made anew \
from the seed when a page of it is read, since those of 8 TiB take 24 GiB; all other files are real. *resident* is the greatest resident set (VmHWM) \
of the process, *before* is what it was before the index was opened, *own count* is what the matcher says that it uses. *of exact* is what this memory still finds: the paper's formula asks for \
29 MB of short-term cache for each terabyte and 93 MB of C2 for 8 TB.

*exact index* is a hash set of half digests (no addresses, no order), filled to two thirds and measured in a process of its own, and the paper's 60 bytes an entry of an LRU index; for each, as many entries as a \
terabyte of such images has different blocks.",
    columns: &[
        Column::label("index", "index"),
        Column::label("volume", "data"),
        Column::figure("volume_tib", "TiB", 4),
        Column::optional("resident_mib", "resident MiB", 1),
        Column::optional("before_mib", "before MiB", 1),
        Column::optional("claimed_mib", "own count MiB", 1),
        Column::figure("mib_per_tib", "MiB/TiB", 1),
        Column::optional("disk_gib_per_tib", "index files GiB/TiB", 2),
        Column::optional("share_percent", "of exact %", 2),
        Column::optional("cache_mib", "caches MiB", 0),
        Column::optional("full_percent", "caches full %", 1),
        Column::optional("read_percent", "read ampl. %", 2),
        Column::optional("walk_s", "walk s", 0),
    ],
};

const SEED: u64 = 0x5eed_0ff5;
/// Images of the walk.
const IMAGES: u64 = 32;
/// GiB of data in each.
const IMAGE_GIB: u64 = 256;
/// Paper's bytes for an entry of a conventional index.
const LRU_ENTRY: f64 = 60.0;
/// Entries of the measured hash set: two thirds of 2^24.
const SET_ENTRIES: u64 = (1 << 24) * 2 / 3;
/// Blocks of a TiB.
const BLOCKS_PER_TIB: f64 = (1u64 << 40) as f64 / BLOCK_SIZE_U64 as f64;

/// A walk, for the process that does it.
#[derive(Args, Clone, Debug)]
pub struct WalkArgs {
    /// The library's statistics.
    #[arg(long)]
    statistics: PathBuf,
    /// Where the index is kept.
    #[arg(long)]
    index: PathBuf,
    /// Where figures are appended, a line each.
    #[arg(long)]
    figures: PathBuf,
    /// Images.
    #[arg(long)]
    images: u64,
    /// Units of 8 MiB in each.
    #[arg(long)]
    units: u64,
    /// Caches of this share of the default size, in sixteenths.
    #[arg(long, default_value_t = 16)]
    sixteenths: usize,
    /// Fill a hash set with so many entries instead.
    #[arg(long, default_value_t = 0)]
    set: u64,
}

/// What a walk has come to, after some images.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Walked {
    images: u64,
    blocks: u64,
    copies: u64,
    matched: u64,
    resident_bytes: u64,
    before_bytes: u64,
    claimed_bytes: u64,
    cache_bytes: u64,
    entries: u64,
    slots: u64,
    pages_read: u64,
    disk_bytes: u64,
    seconds: f64,
}

/// Walks, and appends figures whenever the number of images is a power of two.
///
/// # Errors
/// When the matcher or a file fails.
pub fn walk(args: &WalkArgs) -> Result<()> {
    let mut out = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&args.figures)?;
    let statistics: Statistics = serde_json::from_slice(&fs::read(&args.statistics)?)?;
    let before_bytes = peak()?;
    if args.set > 0 {
        let entries = fill_set(args.set);
        let figures = Walked {
            entries,
            resident_bytes: peak()?,
            before_bytes,
            ..Walked::default()
        };
        writeln!(out, "{}", serde_json::to_string(&figures)?)?;
        return Ok(());
    }
    let default = MatcherConfig::default();
    let config = MatcherConfig {
        c0_bytes: default.c0_bytes * args.sixteenths / 16,
        c1_bytes: default.c1_bytes * args.sixteenths / 16,
        c2_bytes: default.c2_bytes * args.sixteenths / 16,
        ..default
    };
    let model = Arc::new(Model::new(statistics, SEED, args.units));
    let kept = HostDirectory::open_or_create(&args.index)?;
    let (mut matcher, _) = Matcher::open(Regrown::new(kept, Arc::clone(&model)), config)?;
    let start = Instant::now();
    let mut copies = 0;
    for image in 0..args.images {
        copies += synthetic::send(&mut matcher, &model, image)?.copies;
        let images = image + 1;
        if !images.is_power_of_two() {
            continue;
        }
        let stats = matcher.stats();
        let caches = [stats.c0, stats.c1, stats.c2];
        let hash_files = images * model.pages() * synthetic::PAGE_BYTES;
        let figures = Walked {
            images,
            blocks: stats.blocks,
            copies,
            matched: stats.matched,
            resident_bytes: peak()?,
            before_bytes,
            claimed_bytes: stats.memory,
            cache_bytes: caches.iter().map(|c| c.bytes).sum(),
            entries: caches.iter().map(|c| c.entries).sum(),
            slots: caches.iter().map(|c| c.capacity).sum(),
            pages_read: stats.pages_read,
            disk_bytes: hash_files + size_of_dir(&args.index)?,
            seconds: start.elapsed().as_secs_f64(),
        };
        writeln!(out, "{}", serde_json::to_string(&figures)?)?;
    }
    let repairs = matcher.take_repairs();
    if !repairs.is_empty() {
        bail!("the index had to be repaired: {repairs:?}");
    }
    Ok(())
}

fn fill_set(entries: u64) -> u64 {
    let mut rng = fastrand::Rng::with_seed(SEED);
    let mut set: HashSet<u128> = HashSet::new();
    while (set.len() as u64) < entries {
        set.insert(rng.u128(..));
    }
    set.len() as u64
}

/// This process's greatest resident set so far.
fn peak() -> Result<u64> {
    crate::watch::peak_of(&fs::read_to_string("/proc/self/status")?).context("no VmHWM in /proc")
}

fn size_of_dir(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir)? {
        bytes += entry?.metadata()?.len();
    }
    Ok(bytes)
}

/// What a case does.
#[derive(Clone, Copy)]
struct Plan {
    id: &'static str,
    what: &'static str,
    images: u64,
    /// Times the default caches.
    factor: u64,
    seconds: f64,
    rank: u8,
}

const EXACT: Plan = Plan {
    id: "exact",
    what: "an exact index of 11 million blocks",
    images: 0,
    factor: 1,
    seconds: 5.0,
    rank: 0,
};

const PLANS: [Plan; 4] = [
    Plan {
        id: "1-tib",
        what: "1 TiB of digests through the matcher",
        images: 4,
        factor: 1,
        seconds: 240.0,
        rank: 1,
    },
    EXACT,
    Plan {
        id: "8-tib",
        what: "8 TiB of digests through the matcher",
        images: IMAGES,
        factor: 1,
        seconds: 2000.0,
        rank: 2,
    },
    Plan {
        id: "8-tib-8-times",
        what: "8 TiB of digests through a matcher with eight times the caches",
        images: IMAGES,
        factor: 8,
        seconds: 2000.0,
        rank: 3,
    },
];

/// A walk takes at most so many times what is expected: what it has found by then is kept.
const PATIENCE: f64 = 15.0;

impl Experiment for Memory {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, lab: &Lab) -> Result<Vec<Case>> {
        let load = matching::seconds_to_load(&matching::images(lab)?);
        Ok(PLANS
            .iter()
            .filter(|plan| !lab.small || plan.rank <= 1)
            .map(|plan| Case {
                id: plan.id.to_owned(),
                what: plan.what.to_owned(),
                seconds: if lab.small { 3.0 } else { plan.seconds + load },
                rank: plan.rank,
                subject: Subject::Drover,
                needs: &[Need::Library],
            })
            .collect())
    }

    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>> {
        let plan = PLANS.iter().find(|plan| plan.id == case.id);
        let plan = plan.context("no such case")?;
        let work = lab.work(ABOUT.name)?;
        let statistics = Statistics::of(&matching::load_all(&matching::images(lab)?)?)?;
        let new_share = 1.0 - statistics.copies();
        let args = args(lab, plan, &work);
        fs::write(&args.statistics, serde_json::to_vec(&statistics)?)?;
        let limit = Duration::from_secs_f64(PATIENCE * plan.seconds + 300.0);
        let ended = in_a_process(&args, limit, &work);
        let figures = read_figures(&args.figures)?;
        let mut rows = match plan.images {
            0 => exact_rows(&figures, new_share),
            _ => figures
                .iter()
                .filter(|walked| reported(lab, plan, walked.images))
                .map(|walked| row(walked, plan.factor))
                .collect(),
        };
        if let Err(error) = ended {
            let mut row = Row::new([
                ("index", index_name(plan.factor)),
                ("volume", plan.what.to_owned()),
            ]);
            row.verdict = Verdict::Failed(format!("{error:#}"));
            rows.push(row);
        }
        Ok(rows)
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let line = |index: &str, key: &str| -> (String, Vec<Point>) {
            let mut points: Vec<Point> = rows
                .iter()
                .filter(|row| row.label("index") == index)
                .filter_map(|row| {
                    Some(Point {
                        x: row.value("volume_tib")?,
                        y: row.value(key)?,
                        range: None,
                    })
                })
                .collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            (index.to_owned(), points)
        };
        let walks = [index_name(1), index_name(8)];
        let lines = |key: &str| -> Vec<(String, Vec<Point>)> {
            let lines = walks.iter().map(|index| line(index, key));
            lines.filter(|(_, points)| !points.is_empty()).collect()
        };
        let mut resident = lines("resident_mib");
        let volumes: Vec<f64> = resident.iter().flat_map(|l| &l.1).map(|p| p.x).collect();
        for index in [SET, LRU] {
            let per_tib = line(index, "mib_per_tib").1.first().map(|p| p.y);
            if let Some(per_tib) = per_tib {
                let point = |&x: &f64| Point {
                    x,
                    y: per_tib * x,
                    range: None,
                };
                let mut points: Vec<Point> = volumes.iter().map(point).collect();
                points.sort_by(|a, b| a.x.total_cmp(&b.x));
                points.dedup();
                resident.push((format!("{index}, extrapolated"), points));
            }
        }
        vec![
            Plot {
                name: "resident".to_owned(),
                title: "Resident memory against the data that the index knows".to_owned(),
                x: Axis::log("data, TiB"),
                y: Axis::log("MiB"),
                kind: Kind::Lines(resident),
            },
            Plot {
                name: "found".to_owned(),
                title: "What this memory still finds when copies are of anything, however old"
                    .to_owned(),
                x: Axis::log("data, TiB"),
                y: Axis::linear("% of exact matches"),
                kind: Kind::Lines(lines("share_percent")),
            },
        ]
    }
}

const SET: &str = "exact: a hash set";
const LRU: &str = "exact: 60 bytes an entry";

fn index_name(factor: u64) -> String {
    match factor {
        1 => "drover".to_owned(),
        _ => format!("drover, {factor} times the caches"),
    }
}

fn args(lab: &Lab, plan: &Plan, work: &Work) -> WalkArgs {
    // In the small run all is a 4096th: images of 64 MiB.
    let scale = if lab.small { 4096 } else { 1 };
    WalkArgs {
        statistics: work.join("statistics.json"),
        index: work.join("index"),
        figures: work.join("figures.jsonl"),
        images: plan.images,
        units: (IMAGE_GIB << 30) / (u64::from(UNIT) * BLOCK_SIZE_U64) / scale,
        sixteenths: 16 * plan.factor as usize,
        set: match plan.images {
            0 => SET_ENTRIES / scale.min(64),
            _ => 0,
        },
    }
}

/// Whether a row is made of it: shorter walks are cases of their own.
fn reported(lab: &Lab, plan: &Plan, images: u64) -> bool {
    let shortest = match plan.images {
        4 if !lab.small => 4,
        _ if plan.factor == 1 && !lab.small => 8,
        _ => 4,
    };
    images >= shortest
}

/// Runs a walk in a process of its own, whose memory nothing else has a part in.
fn in_a_process(args: &WalkArgs, limit: Duration, work: &Work) -> Result<()> {
    if cfg!(test) {
        // The program that runs is the tests', which does not know the command.
        return walk(args);
    }
    let path = |path: &Path| path.display().to_string();
    let said = work.join("said");
    let mut child = Command::new(std::env::current_exe()?)
        .arg("walk")
        .args(["--statistics", &path(&args.statistics)])
        .args(["--index", &path(&args.index)])
        .args(["--figures", &path(&args.figures)])
        .args(["--images", &args.images.to_string()])
        .args(["--units", &args.units.to_string()])
        .args(["--sixteenths", &args.sixteenths.to_string()])
        .args(["--set", &args.set.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&said)?)
        .spawn()
        .context("cannot start the walk")?;
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            if !status.success() {
                bail!("{status}: {}", shell::tail(&fs::read(&said)?));
            }
            return Ok(());
        }
        if start.elapsed() > limit {
            let _ = child.kill();
            let _ = child.wait();
            bail!("not through after {:.0} s", limit.as_secs_f64());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn read_figures(path: &Path) -> Result<Vec<Walked>> {
    let text = fs::read_to_string(path).unwrap_or_default();
    // The last line of a process that was ended may be half a one.
    Ok(text
        .lines()
        .filter_map(|l| serde_json::from_str(l).ok())
        .collect())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn row(walked: &Walked, factor: u64) -> Row {
    let tib = walked.blocks as f64 / BLOCKS_PER_TIB;
    let volume = match tib {
        1.0.. => format!("{tib:.0} TiB"),
        _ => format!("{:.0} MiB", tib * f64::from(1 << 20)),
    };
    Row::new([("index", index_name(factor)), ("volume", volume)])
        .with("volume_tib", tib)
        .with("resident_mib", mib(walked.resident_bytes))
        .with("before_mib", mib(walked.before_bytes))
        .with("claimed_mib", mib(walked.claimed_bytes))
        .with("mib_per_tib", mib(walked.resident_bytes) / tib)
        .with(
            "disk_gib_per_tib",
            walked.disk_bytes as f64 / f64::from(1 << 30) / tib,
        )
        .with(
            "share_percent",
            percent(walked.matched as f64, walked.copies as f64),
        )
        .with("cache_mib", mib(walked.cache_bytes))
        .with(
            "full_percent",
            percent(walked.entries as f64, walked.slots as f64),
        )
        .with(
            "read_percent",
            percent(walked.pages_read as f64, walked.blocks as f64),
        )
        .with("walk_s", walked.seconds)
}

/// What an exact index takes, measured and by the paper, for as many different blocks as a TiB has.
fn exact_rows(figures: &[Walked], new_share: f64) -> Vec<Row> {
    let blocks = new_share * BLOCKS_PER_TIB;
    let row = |index: &str, entry_bytes: f64| {
        Row::new([("index", index.to_owned()), ("volume", "1 TiB".to_owned())])
            .with("volume_tib", 1.0)
            .with("mib_per_tib", entry_bytes * blocks / f64::from(1 << 20))
    };
    let measured = figures.iter().map(|walked| {
        let bytes = walked.resident_bytes.saturating_sub(walked.before_bytes);
        row(SET, bytes as f64 / walked.entries.max(1) as f64)
    });
    measured.chain([row(LRU, LRU_ENTRY)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_is_measured_beside_an_exact_index() {
        let dir = tempfile::tempdir().unwrap();
        let lab = matching::tests::lab(dir.path());
        let cases = Memory.cases(&lab).unwrap();
        assert_eq!(cases.len(), 2);
        let rows: Vec<Row> = cases
            .iter()
            .flat_map(|case| Memory.run(&lab, case).unwrap())
            .collect();
        assert_eq!(rows.len(), 3, "{rows:?}");
        assert!(rows.iter().all(|row| row.verdict == Verdict::Good));
        let walk = &rows[0];
        assert_eq!(walk.label("volume"), "256 MiB");
        let of = |key| walk.value(key).unwrap();
        // 12 bytes of digest for each 4 KiB, and a checksum and heads for each page; the sequence cache.
        let disk = of("disk_gib_per_tib");
        assert!((3.0..4.2).contains(&disk), "{disk}");
        assert!(of("share_percent") > 90.0 && of("share_percent") <= 100.0);
        assert!(of("resident_mib") > 10.0);
        // The set was filled in this process, which had been as large before: what it measures, only a process of its own tells.
        assert_eq!((rows[1].label("index"), rows[2].label("index")), (SET, LRU));
        let lru = rows[2].value("mib_per_tib").unwrap();
        assert!(lru > 1000.0 && lru < 15360.0, "{lru}");
        assert_eq!(Memory.plots(&rows).len(), 2);
    }

    #[test]
    fn a_walk_that_fails_is_a_row() {
        let dir = tempfile::tempdir().unwrap();
        let lab = matching::tests::lab(dir.path());
        let work = lab.work("memory").unwrap();
        let args = WalkArgs {
            statistics: work.join("none"),
            ..args(&lab, &PLANS[0], &work)
        };
        assert!(in_a_process(&args, Duration::from_secs(1), &work).is_err());
        assert!(read_figures(&args.figures).unwrap().is_empty());
    }
}
