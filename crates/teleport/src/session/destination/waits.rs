//! Delays runs whose blocks another transfer is receiving: a run waits for them up to a timeout before they are
//! requested from the source. This way the common blocks of similar images sent at once cross the link once.
//!
//! Waits are bounded, so two transfers that wait for each other request the blocks in the end. Each run waits by
//! itself, and only for blocks that were matched before it was. Images of one flock come from one source, which sends them
//! all: they wait for each other as long as the other one is being sent.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use drover_store::sequences::{From, Reach};

use super::event::DriverEvent;
use super::reuse::{Job, Work};
use crate::destination::{Event, ReuseJob, Run};
use crate::flock::live::Flock;
use crate::session::literals_in::Incoming;
use crate::site::{Found, RunOf, Site, There};

/// Longest wait of a run.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Shortest wait of a run, after waits for other transfers have timed out.
const MIN_WAIT: Duration = Duration::from_secs(1);

/// How often other nodes are asked for what waits.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// Polling interval.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Whether blocks of a run are still in transit.
pub fn must_wait(site: &Site, flock: Option<&Flock>, run: &Run) -> bool {
    reach(site, run) == Reach::Coming || of_other(site, flock, run).is_some()
}

fn reach(site: &Site, run: &Run) -> Reach {
    match run.from {
        From::Image { image, first } => site.reach_anywhere(image, first, u64::from(run.count)),
        _ => Reach::Here,
    }
}

/// What other nodes have said of runs that this node has nothing of.
#[derive(Default)]
struct Others {
    said: HashMap<RunOf, Found>,
    asked: Option<Instant>,
}

impl Others {
    /// Asks about the runs that wait, from time to time.
    fn ask(&mut self, site: &Site, flock: Option<&Flock>, waits: &Waits) {
        let Some(of) = flock else { return };
        if self.asked.is_some_and(|asked| asked.elapsed() < ASK_EVERY) {
            return;
        }
        let runs = waits.waiting.iter().flat_map(|wait| &wait.job.runs);
        let runs = runs.filter_map(|(_, run)| of_other(site, flock, run));
        let asked: Vec<RunOf> = runs
            .filter(|run| !matches!(self.said.get(run), Some(Found::There(_) | Found::Gone)))
            .collect();
        if !asked.is_empty() {
            self.said.extend(site.look_elsewhere(of, &asked));
        }
        self.asked = Some(Instant::now());
    }

    fn reach(&self, site: &Site, flock: Option<&Flock>, run: &Run) -> Reach {
        let Some(of) = of_other(site, flock, run) else {
            return reach(site, run);
        };
        match self.said.get(&of) {
            Some(Found::There(_)) => Reach::Here,
            Some(Found::Gone) => Reach::Gone,
            Some(Found::Coming) | None => Reach::Coming,
        }
    }

    /// Where a run is that need not wait any more, if it is at another node.
    fn take(&mut self, run: &Run) -> Option<There> {
        let From::Image { image, first } = run.from else {
            return None;
        };
        match self.said.remove(&(image, first, run.count)) {
            Some(Found::There(there)) => Some(there),
            _ => None,
        }
    }
}

/// A run of an image of a flock that another node may have, or whose transfer was cut off and will go on.
fn of_other(site: &Site, flock: Option<&Flock>, run: &Run) -> Option<RunOf> {
    let flock = flock.filter(|flock| site.may_have_siblings(flock))?;
    match run.from {
        From::Image { image, first } if flock.has(image) => {
            let of = (image, first, run.count);
            let is_here = match site.reach(image, first, u64::from(run.count)) {
                Reach::Gone => false,
                Reach::Coming => true,
                Reach::Here => site.is_whole(&of),
            };
            (!is_here).then_some(of)
        }
        _ => None,
    }
}

struct Wait {
    job: ReuseJob,
    since: Instant,
}

/// The waiting runs; no threads and no clock.
struct Waits {
    waiting: Vec<Wait>,
    patience: Duration,
}

/// Runs that stopped waiting.
#[derive(Default)]
struct Looked {
    /// Their blocks are available.
    ready: Vec<ReuseJob>,
    /// Their blocks are not coming, or did not come in time.
    given_up: Vec<ReuseJob>,
}

impl Waits {
    fn new() -> Self {
        Waits {
            waiting: Vec::new(),
            patience: MAX_WAIT,
        }
    }

    fn add(&mut self, job: ReuseJob, now: Instant) {
        self.waiting.push(Wait { job, since: now });
    }

