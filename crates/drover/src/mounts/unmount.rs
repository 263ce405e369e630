//! `unmount`: ends a mount.

use std::sync::Arc;

use anyhow::Result;
use drover_agent::home::Home;
use drover_agent::mounts::{self, ANSWER_LIMIT, HandTo, MountState, Record, Status, StopHow};
use drover_agent::site::{find_peer, look_at_catalog};
use drover_agent::text::bytes;
use drover_net::Code;
use serde_json::json;

use crate::bar::Bar;
use crate::cli::UnmountArgs;
use crate::{failure, out, prompt};

/// `drover unmount`.
///
/// # Errors
/// When there is no such mount, it is in use, or its data cannot be pushed.
pub async fn unmount(home: &Home, args: UnmountArgs) -> Result<()> {
    let mount = mounts::find(home, &args.what)?;
    let (place, record) = &mount;
    let status = mounts::status_of(place, record, ANSWER_LIMIT).await;
    let dirty: u64 = status.disks.iter().map(|d| d.dirty).sum();
    if args.dry_run {
        return would(&status, record, &args, dirty);
    }
    if args.discard {
        let what = match (status.state, dirty) {
            (MountState::Dead, _) => "data that has not been pushed".into(),
            (_, n) => format!("{} that have not been pushed", bytes(n)),
        };
        prompt::confirm(&format!("Discard {what} of {}?", record.name), args.yes)?;
    }
    let how = StopHow {
        offline: args.offline,
        discard: args.discard,
        keep_cache: args.keep_cache,
        lazy: args.lazy,
        hand_over: None,
    };
    let bar = Bar::new("pushing", args.json);
    let shown = bar.clone();
    let progress = Arc::new(move |done, total| shown.at(done, total));
    let left = mounts::end(home, &mount, how, progress).await;
    bar.clear();
    let left = left.map_err(|e| match e.code() {
        Some(Code::Busy) => failure::hint(e, Code::Busy, "--lazy unmounts at once"),
        _ => failure::hint(
            e,
            Code::Unavailable,
            "--offline keeps the data in the cache for the next mount there, --discard discards it",
        ),
    })?;
    if args.json {
        return out::json(&json!({
            "event": "unmounted", "name": record.name,
            "left": left.lines().join("; "), "kept_there": left.there,
        }));
    }
    for line in left.lines() {
        out::note(&format!("drover: {}: {line}", record.name));
    }
    Ok(())
}

/// `drover mounts hand-over`: ends a mount whose write lease another one gets.
///
/// # Errors
/// When there is no such mount, nobody stands by, it is in use, or its data cannot be pushed.
pub async fn hand_over(
    home: &Home,
    what: &str,
    peer: Option<&str>,
    lazy: bool,
    json: bool,
) -> Result<()> {
    let mount = mounts::find(home, what)?;
    let to = match peer {
        Some(peer) => HandTo::Site(find_peer(&look_at_catalog(home)?, peer)?.key.0),
        None => HandTo::Any,
    };
    let how = StopHow {
        lazy,
        hand_over: Some(to),
        ..StopHow::default()
    };
    let bar = Bar::new("pushing", json);
    let shown = bar.clone();
    let progress = Arc::new(move |done, total| shown.at(done, total));
    let left = mounts::end(home, &mount, how, progress).await;
    bar.clear();
    let left = left.map_err(|e| failure::hint(e, Code::Busy, "--lazy ends it at once"))?;
    let name = &mount.1.name;
    if json {
        return out::json(&json!({
            "event": "handed_over", "name": name, "left": left.lines().join("; "),
        }));
    }
    for line in left.lines() {
        out::note(&format!("drover: {name}: {line}"));
    }
    Ok(())
}

/// Shows what an unmount would do.
fn would(status: &Status, record: &Record, args: &UnmountArgs, dirty: u64) -> Result<()> {
    let disposition = match (args.discard, args.offline) {
        (true, _) => "discarded",
        (_, true) => "kept for the next mount",
        _ => "pushed",
    };
    if args.json {
        return out::json(&json!({
            "event": "would_unmount", "name": record.name, "dirty": dirty, "disposition": disposition,
            "state": status.state, "devices": record.devices,
        }));
    }
    out::line(&format!(
        "would unmount {}; {} not yet pushed would be {disposition}",
        record.name,
        bytes(dirty)
    ))
}
