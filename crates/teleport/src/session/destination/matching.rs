//! The thread between a transfer and its teleporter. When the teleporter fails, the transfer goes
//! on without matching.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use drover_core::BLOCK_SIZE_U64;
use drover_index::{ImageId, Origin, Plan, PlanRun, Via};
use tokio::sync::mpsc;

use super::driver::DriverEvent;
use crate::codec::Batch;
use crate::matching::Link;
use crate::protocol::WINDOW_BATCHES;
use crate::site::Site;
use crate::stages::{DestinationStages, Lap};
use crate::teleporter::{Answer, Event, ImageEvent};

enum Job {
    Match(Arc<Batch>),
    Record(Arc<Batch>),
    End(ImageEvent),
}

/// A running matcher thread. Dropping it aborts the image at the teleporter.
pub struct MatchThread {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl MatchThread {
    /// Starts it for an image; plans go to `events`.
    pub fn start(
        site: &Arc<Site>,
        image: ImageId,
        events: mpsc::Sender<DriverEvent>,
        stages: Arc<DestinationStages>,
    ) -> Self {
        // The window bounds the batches in it; restored ones are recorded as fast as they come.
        let (jobs, queue) = bounded(2 * WINDOW_BATCHES as usize);
        let site = site.clone();
        let runtime = tokio::runtime::Handle::try_current();
        let thread = std::thread::Builder::new()
            .name("match".into())
            .spawn(move || {
                let _entered = runtime.as_ref().map(|r| r.enter());
                Matcher {
                    image,
                    link: open(&site, image),
                    waiting: Default::default(),
                    events,
                    stages,
                    lap: Lap::start(),
                }
                .run(&queue);
            });
        MatchThread {
            jobs: Some(jobs),
            thread: thread.ok(),
        }
    }

    fn submit(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
    }

    /// Has a batch matched.
    pub fn find(&self, batch: Arc<Batch>) {
        self.submit(Job::Match(batch));
    }

    /// Has a batch remembered.
    pub fn record(&self, batch: Arc<Batch>) {
        self.submit(Job::Record(batch));
    }

    /// The image is whole: waits until the teleporter has noted it.
    pub fn finish(mut self) {
        self.end(ImageEvent::Finish);
    }

    fn end(&mut self, how: ImageEvent) {
        self.submit(Job::End(how));
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for MatchThread {
    fn drop(&mut self) {
        if self.jobs.is_some() {
            self.end(ImageEvent::Abort);
        }
    }
}

fn open(site: &Site, image: ImageId) -> Option<Link> {
    let link = site.matching.link().and_then(|mut link| {
        link.submit(Event::Image(image, ImageEvent::Begin))?;
        link.collect()?;
        Ok(link)
    });
    link.inspect_err(|e| tracing::warn!(error = %e, "no teleporter: sending without matching"))
        .ok()
}

struct Matcher {
    image: ImageId,
    /// `None` when it has failed.
    link: Option<Link>,
    /// Events that were submitted and have no answer: the batch, if it is to be planned.
    waiting: std::collections::VecDeque<Option<Arc<Batch>>>,
    events: mpsc::Sender<DriverEvent>,
    stages: Arc<DestinationStages>,
    lap: Lap,
}

impl Matcher {
    fn run(mut self, queue: &Receiver<Job>) {
        loop {
            let depth = self.link.as_ref().map_or(1, Link::depth);
            let job = match self.waiting.len() {
                0 => queue.recv().map_err(|_| TryRecvError::Disconnected),
                n if n < depth => queue.try_recv(),
                _ => Err(TryRecvError::Empty),
            };
            self.lap.wait(&self.stages.matching);
            match job {
                Ok(Job::Match(batch)) => {
                    let event = Event::Match(self.image, batch.clone());
                    self.submit(event, Some(batch));
                }
                Ok(Job::Record(batch)) => {
                    let event = Event::Record(self.image, batch);
                    self.submit(event, None);
                }
                Ok(Job::End(how)) => {
                    self.submit(Event::Image(self.image, how), None);
                    while !self.waiting.is_empty() {
                        self.collect();
                    }
                    return;
                }
                Err(TryRecvError::Empty) => self.collect(),
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    fn submit(&mut self, event: Event, batch: Option<Arc<Batch>>) {
        let blocks = batch.as_ref().map_or(0, |b| b.digests.len() as u64);
        self.waiting.push_back(batch);
        if let Some(Err(e)) = self.link.as_mut().map(|l| l.submit(event)) {
            self.fail(&e);
        }
        // A teleporter in this process has done its work by now.
        self.lap.busy(&self.stages.matching);
        self.stages.matching.add_bytes(blocks * BLOCK_SIZE_U64);
    }

    fn collect(&mut self) {
        let answer = match &mut self.link {
            Some(link) => match link.collect() {
                Ok(answer) => answer,
                Err(e) => return self.fail(&e),
            },
            None => Answer::Done,
        };
        self.lap.socket(&self.stages.matching);
        let Some(Some(batch)) = self.waiting.pop_front() else {
            return;
        };
        let plan = match answer {
            Answer::Plan(plan) => plan,
            Answer::Done => all_literal(&batch),
        };
        self.plan(batch.index, plan);
        self.lap.wait(&self.stages.matching);
    }

    fn plan(&self, index: u64, plan: Plan) {
        let _ = self.events.blocking_send(DriverEvent::Plan { index, plan });
    }

    /// The teleporter is gone: everything that waits, and all that comes, is literal.
    fn fail(&mut self, error: &crate::TeleportError) {
        tracing::warn!(%error, "the teleporter failed: going on without matching");
        self.link = None;
        while let Some(waiting) = self.waiting.pop_front() {
            if let Some(batch) = waiting {
                self.plan(batch.index, all_literal(&batch));
            }
        }
    }
}

fn all_literal(batch: &Batch) -> Plan {
    let count = batch.digests.len() as u32;
    Plan {
        runs: vec![PlanRun {
            count,
            origin: Origin::Literal,
            via: Via::Literal,
        }],
        stores: Vec::new(),
    }
}
