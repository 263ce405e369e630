//! The thread between a transfer and its teleporter. When the teleporter fails, the transfer continues without
//! matching.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use drover_core::{BLOCK_SIZE_U64, CompactIndex};
use drover_index::{BLOCK_SKETCH, ImageId, Origin, Plan, PlanRun, Sketch, Via};
use tokio::sync::mpsc;

use super::claims::{Claim, Claims};
use super::event::DriverEvent;
use super::flow::Flow;
use crate::codec::Batch;
use crate::destination::Run;
use crate::flock::live::Flock;
use crate::matching::Link;
use crate::protocol::WINDOW_BATCHES;
use crate::site::{Matched, Site, Waiting};
use crate::stages::{DestinationStages, Lap};
use crate::teleporter::{Answer, Event, ImageEvent};

enum Job {
    Match(Arc<Batch>, Waiting),
    Record(Arc<Batch>),
    /// Claim the blocks of a batch that was matched before.
    Claim(Claim),
    /// The image is complete (`Finish`), or is aborted (`Abort`).
    End(ImageEvent),
    /// The transfer stops; it may be resumed later.
    Stop,
}

/// A running matcher thread. Dropping it stops the transfer's matching: the blocks received so far remain available
/// for reuse.
pub struct MatchThread {
    jobs: Option<Sender<Job>>,
    matched: Arc<Matched>,
    thread: Option<JoinHandle<(bool, Sketch)>>,
    takes_claims: bool,
}

impl MatchThread {
    /// Starts it for an image; plans go to `events`. Of an image of a flock it is known whether what is recorded was at the
    /// site before.
    ///
    /// # Errors
    /// When the system cannot create the thread.
    pub fn start(
        site: &Arc<Site>,
        image: ImageId,
        events: mpsc::Sender<DriverEvent>,
        stages: Arc<DestinationStages>,
        flock: Option<(Arc<Flock>, bool)>,
        flow: &Arc<Flow>,
    ) -> std::io::Result<Self> {
        let of_nodes = flock
            .as_ref()
            .filter(|(flock, _)| site.may_have_siblings(flock));
        let claims = of_nodes
            .map(|(flock, _)| Claims::start(site, flock, image, Arc::clone(flow), events.clone()));
        let claims = claims.transpose()?;
        let takes_claims = claims.is_some();
        // The window bounds the batches in it; restored ones are recorded as fast as they come.
        let (jobs, queue) = bounded(2 * WINDOW_BATCHES as usize);
        let (site, matched) = (site.clone(), site.matched.clone());
        let runtime = tokio::runtime::Handle::try_current();
        let thread = std::thread::Builder::new()
            .name("match".into())
            .spawn(move || {
                let _entered = runtime.as_ref().map(|r| r.enter());
                Matcher {
                    image,
                    link: open(&site, image),
                    site,
                    blocks: 0,
                    looked_up: None,
                    sketch: Sketch::new(BLOCK_SKETCH),
                    waiting: Default::default(),
                    events,
                    claims,
                    stages,
                    flock,
                    lap: Lap::start(),
                }
                .run(&queue)
            })?;
        Ok(MatchThread {
            jobs: Some(jobs),
            matched,
            thread: Some(thread),
            takes_claims,
        })
    }

    /// Whether its blocks are claimed among the nodes of the site: then those of batches that an earlier session has logged are
    /// too.
    pub fn takes_claims(&self) -> bool {
        self.takes_claims
    }

    /// Has the blocks of a batch claimed that an earlier session has logged.
    pub fn claim(&self, claim: Claim) {
        self.submit(Job::Claim(claim));
    }

    fn submit(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
    }

    /// Has a batch matched.
    pub fn find(&self, batch: Arc<Batch>) {
        self.submit(Job::Match(batch, self.matched.waiting()));
    }

    /// Has a batch recorded without matching.
    pub fn record(&self, batch: Arc<Batch>) {
        self.submit(Job::Record(batch));
    }

    /// The image is complete: waits for the teleporter to record that, and returns `false` if it has not; and a sketch of all
    /// blocks.
    #[must_use]
    pub fn finish(mut self) -> (bool, Option<Sketch>) {
        self.end(Job::End(ImageEvent::Finish))
    }

    /// Aborts the image: nothing of it is kept.
    pub fn abort(mut self) {
        let _ = self.end(Job::End(ImageEvent::Abort));
    }

    fn end(&mut self, how: Job) -> (bool, Option<Sketch>) {
        self.submit(how);
        self.jobs = None;
        let ended = self.thread.take().and_then(|thread| thread.join().ok());
        ended.map_or((false, None), |(noted, sketch)| (noted, Some(sketch)))
    }
}

impl Drop for MatchThread {
    fn drop(&mut self) {
        if self.jobs.is_some() {
            let _ = self.end(Job::Stop);
        }
    }
}

fn open(site: &Site, image: ImageId) -> Option<Link> {
    let link = site.matching.link().and_then(|mut link| {
        link.ask(Event::Image(image, ImageEvent::Begin))?;
        Ok(link)
    });
    let failed = |e: &crate::TeleportError| {
        tracing::warn!(error = %e, "cannot reach the teleporter; blocks are not matched");
        site.matcher_is_behind();
    };
    link.inspect_err(failed).ok()
}

/// A batch whose match is pending, and its first data block.
struct Asked {
    batch: Arc<Batch>,
    base: CompactIndex,
    _waiting: Waiting,
}

