//! `lab bench`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;

use super::document::{self, Tool};
use super::identity;
use super::plan::{Fate, Filter, Plan, Wish};
use super::process::Processes;
use super::runner::{self, Outcome, duration};
use super::show::Cells;
use super::store::{Record, Store};
use super::{Experiment, Row, Verdict, judge};
use crate::experiments::{Common, Lab};

/// What a run takes when nothing is said.
const MINUTES: f64 = 60.0;
/// Where the document goes.
const DOCUMENT: &str = "docs/benchmarks.md";
/// As shells call it when a program ends by SIGINT.
const INTERRUPTED: u8 = 130;

/// For `--help`.
pub const EXIT_CODES: &str = "\
Exit codes (of several, the lowest but 0):
  0    every row is good; rivals that are not installed were skipped
  1    a row of drover failed, its file was wrong, or it lacks a figure
  3    a rival's row failed or its file was wrong
  4    something whole cannot be measured here: root, namespaces or the library are missing
  2    the command line is wrong
  130  interrupted; what was done is kept";

/// What to measure, and for how long.
#[derive(Args)]
pub struct BenchArgs {
    /// Minutes that the run may take; what does not fit by its estimate is left out [default: 60, no limit with --only].
    #[arg(long)]
    minutes: Option<f64>,
    /// Everything, however long it takes.
    #[arg(long, conflicts_with = "minutes")]
    full: bool,
    /// Only these: EXPERIMENT or EXPERIMENT/CASE, with * and ?.
    #[arg(long, value_name = "EXPERIMENT[/CASE]", num_args = 1..)]
    only: Vec<Filter>,
    /// Print the plan, with what is left out, and stop.
    #[arg(long)]
    list: bool,
    /// Measure also what has a result that still holds.
    #[arg(long)]
    again: bool,
    /// How often to measure what varies.
    #[arg(long, default_value_t = 3, value_name = "TIMES", value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: u32,
    /// The small set of images instead of the library.
    #[arg(long)]
    small: bool,
    /// The document that is made of all results [default: docs/benchmarks.md, none with --small].
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
    /// Make no document.
    #[arg(long, conflicts_with = "document")]
    no_document: bool,
    #[command(flatten)]
    common: Common,
}

/// Which results, and where to.
#[derive(Args)]
pub struct DocumentArgs {
    /// The document.
    #[arg(long, value_name = "FILE", default_value = DOCUMENT)]
    document: PathBuf,
    /// Where results are.
    #[arg(long, value_name = "DIR", default_value = "lab/out")]
    out: PathBuf,
    /// Of the small set.
    #[arg(long)]
    small: bool,
}

/// Makes the document of what is kept.
///
/// # Errors
/// When nothing is kept, or it cannot be written.
pub fn make_document(experiments: &[&dyn Experiment], args: &DocumentArgs) -> Result<()> {
    let store = Store::at(&args.out, args.small);
    document::publish(experiments, &Tool::all(), &store, &args.document)?;
    eprintln!("made {}", args.document.display());
    Ok(())
}

impl BenchArgs {
    fn document(&self) -> Option<&Path> {
        match &self.document {
            Some(file) => Some(file),
            None if self.no_document || self.small => None,
            None => Some(Path::new(DOCUMENT)),
        }
    }

    fn wish(&self) -> Wish {
        let minutes = match self.minutes {
            _ if self.full => None,
            None if self.only.is_empty() => Some(MINUTES),
            minutes => minutes,
        };
        Wish {
            only: self.only.clone(),
            budget: minutes.map(|minutes| minutes * 60.0),
            again: self.again,
        }
    }
}

/// Plans, measures, keeps, and shows.
///
/// # Errors
/// When it cannot even begin. What fails later is in rows and in the exit code.
pub fn bench(experiments: &[&dyn Experiment], args: &BenchArgs) -> Result<ExitCode> {
    let lab = Lab {
        common: args.common.clone(),
        repeat: args.repeat as usize,
        small: args.small,
    };
    let store = Store::at(&args.common.out, args.small);
    let mut plan = Plan::make(experiments, &lab, &store, &args.wish())?;
    if args.list {
        if args.common.json {
            println!("{}", serde_json::to_string_pretty(&plan)?);
        } else {
            list(&plan);
        }
        return Ok(ExitCode::SUCCESS);
    }
    // Without a build there is nothing to measure.
    lab.binary()?;
    let _lock = store.lock()?;
    // What a killed run left goes now, and a directory in which nothing can be made is found now.
    drop(lab.work("bench")?);
    summary(&lab, &plan);
    // Before the first case, too: a document can then be made even when the run is killed.
    store.save_plan(&plan)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, interrupted.clone())?;
    }
    let mut processes = Processes::new(&lab, interrupted);
    let outcome = runner::run(experiments, &lab, &store, &mut plan, &mut processes);
    store.save_plan(&plan)?;
    if args.common.json {
        println!(
            "{}",
            serde_json::to_string_pretty(&Told::of(&plan, &outcome))?
        );
    } else {
        tables(experiments, &plan, &store);
    }
    left_out(&plan);
    if let Some(file) = args.document() {
        document::publish(experiments, &Tool::all(), &store, file).context("no document")?;
        eprintln!("made {}", file.display());
    }
    if outcome.interrupted {
        eprintln!("interrupted: what was done is kept; the same command goes on");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    Ok(ExitCode::from(outcome.exit.code()))
}

