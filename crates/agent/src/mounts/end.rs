//! Ending a mount by asking its process, or clearing away what a dead one left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_frontend::{fuse, loopdev};

use super::control::{self, Answer, Ask, StopHow};
use super::kernel;
use super::left::Left;
use super::record::{Front, Place, Record, Written, boot};
use super::status::DiskStatus;
use crate::error::{Context, Error, Result, bail, msg};
use crate::home::Home;
use crate::text::clean;

/// How long a process whose mount has ended may take to go.
const GONE_LIMIT: Duration = Duration::from_secs(5);

/// Hears bytes pushed of bytes to push.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

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
        0 => bail!(
            "{} is no mount of drover's; `drover mounts` lists them",
            clean(what)
        ),
        _ => bail!(
            "{} is more than one mount; take a name from `drover mounts`",
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
    let (place, process) = (place.clone(), record.process);
    tokio::task::spawn_blocking(move || ask_to_end(&place, process, how, &progress)).await?
}

/// Asks the mount daemon.
fn ask_to_end(place: &Place, process: u32, how: StopHow, progress: &Progress) -> Result<Left> {
    let mut most = 0;
    let mut end = Err(msg!("it gave no answer"));
    control::ask(&place.socket(), &Ask::Stop(how), |answer| match answer {
        Answer::Status(status) => {
            let dirty: u64 = status.disks.iter().map(|d: &DiskStatus| d.dirty).sum();
            most = most.max(dirty);
            progress(most - dirty, most);
            Ok(false)
        }
        Answer::Ended(left) => {
            end = Ok(left);
            Ok(true)
        }
        Answer::Refused(why) => {
            end = Err(Error::msg(why));
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
