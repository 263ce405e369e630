//! Services for leases of this site's images: list, break.

use std::sync::Arc;

use drover_mount::server::WhyBroken;
use drover_net::Refusal;
use drover_net::service::{Exchange, Handler, Peer};

use super::server::OfSite;
use crate::error::failed;
use crate::mounts::{BreakLease, Broken, Held, ListLeases, leases_of};

impl Handler<ListLeases> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        _: ListLeases,
        _: &mut Exchange<'_, ListLeases>,
    ) -> Result<Vec<Held>, Refusal> {
        let devices = Arc::clone(&self.domain.devices);
        let leases = tokio::task::spawn_blocking(move || leases_of(&devices)).await;
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
