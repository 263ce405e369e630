//! `send --flock` at a site of several nodes: each of them sends images of the flock, taken from the work table in the database.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use drover_agent::error::{Error, one_line};
use drover_agent::flocks::{JobOrder, UnitSaid, encode_item, is_in};
use drover_agent::home::Home;
use drover_agent::join;
use drover_agent::text::{bytes, clean, count};
use drover_core::ImageName;
use drover_net::{DEFAULT_DOMAIN, MAX_ATTEMPTS, random_id};
use drover_store::nodes::{JOB_TERM, JobInfo, NodeInfo, NodeState, Nodes, UnitState};
use drover_teleport::progress::{ImageReport, SendEvent, WireTotals};
use drover_teleport::services::SiteNode;
use drover_teleport::{
    FlockOrder, FlockSent, SendLane, SendOptions, TeleportError, end_flock, nodes_of, open_flock,
};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::out;

/// How often it is looked how far the nodes are.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// What a node has sent of a flock.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct NodeSent {
    /// Images that were delivered.
    pub images: usize,
    /// Bytes on its sockets.
    pub wire: (u64, u64),
}

/// The nodes of this site.
pub struct ByNodes(Arc<Nodes>);

/// How the flock is sent.
pub struct How<'a> {
    /// Where it goes.
    pub options: &'a SendOptions,
    /// Bytes a second of each node.
    pub limit: Option<u64>,
    /// Images that each node sends at once.
    pub at_once: usize,
}

/// The nodes that can send this flock; none if the site has none that serve, or the images are elsewhere. One that is atomic is sent by one process.
///
/// # Errors
/// When the database does not answer.
pub async fn find(home: &Home, order: &FlockOrder) -> Result<Option<ByNodes>> {
    let is_default = home.domain_name() == DEFAULT_DOMAIN;
    if home.config.catalog.is_none() || !is_default || order.items.is_empty() {
        return Ok(None);
    }
    let atomic = order.atomic;
    let (home, paths) = (home.clone(), order.items.iter());
    let paths: Vec<_> = paths.map(|item| item.path.clone()).collect();
    let found = tokio::task::spawn_blocking(move || {
        let nodes = join::nodes(&home)?;
        let listed = nodes.list().map_err(Error::from)?;
        let serves = |node: &NodeInfo| node.row.state == NodeState::Serving && node.left_ms > 0;
        let serving = listed.iter().filter(|node| serves(node)).count();
        if serving == 0 {
            return Ok(None);
        }
        if atomic {
            if serving > 1 {
                out::note(
                    "only this host sends: a flock whose images are named together goes to one node",
                );
            }
            return Ok(None);
        }
        let images = home.images_dir();
        match paths.iter().find(|path| !is_in(&images, path)) {
            None => Ok(Some(ByNodes(Arc::new(nodes)))),
            Some(path) => {
                out::note(&format!(
                    "only this host sends: {} is not in {}, the directory that the nodes of this site share",
                    path.display(),
                    images.display()
                ));
                Ok(None)
            }
        }
    });
    found.await?
}

/// The addresses that are known of a site, and then those of its nodes, the first of each before the others; no more than are tried.
fn all_addresses(known: &[String], nodes: &[SiteNode]) -> Vec<String> {
    let most = nodes.iter().map(|node| node.addresses.len()).max();
    let turns = (0..most.unwrap_or(0))
        .flat_map(|nth| nodes.iter().filter_map(move |node| node.addresses.get(nth)));
    let mut all: Vec<String> = Vec::new();
    for address in known.iter().chain(turns) {
        if all.len() < MAX_ATTEMPTS && !all.contains(address) {
            all.push(address.clone());
        }
    }
    all
}

/// What became of the units of a job.
#[derive(Default)]
struct Ended {
    reports: Vec<ImageReport>,
    lost: Vec<(String, TeleportError)>,
    /// By the places of the images.
    by: BTreeMap<u32, String>,
    nodes: BTreeMap<String, NodeSent>,
}

/// What was sent, by which node each image, and what each node has sent.
pub type Sent = (FlockSent, BTreeMap<u32, String>, BTreeMap<String, NodeSent>);

