//! A session at the destination: images are offered, prepared, driven to the end and delivered.

mod compare;
mod driver;
mod estimate;
mod matching;
mod prepare;
mod reuse;
mod waits;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_net::service::{IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{Code, Frame, KeepAlive, PeerKey, Refusal, Right, decode, encode};
use parking_lot::RwLock;
use tokio::sync::{mpsc, watch};

use super::lane_in::{Incoming, LaneIn};
use super::{read_frames, write_frames};
use crate::TeleportError;
use crate::codec::{Batch, Literal};
use crate::destination::Event;
use crate::protocol::{
    Accept, End, GiveUp, LAYOUT_PART_BYTES, MAX_LANES, MAX_SESSION_FRAME, MAX_SESSION_IMAGES,
    Offer, kind,
};
use crate::services::{JoinSession, OpenSession};
use crate::site::{Site, TransferStatus};
use crate::stages::{DestinationStages, Lap};

use compare::Compared;
pub use driver::DriverEvent;

/// Events between the sockets and a driver.
const EVENT_QUEUE: usize = 256;

/// Literal frames of a lane that wait to be unpacked.
const LANE_QUEUE: usize = 2;

/// How long a lane waits for its session, which was dialled at the same time.
const LANE_PATIENCE: Duration = Duration::from_secs(10);

/// How often a lane says how busy it is.
const BUSY_EVERY: Duration = Duration::from_millis(100);

/// How long an orderly end may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// What the source says: on the control connection, and about the present image on the first lane.
struct Frames {
    control: mpsc::Receiver<Result<Frame, TeleportError>>,
    /// A source does not wait for an image to be accepted before it sends the first batches: they
    /// may be here before the offer is.
    first_lane: mpsc::Receiver<Frame>,
    /// The source, for people.
    peer: String,
}

impl Frames {
    /// The next frame about an image, from either connection; each keeps its order. Cancel safe.
    async fn next(&mut self) -> Result<Frame, TeleportError> {
        tokio::select! {
            frame = self.control.recv() => said(frame, &self.peer),
            Some(frame) = self.first_lane.recv() => Ok(frame),
        }
    }

    /// The next frame of the control connection. Cancel safe.
    async fn next_control(&mut self) -> Result<Frame, TeleportError> {
        said(self.control.recv().await, &self.peer)
    }
}

/// A source says goodbye before it goes.
fn said(frame: Option<Result<Frame, TeleportError>>, peer: &str) -> Result<Frame, TeleportError> {
    frame.unwrap_or_else(|| {
        let peer = peer.to_owned();
        Err(drover_net::NetError::Truncated { peer }.into())
    })
}

/// What the connections of one session share.
pub struct SessionShared {
    peer: PeerKey,
    peer_name: String,
    /// Says which of two sessions is the newer.
    number: u64,
    current: RwLock<Option<Arc<Incoming>>>,
    lanes: AtomicU64,
    progress: RwLock<Option<Progress>>,
    /// What the stages do, for the image it is at.
    stages: Arc<DestinationStages>,
    /// Where those frames of the first lane go that are no literals.
    frames: mpsc::Sender<Frame>,
}

/// The transfer that a session is at.
#[derive(Debug, Clone)]
struct Progress {
    name: String,
    total_blocks: u64,
    done_blocks: Arc<AtomicU64>,
}

impl SessionShared {
    /// Whether it is a session of this peer.
    pub fn is_of(&self, peer: &PeerKey) -> bool {
        self.peer == *peer
    }

    /// The transfer it is at.
    pub fn status(&self) -> Option<TransferStatus> {
        let progress = self.progress.read().clone()?;
        Some(TransferStatus {
            name: progress.name,
            peer: self.peer_name.clone(),
            done_blocks: progress
                .done_blocks
                .load(Ordering::Relaxed)
                .min(progress.total_blocks),
            total_blocks: progress.total_blocks,
        })
    }
}

/// Takes a session out of the site's list when it ends.
struct Registered {
    site: Arc<Site>,
    id: [u8; 16],
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.site.sessions.lock().remove(&self.id);
    }
}

