//! Cost of a memory region that is backed by a device: page faults, readahead, write tracking.

use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::frontends::example;
use crate::bench::{Case, Column, Experiment, Row, Verdict};
use crate::setup::Lab;
use crate::shell;

pub const EXPERIMENT: Experiment = Experiment {
    name: "region",
    title: "Memory whose pages come from a device",
    text: "`region_cost`, an example of `drover-frontend`, in one process: a userfaultfd region of 256 MiB over a device in memory, as it \
is and with 1 ms added to each request, and one of 1 GiB that is written. A fault is one byte read of a page that is absent, pages in random \
order; *reading on* reads a word of each page in order, with and without prefetch; *populating* fetches all in the background. What \
is read is compared. Tracking is by asynchronous write protection and PAGEMAP_SCAN. Anonymous memory is the baseline.",
    columns: &[
        Column::label("what", "what"),
        Column::label("unit", "unit"),
        Column::figure("value", "value", 2),
    ],
    cases: |_| {
        Ok(vec![Case::new(
            "memory",
            "faults, prefetch and tracking of a region over a device in memory",
            0,
            &[],
        )])
    },
    run,
};

/// A figure in the example program's output.
#[derive(Deserialize)]
struct Printed {
    name: String,
    value: f64,
    unit: String,
}

/// One row per figure, in the order of the first run, with the values of all runs.
fn run(lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
    let program = match example(lab, "region_cost") {
        Ok(program) => program,
        Err(error) => {
            let row = Row::new([("what", "region_cost".to_owned())]);
            return Ok(vec![row.but(Verdict::Skipped(format!("{error:#}")))]);
        }
    };
    let mut runs: Vec<Vec<Printed>> = Vec::new();
    for _ in 0..lab.repeat.max(1) {
        let said = shell::run(Command::new(&program).arg("--json"))?.stdout;
        runs.push(serde_json::from_slice(&said).context("region_cost printed no list of figures")?);
    }
    let row = |figure: &Printed| {
        let same = runs
            .iter()
            .flatten()
            .filter(|other| other.name == figure.name);
        let values: Vec<f64> = same.map(|other| other.value).collect();
        let mut row = Row::new([("what", figure.name.clone()), ("unit", figure.unit.clone())]);
        row.set_all("value", &values);
        row
    };
    Ok(runs[0].iter().map(row).collect())
}
