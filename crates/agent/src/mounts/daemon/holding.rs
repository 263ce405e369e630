//! Lending the mount's disk as of one moment.

use std::sync::Arc;

use drover_net::service::{Exchange, Handler};
use drover_net::{Peer, Refusal};

use super::Requests;
use crate::error::{Error, refusal_of};
use crate::mounts::holding::{HoldDisk, Holding};

impl Handler<HoldDisk> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        order: HoldDisk,
        exchange: &mut Exchange<'_, HoldDisk>,
    ) -> Result<(), Refusal> {
        let daemon = Arc::clone(&self.0);
        let image = &order.image;
        let refused = |text: String| refusal_of(Error::refused(text));
        let [disk] = daemon.disks.as_slice() else {
            return Err(refused(format!(
                "{image} is served together with other images: a disk is held alone"
            )));
        };
        let movable = disk
            .movable()
            .filter(|_| disk.target().image == image.as_str());
        let Some(movable) = movable else {
            return Err(refused(format!("{} cannot be held", disk.target())));
        };
        let Ok(mut kept) = daemon.replicating.try_lock() else {
            return Err(refusal_of(daemon.in_use(image)));
        };
        if daemon.moving.lock().is_some() {
            return Err(refusal_of(daemon.in_use(image)));
        }
        let held = kept.held.hold(&order, movable, daemon.place.dir()).await;
        let (held, lent) = held.map_err(refusal_of)?;
        // Who has asked may go, also without a word.
        let note = match exchange.report(&held).await {
            Ok(()) => match exchange.next_progress().await {
                Ok(Holding::Read(note)) => Some(note),
                _ => None,
            },
            Err(_) => None,
        };
        let ended = tokio::task::spawn_blocking(move || drop(lent)).await;
        kept.held.rest(note);
        ended.map_err(crate::error::failed)
    }
}
