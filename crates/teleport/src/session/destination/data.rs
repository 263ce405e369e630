//! The data connections of a session at the destination.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use drover_net::service::{IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{Code, Frame, FrameReader, KeepAlive, Refusal, Right, until};
use tokio::sync::mpsc;

use super::event::DriverEvent;
use crate::TeleportError;
use crate::codec::Literal;
use crate::frames::{drain, frame_bytes, wait_true, write_frames};
use crate::protocol::{MAX_BATCH_FRAME, MAX_DATA_CONNECTIONS, MAX_SESSION_FRAME, kind};
use crate::services::JoinSession;
use crate::session::SessionShared;
use crate::session::literals_in::LiteralReceiver;
use crate::site::Site;
use crate::stages::Lap;

/// Received literal frames of a data connection that are queued for decompression.
const LITERAL_QUEUE: usize = 2;

/// How long a data connection waits for its session, which was dialed at the same time.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval at which a data connection reports how busy it is.
const BUSY_EVERY: Duration = Duration::from_millis(100);

/// Receives the additional connections of sessions ([`JoinSession`]).
pub struct DataConnections(pub Arc<Site>);

impl Service for DataConnections {
    fn id(&self) -> &'static str {
        JoinSession::SERVICE
    }

    fn right(&self) -> Right {
        JoinSession::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move { Ok(self.0.data_connection(peer, call).await?) })
    }
}

impl Site {
    /// Finds the session with that ID; a data connection may arrive before its session.
    async fn find_session(&self, session: [u8; 16]) -> Option<Arc<SessionShared>> {
        let found = until(&self.session_opened, || {
            self.sessions.lock().get(&session).cloned()
        });
        tokio::time::timeout(JOIN_TIMEOUT, found).await.ok()
    }

    async fn data_connection(
        self: &Arc<Self>,
        peer: Peer,
        mut call: IncomingCall,
    ) -> Result<(), TeleportError> {
        let JoinSession { session } = call.request()?;
        let shared = self.find_session(session).await;
        let joined = shared.filter(|s| s.is_of(&peer.key)).and_then(Joined::to);
        let Some(joined) = joined else {
            let refusal = Refusal::new(Code::Denied, "no such session");
            return Ok(call.refuse(&refusal).await?);
        };
        let shared = &joined.0;
        call.reader.set_max_frame(MAX_SESSION_FRAME);
        KeepAlive::default().apply(&mut call.reader, &mut call.writer);
        call.accept::<JoinSession>(&()).await?;
        let IncomingCall {
            mut reader,
            writer,
            stop,
            ..
        } = call;
        let (out, _) = write_frames(writer);
        let (to, from) = mpsc::channel(LITERAL_QUEUE);
        let worker = shared.clone();
        let worker = tokio::task::spawn_blocking(move || unpack_literals(from, &worker, &out));
        // Whatever the peer does: nothing outlives the session, or the right to it.
        let received = tokio::select! {
            received = receive(shared, &mut reader, &to) => received,
            () = wait_true(shared.ended.subscribe()) => Ok(()),
            () = wait_true(stop) => Ok(()),
        };
        drop(to);
        let _ = worker.await;
        drop(joined);
        if received.is_ok() {
            drain(&mut reader).await;
        }
        received
    }
}

/// A data connection's place in its session, until it is dropped.
struct Joined(Arc<SessionShared>);

impl Joined {
    /// A place, unless all are taken.
    fn to(session: Arc<SessionShared>) -> Option<Joined> {
        let more = |now| (now < u64::from(MAX_DATA_CONNECTIONS)).then_some(now + 1);
        let joined = session.connections.fetch_update(Relaxed, Relaxed, more);
        joined.is_ok().then_some(Joined(session))
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Relaxed);
    }
}

/// Passes on what a data connection brings: literals to `literals`, everything else to the session.
async fn receive(
    shared: &SessionShared,
    reader: &mut FrameReader,
    literals: &mpsc::Sender<Frame>,
) -> Result<(), TeleportError> {
    let stage = &shared.stages.receive;
    loop {
        let Some(frame) = stage.at_socket(reader.next()).await? else {
            return Ok(());
        };
        let mut lap = Lap::start();
        shared.activity.touch();
        stage.add_bytes(frame_bytes(frame.payload.len()));
        if !matches!(
            frame.kind,
            kind::BATCH | kind::SKIPPED | kind::END | kind::END_UNREAD
        ) {
            if literals.send(frame).await.is_err() {
                return Ok(());
            }
        } else if frame.payload.len() > MAX_BATCH_FRAME {
            // They are queued before their image is accepted.
            return Err(TeleportError::Protocol("a batch that is too large".into()));
        } else {
            let _ = shared.frames.send(frame).await;
        }
        lap.wait(stage);
    }
}

/// Decompresses a data connection's frames until it ends or fails; a failure fails the image.
fn unpack_literals(
    mut frames: mpsc::Receiver<Frame>,
    shared: &SessionShared,
    out: &mpsc::Sender<Frame>,
) {
    let mut receiver = LiteralReceiver::default();
    let mut busy = BusyShare::default();
    let mut lap = Lap::start();
    while let Some(frame) = busy.idle(|| frames.blocking_recv()) {
        lap.wait(&shared.stages.unpack);
        if let Some(share) = busy.report() {
            let payload = share.to_le_bytes().to_vec();
            // Only a hint: dropped if the queue is full.
            let _ = out.try_send(Frame::new(kind::BUSY, payload));
        }
        let current = shared.current.read().clone();
        let Some(image) = current else { continue };
        let taken = match Literal::decode(&frame.payload) {
            // Literals still in flight when their image failed are useless, but the stream's compression history
            // includes them. So the connection ends here, and the source opens another.
            Ok(literal) if frame.kind == kind::LITERAL && literal.header.slot == image.slot => {
                receiver.take(&literal, &image)
            }
            Ok(_) => Err(TeleportError::Protocol(
                "a data connection brought something other than literals of the image".into(),
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

/// Measures the fraction of time for which a data connection is busy.
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

    /// The fraction in thousandths, at intervals.
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
