//! What belongs to a caller: only its owner, or a peer with `admin`, shares and removes an image, or merges its changes.

use std::sync::Arc;

use drover_core::ImageName;
use drover_net::service::Peer;
use drover_net::{Code, Refusal, Right};
use drover_store::changes::Changes;
use drover_store::{Catalog, ImageRecord};

use super::server::OfSite;
use crate::error::failed;
use crate::rights::must_have;

impl OfSite {
    /// The record of the image of that name; refuses when there is none.
    pub async fn record(&self, name: &ImageName) -> Result<ImageRecord, Refusal> {
        self.found(name).await?.ok_or_else(|| no_image(name))
    }

    /// The record of the image of that name, which must belong to the caller.
    pub async fn own_record(&self, peer: &Peer, name: &ImageName) -> Result<ImageRecord, Refusal> {
        let record = self.record(name).await?;
        self.must_own(peer, &record)?;
        Ok(record)
    }

    /// The record of the image of that name, if there is one.
    pub async fn found(&self, name: &ImageName) -> Result<Option<ImageRecord>, Refusal> {
        let (catalog, name) = (Arc::clone(&self.domain.catalog), name.clone());
        let record = tokio::task::spawn_blocking(move || catalog.by_name(&name)).await;
        record.map_err(failed)?.map_err(failed)
    }

    /// Refuses unless an image belongs to the caller.
    pub fn must_own(&self, peer: &Peer, record: &ImageRecord) -> Result<(), Refusal> {
        if owns(peer, record) {
            return Ok(());
        }
        must_have(peer, Right::Admin, &self.server.name).map_err(|refusal| {
            let text = format!(
                "{} does not belong to your site, and {refusal}",
                record.name
            );
            Refusal::new(refusal.code, text)
        })
    }
}

/// The refusal for an image that there is not.
pub fn no_image(name: &ImageName) -> Refusal {
    Refusal::new(Code::NotFound, format!("there is no image called {name}"))
}

/// Whether an image belongs to a caller, who may then do with it what its site's user may.
pub fn owns(peer: &Peer, record: &ImageRecord) -> bool {
    peer.rights.has(Right::Admin) || record.owner == Some(peer.key)
}

/// Whether changes belong to a caller: to the owner of their image, or, when that was removed or replaced, to who wrote them
/// last. `record` is that of the image of this name now.
pub fn owns_changes(peer: &Peer, changes: &Changes, record: Option<&ImageRecord>) -> bool {
    let last = changes.writer.as_ref().map(|writer| writer.peer);
    let over = record.filter(|record| {
        let is_base = |base| base == record.digest;
        !changes.earlier && changes.base.is_none_or(is_base)
    });
    match over {
        Some(record) => owns(peer, record),
        None => peer.rights.has(Right::Admin) || last == Some(peer.key.0),
    }
}
