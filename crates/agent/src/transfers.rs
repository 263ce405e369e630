//! Unfinished transfers, here and at peers.

use std::sync::Arc;

use drover_net::PeerKey;
use drover_store::SiteCatalog;
use drover_teleport::services::{ListTransfers, RemoveTransfer};
use drover_teleport::{TransferState, Unfinished, unfinished};

use crate::audit::{Audited, Event, Record};
use crate::error::{Context, Result};
use crate::home::{CleanUp, Home};
use crate::own::Own;
use crate::remote::Call;
use crate::site;

/// Upper bound on the transfers that a site may list.
const MAX_LISTED: usize = 1_000_000;

/// The unfinished transfers of this site, or of a peer.
///
/// # Errors
/// When the site cannot be reached.
pub async fn listed(home: &Home, peer: Option<&str>) -> Result<Vec<Unfinished>> {
    let Some(call) = Call::at(home, peer).await? else {
        let work = home.work_dir();
        return Ok(tokio::task::spawn_blocking(move || unfinished(&work)).await??);
    };
    let list = call.list(&ListTransfers, MAX_LISTED).await?;
    list.with_context(|| format!("more than {MAX_LISTED} unfinished transfers are listed"))
}

/// Removes an unfinished transfer, here or at a peer.
///
/// # Errors
/// When the site cannot be reached, or refuses.
pub async fn remove(home: &Home, at: Option<&str>, transfer: &Unfinished) -> Result<()> {
    let key = transfer.key.clone();
    if let Some(call) = Call::at(home, at).await? {
        return call.ask(&RemoveTransfer { key }, |()| {}).await;
    }
    let mut room = CleanUp::of(home);
    let damaged = transfer.state == TransferState::Damaged;
    room.run_async(|| remove_here(home, &key, damaged)).await?;
    let request = RemoveTransfer { key };
    home.audit().done(home.domain_name(), &request, &());
    Ok(())
}

async fn remove_here(home: &Home, key: &str, damaged: bool) -> Result<()> {
    let catalog: Arc<SiteCatalog> = Arc::new(site::open_catalog(home)?);
    let (site, key) = (Own::open(home, &catalog).await?, key.to_owned());
    site.run(move |site| match site.remove_transfer(&key) {
        // Opening the site has already removed it.
        Err(e) if damaged && e.refusal().is_some() => Ok(()),
        removed => removed.map(drop),
    })
    .await
}

impl Audited for RemoveTransfer {
    fn told(&self, _: Option<&()>) -> Option<Record> {
        let record = Record::new(Event::TransferRemoved);
        Some(record.detail(format!("key {}", self.key)))
    }
}

/// Whether a peer may remove a transfer: only if it is the sender.
pub fn is_of(list: &[Unfinished], key: &str, peer: &PeerKey) -> bool {
    list.iter().any(|t| t.key == key && t.sender == *peer)
}
