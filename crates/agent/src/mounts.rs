//! Mounts: images of other sites or of this site, and local files, as local disks.
//!
//! - `target`: what is mounted, where an NBD server listens, what is prefetched.
//! - `record`: the durable record of a mount, for recovery after a crash.
//! - `start`: starts the mount daemon; `daemon`: the daemon itself.
//! - `disk`: opens a target as a block device: `local` for local paths, `snapshots` for those of vaults (`cached` for those in object stores), `connector` and `site_images` for images;
//!   `front`: exposes the device as a file, over NBD or as a kernel block device.
//! - `kernel`: kernel block devices, and the guard process that detaches them after a crash.
//! - `moving`: moves a disk to another site while it is used. `of_machine`: disks of machines that are mounts.
//! - `control`, `status`: requests to the daemon; `end`: unmounting; `dead`: unmounting when the daemon is gone;
//!   `leftovers`: cleanup of the system after a dead daemon.
//! - `left`: what an unmount leaves behind; `known`: metadata that lets a mount start while the other site is
//!   unreachable.
//! - `profiling`: recording what is read first, and prefetching by it.
//! - `launches`: images in transit that are used. `nearby`: images of this site, which mounts read from their files. `leases`, `in_use`: leases of this site's images. `standby`: a mount that waits for the write lease; `lease`: calls about it.

mod cached;
mod connector;
mod control;
mod daemon;
mod dead;
mod disk;
mod end;
mod front;
mod holding;
mod in_use;
mod kernel;
mod known;
mod launches;
mod lease;
mod leases;
mod left;
mod leftovers;
mod local;
mod moving;
mod nearby;
pub mod of_machine;
mod profiling;
mod record;
mod replicating;
mod site_images;
mod snapshots;
mod standby;
mod start;
mod status;
mod stored;
mod target;

use std::time::Duration;

use crate::error::{Error, Result, bail};
use crate::home::Home;
use crate::notice::notice;

use control::GetStatus;
pub use control::{HandTo, Heir, Progress, StopHow};
pub use daemon::run_daemon;
pub use drover_device::backend::chunk_store::StoreAddress;
pub use end::{end, find};
pub use holding::{Borrowed, HoldDisk, borrow, shown_at};
pub use in_use::{is_launched, leased_on_disk, why_held};
pub use kernel::{choose, guard, survive_write_back};
pub use launches::{Launched, ListLaunches, launches};
pub use leases::{
    BreakLease, Broken, Held, ListLeases, Writer, break_at, break_lease, break_stored, generations,
    held, is_frozen, is_known, leases_of, leases_on_disk, stored_lease,
};
pub use left::{Keeps, Left, Unnotified};
pub use local::{is_read_by, refuse_written};
pub use moving::{MoveDisk, MoveStep, Moving, abort_move, move_disk};
pub use profiling::{Profiled, read as read_profile, start_profile, stop_profile};
pub use record::{Driver, Front, How, Place, Record, SyncMode, Written};
pub use replicating::{ReplicateDisk, Replicating, RoundDone, replicate_disk};
pub use site_images::{OwnConnector, Receiving, limited_server, own, site_server};
pub(crate) use site_images::{open_disk, was_changed};
pub use snapshots::resolve;
pub use status::{DiskStatus, MountState, Status};
pub use target::{Listen, LocalDisk, Prefetch, Target};

/// Timeout for a status reply of a mount daemon.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Upper bound on concurrent status requests to mount daemons.
const ASKED_AT_ONCE: usize = 32;

/// The process that opens a mount's disks and serves them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Process {
    /// This process, until a signal or an unmount ends it.
    This,
    /// A mount daemon, with this log verbosity.
    Daemon(u8),
}

/// Records a mount and starts it. When it is up, calls `ready` with its name and its paths or addresses.
///
/// # Errors
/// When the mount cannot be started.
pub async fn begin(
    home: &Home,
    images: Vec<Target>,
    front: Front,
    how: How,
    process: Process,
    waiting: impl Fn(u64, u64) + Send + 'static,
    ready: impl FnOnce(&str, &[String]) -> Result<()>,
) -> Result<()> {
    disk::check(home, &images, &how)?;
    for image in images.iter().filter(|image| image.is_own()) {
        launches::check(&disk::home_of(home, image)?, &image.image, how.launch).await?;
    }
    home.try_keep_reserve();
    let place = Place::of(home, &images, &front, how.read_only);
    let Some(kept) = place.keep()? else {
        let what = match &front {
            Front::Kernel { .. } => place.name(),
            other => other.place(),
        };
        bail!(
            "{what} is already in use by mount {}; `drover unmount {what}` ends it",
            place.name(),
        );
    };
    let before = place.read()?;
    if let Some(before) = &before {
        leftovers::clear(before)?;
    }
    let record = Record::new(&place, images, front, how, before.as_ref());
    place.write(&record)?;
    let done = match process {
        Process::This => {
            let name = record.name.clone();
            let ready = move |lines: &[String], notes: &[String]| {
                notes.iter().for_each(|note| notice(note));
                ready(&name, lines)
            };
            let waiting = move |local, wanted| {
                waiting(local, wanted);
                Ok(())
            };
            daemon::keep(home, place.clone(), kept, record.clone(), waiting, ready).await
        }
        Process::Daemon(verbose) => {
            drop(kept);
            let started = {
                let (home, place) = (home.clone(), place.clone());
                let start = move || start::start(&home, &place, verbose, waiting);
                tokio::task::spawn_blocking(start).await?
            };
            match started {
                Ok(lines) => return ready(&record.name, &lines),
                Err(e) => Err(e),
            }
        }
    };
    if done.is_err() {
        disk::forget_if_empty(&place, &record, before.is_some());
    }
    done
}

