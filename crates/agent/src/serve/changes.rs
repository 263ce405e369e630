//! Services for the changes that mounts made to this site's images: list, drop, merge.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use drover_core::ImageName;
use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Code, PeerKey, Refusal, Right};
use drover_store::Catalog;
use drover_store::changes::{Changes, all};

use super::jobs;
use super::ownership::{no_image, owns_changes};
use super::server::OfSite;
use crate::changes::{
    self, Author, DropChanges, Dropped, ImageChanges, ListChanges, Merged, Order, drop_at,
};
use crate::error::{Result as AgentResult, failed, refusal_of};
use crate::home::CleanUp;

impl OfSite {
    /// The changes to all images.
    async fn changes(&self) -> Result<Vec<Changes>, Refusal> {
        let state = self.domain.home.mounted_dir();
        let list = tokio::task::spawn_blocking(move || all(&state)).await;
        list.map_err(failed)?.map_err(failed)
    }

    /// Refuses to drop changes that do not belong to the caller.
    async fn must_own_changes(
        &self,
        peer: &Peer,
        name: &ImageName,
        earlier: bool,
    ) -> Result<(), Refusal> {
        let record = self.found(name).await?;
        let mut these = self.changes().await?;
        these.retain(|changes| changes.image == *name && changes.earlier == earlier);
        let its = |changes: &Changes| owns_changes(peer, changes, record.as_ref());
        if !these.is_empty() && these.iter().all(its) {
            return Ok(());
        }
        let record = record.as_ref().ok_or_else(|| no_image(name))?;
        self.must_own(peer, record)?;
        if these.is_empty() {
            return Ok(());
        }
        let text = format!("another site wrote changes to an earlier image called {name}");
        Err(Refusal::new(Code::Denied, text))
    }
}

impl Handler<ListChanges> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        _: ListChanges,
        _: &mut Exchange<'_, ListChanges>,
    ) -> Result<Vec<ImageChanges>, Refusal> {
        let mut list = self.changes().await?;
        let catalog = Arc::clone(&self.domain.catalog);
        if peer.rights.has(Right::Manage) {
            let known = move || -> Vec<_> {
                let known = |changes| ImageChanges::known(changes, catalog.as_ref());
                list.into_iter().map(known).collect()
            };
            return tokio::task::spawn_blocking(known).await.map_err(failed);
        }
        let peer = peer.clone();
        let its = move || -> AgentResult<Vec<ImageChanges>> {
            let images = catalog.images()?;
            list.retain(|changes| {
                let record = images.iter().find(|image| image.name == changes.image);
                let wrote = changes.writer.as_ref().map(|writer| PeerKey(writer.peer));
                wrote == Some(peer.key) || owns_changes(&peer, changes, record)
            });
            let shown = |changes| for_peer(ImageChanges::known(changes, catalog.as_ref()));
            Ok(list.into_iter().map(shown).collect())
        };
        let its = tokio::task::spawn_blocking(its).await;
        its.map_err(failed)?.map_err(failed)
    }
}

/// Changes as a peer sees them: without paths of this host.
fn for_peer(mut shown: ImageChanges) -> ImageChanges {
    shown.directory.clear();
    if let Some(problem) = &mut shown.problem {
        *problem = "cannot be read: the reason is in the log of its site".into();
    }
    shown
}

impl Handler<DropChanges> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        DropChanges { name, earlier }: DropChanges,
        _: &mut Exchange<'_, DropChanges>,
    ) -> Result<Dropped, Refusal> {
        if !peer.rights.has(Right::Manage) {
            self.must_own_changes(peer, &name, earlier).await?;
        }
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
        peer: &Peer,
        order: Order,
        exchange: &mut Exchange<'_, Order>,
    ) -> Result<Merged, Refusal> {
        let here = self.domain.here(self.server.identity.key());
        let author = match peer.rights.has(Right::Manage) {
            true => None,
            false => {
                let image = self.own_record(peer, &order.name).await?;
                let quotas = Arc::clone(&self.domain.quotas);
                Some(Author {
                    key: peer.key,
                    name: peer.name.clone(),
                    image,
                    may_take: Box::new(move |key, name, bytes| quotas.check(key, name, bytes)),
                })
            }
        };
        let stop = Arc::new(AtomicBool::new(false));
        let _stop = StopWhenDropped(Arc::clone(&stop));
        let job = move |progress: &mut dyn FnMut(u64, u64)| {
            changes::merge(&here, &order, author.as_ref(), progress, &stop)
        };
        let uses = Arc::clone(&self.domain);
        let merged = jobs::run(&self.server, exchange, uses, job).await;
        merged.map_err(failed)?.map_err(refusal_of)
    }
}
