//! Drives one image's [`Destination`](crate::destination::Destination): events from sockets and workers in; logging,
//! matching, reuse and replies out; delivery at the end.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded, unbounded};
use drover_core::{BLOCK_SIZE_U64, Digest};
use drover_index::{Origin, Plan, PlanRun, SequenceStore, Via};
use drover_net::Frame;
use drover_store::DataBits;
use drover_store::sequences::From;
use tokio::sync::mpsc;

use super::claims::Claim;
use super::event::{DriverEvent, Kept};
use super::on_demand::GivenReceiver;
use super::prepare::{Prepared, check_quotas, ensure_room};
use super::reuse::{self, Comparison, Job, Work};
use super::taken::{Known, Taken};
use super::taken_ahead::TakenAhead;
use super::{flock, waits};
use crate::TeleportError;
use crate::codec::{Batch, Want, proofs_of};
use crate::destination::{Action, Event, KeptBy, ReuseJob, Run};
use crate::flock::ImageState;
use crate::protocol::{BATCH_BLOCKS, Delivered, GiveUp, Origins, kind};
use crate::session::literals_in::OpenBatch;
use crate::site::{Arrived, Site, unix_now};
use crate::stages::{DestinationStages, Lap};
use crate::transfer::{Closing, clear_zeros};
use crate::walk::digest_file;
use drover_storage::SyncedFile;

/// Interval at which received data is synced.
const SYNC_EVERY: Duration = Duration::from_secs(2);

/// The same interval once the source has read the whole image: little must be left to sync after the last block,
/// because the source waits for that.
const SYNC_EVERY_AT_END: Duration = Duration::from_millis(100);

/// Threads that copy and verify blocks.
const REUSE_THREADS: usize = 2;

/// Runs one image, of which the site has what is `known`, to its end: `Some` when it was delivered, `None` when the source gave it up.
pub fn drive(
    site: &Arc<Site>,
    prepared: Prepared,
    known: Option<Arc<Known>>,
    mut events: mpsc::Receiver<DriverEvent>,
    out: &mpsc::Sender<Frame>,
) -> Result<Option<Delivered>, TeleportError> {
    let workers = Workers::start(site, &prepared)?;
    let taken = match &known {
        None => None,
        Some(known) => {
            let next = prepared.machine.next_batch();
            let into = Arc::clone(&prepared.incoming);
            let compare = prepared.transfer.compare;
            let (known, partial) = (Arc::clone(known), prepared.transit.partial());
            let taken = TakenAhead::start(site, known, into, partial, compare, next);
            let failed = TeleportError::file("start a thread for", &prepared.transfer.dir);
            Some(taken.map_err(failed)?)
        }
    };
    let mut driver = Driver {
        site,
        prepared,
        known,
        taken,
        workers,
        out,
        comparing: HashMap::new(),
        origins: Origins::default(),
        finish: None,
        given: GivenReceiver::default(),
        lap: Lap::start(),
    };
    let asked = driver.prepared.incoming.events.clone();
    let want = move |want| {
        let want = DriverEvent::Machine(Event::Want(want));
        asked.try_send(want).is_ok()
    };
    let image = driver.prepared.transfer.image();
    let launches = site.launches.sessions.serve(image, Box::new(want));
    let result = driver.run(&mut events);
    drop(launches);
    // Unblocks workers that are sending an event.
    events.close();
    let Driver {
        prepared,
        workers,
        origins,
        taken,
        ..
    } = driver;
    // Nothing is written any more when the file is synced.
    drop(taken);
    workers.stop();
    if let Err(e @ TeleportError::NotAnnounced(_)) = result {
        prepared.distrust(site)?;
        return Err(e);
    }
    match result? {
        Ended::Whole(digest) => {
            prepared.incoming.activity.deliver(true);
            deliver(site, prepared, origins, digest).map(Some)
        }
        Ended::GivenUp(give_up) => {
            tracing::info!(
                image = prepared.name(),
                reason = give_up.message,
                "given up by the source"
            );
            if let Some(flock) = prepared.flock.as_ref().filter(|flock| !flock.atomic) {
                site.flock_image_given_up(flock, &prepared.transfer.opening.offer.name);
            }
            if give_up.discard {
                return prepared.distrust(site).map(|()| None);
            }
            prepared.transfer.rest()?;
            Ok(None)
        }
        Ended::Stopped => {
            prepared.transfer.rest()?;
            Err(TeleportError::Stopped)
        }
    }
}

