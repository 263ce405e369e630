//! Services for the other nodes of this site: where the blocks of flocks are that several nodes receive.

use std::sync::Arc;

use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Code, Refusal};
use drover_teleport::Claimed;
use drover_teleport::services::{ClaimBlocks, LookAt, Looks};

use super::server::OfSite;
use crate::error::failed;

impl OfSite {
    /// Fails unless the caller has the key of this site: a peer may have been given the right of its nodes.
    fn must_be_node(&self, peer: &Peer) -> Result<(), Refusal> {
        match peer.key == self.server.identity.key() {
            true => Ok(()),
            false => Err(Refusal::new(
                Code::Denied,
                "only nodes of this site may ask",
            )),
        }
    }
}

impl Handler<ClaimBlocks> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        claim: ClaimBlocks,
        _: &mut Exchange<'_, ClaimBlocks>,
    ) -> Result<Claimed, Refusal> {
        self.must_be_node(peer)?;
        let site = Arc::clone(&self.domain.site);
        let claimed = tokio::task::spawn_blocking(move || site.claim(&claim));
        claimed.await.map_err(failed)
    }
}

impl Handler<LookAt> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        look: LookAt,
        _: &mut Exchange<'_, LookAt>,
    ) -> Result<Looks, Refusal> {
        self.must_be_node(peer)?;
        let site = Arc::clone(&self.domain.site);
        let looked = tokio::task::spawn_blocking(move || site.look_at(&look));
        looked.await.map_err(failed)
    }
}
