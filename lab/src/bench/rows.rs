//! Stored results: a file with one line of JSON per case, so that a later run can continue.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result};
use drover_storage::atomic_replace;
use serde::{Deserialize, Serialize};

use super::{Row, Verdict};
use crate::shell;

/// The result of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The experiment's name.
    pub experiment: String,
    /// The case's id.
    pub case: String,
    /// The UTC date: `2026-03-01`.
    pub measured: String,
    /// The commit that drover and the lab were built from.
    pub build: String,
    /// Hash of drover's program, or the rival's name and version: the result is valid while this stays the same.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// Description of the machine.
    pub machine: String,
    /// Its load average before the case.
    pub load: f64,
    /// The rows.
    pub rows: Vec<Row>,
}

impl Record {
    /// Whether every row is good.
    pub fn is_good(&self) -> bool {
        self.rows.iter().all(|row| row.verdict == Verdict::Good)
    }
}

/// The file of stored results.
pub struct Rows {
    file: PathBuf,
    /// Its records, in order.
    pub all: Vec<Record>,
}

impl Rows {
    /// Reads the file; a missing one is empty.
    ///
    /// # Errors
    /// When it is truncated or has another format.
    pub fn read(file: &Path) -> Result<Self> {
        let text = match fs::read_to_string(file) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("cannot read {}", file.display()))?,
        };
        let all: Result<_, _> = text.lines().map(serde_json::from_str).collect();
        let all = all.with_context(|| format!("{} is torn or not ours", file.display()))?;
        let file = file.to_owned();
        Ok(Self { file, all })
    }

    /// The stored record of a case.
    pub fn of(&self, experiment: &str, case: &str) -> Option<&Record> {
        let mut all = self.all.iter();
        all.find(|r| r.experiment == experiment && r.case == case)
    }

    /// Stores a record, replacing that of the same case. Atomic: a crash leaves the old file or the new one.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn keep(&mut self, record: Record) -> Result<()> {
        let same = |r: &&mut Record| r.experiment == record.experiment && r.case == record.case;
        match self.all.iter_mut().find(same) {
            Some(old) => *old = record,
            None => self.all.push(record),
        }
        let mut text = String::new();
        for record in &self.all {
            text += &serde_json::to_string(record)?;
            text.push('\n');
        }
        fs::create_dir_all(self.file.parent().context("no file name")?)?;
        let written = atomic_replace(&self.file, text.as_bytes());
        written.with_context(|| format!("cannot write {}", self.file.display()))
    }
}

/// Whether a build is named by a commit.
pub fn is_commit(build: &str) -> bool {
    build.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The commit of the checkout, with `-dirty` if anything but documents differs from it.
pub fn commit() -> String {
    let Ok(head) = git(&["rev-parse", "--short=10", "HEAD"]) else {
        return "unknown".to_owned();
    };
    let clean = git(&["diff", "--quiet", "HEAD", "--", ":(top,exclude)docs"]).is_ok();
    let commit = String::from_utf8_lossy(&head.stdout);
    format!("{}{}", commit.trim(), if clean { "" } else { "-dirty" })
}

/// Whether a build can be reproduced from this repository.
pub fn is_in_repository(build: &str) -> bool {
    git(&["cat-file", "-e", &format!("{build}^{{commit}}")]).is_ok()
}

fn git(args: &[&str]) -> Result<Output> {
    shell::run(Command::new("git").args(args))
}