enum Ended {
    Whole(Option<Digest>),
    GivenUp(GiveUp),
    Stopped,
}

/// The threads beside the driver.
struct Workers {
    jobs: Sender<Work>,
    /// Jobs whose blocks another transfer is receiving.
    waits: Sender<ReuseJob>,
    /// A message switches to the shorter sync interval; closing the channel ends the thread.
    sync: Sender<()>,
    threads: Vec<std::thread::JoinHandle<()>>,
    /// Set to drop the jobs still queued in `jobs`.
    stop: Arc<AtomicBool>,
}

impl Workers {
    fn start(site: &Arc<Site>, prepared: &Prepared) -> Result<Self, TeleportError> {
        // Bounded by the window: every job belongs to an incomplete batch.
        let (jobs, queue) = unbounded();
        let (waits, waiting) = unbounded();
        let (sync, ending) = bounded(1);
        let mut threads = Vec::new();
        let stop = Arc::new(AtomicBool::new(false));
        let failed = TeleportError::file("start a thread for", &prepared.transfer.dir);
        // Making room may ask a teleporter on another machine.
        let runtime = tokio::runtime::Handle::try_current().ok();
        let mut spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            let runtime = runtime.clone();
            let body = move || {
                let _entered = runtime.as_ref().map(|r| r.enter());
                body();
            };
            let thread = std::thread::Builder::new().name(name.into()).spawn(body)?;
            threads.push(thread);
            Ok::<_, std::io::Error>(())
        };
        let start = || {
            for _ in 0..REUSE_THREADS {
                let (site, image, queue) = (site.clone(), prepared.incoming.clone(), queue.clone());
                let stop = stop.clone();
                spawn(
                    "reuse",
                    Box::new(move || reuse::work(&site, &image, &queue, &stop)),
                )?;
            }
            let (site, image) = (site.clone(), prepared.incoming.clone());
            let (ready, flock) = (jobs.clone(), prepared.flock.clone());
            spawn(
                "await",
                Box::new(move || waits::work(&site, &image, flock.as_deref(), &waiting, &ready)),
            )?;
            let transfer = &prepared.transfer;
            let files = [
                (transfer.part.clone(), transfer.part_path()),
                (transfer.log.file(), transfer.log.path().to_path_buf()),
            ];
            let image = prepared.incoming.clone();
            spawn(
                "sync",
                Box::new(move || {
                    if let Err(e) = sync_now_and_then(&files, &image.stages, &ending) {
                        let _ = image.events.blocking_send(DriverEvent::Failed(e));
                    }
                }),
            )
        };
        start().map_err(failed)?;
        Ok(Workers {
            jobs,
            waits,
            sync,
            threads,
            stop,
        })
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        drop((self.jobs, self.waits, self.sync));
        self.threads.into_iter().for_each(|t| drop(t.join()));
    }
}

