//! Images of a flock: where their blocks came from, and the end of one that gets its name together with the others.

use std::sync::Arc;

use drover_core::Digest;
use drover_net::encode;

use super::control::Session;
use super::prepare::Prepared;
use crate::TeleportError;
use crate::destination::Destination;
use crate::flock::ImageState;
use crate::flock::live::Flock;
use crate::protocol::{Delivered, FlockDelivered, Offer, Origins, kind};
use crate::site::Site;
use crate::stages::{DestinationStages, Lap};

/// Every block of an image of an atomic flock is in place and verified, and the file is synced: it stays a transfer, which
/// needs nothing from its source any more, until the others are complete.
pub fn hold_back(
    site: &Arc<Site>,
    prepared: Prepared,
    flock: &Flock,
    origins: Origins,
    digest: Digest,
) -> Result<Delivered, TeleportError> {
    let (stages, mut lap) = (prepared.incoming.stages.clone(), Lap::start());
    let Prepared {
        transfer,
        machine,
        hold,
        matcher,
        transit,
        ..
    } = prepared;
    let (noted, _) = matcher.finish();
    if !noted {
        site.matcher_is_behind();
    }
    transfer.rest()?;
    let offer = &transfer.opening.offer;
    let mut delivered = with_origins(delivered_of(&machine, digest, &stages), origins);
    delivered.waits = true;
    let (name, size) = (&offer.name, offer.file_bytes);
    site.flock_image_done(flock, name, size, ImageState::Arrived, &delivered)?;
    // From here on it is a stopped transfer, whose blocks the others can have.
    drop((transit, transfer));
    lap.busy(&stages.deliver);
    drop(hold);
    tracing::debug!("complete, and waits for the rest of its flock");
    Ok(delivered)
}

/// What is told of an image whose blocks are all in place.
pub fn delivered_of(
    machine: &Destination,
    digest: Digest,
    stages: &DestinationStages,
) -> Delivered {
    let counts = machine.counts();
    Delivered {
        digest,
        matched_blocks: counts.matched_blocks,
        sent_blocks: counts.sent_blocks,
        zero_blocks: counts.zero_blocks,
        resumed_blocks: counts.resumed_blocks,
        matched: counts.matched,
        stages: Box::new(stages.times()),
        ..Delivered::default()
    }
}

/// Adds where the reused blocks came from. What was found by comparing was at the site.
pub fn with_origins(delivered: Delivered, origins: Origins) -> Delivered {
    let counted = origins.own + origins.flock;
    let site = delivered.matched_blocks.saturating_sub(counted);
    let origins = Some(Origins { site, ..origins });
    Delivered {
        origins,
        ..delivered
    }
}

impl Session {
    /// Says that an image is delivered, or complete.
    pub(super) async fn say_delivered(&self, delivered: Delivered) -> Result<(), TeleportError> {
        match self.shared.flock() {
            None => self.send(kind::DELIVERED, encode(&delivered)).await,
            Some(_) => {
                let delivered = FlockDelivered::from(delivered);
                self.send(kind::FLOCK_DELIVERED, encode(&delivered)).await
            }
        }
    }

    /// The site has the same image of that name already.
    pub(super) async fn say_unchanged(
        &self,
        offer: &Offer,
        delivered: Delivered,
    ) -> Result<(), TeleportError> {
        let Some(flock) = self.shared.flock().cloned() else {
            return self.say_delivered(delivered).await;
        };
        let delivered = with_origins(delivered, Origins::default());
        let (site, offer, noted) = (self.site.clone(), offer.clone(), delivered.clone());
        let done = tokio::task::spawn_blocking(move || {
            let (name, size) = (&offer.name, offer.file_bytes);
            site.flock_image_done(&flock, name, size, ImageState::Unchanged, &noted)
        });
        done.await.map_err(|_| super::control::stopped())??;
        self.say_delivered(delivered).await
    }
}
