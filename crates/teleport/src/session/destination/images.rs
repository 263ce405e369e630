//! The images of a session, one after the other: offered, prepared, driven to completion.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_image::Layout;
use drover_net::{Code, Frame, PeerKey, Refusal, Share, decode, encode};
use drover_store::{Likeness, layout_limits};
use tokio::sync::mpsc;

use super::compare::Compared;
use super::control::{Frames, Session, idle, stopped};
use super::event::DriverEvent;
use super::taken::Known;
use super::{driver, prepare};
use crate::TeleportError;
use crate::codec::Batch;
use crate::destination::Event;
use crate::frames::wait_true;
use crate::protocol::{Accept, End, GiveUp, LAYOUT_PART_BYTES, Offer, kind};
use crate::session::shared::Progress;
use crate::site::{SendEvent, SendStep};

/// Events queued between the sockets and a driver.
const EVENT_QUEUE: usize = 256;

/// How long an image waits until similar ones are indexed, before it is accepted.
const MAX_HOLD: Duration = Duration::from_secs(20);

/// How long an offer waits for the memory of its layout before it is refused.
const LAYOUT_WAIT: Duration = Duration::from_secs(60);

/// An encoded layout, and its share of the memory for layouts: for the encoded and for the decoded one.
struct ReceivedLayout {
    encoded: Vec<u8>,
    _memory: [Option<Share<PeerKey>>; 2],
}