/// Takes the images of a session ([`OpenSession`]), until the source ends it or the site stops. When the
/// connection breaks or the source breaks the protocol, what was being transferred can be resumed.
pub struct Sessions(pub Arc<Site>);

impl Service for Sessions {
    fn id(&self) -> &'static str {
        OpenSession::SERVICE
    }

    fn right(&self) -> Right {
        OpenSession::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move { Ok(self.0.session(peer, call).await?) })
    }
}

/// Takes what comes on the further connections of sessions ([`JoinSession`]).
pub struct SessionLanes(pub Arc<Site>);

impl Service for SessionLanes {
    fn id(&self) -> &'static str {
        JoinSession::SERVICE
    }

    fn right(&self) -> Right {
        JoinSession::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move { Ok(self.0.lane(peer, call).await?) })
    }
}

impl Site {
    async fn session(
        self: &Arc<Self>,
        peer: Peer,
        mut call: IncomingCall,
    ) -> Result<(), TeleportError> {
        let request: OpenSession = call.request()?;
        call.reader.set_max_frame(MAX_SESSION_FRAME);
        KeepAlive::default().apply(&mut call.reader, &mut call.writer);
        let (to, first_lane) = mpsc::channel(super::FRAME_QUEUE);
        let shared = Arc::new(SessionShared {
            frames: to,
            peer: peer.key,
            peer_name: peer.name,
            number: self.active.number(),
            current: RwLock::new(None),
            lanes: AtomicU64::new(0),
            progress: RwLock::new(None),
            stages: Arc::default(),
        });
        let Some(registered) = self.register(shared.clone(), request) else {
            let text = "the site has all the sessions it can take; try again later";
            return Ok(call.refuse(&Refusal::new(Code::Busy, text)).await?);
        };
        let _registered = registered;
        call.accept::<OpenSession>(&()).await?;
        let IncomingCall {
            reader,
            writer,
            stop,
            ..
        } = call;
        let mut frames = Frames {
            peer: reader.peer_text().to_owned(),
            control: read_frames(reader),
            first_lane,
        };
        let (out, written) = write_frames(writer);
        let mut session = Session {
            site: self.clone(),
            shared,
            out,
            stop,
        };
        let result = session.run(&mut frames).await;
        drop(session);
        // What was said last must arrive before the socket goes.
        let _ = tokio::time::timeout(CLOSE_LIMIT, async {
            let _ = written.await;
            while let Some(Ok(_)) = frames.control.recv().await {}
        })
        .await;
        result
    }

    fn register(
        self: &Arc<Self>,
        shared: Arc<SessionShared>,
        request: OpenSession,
    ) -> Option<Registered> {
        let OpenSession {
            images,
            session: id,
        } = request;
        let mut sessions = self.sessions.lock();
        if sessions.len() >= self.config.max_sessions
            || images > MAX_SESSION_IMAGES
            || sessions.contains_key(&id)
        {
            return None;
        }
        sessions.insert(id, shared);
        drop(sessions);
        self.session_opened.notify_waiters();
        Some(Registered {
            site: self.clone(),
            id,
        })
    }

    /// The session of that number; a lane may come before its session.
    async fn find_session(&self, session: [u8; 16]) -> Option<Arc<SessionShared>> {
        let found = async {
            loop {
                let opened = self.session_opened.notified();
                tokio::pin!(opened);
                opened.as_mut().enable();
                if let Some(found) = self.sessions.lock().get(&session).cloned() {
                    return found;
                }
                opened.await;
            }
        };
        tokio::time::timeout(LANE_PATIENCE, found).await.ok()
    }