    /// Releases runs whose blocks are available, and those that have timed out; runs from a `sibling` wait as long as it
    /// comes.
    fn look(
        &mut self,
        now: Instant,
        reach: impl Fn(&Run) -> Reach,
        sibling: impl Fn(&Run) -> bool,
    ) -> Looked {
        let mut looked = Looked::default();
        let mut late = false;
        let mut still = Vec::with_capacity(self.waiting.len());
        for wait in self.waiting.drain(..) {
            let reached = wait.job.runs.iter().map(|(_, run)| reach(run));
            // Each job holds a single run.
            match reached.fold(Reach::Here, worst) {
                Reach::Here => looked.ready.push(wait.job),
                Reach::Coming if now.duration_since(wait.since) < self.patience => still.push(wait),
                Reach::Coming if wait.job.runs.iter().all(|(_, run)| sibling(run)) => {
                    still.push(wait);
                }
                reached => {
                    late |= reached == Reach::Coming;
                    looked.given_up.push(wait.job);
                }
            }
        }
        self.waiting = still;
        // Adapt the timeout: halve it after a wait that timed out.
        if late {
            self.patience = (self.patience / 2).max(MIN_WAIT);
        } else if !looked.ready.is_empty() {
            self.patience = (self.patience * 2).min(MAX_WAIT);
        }
        looked
    }
}

fn worst(a: Reach, b: Reach) -> Reach {
    match (a, b) {
        (Reach::Gone, _) | (_, Reach::Gone) => Reach::Gone,
        (Reach::Coming, _) | (_, Reach::Coming) => Reach::Coming,
        _ => Reach::Here,
    }
}

