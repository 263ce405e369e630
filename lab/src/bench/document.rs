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
    let builds: BTreeSet<String> = all.iter().map(|record| record.build.clone()).collect();
    let known: BTreeSet<String> = builds
        .into_iter()
        .filter(|b| rows::is_in_repository(b))
        .collect();
    let (good, strange): (Vec<_>, Vec<_>) = all.into_iter().partition(|r| known.contains(&r.build));
    let dir = args.document.with_extension("");
    let write = |path: PathBuf, text: &str| {
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for plot in plots(&good) {
        write(dir.join(plot.name).with_extension("svg"), &plot.svg)?;
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
    let shown = |p: Plot| format!("![{}]({pictures}/{}.svg)\n\n", p.title, p.name);
    let plots: String = plots(records).into_iter().map(shown).collect();
    let mut answer = String::new();
    let whole = whole_library(records);
    if !whole.is_empty() {
        answer = format!(
            "The whole library, image after image to an empty site over {}:\n\n{}\n",
            lines::REFERENCE.describe(),
            table(SUMMARY, &whole, &machines)
        );
    }
    let (mut tables, mut missing) = (String::new(), String::new());
    for Experiment {
        name,
        title,
        text,
        columns,
        ..
    } in experiments
    {
        let rows = rows_of(records, name);
        if !rows.is_empty() {
            let mut table = table(columns, &rows, &machines);
            if rows.len() > FOLDED {
                let count = rows.len();
                table =
                    format!("<details><summary>{count} rows</summary>\n\n{table}\n</details>\n");
            }
            _ = writeln!(tables, "## {title}\n\n{}\n\n{table}", text.trim());
        }
        let listed = NOT_MEASURED.iter().filter(|listed| listed.0 == *name);
        let mut why: Vec<String> = listed.map(|(_, what)| (*what).to_owned()).collect();
        let strange = strange.iter().filter(|r| r.experiment == *name);
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
    let machines = (1..)
        .zip(machines)
        .map(|(at, machine)| format!("- m{at}: {machine}\n"));
    TEMPLATE
        .replace("{plots}", &plots)
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
        let version = |r: &'_ Record| {
            Some(
                r.subject
                    .strip_prefix(rival.name())?
                    .strip_prefix(' ')?
                    .to_owned(),
            )
        };
        let versions: BTreeSet<String> = records.iter().filter_map(version).collect();
        let versions = match Vec::from_iter(versions) {
            none if none.is_empty() => "not measured".to_owned(),
            versions => versions.join(", "),
        };
        _ = writeln!(
            text,
            "| {} | {versions} | `{}` |",
            rival.name(),
            cell(&rival.settings())
        );
    }
    text
}

/// A table in Markdown. Omits empty columns; a last column has errors, if any. A machine is named by its place in
/// `machines`.
pub fn table(columns: &[Column], rows: &[(&Record, &Row)], machines: &[&str]) -> String {
    let show = |column: &Column, row: &Row| match column.decimals {
        None => cell(row.label(column.key)),
        Some(decimals) => row
            .figures
            .get(column.key)
            .map_or_else(String::new, |f| f.show(decimals)),
    };
    let has = |column: &&Column| rows.iter().any(|(_, row)| !show(column, row).is_empty());
    let columns: Vec<&Column> = columns.iter().filter(has).collect();
    let bad = rows.iter().any(|(_, row)| row.verdict != Verdict::Good);
    let mut heads: Vec<&str> = columns.iter().map(|column| column.head).collect();
    heads.extend(["build", "machine", "load"]);
    heads.extend(bad.then_some("verdict"));
    let numbers = columns.iter().map(|column| column.decimals.is_some());
    let rules = numbers
        .chain([false, false, true])
        .chain(bad.then_some(false));
    let rules: String = rules
        .map(|number| if number { "|--:" } else { "|---" })
        .collect();
    let mut text = format!("| {} |\n{rules}|\n", heads.join(" | "));
    for (record, row) in rows {
        let mut cells: Vec<String> = columns.iter().map(|column| show(column, row)).collect();
        let machine = machines
            .iter()
            .position(|m| *m == record.machine)
            .unwrap_or(0)
            + 1;
        cells.extend([format!("`{}`", record.build), format!("m{machine}")]);
        cells.push(
            record
                .load
                .map_or("not noted".to_owned(), |load| format!("{load:.1}")),
        );
        cells.extend(bad.then(|| cell(&row.verdict.words())));
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

struct Plot {
    name: &'static str,
    title: String,
    svg: String,
}

/// The plots: bytes and time for the library, and reads from a remote disk.
fn plots(records: &[Record]) -> Vec<Plot> {
    let mut plots = Vec::new();
    let whole = whole_library(records);
    for (name, what, figure, unit) in [
        ("bytes", "Bytes", key::BYTES, "MB on the link"),
        ("seconds", "Time", key::SECONDS, "seconds"),
    ] {
        let bars = whole
            .iter()
            .filter_map(|(_, row)| Some((row.label("by"), row.value(figure)?)));
        let bars: Vec<_> = bars.collect();
        if !bars.is_empty() {
            let title = format!(
                "{what} of the whole library over {}",
                lines::REFERENCE.describe()
            );
            let svg = plot::bars(&title, unit, &bars);
            plots.push(Plot { name, title, svg });
        }
    }
    let mut by: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for (_, row) in rows_of(records, "mount") {
        let fits = row.verdict == Verdict::Good
            && row.label("disk") == "noise"
            && row.label("rate") == "1000";
        if let (true, Ok(rtt), Some(rate)) =
            (fits, row.label("rtt").parse(), row.value("read_mib_s"))
        {
            by.entry(row.label("by")).or_default().push((rtt, rate));
        }
    }
    by.values_mut()
        .for_each(|points| points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    if !by.is_empty() {
        let title = "Reading a far disk in order, 1 Gbit/s".to_owned();
        let svg = plot::lines(
            &title,
            "round trip, ms",
            "MiB a second",
            &Vec::from_iter(by),
        );
        plots.push(Plot {
            name: "mount",
            title,
            svg,
        });
    }
    plots
}
