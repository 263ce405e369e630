//! Generates `docs/benchmarks.md` from the stored rows: a summary, then every table, then what was not measured.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use super::rows::{self, Record, Rows};
use super::{Experiment, Row, Verdict};
use crate::experiments::{NOT_MEASURED, lines, mover::key};
use crate::files::replace;
use crate::plot::{self, Plot};
use crate::rivals;

/// The default file of rows.
pub const ROWS: &str = "docs/benchmarks/rows.jsonl";
/// Longer tables are collapsed.
const FOLDED: usize = 12;

/// What the document is made of, and where it goes.
#[derive(Args)]
pub struct DocumentArgs {
    /// The document; its plots go into a directory of the same name.
    #[arg(long, value_name = "FILE", default_value = "docs/benchmarks.md")]
    document: PathBuf,
    /// The file of rows.
    #[arg(long, value_name = "FILE", default_value = ROWS)]
    rows: PathBuf,
}

/// Generates the document. Omits rows of builds that are not in the repository.
///
/// # Errors
/// When the rows cannot be read, or a file cannot be written.
pub fn make_document(experiments: &[Experiment], args: &DocumentArgs) -> Result<()> {
    let all = Rows::read(&args.rows)?.all;
    let builds: BTreeSet<String> = all.iter().map(|record| record.build.clone()).collect();
    let known: BTreeSet<String> = builds
        .into_iter()
        .filter(|b| rows::is_in_repository(b))
        .collect();
    let (good, strange): (Vec<Record>, Vec<Record>) =
        all.into_iter().partition(|r| known.contains(&r.build));
    let dir = args.document.with_extension("");
    let stem = dir
        .file_name()
        .context("no file name")?
        .to_string_lossy()
        .into_owned();
    let plots = plots(&good);
    for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|end| end == "svg") {
            fs::remove_file(entry.path())?;
        }
    }
    for (name, plot) in &plots {
        replace(&dir.join(format!("{name}.svg")), plot::svg(plot).as_bytes())?;
    }
    let text = render(experiments, &good, &strange, &plots, &stem);
    replace(&args.document, text.as_bytes())?;
    eprintln!("made {}", args.document.display());
    Ok(())
}

const HEAD: &str = "\
# Benchmarks

<!-- Made by `lab document` from benchmarks/rows.jsonl. A change by hand is gone with the next run. -->

Drover on images of real systems, beside other tools with their best settings and beside the limit: the unique non-zero 4 KiB blocks through
`zstd -3 --long=27`. Every delivered file was compared with its original. [The lab](../lab/README.md) says what the images, the link
and the limit are.

";

const TAIL: &str = "\
## Measure it yourself

```
make bench                                  # builds everything, the image library too, and measures for an hour
make bench FULL=1                           # the whole matrix
target/release/lab bench --list --full      # what there is to measure
target/release/lab bench --only EXPERIMENT  # one experiment, or EXPERIMENT/CASE
target/release/lab document                 # this document, of all rows that are kept
```

Results are kept, a line a case, in `docs/benchmarks/rows.jsonl`. A later run measures what is missing, what failed, and what was measured with
another program, another version of a rival or on another machine.

";

/// Renders the document. `strange` are records of builds that are not in the repository.
pub fn render(
    experiments: &[Experiment],
    records: &[Record],
    strange: &[Record],
    plots: &[(&str, Plot)],
    pictures: &str,
) -> String {
    let mut text = HEAD.to_owned();
    for (name, plot) in plots {
        _ = writeln!(text, "![{}]({pictures}/{name}.svg)\n", plot.title);
    }
    answer(&mut text, records);
    origins(&mut text, records);
    compared(&mut text, records);
    for experiment in experiments {
        let own: Vec<&Record> = records
            .iter()
            .filter(|r| r.experiment == experiment.name)
            .collect();
        if own.is_empty() {
            continue;
        }
        _ = writeln!(
            text,
            "## {}\n\n{}\n",
            experiment.title,
            experiment.text.trim()
        );
        let count: usize = own.iter().map(|record| record.rows.len()).sum();
        let table = table(experiment, &own);
        if count > FOLDED {
            _ = writeln!(
                text,
                "<details><summary>{count} rows</summary>\n\n{table}\n</details>\n"
            );
        } else {
            _ = writeln!(text, "{table}");
        }
    }
    text.push_str(TAIL);
    text.push_str("## What was not measured\n\n");
    for experiment in experiments {
        let without: Vec<&Record> = strange
            .iter()
            .filter(|r| r.experiment == experiment.name)
            .collect();
        let builds: BTreeSet<&str> = without.iter().map(|r| r.build.as_str()).collect();
        let builds: Vec<String> = builds.iter().map(|b| format!("`{b}`")).collect();
        let none = !records.iter().any(|r| r.experiment == experiment.name);
        let written = NOT_MEASURED
            .iter()
            .find(|(name, _)| *name == experiment.name);
        let mut why: Vec<String> = written.iter().map(|(_, what)| (*what).to_owned()).collect();
        match (without.len(), none) {
            (0, true) => why.push("nothing yet".to_owned()),
            (0, false) => {}
            (n, _) => why.push(format!(
                "{n} case(s) only with builds that are not in this repository ({})",
                builds.join(", ")
            )),
        }
        if !why.is_empty() {
            _ = writeln!(text, "- {}: {}.", experiment.name, why.join("; "));
        }
    }
    text
}

