//! The site as one of several nodes: what it does when its term is over, when another has taken over from it, and when others
//! have changed something.

use std::sync::Arc;
use std::time::Duration;

use drover_net::Ticket;
use drover_teleport::Site;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::server::{Duty, Server};
use crate::error::{Error, Result, one_line};
use crate::node::Node;
use crate::signals::stopped;

/// How often the term is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// How often the catalogs are looked at when nobody tells of changes.
const POLL_EVERY: Duration = Duration::from_secs(10);

/// The addresses of a site for its tickets: those of this node, and as many of the others as there is room for.
///
/// # Errors
/// When the database is away.
pub fn addresses(node: &Node, own: Vec<String>) -> Result<Vec<String>> {
    let others = node.nodes().advertise(node.token(), &own)?;
    let firsts = others.iter().filter_map(|theirs| theirs.first());
    let (first, rest) = own.split_at(own.len().min(1));
    let all = first
        .iter()
        .chain(firsts)
        .chain(rest)
        .chain(others.iter().flatten());
    let mut out: Vec<String> = Vec::new();
    for address in all {
        if out.len() < Ticket::MAX_ADDRESSES && !out.contains(address) {
            out.push(address.clone());
        }
    }
    Ok(out)
}

/// The sites of all domains that are open.
fn sites(server: &Server) -> Vec<Arc<Site>> {
    let Duty::Site(domain) = &server.duty else {
        return Vec::new();
    };
    let others = server.domains.open().into_iter();
    let others = others.map(|(_, domain)| Arc::clone(&domain.site));
    std::iter::once(Arc::clone(&domain.site))
        .chain(others)
        .collect()
}

/// Ends sessions while the term of this node is over; returns when another node has taken over from it.
pub async fn lost(server: Arc<Server>) -> Error {
    let Some(node) = server.home.node() else {
        return std::future::pending().await;
    };
    let mut held = true;
    loop {
        sleep(LOOK_EVERY).await;
        if node.is_lost() {
            sites(&server).iter().for_each(|site| site.end_sessions());
            return Error::refused(format!(
                "the node {} was taken for dead: it stood still, or could not reach the database, for longer than its term; another node has taken over, and this one can be started again",
                node.name()
            ));
        }
        let holds = node.holds();
        if !holds {
            sites(&server).iter().for_each(|site| site.end_sessions());
        }
        if std::mem::replace(&mut held, holds) != holds {
            match holds {
                true => tracing::info!("this node has a term again"),
                false => tracing::warn!(
                    "the term of this node is over, since the database does not answer: it receives nothing until it has one again"
                ),
            }
        }
    }
}

/// Learns of what other nodes have changed, and delivers what was complete at those that are gone, until the site stops.
pub async fn follow(server: Arc<Server>) {
    let Some(node) = server.home.node() else {
        return;
    };
    let gone = Arc::new(Notify::new());
    let tell = Arc::clone(&gone);
    node.on_take_over(move || tell.notify_one());
    let mut stop = server.stop.clone();
    loop {
        let wait = {
            let node = Arc::clone(&node);
            tokio::task::spawn_blocking(move || node.nodes().wait_for_change(POLL_EVERY))
        };
        let take_over = tokio::select! {
            () = stopped(&mut stop) => return,
            _ = wait => false,
            () = gone.notified() => true,
        };
        node.tell_of_changes();
        let sites = sites(&server);
        let work = move || {
            for site in sites {
                if let Err(e) = site.refresh() {
                    tracing::debug!(
                        "the catalog cannot be read again: {}",
                        one_line(&Error::from(e))
                    );
                    continue;
                }
                if take_over {
                    let done = site.take_over();
                    let done = done.unwrap_or_else(|e| vec![e.to_string()]);
                    done.iter()
                        .for_each(|line| tracing::info!("taken over: {line}"));
                }
            }
        };
        // The panic was logged; continue with the next round.
        let _ = tokio::task::spawn_blocking(work).await;
    }
}
