//! The destination's side of one image, without I/O: which blocks have arrived, which to request, which can be reused
//! now and which must wait, and when the image is complete.
//!
//! The driver passes it [`Event`]s in the order in which they happen and carries out the [`Action`]s in the order
//! given. A batch goes through these states: arrived (logged, then matched), planned (logged, then reuse starts and
//! the rest is requested), complete (every block verified in place).
//!
//! Reuse of the image's own blocks waits until those are verified.
//!
//! A block may be wanted before its batch has arrived (`ahead`): the source sends it ahead of everything, and the batch
//! finds it in place.

use std::collections::BTreeMap;
use std::sync::Arc;

use drover_core::Digest;
use drover_store::sequences::From;
use drover_store::{BlockMap, DataBits};

use crate::codec::{Batch, Need, PROOF_BLOCKS, Runs};
use crate::protocol::{BATCH_BLOCKS, Matched, WINDOW_BATCHES};

mod ahead;
mod event;
mod runs;
#[cfg(test)]
mod tests;
mod wanted;

pub use ahead::Given;
use ahead::{Ahead, Hurried};
pub use event::{Action, Event, KeptBy, ReuseJob, Run, Violation};
use runs::{advanced, count_via};

/// An incomplete batch.
#[derive(Debug)]
struct Open {
    batch: Arc<Batch>,
    /// Walk position (within the batch) of each data block.
    places: Vec<u16>,
    /// Data blocks, by order among them, that are not yet verified in place.
    missing: DataBits,
    /// Which of those were requested from the source.
    asked: DataBits,
    /// Those that an earlier session received, or that came ahead of the batch.
    resumed: DataBits,
    /// Those that came ahead of the batch.
    ahead: DataBits,
    hurried: Hurried,
    planned: bool,
    /// Own-reuse runs of any batch that wait for blocks of this one.
    waiting: Vec<(Arc<Batch>, u32, Run)>,
}

impl Open {
    fn new(batch: Arc<Batch>) -> Self {
        let places: Vec<u16> = batch.data.iter().map(|i| i as u16).collect();
        let mut missing = DataBits::new(places.len() as u64);
        (0..places.len() as u64).for_each(|i| missing.set(i));
        let none = DataBits::new(places.len() as u64);
        let hurried = Hurried::new(places.len() as u64);
        Open {
            batch,
            places,
            missing,
            asked: none.clone(),
            resumed: none.clone(),
            ahead: none,
            hurried,
            planned: false,
            waiting: Vec::new(),
        }
    }
}

/// An incoming image.
#[derive(Debug)]
pub struct Destination {
    walk_blocks: u64,
    /// Number of batches in the walk.
    batches: u64,
    next: u64,
    /// Number of batches received by earlier sessions. A source that could not know of them resends batches until it
    /// receives the resume position.
    restored: u64,
    map: BlockMap,
    open: BTreeMap<u64, Open>,
    ahead: Ahead,
    end: Option<Option<Digest>>,
    finished: bool,
    counts: Counts,
    /// Blocks of batches that have arrived which the source is to send, and has not.
    coming: u64,
}

/// Where the image's blocks have come from so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Reused blocks.
    pub matched_blocks: u64,
    /// Blocks that crossed the link.
    pub sent_blocks: u64,
    /// Zero blocks.
    pub zero_blocks: u64,
    /// Blocks received by an earlier session.
    pub resumed_blocks: u64,
    /// Reused blocks by cache.
    pub matched: Matched,
}

impl Counts {
    /// Blocks in place, from any origin.
    #[must_use]
    pub fn in_place(&self) -> u64 {
        self.matched_blocks + self.sent_blocks + self.zero_blocks + self.resumed_blocks
    }
}

impl Destination {
    /// For an image of `walk_blocks` blocks, none of them present.
    #[must_use]
    pub fn new(walk_blocks: u64) -> Self {
        Destination {
            walk_blocks,
            batches: walk_blocks.div_ceil(BATCH_BLOCKS),
            next: 0,
            restored: 0,
            map: BlockMap::default(),
            open: BTreeMap::new(),
            ahead: Ahead::default(),
            end: None,
            finished: false,
            counts: Counts::default(),
            coming: 0,
        }
    }

    /// Restores a batch from the log of an earlier session, in order, with the data blocks (by order among them) that
    /// are not in place. If there are any, an [`Event::Planned`] must follow for them.
    ///
    /// # Errors
    /// When it is not the next batch, or has the wrong size.
    pub fn restore(&mut self, batch: Arc<Batch>, missing: DataBits) -> Result<(), Violation> {
        self.check_next(&batch)?;
        let present = batch.digests.len() as u64 - missing.count();
        self.counts.resumed_blocks += present;
        self.arrive(&batch);
        self.restored = self.next;
        if missing.count() > 0 {
            let mut open = Open::new(batch.clone());
            (0..batch.digests.len() as u64)
                .filter(|&i| !missing.get(i))
                .for_each(|i| open.resumed.set(i));
            open.missing = missing;
            self.open.insert(batch.index, open);
        }
        Ok(())
    }

