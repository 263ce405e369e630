//! Runs each case in its own process, so that a crash or a hang does not end the run.
//!
//! The process leads a process group, which includes everything it starts. It ends itself and the group when its stdin
//! is closed: on Ctrl-C, at its deadline, and when the run is killed (`kill -9`).

use std::any::Any;
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use rustix::process::{Pid, Signal, getpgrp, kill_process, kill_process_group};

use super::{Case, Experiment, Row, Verdict};
use crate::files::replace;
use crate::setup::{Common, Lab};

/// Deadline: a case that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(4 * 3600);
/// Time for a case to clean up.
const CLEAN_UP: Duration = Duration::from_secs(5);
/// Polling interval.
const EVERY: Duration = Duration::from_millis(50);

/// Measures a case by `lab case`. Always returns rows, unless `interrupted` becomes true.
pub fn measure(
    lab: &Lab,
    experiment: &Experiment,
    case: &Case,
    interrupted: &AtomicBool,
) -> Option<Vec<Row>> {
    let rows = in_a_process(lab, experiment.name, &case.id, interrupted);
    rows.unwrap_or_else(|error| Some(vec![failed(experiment, case, &error)]))
}

fn in_a_process(
    lab: &Lab,
    experiment: &str,
    case: &str,
    interrupted: &AtomicBool,
) -> Result<Option<Vec<Row>>> {
    lab.sweep()?;
    let work = lab.work("case")?;
    let answer = work.join("rows.json");
    let Common {
        drover, dir, out, ..
    } = &lab.common;
    let mut command = Command::new(std::env::current_exe()?);
    command.args([
        "case",
        experiment,
        case,
        "--repeat",
        &lab.repeat.to_string(),
    ]);
    command
        .arg("--answer")
        .arg(&answer)
        .arg("--drover")
        .arg(drover);
    command
        .arg("--dir")
        .arg(dir)
        .arg("--out")
        .arg(out)
        .args(lab.small.then_some("--small"));
    // The run's own stdout is for its results.
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(std::io::stderr())
        .process_group(0)
        .spawn()
        .context("cannot start a process for the case")?;
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if interrupted.load(Ordering::Relaxed) {
            end(&mut child)?;
            return Ok(None);
        }
        if started.elapsed() > PATIENCE {
            end(&mut child)?;
            bail!("ended after {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(EVERY);
    };
    end_group(pid_of(&child)?);
    match fs::read(&answer) {
        Ok(rows) => Ok(Some(serde_json::from_slice(&rows)?)),
        Err(_) => bail!("its process ended without an answer: {status}"),
    }
}

/// Lets a case end itself and its children, and kills what remains.
fn end(child: &mut Child) -> Result<()> {
    drop(child.stdin.take());
    let deadline = Instant::now() + 2 * CLEAN_UP;
    while Instant::now() < deadline && child.try_wait()?.is_none() {
        std::thread::sleep(EVERY);
    }
    end_group(pid_of(child)?);
    child.wait()?;
    Ok(())
}

/// Kills the rest of a case's group, and waits until it is gone, which takes the kernel a moment.
fn end_group(group: Pid) {
    let _ = kill_process_group(group, Signal::KILL);
    let deadline = Instant::now() + 2 * CLEAN_UP;
    while Instant::now() < deadline && !others_of(group).is_empty() {
        std::thread::sleep(EVERY);
    }
}

fn pid_of(child: &Child) -> Result<Pid> {
    Pid::from_raw(i32::try_from(child.id())?).context("no process")
}

/// Which case, and where its rows go.
#[derive(Args)]
pub struct CaseArgs {
    experiment: String,
    case: String,
    /// The file for the rows.
    #[arg(long, value_name = "FILE")]
    answer: PathBuf,
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    #[arg(long)]
    small: bool,
    #[command(flatten)]
    common: Common,
}

/// Measures one case and writes its rows.
///
/// # Errors
/// When there is no such case, or the rows cannot be written. A case that fails yields a row.
pub fn run_case(experiments: &[Experiment], args: &CaseArgs) -> Result<()> {
    end_with_stdin()?;
    let lab = Lab {
        common: args.common.clone(),
        repeat: args.repeat,
        small: args.small,
    };
    let experiment = experiments.iter().find(|e| e.name == args.experiment);
    let experiment = experiment.with_context(|| format!("no experiment {}", args.experiment))?;
    let case = (experiment.cases)(&lab)?
        .into_iter()
        .find(|case| case.id == args.case);
    let case = case.with_context(|| format!("no case {}", args.case))?;
    let outcome = catch_unwind(AssertUnwindSafe(|| (experiment.run)(&lab, &case)));
    let outcome =
        outcome.unwrap_or_else(|panic| Err(anyhow!("the lab panicked: {}", words(&*panic))));
    replace(
        &args.answer,
        &serde_json::to_vec(&judged(experiment, &case, outcome))?,
    )
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

/// Validates the rows of a case; an error becomes a failed row. A good row also fails when a required figure is missing
/// or not finite.
pub fn judged(experiment: &Experiment, case: &Case, outcome: Result<Vec<Row>>) -> Vec<Row> {
    let mut rows = match outcome {
        Ok(rows) if rows.is_empty() => return vec![failed(experiment, case, &anyhow!("no rows"))],
        Ok(rows) => rows,
        Err(error) => return vec![failed(experiment, case, &error)],
    };
    for row in &mut rows {
        // JSON cannot represent values that are not finite.
        row.figures
            .retain(|_, figure| (figure.min + figure.median + figure.max).is_finite());
        let columns = experiment.columns.iter().filter(|column| column.required);
        let bad: Vec<&str> = columns
            .map(|c| c.key)
            .filter(|key| !row.figures.contains_key(*key))
            .collect();
        if row.verdict == Verdict::Good && !bad.is_empty() {
            row.verdict = Verdict::Failed(format!("no figure {}", bad.join(", ")));
        }
    }
    rows
}

/// A failed row.
fn failed(experiment: &Experiment, case: &Case, error: &anyhow::Error) -> Row {
    let first = experiment
        .columns
        .first()
        .map_or("case", |column| column.key);
    Row::new([(first, case.id.clone())]).but(Verdict::failed(error))
}

/// Ends this process group when stdin is closed; all other processes first, so that the case itself gets errors and can
/// clean up.
fn end_with_stdin() -> Result<()> {
    let group = getpgrp();
    if group != rustix::process::getpid() {
        return Ok(()); // started by hand, in the group of a shell
    }
    std::thread::Builder::new()
        .name("ender".to_owned())
        .spawn(move || {
            let mut byte = [0];
            while matches!(std::io::stdin().read(&mut byte), Ok(1..)) {}
            let deadline = Instant::now() + CLEAN_UP;
            while Instant::now() < deadline {
                for member in others_of(group) {
                    let _ = kill_process(member, Signal::TERM);
                }
                std::thread::sleep(4 * EVERY);
            }
            let _ = kill_process_group(group, Signal::KILL);
        })?;
    Ok(())
}

/// The running processes of a group except its leader. Zombies count as ended.
fn others_of(group: Pid) -> Vec<Pid> {
    let group = group.as_raw_nonzero().get();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let runs_in = |pid: i32| -> Option<i32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The process name in brackets may contain anything; after it come state, parent, group.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?;
        (state != "Z").then(|| fields.nth(1)?.parse().ok())?
    };
    pids.filter(|pid| *pid != group && runs_in(*pid) == Some(group))
        .filter_map(Pid::from_raw)
        .collect()
}
