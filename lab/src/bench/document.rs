//! Generates `docs/benchmarks.md` from the stored rows: a summary, then every table, then what was not measured.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result, bail};

use super::rows::{self, Record, Rows};
use super::{Column, Experiment, Row, Verdict, plot};
use crate::experiments::{NOT_MEASURED, lines, mover::key};
use crate::rivals;

const DOCUMENT: &str = "docs/benchmarks.md";
/// The default file of rows.
pub const ROWS: &str = "docs/benchmarks/rows.jsonl";
/// The text around the tables.
const TEMPLATE: &str = include_str!("document.md.in");
/// Longer tables are collapsed.
const FOLDED: usize = 12;
/// The summary: of the library over the reference link.
const SUMMARY: &[Column] = &[
    Column::label("by", "by"),
    Column::figure(key::BYTES, "MB on the link", 0),
    Column::figure(key::OVER_LIMIT, "times the limit", 2),
    Column::figure(key::SECONDS, "seconds", 1),
    Column::figure(key::TIMES_COPY, "times as fast as a plain copy", 2),
];

/// Generates the document.
///
/// # Errors
/// When the rows cannot be read, a file cannot be written, or a row is of a build that is not in the repository.
pub fn make_document(experiments: &[Experiment]) -> Result<()> {
    let records = Rows::read(ROWS.as_ref())?.all;
    let strange = |r: &&Record| !rows::is_in_repository(&r.build);
    if let Some(Record { case, build, .. }) = records.iter().find(strange) {
        bail!("{ROWS}: {case}: build {build} is not in this repository: measure it again");
    }
    let write = |path: &str, text: &str| {
        fs::write(path, text).with_context(|| format!("cannot write {path}"))
    };
    for (name, _, svg) in plots(&records) {
        write(&format!("docs/benchmarks/{name}.svg"), &svg)?;
    }
    write(DOCUMENT, &render(experiments, &records))?;
    eprintln!("made {DOCUMENT}");
    Ok(())
}

/// Renders the document.
pub fn render(experiments: &[Experiment], records: &[Record]) -> String {
    let machines: BTreeSet<&str> = records.iter().map(|r| r.machine.as_str()).collect();
    let machines = Vec::from_iter(machines);
    let plots = plots(records).into_iter();
    let plots = plots.map(|(name, title, _)| format!("![{title}](benchmarks/{name}.svg)\n\n"));
    let mut answer = String::new();
    let whole = whole_library(records);
    if !whole.is_empty() {
        let link = lines::REFERENCE.describe();
        answer = format!("The whole library, image after image to an empty site over {link}:\n\n");
        answer += &table(SUMMARY, &whole, &machines);
        answer.push('\n');
    }
    let (mut tables, mut missing) = (String::new(), String::new());
    for experiment in experiments {
        let (name, title) = (experiment.name, experiment.title);
        let rows = rows_of(records, name);
        if !rows.is_empty() {
            let mut table = table(experiment.columns, &rows, &machines);
            if rows.len() > FOLDED {
                let head = format!("<details><summary>{} rows</summary>", rows.len());
                table = format!("{head}\n\n{table}\n</details>\n");
            }
            let text = experiment.text.trim();
            _ = writeln!(tables, "## {title}\n\n{text}\n\n{table}");
        }
        if rows.is_empty() {
            _ = writeln!(missing, "- {name}: nothing yet.");
        }
        for (_, what) in NOT_MEASURED.iter().filter(|listed| listed.0 == name) {
            _ = writeln!(missing, "- {name}: {what}.");
        }
    }
    let machines = (1..).zip(machines);
    let machines = machines.map(|(at, machine)| format!("- m{at}: {machine}\n"));
    TEMPLATE
        .replace("{plots}", &plots.collect::<String>())
        .replace("{answer}", &answer)
        .replace("{machines}", &machines.collect::<String>())
        .replace("{tools}", &tools(records))
        .replace("{experiments}", &tables)
        + &missing
}

/// The rows of an experiment, each with its record.
fn rows_of<'a>(records: &'a [Record], experiment: &str) -> Vec<(&'a Record, &'a Row)> {
    let own = records.iter().filter(|r| r.experiment == experiment);
    own.flat_map(|r| r.rows.iter().map(move |row| (r, row)))
        .collect()
}

