//! The images of a session, one after the other: offered, prepared, driven to completion.

use std::sync::Arc;

use drover_net::{Frame, decode, encode};
use tokio::sync::mpsc;

use super::compare::Compared;
use super::control::{Frames, Session, stopped, wait_true};
use super::event::DriverEvent;
use super::{driver, prepare};
use crate::TeleportError;
use crate::codec::Batch;
use crate::destination::Event;
use crate::protocol::{Accept, End, GiveUp, LAYOUT_PART_BYTES, Offer, kind};
use crate::session::shared::Progress;

/// Events queued between the sockets and a driver.
const EVENT_QUEUE: usize = 256;

impl Session {
    pub async fn run(&mut self, frames: &mut Frames) -> Result<(), TeleportError> {
        loop {
            let frame = tokio::select! {
                frame = frames.next_control() => frame?,
                _ = wait_true(self.stop.clone()) => return Ok(()),
            };
            match frame.kind {
                kind::GOODBYE => return Ok(()),
                kind::OFFER => {
                    let offer: Offer = decode(&frame.payload)?;
                    let name = offer.name.clone();
                    if let Err(e) = self.image(offer, frames).await {
                        tracing::warn!(peer = self.shared.peer_name, image = %name, error = %e, "image failed");
                        // No refusal after a stop or a network error: the source should reconnect, and notices by
                        // itself.
                        if !matches!(e, TeleportError::Stopped | TeleportError::Net(_)) {
                            self.refuse(&e).await?;
                        }
                        return Err(e);
                    }
                }
                // The source gave up before it received the refusal.
                kind::GIVE_UP => return Ok(()),
                other => {
                    return Err(TeleportError::Protocol(format!(
                        "frame {other:#04x} between images"
                    )));
                }
            }
        }
    }

    /// Handles one image from its offer to its end. An error ends the session; an image that is refused or fails does
    /// not.
    async fn image(&mut self, offer: Offer, frames: &mut Frames) -> Result<(), TeleportError> {
        self.shared.stages.reset();
        let layout = self.unless_stopped(receive_layout(&offer, frames)).await?;
        if offer.dry_run {
            return self.unless_stopped(self.estimate(offer, frames)).await;
        }
        match self.compare(&offer, &layout, frames).await? {
            Compared::Same(delivered) => self.send(kind::DELIVERED, encode(&delivered)).await,
            Compared::GivenUp => Ok(()),
            Compared::Differs(first) => self.transfer(offer, layout, Some(first), frames).await,
            Compared::Not => self.transfer(offer, layout, None, frames).await,
        }
    }

    /// Transfers an image. `begun` is the first batch that a comparison found to differ: in that case the offer has
    /// been accepted, and everything before it is in the transfer's log.
    async fn transfer(
        &mut self,
        offer: Offer,
        layout: Vec<u8>,
        begun: Option<Event>,
        frames: &mut Frames,
    ) -> Result<(), TeleportError> {
        let (events, queue) = mpsc::channel(EVENT_QUEUE);
        let (site, shared) = (self.site.clone(), self.shared.clone());
        let (sink, slot, name) = (events.clone(), offer.slot, offer.name.clone());
        let stop = self.stop.clone();
        let prepared = tokio::task::spawn_blocking(move || {
            prepare::prepare(&site, &shared, offer, &layout, sink, &stop)
        });
        let mut prepared = match prepared.await.map_err(|_| stopped())? {
            Ok(prepared) => prepared,
            Err(TeleportError::Stopped) => return Err(TeleportError::Stopped),
            Err(e) => {
                tracing::info!(peer = self.shared.peer_name, image = %name, error = %e, "image refused");
                return self.refuse(&e).await;
            }
        };
        *self.shared.current.write() = Some(prepared.incoming.clone());
        *self.shared.progress.write() = Some(Progress {
            name: prepared.name(),
            total_blocks: prepared.incoming.layout.walk_blocks(),
            done_blocks: prepared.done_blocks.clone(),
        });
        if let Err(e) = self.accept(begun, &mut prepared, &events).await {
            // Dropping it waits for its threads.
            let _ = tokio::task::spawn_blocking(move || drop(prepared)).await;
            return Err(e);
        }
        let resume = prepared.machine.next_batch();
        tracing::debug!(slot, resume, "image accepted");
        let hold_stop = prepared.hold.stop.clone();
        let (site, out) = (self.site.clone(), self.out.clone());
        let mut driver =
            tokio::task::spawn_blocking(move || driver::drive(&site, prepared, queue, &out));
        let ended = loop {
            let why = tokio::select! {
                done = &mut driver => break done.map_err(|_| stopped()),
                frame = frames.next() => match forward(frame, &events).await {
                    Ok(()) => continue,
                    Err(e) => e,
                },
                _ = wait_true(self.stop.clone()) => TeleportError::Stopped,
                _ = wait_true(hold_stop.clone()) => prepare::taken_over(),
            };
            let _ = events.send(DriverEvent::Stop).await;
            let _ = driver.await;
            break Err(why);
        };
        *self.shared.current.write() = None;
        *self.shared.progress.write() = None;
        match ended? {
            Ok(Some(delivered)) => self.send(kind::DELIVERED, encode(&delivered)).await,
            Ok(None) => Ok(()),
            // The data connections may still carry its blocks: a new session starts clean.
            Err(e) => Err(e),
        }
    }
}

