//! Services for flocks: begin one, end one, list them.

use std::sync::Arc;

use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Code, Refusal, Right};
use drover_store::nodes::NodeState;
use drover_teleport::services::{EndFlock, ListFlocks, ListNodes, OpenFlock, SiteNode};
use drover_teleport::{FlockInfo, TeleportError};

use super::server::{Common, OfSite};
use crate::error::failed;

impl Handler<OpenFlock> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        order: OpenFlock,
        _: &mut Exchange<'_, OpenFlock>,
    ) -> Result<(), Refusal> {
        let (site, peer) = (Arc::clone(&self.domain.site), peer.clone());
        let opened =
            tokio::task::spawn_blocking(move || site.open_flock(&peer.key, &peer.name, order));
        opened.await.map_err(failed)?.map_err(of)
    }
}

impl Handler<EndFlock> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        end: EndFlock,
        _: &mut Exchange<'_, EndFlock>,
    ) -> Result<FlockInfo, Refusal> {
        let (site, peer) = (Arc::clone(&self.domain.site), peer.key);
        let ended = tokio::task::spawn_blocking(move || site.end_flock(&peer, &end));
        let info = ended.await.map_err(failed)?.map_err(of)?;
        tracing::info!(
            flock = %info.record.name,
            peer = info.record.peer_name,
            state = ?info.record.state,
            images = info.record.images.len(),
            "a flock has ended"
        );
        Ok(info)
    }
}

impl Handler<ListFlocks> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        _: ListFlocks,
        exchange: &mut Exchange<'_, ListFlocks>,
    ) -> Result<(), Refusal> {
        let site = Arc::clone(&self.domain.site);
        let mut all = tokio::task::spawn_blocking(move || site.flocks())
            .await
            .map_err(failed)?;
        if !peer.rights.has(Right::Admin) {
            all.retain(|flock| flock.record.peer == peer.key);
        }
        for flock in all {
            exchange.report(&vec![flock]).await?;
        }
        Ok(())
    }
}

impl Handler<ListNodes> for Common {
    async fn handle(
        &self,
        _: &Peer,
        _: ListNodes,
        _: &mut Exchange<'_, ListNodes>,
    ) -> Result<Vec<SiteNode>, Refusal> {
        let Some(node) = self.0.home.node() else {
            return Ok(Vec::new());
        };
        let listed = tokio::task::spawn_blocking(move || node.nodes().list()).await;
        let listed = listed.map_err(failed)?.map_err(|e| {
            tracing::warn!("the nodes of this site are not known now: {e}");
            Refusal::new(
                Code::Unavailable,
                "the database of the site does not answer",
            )
        })?;
        let serving = listed
            .into_iter()
            .filter(|node| node.row.state == NodeState::Serving);
        let of = serving.map(|node| SiteNode {
            name: node.name,
            addresses: node.row.addresses,
            transfers: u32::try_from(node.transfers).unwrap_or(u32::MAX),
        });
        Ok(of.collect())
    }
}

/// Without files of this site; its log has them.
fn of(error: TeleportError) -> Refusal {
    tracing::warn!(%error, "a flock is refused");
    error.for_peer()
}