/// The results for the whole library over the reference link, for all subjects.
fn whole_library(records: &[Record]) -> Vec<(&Record, &Row)> {
    let rows = records
        .iter()
        .filter(|r| r.experiment == "library")
        .flat_map(|r| r.rows.iter().map(move |row| (r, row)));
    let link = lines::REFERENCE.describe();
    let fits = |row: &Row| {
        row.verdict == Verdict::Good && row.label("image") == "all" && row.label("link") == link
    };
    let mut rows: Vec<_> = rows.filter(|(_, row)| fits(row)).collect();
    rows.sort_by(|a, b| {
        a.1.value(key::SECONDS)
            .unwrap_or(f64::MAX)
            .total_cmp(&b.1.value(key::SECONDS).unwrap_or(f64::MAX))
    });
    rows
}

fn answer(text: &mut String, records: &[Record]) {
    let rows = whole_library(records);
    if rows.is_empty() {
        return;
    }
    let link = lines::REFERENCE.describe();
    _ = writeln!(
        text,
        "The whole library, image after image to an empty site over {link}:\n"
    );
    text.push_str("| by | MB on the link | times the limit | seconds | times as fast as a plain copy | build | machine | load |\n");
    text.push_str("|---|--:|--:|--:|--:|---|---|--:|\n");
    let machines = machines(records);
    for (record, row) in rows {
        let figure = |key: &str, decimals: usize| {
            row.figures
                .get(key)
                .map(|f| f.show(decimals))
                .unwrap_or_default()
        };
        _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} |",
            row.label("by"),
            figure(key::BYTES, 0),
            figure(key::OVER_LIMIT, 2),
            figure(key::SECONDS, 1),
            figure(key::TIMES_COPY, 2),
            origin(record, &machines).join(" | ")
        );
    }
    text.push('\n');
}

fn machines(records: &[Record]) -> Vec<&str> {
    let all: BTreeSet<&str> = records
        .iter()
        .map(|record| record.machine.as_str())
        .collect();
    all.into_iter().collect()
}

/// Build, machine and load of a record, as cells.
fn origin(record: &Record, machines: &[&str]) -> [String; 3] {
    let machine = machines
        .iter()
        .position(|m| *m == record.machine)
        .unwrap_or(0)
        + 1;
    let load = record
        .load
        .map_or("not noted".to_owned(), |load| format!("{load:.1}"));
    [format!("`{}`", record.build), format!("m{machine}"), load]
}

fn origins(text: &mut String, records: &[Record]) {
    text.push_str("Each row names the commit that drover and the lab were built from, the machine, and its load average before the case:\n\n");
    for (at, machine) in machines(records).iter().enumerate() {
        _ = writeln!(text, "- m{}: {machine}", at + 1);
    }
    text.push_str("\nFigures with a spread are `median (least to greatest)` of repeated measurements; those without were measured once.\n\n");
}

/// Lists the rivals with the versions measured.
fn compared(text: &mut String, records: &[Record]) {
    text.push_str("## The other tools\n\n| tool | version | how it is called |\n|---|---|---|\n");
    for rival in rivals::ALL {
        let subjects = records.iter().map(|r| r.subject.as_str());
        let versions: BTreeSet<&str> = subjects
            .filter_map(|s| s.strip_prefix(rival.name())?.strip_prefix(' '))
            .collect();
        let versions: Vec<&str> = versions.into_iter().collect();
        let shown = if versions.is_empty() {
            "not measured".to_owned()
        } else {
            versions.join(", ")
        };
        _ = writeln!(
            text,
            "| {} | {shown} | `{}` |",
            rival.name(),
            cell(&rival.settings())
        );
    }
    text.push('\n');
}

