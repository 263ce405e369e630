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

use anyhow::{Context, Result, bail};
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

/// Measures a case by `lab case`; `None` if `interrupted` became true first.
///
/// # Errors
/// Those of the case, or of its process.
pub fn measure(
    lab: &Lab,
    experiment: &Experiment,
    case: &Case,
    interrupted: &AtomicBool,
) -> Result<Option<Vec<Row>>> {
    lab.sweep()?;
    let work = lab.work("case")?;
    let request = Request {
        experiment: experiment.name.to_owned(),
        case: case.id.clone(),
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
        Ok(answer) => {
            let answer: Result<Vec<Row>, String> = serde_json::from_slice(&answer)?;
            answer.map(Some).map_err(anyhow::Error::msg)
        }
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

/// Measures one case and writes its rows, or why there are none.
///
/// # Errors
/// When there is no such case, or the answer cannot be written.
pub fn run_case(experiments: &[Experiment], request: &str) -> Result<()> {
    end_with_stdin();
    let request: Request = serde_json::from_str(request)?;
    let mut experiments = experiments.iter();
    let experiment = experiments.find(|e| e.name == request.experiment);
    let experiment = experiment.context("no such experiment")?;
    let mut cases = (experiment.cases)(&request.lab)?.into_iter();
    let case = cases.find(|case| case.id == request.case);
    let case = case.context("no such case")?;
    let run = AssertUnwindSafe(|| (experiment.run)(&request.lab, &case));
    let answer = match catch_unwind(run) {
        Ok(outcome) => outcome.map_err(|error| format!("{error:#}")),
        Err(panic) => Err(format!("panicked: {}", text_of(&*panic))),
    };
    fs::write(&request.answer, serde_json::to_vec(&answer)?).context("cannot write the answer")
}

/// The message of a panic.
fn text_of(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned
        .or(panic.downcast_ref().copied())
        .unwrap_or("no message")
}

/// Validates the rows of a case; an error becomes a failed row. A good row also fails when a required figure is missing.
pub fn judged(experiment: &Experiment, case: &Case, outcome: Result<Vec<Row>>) -> Vec<Row> {
    let some = outcome.and_then(|rows| (!rows.is_empty()).then_some(rows).context("no rows"));
    let mut rows = some.unwrap_or_else(|error| {
        let first = experiment.columns.first().map_or("case", |c| c.key);
        vec![Row::new([(first, case.id.clone())]).but(Verdict::failed(&error))]
    });
    for row in &mut rows {
        let required = experiment.columns.iter().filter(|column| column.required);
        let mut keys: Vec<&str> = required.map(|column| column.key).collect();
        keys.retain(|key| !row.figures.contains_key(*key));
        if row.verdict == Verdict::Good && !keys.is_empty() {
            row.verdict = Verdict::Failed(format!("no figure {}", keys.join(", ")));
        }
    }
    rows
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
    let mut processes = shell::processes();
    processes.retain(|process| process.group == group && process.pid != group);
    processes.into_iter().map(|process| process.pid).collect()
}
