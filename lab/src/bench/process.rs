//! A case runs in a process of its own: what it uses is its own, and whatever it does, the run goes on.
//!
//! The process leads a group of its own, which what it starts is in. It ends itself and its group when its standard
//! input ends: on Ctrl-C, past its deadline, and when the run is gone (`kill -9`).

use std::fs;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use rustix::process::{Pid, Signal, getpgrp, kill_process, kill_process_group};

use super::judge;
use super::{Case, Experiment, Row};
use crate::experiments::{Common, Lab};

/// How long a case may take to clean up after itself.
const CLEAN_UP: Duration = Duration::from_secs(5);
/// How often a case is looked at.
const EVERY: Duration = Duration::from_millis(50);

/// How a case ended.
pub enum Ended {
    /// With rows, good or bad.
    Rows(Vec<Row>),
    /// By a person.
    Interrupted,
}

/// Something that measures cases.
pub trait Runner {
    /// Measures a case; it is ended when it takes longer than `deadline`.
    fn run(&mut self, experiment: &dyn Experiment, case: &Case, deadline: Duration) -> Ended;
}

/// Runs each case by `lab case`.
pub struct Processes<'a> {
    lab: &'a Lab,
    interrupted: Arc<AtomicBool>,
}

impl<'a> Processes<'a> {
    /// Ends the running case when `interrupted` gets true.
    pub fn new(lab: &'a Lab, interrupted: Arc<AtomicBool>) -> Self {
        Self { lab, interrupted }
    }

    fn start(&self, experiment: &str, case: &str, answer: &PathBuf) -> Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        let Common {
            drover, dir, out, ..
        } = &self.lab.common;
        command
            .args(["case", experiment, case, "--answer"])
            .arg(answer)
            .args(["--repeat", &self.lab.repeat.to_string()])
            .arg("--drover")
            .arg(drover)
            .arg("--dir")
            .arg(dir)
            .arg("--out")
            .arg(out);
        if self.lab.small {
            command.arg("--small");
        }
        command
            .stdin(Stdio::piped())
            // Standard output is for what the run itself has to say.
            .stdout(std::io::stderr())
            .process_group(0)
            .spawn()
            .context("cannot start a process for the case")
    }

    fn rows(&self, experiment: &str, case: &str, deadline: Duration) -> Result<Option<Vec<Row>>> {
        let work = self.lab.work("case")?;
        let answer = work.join("rows.json");
        let mut child = self.start(experiment, case, &answer)?;
        let started = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if self.interrupted.load(Ordering::Relaxed) {
                end(&mut child)?;
                return Ok(None);
            }
            if started.elapsed() > deadline {
                end(&mut child)?;
                bail!("ended after {} s", deadline.as_secs());
            }
            std::thread::sleep(EVERY);
        };
        // Nothing of a case outlives it.
        if let Some(group) = pid_of(&child) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        match fs::read(&answer) {
            Ok(rows) => Ok(Some(serde_json::from_slice(&rows)?)),
            Err(_) => bail!("its process ended without an answer: {}", how(status)),
        }
    }
}

impl Runner for Processes<'_> {
    fn run(&mut self, experiment: &dyn Experiment, case: &Case, deadline: Duration) -> Ended {
        let about = experiment.about();
        match self.rows(about.name, &case.id, deadline) {
            Ok(Some(rows)) => Ended::Rows(rows),
            Ok(None) => Ended::Interrupted,
            Err(error) => Ended::Rows(vec![judge::failed(about, case, format!("{error:#}"))]),
        }
    }
}

/// Lets a case end itself and what it started, and ends what does not.
fn end(child: &mut Child) -> Result<()> {
    drop(child.stdin.take());
    let deadline = Instant::now() + 2 * CLEAN_UP;
    while Instant::now() < deadline && child.try_wait()?.is_none() {
        std::thread::sleep(EVERY);
    }
    if let Some(group) = pid_of(child) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    child.wait()?;
    Ok(())
}

fn pid_of(child: &Child) -> Option<Pid> {
    Pid::from_raw(i32::try_from(child.id()).ok()?)
}

fn how(status: ExitStatus) -> String {
    match status.signal() {
        Some(9) => "killed, perhaps for want of memory".to_owned(),
        _ => status.to_string(),
    }
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
/// When there is no such case, or the rows cannot be written. A case that fails is a row.
pub fn run_case(experiments: &[&dyn Experiment], args: &CaseArgs) -> Result<()> {
    end_with_stdin()?;
    let lab = Lab {
        common: args.common.clone(),
        repeat: args.repeat,
        small: args.small,
    };
    let experiment = experiments
        .iter()
        .find(|e| e.about().name == args.experiment)
        .with_context(|| format!("no experiment {}", args.experiment))?;
    let case = experiment
        .cases(&lab)?
        .into_iter()
        .find(|case| case.id == args.case)
        .with_context(|| format!("no case {}/{}", args.experiment, args.case))?;
    let rows = judge::measure(*experiment, &lab, &case);
    // In one step: an answer that is there is whole.
    let part = args.answer.with_extension("part");
    fs::write(&part, serde_json::to_vec(&rows)?)?;
    Ok(fs::rename(&part, &args.answer)?)
}

/// Ends this process' group when standard input ends; first all others in it, so that the case itself gets errors and
/// can clean up.
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

/// The processes of a group but for its leader.
fn others_of(group: Pid) -> Vec<Pid> {
    let group = group.as_raw_nonzero().get();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| *pid != group && group_of(*pid) == Some(group))
        .filter_map(Pid::from_raw)
        .collect()
}

fn group_of(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name in brackets, which may hold anything: state, parent, group.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    fields.nth(2)?.parse().ok()
}
