//! Services for the changes that mounts made to this site's images: list, drop, merge.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use drover_net::Refusal;
use drover_net::service::{Exchange, Handler, Peer};

use super::jobs;
use super::server::OfSite;
use crate::changes::{
    self, DropChanges, Dropped, ImageChanges, ListChanges, Merged, Order, drop_at, on_disk,
};
use crate::error::{failed, refusal_of};
use crate::home::CleanUp;

impl Handler<ListChanges> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        _: ListChanges,
        _: &mut Exchange<'_, ListChanges>,
    ) -> Result<Vec<ImageChanges>, Refusal> {
        let home = self.domain.home.clone();
        let list = tokio::task::spawn_blocking(move || on_disk(&home)).await;
        list.map_err(failed)?.map_err(failed)
    }
}

impl Handler<DropChanges> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        DropChanges { name, earlier }: DropChanges,
        _: &mut Exchange<'_, DropChanges>,
    ) -> Result<Dropped, Refusal> {
        let (home, devices) = (self.domain.home.clone(), Arc::clone(&self.domain.devices));
        let dropped = tokio::task::spawn_blocking(move || {
            CleanUp::of(&home).run(|| drop_at(&devices, &name, earlier))
        });
        dropped.await.map_err(failed)?.map_err(refusal_of)
    }
}

/// Cancels a job when its caller disconnects.
struct StopWhenDropped(Arc<AtomicBool>);

impl Drop for StopWhenDropped {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

impl Handler<Order> for OfSite {
    /// A caller that disconnects, or a site that stops, cancels the merge safely.
    async fn handle(
        &self,
        _: &Peer,
        order: Order,
        exchange: &mut Exchange<'_, Order>,
    ) -> Result<Merged, Refusal> {
        let here = self.domain.here(self.server.identity.key());
        let stop = Arc::new(AtomicBool::new(false));
        let _stop = StopWhenDropped(Arc::clone(&stop));
        let job = move |progress: &mut dyn FnMut(u64, u64)| {
            changes::merge(&here, &order, progress, &stop)
        };
        let merged = jobs::run(&self.server, exchange, job).await;
        merged.map_err(failed)?.map_err(refusal_of)
    }
}
