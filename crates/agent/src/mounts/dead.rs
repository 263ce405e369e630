//! Unmounting when the mount daemon is gone: removes its leftovers in the system, pushes dirty data, releases the write
//! lease, and only then removes the mount's directory.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use drover_net::Code;

use super::control::{HandTo, Progress, StopHow};
use super::disk::{Disk, mount_id};
use super::lease::Lease;
use super::left::{Keeps, Left, Unnotified};
use super::leftovers;
use super::record::{Place, Record};
use super::snapshots;
use super::target::Prefetch;
use crate::error::{Context, Error, Kind, Result, bail, one_line};
use crate::home::Home;
use crate::site;
use crate::text::bytes;

/// Interval of progress reports.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// Unmounts; returns what is left behind.
///
/// # Errors
/// When that is not possible now; the mount remains, but leftovers in the system may already be removed.
pub async fn end(
    home: &Home,
    place: &Place,
    record: &Record,
    how: StopHow,
    progress: Progress,
) -> Result<Left> {
    if let Some(to @ HandTo::Heir(_)) = how.hand_over {
        return hand_over(home, place, record, to, progress).await;
    }
    if how.hand_over.is_some() {
        bail!(
            "the process of {} is gone: mount it again at the same place, then hand it over",
            record.name
        );
    }
    let Some(_kept) = place.keep()? else {
        bail!("{} is served by a process again; try again", record.name);
    };
    leftovers::clear(record)?;
    let images = record.images.len();
    if how.offline {
        note_unmounted(place, record)?;
        return Ok(Left::here(match place.dirty(images)? {
            0 => "the cache is kept".into(),
            n => format!("{} not pushed; the next mount there pushes it", bytes(n)),
        }));
    }
    // A cache that cannot be read may hold dirty data: only an explicit discard may remove it.
    let dirty = match place.dirty(images) {
        Err(e) if how.discard => {
            tracing::warn!("{e:#}");
            0
        }
        other => other?,
    };
    // Opened only to push and to release the write lease: nothing is prefetched.
    let written_down = record;
    let mut record = record.clone();
    record.how.prefetch = Prefetch::None;
    record.how.record = None;
    record.never_up = false;
    let mut there = Vec::new();
    for (index, image) in record.images.iter().enumerate() {
        if let Some(disk) = image.outside() {
            snapshots::let_go(home, disk, mount_id(&record, index)).await;
            // Writes to a local disk are already in it, and its lock was released when the process died.
            continue;
        }
        let ours = match how.discard {
            true => {
                // Removed first: the image may no longer exist, and then opening it to release the lease fails.
                if let Err(e) = place.remove_cache(index) {
                    tracing::warn!("{e:#}");
                }
                0
            }
            false => place.left(index)?.map_or(0, |left| left.dirty),
        };
        match Disk::open(home, place, &record, index, image, false).await {
            Ok(disk) => {
                let progress = Arc::clone(&progress);
                let finished =
                    move || finish(&disk, how.discard, &progress).map(|()| disk.unnotified());
                there.extend(tokio::task::spawn_blocking(finished).await??);
            }
            Err(e) if ours > 0 => {
                return Err(Error::coded(
                    Code::Unavailable,
                    format!(
                        "{} of {image} not pushed ({}); nothing is lost: unmount it again later",
                        bytes(ours),
                        one_line(&e)
                    ),
                ));
            }
            // Its cache may be all that is left of the disk.
            Err(e)
                if image.store().is_some()
                    && e.code() == Some(Code::NotFound)
                    && !how.discard
                    && !how.keep_cache
                    && place.left(index)?.is_some() =>
            {
                return Err(e);
            }
            Err(e) => {
                tracing::debug!("{image}: {e:#}");
                // The read lease of a dead mount has expired or soon will.
                if !record.how.read_only {
                    // A peer that is not known any more was not asked.
                    let known = match &image.peer {
                        Some(peer) => site::open_catalog(home)?.peer(peer)?.is_some(),
                        None => true,
                    };
                    there.push(Unnotified {
                        site: match &image.local {
                            Some(store) => Some(store.to_string()),
                            None => image.peer.clone(),
                        },
                        domain: image.domain.clone(),
                        image: image.image.clone(),
                        keeps: match e.kind() {
                            Kind::Refused if known => Keeps::Unknown,
                            _ => Keeps::Write,
                        },
                    });
                }
            }
        }
    }
    let mut here = Vec::new();
    if how.discard && dirty > 0 {
        here.push(format!("{} discarded", bytes(dirty)));
    }
    if how.keep_cache {
        note_unmounted(place, written_down)?;
        here.push("the cache is kept".into());
    } else {
        if !how.discard {
            // Checked again, because the removal cannot be undone.
            let left = place.dirty(images)?;
            if left > 0 {
                bail!("{} still not pushed; try again", bytes(left));
            }
        }
        place.remove()?;
    }
    Ok(Left {
        here: here.join("; "),
        there,
    })
}

/// Pushes what the mount of a machine that has moved has, and hands its write lease over.
async fn hand_over(
    home: &Home,
    place: &Place,
    record: &Record,
    to: HandTo,
    progress: Progress,
) -> Result<Left> {
    let Some(_kept) = place.keep()? else {
        bail!("{} is served by a process again; try again", record.name);
    };
    leftovers::clear(record)?;
    let [image] = record.images.as_slice() else {
        bail!(
            "{} has several images: a lease is handed over alone",
            record.name
        );
    };
    let connector = super::of_machine::connector(home, image)?;
    let lease = Lease::new(&connector, image, mount_id(record, 0))?;
    let asked = move || {
        lease
            .hand_over(to, false, &|| u64::MAX)
            .map(|_| lease.was_handed_over())
    };
    if !tokio::task::spawn_blocking(asked).await?? {
        let mut record = record.clone();
        record.how.prefetch = Prefetch::None;
        record.how.record = None;
        let disk = Disk::open(home, place, &record, 0, image, false).await?;
        let done = move || {
            let pushed = push(&disk, &progress);
            let handed = pushed.and_then(|()| disk.hand_over(to, true));
            let closed = disk.close();
            handed.and(closed)
        };
        tokio::task::spawn_blocking(done).await??;
    }
    if place.dirty(1)? > 0 {
        let text = "what was written after the lease was handed over stays in the cache";
        note_unmounted(place, record)?;
        return Ok(Left::here(text.into()));
    }
    place.remove()?;
    Ok(Left::default())
}

/// Records that the mount was ended cleanly.
fn note_unmounted(place: &Place, record: &Record) -> Result<()> {
    place.write(&Record {
        unmounted: true,
        devices: Vec::new(),
        ..record.clone()
    })
}

/// Pushes (or discards) the dirty data of a disk and closes it.
fn finish(disk: &Disk, discard: bool, progress: &Progress) -> Result<()> {
    if discard {
        disk.discard();
        return Ok(());
    }
    let pushed = push(disk, progress);
    let closed = disk.close();
    pushed?;
    closed
}

fn push(disk: &Disk, progress: &Progress) -> Result<()> {
    let most = disk.dirty();
    std::thread::scope(|scope| {
        let push = scope.spawn(|| disk.push(None, &AtomicBool::new(false)));
        while !push.is_finished() {
            std::thread::sleep(REPORT_EVERY);
            progress(most.saturating_sub(disk.dirty()), most);
        }
        match push.join() {
            Ok(done) => done.with_context(|| {
                format!(
                    "{} not pushed; nothing is lost, try again later",
                    bytes(disk.dirty())
                )
            }),
            Err(_) => bail!("the push panicked"),
        }
    })
}
