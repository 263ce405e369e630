//! Reuse: blocks are copied into place and then digested there (teleportation §2.16), so that a concurrent change of
//! the source cannot go unnoticed.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_core::{BLOCK_SIZE_U64, BlockIndex, Digest};
use drover_store::DataBits;
use drover_store::sequences::{From, Sequences};

use super::event::{DriverEvent, Kept};
use super::prepare::ensure_room;
use super::taken::Known;
use crate::TeleportError;
use crate::codec::Batch;
use crate::destination::{Event, ReuseJob};
use crate::files::{copy_spans, digest_in_place, has_data, spans_of};
use crate::session::literals_in::Incoming;
use crate::site::{Site, There};
use crate::stages::Lap;
use crate::transfer::clear_zeros;

/// A job for a worker.
pub enum Work {
    /// Copy into place and verify.
    Reuse(Job),
    /// Find the blocks of a batch that another transfer or an earlier session left in place, or that an old copy of the disk has
    /// there.
    Compare(Comparison),
}

/// What a batch is compared with.
pub struct Comparison {
    /// The batch.
    pub batch: Arc<Batch>,
    /// Those of its data blocks that are on their way, since a machine waits for them: they may be written at any time.
    pub asked: DataBits,
    /// Whether the partial file may hold something there.
    pub part: bool,
    /// The old copy.
    pub known: Option<Arc<Known>>,
}

/// A job with details that only the driver knows.
pub struct Job {
    /// The blocks to reuse.
    pub job: ReuseJob,
    /// For each run from the image itself: its blocks in the walk.
    pub own: Vec<Vec<(BlockIndex, u64)>>,
    /// Where its run, which is the only one then, is at another node of the site.
    pub there: Option<There>,
}

/// Handles jobs until the queue is closed; once `stop` is set, jobs still queued are dropped.
pub fn work(
    site: &Site,
    image: &Incoming,
    jobs: &crossbeam_channel::Receiver<Work>,
    stop: &AtomicBool,
) {
    let mut lap = Lap::start();
    while let Ok(work) = jobs.recv() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        lap.wait(&image.stages.copy);
        let done = match work {
            Work::Reuse(job) => carry_out(site, image, &job, &mut lap).map(|failed| {
                DriverEvent::Machine(Event::Reused {
                    job: job.job,
                    failed,
                })
            }),
            Work::Compare(with) => compare(site, image, &with, &mut lap).map(|kept| {
                let index = with.batch.index;
                DriverEvent::Compared { index, kept }
            }),
        };
        let _ = image
            .events
            .blocking_send(done.unwrap_or_else(DriverEvent::Failed));
        lap.wait(&image.stages.check);
    }
}

/// Finds which data blocks of a batch are in place, and brings those into place that the old copy has there.
fn compare(
    site: &Site,
    image: &Incoming,
    with: &Comparison,
    lap: &mut Lap,
) -> Result<Kept, TeleportError> {
    let batch = &*with.batch;
    let none = || DataBits::new(batch.digests.len() as u64);
    let there = match with.part {
        true => compare_with_part(image, batch, &with.asked, lap)?,
        false => none(),
    };
    let old = match &with.known {
        Some(known) => {
            let brings = (batch.digests.len() as u64).saturating_sub(there.count());
            ensure_room(site, brings * BLOCK_SIZE_U64)?;
            known.bring(image, batch, [&there, &with.asked], lap)?
        }
        None => none(),
    };
    Ok(Kept { there, old })
}

/// Zeroes the batch's zero blocks in the partial file, and finds which of its data blocks are in place, but for those that are on
/// their way: what is there may have the same short digest, and must not be taken for what comes.
fn compare_with_part(
    image: &Incoming,
    batch: &Batch,
    asked: &DataBits,
    lap: &mut Lap,
) -> Result<DataBits, TeleportError> {
    let (part, layout) = (&image.part, &image.layout);
    clear_zeros(part, layout, batch).map_err(TeleportError::file("write", &image.part_path))?;
    let mut blocks = DataBits::new(batch.digests.len() as u64);
    let targets = batch.runs_at(&places(batch));
    let read = TeleportError::file("read", &image.part_path);
    let mut found: Vec<Digest> = Vec::new();
    let mut look = || {
        if has_data(part, &spans_of(layout, &targets))? {
            found.reserve(batch.digests.len());
            digest_in_place(part, layout, &targets, &mut found)?;
        }
        Ok(())
    };
    look().map_err(read)?;
    lap.busy(&image.stages.check);
    image
        .stages
        .check
        .add_bytes(found.len() as u64 * BLOCK_SIZE_U64);
    if let Some(open) = image.open.read().get(&batch.index) {
        let mut full = open.full.lock();
        for (i, digest) in found.into_iter().enumerate() {
            if digest.short() == batch.digests[i] && !asked.get(i as u64) {
                full[i] = digest;
                blocks.set(i as u64);
            }
        }
    }
    Ok(blocks)
}

