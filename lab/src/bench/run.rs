//! `lab bench`: runs cases one after the other, until the time is used up.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::document::{self, table};
use super::process;
use super::rows::{self, Record, Rows};
use super::{Case, Experiment, Need, Row, Verdict};
use crate::library::{self, Set};
use crate::setup::{Common, Lab};
use crate::{link, watch};

/// Exit code after SIGINT, by shell convention.
const INTERRUPTED: u8 = 130;

/// Shown by `--help`.
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
    /// No case is begun after so many minutes [default: no limit].
    #[arg(long)]
    minutes: Option<f64>,
    /// Every case of every experiment, not only those that a run should have.
    #[arg(long)]
    full: bool,
    /// Only these: EXPERIMENT or EXPERIMENT/CASE, with * and ?.
    #[arg(long, value_name = "EXPERIMENT[/CASE]", num_args = 1..)]
    only: Vec<String>,
    /// Print the cases, and stop.
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
    /// The file of all results [default: docs/benchmarks/rows.jsonl; OUT/rows-small.jsonl with --small, and
    /// OUT/rows-dirty.jsonl of a build that is no commit].
    #[arg(long, value_name = "FILE")]
    rows: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

/// Locks out other runs, which would distort the measurements and overwrite rows.
fn alone(out: &Path) -> Result<File> {
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let path = out.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(e) => bail!("{}: another run is measuring ({e})", path.display()),
    }
}

/// Measures, stores each result at once, and prints them.
///
/// # Errors
/// When it cannot start. Later failures are in rows and in the exit code.
pub fn bench(experiments: &[Experiment], args: &BenchArgs) -> Result<ExitCode> {
    let lab = Lab {
        common: args.common.clone(),
        repeat: args.repeat as usize,
        small: args.small,
    };
    let file = match &args.rows {
        Some(file) => file.clone(),
        None if args.small => args.common.out.join("rows-small.jsonl"),
        // Rows of a build that cannot be reproduced do not replace others.
        None if !rows::is_commit(&rows::commit()) => args.common.out.join("rows-dirty.jsonl"),
        None => PathBuf::from(document::ROWS),
    };
    let _alone = alone(&args.common.out)?;
    let mut kept = Rows::read(&file)?;
    let mut cases = Vec::new();
    let mut lacking = false;
    for experiment in experiments.iter().filter(|e| args.asks(e.name, "*")) {
        match (experiment.cases)(&lab) {
            Ok(all) => cases.extend(all.into_iter().map(|case| (experiment, case))),
            Err(error) => {
                eprintln!("SKIP {}: {error:#}", experiment.name);
                lacking = true;
            }
        }
    }
    cases.retain(|(e, case)| {
        args.asks(e.name, &case.id) && (args.full || !args.only.is_empty() || case.rank == 0)
    });
    if cases.is_empty() && !lacking {
        let names: Vec<&str> = experiments.iter().map(|e| e.name).collect();
        bail!(
            "nothing to measure is called that; there are {}",
            names.join(", ")
        );
    }
    cases.sort_by_key(|(_, case)| case.rank);
    if args.list {
        for (experiment, case) in &cases {
            let known = kept.of(experiment.name, &case.id).map_or("", |r| &r.build);
            println!(
                "{:<10} {}/{}: {}",
                known, experiment.name, case.id, case.what
            );
        }
        return Ok(ExitCode::SUCCESS);
    }
    // Without a build there is nothing to measure. Remove what a killed run left.
    let drover = format!("drover {}", digest_of(&lab.binary()?)?);
    lab.sweep()?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, interrupted.clone())?;
    }
    let (started, build, machine) = (Instant::now(), rows::commit(), watch::machine());
    let mut codes: Vec<u8> = if lacking { vec![4] } else { vec![] };
    let (all, mut left_out) = (cases.len(), 0);
    for (at, (experiment, case)) in cases.iter().enumerate() {
        let subject = case.rival.clone().unwrap_or_else(|| drover.clone());
        let old = kept.of(experiment.name, &case.id);
        if !args.again
            && old.is_some_and(|r| r.is_good() && r.subject == subject && r.machine == machine)
        {
            eprintln!("[{}/{all}] {}/{}: kept", at + 1, experiment.name, case.id);
            continue;
        }
        if args
            .minutes
            .is_some_and(|m| started.elapsed().as_secs_f64() > m * 60.0)
        {
            left_out += 1;
            continue;
        }
        if let Some(why) = case.needs.iter().find_map(|need| lacks(&lab, *need)) {
            eprintln!("SKIP {}/{}: {why}", experiment.name, case.id);
            codes.push(4);
            continue;
        }
        let (begun, load) = (Instant::now(), watch::load());
        eprintln!(
            "[{}/{all}] {}/{}: {}",
            at + 1,
            experiment.name,
            case.id,
            case.what
        );
        let Some(rows) = process::measure(&lab, experiment, case, &interrupted) else {
            break;
        };
        for why in rows.iter().filter_map(|row| row.verdict.words()) {
            eprintln!("  {why}");
        }
        eprintln!(
            "  {} row(s) in {:.0} s",
            rows.len(),
            begun.elapsed().as_secs_f64()
        );
        codes.extend(rows.iter().filter_map(|row| code(case, row)));
        let today = jiff::Timestamp::now()
            .to_string()
            .chars()
            .take(10)
            .collect();
        let record = Record {
            experiment: experiment.name.to_owned(),
            case: case.id.clone(),
            measured: today,
            build: build.clone(),
            subject,
            machine: machine.clone(),
            load,
            rows,
        };
        if args.common.json {
            println!("{}", serde_json::to_string(&record)?);
        } else {
            println!("{}\n{}", experiment.title, table(experiment, &[&record]));
        }
        kept.keep(record).context("the result is lost")?;
    }
    if left_out > 0 {
        eprintln!(
            "{left_out} case(s) skipped: time limit reached; run the same command again to continue"
        );
    }
    if interrupted.load(Ordering::Relaxed) {
        eprintln!("interrupted: finished cases are kept; run the same command again to continue");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    Ok(ExitCode::from(codes.into_iter().min().unwrap_or(0)))
}