/// What `--json` prints at the end.
#[derive(Serialize)]
struct Told<'a> {
    exit: u8,
    interrupted: bool,
    measured: &'a [Record],
    plan: &'a Plan,
}

impl<'a> Told<'a> {
    fn of(plan: &'a Plan, outcome: &'a Outcome) -> Self {
        Self {
            exit: outcome.exit.code(),
            interrupted: outcome.interrupted,
            measured: &outcome.records,
            plan,
        }
    }
}

/// Processes that ran or wanted to during the last minute, by the kernel's count.
fn load() -> Option<f64> {
    let line = std::fs::read_to_string("/proc/loadavg").ok()?;
    line.split(' ').next()?.parse().ok()
}

/// What will be measured, before it is.
fn summary(lab: &Lab, plan: &Plan) {
    if let Some(load) = load().filter(|load| *load > 0.5 * plan.machine.cores as f64) {
        eprintln!(
            "WARNING this machine is busy (load {load}): times will be longer than drover's and its rivals' own"
        );
    }
    let images = identity::set(lab);
    eprintln!(
        "{} image(s), {} MiB on disk; {}",
        images.len(),
        identity::allocated_bytes(&images) >> 20,
        plan.machine
    );
    eprintln!(
        "{} case(s) to measure, about {}; {} kept, {} over the time, {} not asked for, {} not possible here",
        plan.count(&Fate::Run),
        duration(plan.seconds()),
        plan.count(&Fate::Kept),
        plan.count(&Fate::OverBudget),
        plan.count(&Fate::NotAsked),
        plan.lacking()
            .iter()
            .map(|(_, _, count)| count)
            .sum::<usize>()
    );
    for entry in plan.entries.iter().filter(|e| e.fate == Fate::Run) {
        eprintln!(
            "  {:>8}  {}/{}: {}",
            duration(entry.seconds),
            entry.experiment,
            entry.case,
            entry.what
        );
    }
}

/// The whole plan, for `--list`.
fn list(plan: &Plan) {
    for entry in &plan.entries {
        let fate = match &entry.fate {
            Fate::Run | Fate::Done => "run",
            Fate::Kept => "kept",
            Fate::NotAsked => "not asked for",
            Fate::Lacking(_) => "not possible here",
            Fate::OverBudget => "over the time",
        };
        println!(
            "{:<17} {:>8}  rank {}  {}/{}: {}",
            fate,
            duration(entry.seconds),
            entry.rank,
            entry.experiment,
            entry.case,
            entry.what
        );
    }
    println!(
        "{} of {} cases to run, about {}",
        plan.count(&Fate::Run),
        plan.entries.len(),
        duration(plan.seconds())
    );
    not_possible(plan);
}

/// A table for each experiment that has rows.
fn tables(experiments: &[&dyn Experiment], plan: &Plan, store: &Store) {
    for experiment in experiments {
        let about = experiment.about();
        let mut rows: Vec<Row> = Vec::new();
        for entry in plan.entries.iter().filter(|e| e.experiment == about.name) {
            if !matches!(entry.fate, Fate::Done | Fate::Kept) {
                continue;
            }
            if let Ok(Some(record)) = store.load(about.name, &entry.case) {
                rows.extend(record.rows);
            }
        }
        for (_, why, count) in plan.lacking().into_iter().filter(|l| l.0 == about.name) {
            let name = format!("{count} case(s)");
            rows.push(judge::bare(about, &name, Verdict::Skipped(why.to_owned())));
        }
        if !rows.is_empty() {
            let rows: Vec<&Row> = rows.iter().collect();
            println!("{}\n{}\n", about.title, Cells::of(about, &rows).table());
        }
    }
}

fn not_possible(plan: &Plan) {
    for (experiment, why, count) in plan.lacking() {
        eprintln!("SKIP {experiment}: {count} case(s): {why}");
    }
    for (experiment, why) in &plan.mute {
        eprintln!("SKIP {experiment}: {why}");
    }
}

/// What was not measured, and how to.
fn left_out(plan: &Plan) {
    not_possible(plan);
    let mut over: Vec<(&str, usize, f64)> = Vec::new();
    for entry in &plan.entries {
        if matches!(entry.fate, Fate::OverBudget | Fate::Run) {
            match over.iter_mut().find(|(name, ..)| *name == entry.experiment) {
                Some((_, count, seconds)) => {
                    *count += 1;
                    *seconds += entry.seconds;
                }
                None => over.push((&entry.experiment, 1, entry.seconds)),
            }
        }
    }
    for (experiment, count, seconds) in &over {
        eprintln!(
            "left out: {count} case(s) of {experiment}, about {}: lab bench --only {experiment}",
            duration(*seconds)
        );
    }
    if !over.is_empty() {
        eprintln!("everything: lab bench --full");
    }
}