    /// Counts the restored blocks as matched: they came from a comparison, not from an earlier session.
    pub fn restored_was_compared(&mut self) {
        let blocks = std::mem::take(&mut self.counts.resumed_blocks);
        self.counts.matched_blocks += blocks;
        self.counts.matched.in_place += blocks;
    }

    /// Index of the batch that the source must send next.
    #[must_use]
    pub fn next_batch(&self) -> u64 {
        self.next
    }

    /// Which blocks hold data, for the batches that have arrived.
    #[must_use]
    pub fn map(&self) -> &BlockMap {
        &self.map
    }

    /// Block counts by origin.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Blocks of announced batches that were requested from the source and have not come.
    #[must_use]
    pub fn coming(&self) -> u64 {
        self.coming
    }

    /// Number of batches that have arrived and are incomplete.
    #[must_use]
    pub fn open_batches(&self) -> usize {
        self.open.len()
    }

    /// Handles an event; appends the resulting actions to `actions`.
    ///
    /// # Errors
    /// When the source violated the protocol: the session must end.
    pub fn handle(&mut self, event: Event, actions: &mut Vec<Action>) -> Result<(), Violation> {
        match event {
            Event::Batch(batch) => self.on_batch(batch, actions)?,
            Event::Taken(batch) => {
                self.check_next(&batch)?;
                self.arrive(&batch);
                let _ = self.ahead.arrived(batch.index);
                self.counts.matched_blocks += batch.data.count();
                self.counts.matched.in_place += batch.data.count();
            }
            Event::Kept { index, blocks, by } => self.on_kept(index, &blocks, by),
            Event::Planned { index, runs } => self.on_planned(index, runs, actions)?,
            Event::Reused { job, failed } => self.on_reused(&job, &failed, actions),
            Event::NotComing(job) => self.on_not_coming(&job, actions),
            Event::Written(runs) => self.on_written(&runs, actions)?,
            Event::Proved { index, wrong } => self.on_proved(index, &wrong, actions)?,
            Event::Want(want) => self.on_want(&want, actions),
            Event::Ahead { data, zero } => self.ahead.came(&data, &zero),
            Event::End(digest) => {
                if self.next != self.batches || self.end.is_some() {
                    return Err(Violation(format!(
                        "the source ended after batch {} of {}",
                        self.next, self.batches
                    )));
                }
                self.end = Some(digest);
            }
        }
        if let Some(digest) = self.end
            && self.open.is_empty()
            && !self.finished
        {
            self.finished = true;
            actions.push(Action::Finish(digest));
        }
        Ok(())
    }

    fn check_next(&self, batch: &Batch) -> Result<(), Violation> {
        if batch.index != self.next || self.next >= self.batches {
            return Err(Violation(format!(
                "received batch {}, expected {}",
                batch.index, self.next
            )));
        }
        let blocks = (self.walk_blocks - batch.first_block()).min(BATCH_BLOCKS);
        if batch.data.blocks() != blocks {
            return Err(Violation(format!(
                "batch {} has {} blocks, not {blocks}",
                batch.index,
                batch.data.blocks()
            )));
        }
        Ok(())
    }

    fn arrive(&mut self, batch: &Batch) {
        self.next += 1;
        self.map.push(&batch.data);
        self.counts.zero_blocks += batch.data.blocks() - batch.data.count();
    }

    fn on_batch(&mut self, batch: Arc<Batch>, actions: &mut Vec<Action>) -> Result<(), Violation> {
        if batch.index < self.restored {
            return Ok(());
        }
        self.check_next(&batch)?;
        // The source counts its window from the resume point; restored batches come on top.
        if self.open.len() as u64 >= 2 * WINDOW_BATCHES || self.end.is_some() {
            return Err(Violation(format!(
                "batch {} is beyond the window",
                batch.index
            )));
        }
        self.arrive(&batch);
        let mut open = Open::new(batch.clone());
        if let Some(changed) = self.come_to(&mut open) {
            actions.push(Action::Changed(changed));
            return Ok(());
        }
        if batch.digests.is_empty() {
            actions.push(Action::Match(batch.clone()));
            actions.push(Action::Complete(batch.index));
        } else {
            self.open.insert(batch.index, open);
            actions.push(Action::Match(batch));
        }
        Ok(())
    }

