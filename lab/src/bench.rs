//! What all experiments share: cases, rows, figures, and the words in which a row says that something went wrong.
//!
//! An [`Experiment`] lists its [`Case`]s; each case yields [`Row`]s; rows are kept as JSON, shown as tables and drawn
//! as [`Plot`]s. One runner drives them all, so that bad news is told the same way everywhere.

mod command;
mod document;
mod identity;
mod judge;
mod needs;
mod plan;
mod process;
mod runner;
mod show;
mod space;
mod store;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::experiments::Lab;
use crate::report::Spread;

pub use command::{BenchArgs, DocumentArgs, EXIT_CODES, bench, make_document};
pub use process::{CaseArgs, run_case};

/// One kind of measurement.
pub trait Experiment: Sync {
    /// What it is, for tables and documents.
    fn about(&self) -> &'static About;

    /// Everything that it can measure here, most important first. Cheap: nothing is measured yet.
    ///
    /// # Errors
    /// When not even a list can be made (no image library).
    fn cases(&self, lab: &Lab) -> Result<Vec<Case>>;

    /// Measures one case. A rival that fails is a row with a [`Verdict`], not an error.
    ///
    /// # Errors
    /// When the case could not be measured at all; the runner makes a row of it and goes on.
    fn run(&self, lab: &Lab, case: &Case) -> Result<Vec<Row>>;

    /// Pictures of all rows that there are, of this run and of earlier ones.
    fn plots(&self, rows: &[Row]) -> Vec<Plot>;

    /// Whether the document shows a row at once; the rest is folded away.
    fn is_headline(&self, _row: &Row) -> bool {
        true
    }

    /// The images that the case reads. They are part of what its result depends on, and as much as they take on disk
    /// must be free. Without an answer: the whole library for a case that needs it, and none for another.
    fn images(&self, _lab: &Lab, _case: &Case) -> Option<Vec<PathBuf>> {
        None
    }
}

/// What an experiment is.
#[derive(Debug)]
pub struct About {
    /// Its name on the command line and of its files: lower case, no spaces.
    pub name: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// What is measured, how, and against what, in a paragraph or two of Markdown.
    pub text: &'static str,
    /// The columns of its table, in order.
    pub columns: &'static [Column],
}

/// A column of an experiment's table.
#[derive(Debug)]
pub enum Column {
    /// Words: what the row is about.
    Label {
        /// Its key in [`Row::labels`].
        key: &'static str,
        /// Its heading.
        head: &'static str,
    },
    /// A number.
    Figure {
        /// Its key in [`Row::figures`].
        key: &'static str,
        /// Its heading, with the unit.
        head: &'static str,
        /// Digits after the point.
        decimals: usize,
        /// A good row without it is a failed one.
        required: bool,
    },
}

impl Column {
    /// A column of words.
    pub const fn label(key: &'static str, head: &'static str) -> Self {
        Self::Label { key, head }
    }

    /// A column of numbers that every good row has.
    pub const fn figure(key: &'static str, head: &'static str, decimals: usize) -> Self {
        Self::Figure {
            key,
            head,
            decimals,
            required: true,
        }
    }

    /// A column of numbers that some rows have.
    pub const fn optional(key: &'static str, head: &'static str, decimals: usize) -> Self {
        Self::Figure {
            key,
            head,
            decimals,
            required: false,
        }
    }
}

/// One thing to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Unique in its experiment, fit for a file name: `100mbit-40ms-drover`.
    pub id: String,
    /// In words, for plans and progress.
    pub what: String,
    /// What it is expected to take.
    pub seconds: f64,
    /// 0 for what every run should have; what has a greater rank is left out first.
    pub rank: u8,
    /// Whose result it is: it stays valid until that changes.
    pub subject: Subject,
    /// What the machine must have for it.
    pub needs: &'static [Need],
}

/// What a result depends on beside the images and the lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The drover binary under test, or drover's crates that are built into the lab.
    Drover,
    /// A rival, by name and version.
    Rival(String),
    /// Nothing but the images.
    Images,
    /// Nothing but the lab itself.
    Lab,
}

/// What a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// How it went.
    pub verdict: Verdict,
}

impl Row {
    /// A row without figures yet.
    pub fn new<'a>(labels: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        Self {
            labels: labels
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect(),
            ..Self::default()
        }
    }

    /// Adds a figure that was measured once.
    #[cfg(test)]
    #[must_use]
    pub fn with(mut self, key: &str, value: f64) -> Self {
        self.set(key, value);
        self
    }

    /// Sets a figure that was measured once.
    pub fn set(&mut self, key: &str, value: f64) {
        self.figures.insert(key.to_owned(), Figure::once(value));
    }

    /// Sets a figure that was measured several times; leaves it out when there is no value.
    pub fn set_all(&mut self, key: &str, values: &[f64]) {
        if let Some(figure) = Figure::of(values) {
            self.figures.insert(key.to_owned(), figure);
        }
    }

    /// The median of a figure.
    pub fn value(&self, key: &str) -> Option<f64> {
        self.figures.get(key).map(|figure| figure.spread.median)
    }

    /// A label, empty where the row has none of that key.
    pub fn label(&self, key: &str) -> &str {
        self.labels.get(key).map_or("", String::as_str)
    }
}

/// A figure and its spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Least, median, greatest.
    #[serde(flatten)]
    pub spread: Spread,
    /// How often it was measured.
    pub runs: usize,
}

impl Figure {
    /// Measured once.
    pub fn once(value: f64) -> Self {
        Self {
            spread: Spread {
                min: value,
                median: value,
                max: value,
            },
            runs: 1,
        }
    }

    /// Measured several times; `None` without a value.
    pub fn of(values: &[f64]) -> Option<Self> {
        Some(Self {
            spread: Spread::of(values)?,
            runs: values.len(),
        })
    }
}

/// How the measurement behind a row went.
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

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// The stem of its files, unique in the experiment.
    pub name: String,
    /// What it shows.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// How it is drawn.
    pub kind: Kind,
}

/// An axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// What it counts, with the unit.
    pub label: String,
    /// Whether it is logarithmic.
    pub log: bool,
}

impl Axis {
    /// A linear axis.
    pub fn linear(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            log: false,
        }
    }

    /// A logarithmic axis.
    pub fn log(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            log: true,
        }
    }
}

/// How a plot is drawn.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// Points joined by lines; x and y of each point, and its least and greatest y where it was measured repeatedly.
    Lines(Vec<(String, Vec<Point>)>),
    /// Groups of bars: the groups' names, and for each series a name and a value a group (none: no bar).
    Bars {
        /// Names of the groups, along x.
        groups: Vec<String>,
        /// Series in the order of the legend.
        series: Vec<(String, Vec<Option<f64>>)>,
        /// Whether the bars of a group stand on one another.
        stacked: bool,
    },
}

/// A point of a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Where.
    pub x: f64,
    /// How much.
    pub y: f64,
    /// Least and greatest y.
    pub range: Option<(f64, f64)>,
}

#[cfg(test)]
mod tests;