/// Copies and verifies; returns the batch's data blocks that failed verification. None of these blocks is asked for before it has
/// failed ([`crate::destination::Destination`]), so none of them comes meanwhile.
fn carry_out(
    site: &Site,
    image: &Incoming,
    job: &Job,
    lap: &mut Lap,
) -> Result<Vec<u32>, TeleportError> {
    let batch = &job.job.batch;
    let mut targets = Vec::new();
    let mut nth: Vec<u32> = Vec::new();
    let places = places(batch);
    for ((start, run), own) in job.job.runs.iter().zip(&job.own) {
        let range = *start as usize..(*start + run.count) as usize;
        let target = batch.runs_at(&places[range.clone()]);
        let place = (run.from, u64::from(run.count), job.there.as_ref());
        copy(site, image, place, own, &target)
            .map_err(TeleportError::file("write", &image.part_path))?;
        targets.extend(target);
        nth.extend(*start..*start + run.count);
    }
    let (copy, check) = (&image.stages.copy, &image.stages.check);
    lap.busy(copy);
    let mut found: Vec<Digest> = Vec::with_capacity(nth.len());
    digest_in_place(&image.part, &image.layout, &targets, &mut found)
        .map_err(TeleportError::file("read", &image.part_path))?;
    lap.busy(check);
    for stage in [copy, check] {
        stage.add_bytes(nth.len() as u64 * BLOCK_SIZE_U64);
    }
    let Some(open) = image.open.read().get(&batch.index).cloned() else {
        return Ok(Vec::new());
    };
    let mut full = open.full.lock();
    let mut wrong = Vec::new();
    for (i, digest) in nth.into_iter().zip(found) {
        if digest.short() == batch.digests[i as usize] {
            full[i as usize] = digest;
        } else {
            wrong.push(i);
        }
    }
    Ok(wrong)
}

/// Positions of the data blocks within the batch.
fn places(batch: &Batch) -> Vec<u64> {
    batch.data.iter().collect()
}

/// Copies one run. A source that is gone or unreadable is no error: verification detects it.
fn copy(
    site: &Site,
    image: &Incoming,
    (from, count, there): (From, u64, Option<&There>),
    own: &[(BlockIndex, u64)],
    target: &[(BlockIndex, u64)],
) -> std::io::Result<()> {
    let to = spans_of(&image.layout, target);
    let result = match from {
        From::Literal => Ok(()),
        From::Own { .. } => {
            copy_spans(&image.part, &spans_of(&image.layout, own), &image.part, &to)
        }
        From::Sequence { first } => {
            let source = [(Some(Sequences::offset(first)), count * BLOCK_SIZE_U64)];
            copy_spans(site.sequences.data(), &source, &image.part, &to)
        }
        From::Image { image: id, first } => match site.images.open_image(id) {
            Some(source) => match source.map.blocks.walk_runs(first, count) {
                Some(runs) => {
                    let from = spans_of(&source.map.layout, &runs);
                    copy_spans(&source.file, &from, &image.part, &to)
                }
                None => Ok(()),
            },
            None => match site.partials.read(id, first, count) {
                Some(source) => {
                    let from = spans_of(&source.layout, &source.runs);
                    copy_spans(&source.file, &from, &image.part, &to)
                }
                // If it has moved since, they are asked for.
                None => {
                    match there.and_then(|there| Some((File::open(&there.path).ok()?, there))) {
                        Some((source, there)) => {
                            copy_spans(&source, &there.spans, &image.part, &to)
                        }
                        None => Ok(()),
                    }
                }
            },
        },
    };
    match result {
        Err(e) if e.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => {
            tracing::warn!(error = %e, "cannot read an image to reuse its blocks");
            Ok(())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use drover_core::{BLOCK_SIZE, Head};
    use drover_image::Layout;
    use drover_storage::{HostDisk, SyncedFile};

    use super::*;
    use crate::session::literals_in::OpenBatch;

    /// Two blocks with one short digest: one is in the place of the other, for which a machine waits.
    #[test]
    fn what_is_in_the_place_of_a_block_that_is_on_its_way_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.part");
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        file.write_all_at(&[7; 2 * BLOCK_SIZE], 0).unwrap();
        let there = Digest(*blake3::hash(&[7; BLOCK_SIZE]).as_bytes());
        let mut twin = there;
        twin.0[31] ^= 1;
        assert_eq!(there.short(), twin.short());
        let mut data = DataBits::new(2);
        (0..2).for_each(|i| data.set(i));
        let batch = Batch::new(0, data, vec![Head::No; 2], &[twin, there]);
        let batch = Arc::new(batch);
        let bytes = 2 * BLOCK_SIZE_U64;
        let layout = Layout::in_file_order(bytes, std::slice::from_ref(&(0..bytes)));
        let (events, _events) = tokio::sync::mpsc::channel(1);
        let image = Incoming {
            slot: 0,
            layout: Arc::new(layout),
            part: Arc::new(SyncedFile::new(file, Arc::new(HostDisk))),
            part_path: path,
            open: Default::default(),
            events,
            stages: Arc::default(),
            activity: Arc::default(),
            flow: Arc::default(),
        };
        let open = Arc::new(OpenBatch::new(Arc::clone(&batch)));
        image.open.write().insert(0, Arc::clone(&open));
        // The twin has come, and is about to be written.
        open.full.lock()[0] = twin;
        let mut asked = DataBits::new(2);
        asked.set(0);
        let kept = compare_with_part(&image, &batch, &asked, &mut Lap::start()).unwrap();
        assert_eq!(kept.iter().collect::<Vec<_>>(), [1]);
        assert_eq!(*open.full.lock(), [twin, there]);
    }
}
