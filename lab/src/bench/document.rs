//! Generates `docs/benchmarks.md` from the stored rows: a summary, then every table, then what was not measured.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use super::rows::{self, Record, Rows};
use super::{Column, Experiment, Row, Verdict, plot};
use crate::experiments::{NOT_MEASURED, lines, mover::key};
use crate::rivals;

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
    let known = |record: &Record| rows::is_in_repository(&record.build);
    let (good, strange): (Vec<_>, Vec<_>) = all.into_iter().partition(known);
    let dir = args.document.with_extension("");
    let write = |path: PathBuf, text: &str| {
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for (name, _, svg) in plots(&good) {
        write(dir.join(name).with_extension("svg"), &svg)?;
    }
    let pictures = dir.file_name().context("no file name")?.to_string_lossy();
    let text = render(experiments, &good, &strange, &pictures);
    write(args.document.clone(), &text)?;
    eprintln!("made {}", args.document.display());
    Ok(())
}

/// Renders the document. `strange` are records of builds that are not in the repository.
pub fn render(
    experiments: &[Experiment],
    records: &[Record],
    strange: &[Record],
    pictures: &str,
) -> String {
    let machines: BTreeSet<&str> = records.iter().map(|r| r.machine.as_str()).collect();
    let machines = Vec::from_iter(machines);
    let plots = plots(records).into_iter();
    let plots = plots.map(|(name, title, _)| format!("![{title}]({pictures}/{name}.svg)\n\n"));
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
        let listed = NOT_MEASURED.iter().filter(|listed| listed.0 == name);
        let mut why: Vec<String> = listed.map(|(_, what)| (*what).to_owned()).collect();
        let strange = strange.iter().filter(|r| r.experiment == name);
        why.extend(strange.map(|Record { case, build, .. }| {
            format!("{case} only with build `{build}`, which is not in this repository")
        }));
        if rows.is_empty() && why.is_empty() {
            why.push("nothing yet".to_owned());
        }
        if !why.is_empty() {
            _ = writeln!(missing, "- {name}: {}.", why.join("; "));
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
        let load = record.load.map(|load| format!("{load:.1}"));
        let mut cells: Vec<String> = columns.iter().map(|column| show(column, row)).collect();
        cells.extend([format!("`{}`", record.build), format!("m{machine}")]);
        cells.push(load.unwrap_or_else(|| "not noted".to_owned()));
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
    let (mut plots, link) = (Vec::new(), lines::REFERENCE.describe());
    let whole = whole_library(records);
    for (name, what, figure, unit) in [
        ("bytes", "Bytes", key::BYTES, "MB on the link"),
        ("seconds", "Time", key::SECONDS, "seconds"),
    ] {
        let bar = |(_, row): &(_, &'_ Row)| Some((row.label("by").to_owned(), row.value(figure)?));
        let bars: Vec<_> = whole.iter().filter_map(bar).collect();
        if !bars.is_empty() {
            let title = format!("{what} of the whole library over {link}");
            let svg = plot::bars(&title, unit, &bars);
            plots.push((name, title, svg));
        }
    }
    let mut by: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for (_, row) in rows_of(records, "mount") {
        let setting = [row.label("disk"), row.label("rate")];
        let point = (row.label("rtt").parse(), row.value("read_mib_s"));
        if let (Ok(rtt), Some(rate)) = point
            && setting == ["noise", "1000"]
            && row.verdict == Verdict::Good
        {
            let line = by.entry(row.label("by").to_owned()).or_default();
            line.push((rtt, rate));
            line.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
    }
    if !by.is_empty() {
        let title = "Reading a far disk in order, 1 Gbit/s".to_owned();
        let lines = Vec::from_iter(by);
        let svg = plot::lines(&title, "round trip, ms", "MiB a second", &lines);
        plots.push(("mount", title, svg));
    }
    plots
}
