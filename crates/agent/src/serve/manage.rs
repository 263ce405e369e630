//! Services for domains: add, remove, move an image.

use std::sync::Arc;

use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Code, Refusal};

use super::in_domain::InDomain;
use super::jobs;
use super::server::Server;
use crate::domains::{AddDomain, MoveImage, RemoveDomain, make, move_between, unmake};
use crate::error::{failed, refusal_of};

/// Handles requests about the domains of a site.
#[derive(Clone)]
pub struct Manage(pub Arc<Server>);

impl Handler<AddDomain> for Manage {
    async fn handle(
        &self,
        _: &Peer,
        AddDomain { name }: AddDomain,
        _: &mut Exchange<'_, AddDomain>,
    ) -> Result<(), Refusal> {
        let home = self.0.home.clone();
        let made = tokio::task::spawn_blocking(move || make(&home, &name)).await;
        let home = made.map_err(failed)?.map_err(refusal_of)?;
        self.0.sockets.listen(&home).map_err(refusal_of)
    }
}

impl Handler<RemoveDomain> for Manage {
    async fn handle(
        &self,
        _: &Peer,
        RemoveDomain { name }: RemoveDomain,
        _: &mut Exchange<'_, RemoveDomain>,
    ) -> Result<(), Refusal> {
        let server = &self.0;
        if !server.domains.close_unused(&name).await {
            let text = format!("the domain {name} is in use");
            return Err(Refusal::new(Code::Held, text));
        }
        let (home, domain) = (server.home.clone(), name.clone());
        let removed = tokio::task::spawn_blocking(move || unmake(&home, &domain)).await;
        removed.map_err(failed)?.map_err(refusal_of)?;
        server.sockets.close(&name);
        Ok(())
    }
}

impl Handler<MoveImage> for Manage {
    async fn handle(
        &self,
        peer: &Peer,
        MoveImage { name, to }: MoveImage,
        exchange: &mut Exchange<'_, MoveImage>,
    ) -> Result<(), Refusal> {
        let of = InDomain(Arc::clone(&self.0));
        let (here, there) = (of.of(&peer.domain).await?, of.of(&to).await?);
        if Arc::ptr_eq(&here.site, &there.site) {
            return Err(Refusal::new(Code::Failed, "it is in that domain already"));
        }
        let key = self.0.identity.key();
        let uses = (Arc::clone(&here), Arc::clone(&there));
        let (here, there) = (here.here(key), Arc::clone(&there.site));
        let job =
            move |progress: &mut dyn FnMut(u64, u64)| move_between(&here, &there, &name, progress);
        let moved = jobs::run(&self.0, exchange, uses, job).await;
        moved.map_err(failed)?.map_err(refusal_of)
    }
}
