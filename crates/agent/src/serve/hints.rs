//! Services for the other nodes of this site: where the blocks of flocks are that several nodes receive.

use std::sync::Arc;

use drover_net::Refusal;
use drover_net::service::{Exchange, Handler, Peer};
use drover_teleport::Claimed;
use drover_teleport::services::{ClaimBlocks, LookAt, Looks};

use super::server::OfSite;
use crate::error::failed;

impl Handler<ClaimBlocks> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        claim: ClaimBlocks,
        _: &mut Exchange<'_, ClaimBlocks>,
    ) -> Result<Claimed, Refusal> {
        let site = Arc::clone(&self.domain.site);
        let claimed = tokio::task::spawn_blocking(move || site.claim(&claim));
        claimed.await.map_err(failed)
    }
}

impl Handler<LookAt> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        look: LookAt,
        _: &mut Exchange<'_, LookAt>,
    ) -> Result<Looks, Refusal> {
        let site = Arc::clone(&self.domain.site);
        let looked = tokio::task::spawn_blocking(move || site.look_at(&look));
        looked.await.map_err(failed)
    }
}