impl Session {
    pub async fn run(&mut self, frames: &mut Frames) -> Result<(), TeleportError> {
        loop {
            let max_idle = self.site.config.supplies.max_idle;
            let frame = tokio::select! {
                frame = frames.next_control() => frame?,
                _ = wait_true(self.stop.clone()) => return Ok(()),
                () = tokio::time::sleep(max_idle) => {
                    let e = idle(max_idle, ": no image was offered");
                    self.refuse(&e).await?;
                    return Err(e);
                }
            };
            self.shared.activity.touch();
            match frame.kind {
                kind::GOODBYE => return Ok(()),
                kind::OFFER => {
                    let offer: Offer = decode(&frame.payload)?;
                    let name = offer.name.clone();
                    let ended = self.image_told(offer, frames).await;
                    if let Err(e) = ended {
                        tracing::warn!(peer = self.shared.peer_name, image = %name, error = %e, "image failed");
                        // No refusal after a stop or a network error, or while the catalog is away: the source should
                        // reconnect, and notices by itself.
                        let stopped = matches!(e, TeleportError::Stopped | TeleportError::Net(_));
                        if !stopped && !e.is_for_now() {
                            self.refuse(&e).await?;
                        }
                        return Err(e);
                    }
                }
                kind::GENERATIONS if self.generations.is_none() => {
                    self.generations = Some(frame.payload);
                }
                kind::LIKENESS if self.likeness.is_none() => {
                    self.likeness = Some(frame.payload);
                }
                kind::PROFILE => {
                    if let Err(e) = self.profile_part(&frame.payload) {
                        self.refuse(&e).await?;
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

    /// Handles one image, and tells the site how it ended.
    async fn image_told(&mut self, offer: Offer, frames: &mut Frames) -> Result<(), TeleportError> {
        let began = Instant::now();
        let mut event = SendEvent {
            peer: self.shared.peer,
            peer_name: self.shared.peer_name.clone(),
            from: frames.peer.clone(),
            image: offer.name.clone(),
            bytes: offer.file_bytes,
            time: Duration::ZERO,
            what: SendStep::Begun,
        };
        let ended = self.image(offer, &mut event, frames).await;
        if let SendStep::Begun = event.what {
            event.what = SendStep::Failed(match &ended {
                Ok(()) => "given up by its source".into(),
                Err(e) => e.to_string(),
            });
        }
        event.time = began.elapsed();
        self.tell(event).await;
        ended
    }

    /// Tells the site what has happened.
    async fn tell(&self, event: SendEvent) {
        let site = self.site.clone();
        // A panic was logged.
        let _ = tokio::task::spawn_blocking(move || site.watched(&event)).await;
    }

    /// Refuses an image.
    pub(super) async fn refuse_image(
        &self,
        event: &mut SendEvent,
        error: &TeleportError,
    ) -> Result<(), TeleportError> {
        let code = error.refusal().unwrap_or(Code::Failed);
        event.what = SendStep::Refused(Refusal::new(code, error.to_string()));
        self.refuse(error).await
    }

    /// Handles one image from its offer to its end; `event` gets how that was, unless it failed. An error ends the session;
    /// an image that is refused or fails does not.
    async fn image(
        &mut self,
        offer: Offer,
        event: &mut SendEvent,
        frames: &mut Frames,
    ) -> Result<(), TeleportError> {
        self.shared.stages.reset();
        let layout = self.receive_layout(&offer, frames);
        let layout = self.unless_stopped(self.unless_idle(layout)).await?;
        if let Err(e) = self.check_sender(&offer.name).await {
            tracing::info!(peer = self.shared.peer_name, image = %offer.name, error = %e, "image refused");
            return self.refuse_image(event, &e).await;
        }
        self.decode_profile(&offer).await?;
        self.prepare_similar(&offer).await?;
        if offer.dry_run {
            return self
                .unless_stopped(self.estimate(offer, event, frames))
                .await;
        }
        if let Some(known) = self.known(&offer, &layout).await? {
            let known = Some(Arc::new(known));
            return self
                .transfer(offer, event, &layout, None, known, frames)
                .await;
        }
        let done = match self.compare(&offer, &layout.encoded, frames).await? {
            Compared::Same(delivered) => {
                event.what = SendStep::Unchanged;
                self.profile_of_same(&offer).await;
                self.say_unchanged(&offer, *delivered).await
            }
            Compared::GivenUp => Ok(()),
            Compared::Differs(first) => {
                let first = Some(first);
                self.transfer(offer, event, &layout, first, None, frames)
                    .await
            }
            Compared::Not => {
                self.transfer(offer, event, &layout, None, None, frames)
                    .await
            }
        };
        // Its memory counts until the image has ended.
        drop(layout);
        done
    }

    /// Has those images of the site found by their blocks that are probably similar to the one offered. Those that are not indexed
    /// yet are, for a while before the image is accepted.
    async fn prepare_similar(&mut self, offer: &Offer) -> Result<(), TeleportError> {
        let Some(likeness) = self.likeness.take() else {
            return Ok(());
        };
        let likeness = Likeness::decode(&likeness)
            .ok_or_else(|| TeleportError::Protocol("a malformed likeness".into()))?;
        let (site, bytes) = (self.site.clone(), offer.file_bytes);
        let chosen = tokio::task::spawn_blocking(move || site.prepare_similar(&likeness, bytes));
        let indexed = chosen.await.map_err(|_| stopped())?;
        let indexed = async {
            // It goes on behind the transfer, which then finds what is ready.
            let _ = tokio::time::timeout(MAX_HOLD, indexed.wait()).await;
            Ok(())
        };
        self.unless_stopped(indexed).await?;
        self.shared.activity.touch();
        Ok(())
    }

    /// What the site has of the image in an old copy of its disk.
    async fn known(
        &mut self,
        offer: &Offer,
        layout: &ReceivedLayout,
    ) -> Result<Option<Known>, TeleportError> {
        let Some(generations) = self.generations.take() else {
            return Ok(None);
        };
        let (site, peer) = (self.site.clone(), self.shared.peer);
        let (offer, layout) = (offer.clone(), layout.encoded.clone());
        let found = tokio::task::spawn_blocking(move || {
            let layout = prepare::decode_layout(&offer, &layout)?;
            Known::find(&site, &peer, &offer, layout, &generations)
        });
        found.await.map_err(|_| stopped())?
    }

    /// Refuses an image that the peer may not deliver.
    async fn check_sender(&self, name: &ImageName) -> Result<(), TeleportError> {
        let (site, peer, name) = (self.site.clone(), self.shared.peer, name.clone());
        let checked = tokio::task::spawn_blocking(move || {
            site.check_sender(&peer, site.images.by_name(&name).as_ref())
        });
        checked.await.map_err(|_| stopped())?
    }

    /// Transfers an image, of which the site has what is `known`. `begun` is the first batch that a comparison found to differ: in that case the offer has
    /// been accepted, and everything before it is in the transfer's log.
    async fn transfer(
        &mut self,
        offer: Offer,
        event: &mut SendEvent,
        layout: &ReceivedLayout,
        begun: Option<Event>,
        known: Option<Arc<Known>>,
        frames: &mut Frames,
    ) -> Result<(), TeleportError> {
        let (events, queue) = mpsc::channel(EVENT_QUEUE);
        let (site, shared) = (self.site.clone(), self.shared.clone());
        let (sink, slot, name) = (events.clone(), offer.slot, offer.name.clone());
        let (stop, layout) = (self.stop.clone(), layout.encoded.clone());
        let compared = begun.is_some();
        let prepared = tokio::task::spawn_blocking(move || {
            prepare::prepare(&site, &shared, offer, &layout, sink, compared, &stop)
        });
        let mut prepared = match prepared.await.map_err(|_| stopped())? {
            Ok(prepared) => prepared,
            Err(TeleportError::Stopped) => return Err(TeleportError::Stopped),
            Err(e) if e.is_for_now() => return Err(e),
            Err(e) => {
                tracing::info!(peer = self.shared.peer_name, image = %name, error = %e, "image refused");
                return self.refuse_image(event, &e).await;
            }
        };
        self.tell(event.clone()).await;
        *self.shared.current.write() = Some(prepared.incoming.clone());
        *self.shared.progress.write() = Some(Progress {
            name: prepared.name(),
            total_blocks: prepared.incoming.layout.walk_blocks(),
            done_blocks: prepared.done_blocks.clone(),
        });
        let first = self.follow_profile(&prepared.transfer).await;
        if let Err(e) = self
            .accept(begun, known.as_deref(), &mut prepared, &events)
            .await
        {
            // Dropping it waits for its threads.
            let _ = tokio::task::spawn_blocking(move || drop(prepared)).await;
            return Err(e);
        }
        let resume = prepared.machine.next_batch();
        tracing::debug!(slot, resume, "image accepted");
        let hold_stop = prepared.hold.stop.clone();
        frames.wants = true;
        let (site, out) = (self.site.clone(), self.out.clone());
        let mut driver =
            tokio::task::spawn_blocking(move || driver::drive(&site, prepared, known, queue, &out));
        let ended = loop {
            let why = tokio::select! {
                done = &mut driver => break done.map_err(|_| stopped()),
                frame = frames.next() => match forward(frame, &events).await {
                    Ok(()) => continue,
                    Err(e) => e,
                },
                _ = wait_true(self.stop.clone()) => TeleportError::Stopped,
                _ = wait_true(hold_stop.clone()) => prepare::taken_over(),
                why = self.idle_while_others_wait() => why,
            };
            let _ = events.send(DriverEvent::Stop).await;
            let _ = driver.await;
            break Err(why);
        };
        drop(first);
        frames.wants = false;
        self.shared.activity.deliver(false);
        *self.shared.current.write() = None;
        *self.shared.progress.write() = None;
        match ended? {
            Ok(Some(delivered)) => {
                event.what = match delivered.waits {
                    true => SendStep::Arrived,
                    false => SendStep::Delivered,
                };
                self.say_delivered(delivered).await
            }
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
        known: Option<&Known>,
        prepared: &mut prepare::Prepared,
        events: &mpsc::Sender<DriverEvent>,
    ) -> Result<(), TeleportError> {
        let accept = Accept {
            resume_batch: prepared.machine.next_batch(),
            resumed_blocks: prepared.machine.counts().resumed_blocks,
            open_batches: prepared.machine.open_batches() as u64,
        };
        if let Some(known) = known.filter(|known| !known.have.batches.is_empty()) {
            self.send(kind::HAVE, known.have.encode()).await?;
        }
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

impl Session {
    /// Receives the layout that follows an offer. The memory that it takes, decoded, is counted before it is allocated:
    /// a short message may describe a large layout.
    async fn receive_layout(
        &self,
        offer: &Offer,
        frames: &mut Frames,
    ) -> Result<ReceivedLayout, TeleportError> {
        if offer.layout_bytes > drover_store::MAX_LAYOUT_BYTES {
            return Err(TeleportError::Protocol(
                "the offered layout is too large".into(),
            ));
        }
        let received = self.layout_memory(offer.layout_bytes).await?;
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
            self.shared.activity.touch();
            layout.extend_from_slice(&frame.payload);
        }
        let decoded = match Layout::decoding_bytes(&layout, layout_limits()) {
            Ok(bytes) if !offer.dry_run => Some(self.layout_memory(bytes).await?),
            // It is not decoded, or refused with a reason when it is.
            _ => None,
        };
        Ok(ReceivedLayout {
            encoded: layout,
            _memory: [Some(received), decoded],
        })
    }

    /// Takes memory for a layout, as soon as there is enough.
    async fn layout_memory(&self, bytes: u64) -> Result<Share<PeerKey>, TeleportError> {
        let memory = &self.site.config.supplies.layout_memory;
        let taken = memory.take(self.shared.peer, bytes);
        let taken = tokio::time::timeout(LAYOUT_WAIT, taken).await;
        taken.map_err(|_| {
            let message = format!(
                "its layout needs {} MiB of memory at the destination, which the images being received now have; send it again later",
                bytes.div_ceil(1 << 20)
            );
            TeleportError::refused(Code::Busy, message)
        })
    }
}

/// Passes a frame from the source to the driver.
async fn forward(
    frame: Result<Frame, TeleportError>,
    events: &mpsc::Sender<DriverEvent>,
) -> Result<(), TeleportError> {
    let frame = frame?;
    let event = match frame.kind {
        kind::BATCH => DriverEvent::Machine(Event::Batch(Arc::new(Batch::decode(&frame.payload)?))),
        kind::END => DriverEvent::Machine(Event::End(Some(decode::<End>(&frame.payload)?.digest))),
        kind::SKIPPED => {
            let index = frame.payload.as_ref().try_into().map(u64::from_le_bytes);
            let malformed = || TeleportError::Protocol("a malformed number of a batch".into());
            DriverEvent::Skipped(index.map_err(|_| malformed())?)
        }
        kind::END_UNREAD => DriverEvent::Machine(Event::End(None)),
        kind::GIVEN => DriverEvent::Given(frame.payload),
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
