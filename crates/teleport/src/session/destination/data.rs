//! The data connections of a session at the destination.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_net::service::{IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{Code, Frame, KeepAlive, Refusal, Right, until};
use tokio::sync::mpsc;

use super::event::DriverEvent;
use crate::TeleportError;
use crate::codec::Literal;
use crate::frames::{frame_bytes, write_frames};
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
        let shared = shared.filter(|s| {
            s.is_of(&peer.key)
                && s.connections.load(Ordering::Relaxed) < u64::from(MAX_DATA_CONNECTIONS)
        });
        let Some(shared) = shared else {
            let refusal = Refusal::new(Code::Denied, "no such session");
            return Ok(call.refuse(&refusal).await?);
        };
        shared.connections.fetch_add(1, Ordering::Relaxed);
        call.reader.set_max_frame(MAX_SESSION_FRAME);
        KeepAlive::default().apply(&mut call.reader, &mut call.writer);
        call.accept::<JoinSession>(&()).await?;
        let IncomingCall {
            mut reader, writer, ..
        } = call;
        let (out, _) = write_frames(writer);
        let (to, from) = mpsc::channel(LITERAL_QUEUE);
        let worker = shared.clone();
        let worker = tokio::task::spawn_blocking(move || unpack_literals(from, &worker, &out));
        let stage = &shared.stages.receive;
        let result = loop {
            let next = stage.at_socket(reader.next()).await;
            let mut lap = Lap::start();
            if let Ok(Some(frame)) = &next {
                shared.activity.touch();
                stage.add_bytes(frame_bytes(frame.payload.len()));
            }
            match next {
                // They are queued before their image is accepted.
                Ok(Some(frame))
                    if matches!(frame.kind, kind::BATCH | kind::END)
                        && frame.payload.len() > MAX_BATCH_FRAME =>
                {
                    break Err(TeleportError::Protocol("a batch that is too large".into()));
                }
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
        shared.connections.fetch_sub(1, Ordering::Relaxed);
        result
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
