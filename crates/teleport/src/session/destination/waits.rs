//! Blocks that another transfer is bringing right now: a run that needs them waits for them, for a
//! while, before they are asked for. So similar images that come at once cross the link once.
//!
//! Nobody waits for ever, and two transfers that wait for each other ask in the end. Blocks are
//! awaited one run at a time, and a run only needs blocks that were matched before it was.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::driver::DriverEvent;
use super::reuse::{Job, Work};
use crate::destination::{Event, From, ReuseJob, Run};
use crate::sequences::Reach;
use crate::session::lane_in::Incoming;
use crate::site::Site;

/// How long a run waits at most.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long it waits at least, for others that have been slow.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);

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

/// Holds back what comes on `queue`, each job a run of its own, until it can go on to `jobs` or
/// must be asked for. Ends with the queue.
pub fn work(site: &Site, image: &Incoming, queue: &Receiver<ReuseJob>, jobs: &Sender<Work>) {
    let mut waiting: Vec<Wait> = Vec::new();
    let mut patience = PATIENCE;
    let mut looked = Instant::now();
    loop {
        let next = match waiting.is_empty() {
            true => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => queue.recv_timeout(LOOK_EVERY.saturating_sub(looked.elapsed())),
        };
        match next {
            Ok(job) => waiting.push(Wait {
                job,
                since: Instant::now(),
            }),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if looked.elapsed() < LOOK_EVERY {
            continue;
        }
        let (mut came, mut late) = (false, false);
        let mut still = Vec::with_capacity(waiting.len());
        for wait in waiting {
            match wait.job.runs.iter().map(|(_, run)| reach(site, run)).next() {
                Some(Reach::Coming) if wait.since.elapsed() < patience => still.push(wait),
                Some(Reach::Here) => {
                    came = true;
                    let own = vec![Vec::new(); wait.job.runs.len()];
                    let _ = jobs.send(Work::Reuse(Job { job: wait.job, own }));
                }
                other => {
                    late |= other == Some(Reach::Coming);
                    let event = DriverEvent::Machine(Event::NotComing(wait.job));
                    let _ = image.events.blocking_send(event);
                }
            }
        }
        waiting = still;
        // Whom it does not pay to wait for is waited for less.
        if late {
            patience = (patience / 2).max(LEAST_PATIENCE);
        } else if came {
            patience = (patience * 2).min(PATIENCE);
        }
        looked = Instant::now();
    }
}