/// Syncs received data periodically, so that little is lost in a power failure. A sync error fails the transfer: the
/// kernel does not report the loss a second time.
fn sync_now_and_then(
    files: &[(Arc<SyncedFile>, PathBuf)],
    stages: &DestinationStages,
    ending: &crossbeam_channel::Receiver<()>,
) -> Result<(), TeleportError> {
    let mut lap = Lap::start();
    let mut every = SYNC_EVERY;
    loop {
        match ending.recv_timeout(every) {
            Ok(()) => every = SYNC_EVERY_AT_END,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        lap.wait(&stages.sync);
        for (file, path) in files {
            file.sync_data()
                .map_err(TeleportError::file("sync", path))?;
        }
        lap.busy(&stages.sync);
    }
}

struct Driver<'a> {
    site: &'a Arc<Site>,
    prepared: Prepared,
    known: Option<Arc<Known>>,
    /// What of that was brought into the partial file, ahead of the source's word.
    taken: Option<TakenAhead>,
    workers: Workers,
    out: &'a mpsc::Sender<Frame>,
    /// Batches that are being matched and compared; the first result waits here for the other.
    comparing: HashMap<u64, Half>,
    /// Where reused blocks of an image of a flock came from.
    origins: Origins,
    finish: Option<Option<Digest>>,
    given: GivenReceiver,
    lap: Lap,
}

/// The first result for a batch that is matched and compared concurrently.
enum Half {
    Nothing,
    Plan(Plan, Vec<Run>),
    Kept(Kept),
}

