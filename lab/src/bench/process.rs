//! Runs each case in its own process, so that a crash or a hang does not end the run.
//!
//! `timeout` makes that process and everything it starts a process group, ends it at the deadline, and when the run is
//! killed (`kill -9`), which `setpriv` has the kernel tell it.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGTERM;

use super::{Case, Experiment, Row, Verdict};
use crate::setup::Lab;
use crate::shell;

/// Runs a command, that is told to end after 4 h, or when this process dies, and killed if it does not.
const GUARD: [&str; 6] = [
    "setpriv",
    "--pdeathsig",
    "TERM",
    "timeout",
    "--kill-after=5",
    "4h",
];
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
    let mut child = Command::new(GUARD[0])
        .args(&GUARD[1..])
        .arg(std::env::current_exe()?)
        .args(["case", &serde_json::to_string(&request)?])
        .stdin(Stdio::null())
        .stdout(io::stderr())
        .spawn()
        .context("cannot start a process for the case")?;
    let group = Pid::from_child(&child);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        // Again and again: a case whose rival was ended continues with the next.
        if interrupted.load(Ordering::Relaxed) {
            let _ = kill_process_group(group, Signal::TERM);
        }
        sleep(EVERY);
    };
    // What the case left running is killed, which takes the kernel a moment.
    while shell::processes().iter().any(|p| p.group == group) {
        let _ = kill_process_group(group, Signal::KILL);
        sleep(EVERY);
    }
    match fs::read(&request.answer) {
        _ if interrupted.load(Ordering::Relaxed) => Ok(None),
        Ok(answer) => {
            let answer: Result<Vec<Row>, String> = serde_json::from_slice(&answer)?;
            answer.map(Some).map_err(anyhow::Error::msg)
        }
        Err(_) => bail!("its process ended without an answer: {status}"),
    }
}

/// Measures one case and writes its rows, or why there are none.
///
/// # Errors
/// When there is no such case, or the answer cannot be written.
pub fn run_case(experiments: &[Experiment], request: &str) -> Result<()> {
    // What ends is what it runs: the case gets errors, and cleans up.
    signal_hook::flag::register(SIGTERM, Arc::default())?;
    let request: Request = serde_json::from_str(request)?;
    let mut experiments = experiments.iter();
    let experiment = experiments.find(|e| e.name == request.experiment);
    let experiment = experiment.context("no such experiment")?;
    let mut cases = (experiment.cases)(&request.lab)?.into_iter();
    let case = cases.find(|case| case.id == request.case);
    let case = case.context("no such case")?;
    let answer = (experiment.run)(&request.lab, &case).map_err(|error| format!("{error:#}"));
    fs::write(&request.answer, serde_json::to_vec(&answer)?).context("cannot write the answer")
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
