//! Unmounting: by a request to the mount daemon, or by cleanup when the daemon is gone.

use std::time::{Duration, Instant};

use drover_net::NetError;

use super::control::{self, Progress, StopHow};
use super::left::Left;
use super::record::{Place, Record, Written};
use super::status::Status;
use crate::error::{Error, Result, bail};
use crate::home::Home;
use crate::text::clean;

/// How long the mount daemon may take to exit after its last reply.
const GONE_LIMIT: Duration = Duration::from_secs(5);

/// Finds the mount with the name, path, device or socket `what`.
///
/// # Errors
/// When no mount or several mounts match, or the record of the match is damaged.
pub fn find(home: &Home, what: &str) -> Result<Written> {
    let (listed, damaged) = Place::list_all(home)?;
    if let Some((_, why)) = damaged.into_iter().find(|(place, _)| place.name() == what) {
        return Err(why);
    }
    let mut meant: Vec<_> = listed
        .into_iter()
        .filter(|(_, record)| record.is_meant_by(what))
        .collect();
    // Of several mounts at the same path, only those with a running daemon are candidates.
    if meant.len() > 1 {
        meant.retain(|(place, _)| place.is_kept());
    }
    match meant.len() {
        1 => Ok(meant.remove(0)),
        0 => Err(Error::refused(format!(
            "no mount at {}; `drover mounts` lists all mounts",
            clean(what)
        ))),
        _ => bail!(
            "{} matches several mounts; use a name from `drover mounts`",
            clean(what)
        ),
    }
}

/// Unmounts: by a request to the mount daemon, or by cleanup when the daemon is gone.
///
/// # Errors
/// When the mount is in use, or its dirty data cannot be pushed.
pub async fn end(
    home: &Home,
    (place, record): &Written,
    how: StopHow,
    progress: Progress,
) -> Result<Left> {
    if !place.is_kept() {
        return super::dead::end(home, place, record, how, progress).await;
    }
    let mut most = 0;
    let report = |status: Status| {
        let dirty: u64 = status.disks.iter().map(|d| d.dirty).sum();
        most = most.max(dirty);
        progress(most - dirty, most);
    };
    let left = control::ask(&place.socket(), &how, control::ANSWER_LIMIT, report).await;
    let left = left.map_err(|e| match e {
        Error::Net(NetError::Refused(refusal)) => Error::Refused(refusal),
        e => unanswered(e, place, record),
    })?;
    // The daemon holds the mount's lock until it exits; until then, a new mount there would be refused as in use.
    let began = Instant::now();
    while place.is_kept() && began.elapsed() < GONE_LIMIT {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(left)
}

/// The error when the mount daemon did not reply.
fn unanswered(e: Error, place: &Place, record: &Record) -> Error {
    e.context(format!(
        "cannot unmount {}: its process does not respond; see {}; `kill {}` ends the process cleanly; if that fails, use `kill -9` and unmount again: flushed data is not lost",
        place.name(),
        place.log().display(),
        record.process
    ))
}
