//! `unmount`: ending a mount by asking its process, or clearing away what a dead one left.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use drover_frontend::{fuse, loopdev};
use serde_json::json;

use super::control::{self, Answer, Ask, StopHow};
use super::kernel;
use super::left::Left;
use super::record::{Front, Place, Record, boot};
use super::status::{DiskStatus, State, Status};
use crate::bar::Bar;
use crate::cli::UnmountArgs;
use crate::home::Home;
use crate::text::bytes;
use crate::{out, prompt};

/// How long a process whose mount has ended may take to go.
const GONE_LIMIT: Duration = Duration::from_secs(5);

/// `drover unmount`.
///
/// # Errors
/// When nothing like it is mounted, it is in use, or what was written cannot be pushed.
pub async fn unmount(home: &Home, args: UnmountArgs) -> Result<()> {
    let (listed, damaged) = Place::list_all(home)?;
    if let Some((_, why)) = damaged
        .into_iter()
        .find(|(place, _)| place.name() == args.what)
    {
        return Err(why);
    }
    let mut meant: Vec<_> = listed
        .into_iter()
        .filter(|(_, record)| record.is_meant_by(&args.what))
        .collect();
    // A dead mount beside a living one at the same path is not who is meant.
    if meant.len() > 1 {
        meant.retain(|(place, _)| place.is_kept());
    }
    let (place, record) = match meant.len() {
        1 => meant.remove(0),
        0 => bail!(
            "{} is no mount of drover's; `drover mounts` lists them",
            crate::text::clean(&args.what)
        ),
        _ => bail!(
            "{} is more than one mount; take a name from `drover mounts`",
            crate::text::clean(&args.what)
        ),
    };
    let status = super::status_of(&place, &record, super::ANSWER_LIMIT);
    let dirty: u64 = status.disks.iter().map(|d| d.dirty).sum();
    if args.dry_run {
        return would(&status, &record, &args, dirty);
    }
    if args.discard {
        let what = match (status.state, dirty) {
            (State::Dead, _) => "what was written and not pushed".into(),
            (_, n) => bytes(n),
        };
        prompt::confirm(&format!("Throw away {what} of {}?", record.name), args.yes)?;
    }
    let how = StopHow {
        offline: args.offline,
        discard: args.discard,
        keep_cache: args.keep_cache,
        lazy: args.lazy,
    };
    let left = if place.is_kept() {
        tokio::task::spawn_blocking({
            let (place, process, quiet) = (place.clone(), record.process, args.json);
            move || ask_to_end(&place, process, how, quiet)
        })
        .await??
    } else {
        super::dead::end(home, &place, &record, how, args.json).await?
    };
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

/// Says what an unmount would do.
fn would(status: &Status, record: &Record, args: &UnmountArgs, dirty: u64) -> Result<()> {
    let fate = match (args.discard, args.offline) {
        (true, _) => "thrown away",
        (_, true) => "kept here for the next mount",
        _ => "pushed",
    };
    if args.json {
        return out::json(&json!({
            "event": "would_unmount", "name": record.name, "dirty": dirty, "fate": fate,
            "state": status.state, "devices": record.devices,
        }));
    }
    out::line(&format!(
        "{} would end; {} that the other site does not have would be {fate}",
        record.name,
        bytes(dirty)
    ))
}

/// Asks the process that keeps it, and shows what is still to be pushed.
fn ask_to_end(place: &Place, process: u32, how: StopHow, quiet: bool) -> Result<Left> {
    let bar = Bar::new("pushing", quiet);
    let mut most = 0;
    let mut end = Err(anyhow::anyhow!("it gave no answer"));
    control::ask(&place.socket(), &Ask::Stop(how), |answer| match answer {
        Answer::Status(status) => {
            let dirty: u64 = status.disks.iter().map(|d: &DiskStatus| d.dirty).sum();
            most = most.max(dirty);
            bar.at(most - dirty, most);
            Ok(false)
        }
        Answer::Ended(left) => {
            end = Ok(left);
            Ok(true)
        }
        Answer::Refused(why) => {
            end = Err(anyhow::anyhow!(why));
            Ok(true)
        }
    })
    .with_context(|| {
        format!(
            "{} cannot be ended; see {}, and if it does not go on, `kill -9` its process ({}) and unmount it again: nothing that was flushed is lost",
            place.name(),
            place.log().display(),
            process
        )
    })?;
    bar.clear();
    if end.is_ok() {
        // It holds the mount's lock until it is gone; whoever mounts there next is not to be told that it is there.
        let began = Instant::now();
        while place.is_kept() && began.elapsed() < GONE_LIMIT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    end
}

/// Takes away what a dead process left in the system: a dead file, loop devices, kernel devices.
///
/// # Errors
/// When it is still used.
pub fn clear_leftovers(record: &Record) -> Result<()> {
    if let Front::Kernel { driver, .. } = &record.front {
        return kernel::clear(record, *driver);
    }
    // Devices of an earlier start of the machine are gone, and their names may be somebody else's.
    let devices = match record.boot == boot() {
        true => record.devices.as_slice(),
        false => &[],
    };
    for device in devices {
        if let Err(e) = loopdev::detach_path(device)
            && super::is_there(device)
        {
            tracing::debug!("{}: {e:#}", device.display());
        }
    }
    if let Front::File { path, .. } = &record.front
        && fuse::FileMount::is_stale(path)
    {
        fuse::FileMount::clear_stale(path)
            .with_context(|| format!("cannot clear {}", path.display()))?;
    }
    Ok(())
}
