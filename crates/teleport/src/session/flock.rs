//! Sends a flock: the images of one job, several at once if wanted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{Digest, ImageName};
use drover_net::service::{Request, call};
use drover_net::{Backoff, Code, random_id};
use drover_store::nodes::MAX_NODES;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::source::{Lane, Sender};
use super::{OnEvent, SendItem, SendOptions, run};
use crate::TeleportError;
use crate::flock::FlockInfo;
use crate::progress::{Counters, ImageReport, WireTotals};
use crate::services::{EndFlock, FlockItem, ListNodes, OpenFlock, SiteNode};

/// Upper bound on the addresses of a node of the destination.
const MAX_NODE_ADDRESSES: usize = 64;

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
    let mut order = order;
    let id = random_id();
    open_flock(&order, id, &options, &wire).await?;
    let items = std::mem::take(&mut order.items);
    let names: Vec<ImageName> = items.iter().map(|item| item.name.clone()).collect();
    let places = places_of(&names, &order);
    let atomic = order.atomic;
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
    if let Some((current, error)) = fatal {
        // Said to the destination so that its list is right; what came is kept in any case.
        if atomic && !matches!(error, TeleportError::Stopped) && !error.retryable() {
            let place = |name: &String| places.iter().position(|place| place == name);
            let failed = current.iter().filter_map(place).map(|nth| nth as u32);
            let end = EndFlock {
                id,
                failed: failed.collect(),
                why: error.to_string(),
            };
            let _ = ask(&end, &options, &wire).await;
        }
        return Err(error);
    }
    let info = end_flock((&names, &order), id, &lost, &options, &wire, stop).await?;
    Ok(FlockSent {
        reports,
        info,
        failed: lost,
    })
}

/// The names of the images of a flock, in the order in which the destination knows them.
fn places_of(names: &[ImageName], order: &FlockOrder) -> Vec<String> {
    let there = order.unchanged.iter().map(|(name, _)| name);
    let lost = order.failed.iter().map(|(name, _)| name);
    let all = names.iter().chain(there).chain(lost);
    all.map(ImageName::to_string).collect()
}

/// Begins a flock at the destination, under this number.
///
/// # Errors
/// When the destination cannot be reached or refuses.
pub async fn open_flock(
    order: &FlockOrder,
    id: [u8; 16],
    options: &SendOptions,
    wire: &WireTotals,
) -> Result<(), TeleportError> {
    let sent = order.items.iter().map(|item| (&item.name, None));
    let there = order.unchanged.iter().map(|(name, d)| (name, Some(*d)));
    let lost = order.failed.iter().map(|(name, _)| (name, None));
    let images = sent.chain(there).chain(lost).map(|(name, unchanged)| {
        let name = name.clone();
        FlockItem { name, unchanged }
    });
    let open = OpenFlock {
        name: order.name.clone(),
        id,
        atomic: order.atomic,
        images: images.collect(),
    };
    ask(&open, options, wire).await
}

/// Ends a flock of images with these `names` at the destination, of which some were `lost`.
///
/// # Errors
/// When the destination cannot be reached for too long, or refuses.
pub async fn end_flock(
    (names, order): (&[ImageName], &FlockOrder),
    id: [u8; 16],
    lost: &[(String, TeleportError)],
    options: &SendOptions,
    wire: &WireTotals,
    stop: watch::Receiver<bool>,
) -> Result<FlockInfo, TeleportError> {
    let unread = order.failed.iter();
    let unread = unread.map(|(name, why)| (name.to_string(), why.clone()));
    let given_up = lost.iter().map(|(name, e)| (name.clone(), e.to_string()));
    let all: Vec<(String, String)> = unread.chain(given_up).collect();
    let why = all.first().map(|(name, why)| format!("{name}: {why}"));
    let places = places_of(names, order);
    let place = |name: &String| places.iter().position(|place| place == name);
    let failed = all.iter().filter_map(|(name, _)| place(name));
    let end = EndFlock {
        id,
        failed: failed.map(|nth| nth as u32).collect(),
        why: why.unwrap_or_default(),
    };
    ask_again(&end, options, wire, stop).await
}

/// Sends one image of a flock that was begun, perhaps by another process. Setting `stop` ends it in a resumable state.
///
/// # Errors
/// Why it is not delivered.
pub async fn send_of_flock(
    flock: [u8; 16],
    item: SendItem,
    options: &SendOptions,
    SendLane { on_event, counters }: SendLane,
    wire: Arc<WireTotals>,
    stop: &watch::Receiver<bool>,
) -> Result<ImageReport, TeleportError> {
    let events = on_event.clone();
    let mut sender = Sender::new(
        vec![item],
        options.clone(),
        on_event,
        counters,
        wire,
        stop.clone(),
    );
    sender.in_lane(Lane {
        flock,
        goes_on: false,
        queue: Arc::default(),
    });
    run(&mut sender, options, &events, stop).await?;
    let (reports, _) = sender.into_parts();
    let report = reports.into_iter().next();
    report.ok_or_else(|| TeleportError::Failed("the image was not sent".into()))
}

/// The nodes of the destination that take images; none if it is one process, or does not know.
///
/// # Errors
/// When it cannot be reached, or names too many.
pub async fn nodes_of(
    options: &SendOptions,
    wire: &WireTotals,
) -> Result<Vec<SiteNode>, TeleportError> {
    match ask(&ListNodes, options, wire).await {
        Err(TeleportError::Refused(refusal)) if refusal.code == Code::Unsupported => Ok(Vec::new()),
        nodes => may_be(nodes?),
    }
}

/// Fails unless a site can have such nodes.
fn may_be(nodes: Vec<SiteNode>) -> Result<Vec<SiteNode>, TeleportError> {
    let fits = |node: &SiteNode| node.addresses.len() <= MAX_NODE_ADDRESSES;
    match nodes.len() <= MAX_NODES && nodes.iter().all(fits) {
        true => Ok(nodes),
        false => {
            let text = "the destination names too many nodes, or addresses of a node";
            Err(TeleportError::Protocol(text.into()))
        }
    }
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
            Err(e) if began.elapsed() > options.give_up_after => return Err(e),
            Err(e) if !e.retryable() && !e.is_for_now() => return Err(e),
            Err(e) => e,
        };
        tracing::debug!(%error, "the end of the flock is said again");
        tokio::select! {
            () = tokio::time::sleep(backoff.next_delay()) => {}
            _ = stop.wait_for(|stop| *stop) => return Err(TeleportError::Stopped),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_has_no_more_nodes_and_addresses_than_it_can() {
        let site = |nodes, addresses| {
            let node = SiteNode {
                name: "n".into(),
                addresses: vec!["192.0.2.1:1".into(); addresses],
                transfers: 0,
            };
            may_be(vec![node; nodes])
        };
        assert_eq!(
            site(MAX_NODES, MAX_NODE_ADDRESSES).unwrap().len(),
            MAX_NODES
        );
        assert!(site(MAX_NODES + 1, 0).is_err());
        assert!(site(1, MAX_NODE_ADDRESSES + 1).is_err());
    }
}
