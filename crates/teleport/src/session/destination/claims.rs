//! The thread that claims blocks of an image of a flock that several nodes of a site receive: those that another image has claimed
//! are copied from it, the others are this image's to request (`flock::hints`).
//!
//! Digests run far ahead of blocks, so an image that claimed as soon as it could would have all that the flock has in common sent
//! over its own node's link. It claims a batch when little of what it has claimed is still to come: the nodes take turns, each as
//! fast as its link is, and when a node is lost there is little that was claimed and not sent.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use drover_core::CompactIndex;
use drover_index::{ImageId, Plan, Via};
use tokio::sync::mpsc;

use super::event::DriverEvent;
use super::flow::Flow;
use crate::codec::Batch;
use crate::destination::Run;
use crate::flock::live::Flock;
use crate::protocol::WINDOW_BATCHES;
use crate::site::Site;

/// A batch is claimed when less is to come than came in this time: more than any round trip.
const AHEAD: Duration = Duration::from_millis(500);

/// The least that may be to come, in blocks.
const MIN_AHEAD: u64 = 512;

/// How long what comes is counted.
const COUNTED: Duration = Duration::from_millis(100);

/// Polling interval.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A batch with its plan.
pub struct Claim {
    pub batch: Arc<Batch>,
    /// Its first data block.
    pub base: CompactIndex,
    /// The plan; `None` of a batch that was logged by an earlier session.
    pub plan: Option<Plan>,
    /// Where the plan's blocks are.
    pub runs: Vec<Run>,
}

/// The thread. Dropping it waits for it, which does not take long once the driver is gone.
pub struct Claims {
    queue: Option<Sender<Claim>>,
    thread: Option<JoinHandle<()>>,
}

impl Claims {
    /// Starts it, for an image of a flock.
    ///
    /// # Errors
    /// When the system cannot create the thread.
    pub fn start(
        site: &Arc<Site>,
        flock: &Arc<Flock>,
        image: ImageId,
        flow: Arc<Flow>,
        events: mpsc::Sender<DriverEvent>,
    ) -> std::io::Result<Claims> {
        // The window bounds the batches in it.
        let (queue, claims) = bounded(2 * WINDOW_BATCHES as usize);
        let (site, flock) = (Arc::clone(site), Arc::clone(flock));
        let body = move || work(&site, &flock, image, &flow, &events, &claims);
        let thread = std::thread::Builder::new()
            .name("claim".into())
            .spawn(body)?;
        Ok(Claims {
            queue: Some(queue),
            thread: Some(thread),
        })
    }

    /// Has a batch claimed; its plan goes to the driver.
    pub fn claim(&self, claim: Claim) {
        if let Some(queue) = &self.queue {
            let _ = queue.send(claim);
        }
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(
    site: &Site,
    flock: &Flock,
    image: ImageId,
    flow: &Flow,
    events: &mpsc::Sender<DriverEvent>,
    claims: &Receiver<Claim>,
) {
    let (mut pace, mut claimed) = (Pace::default(), 0);
    for claim in claims {
        // Alone it need not leave anything to others.
        if site.has_siblings(flock) {
            loop {
                // Before what is to come is looked at, which plans add to.
                let is_planned = flow.planned.load(Ordering::Acquire) >= claimed;
                let came = flow.came.load(Ordering::Acquire);
                let coming = flow.coming.load(Ordering::Acquire);
                if pace.may(Instant::now(), came, coming) && is_planned {
                    break;
                }
                if events.is_closed() {
                    return;
                }
                std::thread::sleep(LOOK_EVERY);
            }
        }
        let Claim {
            batch,
            base,
            plan,
            runs,
        } = claim;
        let count = runs.len();
        let runs = site.find_elsewhere(flock, image, base, &batch, runs);
        // A run that was found makes more of them, or is another.
        if runs.len() != count || runs.iter().any(|run| run.via == Via::Anchor) {
            flock.planned(image, base, &runs);
        }
        let index = batch.index;
        let event = match plan {
            Some(plan) => DriverEvent::Plan { index, plan, runs },
            None => DriverEvent::Planned { index, runs },
        };
        if events.blocking_send(event).is_err() {
            return;
        }
        claimed += 1;
    }
}

/// How much of an image may be to come when more of it is claimed: no clock, no threads.
#[derive(Debug, Default)]
struct Pace {
    /// Since when blocks are counted, and how many had come.
    since: Option<(Instant, u64)>,
    /// Blocks a second.
    rate: u64,
}

impl Pace {
    /// Whether to claim more when so many blocks have come and so many are to come.
    fn may(&mut self, now: Instant, came: u64, coming: u64) -> bool {
        let (since, before) = *self.since.get_or_insert((now, came));
        let time = now.duration_since(since);
        if time >= COUNTED {
            let rate = u128::from(came.saturating_sub(before)) * 1000 / time.as_millis();
            self.rate = u64::try_from(rate).unwrap_or(u64::MAX);
            self.since = Some((now, came));
        }
        let ahead = self.rate.saturating_mul(AHEAD.as_millis() as u64) / 1000;
        coming < ahead.max(MIN_AHEAD)
    }
}

#[cfg(test)]
mod tests;
