//! A dry run: the same batches, but nothing is written and nothing remembered.

use std::sync::Arc;

use drover_net::{decode, encode};

use super::{Frames, Session, stopped};
use crate::TeleportError;
use crate::codec::{Batch, Need, Runs};
use crate::error::RefuseReason;
use crate::matching::Matching;
use crate::protocol::{Accept, End, Estimate, Offer, WINDOW_BATCHES, kind};

impl Session {
    /// Answers the batches of a dry run. The needs that go back are what the source would have to
    /// send; it does not.
    pub(super) async fn estimate(
        &self,
        offer: Offer,
        frames: &mut Frames,
    ) -> Result<(), TeleportError> {
        let Matching::Local(teleporter) = &self.site.matching else {
            let message =
                "a site with a lone teleporter cannot estimate; send without --dry-run".into();
            return self
                .refuse(
                    &offer.name,
                    &TeleportError::Refused {
                        reason: RefuseReason::Policy,
                        message,
                    },
                )
                .await;
        };
        let accept = Accept {
            resume_batch: 0,
            resumed_blocks: 0,
            window_batches: WINDOW_BATCHES,
        };
        self.send(kind::ACCEPT, encode(&accept)).await?;
        let mut found = Estimate::default();
        let mut probe = drover_index::Probe::default();
        loop {
            let frame = frames.next().await?;
            match frame.kind {
                kind::BATCH => {
                    let batch = Arc::new(Batch::decode(&frame.payload)?);
                    let (teleporter, probed) = (teleporter.clone(), batch.clone());
                    let asked = tokio::task::spawn_blocking(move || {
                        let known = teleporter.lock().probe(&mut probe, &probed);
                        (known, probe)
                    });
                    let known;
                    (known, probe) = asked.await.map_err(|_| stopped())?;
                    let known = known.map_err(|e| TeleportError::Remote(e.to_string()))?;
                    let first = batch.first_block();
                    let unknown = batch.data.iter().zip(&known).filter(|(_, known)| !**known);
                    let need = Need {
                        runs: unknown.map(|(i, _)| first + i).collect::<Runs>(),
                    };
                    found.zero_blocks += batch.data.blocks() - batch.data.count();
                    found.sent_blocks += need.runs.count();
                    found.matched_blocks += batch.data.count() - need.runs.count();
                    if !need.runs.is_empty() {
                        self.send(kind::NEED, need.encode()).await?;
                    }
                    self.send(kind::ACK, batch.index.to_le_bytes().to_vec())
                        .await?;
                }
                kind::END => {
                    let _: End = decode(&frame.payload)?;
                    tracing::debug!(image = %offer.name, "dry run ended");
                    return self.send(kind::ESTIMATE, encode(&found)).await;
                }
                kind::GIVE_UP => return Ok(()),
                other => {
                    return Err(TeleportError::Protocol(format!(
                        "frame {other:#04x} in a dry run"
                    )));
                }
            }
        }
    }
}
