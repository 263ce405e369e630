//! Rounds of a replica of the mount's disk.

use std::sync::Arc;

use drover_core::ImageName;
use drover_net::service::{Exchange, Handler};
use drover_net::{Code, Peer, Refusal};
use tokio::sync::{mpsc, watch};

use super::{Daemon, Requests};
use crate::error::{Error, Result, bail, failed, refusal_of};
use crate::mounts::replicating::{self, ReplicateDisk, Replicating, RoundDone};

impl Handler<ReplicateDisk> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        order: ReplicateDisk,
        exchange: &mut Exchange<'_, ReplicateDisk>,
    ) -> Result<RoundDone, Refusal> {
        let (daemon, stop) = (Arc::clone(&self.0), watch::Sender::new(false));
        let (events, mut heard) = mpsc::channel(replicating::EVENTS);
        let stopped = stop.subscribe();
        // Its end releases what is held.
        let round = tokio::spawn(async move { daemon.replicate(&order, events, stopped).await });
        while let Some(event) = heard.recv().await {
            if exchange.report(&event).await.is_err() {
                stop.send_replace(true);
            }
        }
        round.await.map_err(failed)?.map_err(refusal_of)
    }
}

impl Daemon {
    /// Why a move or a round cannot begin: there is another one.
    pub(super) fn in_use(&self, image: &ImageName) -> Error {
        let text = match self.moving.lock().is_some() {
            true => format!("{image} is being moved already"),
            false => format!(
                "{image} is being replicated, or read for a snapshot: wait for the end of that, or end `drover replicate`"
            ),
        };
        Error::coded(Code::Held, text)
    }

    async fn replicate(
        &self,
        order: &ReplicateDisk,
        events: mpsc::Sender<Replicating>,
        stop: watch::Receiver<bool>,
    ) -> Result<RoundDone> {
        let image = &order.image;
        let [disk] = self.disks.as_slice() else {
            return Err(Error::refused(format!(
                "{image} is served together with other images: a disk is replicated alone"
            )));
        };
        let Some(movable) = disk.movable() else {
            bail!("{} cannot be replicated", disk.target());
        };
        if disk.target().image != image.as_str() {
            bail!("{image} is not served by this mount");
        }
        let Ok(mut kept) = self.replicating.try_lock() else {
            return Err(self.in_use(image));
        };
        let scratch = order.scratch.clone();
        let scratch = scratch.unwrap_or_else(|| self.place.dir().to_owned());
        replicating::run(&self.home, &mut kept, movable, scratch, order, events, stop).await
    }
}
