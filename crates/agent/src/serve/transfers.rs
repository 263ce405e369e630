//! Services for unfinished transfers: list, remove.

use std::sync::Arc;

use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Refusal, Right};
use drover_teleport::services::{ListTransfers, RemoveTransfer};

use super::server::OfSite;
use crate::error::{Error, failed, refusal_of};
use crate::home::CleanUp;
use crate::mounts::{Launched, ListLaunches};

/// Transfers per message of a list.
const TRANSFERS_AT_ONCE: usize = 256;

impl Handler<ListTransfers> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        _: ListTransfers,
        exchange: &mut Exchange<'_, ListTransfers>,
    ) -> Result<(), Refusal> {
        let site = Arc::clone(&self.domain.site);
        let list = tokio::task::spawn_blocking(move || site.unfinished()).await;
        let mut list = list.map_err(failed)??;
        if !peer.rights.has(Right::Admin) {
            list.retain(|transfer| transfer.sender == peer.key);
        }
        for some in list.chunks(TRANSFERS_AT_ONCE) {
            exchange.report(&some.to_vec()).await?;
        }
        Ok(())
    }
}

impl Handler<ListLaunches> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        _: ListLaunches,
        _: &mut Exchange<'_, ListLaunches>,
    ) -> Result<Vec<Launched>, Refusal> {
        Ok(self.domain.site.launches())
    }
}

impl Handler<RemoveTransfer> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        RemoveTransfer { key }: RemoveTransfer,
        _: &mut Exchange<'_, RemoveTransfer>,
    ) -> Result<(), Refusal> {
        let only_of = (!peer.rights.has(Right::Admin)).then_some(peer.key);
        let (site, home) = (Arc::clone(&self.domain.site), self.domain.home.clone());
        let removed = tokio::task::spawn_blocking(move || {
            if let Some(peer) = only_of
                && !crate::transfers::is_of(&site.unfinished()?, &key, &peer)
            {
                let message = "you have no unfinished transfer of that key here";
                return Err(Error::refused(message));
            }
            CleanUp::of(&home).run(|| Ok(site.remove_transfer(&key)?))
        });
        let transfer = removed.await.map_err(failed)?.map_err(refusal_of)?;
        tracing::info!(
            image = transfer.name,
            peer = transfer.peer,
            "removed an unfinished transfer"
        );
        Ok(())
    }
}
