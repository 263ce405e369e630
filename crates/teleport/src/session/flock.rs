//! Sends a flock: the images of one job, several at once if wanted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{Digest, ImageName};
use drover_net::service::{Request, call};
use drover_net::{Backoff, random_id};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::source::{Lane, Sender};
use super::{OnEvent, SendItem, SendOptions, run};
use crate::TeleportError;
use crate::flock::FlockInfo;
use crate::progress::{Counters, ImageReport, WireTotals};
use crate::services::{EndFlock, FlockItem, OpenFlock};

/// What is sent as a flock.
#[derive(Debug, Clone)]
pub struct FlockOrder {
    /// Its name.
    pub name: ImageName,
    /// Whether all of its images are delivered, or none.
    pub atomic: bool,
    /// The images to send, in order.
    pub items: Vec<SendItem>,
    /// Images that are not sent because the destination has them, with their digests.
    pub unchanged: Vec<(ImageName, Digest)>,
    /// Images that cannot be sent, with the reasons. Not with `atomic`.
    pub failed: Vec<(ImageName, String)>,
}

/// One of several that send images at once: its progress.
#[derive(Clone)]
pub struct SendLane {
    /// Called for events of the images that it sends.
    pub on_event: OnEvent,
    /// Counters of the image that it sends.
    pub counters: Arc<Counters>,
}

/// How a flock was sent.
#[derive(Debug)]
pub struct FlockSent {
    /// The images that were sent and delivered, in the order in which that ended.
    pub reports: Vec<ImageReport>,
    /// What the destination knows of the flock.
    pub info: FlockInfo,
    /// The images that were not delivered, and why.
    pub failed: Vec<(String, TeleportError)>,
}

/// Sends a flock, as many images at once as there are lanes. Must run on a tokio runtime. Setting `stop` ends it in a resumable
/// state.
///
/// An image that is refused or cannot be read does not stop the others, unless the flock is atomic.
///
/// # Errors
/// The first error that reconnecting cannot fix; with an atomic flock, the error of any image.
pub async fn send_flock(
    order: FlockOrder,
    options: SendOptions,
    lanes: Vec<SendLane>,
    wire: Arc<WireTotals>,
    stop: watch::Receiver<bool>,
) -> Result<FlockSent, TeleportError> {
    let FlockOrder {
        name,
        atomic,
        items,
        unchanged,
        failed,
    } = order;
    let id = random_id();
    let sent = items.iter().map(|item| (&item.name, None));
    let there = unchanged.iter().map(|(name, digest)| (name, Some(*digest)));
    let lost = failed.iter().map(|(name, _)| (name, None));
    let images: Vec<FlockItem> = sent
        .chain(there)
        .chain(lost)
        .map(|(name, unchanged)| FlockItem {
            name: name.clone(),
            unchanged,
        })
        .collect();
    let places: Vec<String> = images.iter().map(|image| image.name.to_string()).collect();
    let open = OpenFlock {
        name,
        id,
        atomic,
        images,
    };
    ask(&open, &options, &wire).await?;
    let lane = Lane {
        flock: id,
        goes_on: !atomic,
        queue: Arc::new(Mutex::new(VecDeque::from(items))),
    };
    let (halt, halted) = watch::channel(false);
    let mut senders = JoinSet::new();
    for SendLane { on_event, counters } in lanes {
        let mut sender = Sender::new(
            Vec::new(),
            options.clone(),
            on_event.clone(),
            counters,
            // What the others send meanwhile is not this one's.
            Arc::new(WireTotals::part_of(&wire)),
            halted.clone(),
        );
        sender.in_lane(lane.clone());
        let (options, halted) = (options.clone(), halted.clone());
        senders.spawn(async move {
            let ended = match sender.is_over() {
                true => Ok(()),
                false => run(&mut sender, &options, &on_event, &halted).await,
            };
            let current = sender.current();
            (sender.into_parts(), current, ended)
        });
    }
    let (mut reports, mut lost, mut fatal) = (Vec::new(), Vec::new(), None);
    let mut stopping = stop.clone();
    loop {
        let next = tokio::select! {
            next = senders.join_next() => next,
            _ = stopping.wait_for(|stop| *stop), if !*halt.borrow() => {
                halt.send_replace(true);
                continue;
            }
        };
        let Some(next) = next else { break };
        let ((done, given_up), current, ended) =
            next.map_err(|e| TeleportError::Failed(e.to_string()))?;
        reports.extend(done);
        lost.extend(given_up);
        if let Err(e) = ended {
            halt.send_replace(true);
            // What ended the others is not why.
            if !matches!(fatal, Some((_, ref first)) if !matches!(first, TeleportError::Stopped)) {
                fatal = Some((current, e));
            }
        }
    }
    let place = |name: &String| places.iter().position(|place| place == name);
    let gave_up = |failed: Vec<u32>, why: String| EndFlock { id, failed, why };
    if let Some((current, error)) = fatal {
        // Said to the destination so that its list is right; what came is kept in any case.
        if atomic && !matches!(error, TeleportError::Stopped) && !error.retryable() {
            let failed = current.iter().filter_map(place).map(|nth| nth as u32);
            let end = gave_up(failed.collect(), error.to_string());
            let _ = ask(&end, &options, &wire).await;
        }
        return Err(error);
    }
    let unread = failed
        .iter()
        .map(|(name, why)| (name.to_string(), why.clone()));
    let given_up = lost.iter().map(|(name, e)| (name.clone(), e.to_string()));
    let all: Vec<(String, String)> = unread.chain(given_up).collect();
    let why = all.first().map(|(name, why)| format!("{name}: {why}"));
    let failed = all.iter().filter_map(|(name, _)| place(name));
    let failed = failed.map(|nth| nth as u32).collect();
    let end = gave_up(failed, why.unwrap_or_default());
    let info = ask_again(&end, &options, &wire, stop).await?;
    Ok(FlockSent {
        reports,
        info,
        failed: lost,
    })
}

/// Calls the destination.
async fn ask<R: Request<Progress = ()>>(
    request: &R,
    options: &SendOptions,
    wire: &WireTotals,
) -> Result<R::Reply, TeleportError> {
    let connection = options.connect(wire).await?;
    Ok(call(connection, request, |()| {}).await?)
}

/// Calls the destination, again and again while the connection breaks.
async fn ask_again<R: Request<Progress = ()>>(
    request: &R,
    options: &SendOptions,
    wire: &WireTotals,
    mut stop: watch::Receiver<bool>,
) -> Result<R::Reply, TeleportError> {
    let began = Instant::now();
    let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(20));
    loop {
        let error = match ask(request, options, wire).await {
            Ok(reply) => return Ok(reply),
            Err(e) if !e.retryable() || began.elapsed() > options.give_up_after => return Err(e),
            Err(e) => e,
        };
        tracing::debug!(%error, "the end of the flock is said again");
        tokio::select! {
            () = tokio::time::sleep(backoff.next_delay()) => {}
            _ = stop.wait_for(|stop| *stop) => return Err(TeleportError::Stopped),
        }
    }
}