impl BenchArgs {
    /// Whether an experiment, or one of its cases, was requested.
    fn asks(&self, experiment: &str, case: &str) -> bool {
        let fits = |only: &String| {
            let (e, c) = only.split_once('/').unwrap_or((only, "*"));
            like(e.as_bytes(), experiment.as_bytes())
                && (case == "*" || like(c.as_bytes(), case.as_bytes()))
        };
        self.only.is_empty() || self.only.iter().any(fits)
    }
}

/// Whether `text` matches `pattern`: `*` is any text, `?` any byte.
fn like(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern.split_first(), text.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), after) => {
            like(rest, text) || after.is_some_and(|(_, t)| like(pattern, t))
        }
        (Some((p, rest)), Some((c, t))) => (p == c || *p == b'?') && like(rest, t),
        _ => false,
    }
}

/// The exit code for a row. A case of drover may include rivals: the label `by` names the subject.
fn code(case: &Case, row: &Row) -> Option<u8> {
    let by = row.label("by");
    let own =
        by.is_empty() || by == case.id || ["drover", "limit"].iter().any(|own| by.starts_with(own));
    let rival = case.rival.is_some() || !own;
    match row.verdict {
        Verdict::Good => None,
        // A missing rival is not a failure.
        Verdict::Skipped(_) => (!rival).then_some(4),
        Verdict::Failed(_) | Verdict::Wrong(_) => Some(if rival { 3 } else { 1 }),
    }
}

/// What is missing on this machine, determined by trying it.
fn lacks(lab: &Lab, need: Need) -> Option<String> {
    match need {
        Need::Link => link::available()
            .err()
            .map(|why| format!("no link here: {why}")),
        Need::Library => {
            let set = if lab.small { Set::Small } else { Set::Full };
            let images = library::images(&lab.common.dir, set).unwrap_or_default();
            let built = images.iter().any(|image| image.built);
            (!built).then(|| format!("no image in {}: lab library", lab.common.dir.display()))
        }
    }
}

fn digest_of(program: &Path) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(std::fs::File::open(program)?)?;
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}
