//! `lab bench`: runs cases one after the other, until the time is used up.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::document::{self, table};
use super::process;
use super::rows::{self, Record, Rows};
use super::{Case, Experiment, Need, Verdict};
use crate::library::{self, Set};
use crate::setup::Lab;
use crate::{link, watch};

/// Exit code after SIGINT, by shell convention.
const INTERRUPTED: u8 = 130;
/// Exit code when something failed.
const FAILED: u8 = 1;
/// Exit code when something cannot be measured here.
const LACKING: u8 = 4;

/// What to measure, and for how long.
#[derive(Args)]
pub struct BenchArgs {
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
    /// The file of all results [default: docs/benchmarks/rows.jsonl; OUT/rows-small.jsonl with --small, and
    /// OUT/rows-dirty.jsonl of a build that is no commit].
    #[arg(long, value_name = "FILE")]
    rows: Option<PathBuf>,
    #[command(flatten)]
    lab: Lab,
}

/// Locks out other runs, which would distort the measurements and overwrite rows.
fn alone(out: &Path) -> Result<File> {
    std::fs::create_dir_all(out)?;
    let file = File::create(out.join("lock"))?;
    file.try_lock().context("another run is measuring")?;
    Ok(file)
}

/// Measures, stores each result at once, and prints them.
///
/// # Errors
/// When it cannot start. Later failures are in rows and in the exit code.
pub fn bench(experiments: &[Experiment], args: &BenchArgs) -> Result<ExitCode> {
    let (lab, build) = (&args.lab, rows::commit());
    let file = match &args.rows {
        Some(file) => file.clone(),
        None if lab.small => lab.common.out.join("rows-small.jsonl"),
        // Rows of a build that cannot be reproduced do not replace others.
        None if !rows::is_commit(&build) => lab.common.out.join("rows-dirty.jsonl"),
        None => PathBuf::from(document::ROWS),
    };
    let out = &lab.common.out;
    let _alone = alone(out).with_context(|| format!("cannot lock {}", out.display()))?;
    let mut kept = Rows::read(&file)?;
    let (mut cases, mut codes) = (Vec::new(), Vec::new());
    for experiment in experiments.iter().filter(|e| args.asks(e.name)) {
        let name = experiment.name;
        match (experiment.cases)(lab) {
            Ok(all) => {
                let named = |case: Case| (experiment, format!("{name}/{}", case.id), case);
                cases.extend(all.into_iter().map(named));
            }
            Err(error) => {
                eprintln!("SKIP {name}: {error:#}");
                codes.push(LACKING);
            }
        }
    }
    let all = args.full || !args.only.is_empty();
    cases.retain(|(_, name, case)| args.asks(name) && (all || case.rank == 0));
    if cases.is_empty() && codes.is_empty() {
        bail!("nothing to measure is called that: `lab bench --list --full` prints all cases");
    }
    cases.sort_by_key(|(.., case)| case.rank);
    if args.list {
        for (experiment, name, case) in &cases {
            let known = kept.of(experiment.name, &case.id).map_or("", |r| &r.build);
            println!("{known:<10} {name}: {}", case.what);
        }
        return Ok(ExitCode::SUCCESS);
    }
    // Without a build there is nothing to measure. Remove what a killed run left.
    let drover = blake3::hash(&std::fs::read(lab.binary()?)?).to_hex();
    let drover = format!("drover {}", &drover[..16]);
    lab.sweep()?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, interrupted.clone())?;
    }
    let machine = watch::machine();
    for (at, (experiment, name, case)) in cases.iter().enumerate() {
        let at = format!("[{}/{}] {name}", at + 1, cases.len());
        let subject = case.rival.as_ref().unwrap_or(&drover).clone();
        let holds = |r: &Record| r.is_good() && r.subject == subject && r.machine == machine;
        if !args.again && kept.of(experiment.name, &case.id).is_some_and(holds) {
            eprintln!("{at}: kept");
            continue;
        }
        if let Some(why) = case.needs.iter().find_map(|need| lacks(lab, *need)) {
            eprintln!("SKIP {name}: {why}");
            codes.push(LACKING);
            continue;
        }
        eprintln!("{at}: {}", case.what);
        let (begun, load) = (Instant::now(), watch::load()?);
        let measured = process::measure(lab, experiment, case, &interrupted);
        let Some(rows) = measured.transpose() else {
            break;
        };
        let rows = process::judged(experiment, case, rows);
        for row in rows.iter().filter(|row| row.verdict != Verdict::Good) {
            eprintln!("  {}", row.verdict.words());
            codes.extend((!matches!(row.verdict, Verdict::Skipped(_))).then_some(FAILED));
        }
        let (count, seconds) = (rows.len(), begun.elapsed().as_secs_f64());
        eprintln!("  {count} row(s) in {seconds:.0} s");
        let record = Record {
            experiment: experiment.name.to_owned(),
            case: case.id.clone(),
            measured: jiff::Timestamp::now().strftime("%F").to_string(),
            build: build.clone(),
            subject,
            machine: machine.clone(),
            load,
            rows,
        };
        let rows: Vec<_> = record.rows.iter().map(|row| (&record, row)).collect();
        let table = table(experiment.columns, &rows, &[&machine]);
        println!("{}\n{table}", experiment.title);
        kept.keep(record).context("the result is lost")?;
    }
    if interrupted.load(Ordering::Relaxed) {
        eprintln!("interrupted: finished cases are kept; run again to continue");
        codes = vec![INTERRUPTED];
    }
    Ok(codes.into_iter().min().unwrap_or(0).into())
}

impl BenchArgs {
    /// Whether `EXPERIMENT`, or one of its cases, or `EXPERIMENT/CASE` was requested.
    fn asks(&self, name: &str) -> bool {
        let fits = |only: &String| {
            let mut parts = only.splitn(2, '/').zip(name.splitn(2, '/'));
            parts.all(|(pattern, text)| like(pattern.as_bytes(), text.as_bytes()))
        };
        self.only.is_empty() || self.only.iter().any(fits)
    }
}

/// Whether `text` matches `pattern`: `*` is any text, `?` any byte.
fn like(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern, text) {
        ([b'*', rest @ ..], _) if like(rest, text) => true,
        ([b'*', ..], [_, text @ ..]) => like(pattern, text),
        ([p, rest @ ..], [c, text @ ..]) => (p == c || *p == b'?') && like(rest, text),
        _ => pattern.is_empty() && text.is_empty(),
    }
}

/// What is missing on this machine, determined by trying it.
fn lacks(lab: &Lab, need: Need) -> Option<String> {
    match need {
        Need::Link => {
            let why = link::available().err()?;
            Some(format!("no link here: {why}"))
        }
        Need::Library => {
            let (dir, set) = (&lab.common.dir, lab.either(Set::Full, Set::Small));
            let images = library::images(dir, set).unwrap_or_default();
            let built = images.iter().any(|image| image.built);
            (!built).then(|| format!("no image in {}: lab library", dir.display()))
        }
    }
}