struct Matcher {
    site: Arc<Site>,
    image: ImageId,
    /// `None` after a failure.
    link: Option<Link>,
    /// Submitted events with pending answers: the batch if a plan is expected.
    waiting: std::collections::VecDeque<Option<Asked>>,
    /// Data blocks submitted so far.
    blocks: u64,
    /// A sketch of them.
    sketch: Sketch,
    /// The runs of a plan that was resolved as soon as it was made.
    looked_up: Option<Vec<Run>>,
    events: mpsc::Sender<DriverEvent>,
    /// Through which plans go if several nodes receive the flock.
    claims: Option<Claims>,
    stages: Arc<DestinationStages>,
    /// The flock that the image is of, and whether the site had what is recorded.
    flock: Option<(Arc<Flock>, bool)>,
    lap: Lap,
}

impl Matcher {
    /// Returns whether the teleporter has recorded the end of the image, and a sketch of the blocks.
    fn run(mut self, queue: &Receiver<Job>) -> (bool, Sketch) {
        let noted = self.work(queue);
        (noted, self.sketch)
    }

    fn work(&mut self, queue: &Receiver<Job>) -> bool {
        loop {
            let depth = self.link.as_ref().map_or(1, Link::depth);
            let job = match self.waiting.len() {
                0 => queue.recv().map_err(|_| TryRecvError::Disconnected),
                n if n < depth => queue.try_recv(),
                _ => Err(TryRecvError::Empty),
            };
            self.lap.wait(&self.stages.matching);
            match job {
                Ok(Job::Match(batch, waiting)) => {
                    let event = Event::Match(self.image, batch.clone());
                    self.submit(event, Some((batch, waiting)));
                }
                Ok(Job::Record(batch)) => {
                    let event = Event::Record(self.image, batch);
                    self.submit(event, None);
                }
                Ok(Job::Claim(claim)) => {
                    if let Some(claims) = &self.claims {
                        claims.claim(claim);
                    }
                }
                Ok(Job::End(how)) => return self.end(how),
                // Keep received blocks for reuse; an image without any would only take up another's slot.
                Ok(Job::Stop) if self.blocks > 0 => return self.end(ImageEvent::Finish),
                Ok(Job::Stop) => return self.end(ImageEvent::Abort),
                Err(TryRecvError::Empty) => self.collect(),
                Err(TryRecvError::Disconnected) => return self.end(ImageEvent::Abort),
            }
        }
    }

    fn end(&mut self, how: ImageEvent) -> bool {
        self.submit(Event::Image(self.image, how), None);
        while !self.waiting.is_empty() {
            self.collect();
        }
        self.link.is_some()
    }

    fn submit(&mut self, event: Event, batch: Option<(Arc<Batch>, Waiting)>) {
        if let Event::Match(_, batch) | Event::Record(_, batch) = &event {
            self.sketch.add_blocks(&batch.digests);
        }
        let blocks = batch.as_ref().map_or(0, |b| b.0.digests.len() as u64);
        let base = CompactIndex(self.blocks);
        self.blocks += event.blocks();
        self.waiting.push_back(batch.map(|(batch, _waiting)| Asked {
            batch,
            base,
            _waiting,
        }));
        if let (Some((flock, had)), Event::Record(_, batch)) = (&self.flock, &event) {
            let count = batch.digests.len() as u64;
            flock.recorded(self.image, base, count, *had);
        }
        let (site, image) = (&self.site, self.image);
        let flock = self.flock.as_ref().map(|(flock, _)| &**flock);
        let mut looked_up = None;
        let submitted = self.link.as_mut().map(|link| {
            link.submit_then(event, |answer| {
                if let Answer::Plan(plan) = answer {
                    looked_up = Some(take(site, image, flock, base, plan));
                }
            })
        });
        self.looked_up = looked_up;
        if let Some(Err(e)) = submitted {
            self.fail(&e);
        }
        // A local teleporter has finished its work by now.
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
        let Some(Some(asked)) = self.waiting.pop_front() else {
            return;
        };
        let plan = match answer {
            Answer::Plan(plan) => plan,
            _ => all_literal(&asked.batch),
        };
        let runs = self.looked_up.take();
        let runs = runs.unwrap_or_else(|| self.take(asked.base, &plan));
        self.plan(asked, plan, runs);
        self.lap.wait(&self.stages.matching);
    }

    fn plan(&self, asked: Asked, plan: Plan, runs: Vec<Run>) {
        // From here on nothing is waited for at the teleporter.
        let Asked { batch, base, .. } = asked;
        match &self.claims {
            Some(claims) => claims.claim(Claim {
                batch,
                base,
                plan: Some(plan),
                runs,
            }),
            None => {
                let index = batch.index;
                let event = DriverEvent::Plan { index, plan, runs };
                let _ = self.events.blocking_send(event);
            }
        }
    }

    fn take(&self, base: CompactIndex, plan: &Plan) -> Vec<Run> {
        let flock = self.flock.as_ref().map(|(flock, _)| &**flock);
        take(&self.site, self.image, flock, base, plan)
    }

    /// The teleporter is gone: all pending and further blocks become literals.
    fn fail(&mut self, error: &crate::TeleportError) {
        tracing::warn!(%error, "the teleporter failed; the rest is not matched");
        if let Some(link) = self.link.take() {
            link.give_up(self.image);
        }
        self.site.matcher_is_behind();
        self.looked_up = None;
        while let Some(waiting) = self.waiting.pop_front() {
            if let Some(asked) = waiting {
                let plan = all_literal(&asked.batch);
                let runs = self.take(asked.base, &plan);
                self.plan(asked, plan, runs);
            }
        }
    }
}

/// Resolves a plan's runs, then applies its stores, before another transfer gets a plan that refers to them.
fn take(
    site: &Site,
    image: ImageId,
    flock: Option<&Flock>,
    base: CompactIndex,
    plan: &Plan,
) -> Vec<Run> {
    let runs = site.resolve(image, plan);
    if let Some(flock) = flock {
        flock.planned(image, base, &runs);
    }
    site.take_stores(image, base, plan);
    runs
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