    async fn lane(
        self: &Arc<Self>,
        peer: Peer,
        mut call: IncomingCall,
    ) -> Result<(), TeleportError> {
        let JoinSession { session } = call.request()?;
        let shared = self.find_session(session).await;
        let shared = shared.filter(|s| {
            s.is_of(&peer.key) && s.lanes.load(Ordering::Relaxed) < u64::from(MAX_LANES)
        });
        let Some(shared) = shared else {
            let refusal = Refusal::new(Code::Denied, "no such session");
            return Ok(call.refuse(&refusal).await?);
        };
        shared.lanes.fetch_add(1, Ordering::Relaxed);
        call.reader.set_max_frame(MAX_SESSION_FRAME);
        KeepAlive::default().apply(&mut call.reader, &mut call.writer);
        call.accept::<JoinSession>(&()).await?;
        let IncomingCall {
            mut reader, writer, ..
        } = call;
        let (out, _) = write_frames(writer);
        let (to, from) = mpsc::channel(LANE_QUEUE);
        let worker = shared.clone();
        let worker = tokio::task::spawn_blocking(move || unpack_lane(from, &worker, &out));
        let stage = &shared.stages.receive;
        let result = loop {
            let next = stage.at_socket(reader.next()).await;
            let mut lap = Lap::start();
            if let Ok(Some(frame)) = &next {
                stage.add_bytes(super::frame_bytes(frame.payload.len()));
            }
            match next {
                Ok(Some(frame)) if matches!(frame.kind, kind::BATCH | kind::END) => {
                    let _ = shared.frames.send(frame).await;
                }
                Ok(Some(frame)) => {
                    if to.send(frame).await.is_err() {
                        break Ok(());
                    }
                }
                Ok(None) => break Ok(()),
                Err(e) => break Err(e.into()),
            }
            lap.wait(stage);
        };
        drop(to);
        let _ = worker.await;
        shared.lanes.fetch_sub(1, Ordering::Relaxed);
        result
    }
}

/// Unpacks what a lane brings until it ends or fails; a failure fails the image.
fn unpack_lane(
    mut frames: mpsc::Receiver<Frame>,
    shared: &SessionShared,
    out: &mpsc::Sender<Frame>,
) {
    let mut lane = LaneIn::default();
    let mut busy = BusyShare::default();
    let mut lap = Lap::start();
    while let Some(frame) = busy.idle(|| frames.blocking_recv()) {
        lap.wait(&shared.stages.unpack);
        if let Some(share) = busy.report() {
            let payload = share.to_le_bytes().to_vec().into();
            // Only a hint: never waited for.
            let _ = out.try_send(Frame {
                kind: kind::BUSY,
                payload,
            });
        }
        let current = shared.current.read().clone();
        let Some(image) = current else { continue };
        let taken = match Literal::decode(&frame.payload) {
            // What was on its way when an image failed is of no use any more, but the lane's
            // stream goes on with it: it ends here and the source opens another.
            Ok(literal) if frame.kind == kind::LITERAL && literal.header.slot == image.slot => {
                lane.take(&literal, &image)
            }
            Ok(_) => Err(TeleportError::Protocol(
                "a lane brought something else than literals of the image".into(),
            )),
            Err(e) => Err(e.into()),
        };
        if let Err(e) = taken {
            let _ = image.events.blocking_send(DriverEvent::Failed(e));
            return;
        }
        lap.skip();
    }
}

/// Which share of its time a lane has something to do.
struct BusyShare {
    since: Instant,
    idle: Duration,
}

impl Default for BusyShare {
    fn default() -> Self {
        BusyShare {
            since: Instant::now(),
            idle: Duration::ZERO,
        }
    }
}

impl BusyShare {
    fn idle<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = wait();
        self.idle += start.elapsed();
        out
    }

    /// In thousandths, now and then.
    fn report(&mut self) -> Option<u16> {
        let all = self.since.elapsed();
        if all < BUSY_EVERY {
            return None;
        }
        let share = 1.0 - self.idle.as_secs_f64() / all.as_secs_f64();
        *self = BusyShare::default();
        Some((share * 1000.0) as u16)
    }
}

/// A session's control connection.
struct Session {
    site: Arc<Site>,
    shared: Arc<SessionShared>,
    out: mpsc::Sender<Frame>,
    stop: watch::Receiver<bool>,
}