impl Driver<'_> {
    fn run(&mut self, events: &mut mpsc::Receiver<DriverEvent>) -> Result<Ended, TeleportError> {
        for (index, plan) in std::mem::take(&mut self.prepared.replan) {
            let runs = self.site.resolve(self.prepared.transfer.image(), &plan);
            self.plan_again(index, runs)?;
        }
        loop {
            if let Some(digest) = self.finish {
                return Ok(Ended::Whole(digest));
            }
            self.lap.busy(&self.prepared.incoming.stages.drive);
            let Some(event) = events.blocking_recv() else {
                return Ok(Ended::Stopped);
            };
            self.lap.wait(&self.prepared.incoming.stages.drive);
            self.prepared.incoming.activity.touch();
            match event {
                DriverEvent::Machine(Event::End(None)) if !self.is_unread() => {
                    let text = "the source did not read an image of which nothing was known";
                    return Err(TeleportError::Protocol(text.into()));
                }
                DriverEvent::Skipped(index) => self.take(index)?,
                DriverEvent::Given(payload) => {
                    for event in self.given.take(&payload, &mut self.prepared)? {
                        self.note(&event);
                        self.step(event)?;
                    }
                }
                DriverEvent::Machine(Event::Batch(batch)) if self.is_taken(batch.index) => {
                    let text = format!("batch {} was sent, which is here", batch.index);
                    return Err(TeleportError::Protocol(text));
                }
                DriverEvent::Machine(Event::Want(want)) => {
                    let want = self.not_taken(want);
                    if !want.runs.is_empty() {
                        self.step(Event::Want(want))?;
                    }
                }
                DriverEvent::Machine(event) => {
                    if let Event::End(_) = &event {
                        let _ = self.workers.sync.try_send(());
                    }
                    self.note(&event);
                    self.step(event)?;
                }
                DriverEvent::Plan { index, plan, runs } => match self.comparing.remove(&index) {
                    None => self.planned(index, &plan, runs, None)?,
                    Some(Half::Kept(kept)) => self.planned(index, &plan, runs, Some(kept))?,
                    Some(_) => drop(self.comparing.insert(index, Half::Plan(plan, runs))),
                },
                DriverEvent::Planned { index, runs } => {
                    self.step(Event::Planned { index, runs })?;
                    self.has_planned();
                }
                DriverEvent::Compared { index, kept } => match self.comparing.remove(&index) {
                    Some(Half::Plan(plan, runs)) => {
                        self.planned(index, &plan, runs, Some(kept))?;
                    }
                    _ => drop(self.comparing.insert(index, Half::Kept(kept))),
                },
                DriverEvent::Failed(error) => return Err(error),
                DriverEvent::GiveUp(give_up) => return Ok(Ended::GivenUp(give_up)),
                DriverEvent::Stop => return Ok(Ended::Stopped),
            }
        }
    }

    /// Updates what other transfers can see before the state machine handles the event.
    fn note(&mut self, event: &Event) {
        match event {
            Event::Written(runs) => self.prepared.transit.written(runs.blocks()),
            Event::Reused { job, failed } => {
                self.heal(job, failed);
                self.site.refute(job, failed);
                self.count_origins(job, failed);
                let places: Vec<u64> = job.batch.data.iter().collect();
                let good = job
                    .runs
                    .iter()
                    .flat_map(|(start, run)| *start..start + run.count)
                    .filter(|i| failed.binary_search(i).is_err())
                    .filter_map(|i| places.get(i as usize));
                let first = job.batch.first_block();
                self.prepared.transit.written(good.map(|i| first + i));
            }
            _ => {}
        }
    }

    /// Counts where the reused blocks of an image of a flock came from.
    fn count_origins(&mut self, job: &ReuseJob, failed: &[u32]) {
        let Some(flock) = &self.prepared.flock else {
            return;
        };
        let image = self.prepared.transfer.image();
        let before = self.prepared.machine.map().first_data_of(job.batch.index);
        for (start, run) in &job.runs {
            let of_run = *start..start + run.count;
            let failed = failed.iter().filter(|i| of_run.contains(i));
            let failed = failed.map(|i| before.0 + u64::from(*i));
            let (first, count) = (before.0 + u64::from(*start), u64::from(run.count));
            flock.reused(image, first, count, failed, &mut self.origins);
        }
    }

    /// Passes an event to the state machine and carries out its actions.
    fn step(&mut self, event: Event) -> Result<(), TeleportError> {
        let mut actions = Vec::new();
        self.prepared.machine.handle(event, &mut actions)?;
        let done = self.prepared.machine.counts().in_place();
        self.prepared.done_blocks.store(done, Ordering::Relaxed);
        let (flow, machine) = (&self.prepared.incoming.flow, &self.prepared.machine);
        let came = machine.counts().sent_blocks;
        flow.came.store(came, Ordering::Release);
        flow.coming.store(machine.coming(), Ordering::Release);
        actions.into_iter().try_for_each(|action| self.act(action))
    }

    fn act(&mut self, action: Action) -> Result<(), TeleportError> {
        match action {
            Action::Match(batch) => self.arrived(batch)?,
            Action::Reuse(job) => self.reuse(job),
            Action::Need(need) => self.say(kind::NEED, need.encode())?,
            Action::Prove(index) => {
                let wrong = self.wrong_proofs(index);
                self.step(Event::Proved { index, wrong })?;
            }
            Action::Complete(index) => self.complete(index)?,
            Action::Finish(digest) => self.finish = Some(digest),
            Action::Want(want) => self.say(kind::WANT, want.encode())?,
            Action::Hurry(want) => self.say(kind::HURRY, want.encode())?,
            Action::Changed(block) => return Err(TeleportError::NotAnnounced(block)),
        }
        Ok(())
    }

    /// The groups of a batch's data blocks whose digests do not match the proof that was sent.
    fn wrong_proofs(&self, index: u64) -> Vec<u32> {
        let Some(open) = self.prepared.incoming.open.read().get(&index).cloned() else {
            return Vec::new();
        };
        let found = proofs_of(&open.full.lock());
        let pairs = open.batch.proofs.iter().zip(&found).enumerate();
        pairs
            .filter(|(_, (claimed, found))| claimed != found)
            .map(|(i, _)| i as u32)
            .collect()
    }

    fn complete(&mut self, index: u64) -> Result<(), TeleportError> {
        let Prepared {
            incoming,
            digest,
            transfer,
            transit,
            ..
        } = &mut self.prepared;
        let open = incoming.open.write().remove(&index);
        if let (Some(open), Some(digest)) = (open, digest) {
            let full = std::mem::take(&mut *open.full.lock());
            digest.batch(&transfer.layout, open.batch.clone(), full);
        }
        transit.complete(index);
        self.say(kind::ACK, index.to_le_bytes().to_vec())
    }

    fn say(&mut self, kind: u8, payload: Vec<u8>) -> Result<(), TeleportError> {
        let frame = Frame::new(kind, payload);
        let stage = &self.prepared.incoming.stages.drive;
        self.lap.busy(stage);
        let sent = self.out.blocking_send(frame);
        self.lap.wait(stage);
        sent.map_err(|_| TeleportError::Lost("source"))
    }

    fn arrived(&mut self, batch: Arc<Batch>) -> Result<(), TeleportError> {
        let Prepared {
            transfer,
            machine,
            transit,
            incoming,
            matcher,
            ..
        } = &mut self.prepared;
        // Before it is matched: from then on others may want its blocks.
        transit.arrived(&batch, transfer.compare);
        let entry = Arc::new(OpenBatch::new(batch.clone()));
        incoming.open.write().insert(batch.index, entry);
        if batch.digests.is_empty() {
            self.lap.busy(&incoming.stages.drive);
            if transfer.compare {
                clear_zeros(&transfer.part, &transfer.layout, &batch)
                    .map_err(TeleportError::file("write", transfer.part_path()))?;
            }
            let logged = transfer.log_batch(&batch, &Plan::default());
            self.lap.busy(&incoming.stages.log);
            return logged;
        }
        if transfer.compare || self.known.is_some() {
            self.comparing.insert(batch.index, Half::Nothing);
            let none = || DataBits::new(batch.digests.len() as u64);
            let comparison = Comparison {
                batch: batch.clone(),
                asked: machine.asked(batch.index).cloned().unwrap_or_else(none),
                part: transfer.compare,
                known: self.known.clone(),
            };
            let _ = self.workers.jobs.send(Work::Compare(comparison));
        }
        matcher.find(batch);
        Ok(())
    }

    /// Whether the source need not read all of the image.
    fn is_unread(&self) -> bool {
        let known = self.known.as_ref();
        known.is_some_and(|known| !known.have.batches.is_empty())
    }

    /// Whether a batch is taken from the old copy, perhaps at this moment.
    fn is_taken(&self, index: u64) -> bool {
        let known = self.known.as_ref();
        let is_known = known.is_some_and(|known| known.have.has(index));
        is_known && index >= self.prepared.machine.next_batch()
    }

    /// Those of wanted blocks that are not still to be taken from the old copy of the disk; the others are taken first.
    fn not_taken(&self, want: Want) -> Want {
        let batches = want.runs.blocks().map(|block| block / BATCH_BLOCKS);
        let mut batches: Vec<u64> = batches.filter(|batch| self.is_taken(*batch)).collect();
        batches.dedup();
        if let Some(taken) = &self.taken {
            batches.into_iter().for_each(|batch| taken.hurry(batch));
        }
        let blocks = want.runs.blocks();
        let runs = blocks.filter(|block| !self.is_taken(block / BATCH_BLOCKS));
        Want {
            runs: runs.collect(),
            ..want
        }
    }

    /// Takes a batch from the old copy of the disk.
    fn take(&mut self, index: u64) -> Result<(), TeleportError> {
        let next = self.prepared.machine.next_batch();
        let known = self.known.as_ref();
        let is_known = known.is_some_and(|known| index == next && known.have.has(index));
        let Some(taken) = self.taken.as_ref().filter(|_| is_known) else {
            let text =
                format!("the source skipped batch {index}, which is not known or not the next");
            return Err(TeleportError::Protocol(text));
        };
        let Prepared {
            transfer,
            transit,
            incoming,
            matcher,
            digest,
            ..
        } = &mut self.prepared;
        self.lap.busy(&incoming.stages.drive);
        let Taken { batch, full } = taken.get(index)?;
        self.lap.wait(&incoming.stages.drive);
        let count = batch.digests.len() as u32;
        let literal = PlanRun {
            count,
            origin: Origin::Literal,
            via: Via::Literal,
        };
        let runs = if count > 0 { vec![literal] } else { vec![] };
        let stores = Vec::new();
        transit.arrived(&batch, transfer.compare);
        // After a cut, what is not in place is asked for.
        transfer.log_batch(&batch, &Plan { runs, stores })?;
        self.lap.busy(&incoming.stages.log);
        if count > 0 {
            matcher.record(batch.clone());
        }
        if let Some(digest) = digest {
            digest.batch(&transfer.layout, batch.clone(), full);
        }
        transit.complete(index);
        self.step(Event::Taken(batch))?;
        self.say(kind::ACK, index.to_le_bytes().to_vec())
    }

    /// A batch that an earlier session has logged: its missing blocks are requested, unless other images of its flock have them.
    fn plan_again(&mut self, index: u64, runs: Vec<Run>) -> Result<(), TeleportError> {
        let Prepared {
            machine,
            incoming,
            matcher,
            ..
        } = &self.prepared;
        let open = incoming.open.read().get(&index).cloned();
        match open.filter(|_| matcher.takes_claims()) {
            Some(open) => {
                matcher.claim(Claim {
                    batch: open.batch.clone(),
                    base: machine.map().first_data_of(index),
                    plan: None,
                    runs,
                });
                Ok(())
            }
            None => self.step(Event::Planned { index, runs }),
        }
    }

    /// What a plan requests is counted.
    fn has_planned(&self) {
        let planned = &self.prepared.incoming.flow.planned;
        planned.fetch_add(1, Ordering::Release);
    }

    /// Logs a plan with its batch, then acts on it, skipping blocks already in place.
    fn planned(
        &mut self,
        index: u64,
        plan: &Plan,
        runs: Vec<Run>,
        kept: Option<Kept>,
    ) -> Result<(), TeleportError> {
        let open = self.prepared.incoming.open.read().get(&index).cloned();
        let Some(batch) = open.map(|o| o.batch.clone()) else {
            self.has_planned();
            return Ok(());
        };
        let there = kept.as_ref();
        let there = there.map_or(0, |kept| kept.there.count() + kept.old.count());
        let takes = batch.data.count().saturating_sub(there) * BLOCK_SIZE_U64;
        // Others may have taken what there was when the image was admitted.
        ensure_room(self.site, takes)?;
        self.lap.busy(&self.prepared.incoming.stages.drive);
        self.prepared.transfer.log_batch(&batch, plan)?;
        self.lap.busy(&self.prepared.incoming.stages.log);
        if let Some(Kept { there, old }) = kept {
            let kept = batch.data.iter().enumerate();
            let kept = kept.filter(|(i, _)| there.get(*i as u64) || old.get(*i as u64));
            let zeros = (0..batch.data.blocks()).filter(|i| !batch.data.get(*i));
            let in_place = kept.map(|(_, i)| i).chain(zeros);
            let first = batch.first_block();
            self.prepared.transit.written(in_place.map(|i| first + i));
            for (blocks, by) in [(there, KeptBy::Session), (old, KeptBy::OldCopy)] {
                self.step(Event::Kept { index, blocks, by })?;
            }
        }
        self.step(Event::Planned { index, runs })?;
        self.has_planned();
        Ok(())
    }

    fn reuse(&mut self, mut job: ReuseJob) {
        let (site, flock) = (self.site, self.prepared.flock.as_deref());
        let awaited = job
            .runs
            .extract_if(.., |(_, run)| waits::must_wait(site, flock, run));
        for run in awaited {
            let batch = job.batch.clone();
            let runs = vec![run];
            let _ = self.workers.waits.send(ReuseJob { batch, runs });
        }
        if job.runs.is_empty() {
            return;
        }
        let map = self.prepared.machine.map();
        let own = |run: &Run| match run.from {
            From::Own { first } => map
                .walk_runs(first, u64::from(run.count))
                .unwrap_or_default(),
            _ => Vec::new(),
        };
        let own = job.runs.iter().map(|(_, run)| own(run)).collect();
        let there = None;
        let _ = self.workers.jobs.send(Work::Reuse(Job { job, own, there }));
    }

    /// Marks slots of the sequence cache with wrong data to be filled with the blocks that the source now sends
    /// (teleportation §2.16).
    fn heal(&self, job: &ReuseJob, failed: &[u32]) {
        let own = self.prepared.transfer.image();
        let before = self.prepared.machine.map().first_data_of(job.batch.index);
        for (start, run) in &job.runs {
            let From::Sequence { first } = run.from else {
                continue;
            };
            for i in failed
                .iter()
                .filter(|i| (*start..start + run.count).contains(i))
            {
                let (first, from) = (first + u64::from(i - start), before + u64::from(*i));
                self.site.sequences.add(
                    own,
                    SequenceStore {
                        first,
                        from,
                        count: 1,
                    },
                    None,
                );
            }
        }
    }
}

