//! Results that are kept, a JSON file for each case, so that a run can go on where another ended.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Row;
use super::Verdict;
use super::identity::Identity;
use super::plan::Plan;

/// The version of the files' format.
pub const FORMAT: u32 = 1;

/// What was measured of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`FORMAT`].
    pub format: u32,
    /// The experiment's name.
    pub experiment: String,
    /// The case's id.
    pub case: String,
    /// When it was measured, in UTC: `2026-03-01T10:00:00Z`.
    pub measured: String,
    /// The commit of the checkout then.
    pub commit: String,
    /// What the result depends on.
    pub identity: Identity,
    /// How often what varies was measured.
    pub repeat: usize,
    /// What it took.
    pub seconds: f64,
    /// The rows.
    pub rows: Vec<Row>,
}

impl Record {
    /// Why it is to be measured again, if it is.
    pub fn outdated(&self, now: &Identity, repeat: usize) -> Option<&'static str> {
        if !self.is_good() {
            return Some("it failed");
        }
        if self.repeat < repeat {
            return Some("it was measured less often");
        }
        self.identity.differs(now)
    }

    /// Whether every row is good.
    pub fn is_good(&self) -> bool {
        self.rows.iter().all(|row| row.verdict == Verdict::Good)
    }
}

/// A directory of records.
pub struct Store {
    dir: PathBuf,
}

impl Store {
    /// The store below `out`. The small set has one of its own.
    pub fn at(out: &Path, small: bool) -> Self {
        Self {
            dir: out.join(if small { "bench-small" } else { "bench" }),
        }
    }

    /// Keeps other runs out until the guard is gone: two at once would measure each other.
    ///
    /// # Errors
    /// When another run is under way, or the directory cannot be made.
    pub fn lock(&self) -> Result<File> {
        fs::create_dir_all(&self.dir)
            .with_context(|| format!("cannot make {}", self.dir.display()))?;
        let lock = File::create(self.dir.join(".lock"))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("another `lab bench` writes to {}", self.dir.display()))?;
        Ok(lock)
    }

    /// Keeps a record. A crash at any time leaves the old file or the new one.
    ///
    /// # Errors
    /// When it cannot be written, or the case's id is no file name.
    pub fn save(&self, record: &Record) -> Result<()> {
        write(&self.path(&record.experiment, &record.case)?, record)
    }

    /// The record of a case, if there is one.
    ///
    /// # Errors
    /// When there is a file and it is torn, or not a record of this case in this format.
    pub fn load(&self, experiment: &str, case: &str) -> Result<Option<Record>> {
        let path = self.path(experiment, case)?;
        let Some(record) = read::<Record>(&path)? else {
            return Ok(None);
        };
        if (record.experiment.as_str(), record.case.as_str()) != (experiment, case) {
            bail!(
                "{} holds {}/{}",
                path.display(),
                record.experiment,
                record.case
            );
        }
        Ok(Some(record))
    }

    /// Keeps the plan of a run: the document says by it what was left out.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save_plan(&self, plan: &Plan) -> Result<()> {
        write(&self.dir.join("plan.json"), plan)
    }

    /// The plan of the last run.
    ///
    /// # Errors
    /// When it is torn or in another format.
    pub fn load_plan(&self) -> Result<Option<Plan>> {
        read(&self.dir.join("plan.json"))
    }

    fn path(&self, experiment: &str, case: &str) -> Result<PathBuf> {
        for name in [experiment, case] {
            let fit = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
            if name.is_empty() || name.starts_with('.') || !name.chars().all(fit) {
                bail!("{name:?} is no name for a case's file");
            }
        }
        Ok(self.dir.join(experiment).join(format!("{case}.json")))
    }
}

fn write(path: &Path, content: &impl Serialize) -> Result<()> {
    let (dir, name) = (
        path.parent().context("no directory")?,
        path.file_name().context("no name")?,
    );
    let attempt = || -> Result<()> {
        fs::create_dir_all(dir)?;
        // Hidden, so that one that a killed run left is not taken for a record; the next run writes over it.
        let temporary = dir.join(format!(".{}.part", name.to_string_lossy()));
        let mut file = File::create(&temporary)?;
        file.write_all(&serde_json::to_vec_pretty(content)?)?;
        file.sync_all()?;
        Ok(fs::rename(&temporary, path)?)
    };
    attempt().with_context(|| format!("cannot write {}", path.display()))
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context(format!("cannot read {}", path.display())),
    };
    let Format { format } = serde_json::from_slice(&bytes)
        .with_context(|| format!("{} is torn or not ours", path.display()))?;
    if format != FORMAT {
        bail!(
            "{} has format {format}, this lab knows {FORMAT}",
            path.display()
        );
    }
    let read = serde_json::from_slice(&bytes)
        .with_context(|| format!("{} is torn or not ours", path.display()))?;
    Ok(Some(read))
}
