//! Blocks that another transfer is bringing right now: a run that needs them waits for them, for a
//! while, before they are asked for. So similar images that come at once cross the link once.
//!
//! Nobody waits for ever, and two transfers that wait for each other ask in the end. Blocks are
//! awaited one run at a time, and a run only needs blocks that were matched before it was.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use drover_store::sequences::{From, Reach};

use super::event::DriverEvent;
use super::reuse::{Job, Work};
use crate::destination::{Event, ReuseJob, Run};
use crate::session::literals_in::Incoming;
use crate::site::Site;

/// How long a run waits at most.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// How long it waits at least, for others that have been slow.
const MIN_WAIT: Duration = Duration::from_secs(1);

/// How often it is looked whether the blocks have come.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Whether the blocks of a run are still on their way.
pub fn must_wait(site: &Site, run: &Run) -> bool {
    reach(site, run) == Reach::Coming
}

fn reach(site: &Site, run: &Run) -> Reach {
    match run.from {
        From::Image { image, first } => site.reach(image, first, u64::from(run.count)),
        _ => Reach::Here,
    }
}

struct Wait {
    job: ReuseJob,
    since: Instant,
}

/// The runs that wait, without threads and clock.
struct Waits {
    waiting: Vec<Wait>,
    patience: Duration,
}

/// What has come of some that waited.
#[derive(Default)]
struct Looked {
    /// Their blocks are there.
    ready: Vec<ReuseJob>,
    /// Theirs do not come, or not in time.
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

    /// Lets go whose blocks have come, and who has waited long enough.
    fn look(&mut self, now: Instant, reach: impl Fn(&Run) -> Reach) -> Looked {
        let mut looked = Looked::default();
        let mut late = false;
        let mut still = Vec::with_capacity(self.waiting.len());
        for wait in self.waiting.drain(..) {
            let reached = wait.job.runs.iter().map(|(_, run)| reach(run));
            // A job is a run of its own.
            match reached.fold(Reach::Here, worst) {
                Reach::Here => looked.ready.push(wait.job),
                Reach::Coming if now.duration_since(wait.since) < self.patience => still.push(wait),
                reached => {
                    late |= reached == Reach::Coming;
                    looked.given_up.push(wait.job);
                }
            }
        }
        self.waiting = still;
        // Whom it does not pay to wait for is waited for less.
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

/// Holds back what comes on `queue`, each job a run of its own, until it can go on to `jobs` or
/// must be asked for. Ends with the queue.
pub fn work(site: &Site, image: &Incoming, queue: &Receiver<ReuseJob>, jobs: &Sender<Work>) {
    let mut waits = Waits::new();
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
        let found = waits.look(Instant::now(), |run| reach(site, run));
        for job in found.ready {
            let own = vec![Vec::new(); job.runs.len()];
            let _ = jobs.send(Work::Reuse(Job { job, own }));
        }
        for job in found.given_up {
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

    use drover_index::{ImageId, Via};

    use super::*;
    use crate::codec::Batch;
    use drover_store::DataBits;

    /// A run of one block: block `first` of image `image`.
    fn job(image: usize, first: u64) -> ReuseJob {
        let from = From::Image {
            image: ImageId(image as u64),
            first,
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
            From::Image { image, first } => (image.0 as usize, first),
            _ => unreachable!(),
        }
    }

    /// A transfer of blocks that all images have: who matches a block first has it sent, the others
    /// wait for him. Links are quick, slow, or end.
    struct Transfer {
        waits: Waits,
        /// Blocks that its source was asked for, oldest first.
        asked: std::collections::VecDeque<u64>,
        here: HashSet<u64>,
        matched: u64,
        blocks_a_second: u64,
        live: bool,
    }

    fn crowd(seed: u64) {
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
                let looked = waits.look(now, |run| {
                    let (of, block) = wanted(run);
                    match (all[of].here.contains(&block), all[of].live) {
                        (true, _) => Reach::Here,
                        (false, true) => Reach::Coming,
                        (false, false) => Reach::Gone,
                    }
                });
                assert!(
                    waits.waiting.iter().all(|w| now - w.since < patience),
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
        // Where nobody ends and nobody is slow, every block crosses once.
        let quick = all.iter().all(|t| t.live && t.blocks_a_second >= 100);
        assert!(!quick || sent == blocks, "seed {seed}: {sent} of {blocks}");
    }

    #[test]
    fn transfers_that_wait_for_each_other_all_end() {
        (0..400).for_each(crowd);
    }

    #[test]
    fn a_circle_ends_and_who_is_slow_is_waited_for_less() {
        let (mut waits, start) = (Waits::new(), Instant::now());
        let look = |waits: &mut Waits, after, reach| {
            let looked = waits.look(start + after, |_| reach);
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
