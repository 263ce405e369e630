//! Whether a case's rows are what they must be, and what the exit code says about all of them.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::Result;

use super::{About, Case, Column, Experiment, Row, Subject, Verdict};
use crate::experiments::Lab;

/// Measures a case; whatever happens, there are rows. They are judged: see [`judged`].
pub fn measure(experiment: &dyn Experiment, lab: &Lab, case: &Case) -> Vec<Row> {
    let outcome = catch_unwind(AssertUnwindSafe(|| experiment.run(lab, case)));
    let outcome = outcome
        .unwrap_or_else(|panic| Err(anyhow::anyhow!("the lab panicked: {}", words(&*panic))));
    judged(experiment.about(), case, outcome)
}

/// The rows of a case, or one that says why there are none. A good row without a required figure, or with one that is no
/// number, is a failed one.
pub fn judged(about: &About, case: &Case, outcome: Result<Vec<Row>>) -> Vec<Row> {
    let rows = match outcome {
        Ok(rows) if rows.is_empty() => return vec![failed(about, case, "no rows".to_owned())],
        Ok(rows) => rows,
        Err(error) => return vec![failed(about, case, format!("{error:#}"))],
    };
    rows.into_iter().map(|row| complete(about, row)).collect()
}

/// A row that says that a case failed.
pub fn failed(about: &About, case: &Case, why: String) -> Row {
    bare(about, &case.id, Verdict::Failed(why))
}

/// A row of nothing but its name and how it went.
pub fn bare(about: &About, name: &str, verdict: Verdict) -> Row {
    let first = about.columns.iter().find_map(|column| match column {
        Column::Label { key, .. } => Some(*key),
        Column::Figure { .. } => None,
    });
    let mut row = Row::new([(first.unwrap_or("case"), name.to_owned())]);
    row.verdict = verdict;
    row
}

fn complete(about: &About, mut row: Row) -> Row {
    let finite = |row: &Row, key: &str| {
        row.figures.get(key).map(|figure| {
            let spread = figure.spread;
            [spread.min, spread.median, spread.max]
                .iter()
                .all(|value| value.is_finite())
        })
    };
    let mut bad: Vec<String> = Vec::new();
    for column in about.columns {
        if let Column::Figure { key, required, .. } = column
            && (*required || row.figures.contains_key(*key))
            && finite(&row, key) != Some(true)
        {
            bad.push((*key).to_owned());
        }
    }
    // JSON has no word for what is not finite.
    let keys: Vec<String> = row.figures.keys().cloned().collect();
    for key in keys {
        if finite(&row, &key) == Some(false) {
            row.figures.remove(&key);
            if !bad.contains(&key) {
                bad.push(key);
            }
        }
    }
    if row.verdict == Verdict::Good && !bad.is_empty() {
        row.verdict = Verdict::Failed(format!("no figure {}", bad.join(", ")));
    }
    row
}

fn words(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("without a word")
}

/// Whether a row is about a rival. A case of drover may measure rivals by its side, in turn: `by` tells.
fn is_rivals(case: &Case, row: &Row) -> bool {
    let by = row.label("by");
    let own = ["drover", "limit", "ideal"]
        .iter()
        .any(|own| by.starts_with(own));
    match case.subject {
        Subject::Rival(_) => true,
        // A case that could not be measured at all has only its own name.
        _ => !by.is_empty() && !own && by != case.id,
    }
}

/// What a run says to the program that started it; the lowest number but 0 wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exit {
    drover: bool,
    rival: bool,
    lacking: bool,
}

impl Exit {
    /// Takes in the rows of a case.
    pub fn see(&mut self, case: &Case, rows: &[Row]) {
        for row in rows {
            let rival = is_rivals(case, row);
            match row.verdict {
                Verdict::Good => {}
                // A rival that is not installed is nothing that a run must have.
                Verdict::Skipped(_) => self.lacking |= !rival,
                Verdict::Failed(_) | Verdict::Wrong(_) if rival => self.rival = true,
                Verdict::Failed(_) | Verdict::Wrong(_) => self.drover = true,
            }
        }
    }

    /// Something whole cannot be measured on this machine.
    pub fn lacks(&mut self) {
        self.lacking = true;
    }

    /// A result was lost.
    pub fn fails(&mut self) {
        self.drover = true;
    }

    /// The exit code.
    pub fn code(self) -> u8 {
        match self {
            Self { drover: true, .. } => 1,
            Self { rival: true, .. } => 3,
            Self { lacking: true, .. } => 4,
            _ => 0,
        }
    }
}
