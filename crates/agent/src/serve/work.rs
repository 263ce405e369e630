//! This node's part of flocks that the nodes of its site send together: it takes images from the work table, one after the other,
//! and sends each to a node of the other site.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use drover_net::{MAX_ATTEMPTS, RateLimit};
use drover_store::nodes::{TakenUnit, UnitState};
use drover_teleport::progress::{Counters, SendEvent, WireTotals};
use drover_teleport::services::SiteNode;
use drover_teleport::{SendItem, SendLane, SendOptions, TeleportError, nodes_of, send_of_flock};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio::time::{MissedTickBehavior, sleep};

use super::server::{Duty, Server};
use crate::error::{Error, Result, one_line};
use crate::flocks::{JobOrder, UnitSaid, decode_item, is_in};
use crate::mounts::refuse_written;
use crate::node::Node;
use crate::signals::stopped;

/// How often a node looks for work, and tells of what it does.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How often it looks whether an image has arrived, and only waits for its delivery: then it takes the next one.
const ARRIVED_EVERY: Duration = Duration::from_millis(50);

/// Upper bound on the images that a node sends at once.
const MAX_AT_ONCE: usize = 8;

/// How long a node that stops waits until what it sends can be resumed.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// What a node sends in the time between two looks, in bytes, if it waits for others all the time.
const IDLE_BYTES: u64 = 64 << 10;

/// Upper bound on the addresses of the node that is chosen which are tried before one that is known to have worked.
const MAX_OWN_FIRST: usize = 4;

/// An image that this node sends.
struct Unit<N = Node> {
    node: Arc<N>,
    taken: TakenUnit,
    /// How many images of the job this node sends at once.
    at_once: usize,
    /// What all of them share.
    limit: Option<Arc<RateLimit>>,
    said: Mutex<UnitSaid>,
    counters: Arc<Counters>,
    wire: Arc<WireTotals>,
    /// Bytes that were sent at the last look.
    seen: AtomicU64,
}

/// The images that this node sends.
struct Doing<N = Node> {
    units: Vec<Arc<Unit<N>>>,
    /// Whether all of them wait, as for blocks that another node sends.
    idle: bool,
}

impl<N> Default for Doing<N> {
    fn default() -> Self {
        Doing {
            units: Vec::new(),
            idle: false,
        }
    }
}

impl<N> Doing<N> {
    fn places(&self) -> Vec<(String, i64)> {
        self.units.iter().map(|unit| unit.place()).collect()
    }

    /// The jobs of which it sends enough images. While these wait, it sends more.
    fn full(&self) -> Vec<String> {
        // What has arrived takes nothing of the link any more.
        let sent = || self.units.iter().filter(|unit| !unit.has_arrived());
        let of = |job: &String| sent().filter(|u| u.taken.job == *job).count();
        let full = sent().filter(|unit| of(&unit.taken.job) >= unit.at_once);
        match self.idle {
            true => Vec::new(),
            false => full.map(|unit| unit.taken.job.clone()).collect(),
        }
    }

    /// Looks whether anything was sent since the last time.
    fn look(&mut self) {
        let grown: u64 = self.units.iter().map(|unit| unit.grown()).sum();
        let has_begun = |unit: &Arc<Unit<N>>| unit.said().started.is_some();
        self.idle = self.units.iter().all(has_begun) && grown < IDLE_BYTES;
    }

    /// How many images have arrived, and wait for their delivery.
    fn arrived(&self) -> usize {
        self.units.iter().filter(|unit| unit.has_arrived()).count()
    }

    fn end(&mut self, at: &(String, i64)) {
        self.units.retain(|unit| unit.place() != *at);
    }

    fn add(&mut self, node: &Arc<N>, taken: TakenUnit) -> Arc<Unit<N>> {
        let order = JobOrder::decode(&taken.order).ok();
        let limit = order.as_ref().and_then(|order| order.limit);
        let mut same = self.units.iter().filter(|u| u.taken.job == taken.job);
        let limit = match same.next() {
            Some(other) => other.limit.clone(),
            None => limit.map(|rate| Arc::new(RateLimit::new(rate))),
        };
        let unit = Arc::new(Unit {
            node: Arc::clone(node),
            taken,
            at_once: order.map_or(1, |order| order.at_once.max(1) as usize),
            limit,
            said: Mutex::default(),
            counters: Arc::default(),
            wire: Arc::default(),
            seen: AtomicU64::new(0),
        });
        self.units.push(Arc::clone(&unit));
        self.idle = false;
        unit
    }
}

