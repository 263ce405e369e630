//! A dry run: the same batches, but nothing is written or recorded.

use std::sync::Arc;

use drover_index::Probe;
use drover_net::{Code, decode, encode};

use super::control::{Frames, Session, stopped};
use crate::TeleportError;
use crate::codec::{Batch, Need, Runs};
use crate::matching::{Link, LocalTeleporter, Matching, wrong_answer};
use crate::protocol::{Accept, End, Estimate, Offer, kind};
use crate::site::{SendEvent, SendStep};
use crate::teleporter::{Answer, Event};

/// Where to query which blocks would be matched.
enum Prober {
    Local(LocalTeleporter, Probe),
    /// A remote teleporter.
    Remote(Link),
}

impl Prober {
    fn open(matching: &Matching) -> Result<Self, TeleportError> {
        match matching {
            Matching::Local(teleporter) => Ok(Prober::Local(teleporter.clone(), Probe::default())),
            Matching::Remote(_) => matching.link().map(Prober::Remote),
        }
    }

    /// Whether each data block of the image's next batch would be matched.
    fn known(&mut self, batch: Arc<Batch>) -> Result<Vec<bool>, TeleportError> {
        match self {
            Prober::Local(teleporter, probe) => Ok(teleporter.lock().probe(probe, &batch)?),
            Prober::Remote(link) => match link.ask(Event::Probe(batch))? {
                Answer::Known(known) => Ok(known),
                _ => Err(wrong_answer()),
            },
        }
    }
}

impl Session {
    /// Answers the batches of a dry run. The needs in the reply are the blocks that the source would have to send; it
    /// does not send them.
    pub(super) async fn estimate(
        &self,
        offer: Offer,
        event: &mut SendEvent,
        frames: &mut Frames,
    ) -> Result<(), TeleportError> {
        let site = self.site.clone();
        let opened = tokio::task::spawn_blocking(move || Prober::open(&site.matching));
        let mut prober = match opened.await.map_err(|_| stopped())? {
            Ok(prober) => prober,
            Err(e) => {
                let message = format!(
                    "cannot estimate what would be sent: {e}; try again later, or send it without an estimate"
                );
                let refusal = TeleportError::refused(Code::Denied, message);
                return self.refuse_image(event, &refusal).await;
            }
        };
        self.send(kind::ACCEPT, encode(&Accept::default())).await?;
        let mut found = Estimate::default();
        loop {
            let frame = self.unless_idle(frames.next()).await?;
            self.shared.activity.touch();
            match frame.kind {
                kind::BATCH => {
                    let batch = Arc::new(Batch::decode(&frame.payload)?);
                    let probed = batch.clone();
                    let asked = tokio::task::spawn_blocking(move || {
                        let known = prober.known(probed);
                        (known, prober)
                    });
                    let known;
                    (known, prober) = asked.await.map_err(|_| stopped())?;
                    let known = known?;
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
                    event.what = SendStep::Estimated;
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
