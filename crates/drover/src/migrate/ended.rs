//! Migrations from this site that have ended: told to its audit log and its metrics, and listed.

use std::time::Duration;

use anyhow::{Context, Result};
use drover_agent::audit::{Event, Migration, Outcome, Record};
use drover_agent::home::Home;
use drover_agent::machines::CountMigration;
use drover_agent::remote::Call;
use drover_agent::text::{bytes, clean};
use drover_core::ImageName;
use drover_migrate::{MigrateError, MoveReport};
use drover_net::PeerKey;
use drover_store::Peer;
use drover_store::machine::Other;

use crate::out;

/// A machine has left.
pub async fn left(home: &Home, machine: &ImageName, peer: &Peer, report: &MoveReport) {
    let took = Migration::from(report);
    let record = Record::new(Event::MachineLeft)
        .bytes(report.wire_bytes())
        .took(Duration::from_secs_f64(report.seconds))
        .migration(took)
        .detail(format!("paused for {} ms", took.pause_ms));
    tell(home, machine, peer, record, Some(took)).await;
}

/// It did not move, or does not run there.
pub async fn failed(home: &Home, machine: &ImageName, peer: &Peer, error: &MigrateError) {
    match error {
        MigrateError::Stayed { why, .. } => {
            let record = Record::new(Event::MachineStayed).detail(why.as_str());
            tell(home, machine, peer, record, None).await;
        }
        MigrateError::NotStarted { why, .. } => {
            let record = Record {
                outcome: Outcome::Failed,
                ..Record::new(Event::MachineLeft).detail(why.as_str())
            };
            tell(home, machine, peer, record, Some(Migration::default())).await;
        }
        // Nothing had begun, or it is not over.
        _ => {}
    }
}

/// A person has ended its move: it stays.
pub async fn broken(home: &Home, machine: &ImageName, to: &Other) {
    let record = Record::new(Event::MachineStayed)
        .detail("its move was broken: the peer, which may have taken it, is lost for good")
        .about(&to.name, PeerKey(to.key));
    tell_of(home, machine, record, None).await;
}

/// A person has given up what had not followed a machine that runs here.
pub fn given_up(home: &Home, machine: &ImageName, from: &Other, lost_bytes: Option<u64>) {
    let record = Record {
        outcome: Outcome::Failed,
        ..Record::new(Event::MachineArrived)
    };
    let record = record
        .detail("its move was broken: what had not followed it is lost, with the peer")
        .about(&from.name, PeerKey(from.key));
    let record = match lost_bytes {
        Some(lost) => record.bytes(lost),
        None => record,
    };
    home.audit().write(record.machine(machine));
}

async fn tell(
    home: &Home,
    machine: &ImageName,
    peer: &Peer,
    record: Record,
    moved: Option<Migration>,
) {
    tell_of(home, machine, record.about(&peer.name, peer.key), moved).await;
}

async fn tell_of(home: &Home, machine: &ImageName, record: Record, moved: Option<Migration>) {
    let record = record.machine(machine);
    home.audit().write(record);
    let counted = async {
        match Call::local(home).await? {
            Some(call) => call.ask(&CountMigration { moved }, |()| {}).await,
            // A site that does not run has no metrics.
            None => Ok(()),
        }
    };
    if let Err(e) = counted.await {
        tracing::debug!("the migration was not counted: {e:#}");
    }
}

/// Lists those that the audit log has.
///
/// # Errors
/// When it cannot be read.
pub fn list(home: &Home, json: bool) -> Result<()> {
    let cannot = || format!("cannot read the audit log in {}", home.dir().display());
    let mut lines = home.audit().lines().with_context(cannot)?;
    let mut rows = Vec::new();
    while let Some(entry) = lines.next_entry().with_context(cannot)? {
        let is_end = matches!(
            entry.record.event,
            Event::MachineLeft
                | Event::MachineStayed
                | Event::MachineArrived
                | Event::MachineRefused
        );
        match (is_end, json) {
            (true, true) => out::line(&entry.line)?,
            (true, false) => rows.push(row(&entry.record)),
            (false, _) => {}
        }
    }
    if rows.is_empty() {
        if !json {
            out::note("drover: no migration in the audit log has ended");
        }
        return Ok(());
    }
    let heading = [
        "time (UTC)",
        "name",
        "result",
        "peer",
        "pause",
        "disks",
        "memory",
        "hand-over",
        "image data",
        "changes",
        "memory data",
        "rounds",
        "seconds",
    ];
    out::line(&out::table(&heading, rows, &[4, 5, 6, 7, 8, 9, 10, 11, 12]))
}

fn row(record: &Record) -> Vec<String> {
    let text = |text: &Option<String>| text.as_deref().map_or_else(|| "-".into(), clean);
    let name = record.event.name();
    let result = name.strip_prefix("machine-").unwrap_or(&name).to_owned();
    let time = record.time.get(..19).unwrap_or(&record.time);
    let mut row = vec![
        clean(time).replace('T', " "),
        text(&record.machine),
        match (record.event, record.outcome) {
            (Event::MachineLeft, Outcome::Failed) => "left, does not run".into(),
            (Event::MachineArrived, Outcome::Failed) => "the rest is lost".into(),
            _ => result,
        },
        text(&record.peer),
    ];
    match record.migration {
        Some(took) => {
            let pauses = [
                took.pause_ms,
                took.pause_disks_ms,
                took.pause_memory_ms,
                took.pause_hand_over_ms,
            ];
            row.extend(pauses.map(|ms| format!("{ms} ms")));
            row.extend([took.image_bytes, took.disk_bytes, took.memory_bytes].map(bytes));
            row.push(took.rounds.to_string());
        }
        None => row.extend(std::iter::repeat_n("-".to_owned(), 8)),
    }
    let seconds = record.ms.map(|ms| format!("{:.1}", ms as f64 / 1000.0));
    row.push(seconds.unwrap_or_else(|| "-".into()));
    row
}