impl ByNodes {
    /// Has a flock sent; there is a lane for each image. Setting `stop` ends it in a resumable state.
    ///
    /// # Errors
    /// When the other site cannot be reached or refuses; when no node serves, or the database does not answer, for too long.
    pub async fn send(
        self,
        order: FlockOrder,
        how: How<'_>,
        lanes: Vec<SendLane>,
        wire: Arc<WireTotals>,
        stop: watch::Receiver<bool>,
    ) -> Result<Sent, TeleportError> {
        let id = random_id();
        open_flock(&order, id, how.options, &wire).await?;
        // The node that is known may die.
        let nodes = nodes_of(how.options, &wire).await.unwrap_or_default();
        let anywhere = SendOptions {
            addresses: all_addresses(&how.options.addresses, &nodes),
            route: Arc::default(),
            ..how.options.clone()
        };
        let job: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let terms = JobOrder {
            flock: order.name.clone(),
            id,
            peer: how.options.peer,
            peer_name: how.options.peer_name.clone(),
            addresses: anywhere.addresses.clone(),
            limit: how.limit,
            connections: how.options.connections,
            compress: how.options.compress,
            give_up_after: how.options.give_up_after,
            at_once: u32::try_from(how.at_once).unwrap_or(1),
        };
        let items = order.items.iter().map(encode_item).collect::<Vec<_>>();
        let (terms, at) = (terms.encode(), job.clone());
        self.ask(move |nodes| nodes.begin_job(&at, &terms, &items, JOB_TERM))
            .await?;
        let ended = self
            .follow(&job, &order, &how, &lanes, &wire, stop.clone())
            .await;
        // Else it ends with its term.
        if let Err(e) = self.ask(move |nodes| nodes.end_job(&job)).await {
            tracing::debug!("the job is left to its term: {e}");
        }
        let ended = ended?;
        let names: Vec<ImageName> = order.items.iter().map(|item| item.name.clone()).collect();
        let known = (&*names, &order);
        let info = end_flock(known, id, &ended.lost, &anywhere, &wire, stop).await?;
        let sent = FlockSent {
            reports: ended.reports,
            info,
            failed: ended.lost,
        };
        Ok((sent, ended.by, ended.nodes))
    }

    /// Calls the database.
    async fn ask<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Nodes) -> Result<T, drover_store::CatalogError> + Send + 'static,
    ) -> Result<T, TeleportError> {
        let nodes = Arc::clone(&self.0);
        let asked = tokio::task::spawn_blocking(move || f(&nodes)).await;
        let asked = asked.map_err(|e| TeleportError::Failed(e.to_string()))?;
        asked.map_err(|e| TeleportError::Failed(one_line(&Error::from(e))))
    }

    /// Shows what the nodes do, until all of it is over.
    async fn follow(
        &self,
        job: &str,
        order: &FlockOrder,
        how: &How<'_>,
        lanes: &[SendLane],
        wire: &WireTotals,
        mut stop: watch::Receiver<bool>,
    ) -> Result<Ended, TeleportError> {
        let mut watched = Watched::new(order, lanes);
        let mut since = Instant::now();
        let mut why = None;
        loop {
            let at = job.to_owned();
            let trouble = match self.ask(move |nodes| nodes.watch_job(&at)).await {
                Ok(Some(info)) => {
                    if watched.look(&info, wire) {
                        return Ok(watched.ended);
                    }
                    match info.nodes {
                        0 => Some("no node of this site is running".to_owned()),
                        _ => None,
                    }
                }
                Ok(None) => {
                    let text = "the nodes of this site have given the flock up, since this process stood still for too long; send it again";
                    return Err(TeleportError::Failed(text.into()));
                }
                Err(e) => Some(e.to_string()),
            };
            match &trouble {
                None => since = Instant::now(),
                Some(text) if since.elapsed() > how.options.give_up_after => {
                    return Err(TeleportError::Failed(text.clone()));
                }
                Some(text) if why.as_ref() != Some(text) => out::note(&format!("waiting: {text}")),
                Some(_) => {}
            }
            why = trouble;
            tokio::select! {
                () = sleep(LOOK_EVERY) => {}
                _ = stop.wait_for(|stop| *stop) => return Err(TeleportError::Stopped),
            }
        }
    }
}

/// What was shown of a job so far.
struct Watched<'a> {
    order: &'a FlockOrder,
    lanes: &'a [SendLane],
    /// Of each unit: what was said of it last, and whether it is over.
    said: Vec<(UnitSaid, bool)>,
    /// Bytes by unit and node, also of nodes that are gone.
    wire: HashMap<(usize, String), (u64, u64)>,
    ended: Ended,
}

