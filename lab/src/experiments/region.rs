//! What a memory region costs whose pages come from a device: a fault, reading on, tracking writes.

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::Lab;
use super::frontends::example;
use super::pictures::ranking;
use crate::bench::{About, Axis, Case, Column, Experiment, Plot, Row, Subject, Verdict};
use crate::{shell, watch};

/// The experiment.
pub struct RegionCost;

static ABOUT: About = About {
    name: "region",
    title: "Memory whose pages come from a device",
    text: "`region_cost`, an example of `drover-frontend`, in one process: a userfaultfd region of 256 MiB over a device in memory, as it \
is and with 1 ms added to each request, and one of 1 GiB that is written. A fault is one byte read of a page that is absent, pages in random \
order; *reading on* reads a word of each page in order, with and without prefetch; *populating* fetches all in the background. What \
is read is compared. Tracking is by asynchronous write protection and PAGEMAP_SCAN. Anonymous memory is the baseline. *load* is the machine's load \
average before and after.",
    columns: &[
        Column::label("what", "what"),
        Column::label("unit", "unit"),
        Column::figure("value", "value", 2),
        Column::figure("load", "load", 1),
    ],
};

/// A figure as the example prints it.
#[derive(Deserialize)]
struct Printed {
    name: String,
    value: f64,
    unit: String,
}

impl Experiment for RegionCost {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn cases(&self, _lab: &Lab) -> Result<Vec<Case>> {
        Ok(vec![Case {
            id: "memory".to_owned(),
            what: "faults, prefetch and tracking of a region over a device in memory".to_owned(),
            seconds: 40.0,
            rank: 0,
            subject: Subject::Drover,
            needs: &[],
        }])
    }

    fn run(&self, lab: &Lab, _case: &Case) -> Result<Vec<Row>> {
        let program = match example(lab, "region_cost") {
            Ok(program) => program,
            Err(error) => {
                let mut row = Row::new([("what", "region_cost".to_owned())]);
                row.verdict = Verdict::Skipped(format!("{error:#}"));
                return Ok(vec![row]);
            }
        };
        let before = watch::load();
        let mut runs = Vec::new();
        for _ in 0..lab.repeat.max(1) {
            let output = shell::run(Command::new(&program).arg("--json"))?;
            runs.push(parse(&output.stdout)?);
        }
        let load: Vec<f64> = before.into_iter().chain(watch::load()).collect();
        Ok(rows(&runs, &load))
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let of = |name: &str, title: &str, unit: &str, starts: &[&str], y: Axis| {
            let chosen: Vec<&Row> = rows
                .iter()
                .filter(|row| row.label("unit") == unit)
                .filter(|row| starts.iter().any(|s| row.label("what").starts_with(s)))
                .collect();
            let words = super::pictures::Words {
                name,
                title: title.to_owned(),
                y,
            };
            ranking(&chosen, "what", |row| row.value("value"), words)
        };
        [
            of(
                "region-faults",
                "The first touch of a page",
                "us",
                &["fault"],
                Axis::log("microseconds"),
            ),
            of(
                "region-reading",
                "Reading a region in order",
                "MiB/s",
                &["reading on", "populating"],
                Axis::log("MiB a second"),
            ),
            of(
                "region-tracking",
                "Filling memory whose writes are tracked",
                "MiB/s",
                &["filling"],
                Axis::linear("MiB a second"),
            ),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

fn parse(printed: &[u8]) -> Result<Vec<Printed>> {
    let figures: Vec<Printed> =
        serde_json::from_slice(printed).context("region_cost printed no list of figures")?;
    if figures.is_empty() {
        bail!("region_cost printed no figures");
    }
    Ok(figures)
}

/// A row a figure, in the order of the first run; its values over all runs.
fn rows(runs: &[Vec<Printed>], load: &[f64]) -> Vec<Row> {
    let first = runs.first().map_or(&[][..], Vec::as_slice);
    let row = |figure: &Printed| {
        let values: Vec<f64> = runs
            .iter()
            .flatten()
            .filter(|other| other.name == figure.name)
            .map(|other| other.value)
            .collect();
        let mut row = Row::new([("what", figure.name.clone()), ("unit", figure.unit.clone())]);
        row.set_all("value", &values);
        row.set_all("load", load);
        row
    };
    first.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &[u8] = br#"[{"name": "fault, memory, p50", "value": 10.5, "unit": "us"},
        {"name": "reading on, memory, no prefetch", "value": 900.0, "unit": "MiB/s"}]"#;

    #[test]
    fn runs_become_one_row_a_figure() {
        let two = br#"[{"name": "fault, memory, p50", "value": 12.5, "unit": "us"}]"#;
        let rows = rows(&[parse(ONE).unwrap(), parse(two).unwrap()], &[1.0, 2.0]);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].figures["value"].runs, 2);
        assert_eq!(rows[0].value("value"), Some(11.5));
        assert_eq!(rows[1].value("value"), Some(900.0));
        let names: Vec<String> = RegionCost
            .plots(&rows)
            .into_iter()
            .map(|p| p.name)
            .collect();
        assert_eq!(names, ["region-faults", "region-reading"]);
    }

    #[test]
    fn what_is_no_figure_is_an_error() {
        assert!(parse(b"fault: 10 us").is_err());
        assert!(parse(b"[]").is_err());
    }
}
