//! The run itself: one case after the other as long as the time lasts.

use std::path::Path;
use std::time::{Duration, Instant};

use super::identity;
use super::judge::{self, Exit};
use super::plan::{Fate, Plan};
use super::process::{Ended, Runner};
use super::space;
use super::store::{FORMAT, Record, Store};
use super::{Case, Experiment, Row, Subject, Verdict};
use crate::experiments::Lab;

/// A case that hangs is ended after so many times its estimate, and this. No machine is that slow.
const PATIENCE: f64 = 20.0;
const LEAST_PATIENCE: Duration = Duration::from_secs(600);

/// How a run went.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What the exit code says.
    pub exit: Exit,
    /// Whether it was ended by a person.
    pub interrupted: bool,
    /// What was measured, in order.
    pub records: Vec<Record>,
}

/// Measures what the plan says and keeps every result as soon as it is there; the plan follows what things really take.
pub fn run(
    experiments: &[&dyn Experiment],
    lab: &Lab,
    store: &Store,
    plan: &mut Plan,
    runner: &mut dyn Runner,
) -> Outcome {
    let started = Instant::now();
    let mut outcome = Outcome::default();
    let commit = identity::commit();
    for at in 0..plan.entries.len() {
        plan.fit(at, started.elapsed().as_secs_f64());
        let entry = &plan.entries[at];
        let (Fate::Run, Some(case)) = (&entry.fate, entry.of.clone()) else {
            continue;
        };
        let Some(experiment) = experiments
            .iter()
            .find(|e| e.about().name == entry.experiment)
        else {
            continue;
        };
        begin(plan, at, started, outcome.records.len());
        let begun = Instant::now();
        let rows = match guarded(*experiment, lab, &case, runner) {
            Ended::Rows(rows) => rows,
            Ended::Interrupted => {
                outcome.interrupted = true;
                break;
            }
        };
        let rows: Vec<Row> = rows
            .into_iter()
            .map(|row| explained(row, &lab.common.out))
            .collect();
        let seconds = begun.elapsed().as_secs_f64();
        tell(&rows, seconds);
        outcome.exit.see(&case, &rows);
        let record = Record {
            format: FORMAT,
            experiment: entry.experiment.clone(),
            case: case.id.clone(),
            measured: now(),
            commit: commit.clone(),
            identity: entry.identity.clone(),
            repeat: lab.repeat,
            seconds,
            rows,
        };
        if let Err(error) = store.save(&record) {
            let out = &lab.common.out;
            eprintln!("  NOT KEPT: {}", space::explain(format!("{error:#}"), out));
            outcome.exit.fails();
        }
        outcome.records.push(record);
        plan.entries[at].fate = Fate::Done;
    }
    if !plan.mute.is_empty() || !plan.lacking().is_empty() {
        outcome.exit.lacks();
    }
    outcome
}

/// Now, in UTC, to the second.
fn now() -> String {
    let now = jiff::Timestamp::now().as_second();
    jiff::Timestamp::from_second(now).map_or_else(|_| String::new(), |now| now.to_string())
}

/// Runs a case for whose images there is room.
fn guarded(experiment: &dyn Experiment, lab: &Lab, case: &Case, runner: &mut dyn Runner) -> Ended {
    // What only weighs images writes none.
    let images = match case.subject {
        Subject::Images => Vec::new(),
        _ => identity::read(lab, experiment, case, &identity::set(lab)),
    };
    let room = std::fs::create_dir_all(&lab.common.out)
        .map_err(anyhow::Error::from)
        .and_then(|()| space::check(&lab.common.out, identity::allocated_bytes(&images)));
    if let Err(error) = room {
        let row = judge::failed(experiment.about(), case, format!("{error:#}"));
        return Ended::Rows(vec![row]);
    }
    let patience = Duration::from_secs_f64(case.seconds.max(0.0) * PATIENCE) + LEAST_PATIENCE;
    runner.run(experiment, case, patience)
}

fn explained(mut row: Row, out: &Path) -> Row {
    if let Verdict::Failed(why) | Verdict::Wrong(why) = &mut row.verdict {
        *why = space::explain(std::mem::take(why), out);
    }
    row
}

fn begin(plan: &Plan, at: usize, started: Instant, done: usize) {
    let entry = &plan.entries[at];
    let all = done
        + plan.entries[at..]
            .iter()
            .filter(|e| e.fate == Fate::Run)
            .count();
    let elapsed = started.elapsed().as_secs_f64();
    let left: f64 = plan.entries[at..]
        .iter()
        .filter(|e| e.fate == Fate::Run)
        .map(|e| e.seconds)
        .sum();
    eprintln!(
        "[{}/{all}] {}/{}: {} (about {}; {} gone, {} to go)",
        done + 1,
        entry.experiment,
        entry.case,
        entry.what,
        duration(entry.seconds),
        duration(elapsed),
        duration(left)
    );
}

fn tell(rows: &[Row], seconds: f64) {
    let bad: Vec<String> = rows.iter().filter_map(|row| words(&row.verdict)).collect();
    let took = duration(seconds);
    if bad.is_empty() {
        eprintln!("  good, {} row(s) in {took}", rows.len());
    }
    for why in bad {
        eprintln!("  {why} (in {took})");
    }
}

/// What is to be said about a row that is not good.
pub fn words(verdict: &Verdict) -> Option<String> {
    match verdict {
        Verdict::Good => None,
        Verdict::Skipped(why) => Some(format!("SKIPPED: {why}")),
        Verdict::Failed(why) => Some(format!("FAILED: {why}")),
        Verdict::Wrong(why) => Some(format!("WRONG: {why}")),
    }
}

/// `1:02:03`, `2:03` or `3 s`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    let (hours, minutes, rest) = (whole / 3600, whole / 60 % 60, whole % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest} s"),
        (0, _) => format!("{minutes}:{rest:02}"),
        _ => format!("{hours}:{minutes:02}:{rest:02}"),
    }
}