/// A table in Markdown. Omits empty columns; a last column has errors, if any.
pub fn table(experiment: &Experiment, records: &[&Record]) -> String {
    let rows: Vec<(&Record, &Row)> = records
        .iter()
        .flat_map(|r| r.rows.iter().map(|row| (*r, row)))
        .collect();
    let machines: BTreeSet<&str> = records
        .iter()
        .map(|record| record.machine.as_str())
        .collect();
    let machines: Vec<&str> = machines.into_iter().collect();
    let has = |key: &str| {
        rows.iter()
            .any(|(_, row)| row.labels.contains_key(key) || row.figures.contains_key(key))
    };
    let columns: Vec<_> = experiment
        .columns
        .iter()
        .filter(|column| has(column.key))
        .collect();
    let bad = rows.iter().any(|(_, row)| row.verdict != Verdict::Good);
    let mut heads: Vec<&str> = columns.iter().map(|column| column.head).collect();
    heads.extend(["build", "machine", "load"]);
    heads.extend(bad.then_some("verdict"));
    let mut text = format!("| {} |\n", heads.join(" | "));
    for head in &heads {
        let number = columns
            .iter()
            .any(|c| c.head == *head && c.decimals.is_some());
        text.push_str(if number { "|--:" } else { "|---" });
    }
    text.push_str("|\n");
    for (record, row) in rows {
        let mut cells: Vec<String> = columns
            .iter()
            .map(|column| match column.decimals {
                None => cell(row.label(column.key)),
                Some(decimals) => row
                    .figures
                    .get(column.key)
                    .map(|f| f.show(decimals))
                    .unwrap_or_default(),
            })
            .collect();
        cells.extend(origin(record, &machines));
        cells.extend(bad.then(|| {
            row.verdict
                .words()
                .map_or("good".to_owned(), |words| cell(&words))
        }));
        _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// Escapes text for a cell: one line, without local paths.
fn cell(text: &str) -> String {
    let own = |word: &str| match word
        .strip_prefix('/')
        .and_then(|path| path.rsplit_once('/'))
    {
        Some((_, last)) => last.to_owned(),
        None => word.to_owned(),
    };
    let words: Vec<String> = text.split_whitespace().map(own).collect();
    words.join(" ").replace('|', "\\|")
}

/// The plots: bytes and time for the library, and reads from a remote disk.
fn plots(records: &[Record]) -> Vec<(&'static str, Plot)> {
    let link = lines::REFERENCE.describe();
    let bars = |title: String, unit: &str, figure: &str| {
        let bars = whole_library(records)
            .into_iter()
            .filter_map(|(_, row)| Some((row.label("by").to_owned(), row.value(figure)?)));
        Plot::bars(title, unit, bars.collect())
    };
    let mut by: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for row in records
        .iter()
        .filter(|r| r.experiment == "mount")
        .flat_map(|r| &r.rows)
    {
        let fits = row.verdict == Verdict::Good
            && row.label("disk") == "noise"
            && row.label("rate") == "1000";
        if let (true, Ok(rtt), Some(rate)) =
            (fits, row.label("rtt").parse(), row.value("read_mib_s"))
        {
            by.entry(row.label("by")).or_default().push((rtt, rate));
        }
    }
    let series = by.into_iter().map(|(name, mut points)| {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        (name.to_owned(), points)
    });
    let plots = [
        (
            "bytes",
            bars(
                format!("Bytes of the whole library over {link}"),
                "MB on the link",
                key::BYTES,
            ),
        ),
        (
            "seconds",
            bars(
                format!("Time of the whole library over {link}"),
                "seconds",
                key::SECONDS,
            ),
        ),
        (
            "mount",
            Plot::lines(
                "Reading a far disk in order, 1 Gbit/s",
                "round trip, ms",
                "MiB a second",
                series.collect(),
            ),
        ),
    ];
    plots
        .into_iter()
        .filter(|(_, plot)| !plot.is_empty())
        .collect()
}

#[cfg(test)]
pub fn rendered(experiments: &[Experiment], records: &[Record], strange: &[Record]) -> String {
    render(experiments, records, strange, &plots(records), "benchmarks")
}
