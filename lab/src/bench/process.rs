//! Runs each case in its own process, so that a crash or a hang does not end the run.
//!
//! The process leads a process group, which includes everything it starts. It ends itself and the group when its stdin
//! is closed: on Ctrl-C, at its deadline, and when the run is killed (`kill -9`).

use std::any::Any;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, getpgrp, getpid, kill_process, kill_process_group};
use serde::{Deserialize, Serialize};

use super::{Case, Experiment, Row, Verdict};
use crate::setup::Lab;
use crate::shell;

/// Deadline: a case that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(4 * 3600);
/// Time for a case to clean up.
const CLEAN_UP: Duration = Duration::from_secs(5);
/// Polling interval.
const EVERY: Duration = Duration::from_millis(50);

/// What `lab case` measures, and where its rows go.
#[derive(Serialize, Deserialize)]
struct Request {
    experiment: String,
    case: String,
    answer: PathBuf,
    lab: Lab,
}

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
    let request = Request {
        experiment: experiment.to_owned(),
        case: case.to_owned(),
        answer: work.join("rows.json"),
        lab: lab.clone(),
    };
    // The run's own stdout is for its results.
    let mut child = Command::new(std::env::current_exe()?)
        .args(["case", &serde_json::to_string(&request)?])
        .stdin(Stdio::piped())
        .stdout(io::stderr())
        .process_group(0)
        .spawn()
        .context("cannot start a process for the case")?;
    let group = Pid::from_child(&child);
    let stop = || interrupted.load(Ordering::Relaxed);
    until(PATIENCE, || stop() || !matches!(child.try_wait(), Ok(None)));
    let ended = child.try_wait()?.is_some();
    // A case that still runs ends itself and its children; what remains is killed.
    drop(child.stdin.take());
    until(2 * CLEAN_UP, || !matches!(child.try_wait(), Ok(None)));
    let _ = kill_process_group(group, Signal::KILL);
    let status = child.wait()?;
    // The kernel takes a moment.
    until(2 * CLEAN_UP, || others_of(group).is_empty());
    match fs::read(&request.answer) {
        _ if !ended && stop() => Ok(None),
        _ if !ended => bail!("ended after {} s", PATIENCE.as_secs()),
        Ok(rows) => Ok(Some(serde_json::from_slice(&rows)?)),
        Err(_) => bail!("its process ended without an answer: {status}"),
    }
}

/// Waits until `done`, or for `limit`.
fn until(limit: Duration, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() && start.elapsed() < limit {
        thread::sleep(EVERY);
    }
}

/// Measures one case and writes its rows.
///
/// # Errors
/// When there is no such case, or the rows cannot be written. A case that fails yields a row.
pub fn run_case(experiments: &[Experiment], request: &str) -> Result<()> {
    end_with_stdin();
    let Request {
        experiment: name,
        case: id,
        answer,
        lab,
    } = serde_json::from_str(request)?;
    let experiment = experiments.iter().find(|e| e.name == name);
    let experiment = experiment.with_context(|| format!("no experiment {name}"))?;
    let mut cases = (experiment.cases)(&lab)?.into_iter();
    let case = cases.find(|case| case.id == id);
    let case = case.with_context(|| format!("no case {id}"))?;
    let outcome = catch_unwind(AssertUnwindSafe(|| (experiment.run)(&lab, &case)));
    let outcome =
        outcome.unwrap_or_else(|panic| Err(anyhow!("the lab panicked: {}", words(&*panic))));
    let rows = serde_json::to_vec(&judged(experiment, &case, outcome))?;
    fs::write(&answer, rows).with_context(|| format!("cannot write {}", answer.display()))
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
            .retain(|_, f| (f.min + f.median + f.max).is_finite());
        let columns = experiment.columns.iter().filter(|column| column.required);
        let mut keys: Vec<&str> = columns.map(|column| column.key).collect();
        keys.retain(|key| !row.figures.contains_key(*key));
        if row.verdict == Verdict::Good && !keys.is_empty() {
            row.verdict = Verdict::Failed(format!("no figure {}", keys.join(", ")));
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
fn end_with_stdin() {
    let group = getpgrp();
    if group != getpid() {
        return; // started by hand, in the group of a shell
    }
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        until(CLEAN_UP, || {
            for member in others_of(group) {
                let _ = kill_process(member, Signal::TERM);
            }
            false
        });
        let _ = kill_process_group(group, Signal::KILL);
    });
}

/// The running processes of a group except its leader.
fn others_of(group: Pid) -> Vec<Pid> {
    let members = shell::processes()
        .into_iter()
        .filter(|p| p.group == group && p.pid != group);
    members.map(|process| process.pid).collect()
}
