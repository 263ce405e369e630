//! A vault compared with backup programs: what several versions of machines take, how fast they are stored, deleted and
//! restored.

pub mod boot;
mod corpus;
pub mod deletion;
pub mod faults;
mod series;
pub mod speed;
pub mod summaries;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use self::series::{Series, Version};
use crate::bench::{Case, Column, Experiment, Need, Row, Verdict};
use crate::limit::Known;
use crate::setup::{Lab, Work, file_name, must_be_same};
use crate::{shell, watch};

const STORED: &str = "stored_mb";
const TIMES_LIMIT: &str = "times_limit";
const SECONDS: &str = "seconds";
const CPU: &str = "cpu_seconds";
const SPEED: &str = "mb_per_cpu_second";
const DELETE: &str = "delete_seconds";
const FREED: &str = "freed_mb";
const RESTORE: &str = "restore_mb_per_second";
const PERFECT: &str = "times_perfect";
const METADATA: &str = "metadata_mb";

pub const EXPERIMENT: Experiment = Experiment {
    name: "vault",
    title: "Snapshots in a vault",
    text: "Versions of several machines are stored one after the other, the oldest first, in an empty vault or repository in a local directory; then the oldest version of the first \
machine is deleted and its space freed, and the newest one restored and compared. *Limit*: every different 4 KiB block once, through `zstd -3 --long=27`. The versions of a machine are \
what the library has: a release, the same with updates, and some months older. drover by `--share`, without encryption; restic with its defaults, which encrypt; borg with `zstd,3` and \
without encryption, by its default chunks and by fixed ones of 64 KiB. *MB a CPU second* is the data of all versions over the CPU time of storing them. *Times perfect*: blocks that the vault has, before compression, over \
the different ones that there are; *metadata*: all in the vault that is no container. *Day by day*: each machine has five versions. On each day its packages are upgraded, some are added or installed anew, one of them a kernel; files are rewritten, logs and databases grow and are dumped, something is uploaded. \
The days are kept as what they changed (`lab/cache/days`), and each program gets the same.",
    columns: &[
        Column::label("by", "by"),
        Column::figure(STORED, "MB stored", 1),
        Column::optional(TIMES_LIMIT, "times the limit", 2),
        Column::optional(PERFECT, "times perfect", 3),
        Column::optional(METADATA, "MB of metadata", 1),
        Column::optional(SECONDS, "seconds", 1),
        Column::optional(CPU, "CPU seconds", 1),
        Column::optional(SPEED, "MB a CPU second", 0),
        Column::optional(DELETE, "seconds to delete one", 2),
        Column::optional(FREED, "MB freed", 1),
        Column::optional(RESTORE, "MB/s restored, with holes", 0),
    ],
    cases: |lab| Ok(cases(lab)),
    run,
};

/// Names of images of the library, by machine, the oldest first.
pub(super) type Corpus = &'static [(&'static str, &'static [&'static str])];

const SMALLEST: Corpus = &[
    (
        "db",
        &["bookworm-db-release", "bookworm-db-aged", "bookworm-db"],
    ),
    ("plain", &["bookworm-plain", "bookworm-plain-aged"]),
];
const LARGER: Corpus = &[
    (
        "db",
        &["bookworm-db-release", "bookworm-db-aged", "bookworm-db"],
    ),
    ("plain", &["bookworm-plain", "bookworm-plain-aged"]),
    ("app", &["bookworm-app"]),
    ("nfs", &["bookworm-nfs"]),
    ("web", &["bookworm-web"]),
    ("dev", &["bookworm-dev"]),
    ("pg", &["bookworm-pg"]),
    ("trixie", &["trixie-plain"]),
];
const SMALL: Corpus = &[
    ("two", &["small-two", "small-two-aged"]),
    ("one", &["small-one"]),
];

/// The corpora there are: by name, with the rank of their cases.
pub(super) fn corpora(lab: &Lab) -> Vec<(&'static str, Corpus, u8)> {
    match lab.small {
        true => vec![("small", SMALL, 1)],
        false => vec![("2-machines", SMALLEST, 1), ("8-machines", LARGER, 2)],
    }
}

fn cases(lab: &Lab) -> Vec<Case> {
    let case = |(id, corpus, rank): (&str, Corpus, u8)| {
        let versions: usize = corpus.iter().map(|(_, versions)| versions.len()).sum();
        let what = format!("{versions} versions of {} machines", corpus.len());
        Case::new(id, what, rank, &[Need::Library])
    };
    let corpora = corpora(lab).into_iter().map(case);
    corpora.chain(corpus::cases(lab)).collect()
}