/// Waits until an image of this site is here, or is being sent, so that it can be launched.
///
/// # Errors
/// When it is not within `limit`.
pub async fn wait_for(home: &Home, image: &Target, limit: Duration) -> Result<()> {
    launches::wait_for(&disk::home_of(home, image)?, &image.image, limit).await
}

/// The status of every mount of a home; a daemon that does not reply within `limit` is reported as such.
///
/// # Errors
/// When the home cannot be read.
pub async fn all(home: &Home, limit: Duration) -> Result<Vec<Status>> {
    let mut found = Vec::new();
    let theirs = home.clone();
    let (listed, damaged) = on_disk(move || Place::list_all(&theirs)).await?;
    for some in listed.chunks(ASKED_AT_ONCE) {
        let ask = |(place, record): Written| async move { status_of(&place, &record, limit).await };
        let asked: Vec<_> = some.iter().cloned().map(|w| tokio::spawn(ask(w))).collect();
        for status in asked {
            found.extend(status.await.ok());
        }
    }
    // A damaged record must not hide the other mounts.
    for (place, why) in &damaged {
        found.push(damaged_status(place, why, limit).await);
    }
    launches::add_to(home, &mut found).await;
    Ok(found)
}

/// The status of a mount with an unusable record: from its daemon, or else from its caches.
async fn damaged_status(place: &Place, why: &Error, limit: Duration) -> Status {
    let link = format!("{why:#}");
    let stored = move |place: &Place, kept| damaged(place, kept, &link);
    status_or(place, limit, stored).await
}

/// The status of a mount with an unusable record, from its caches alone.
fn damaged(place: &Place, kept: bool, link: &str) -> Status {
    let caches = (0..).take_while(|index| *index == 0 || place.cache(*index).exists());
    let disk = |index| DiskStatus {
        image: "?".into(),
        mode: "?".into(),
        dirty: dirty_of(place, index, kept),
        link: link.to_owned(),
        ..DiskStatus::default()
    };
    Status {
        name: place.name(),
        place: "?".into(),
        devices: Vec::new(),
        process: 0,
        since_unix: 0,
        state: MountState::Damaged,
        disks: caches.map(disk).collect(),
    }
}

/// The status of a mount: from its daemon, within `limit`, or from the record when the daemon is gone.
pub async fn status_of(place: &Place, record: &Record, limit: Duration) -> Status {
    let record = record.clone();
    let stored = move |place: &Place, kept| written_down(place, &record, kept);
    status_or(place, limit, stored).await
}

/// The status from the mount's daemon, within `limit`, or else as `stored`, which is told whether there is a daemon.
async fn status_or(
    place: &Place,
    limit: Duration,
    stored: impl FnOnce(&Place, bool) -> Status + Send + 'static,
) -> Status {
    let kept = place.is_kept();
    let socket = place.socket();
    let ask = control::ask(&socket, &GetStatus, limit, |()| {});
    if kept && let Ok(status) = ask.await {
        return status;
    }
    let place = place.clone();
    on_disk(move || stored(&place, kept)).await
}

/// Dirty bytes in a cache of the mount, as far as it can be read; 0 while a daemon may be opening it.
fn dirty_of(place: &Place, index: usize, kept: bool) -> u64 {
    match kept {
        true => 0,
        false => place.left(index).ok().flatten().map_or(0, |l| l.dirty),
    }
}

/// The status of a mount whose daemon does not reply, from its record and its caches.
fn written_down(place: &Place, record: &Record, kept: bool) -> Status {
    let link = match (kept, record.unmounted) {
        (true, _) => "its process does not answer",
        (false, true) => "its cache is kept for the next mount there",
        (false, false) => "its process is gone",
    };
    Status {
        name: record.name.clone(),
        place: record.front.place(),
        devices: record.devices.clone(),
        process: if kept { record.process } else { 0 },
        since_unix: record.since_unix,
        state: match (kept, record.unmounted) {
            (true, _) => MountState::Silent,
            (false, true) => MountState::Unmounted,
            (false, false) => MountState::Dead,
        },
        disks: record
            .images
            .iter()
            .enumerate()
            .map(|(index, image)| DiskStatus {
                dirty: dirty_of(place, index, kept),
                image: image.to_string(),
                mode: disk::mode(image, &record.how).into(),
                read_only: record.how.read_only,
                link: link.into(),
                ..DiskStatus::default()
            })
            .collect(),
    }
}

/// Runs blocking disk reads off the runtime's workers.
async fn on_disk<T: Send + 'static>(read: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(read).await {
        Ok(read) => read,
        Err(e) => std::panic::resume_unwind(e.into_panic()),
    }
}