/// Takes work and does it, until the site stops.
pub async fn work(server: Arc<Server>) {
    let Some(node) = server.home.node() else {
        return;
    };
    if !matches!(server.duty, Duty::Site(_)) {
        return;
    }
    let mut stop = server.stop.clone();
    let mut running: JoinSet<(String, i64)> = JoinSet::new();
    let mut doing = Doing::default();
    let mut looks = tokio::time::interval(LOOK_EVERY);
    let mut ends = tokio::time::interval(ARRIVED_EVERY);
    ends.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let mut has_taken = false;
        if node.takes_work() && doing.units.len() < MAX_AT_ONCE {
            let (of, places, full) = (Arc::clone(&node), doing.places(), doing.full());
            let take = move || of.nodes().take_unit(of.token(), &places, &full);
            match tokio::task::spawn_blocking(take).await {
                Ok(Ok(Some(taken))) => {
                    has_taken = true;
                    let (unit, server) = (doing.add(&node, taken), Arc::clone(&server));
                    running.spawn(async move {
                        unit.run(&server).await;
                        unit.place()
                    });
                }
                Ok(Ok(None)) => {}
                Ok(Err(e)) => tracing::debug!("no work is taken: {e}"),
                // The panic was logged.
                Err(_) => {}
            }
        }
        if has_taken {
            continue;
        }
        let arrived = doing.arrived();
        let one_more = async {
            while doing.arrived() <= arrived {
                ends.tick().await;
            }
        };
        tokio::select! {
            () = stopped(&mut stop) => break,
            () = one_more, if arrived < doing.units.len() => {}
            () = node.told_of_changes() => {}
            _ = looks.tick() => doing.look(),
            Some(ended) = running.join_next() => match ended {
                Ok(at) => doing.end(&at),
                Err(e) => {
                    tracing::error!("an image is not sent any more: {e}");
                    // Which one is not known: those that are left are asked for again.
                    doing.units.clear();
                    running.abort_all();
                }
            },
        }
    }
    let all = async { while running.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(STOP_LIMIT, all).await;
}

impl<N> Unit<N> {
    fn place(&self) -> (String, i64) {
        (self.taken.job.clone(), self.taken.nth)
    }

    fn said(&self) -> MutexGuard<'_, UnitSaid> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, change: impl FnOnce(&mut UnitSaid)) {
        change(&mut self.said());
    }

    /// Whether all of it is at the destination, which has to make it durable and to name it.
    fn has_arrived(&self) -> bool {
        let walk_blocks = self.said().started.map_or(0, |started| started[0]);
        walk_blocks > 0 && Counters::get(&self.counters.done_blocks) >= walk_blocks
    }

    /// Bytes that were sent since this was asked for the last time.
    fn grown(&self) -> u64 {
        let sent = self.wire.sent();
        sent.saturating_sub(self.seen.swap(sent, Ordering::Relaxed))
    }
}

impl Unit {
    /// Tells the process that waits for it; false if this node is to stop.
    async fn tell(self: &Arc<Self>, state: UnitState) -> Result<bool> {
        let unit = Arc::clone(self);
        let tell = move || {
            let said = {
                let mut said = unit.said();
                said.counters = unit.counters.values();
                said.wire = (unit.wire.sent(), unit.wire.received());
                said.encode()
            };
            let at = (&*unit.taken.job, unit.taken.nth);
            unit.node
                .nodes()
                .say_unit(unit.node.token(), at, state, &said)
        };
        Ok(tokio::task::spawn_blocking(tell).await??)
    }

