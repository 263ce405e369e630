//! What all experiments share: cases, rows, figures, and the words in which a row says that something went wrong.
//!
//! An [`Experiment`] lists its [`Case`]s; each case yields [`Row`]s; rows are kept as JSON, a line a case, in one file that
//! belongs to the repository, and `docs/benchmarks.md` is made of it.

mod document;
mod process;
mod rows;
mod run;

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::setup::Lab;

pub use document::{DocumentArgs, make_document};
pub use process::{CaseArgs, run_case};
pub use run::{BenchArgs, EXIT_CODES, bench};

/// One kind of measurement.
pub struct Experiment {
    /// Its name on the command line: lower case, no spaces.
    pub name: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// What is measured, how, and against what, in a paragraph or two of Markdown.
    pub text: &'static str,
    /// The columns of its table, in order.
    pub columns: &'static [Column],
    /// Everything that it can measure here, most important first. Cheap: nothing is measured yet.
    pub cases: fn(&Lab) -> Result<Vec<Case>>,
    /// Measures one case. A rival that fails is a row with a [`Verdict`], not an error.
    pub run: fn(&Lab, &Case) -> Result<Vec<Row>>,
}

/// A column of an experiment's table.
#[derive(Debug)]
pub struct Column {
    /// Its key in [`Row::labels`] or [`Row::figures`].
    pub key: &'static str,
    /// Its heading, with the unit.
    pub head: &'static str,
    /// Digits after the point; none for words.
    pub decimals: Option<usize>,
    /// A good row without it is a failed one.
    pub required: bool,
}

impl Column {
    /// A column of words.
    pub const fn label(key: &'static str, head: &'static str) -> Self {
        Self::new(key, head, None, false)
    }

    /// A column of numbers that every good row has.
    pub const fn figure(key: &'static str, head: &'static str, decimals: usize) -> Self {
        Self::new(key, head, Some(decimals), true)
    }

    /// A column of numbers that some rows have.
    pub const fn optional(key: &'static str, head: &'static str, decimals: usize) -> Self {
        Self::new(key, head, Some(decimals), false)
    }

    const fn new(
        key: &'static str,
        head: &'static str,
        decimals: Option<usize>,
        required: bool,
    ) -> Self {
        Self {
            key,
            head,
            decimals,
            required,
        }
    }
}

/// One thing to measure.
#[derive(Clone, Debug)]
pub struct Case {
    /// Unique in its experiment: `100mbit-40ms-drover`.
    pub id: String,
    /// In words.
    pub what: String,
    /// 0 for what every run should have; greater ones are for runs that have the time.
    pub rank: u8,
    /// The rival, by name and version, whose result it is; none for drover's.
    pub rival: Option<String>,
    /// What the machine must have for it.
    pub needs: &'static [Need],
}

impl Case {
    /// A case of drover's.
    pub fn new(
        id: impl Into<String>,
        what: impl Into<String>,
        rank: u8,
        needs: &'static [Need],
    ) -> Self {
        Self {
            id: id.into(),
            what: what.into(),
            rank,
            rival: None,
            needs,
        }
    }
}

/// What a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The WAN link: root, namespaces, TUN devices, `ip`.
    Link,
    /// The image library.
    Library,
}

/// What was measured of one subject in one setting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What the row is about, by key.
    pub labels: BTreeMap<String, String>,
    /// What was measured, by key.
    pub figures: BTreeMap<String, Figure>,
    /// Whether it was measured, and if not, why.
    #[serde(flatten)]
    pub verdict: Verdict,
}

impl Row {
    /// A row without figures yet.
    pub fn new<'a>(labels: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        let labels = labels
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value));
        Self {
            labels: labels.collect(),
            ..Self::default()
        }
    }

    /// The same with a verdict.
    #[must_use]
    pub fn but(mut self, verdict: Verdict) -> Self {
        self.verdict = verdict;
        self
    }

    /// Sets a figure that was measured once.
    pub fn set(&mut self, key: &str, value: f64) {
        self.set_all(key, &[value]);
    }

    /// Sets a figure that was measured several times; leaves it out when there is no value.
    pub fn set_all(&mut self, key: &str, values: &[f64]) {
        if let Some(figure) = Figure::of(values) {
            self.figures.insert(key.to_owned(), figure);
        }
    }

    /// The median of a figure.
    pub fn value(&self, key: &str) -> Option<f64> {
        self.figures.get(key).map(|figure| figure.median)
    }

    /// A label, empty where the row has none of that key.
    pub fn label(&self, key: &str) -> &str {
        self.labels.get(key).map_or("", String::as_str)
    }
}

/// A figure and its spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The least.
    pub min: f64,
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The greatest.
    pub max: f64,
    /// How often it was measured.
    pub runs: usize,
}

impl Figure {
    /// Of some values; `None` without one.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[middle]);
        Some(Self {
            min,
            median,
            max,
            runs: values.len(),
        })
    }

    /// `1.18 (1.13 to 1.34)` where it was measured repeatedly, else the figure alone.
    pub fn show(&self, decimals: usize) -> String {
        let Self {
            min,
            median,
            max,
            runs,
        } = self;
        match runs {
            ..=1 => format!("{median:.decimals$}"),
            _ => format!("{median:.decimals$} ({min:.decimals$} to {max:.decimals$})"),
        }
    }
}

/// The outcome of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", content = "why", rename_all = "snake_case")]
pub enum Verdict {
    /// Measured; every delivered file is its original.
    #[default]
    Good,
    /// Not measured: what it needs is not here.
    Skipped(String),
    /// It did not come to its end.
    Failed(String),
    /// It came to its end and a delivered file is not its original.
    Wrong(String),
}

impl Verdict {
    /// A failure, by its error: one line, not a page.
    pub fn failed(error: &anyhow::Error) -> Self {
        Self::Failed(
            format!("{error:#}")
                .replace('\n', " | ")
                .chars()
                .take(400)
                .collect(),
        )
    }

    /// What is to be said about a row that is not good.
    pub fn words(&self) -> Option<String> {
        match self {
            Self::Good => None,
            Self::Skipped(why) => Some(format!("SKIPPED: {why}")),
            Self::Failed(why) => Some(format!("FAILED: {why}")),
            Self::Wrong(why) => Some(format!("WRONG: {why}")),
        }
    }
}

#[cfg(test)]
mod tests;