/// What is measured.
#[derive(Clone, Copy)]
enum By {
    Drover(&'static str),
    Restic,
    Borg(Option<&'static str>),
}

impl By {
    fn name(self) -> String {
        match self {
            By::Drover(share) => format!("drover --share {share}"),
            By::Restic => "restic".to_owned(),
            By::Borg(None) => "borg".to_owned(),
            By::Borg(Some(chunks)) => format!("borg {chunks}"),
        }
    }

    fn program(self) -> Option<&'static str> {
        match self {
            By::Drover(_) => None,
            By::Restic => Some("restic"),
            By::Borg(_) => Some("borg"),
        }
    }
}

const ALL: [By; 6] = [
    By::Drover("all"),
    By::Drover("popular"),
    By::Drover("none"),
    By::Restic,
    By::Borg(None),
    By::Borg(Some("fixed,65536")),
];

/// The versions of a corpus, round by round, as timers make them.
pub(super) fn versions_of(lab: &Lab, corpus: &str) -> Result<Vec<Version>> {
    let corpora = corpora(lab);
    let (_, corpus, _) = corpora
        .iter()
        .find(|(id, ..)| *id == corpus)
        .context("no such case")?;
    let rounds = corpus.iter().map(|(_, versions)| versions.len()).max();
    let mut versions = Vec::new();
    for round in 0..rounds.unwrap_or(0) {
        for (machine, names) in *corpus {
            if let Some(name) = names.get(round) {
                let image = lab.image(name)?;
                let machine = (*machine).to_owned();
                versions.push(Version { machine, image });
            }
        }
    }
    Ok(versions)
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    if let Some(machines) = corpus::machines(&case.id) {
        let corpus = corpus::Daily::new(lab, machines)?;
        return compare(lab, &corpus.series());
    }
    let series = Series {
        versions: versions_of(lab, &case.id)?,
        ready: Box::new(|_| Ok(())),
    };
    compare(lab, &series)
}

fn compare(lab: &Lab, series: &Series<'_>) -> Result<Vec<Row>> {
    let (mut known, mut limit, mut data, mut unique) = (Known::default(), 0, 0, 0);
    for (number, version) in series.versions.iter().enumerate() {
        (series.ready)(number)?;
        let added = known.add(&version.image)?;
        limit += added.limit_bytes;
        data += added.data_blocks * 4096;
        unique += added.unique_blocks * 4096;
    }
    let mb = |bytes: u64| bytes as f64 / 1e6;
    eprintln!(
        "  {:.1} MB of data, {:.1} MB different",
        mb(data),
        mb(unique)
    );
    let mut row = Row::new([("by", "limit".to_owned())]);
    row.set(STORED, mb(limit));
    row.set(TIMES_LIMIT, 1.0);
    let mut rows = vec![row];
    for by in ALL {
        let row = Row::new([("by", by.name())]);
        rows.push(match by.program().filter(|program| !shell::have(program)) {
            Some(program) => row.but(Verdict::Skipped(format!("no {program} here"))),
            None => match measure(lab, by, series, unique, row.clone()) {
                Ok(mut row) => {
                    let stored = row.value(STORED).unwrap_or_default();
                    row.set(TIMES_LIMIT, stored * 1e6 / limit as f64);
                    if let Some(cpu) = row.value(CPU) {
                        row.set(SPEED, data as f64 / 1e6 / cpu.max(1e-3));
                    }
                    row
                }
                Err(error) => row.but(Verdict::failed(&error)),
            },
        });
    }
    Ok(rows)
}

/// Stores versions that have so many bytes of different blocks.
fn measure(lab: &Lab, by: By, series: &Series<'_>, unique: u64, mut row: Row) -> Result<Row> {
    let versions = &series.versions;
    let tool = Tool::new(lab, by)?;
    let (mut seconds, mut used) = (0.0, 0.0);
    for (number, version) in versions.iter().enumerate() {
        (series.ready)(number)?;
        let (began, cpu) = (Instant::now(), watch::cpu_of_children());
        tool.store(number, version)?;
        seconds += began.elapsed().as_secs_f64();
        used += watch::cpu_of_children() - cpu;
    }
    row.set(SECONDS, seconds);
    row.set(CPU, used);
    let stored = size(&tool.store_dir())?;
    row.set(STORED, stored as f64 / 1e6);
    if let By::Drover(_) = by {
        let said = shell::run(tool.command().args(["vault", "stats", "--json"]))?.stdout;
        let stats: serde_json::Value = serde_json::from_slice(said.trim_ascii())?;
        let bytes = |key: &str| stats[key].as_f64().with_context(|| format!("no {key}"));
        let blocks = bytes("used_bytes")? + bytes("garbage_bytes")?;
        row.set(PERFECT, blocks / unique as f64);
        row.set(METADATA, bytes("metadata_bytes")? / 1e6);
    }

    let newest = versions
        .iter()
        .rposition(|v| v.machine == versions[0].machine);
    let newest = newest.context("no versions")?;
    let image = &versions[newest].image;
    let began = Instant::now();
    let restored = tool.restore(newest, &versions[newest])?;
    let seconds = began.elapsed().as_secs_f64();
    row.set(RESTORE, fs::metadata(image)?.len() as f64 / 1e6 / seconds);
    must_be_same(image, &restored)?;

    let began = Instant::now();
    let count = versions.iter().filter(|v| v.machine == versions[0].machine);
    tool.delete(0, &versions[0], count.count())?;
    row.set(DELETE, began.elapsed().as_secs_f64());
    row.set(
        FREED,
        stored.saturating_sub(size(&tool.store_dir())?) as f64 / 1e6,
    );
    eprintln!("  {}: {:.1} MB", by.name(), stored as f64 / 1e6);
    Ok(row)
}

/// A program with its repository.
struct Tool {
    by: By,
    drover: PathBuf,
    work: Work,
}

impl Tool {
    /// With an empty repository.
    fn new(lab: &Lab, by: By) -> Result<Self> {
        let tool = Tool {
            by,
            drover: lab.binary()?,
            work: lab.work("vault")?,
        };
        tool.init()?;
        Ok(tool)
    }