    async fn run(self: &Arc<Self>, server: &Arc<Server>) {
        let unit = self;
        let (halt, halted) = watch::channel(false);
        let sending = unit.send(server, &halted);
        tokio::pin!(sending);
        let mut stop = server.stop.clone();
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // It goes on being sent while the database is slow to be told.
        let mut told: Option<JoinHandle<Result<bool>>> = None;
        let sent = loop {
            tokio::select! {
                sent = &mut sending => break sent,
                () = stopped(&mut stop), if !*halt.borrow() => drop(halt.send_replace(true)),
                Some(goes_on) = until(&mut told) => {
                    told = None;
                    if goes_on.is_ok_and(|goes_on| goes_on.is_ok_and(|goes_on| !goes_on)) {
                        halt.send_replace(true);
                    }
                }
                _ = looks.tick() => {
                    if !unit.node.holds() {
                        halt.send_replace(true);
                    } else if told.is_none() {
                        let unit = Arc::clone(unit);
                        told = Some(tokio::spawn(async move { unit.tell(UnitState::Taken).await }));
                    }
                }
            }
        };
        // Before the end is told.
        until(&mut told).await;
        let state = match sent {
            Err(TeleportError::Stopped) => UnitState::Waiting,
            Ok(report) => {
                unit.say(|said| said.ended = Some(Ok(report)));
                UnitState::Done
            }
            Err(e) => {
                unit.say(|said| said.fail(&e.to_string()));
                UnitState::Failed
            }
        };
        tracing::info!(
            flock = unit.taken.job,
            image = unit.taken.nth,
            ?state,
            "sent an image of a flock"
        );
        // If nobody can be told, another node finds that the image is there.
        while let Err(e) = unit.tell(state).await {
            if unit.node.is_lost() || unit.node.has_left() || *server.stop.borrow() {
                return;
            }
            tracing::debug!("the end of an image cannot be told yet: {}", one_line(&e));
            sleep(LOOK_EVERY).await;
        }
    }

    async fn send(
        self: &Arc<Self>,
        server: &Server,
        halted: &watch::Receiver<bool>,
    ) -> Result<drover_teleport::progress::ImageReport, TeleportError> {
        let failed = |e: Error| TeleportError::Failed(one_line(&e));
        let order = JobOrder::decode(&self.taken.order).map_err(failed)?;
        let home = server.home.clone();
        let bytes = self.taken.item.clone();
        let item = tokio::task::spawn_blocking(move || {
            let item = decode_item(&bytes)?;
            must_be_in(&home.images_dir(), &item)?;
            refuse_written(&home, &item.path)?;
            Ok(item)
        });
        let item = item
            .await
            .map_err(|e| TeleportError::Failed(e.to_string()))?;
        let item = item.map_err(failed)?;
        let known = order.addresses.clone();
        let mut options = SendOptions {
            identity: server.identity.clone(),
            peer: order.peer,
            peer_name: order.peer_name,
            addresses: order.addresses,
            route: Arc::default(),
            limit: self.limit.clone(),
            dry_run: false,
            connections: order.connections,
            compress: order.compress,
            give_up_after: order.give_up_after,
            profiles: None,
        };
        let unit = Arc::clone(self);
        let on_event = Arc::new(move |event: SendEvent| match event {
            SendEvent::Started {
                walk_blocks,
                size_bytes,
                data_bytes,
                resumed_blocks,
                ..
            } => unit.say(|said| {
                said.started = Some([walk_blocks, size_bytes, data_bytes, resumed_blocks]);
                said.trouble.clear();
            }),
            SendEvent::Reconnecting { error, .. } => {
                unit.counters.reset();
                unit.say(|said| said.trouble(&error));
            }
            _ => {}
        });
        let lane = SendLane {
            on_event,
            counters: Arc::clone(&self.counters),
        };
        tracing::info!(flock = %order.flock, image = %item.name, "sends an image of a flock");
        let (began, mut halt) = (Instant::now(), halted.clone());
        loop {
            self.turn_to_node(&known, &mut options).await;
            let (item, lane, wire) = (item.clone(), lane.clone(), Arc::clone(&self.wire));
            let sent = send_of_flock(order.id, item, &options, lane, wire, halted).await;
            let trouble = match sent {
                Err(e) if e.retryable() || e.is_for_now() => e,
                sent => return sent,
            };
            // A node of the other site that cannot be reached now, or whose database is away.
            if began.elapsed() > options.give_up_after {
                return Err(trouble);
            }
            // None of it has arrived for sure: it goes on from what the next session says.
            self.counters.reset();
            self.say(|said| said.trouble(&trouble.to_string()));
            tokio::select! {
                () = sleep(LOOK_EVERY) => {}
                () = stopped(&mut halt) => return Err(TeleportError::Stopped),
            }
        }
    }