/// Delays jobs from `queue`, each of a single run, until they can go to `jobs` or must be requested. Returns when the
/// queue is closed.
pub fn work(
    site: &Site,
    image: &Incoming,
    flock: Option<&Flock>,
    queue: &Receiver<ReuseJob>,
    jobs: &Sender<Work>,
) {
    let sibling = |run: &Run| match run.from {
        From::Image { image, .. } => flock.is_some_and(|flock| flock.has(image)),
        _ => false,
    };
    let (mut waits, mut others) = (Waits::new(), Others::default());
    let mut looked = Instant::now();
    loop {
        let next = match waits.waiting.is_empty() {
            true => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => queue.recv_timeout(LOOK_EVERY.saturating_sub(looked.elapsed())),
        };
        match next {
            Ok(job) => waits.add(job, Instant::now()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if looked.elapsed() < LOOK_EVERY {
            continue;
        }
        others.ask(site, flock, &waits);
        let found = waits.look(
            Instant::now(),
            |run| others.reach(site, flock, run),
            sibling,
        );
        for job in found.ready {
            let own = vec![Vec::new(); job.runs.len()];
            let there = job.runs.first().and_then(|(_, run)| others.take(run));
            let _ = jobs.send(Work::Reuse(Job { job, own, there }));
        }
        for job in found.given_up {
            job.runs.iter().for_each(|(_, run)| drop(others.take(run)));
            let event = DriverEvent::Machine(Event::NotComing(job));
            let _ = image.events.blocking_send(event);
        }
        looked = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;

    use drover_core::CompactIndex;
    use drover_index::{ImageId, Via};

    use super::*;
    use crate::codec::Batch;
    use drover_store::DataBits;

    /// A run of one block: block `first` of image `image`.
    fn job(image: usize, first: u64) -> ReuseJob {
        let from = From::Image {
            image: ImageId(image as u64),
            first: CompactIndex(first),
        };
        let run = Run {
            count: 1,
            from,
            via: Via::C1,
        };
        ReuseJob {
            batch: Arc::new(Batch::new(0, DataBits::new(0), vec![], &[])),
            runs: vec![(0, run)],
        }
    }

    fn wanted(run: &Run) -> (usize, u64) {
        match run.from {
            From::Image { image, first } => (image.0 as usize, first.0),
            _ => unreachable!(),
        }
    }

    /// A simulated transfer of blocks that all images have: the first to match a block requests it, the others wait
    /// for that one. Links are fast or slow, or break.
    struct Transfer {
        waits: Waits,
        /// Blocks requested from its source, oldest first.
        asked: std::collections::VecDeque<u64>,
        here: HashSet<u64>,
        matched: u64,
        blocks_a_second: u64,
        live: bool,
    }

    fn crowd(seed: u64, flock: bool) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (blocks, images) = (rng.u64(50..400), rng.usize(2..7));
        let mut all: Vec<Transfer> = (0..images)
            .map(|_| Transfer {
                waits: Waits::new(),
                asked: Default::default(),
                here: HashSet::new(),
                matched: 0,
                blocks_a_second: [20, 100, 1000][rng.usize(0..3)],
                live: true,
            })
            .collect();
        let mut first_of: Vec<Option<usize>> = vec![None; blocks as usize];
        let tick = Duration::from_millis(50);
        let (start, mut now) = (Instant::now(), Instant::now());
        let mut sent = 0;
        while all.iter().any(|t| t.live && t.here.len() as u64 != blocks) {
            now += tick;
            assert!(
                now - start < Duration::from_secs(600),
                "seed {seed}: no end"
            );
            for i in 0..images {
                if !all[i].live {
                    continue;
                }
                if i > 0 && rng.u32(0..2000) == 0 {
                    all[i].live = false;
                    continue;
                }
                for _ in 0..rng.u64(0..40).min(blocks - all[i].matched) {
                    let block = all[i].matched;
                    all[i].matched += 1;
                    match first_of[block as usize].filter(|&f| all[f].live) {
                        Some(f) if all[f].here.contains(&block) => drop(all[i].here.insert(block)),
                        Some(f) => all[i].waits.add(job(f, block), now),
                        None => {
                            first_of[block as usize] = Some(i);
                            all[i].asked.push_back(block);
                        }
                    }
                }
                let (mut waits, patience) =
                    (std::mem::replace(&mut all[i].waits, Waits::new()), MAX_WAIT);
                let reach = |run: &Run| {
                    let (of, block) = wanted(run);
                    match (all[of].here.contains(&block), all[of].live) {
                        (true, _) => Reach::Here,
                        (false, true) => Reach::Coming,
                        (false, false) => Reach::Gone,
                    }
                };
                let looked = waits.look(now, reach, |_| flock);
                assert!(
                    flock || waits.waiting.iter().all(|w| now - w.since < patience),
                    "seed {seed}"
                );
                all[i].waits = waits;
                for job in looked.ready {
                    all[i].here.insert(wanted(&job.runs[0].1).1);
                }
                for job in looked.given_up {
                    all[i].asked.push_back(wanted(&job.runs[0].1).1);
                }
                let n = all[i].blocks_a_second / 20;
                for _ in 0..n {
                    let Some(block) = all[i].asked.pop_front() else {
                        break;
                    };
                    all[i].here.insert(block);
                    sent += 1;
                }
            }
        }
        // If no link breaks or is slow, every block crosses once; in a flock also if it is slow.
        let quick = flock || all.iter().all(|t| t.blocks_a_second >= 100);
        let once = quick && all.iter().all(|t| t.live);
        assert!(!once || sent == blocks, "seed {seed}: {sent} of {blocks}");
    }

    #[test]
    fn transfers_that_wait_for_each_other_all_end() {
        (0..400).for_each(|seed| crowd(seed, false));
    }

    #[test]
    fn images_of_a_flock_wait_for_each_other_however_slow_the_link_is() {
        (0..400).for_each(|seed| crowd(seed, true));
    }

    #[test]
    fn a_circle_ends_and_who_is_slow_is_waited_for_less() {
        let (mut waits, start) = (Waits::new(), Instant::now());
        let look = |waits: &mut Waits, after, reach| {
            let looked = waits.look(start + after, |_| reach, |_| false);
            (looked.ready.len(), looked.given_up.len())
        };
        waits.add(job(1, 0), start);
        assert_eq!(
            look(&mut waits, MAX_WAIT - LOOK_EVERY, Reach::Coming),
            (0, 0)
        );
        assert_eq!(look(&mut waits, MAX_WAIT, Reach::Coming), (0, 1));
        for _ in 0..10 {
            waits.add(job(1, 0), start);
            look(&mut waits, MAX_WAIT, Reach::Coming);
        }
        assert_eq!(waits.patience, MIN_WAIT);
        for _ in 0..10 {
            waits.add(job(1, 0), start);
            assert_eq!(look(&mut waits, Duration::ZERO, Reach::Here), (1, 0));
        }
        assert_eq!(waits.patience, MAX_WAIT);
        waits.add(job(1, 0), start);
        assert_eq!(look(&mut waits, Duration::ZERO, Reach::Gone), (0, 1));
    }
}