impl Session {
    /// Accepts a prepared image, or continues from a comparison with `begun`.
    async fn accept(
        &self,
        begun: Option<Event>,
        prepared: &mut prepare::Prepared,
        events: &mpsc::Sender<DriverEvent>,
    ) -> Result<(), TeleportError> {
        let accept = Accept {
            resume_batch: prepared.machine.next_batch(),
            resumed_blocks: prepared.machine.counts().resumed_blocks,
            open_batches: prepared.machine.open_batches() as u64,
        };
        match begun {
            None => self.send(kind::ACCEPT, encode(&accept)).await?,
            Some(Event::Batch(batch)) if batch.index != accept.resume_batch => {
                // The compared data has changed since. The transfer can be resumed.
                return Err(TeleportError::Stopped);
            }
            Some(event) => {
                prepared.machine.restored_was_compared();
                drop(events.send(DriverEvent::Machine(event)).await);
            }
        }
        Ok(())
    }
}

/// Receives the layout that follows an offer.
async fn receive_layout(offer: &Offer, frames: &mut Frames) -> Result<Vec<u8>, TeleportError> {
    if offer.layout_bytes > drover_store::MAX_LAYOUT_BYTES {
        return Err(TeleportError::Protocol(
            "the offered layout is too large".into(),
        ));
    }
    let mut layout = Vec::new();
    while (layout.len() as u64) < offer.layout_bytes {
        let frame = frames.next_control().await?;
        let fits = layout.len() as u64 + frame.payload.len() as u64 <= offer.layout_bytes;
        if frame.kind != kind::LAYOUT
            || !fits
            || frame.payload.is_empty()
            || frame.payload.len() > LAYOUT_PART_BYTES
        {
            return Err(TeleportError::Protocol(
                "an offer without its layout".into(),
            ));
        }
        layout.extend_from_slice(&frame.payload);
    }
    Ok(layout)
}

/// Passes a frame from the source to the driver.
async fn forward(
    frame: Result<Frame, TeleportError>,
    events: &mpsc::Sender<DriverEvent>,
) -> Result<(), TeleportError> {
    let frame = frame?;
    let event = match frame.kind {
        kind::BATCH => DriverEvent::Machine(Event::Batch(Arc::new(Batch::decode(&frame.payload)?))),
        kind::END => DriverEvent::Machine(Event::End(decode::<End>(&frame.payload)?.digest)),
        kind::GIVE_UP => DriverEvent::GiveUp(decode::<GiveUp>(&frame.payload)?),
        other => {
            return Err(TeleportError::Protocol(format!(
                "frame {other:#04x} during an image"
            )));
        }
    };
    // A driver that has ended reports through its result.
    let _ = events.send(event).await;
    Ok(())
}

#[cfg(test)]
mod tests;