/// The results for the whole library over the reference link, for all subjects, fastest first.
fn whole_library(records: &[Record]) -> Vec<(&Record, &Row)> {
    let link = lines::REFERENCE.describe();
    let mut rows = rows_of(records, "library");
    rows.retain(|(_, row)| {
        row.verdict == Verdict::Good && row.label("image") == "all" && row.label("link") == link
    });
    let seconds = |row: &Row| row.value(key::SECONDS).unwrap_or(f64::MAX);
    rows.sort_by(|a, b| seconds(a.1).total_cmp(&seconds(b.1)));
    rows
}

/// The rivals with the versions measured, as rows of a table.
fn tools(records: &[Record]) -> String {
    let mut text = String::new();
    for rival in rivals::ALL {
        let (name, how) = (rival.name(), cell(&rival.settings()));
        let subjects = records.iter().map(|record| record.subject.as_str());
        let versions = subjects.filter_map(|s| s.strip_prefix(name)?.strip_prefix(' '));
        let mut versions: BTreeSet<&str> = versions.collect();
        if versions.is_empty() {
            versions.insert("not measured");
        }
        let versions = Vec::from_iter(versions).join(", ");
        _ = writeln!(text, "| {name} | {versions} | `{how}` |");
    }
    text
}

/// A table in Markdown. Omits empty columns; a last column has errors, if any. A machine is named by its place in
/// `machines`.
pub fn table(columns: &[Column], rows: &[(&Record, &Row)], machines: &[&str]) -> String {
    let show = |column: &Column, row: &Row| match (column.decimals, row.figures.get(column.key)) {
        (None, _) => cell(row.label(column.key)),
        (Some(decimals), Some(figure)) => figure.show(decimals),
        (Some(_), None) => String::new(),
    };
    let has = |column: &&Column| rows.iter().any(|(_, row)| !show(column, row).is_empty());
    let columns: Vec<&Column> = columns.iter().filter(has).collect();
    let bad = rows.iter().any(|(_, row)| row.verdict != Verdict::Good);
    let mut heads: Vec<(&str, bool)> = Vec::new();
    heads.extend(columns.iter().map(|c| (c.head, c.decimals.is_some())));
    heads.extend([("build", false), ("machine", false), ("load", true)]);
    heads.extend(bad.then_some(("verdict", false)));
    let (names, numbers): (Vec<&str>, Vec<bool>) = heads.into_iter().unzip();
    let rule = |number| if number { "|--:" } else { "|---" };
    let rules: String = numbers.into_iter().map(rule).collect();
    let mut text = format!("| {} |\n{rules}|\n", names.join(" | "));
    for (record, row) in rows {
        let here = |machine: &&str| *machine == record.machine;
        let machine = machines.iter().position(here).unwrap_or(0) + 1;
        let mut cells: Vec<String> = columns.iter().map(|column| show(column, row)).collect();
        cells.extend([format!("`{}`", record.build), format!("m{machine}")]);
        cells.push(format!("{:.1}", record.load));
        cells.extend(bad.then(|| cell(&row.verdict.words())));
        _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// Escapes text for a cell: one line, without local paths.
fn cell(text: &str) -> String {
    let words = text
        .split_whitespace()
        .map(|word| match word.rsplit_once('/') {
            Some((path, name)) if path.starts_with('/') => name,
            _ => word,
        });
    Vec::from_iter(words).join(" ").replace('|', "\\|")
}

/// The plots, as name, title and SVG: bytes and time for the library, and reads from a remote disk.
fn plots(records: &[Record]) -> Vec<(&'static str, String, String)> {
    let whole = whole_library(records);
    let mut mount = rows_of(records, "mount");
    mount.retain(|(_, row)| {
        let setting = ["disk", "rate", "rtt"].map(|key| row.label(key));
        row.verdict == Verdict::Good && setting == ["noise", "1000", "40"]
    });
    let library = format!("The whole library over {}", lines::REFERENCE.describe());
    let far = "Reading a remote disk in order, 1 Gbit/s, 40 ms".to_owned();
    let mut plots = Vec::new();
    for (name, rows, figure, title) in [
        (
            "bytes",
            &whole,
            key::BYTES,
            format!("{library}: MB on the link"),
        ),
        ("seconds", &whole, key::SECONDS, library + ": seconds"),
        ("mount", &mount, "read_mib_s", far + ": MiB/s"),
    ] {
        let bar = |(_, row): &(_, &'_ Row)| Some((row.label("by").to_owned(), row.value(figure)?));
        let bars: Vec<_> = rows.iter().filter_map(bar).collect();
        if !bars.is_empty() {
            let svg = plot::bars(&title, &bars);
            plots.push((name, title, svg));
        }
    }
    plots
}
