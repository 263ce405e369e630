//! Ending a mount whose process is gone: what it left in the system is cleared, what it wrote is pushed, the right to
//! write goes back, and only then is its directory removed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::control::StopHow;
use super::disk::Disk;
use super::end::clear_leftovers;
use super::record::{Place, Record};
use super::target::Prefetch;
use crate::bar::Bar;
use crate::home::Home;
use crate::text::bytes;

/// How long pushing may make no progress.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes on the link that count as progress: more than what keeps it alive.
const PROGRESS: u64 = 16 << 10;

/// How often is looked.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Ends it; the text says what is left, empty when nothing is.
///
/// # Errors
/// When that cannot be done now; then it is as it was, but for leftovers in the system.
pub async fn end(
    home: &Home,
    place: &Place,
    record: &Record,
    how: StopHow,
    quiet: bool,
) -> Result<String> {
    let Some(_kept) = place.keep()? else {
        bail!("{} is kept by a process again; try again", record.name);
    };
    clear_leftovers(record)?;
    let images = record.images.len();
    if how.offline {
        return Ok(match place.dirty(images)? {
            0 => "the cache stays".into(),
            n => format!("{} not pushed; mounting it there again pushes it", bytes(n)),
        });
    }
    // A cache that cannot be read may hold anything: only whoever throws it away may remove it.
    let dirty = match place.dirty(images) {
        Err(e) if how.discard => {
            tracing::warn!("{e:#}");
            0
        }
        other => other?,
    };
    // Only to push and to give the right to write back: nothing is fetched.
    let mut record = record.clone();
    record.how.prefetch = Prefetch::None;
    record.how.record = None;
    let mut untold = Vec::new();
    for (index, image) in record.images.iter().enumerate() {
        let ours = match how.discard {
            true => 0,
            false => place.left(index)?.map_or(0, |left| left.dirty),
        };
        match Disk::open_by(home, place, &record, index, image, false).await {
            Ok(disk) => {
                tokio::task::spawn_blocking(move || finish(&disk, how.discard, quiet)).await??;
            }
            Err(e) if ours > 0 => {
                return Err(e).with_context(|| {
                    format!(
                        "{} of {image} are not at the other site yet; nothing is lost: try again later (--offline clears all but the cache, --discard throws them away)",
                        bytes(ours)
                    )
                });
            }
            Err(e) => {
                tracing::debug!("{image}: {e:#}");
                if !record.how.read_only {
                    untold.push(image.to_string());
                }
            }
        }
    }
    let mut said = Vec::new();
    if how.discard && dirty > 0 {
        said.push(format!("{} thrown away", bytes(dirty)));
    }
    if !untold.is_empty() {
        said.push(format!(
            "the site of {} was not told; if it still keeps the image for this mount, `drover mounts break` there",
            untold.join(", ")
        ));
    }
    if how.keep_cache {
        said.push("the cache stays".into());
    } else {
        if !how.discard {
            // Looked at again: what is removed is removed for good.
            let left = place.dirty(images)?;
            if left > 0 {
                bail!("{} are still not at the other site; try again", bytes(left));
            }
        }
        place.remove()?;
    }
    Ok(said.join("; "))
}

/// Pushes what is left of a disk, and closes it.
fn finish(disk: &Disk, discard: bool, quiet: bool) -> Result<()> {
    if discard {
        disk.discard();
        return Ok(());
    }
    let pushed = push(disk, quiet);
    let closed = disk.close();
    pushed?;
    closed
}

fn push(disk: &Disk, quiet: bool) -> Result<()> {
    let bar = Bar::new("pushing", quiet);
    let most = disk.dirty();
    let result = std::thread::scope(|scope| {
        let push = scope.spawn(|| disk.push(None));
        let (mut seen, mut moved) = ((most, disk.sent()), Instant::now());
        while !push.is_finished() {
            std::thread::sleep(LOOK_EVERY);
            let now = (disk.dirty(), disk.sent());
            bar.at(most.saturating_sub(now.0), most);
            if now.0 < seen.0 || now.1 > seen.1 + PROGRESS {
                (seen, moved) = (now, Instant::now());
            }
            if moved.elapsed() > PATIENCE {
                // Ends the push, too.
                disk.close()?;
                bail!(
                    "{} not pushed: nothing moved for {} s; nothing is lost, try again later",
                    bytes(disk.dirty()),
                    PATIENCE.as_secs()
                );
            }
        }
        match push.join() {
            Ok(done) => done,
            Err(_) => bail!("pushing panicked"),
        }
    });
    bar.clear();
    result
}
