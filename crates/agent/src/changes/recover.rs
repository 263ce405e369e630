//! Crash recovery of merges: committed ones are finished, others are rolled back.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::ImageName;
use drover_mount::server::ClaimEnd;
use drover_net::PeerKey;
use drover_store::SiteCatalog;
use drover_store::lease::{MERGE_NOTE, MountId};
use drover_teleport::{Origin, Site, TeleportError};

use super::decided::Decided;
use super::turn::{Here, PART, Turn, crash, hold};
use crate::error::{Context, Error, Result, bail, chain, one_line};
use crate::home::Home;
use crate::notice::notice;
use crate::text::clean;

/// Finishes or rolls back every merge that an earlier process left behind. Returns one line per merge handled. `stop`
/// cancels safely; the rest is left for the next time. The caller must hold the home's lock. Blocks the thread: a file
/// may have to be read again.
pub fn recover(here: &Here, stop: &AtomicBool) -> Vec<String> {
    let mut said = Vec::new();
    for name in names(here) {
        if stop.load(Ordering::Relaxed) {
            return said;
        }
        let Some(turn) = Turn::take(here, &name) else {
            continue;
        };
        match finish(here, &turn, &name, stop) {
            Ok(true) => said.push(format!(
                "{name}: the interrupted merge of its changes is finished now"
            )),
            Ok(false) => {}
            Err(e) if was_stopped(&e) => {
                tracing::info!("{name}: an interrupted merge is finished at the next start");
            }
            Err(e) => tracing::error!(
                "{name}: an interrupted merge cannot be finished: {}",
                one_line(&e)
            ),
        }
    }
    said
}

/// Recovers interrupted merges in a home whose lock this process holds.
///
/// # Errors
/// When mounts cannot be queried.
pub async fn recover_own(home: &Home, catalog: &Arc<SiteCatalog>, site: &Arc<Site>) -> Result<()> {
    let merges = fs::read_dir(site.work_dir().join("merges"));
    if merges.map_or(true, |mut merges| merges.next().is_none()) {
        return Ok(());
    }
    let here = Here::of(home, catalog, site)?;
    let recover = move || recover(&here, &AtomicBool::new(false));
    for line in tokio::task::spawn_blocking(recover).await? {
        notice(&clean(&line));
    }
    Ok(())
}

/// Whether the error came from cancellation rather than a failure.
fn was_stopped(error: &Error) -> bool {
    let mut causes = chain(error).filter_map(|cause| cause.downcast_ref());
    causes.any(|cause| matches!(cause, TeleportError::Stopped))
}

/// Images that may have an interrupted merge.
fn names(here: &Here) -> Vec<ImageName> {
    let mut names = Vec::new();
    for entry in fs::read_dir(here.merges()).into_iter().flatten().flatten() {
        let name = entry.file_name().into_string().unwrap_or_default();
        names.extend(ImageName::new(&name));
    }
    names.sort();
    names
}

/// Finishes the merge of an image if it was committed, else rolls it back. Returns whether there was one to finish.
///
/// # Errors
/// When that is not possible now, or is cancelled; it can be retried.
pub fn finish(here: &Here, turn: &Turn, name: &ImageName, stop: &AtomicBool) -> Result<bool> {
    let decided = Decided::read(turn.dir())?;
    let finished = match &decided {
        Some(decided) => settle(here, turn, decided, stop)?,
        None => false,
    };
    // The lease of a process that has exited; while this process lives, no other can take the lock of this merge.
    let leased = here.server.leased(name)?.and_then(|l| l.holder);
    if let Some(holder) = leased
        && holder.peer == here.key.0
        && holder.note == MERGE_NOTE
    {
        let key = (PeerKey(holder.peer), holder.mount);
        let how = match &decided {
            Some(decided) if finished => ClaimEnd::Merged(decided.new),
            _ => ClaimEnd::Kept,
        };
        here.server.end_claim(name, key, how)?;
    }
    crash("recovered");
    turn.tidy();
    Ok(finished)
}

/// Renames the new file to the image's name if that has not happened. Returns whether the image is now the merged one.
fn settle(here: &Here, turn: &Turn, decided: &Decided, stop: &AtomicBool) -> Result<bool> {
    let name = &decided.image;
    let Some(record) = here.site.by_name(name) else {
        return Ok(false);
    };
    if record.digest == decided.new && decided.new != decided.old {
        return Ok(true);
    }
    if record.digest != decided.old || record.external {
        // Another image has taken the name.
        return Ok(false);
    }
    here.site.finish_undoing(turn.dir(), name)?;
    let part = turn.dir().join(PART);
    let file = part.exists().then_some(part.as_path());
    let key = (PeerKey(here.key.0), MountId(decided.mount));
    let held = here.server.leased(name)?.and_then(|l| l.holder);
    let held = held.is_some_and(|h| (PeerKey(h.peer), h.mount) == key);
    if file.is_some() && !held {
        // The lease was broken: another mount may have written since.
        return Ok(false);
    }
    let from = file.unwrap_or(&record.path);
    hold("recovering", stop);
    let mut ends = |_, _| match stop.load(Ordering::Relaxed) {
        true => Err(TeleportError::Stopped),
        false => Ok(()),
    };
    let origin = Origin {
        from: &decided.from,
        owner: record.owner,
    };
    let prepared = here
        .site
        .prepare(from, name, origin, &mut ends)
        .with_context(|| format!("cannot read {}", from.display()))?;
    if prepared.digest != decided.new {
        here.site.forget_prepared(&prepared);
        if file.is_some() || prepared.digest == decided.old {
            // The image stays as it was, with its changes.
            tracing::error!(
                "{name}: the file of an interrupted merge is lost; the merge is abandoned"
            );
            return Ok(false);
        }
        bail!(
            "{} is not the file that a merge made; `drover verify {name}` and send it again",
            record.path.display()
        );
    }
    let Some(path) = file else {
        here.site.adopt(None, &prepared, false)?;
        return Ok(true);
    };
    // Reading may have taken long: the lease may have been broken meanwhile, and the image written.
    let adopt = || here.site.adopt(Some(path), &prepared, false);
    match here.server.while_claimed(name, key, adopt)? {
        Some(adopted) => adopted.map(|_| true).map_err(Into::into),
        None => {
            here.site.forget_prepared(&prepared);
            Ok(false)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_during_a_stop_is_distinguished_from_the_stop() {
        let stopped = Err::<(), _>(TeleportError::Stopped).with_context(|| "cannot read web.raw");
        assert!(was_stopped(&stopped.context("merge").unwrap_err()));
        assert!(!was_stopped(&Error::msg("no space").context("merge")));
    }
}
