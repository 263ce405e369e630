//! `docs/benchmarks.md`: made from kept results alone, the same text from the same results.

mod origins;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use origins::Origins;

use super::plan::{Entry, Fate, Plan};
use super::runner::duration;
use super::show::Cells;
use super::store::{Record, Store};
use super::{Experiment, Plot, Row, Verdict};
use crate::plot;
use crate::report::Machine;
use crate::rivals;

/// A document, and the pictures beside it.
pub struct Document {
    /// The Markdown.
    pub text: String,
    /// Pictures with the stems of their files.
    pub plots: Vec<(String, Plot)>,
}

/// A tool that drover is compared with.
pub struct Tool {
    /// Its name in tables; the subject of its results begins with it.
    pub name: String,
    /// How it is called.
    pub settings: String,
}

impl Tool {
    /// Every rival.
    pub fn all() -> Vec<Self> {
        let rivals = rivals::ALL.iter();
        rivals
            .map(|rival| Self {
                name: rival.name().to_owned(),
                settings: rival.settings(),
            })
            .collect()
    }
}

/// Makes the document of a store and writes it, with its pictures in a directory of the same name.
///
/// # Errors
/// When there is nothing kept yet, or a file cannot be written.
pub fn publish(
    experiments: &[&dyn Experiment],
    tools: &[Tool],
    store: &Store,
    file: &Path,
) -> Result<()> {
    let plan = store
        .load_plan()?
        .context("nothing is measured yet: lab bench")?;
    let records = records(store, &plan);
    let pictures = file.with_extension("");
    let stem = pictures.file_name().context("no file name")?;
    let document = render(experiments, tools, &plan, &records, &stem.to_string_lossy());
    fs::create_dir_all(&pictures).with_context(|| format!("cannot make {}", pictures.display()))?;
    let mut made: Vec<PathBuf> = Vec::new();
    for (stem, plot) in &document.plots {
        for (extension, bytes) in [
            ("svg", plot::svg(plot)?.into_bytes()),
            ("png", plot::png(plot)?),
        ] {
            let path = pictures.join(format!("{stem}.{extension}"));
            replace(&path, &bytes)?;
            made.push(path);
        }
    }
    remove_others(experiments, &pictures, &made);
    replace(file, document.text.as_bytes())
}

/// What is kept of a plan's cases; what cannot be read is told and left out.
fn records(store: &Store, plan: &Plan) -> Vec<Option<Record>> {
    let load = |entry: &Entry| {
        store
            .load(&entry.experiment, &entry.case)
            .unwrap_or_else(|error| {
                eprintln!("WARNING {error:#}: left out");
                None
            })
    };
    plan.entries.iter().map(load).collect()
}

/// Pictures of earlier documents: a picture that no longer belongs to the text would be taken for a result.
fn remove_others(experiments: &[&dyn Experiment], pictures: &Path, made: &[PathBuf]) {
    for entry in fs::read_dir(pictures).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let ours = |e: &&dyn Experiment| name.starts_with(&format!("{}-", e.about().name));
        let picture = name.ends_with(".svg") || name.ends_with(".png");
        if picture && experiments.iter().any(ours) && !made.contains(&path) {
            let _ = fs::remove_file(path);
        }
    }
}

fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, bytes)
        .and_then(|()| fs::rename(&part, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The document of a plan's records, one for each of its entries. `pictures` is the directory of the pictures.
pub fn render(
    experiments: &[&dyn Experiment],
    tools: &[Tool],
    plan: &Plan,
    records: &[Option<Record>],
    pictures: &str,
) -> Document {
    let machines = machines(records);
    let mut document = Document {
        text: String::new(),
        plots: Vec::new(),
    };
    head(&mut document.text, plan, &machines);
    left_out(&mut document.text, plan, records);
    compared(&mut document.text, tools, records);
    for experiment in experiments {
        let of: Vec<(&Entry, &Record)> = plan
            .entries
            .iter()
            .zip(records)
            .filter(|(entry, _)| entry.experiment == experiment.about().name)
            .filter_map(|(entry, record)| Some((entry, record.as_ref()?)))
            .collect();
        if !of.is_empty() {
            section(&mut document, *experiment, &of, &machines, pictures);
        }
    }
    document
}

fn machines(records: &[Option<Record>]) -> Vec<Machine> {
    let mut machines: Vec<Machine> = Vec::new();
    for record in records.iter().flatten() {
        if !machines.contains(&record.identity.machine) {
            machines.push(record.identity.machine.clone());
        }
    }
    machines
}

const HEAD: &str = "\
# Benchmarks

<!-- Made by `lab document` from the results of `lab bench`. A change by hand is gone with the next run. -->

Drover on images of real systems, beside other tools with their best settings and beside the limit. Every delivered
file was compared with its original; a row whose file differed says so and has no figures in the plots.
[The lab](../lab/README.md) says what the images, the link and the limit are.

## Measure it yourself

```
make bench                                  # builds everything, the image library too, and measures for an hour
make bench FULL=1                           # the whole matrix
target/release/lab bench --list             # what there is to measure, and what an hour leaves out
target/release/lab bench --only EXPERIMENT  # one experiment, or EXPERIMENT/CASE
```

Results are kept. A later run measures what is missing, what failed, and what was measured with another build of drover,
another version of a rival, other images or on another machine.

Figures with a spread are `median (least to greatest)` of repeated measurements; those without were measured once.

";

fn head(text: &mut String, plan: &Plan, machines: &[Machine]) {
    text.push_str(HEAD);
    match machines {
        [] => {}
        [one] => _ = writeln!(text, "Measured on: {one}.\n"),
        several => {
            _ = writeln!(text, "Measured on:\n");
            for (at, machine) in several.iter().enumerate() {
                _ = writeln!(text, "{}. {machine}", at + 1);
            }
            text.push('\n');
        }
    }
    if plan.small {
        text.push_str("These are figures of the small set of images, which say little.\n\n");
    }
}

/// What has no result at all.
fn left_out(text: &mut String, plan: &Plan, records: &[Option<Record>]) {
    let mut groups: BTreeMap<(&str, &str), (Vec<&str>, f64)> = BTreeMap::new();
    for (entry, record) in plan.entries.iter().zip(records) {
        if record.is_some() {
            continue;
        }
        let why = match &entry.fate {
            Fate::Lacking(why) => why,
            _ => "for want of time",
        };
        let group = groups.entry((&entry.experiment, why)).or_default();
        group.0.push(&entry.case);
        group.1 += entry.seconds;
    }
    if groups.is_empty() && plan.mute.is_empty() {
        return;
    }
    text.push_str(
        "## What was left out\n\n| experiment | cases | about | why |\n|---|--:|--:|---|\n",
    );
    for ((experiment, why), (cases, seconds)) in &groups {
        let (count, time, why) = (cases.len(), duration(*seconds), cell(why));
        _ = writeln!(text, "| {experiment} | {count} | {time} | {why} |");
    }
    for (experiment, why) in &plan.mute {
        _ = writeln!(text, "| {experiment} | all | | {} |", cell(why));
    }
    text.push('\n');
    if !groups.is_empty() {
        text.push_str("<details><summary>Their names</summary>\n\n");
        for ((experiment, _), (cases, _)) in &groups {
            _ = writeln!(text, "- {experiment}: {}", cases.join(", "));
        }
        text.push_str("\n</details>\n\n");
    }
}

/// The other tools, with the versions that were measured.
fn compared(text: &mut String, tools: &[Tool], records: &[Option<Record>]) {
    if tools.is_empty() {
        return;
    }
    text.push_str("## The other tools\n\n| tool | version | how it is called |\n|---|---|---|\n");
    for Tool { name, settings } in tools {
        let subjects = records.iter().flatten().map(|r| &r.identity.subject);
        let versions: BTreeSet<&str> = subjects
            .filter_map(|subject| subject.strip_prefix(name)?.strip_prefix(' '))
            .collect();
        let versions: Vec<&str> = versions.into_iter().collect();
        let shown = match versions.as_slice() {
            [] => "not measured".to_owned(),
            some => cell(&some.join(", ")),
        };
        _ = writeln!(text, "| {name} | {shown} | `{}` |", cell(settings));
    }
    text.push('\n');
}

fn section(
    document: &mut Document,
    experiment: &dyn Experiment,
    of: &[(&Entry, &Record)],
    machines: &[Machine],
    pictures: &str,
) {
    let about = experiment.about();
    _ = writeln!(
        document.text,
        "## {}\n\n{}\n",
        about.title,
        about.text.trim()
    );
    let origins = Origins::of(of, machines);
    let good: Vec<Row> = of
        .iter()
        .flat_map(|(_, record)| &record.rows)
        .filter(|row| row.verdict == Verdict::Good)
        .cloned()
        .collect();
    let plots = catch_unwind(AssertUnwindSafe(|| experiment.plots(&good))).unwrap_or_else(|_| {
        eprintln!("WARNING {}: its plots could not be made", about.name);
        Vec::new()
    });
    for plot in plots.into_iter().filter(plot::has_data) {
        let stem = format!("{}-{}", about.name, plot.name);
        if document.plots.iter().any(|(known, _)| *known == stem) {
            eprintln!("WARNING two plots are called {stem}: the second is left out");
            continue;
        }
        _ = writeln!(document.text, "![{}]({pictures}/{stem}.svg)\n", plot.title);
        document.plots.push((stem, plot));
    }
    if origins.marked() && origins.some_outdated() {
        document
            .text
            .push_str("The pictures show all rows, those marked † too.\n\n");
    }
    let rows: Vec<(&Row, usize)> = of
        .iter()
        .enumerate()
        .flat_map(|(at, (_, record))| record.rows.iter().map(move |row| (row, at)))
        .map(|(row, at)| (row, origins.of_record(at)))
        .collect();
    let (first, rest): (Vec<_>, Vec<_>) = rows
        .into_iter()
        .partition(|(row, _)| experiment.is_headline(row) || row.verdict != Verdict::Good);
    if !first.is_empty() {
        document.text.push_str(&table(experiment, &first, &origins));
    }
    if !rest.is_empty() {
        _ = writeln!(
            document.text,
            "<details><summary>{} more rows</summary>\n",
            rest.len()
        );
        document.text.push_str(&table(experiment, &rest, &origins));
        document.text.push_str("</details>\n\n");
    }
    origins.tell(&mut document.text);
}

fn table(experiment: &dyn Experiment, rows: &[(&Row, usize)], origins: &Origins) -> String {
    let only: Vec<&Row> = rows.iter().map(|(row, _)| *row).collect();
    let mut cells = Cells::of(experiment.about(), &only);
    if origins.marked() {
        cells.add(
            "measured",
            false,
            rows.iter().map(|(_, at)| origins.mark(*at)),
        );
    }
    let mut text = String::new();
    let line = |values: &[String]| {
        let shown: Vec<String> = values.iter().map(|value| cell(value)).collect();
        format!("| {} |\n", shown.join(" | "))
    };
    text.push_str(&line(&cells.heads));
    for number in &cells.numbers {
        text.push_str(if *number { "|--:" } else { "|---" });
    }
    text.push_str("|\n");
    for values in &cells.lines {
        text.push_str(&line(values));
    }
    text.push('\n');
    text
}

/// Text for a cell: one line, without paths of the machine on which it was written.
fn cell(text: &str) -> String {
    without_paths(text)
        .replace('|', "\\|")
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

/// Leaves only the last part of every absolute path.
fn without_paths(text: &str) -> String {
    let ends = |c: char| c.is_whitespace() || "\"'`()[]{},;:=|".contains(c);
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        let before = rest[..at].chars().next_back().or(shown.chars().next_back());
        let end = rest[at..]
            .find(ends)
            .map_or(rest.len(), |length| at + length);
        let path = &rest[at..end];
        shown.push_str(&rest[..at]);
        // `a/b` and `ssh://host` are no absolute paths.
        if before.is_none_or(ends) && !path.starts_with("//") {
            let last = path.trim_end_matches('/').rsplit('/').next();
            shown.push_str(last.unwrap_or_default());
        } else {
            shown.push_str(path);
        }
        rest = &rest[end..];
    }
    shown.push_str(rest);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_of_the_machine_is_told() {
        let cases = [
            (
                "cannot open /home/me/out/a.raw: gone",
                "cannot open a.raw: gone",
            ),
            ("lab/out is full", "lab/out is full"),
            ("(/a/b) at '/c d'", "(b) at 'c d'"),
            (
                "rsync://10.77.0.2:873/lab/ failed",
                "rsync://10.77.0.2:873/lab/ failed",
            ),
            ("1/2 of it", "1/2 of it"),
        ];
        for (text, shown) in cases {
            assert_eq!(without_paths(text), shown);
        }
        assert_eq!(cell("a | b\nc"), "a \\| b c");
    }
}
