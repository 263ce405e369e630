//! The framework of all experiments: cases, result rows, figures, and verdicts.
//!
//! An [`Experiment`] lists its [`Case`]s; each case yields [`Row`]s. Rows are stored as JSON, one line per case, in a
//! file in the repository, from which `docs/benchmarks.md` is generated.

mod document;
mod plot;
mod process;
mod rows;
mod run;

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::setup::Lab;

pub use document::make_document;
pub use process::run_case;
pub use run::{BenchArgs, bench};

/// One kind of measurement.
pub struct Experiment {
    /// Its name on the command line: lower case, no spaces.
    pub name: &'static str,
    /// Title in the document.
    pub title: &'static str,
    /// What is measured, how, and compared with what: one or two paragraphs of Markdown.
    pub text: &'static str,
    /// The columns of its table, in order.
    pub columns: &'static [Column],
    /// All cases that this machine might run, most important first. Cheap: measures nothing.
    pub cases: fn(&Lab) -> Result<Vec<Case>>,
    /// Measures one case. Failure of a rival is a row with a [`Verdict`], not an error.
    pub run: fn(&Lab, &Case) -> Result<Vec<Row>>,
}

/// A column of an experiment's table.
#[derive(Debug)]
pub struct Column {
    /// Its key in [`Row::labels`] or [`Row::figures`].
    pub key: &'static str,
    /// Heading, with the unit.
    pub head: &'static str,
    /// Decimal places; `None` for text.
    pub decimals: Option<usize>,
    /// Whether a good row must have it; without it, the row counts as failed.
    pub required: bool,
}

impl Column {
    /// A text column.
    pub const fn label(key: &'static str, head: &'static str) -> Self {
        Self {
            key,
            head,
            decimals: None,
            required: false,
        }
    }

    /// A numeric column that every good row has.
    pub const fn figure(key: &'static str, head: &'static str, decimals: usize) -> Self {
        let mut column = Self::optional(key, head, decimals);
        column.required = true;
        column
    }

    /// A numeric column that some rows have.
    pub const fn optional(key: &'static str, head: &'static str, decimals: usize) -> Self {
        let mut column = Self::label(key, head);
        column.decimals = Some(decimals);
        column
    }
}

/// A unit of measurement.
#[derive(Clone, Debug)]
pub struct Case {
    /// Unique within its experiment: `100mbit-40ms-drover`.
    pub id: String,
    /// Description.
    pub what: String,
    /// Priority: 0 for cases of every run; higher ranks are for longer runs.
    pub rank: u8,
    /// Name and version of the rival measured; `None` for drover.
    pub rival: Option<String>,
    /// What the case requires of the machine.
    pub needs: &'static [Need],
}

impl Case {
    /// A case that measures drover.
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

/// Something that a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The WAN link: root, network namespaces, TUN devices, `ip`.
    Link,
    /// The image library.
    Library,
}

/// The results for one subject in one setting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was measured, by key.
    pub labels: BTreeMap<String, String>,
    /// The results, by key.
    pub figures: BTreeMap<String, Figure>,
    /// Whether the measurement succeeded, and if not, why.
    #[serde(flatten)]
    pub verdict: Verdict,
}

impl Row {
    /// A row without figures.
    pub fn new<'a>(labels: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        let mut row = Self::default();
        let labels = labels
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value));
        row.labels.extend(labels);
        row
    }

    /// Sets the verdict.
    #[must_use]
    pub fn but(mut self, verdict: Verdict) -> Self {
        self.verdict = verdict;
        self
    }

    /// Sets a figure with a single measurement.
    pub fn set(&mut self, key: &str, value: f64) {
        self.set_all(key, &[value]);
    }

    /// Sets a figure with several measurements; none are omitted.
    pub fn set_all(&mut self, key: &str, values: &[f64]) {
        if let Some(figure) = Figure::of(values) {
            self.figures.insert(key.to_owned(), figure);
        }
    }

    /// The median of a figure.
    pub fn value(&self, key: &str) -> Option<f64> {
        self.figures.get(key).map(|figure| figure.median)
    }

    /// A label; empty if the row does not have it.
    pub fn label(&self, key: &str) -> &str {
        self.labels.get(key).map_or("", String::as_str)
    }
}

/// A figure with its spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Minimum.
    pub min: f64,
    /// Median: the middle value, or the mean of the two middle values.
    pub median: f64,
    /// Maximum.
    pub max: f64,
    /// Number of measurements.
    pub runs: usize,
}

impl Figure {
    /// Summarizes values; `None` if there are none, or one is not finite, which JSON cannot represent.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let runs = values.len();
        values.iter().all(|v| v.is_finite()).then_some(())?;
        Some(Self {
            min: *sorted.first()?,
            median: f64::midpoint(sorted[(runs - 1) / 2], sorted[runs / 2]),
            max: *sorted.last()?,
            runs,
        })
    }

    /// `1.18 (1.13 to 1.34)` for repeated measurements, else the value alone.
    pub fn show(&self, decimals: usize) -> String {
        let [median, min, max] =
            [self.median, self.min, self.max].map(|v| format!("{v:.decimals$}"));
        match self.runs {
            ..=1 => median,
            _ => format!("{median} ({min} to {max})"),
        }
    }
}

/// The outcome of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", content = "why", rename_all = "snake_case")]
pub enum Verdict {
    /// Succeeded; every delivered file equals its original.
    #[default]
    Good,
    /// Not measured, because a requirement is missing.
    Skipped(String),
    /// Did not complete.
    Failed(String),
    /// Completed, but a delivered file differs from its original.
    Wrong(String),
}

impl Verdict {
    /// A failure with the error in one line.
    pub fn failed(error: &anyhow::Error) -> Self {
        let line = format!("{error:#}").replace('\n', " | ");
        Self::Failed(line.chars().take(400).collect())
    }

    /// The text to show for it.
    pub fn words(&self) -> String {
        match self {
            Self::Good => "good".to_owned(),
            Self::Skipped(why) => format!("SKIPPED: {why}"),
            Self::Failed(why) => format!("FAILED: {why}"),
            Self::Wrong(why) => format!("WRONG: {why}"),
        }
    }
}

#[cfg(test)]
mod tests;