    fn store_dir(&self) -> PathBuf {
        self.work.join("store")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(match self.by {
            By::Drover(_) => self.drover.as_os_str().to_owned(),
            By::Restic => "restic".into(),
            By::Borg(_) => "borg".into(),
        });
        command
            .env("DROVER_HOME", self.work.join("home"))
            .env("RESTIC_REPOSITORY", self.store_dir())
            .env("RESTIC_PASSWORD", "thrown away")
            .env("RESTIC_CACHE_DIR", self.work.join("cache"))
            .env("BORG_REPO", self.store_dir())
            .env("BORG_BASE_DIR", self.work.join("cache"))
            .env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes");
        command
    }

    fn run(&self, args: &[&str]) -> Result<()> {
        shell::run(self.command().args(args)).map(drop)
    }

    fn init(&self) -> Result<()> {
        let store = self.store_dir().display().to_string();
        match self.by {
            By::Drover(share) => self.run(&["vault", "init", &store, "--share", share]),
            By::Restic => self.run(&["init", "--repository-version", "2"]),
            By::Borg(_) => self.run(&["init", "--encryption", "none"]),
        }
    }

    fn store(&self, number: usize, version: &Version) -> Result<()> {
        let args = self.args_to_store(number, version);
        self.run(&args.iter().map(String::as_str).collect::<Vec<_>>())?;
        match self.by {
            // Each time: a timer would do it once a week.
            By::Drover("popular") => self.run(&["vault", "popular"]),
            _ => Ok(()),
        }
    }

    fn args_to_store(&self, number: usize, version: &Version) -> Vec<String> {
        let image = version.image.display().to_string();
        let args: &[&str] = match self.by {
            By::Drover(_) => &["snapshot", &image, "--as", &version.machine],
            By::Restic => &["backup", "--quiet", "--host", &version.machine, &image],
            By::Borg(chunks) => {
                let archive = format!("::{number}");
                let mut args = vec!["create", "--compression", "zstd,3"];
                if let Some(chunks) = chunks {
                    args.extend(["--chunker-params", chunks]);
                }
                args.extend([archive.as_str(), image.as_str()]);
                return args.into_iter().map(str::to_owned).collect();
            }
        };
        args.iter().map(|arg| (*arg).to_owned()).collect()
    }

    /// The file to which a version was restored.
    fn restore(&self, number: usize, version: &Version) -> Result<PathBuf> {
        let out = self.work.join("restored");
        fs::create_dir_all(&out)?;
        let image = version.image.display().to_string();
        let below = out.join(image.trim_start_matches('/'));
        match self.by {
            By::Drover(_) => {
                let file = out.join(file_name(&version.image));
                let name = format!("{}@latest", version.machine);
                self.run(&["restore", &name, &file.display().to_string()])?;
                Ok(file)
            }
            By::Restic => {
                let target = out.display().to_string();
                let host = ["restore", "latest", "--quiet", "--host", &version.machine];
                self.run(&[&host[..], &["--target", &target]].concat())?;
                Ok(below)
            }
            By::Borg(_) => {
                let archive = format!("::{number}");
                let mut command = self.command();
                command
                    .current_dir(&out)
                    .args(["extract", "--sparse", &archive]);
                shell::run(&mut command)?;
                Ok(below)
            }
        }
    }

    /// Deletes the oldest of `count` versions of a machine, and frees its space.
    fn delete(&self, number: usize, version: &Version, count: usize) -> Result<()> {
        let kept = (count - 1).to_string();
        match self.by {
            By::Drover(_) => {
                let forget = [
                    "vault",
                    "forget",
                    &version.machine,
                    "--keep-last",
                    &kept,
                    "--yes",
                ];
                self.run(&forget)?;
                self.run(&["vault", "compact", "--grace", "0s"])
            }
            By::Restic => {
                let group = [
                    "forget",
                    "--quiet",
                    "--group-by",
                    "host",
                    "--host",
                    &version.machine,
                ];
                self.run(&[&group[..], &["--keep-last", &kept, "--prune"]].concat())
            }
            By::Borg(_) => {
                self.run(&["delete", &format!("::{number}")])?;
                self.run(&["compact"])
            }
        }
    }
}

/// Bytes of all files below a directory.
fn size(dir: &Path) -> Result<u64> {
    let mut total = 0;
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        let meta = entry.metadata()?;
        total += match meta.is_dir() {
            true => size(&entry.path())?,
            false => meta.len(),
        };
    }
    Ok(total)
}