    /// Checked against the proofs only once the batch is planned: blocks re-requested after a wrong proof must not be
    /// reused.
    fn on_kept(&mut self, index: u64, blocks: &DataBits, by: KeptBy) {
        let Some(open) = self.open.get_mut(&index).filter(|o| !o.planned) else {
            return;
        };
        for i in blocks.iter() {
            // What was wanted is on its way, and counts when it comes: a wrong proof asks for nothing a second time.
            if open.missing.get(i) && !open.asked.get(i) {
                open.missing.clear(i);
                match (open.ahead.get(i), by) {
                    (true, _) => self.counts.sent_blocks += 1,
                    (false, KeptBy::Session) => {
                        open.resumed.set(i);
                        self.counts.resumed_blocks += 1;
                    }
                    (false, KeptBy::OldCopy) => {
                        self.counts.matched_blocks += 1;
                        self.counts.matched.in_place += 1;
                    }
                }
            }
        }
    }

    fn on_planned(
        &mut self,
        index: u64,
        runs: Vec<Run>,
        actions: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let Some(open) = self.open.get_mut(&index) else {
            return Ok(());
        };
        open.planned = true;
        if let Some(i) = open.ahead.iter().find(|&i| open.missing.get(i)) {
            let place = u64::from(open.places[i as usize]);
            actions.push(Action::Changed(open.batch.first_block() + place));
            return Ok(());
        }
        let batch = open.batch.clone();
        let covered: u64 = runs.iter().map(|r| u64::from(r.count)).sum();
        if covered != batch.digests.len() as u64 {
            return Err(Violation(format!(
                "the plan for batch {index} covers {covered} blocks"
            )));
        }
        let mut job = ReuseJob {
            batch: batch.clone(),
            runs: Vec::new(),
        };
        let mut ask = Vec::new();
        let mut own = Vec::new();
        let mut at = 0u32;
        for run in runs {
            // After a resume, parts of a run may be in place; only the missing parts are reused. What was wanted is on its
            // way.
            for (start, count) in missing_stretches(&self.open[&index], at, run.count) {
                let piece = Run {
                    count,
                    from: advanced(run.from, start - at),
                    via: run.via,
                };
                match piece.from {
                    From::Literal => ask.extend(start..start + count),
                    From::Own { .. } => own.push((start, piece)),
                    From::Image { .. } | From::Sequence { .. } => job.runs.push((start, piece)),
                }
            }
            at += run.count;
        }
        self.ask(index, ask.into_iter(), actions);
        if !job.runs.is_empty() {
            actions.push(Action::Reuse(job));
        }
        for (start, run) in own {
            self.reuse_own(&batch, start, run, actions);
        }
        // All of it may have been in place, and other runs may wait for it.
        self.progressed(index, actions);
        Ok(())
    }

    /// Starts a run of own-reuse, or queues it with the first batch that it must wait for.
    fn reuse_own(&mut self, batch: &Arc<Batch>, start: u32, run: Run, actions: &mut Vec<Action>) {
        let From::Own { first } = run.from else {
            return;
        };
        let mut ready = 0u32;
        let mut blocker = None;
        while ready < run.count {
            let Some(walk) = self.map.walk_of(first + u64::from(ready)) else {
                break;
            };
            let holder = walk.0 / BATCH_BLOCKS;
            if let Some(open) = self.open.get(&holder)
                && let Ok(i) = open.places.binary_search(&((walk.0 % BATCH_BLOCKS) as u16))
                && open.missing.get(i as u64)
            {
                blocker = Some(holder);
                break;
            }
            ready += 1;
        }
        if ready > 0 {
            let runs = vec![(
                start,
                Run {
                    count: ready,
                    ..run
                },
            )];
            actions.push(Action::Reuse(ReuseJob {
                batch: batch.clone(),
                runs,
            }));
        }
        if ready == run.count {
            return;
        }
        let rest = Run {
            count: run.count - ready,
            from: advanced(run.from, ready),
            ..run
        };
        let here = start + ready;
        // A block that waits for itself or a later one would wait forever: request it.
        let waits = self.map.first_data_of(batch.index) + u64::from(here);
        let earlier = first + u64::from(ready) < waits;
        match blocker
            .filter(|_| earlier)
            .and_then(|b| self.open.get_mut(&b))
        {
            Some(open) => open.waiting.push((batch.clone(), here, rest)),
            None => self.ask(batch.index, here..here + rest.count, actions),
        }
    }

    fn ask(&mut self, index: u64, blocks: impl Iterator<Item = u32>, actions: &mut Vec<Action>) {
        let Some(open) = self.open.get_mut(&index) else {
            return;
        };
        let first = open.batch.first_block();
        let runs: Runs = blocks
            .filter(|&i| {
                let new = !open.asked.get(u64::from(i));
                open.asked.set(u64::from(i));
                self.coming += u64::from(new && open.missing.get(u64::from(i)));
                new
            })
            .map(|i| first + u64::from(open.places[i as usize]))
            .collect();
        if !runs.is_empty() {
            actions.push(Action::Need(Need { runs }));
        }
    }