    /// Chooses the node of the other site.
    async fn turn_to_node(&self, known: &[String], options: &mut SendOptions) {
        // What the nodes say of themselves need not be reachable from here: what is known stays, and is asked first.
        options.addresses = distinct(known.iter().chain(&options.addresses));
        options.route = Arc::default();
        let nodes = nodes_of(options, &WireTotals::default()).await;
        options.route = Arc::default();
        let nodes = nodes.unwrap_or_default();
        if let Some((name, addresses)) = choose(&nodes, self.taken.nodes, known) {
            options.addresses = addresses;
            self.say(|said| said.go_to(&name));
        }
    }
}

/// Waits for what runs, if anything does. Cancel safe.
async fn until<T>(running: &mut Option<JoinHandle<T>>) -> Option<Result<T, JoinError>> {
    match running {
        Some(running) => Some(running.await),
        None => None,
    }
}

/// Fails unless the file of an image is in the directory that all nodes share.
fn must_be_in(images: &Path, item: &SendItem) -> Result<()> {
    match is_in(images, &item.path) {
        true => Ok(()),
        false => Err(Error::refused(format!(
            "{} is not in {}, the directory that the nodes of this site share",
            item.path.display(),
            images.display()
        ))),
    }
}

/// These addresses, each once; no more than are tried.
fn distinct<'a>(addresses: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for address in addresses {
        if out.len() < MAX_ATTEMPTS && !out.contains(address) {
            out.push(address.clone());
        }
    }
    out
}

