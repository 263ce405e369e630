//! What `replicate` and `failover` print.

use anyhow::Result;
use drover_agent::home::Home;
use drover_agent::mounts::{Replicating, RoundDone};
use drover_agent::replicas::{self, FailedOver, ReplicaInfo, now_ms};
use drover_agent::text::{bytes, clean, moment};
use drover_core::ImageName;
use drover_store::replica::Sent;
use drover_teleport::progress::SendEvent;
use serde_json::json;

use crate::out;

/// Shows rounds.
pub struct Show {
    /// As JSON.
    pub json: bool,
}

impl Show {
    /// Of sending the images.
    pub fn event(&self, event: SendEvent) {
        if let SendEvent::Reconnecting { error, .. } = event {
            self.reconnecting(&error);
        }
    }

    /// Of a round that a mount daemon makes.
    pub fn told(&self, event: Replicating) {
        if let Replicating::Reconnecting(error) = event {
            self.reconnecting(&error);
        }
    }

    fn reconnecting(&self, error: &str) {
        let error = clean(error);
        match self.json {
            // The reader may be gone.
            true => drop(out::json(
                &json!({"event": "reconnecting", "message": error}),
            )),
            false => out::note(&format!("{error}; trying again")),
        }
    }

    /// A round is complete; `risk_ms` is how old the state before had become.
    pub fn round(&self, sent: &Sent, report: &RoundDone, risk_ms: Option<u64>) {
        let (name, peer) = (&sent.name_there, &sent.to.name);
        // The reader may be gone.
        let _ = match self.json {
            true => out::json(&json!({
                "event": "round", "name": name.as_str(), "peer": peer, "round": sent.rounds,
                "disks": report.disks, "size_bytes": report.size, "wire_bytes": report.wire_bytes,
                "unread_bytes": report.unread_bytes, "seconds": report.seconds,
                "moment_unix_ms": sent.moment_ms, "rpo_seconds": risk_ms.map(|ms| ms as f64 / 1000.0),
            })),
            false => {
                let risk = risk_ms.map(|ms| format!("; RPO {}", seconds(ms / 1000)));
                out::line(&format!(
                    "{name}: round {}: {} sent in {:.1} s; {} has it as of {}{}",
                    sent.rounds,
                    bytes(report.wire_bytes),
                    report.seconds,
                    clean(peer),
                    moment((sent.moment_ms.unwrap_or_default() / 1000).cast_signed()),
                    risk.unwrap_or_default(),
                ))
            }
        };
    }

    /// A round failed, and another one follows.
    pub fn round_failed(&self, sent: &Sent, error: &str) {
        let name = &sent.name_there;
        if self.json {
            let line = json!({"event": "round-failed", "name": name.as_str(), "message": error});
            let _ = out::json(&line);
        }
        out::note(&format!(
            "drover: {name}: this round failed: {error}; the state before it remains"
        ));
    }
}

/// A duration for people.
pub fn seconds(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

/// Lists the replicas that are kept here, and those that are sent.
///
/// # Errors
/// When they cannot be read.
pub fn list(home: &Home, json: bool) -> Result<()> {
    let list = replicas::list(home)?;
    if json {
        return list.iter().try_for_each(out::json);
    }
    if list.is_empty() {
        out::note("drover: this site keeps no replica, and sends none");
        return Ok(());
    }
    let row = |replica: &ReplicaInfo| {
        let some = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let state = match replica.under_way {
            true => format!("{}, round under way", replica.state),
            false => replica.state.clone(),
        };
        let at = replica.moment_ms;
        let at = at.map(|ms| moment((ms / 1000).cast_signed()));
        vec![
            clean(&replica.name),
            state,
            clean(&replica.peer),
            some(at),
            some(replica.age_seconds.map(seconds)),
            some(replica.every_seconds.map(seconds)),
            bytes(replica.size_bytes),
            replica.rounds.to_string(),
            match &replica.source {
                Some(source) => clean(source),
                None => replica.images.join(", "),
            },
        ]
    };
    let rows = list.iter().map(row).collect();
    let heading = [
        "name",
        "state",
        "peer",
        "as of",
        "age (RPO)",
        "every",
        "size",
        "rounds",
        "disks",
    ];
    out::line(&out::table(&heading, rows, &[4, 5, 6, 7]))
}

/// What is known of the source of a replica.
pub fn heard(name: &ImageName, done: &FailedOver) -> String {
    let what = match done.under_way {
        true => "began a round, which is not complete,",
        false => "was heard",
    };
    let ago = now_ms().saturating_sub(done.heard_ms) / 1000;
    let from = clean(&done.from);
    let uses = if done.is_machine { "run" } else { "use" };
    format!(
        "{from} {what} {} ago, and may still {uses} {name}.",
        seconds(ago)
    )
}

/// Shows what a failover has done, or would do (`dry_run`).
///
/// # Errors
/// When it cannot be printed.
pub fn failover(name: &ImageName, done: &FailedOver, dry_run: bool, json: bool) -> Result<()> {
    if json {
        let event = match done.failed_over_ms {
            Some(_) => "failed-over",
            None => "would-fail-over",
        };
        let mut line = serde_json::to_value(done)?;
        line["event"] = event.into();
        line["name"] = name.as_str().into();
        return out::json(&line);
    }
    let as_of = moment((done.moment_ms / 1000).cast_signed());
    let images = done.images.join(", ");
    match done.failed_over_ms {
        Some(at) => {
            let runs = match (done.starts, dry_run) {
                (false, _) => "",
                (true, true) => "; it would be started if it does not run",
                (true, false) => "; it runs",
            };
            out::line(&format!(
                "{name}: here since {}, as of {as_of}{runs}; disks: {images}",
                moment((at / 1000).cast_signed())
            ))?;
            out::note(&format!(
                "drover: {} is not stopped by this: see that {name} {} there any more",
                clean(&done.from),
                if done.is_machine {
                    "does not run"
                } else {
                    "is not used"
                }
            ));
        }
        None => {
            let age = now_ms().saturating_sub(done.moment_ms) / 1000;
            let runs = if done.starts { "started, " } else { "" };
            let lost = format!(
                "{name}: would be {runs}as of {as_of}: what was written in the last {} would be lost; disks: {images}",
                seconds(age)
            );
            out::line(&lost)?;
            out::note(&format!("drover: {}", heard(name, done)));
        }
    }
    if let (true, Some(why)) = (dry_run, &done.not_started) {
        let would_not = format!("drover: {name} would not be started: {}", clean(why));
        out::note(&would_not);
    }
    Ok(())
}