    fn on_reused(&mut self, job: &ReuseJob, failed: &[u32], actions: &mut Vec<Action>) {
        let index = job.batch.index;
        let mut failures = failed.iter().copied().peekable();
        let Some(open) = self.open.get_mut(&index) else {
            return;
        };
        for &(start, run) in &job.runs {
            let mut good = 0;
            for i in start..start + run.count {
                if failures.next_if_eq(&i).is_some() {
                    continue;
                }
                if open.missing.get(u64::from(i)) {
                    open.missing.clear(u64::from(i));
                    self.coming -= u64::from(open.asked.get(u64::from(i)));
                    good += 1;
                }
            }
            self.counts.matched_blocks += good;
            count_via(&mut self.counts.matched, run.via, good);
        }
        self.counts.matched.invalid += failed.len() as u64;
        self.ask(index, failed.iter().copied(), actions);
        self.progressed(index, actions);
    }

    fn on_not_coming(&mut self, job: &ReuseJob, actions: &mut Vec<Action>) {
        let runs = job.runs.iter();
        let blocks = runs.flat_map(|&(start, run)| start..start + run.count);
        self.ask(job.batch.index, blocks, actions);
    }

    fn on_written(&mut self, runs: &Runs, actions: &mut Vec<Action>) -> Result<(), Violation> {
        let mut touched = Vec::new();
        for walk in runs.blocks() {
            let index = walk / BATCH_BLOCKS;
            let Some(open) = self.open.get_mut(&index) else {
                continue;
            };
            let Ok(i) = open.places.binary_search(&((walk % BATCH_BLOCKS) as u16)) else {
                continue;
            };
            // A worker may be about to write other data there.
            if !open.asked.get(i as u64) {
                return Err(Violation(format!(
                    "received block {walk}, which was not requested"
                )));
            }
            if open.missing.get(i as u64) {
                open.missing.clear(i as u64);
                self.coming -= 1;
                self.counts.sent_blocks += 1;
            }
            if touched.last() != Some(&index) {
                touched.push(index);
            }
        }
        touched
            .into_iter()
            .for_each(|index| self.progressed(index, actions));
        Ok(())
    }

    /// Two blocks can have the same short digest, in particular if crafted. A group whose proof is wrong is requested
    /// from the source, including reused blocks.
    fn on_proved(
        &mut self,
        index: u64,
        wrong: &[u32],
        actions: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let Some(open) = self.open.get_mut(&index) else {
            return Ok(());
        };
        if open.missing.count() > 0 {
            return Ok(());
        }
        if wrong.is_empty() {
            self.open.remove(&index);
            actions.push(Action::Complete(index));
            return Ok(());
        }
        let group = PROOF_BLOCKS as u32;
        let blocks = open.places.len() as u32;
        let suspects: Vec<u32> = wrong
            .iter()
            .flat_map(|g| g * group..((g + 1) * group).min(blocks))
            .filter(|&i| !open.asked.get(u64::from(i)))
            .collect();
        if suspects.is_empty() {
            return Err(Violation(format!(
                "batch {index}: the data does not match its proof"
            )));
        }
        for &i in &suspects {
            let i = u64::from(i);
            open.missing.set(i);
            match (open.ahead.get(i), open.resumed.get(i)) {
                (true, _) => self.counts.sent_blocks -= 1,
                (_, true) => self.counts.resumed_blocks -= 1,
                _ => self.counts.matched_blocks -= 1,
            }
        }
        self.counts.matched.invalid += suspects.len() as u64;
        self.ask(index, suspects.into_iter(), actions);
        Ok(())
    }

    /// Called when blocks of the batch are in place: releases runs that waited for them, and the batch itself when it
    /// is complete.
    fn progressed(&mut self, index: u64, actions: &mut Vec<Action>) {
        let Some(open) = self.open.get_mut(&index) else {
            return;
        };
        let waiting = std::mem::take(&mut open.waiting);
        // Its plan is to be logged with it first.
        if open.planned && open.missing.count() == 0 {
            actions.push(Action::Prove(index));
        }
        for (batch, start, run) in waiting {
            self.reuse_own(&batch, start, run, actions);
        }
    }
}

/// The runs `(start, count)` within `[at, at + count)` that are still missing, and were not asked for.
fn missing_stretches(open: &Open, at: u32, count: u32) -> Vec<(u32, u32)> {
    let lacks = |i: u64| open.missing.get(i) && !open.asked.get(i);
    let mut out: Vec<(u32, u32)> = Vec::new();
    for i in (at..at + count).filter(|&i| lacks(u64::from(i))) {
        match out.last_mut() {
            Some((s, n)) if *s + *n == i => *n += 1,
            _ => out.push((i, 1)),
        }
    }
    out
}