/// The node that an image is sent to, and where: the one that receives the least, and of several such ones the one whose place is that
/// of this node among its own. Its own addresses come first, one that is known from before after some of them, those of other nodes
/// last.
fn choose(
    nodes: &[SiteNode],
    (of, own): (usize, usize),
    known: &[String],
) -> Option<(String, Vec<String>)> {
    let turn = own.checked_rem(of.max(1))?;
    let nodes = Vec::from_iter(nodes.iter().filter(|node| !node.addresses.is_empty()));
    let from_turn = |n: usize| (n + nodes.len() - turn % nodes.len()) % nodes.len();
    let (best, node) = nodes
        .iter()
        .enumerate()
        .min_by_key(|(n, node)| (node.transfers, from_turn(*n)))?;
    let others = nodes.iter().enumerate().filter(|(n, _)| *n != best);
    let others = others.flat_map(|(_, node)| &node.addresses);
    let (first, rest) = node
        .addresses
        .split_at(node.addresses.len().min(MAX_OWN_FIRST));
    let (best_known, known) = known.split_at(known.len().min(1));
    let own = first.iter().chain(best_known).chain(rest);
    Some((node.name.clone(), distinct(own.chain(known).chain(others))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_spread_by_order_and_the_least_busy_first() {
        let node = |name: &str, transfers| SiteNode {
            name: name.into(),
            addresses: vec![format!("{name}:1"), format!("{name}:2")],
            transfers,
        };
        let to = |nodes: &[SiteNode], of, own| choose(nodes, (of, own), &[]).map(|(name, _)| name);
        assert_eq!(to(&[], 2, 0), None);
        let two = [node("x", 0), node("y", 0)];
        assert_eq!(to(&two, 2, 0).unwrap(), "x");
        assert_eq!(to(&two, 2, 1).unwrap(), "y");
        assert_eq!(to(&two, 3, 2).unwrap(), "x");
        assert_eq!(to(&two[..1], 4, 3).unwrap(), "x");
        let busy = [node("x", 3), node("y", 1), node("z", 1)];
        assert_eq!(to(&busy, 2, 0).unwrap(), "y");
        assert_eq!(to(&busy, 3, 2).unwrap(), "z");
        let (_, addresses) = choose(&two, (2, 1), &[]).unwrap();
        assert_eq!(addresses, ["y:1", "y:2", "x:1", "x:2"]);
    }

    #[test]
    fn addresses_that_are_known_to_work_are_kept() {
        let node = |name: &str, count: usize| SiteNode {
            name: name.into(),
            addresses: (0..count).map(|n| format!("{name}:{n}")).collect(),
            transfers: 0,
        };
        let known = ["outside:1", "x:0", "outside:2"].map(String::from);
        // One without addresses cannot be reached.
        let nodes = [node("w", 0), node("x", 6), node("y", 20)];
        let (name, addresses) = choose(&nodes, (2, 0), &known).unwrap();
        assert_eq!(name, "x");
        let expected = "x:0 x:1 x:2 x:3 outside:1 x:4 x:5 outside:2 y:0";
        assert_eq!(addresses[..9], Vec::from_iter(expected.split(' ')));
        assert_eq!(addresses.len(), MAX_ATTEMPTS);
        assert_eq!(choose(&nodes[..1], (2, 0), &known), None);
        // All of the addresses of a large node leave room for one that is known.
        let (_, addresses) = choose(&nodes[2..], (2, 0), &known).unwrap();
        assert!(addresses.contains(&known[0]), "{addresses:?}");
    }

    fn order(at_once: u32) -> JobOrder {
        JobOrder {
            flock: drover_core::ImageName::new("shop").unwrap(),
            id: [3; 16],
            peer: drover_net::PeerKey([4; 32]),
            peer_name: "lyon".into(),
            addresses: Vec::new(),
            limit: None,
            connections: None,
            compress: None,
            give_up_after: Duration::ZERO,
            at_once,
        }
    }

    /// An image of a flock of which so many are sent at once.
    fn taken(at_once: u32, nth: i64) -> TakenUnit {
        TakenUnit {
            job: "j".into(),
            order: order(at_once).encode(),
            nth,
            item: Vec::new(),
            nodes: (1, 0),
        }
    }

    #[test]
    fn an_image_that_ends_does_not_make_the_others_idle() {
        let (mut doing, node) = (Doing::default(), Arc::new(()));
        let begin = |doing: &mut Doing<()>, nth| {
            let unit = doing.add(&node, taken(2, nth));
            unit.say(|said| said.started = Some([0; 4]));
            unit
        };
        let (long, other) = (begin(&mut doing, 0), begin(&mut doing, 1));
        assert_eq!(doing.full(), ["j", "j"]);
        long.wire.set_elsewhere(1 << 30, 0);
        other.wire.set_elsewhere(1 << 20, 0);
        doing.look();
        assert!(!doing.idle);
        doing.end(&long.place());
        other.wire.set_elsewhere(2 << 20, 0);
        doing.look();
        assert!(!doing.idle, "the other goes on");
        assert_eq!(doing.full(), [""; 0]);
        begin(&mut doing, 2);
        other.wire.set_elsewhere(3 << 20, 0);
        doing.look();
        assert_eq!(doing.full(), ["j", "j"]);
        // While both wait, there may be more.
        doing.look();
        assert!(doing.idle && doing.full().is_empty());
    }

    #[test]
    fn what_has_arrived_makes_room_for_the_next() {
        let (mut doing, node) = (Doing::default(), Arc::new(()));
        let unit = doing.add(&node, taken(1, 0));
        assert_eq!((doing.full(), doing.arrived()), (vec!["j".to_owned()], 0));
        unit.say(|said| said.started = Some([100, 0, 0, 0]));
        unit.counters.done_blocks.store(99, Ordering::Relaxed);
        assert_eq!((doing.full(), doing.arrived()), (vec!["j".to_owned()], 0));
        unit.counters.done_blocks.store(100, Ordering::Relaxed);
        assert_eq!((doing.full(), doing.arrived()), (Vec::new(), 1));
        doing.add(&node, taken(1, 1));
        assert_eq!((doing.full(), doing.arrived()), (vec!["j".to_owned()], 1));
        doing.end(&unit.place());
        assert_eq!((doing.full(), doing.arrived()), (vec!["j".to_owned()], 0));
    }
}