impl Session {
    async fn run(&mut self, frames: &mut Frames) -> Result<(), TeleportError> {
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
                        tracing::warn!(peer = self.shared.peer_name, error = %e, "image failed");
                        // After a stop the source is to come back, and finds out by itself.
                        if !matches!(e, TeleportError::Stopped | TeleportError::Net(_)) {
                            self.refuse(&name, &e).await?;
                        }
                        return Err(e);
                    }
                }
                // It gave up before it heard that it was refused.
                kind::GIVE_UP => return Ok(()),
                other => {
                    return Err(TeleportError::Protocol(format!(
                        "frame {other:#04x} between images"
                    )));
                }
            }
        }
    }

    async fn send(&self, kind: u8, payload: Vec<u8>) -> Result<(), TeleportError> {
        let frame = Frame {
            kind,
            payload: payload.into(),
        };
        self.out
            .send(frame)
            .await
            .map_err(|_| TeleportError::Remote("the source is gone".into()))
    }

    async fn refuse(&self, name: &ImageName, error: &TeleportError) -> Result<(), TeleportError> {
        let message = match error {
            TeleportError::File { .. } | TeleportError::Store(_)
                if error.refusal() == Some(Code::NoSpace) =>
            {
                format!(
                    "{name}: the destination ran out of space; make room there and send it again: it goes on where it was"
                )
            }
            _ => error.to_string(),
        };
        let refusal = Refusal::new(error.refusal().unwrap_or(Code::Failed), message);
        self.send(kind::REFUSE, encode(&refusal)).await
    }

    /// Does something that leaves nothing behind, until it is done or the site stops.
    async fn unless_stopped<T>(
        &self,
        work: impl Future<Output = Result<T, TeleportError>>,
    ) -> Result<T, TeleportError> {
        tokio::select! {
            biased;
            () = wait_true(self.stop.clone()) => Err(TeleportError::Stopped),
            done = work => done,
        }
    }

    /// One image, from its offer to its end. An error ends the session; an image that is refused
    /// or fails does not.
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

    /// Transfers an image. `begun` is the first batch that a comparison found to differ: the
    /// offer has been accepted then, and everything before is in the transfer's log.
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
                tracing::info!(peer = self.shared.peer_name, error = %e, "image refused");
                return self.refuse(&name, &e).await;
            }
        };
        *self.shared.current.write() = Some(prepared.incoming.clone());
        *self.shared.progress.write() = Some(Progress {
            name: prepared.name(),
            total_blocks: prepared.incoming.layout.walk_blocks(),
            done_blocks: prepared.done_blocks.clone(),
        });
        if let Err(e) = self.accept(begun, &mut prepared, &events).await {
            // Its threads are waited for.
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
            tokio::select! {
                done = &mut driver => break done.map_err(|_| stopped()),
                frame = frames.next() => {
                    match forward(frame, &events).await {
                        Ok(()) => {}
                        Err(e) => {
                            let _ = events.send(DriverEvent::Stop).await;
                            let _ = driver.await;
                            break Err(e);
                        }
                    }
                }
                _ = wait_true(self.stop.clone()) => {
                    let _ = events.send(DriverEvent::Stop).await;
                    let _ = driver.await;
                    break Err(TeleportError::Stopped);
                }
                _ = wait_true(hold_stop.clone()) => {
                    let _ = events.send(DriverEvent::Stop).await;
                    let _ = driver.await;
                    break Err(prepare::taken_over());
                }
            }
        };
        *self.shared.current.write() = None;
        *self.shared.progress.write() = None;
        match ended? {
            Ok(Some(delivered)) => self.send(kind::DELIVERED, encode(&delivered)).await,
            Ok(None) => Ok(()),
            // The lanes may still carry blocks of it: a new session starts clean.
            Err(e) => Err(e),
        }
    }
}

impl Session {
    /// Accepts an image that is prepared, or goes on from a comparison with `begun`.
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
                // What was compared has changed since. The transfer is there to be resumed.
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

fn stopped() -> TeleportError {
    TeleportError::Remote("the site stopped".into())
}

async fn wait_true(mut flag: watch::Receiver<bool>) {
    if flag.wait_for(|s| *s).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The layout that follows an offer.
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

/// Hands a frame of the source to the driver.
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
    // A driver that has ended says so by its result.
    let _ = events.send(event).await;
    Ok(())
}

#[cfg(test)]
mod tests;