/// Every block is verified in place: verifies the whole file, syncs it, and renames it to its final name.
fn deliver(
    site: &Arc<Site>,
    mut prepared: Prepared,
    origins: Origins,
    expected: Option<Digest>,
) -> Result<Delivered, TeleportError> {
    let (stages, mut lap) = (prepared.incoming.stages.clone(), Lap::start());
    let (stages, transfer) = (&stages, &prepared.transfer);
    let part_path = transfer.part_path();
    tracing::debug!("every block is in place");
    transfer
        .part
        .sync_all()
        .map_err(TeleportError::file("sync", &part_path))?;
    tracing::debug!("synced");
    lap.busy(&stages.sync);
    let found = match prepared.digest.take() {
        Some(digest) => digest.finish(&transfer.layout),
        None => digest_file(&part_path, &mut |_, _| {})?,
    };
    if let Some(expected) = expected.filter(|expected| *expected != found) {
        // Nothing in it can be trusted: the next attempt starts over.
        prepared.discard(site);
        return Err(TeleportError::WrongDigest { expected, found });
    }
    // Check again: since the first check, possibly long ago, the image to be replaced may have been put in use, and the
    // sender may have lost its right; its quota, or that of the image's owner, may be smaller.
    let (offer, peer) = (&transfer.opening.offer, &transfer.opening.peer);
    let name = &offer.name;
    site.check_held(name, "it")?;
    site.check_sender(peer, site.images.by_name(name).as_ref())?;
    check_quotas(site, peer, offer)?;
    if let Some(flock) = prepared.flock.clone().filter(|flock| flock.atomic) {
        return flock::hold_back(site, prepared, &flock, origins, found);
    }
    let Prepared {
        mut transfer,
        machine,
        hold,
        matcher,
        transit,
        flock,
        ..
    } = prepared;
    let (noted, sketch) = matcher.finish();
    let mut arrived = Arrived {
        dir: transfer.dir.clone(),
        opening: transfer.opening.clone(),
        layout: transfer.layout.clone(),
        blocks: Arc::new(machine.map().clone()),
        closing: Closing {
            digest: found,
            added_unix: unix_now(),
        },
        mapped: None,
    };
    site.save_map(&mut arrived)?;
    arrived.log(&mut transfer.log)?;
    drop(transfer);
    site.settle(&arrived, sketch.as_ref())?;
    if !noted {
        site.matcher_is_behind();
    }
    drop(transit);
    tracing::debug!("delivered");
    lap.busy(&stages.deliver);
    drop(hold);
    let delivered = flock::delivered_of(&machine, found, stages);
    site.totals.delivered(&delivered);
    match flock {
        None => Ok(delivered),
        Some(flock) => {
            let offer = &arrived.opening.offer;
            let delivered = flock::with_origins(delivered, origins);
            let (name, size) = (&offer.name, offer.file_bytes);
            let state = ImageState::Delivered;
            site.flock_image_done(&flock, name, size, state, &delivered)?;
            Ok(delivered)
        }
    }
}