impl<'a> Watched<'a> {
    fn new(order: &'a FlockOrder, lanes: &'a [SendLane]) -> Watched<'a> {
        Watched {
            order,
            lanes,
            said: vec![Default::default(); order.items.len()],
            wire: HashMap::new(),
            ended: Ended::default(),
        }
    }

    /// Shows what is new; whether all of it is over.
    fn look(&mut self, info: &JobInfo, wire: &WireTotals) -> bool {
        for unit in &info.units {
            let Ok(nth) = usize::try_from(unit.nth) else {
                continue;
            };
            let (Some(item), Some(lane)) = (self.order.items.get(nth), self.lanes.get(nth)) else {
                continue;
            };
            let said = UnitSaid::decode(&unit.said);
            let at = self.wire.entry((nth, unit.node.clone())).or_default();
            *at = (at.0.max(said.wire.0), at.1.max(said.wire.1));
            let (before, over) = &mut self.said[nth];
            if *over {
                continue;
            }
            lane.counters.set(&said.counters);
            if let Some([walk_blocks, size_bytes, data_bytes, resumed_blocks]) = said.started
                && said.started != before.started
            {
                (lane.on_event)(SendEvent::Started {
                    name: item.name.to_string(),
                    walk_blocks,
                    size_bytes,
                    data_bytes,
                    resumed_blocks,
                });
            }
            if !said.trouble.is_empty() && said.trouble != before.trouble {
                (lane.on_event)(SendEvent::Note {
                    path: item.path.clone(),
                    text: format!("node {}: {}", unit.node, said.trouble),
                });
            }
            if unit.state.is_over() {
                *over = true;
                self.ended.by.insert(nth as u32, unit.node.clone());
                let name = item.name.to_string();
                match (&said.ended, unit.state) {
                    (Some(Ok(report)), UnitState::Done) => {
                        (lane.on_event)(SendEvent::Delivered(Box::new(report.clone())));
                        self.ended.reports.push(report.clone());
                        let node = self.ended.nodes.entry(unit.node.clone());
                        node.or_default().images += 1;
                    }
                    (ended, _) => {
                        let error = match ended {
                            Some(Err(error)) => error.clone(),
                            _ => "its node does not say why".to_owned(),
                        };
                        let failed = TeleportError::Failed(error.clone());
                        (lane.on_event)(SendEvent::Failed {
                            name: name.clone(),
                            error,
                        });
                        self.ended.lost.push((name, failed));
                    }
                }
            }
            *before = said;
        }
        let mut sum = (0, 0);
        self.ended
            .nodes
            .values_mut()
            .for_each(|node| node.wire = (0, 0));
        for ((_, node), (sent, received)) in &self.wire {
            sum = (sum.0 + sent, sum.1 + received);
            if !node.is_empty() {
                let node = self.ended.nodes.entry(node.clone()).or_default();
                node.wire = (node.wire.0 + sent, node.wire.1 + received);
            }
        }
        wire.set_elsewhere(sum.0, sum.1);
        self.said.iter().all(|(_, over)| *over)
    }
}

/// What each node has sent, as JSON.
pub fn object(nodes: &BTreeMap<String, NodeSent>) -> Value {
    let of = |(name, node): (&String, &NodeSent)| {
        json!({
            "name": name, "images": node.images,
            "wire_sent_bytes": node.wire.0, "wire_received_bytes": node.wire.1,
        })
    };
    nodes.iter().map(of).collect()
}

/// What each node has sent, for people.
pub fn show(nodes: &BTreeMap<String, NodeSent>) {
    for (name, node) in nodes {
        out::note(&format!(
            "node {}: {}, {} transferred",
            clean(name),
            count(node.images, "image"),
            bytes(node.wire.0 + node.wire.1)
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_is_reached_by_an_address() {
        let node = |name: &str, count: usize| SiteNode {
            name: name.into(),
            addresses: (0..count).map(|n| format!("{name}:{n}")).collect(),
            transfers: 0,
        };
        let known = ["x:1", "outside:1"].map(String::from);
        let nodes = [node("w", 0), node("x", 3), node("y", 40)];
        let all = all_addresses(&known, &nodes);
        assert_eq!(all[..5], ["x:1", "outside:1", "x:0", "y:0", "y:1"]);
        assert_eq!(all.len(), MAX_ATTEMPTS);
        assert_eq!(all_addresses(&known, &[]), known);
    }
}
