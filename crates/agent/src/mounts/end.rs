//! Ending a mount by asking its process, or clearing away what a dead one left.

use std::time::{Duration, Instant};

use drover_net::NetError;

use super::control::{self, Progress, StopHow};
use super::left::Left;
use super::record::{Place, Record, Written};
use super::status::Status;
use crate::error::{Error, Result, bail};
use crate::home::Home;
use crate::text::clean;

/// How long a process whose mount has ended may take to go.
const GONE_LIMIT: Duration = Duration::from_secs(5);

/// The mount that a person means by `what`: its name, path, device or socket.
///
/// # Errors
/// When there is none, there are several, or what is written down of it is damaged.
pub fn find(home: &Home, what: &str) -> Result<Written> {
    let (listed, damaged) = Place::list_all(home)?;
    if let Some((_, why)) = damaged.into_iter().find(|(place, _)| place.name() == what) {
        return Err(why);
    }
    let mut meant: Vec<_> = listed
        .into_iter()
        .filter(|(_, record)| record.is_meant_by(what))
        .collect();
    // A dead mount beside a living one at the same path is not who is meant.
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

/// Ends a mount: by its process, or by clearing away what a dead one left.
///
/// # Errors
/// When it is in use, or what was written cannot be pushed.
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
    let said = |status: Status| {
        let dirty: u64 = status.disks.iter().map(|d| d.dirty).sum();
        most = most.max(dirty);
        progress(most - dirty, most);
    };
    let left = control::ask(&place.socket(), &how, control::ANSWER_LIMIT, said).await;
    let left = left.map_err(|e| match e {
        Error::Net(NetError::Refused(refusal)) => Error::Refused(refusal),
        e => unanswered(e, place, record),
    })?;
    // It holds the mount's lock until it is gone; whoever mounts there next is not to be told that it is there.
    let began = Instant::now();
    while place.is_kept() && began.elapsed() < GONE_LIMIT {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(left)
}

/// The mount daemon did not answer.
fn unanswered(e: Error, place: &Place, record: &Record) -> Error {
    e.context(format!(
        "cannot unmount {}: its process does not respond; see {}; `kill {}` ends the process cleanly; if that fails, use `kill -9` and unmount again: flushed data is not lost",
        place.name(),
        place.log().display(),
        record.process
    ))
}
