//! Services for leases of this site's images: list, break, look, hand over.

use std::sync::Arc;

use drover_mount::protocol::{ChangesSeen, HandOverLease, LeaseSeen, LookAtChanges, LookAtLease};
use drover_mount::server::WhyBroken;
use drover_net::Refusal;
use drover_net::service::{Exchange, Handler, Peer};

use super::server::{Common, OfSite};
use crate::error::failed;
use crate::mounts::{BreakLease, Broken, Held, ListLeases};

impl Handler<ListLeases> for Common {
    async fn handle(
        &self,
        _: &Peer,
        _: ListLeases,
        _: &mut Exchange<'_, ListLeases>,
    ) -> Result<Vec<Held>, Refusal> {
        let server = Arc::clone(&self.0);
        let leases = tokio::task::spawn_blocking(move || server.leases()).await;
        leases.map_err(failed)?.map_err(failed)
    }
}

impl Handler<BreakLease> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        BreakLease { name }: BreakLease,
        _: &mut Exchange<'_, BreakLease>,
    ) -> Result<Broken, Refusal> {
        let broken = self.domain.break_lease(&name, WhyBroken::ByUser).await;
        broken.map_err(failed)
    }
}

impl Handler<LookAtLease> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        ask: LookAtLease,
        _: &mut Exchange<'_, LookAtLease>,
    ) -> Result<LeaseSeen, Refusal> {
        self.domain.devices.look_at_lease(peer, ask).await
    }
}

impl Handler<LookAtChanges> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        ask: LookAtChanges,
        _: &mut Exchange<'_, LookAtChanges>,
    ) -> Result<ChangesSeen, Refusal> {
        self.domain.devices.look_at_changes(peer, ask).await
    }
}

impl Handler<HandOverLease> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        ask: HandOverLease,
        _: &mut Exchange<'_, HandOverLease>,
    ) -> Result<String, Refusal> {
        self.domain.devices.hand_over(peer, ask).await
    }
}
