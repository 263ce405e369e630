//! Sessions at the destination: registration, and receiving their images.

mod claims;
mod compare;
mod control;
mod data;
mod driver;
mod estimate;
mod event;
mod flock;
mod flow;
mod images;
mod matching;
mod on_demand;
mod prepare;
mod profile;
mod reuse;
mod taken;
mod taken_ahead;
mod waits;

use std::sync::Arc;

use drover_net::service::{IncomingCall, Peer, Request, Service, ServiceFuture};
use drover_net::{Code, KeepAlive, PeerKey, Refusal, Right, Share};
use tokio::sync::{mpsc, watch};

use self::control::{Frames, Session};
use super::SessionShared;
use crate::TeleportError;
use crate::flock::live::FlockSession;
use crate::frames::{CLOSE_LIMIT, FRAME_QUEUE, read_frames, wait_true, write_frames};
use crate::protocol::{LAYOUT_PART_BYTES, MAX_SESSION_IMAGES};
use crate::services::{OpenSession, SendFlock};
use crate::site::Site;

pub use data::DataConnections;
pub use event::DriverEvent;
pub use flow::Flow;

/// Removes a session from the site's list when it ends.
struct Registered {
    site: Arc<Site>,
    id: [u8; 16],
    _place: Share<PeerKey>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(shared) = self.site.sessions.lock().remove(&self.id) {
            shared.ended.send_replace(true);
        }
    }
}

/// Receives the images of a session ([`OpenSession`]) until the source ends it or the site stops. When the connection
/// breaks or the source violates the protocol, the current transfer can be resumed.
pub struct Sessions(pub Arc<Site>);

impl Service for Sessions {
    fn id(&self) -> &'static str {
        OpenSession::SERVICE
    }

    fn right(&self) -> Right {
        OpenSession::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request: OpenSession = call.request()?;
            let session = self.0.session::<OpenSession>(peer, call, request, None);
            Ok(session.await?)
        })
    }
}

/// Receives the images of a session of a flock ([`SendFlock`]), as [`Sessions`] does.
pub struct FlockSessions(pub Arc<Site>);

impl Service for FlockSessions {
    fn id(&self) -> &'static str {
        SendFlock::SERVICE
    }

    fn right(&self) -> Right {
        SendFlock::RIGHT
    }

    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let SendFlock {
                images,
                session,
                flock,
            } = call.request()?;
            // It may be in a record that another node has written.
            let (site, key) = (Arc::clone(&self.0), peer.key);
            let found = tokio::task::spawn_blocking(move || site.flock_of(&key, &flock));
            let Some(flock) = found.await? else {
                let text = "the site knows of no such flock from you, or it is over; send it again";
                return Ok(call.refuse(&Refusal::new(Code::NotFound, text)).await?);
            };
            let request = OpenSession { images, session };
            let of = Some(flock.session());
            let session = self.0.session::<SendFlock>(peer, call, request, of);
            Ok(session.await?)
        })
    }
}

/// Becomes true when one of the first two does; watched until the third is.
fn either(
    stop: watch::Receiver<bool>,
    halt: watch::Receiver<bool>,
    ended: watch::Receiver<bool>,
) -> watch::Receiver<bool> {
    let (either, out) = watch::channel(*stop.borrow());
    tokio::spawn(async move {
        tokio::select! {
            () = wait_true(stop) => {}
            () = wait_true(halt) => {}
            () = wait_true(ended) => return,
        }
        either.send_replace(true);
    });
    out
}

impl Site {
    async fn session<R: Request<Reply = ()>>(
        self: &Arc<Self>,
        peer: Peer,
        mut call: IncomingCall,
        request: OpenSession,
        flock: Option<FlockSession>,
    ) -> Result<(), TeleportError> {
        if !self.may_begin() {
            // Cut off, not refused: the source tries again, and another node of the site.
            return Err(TeleportError::Stopped);
        }
        let (images, began) = (request.images, std::time::Instant::now());
        call.reader.set_max_frame(LAYOUT_PART_BYTES);
        KeepAlive::default().apply(&mut call.reader, &mut call.writer);
        let (to, first_data) = mpsc::channel(FRAME_QUEUE);
        let number = self.active.number();
        let shared = Arc::new(SessionShared::new(peer, number, to, flock));
        let _registered = match self.register(shared.clone(), request) {
            Ok(registered) => registered,
            Err(refusal) => return Ok(call.refuse(&refusal).await?),
        };
        call.accept::<R>(&()).await?;
        tracing::info!(peer = shared.peer_name, images, "session opened");
        let opened = Arc::clone(&shared);
        let IncomingCall {
            reader,
            writer,
            stop,
            ..
        } = call;
        let mut frames = Frames {
            peer: reader.peer_text().to_owned(),
            control: read_frames(reader),
            first_data,
            wants: false,
        };
        let (out, written) = write_frames(writer);
        let stop = either(stop, shared.halt.subscribe(), shared.ended.subscribe());
        let mut session = Session {
            site: self.clone(),
            shared,
            out,
            stop,
            generations: None,
            likeness: None,
            profile_parts: Vec::new(),
            profile: None,
        };
        let result = session.run(&mut frames).await;
        opened.ended.send_replace(true);
        drop(session);
        // The last reply must arrive before the socket is closed.
        let _ = tokio::time::timeout(CLOSE_LIMIT, async {
            let _ = written.await;
            while let Some(Ok(_)) = frames.control.recv().await {}
        })
        .await;
        let bytes = opened.stages.receive.time().bytes;
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!(
            peer = opened.peer_name,
            images,
            bytes,
            seconds,
            error = result.as_ref().err().map(tracing::field::display),
            "session ended"
        );
        result
    }

    fn register(
        self: &Arc<Self>,
        shared: Arc<SessionShared>,
        request: OpenSession,
    ) -> Result<Registered, Refusal> {
        let OpenSession {
            images,
            session: id,
        } = request;
        if images > MAX_SESSION_IMAGES {
            let text = format!("a session may send at most {MAX_SESSION_IMAGES} images");
            return Err(Refusal::new(Code::Denied, text));
        }
        let mut sessions = self.sessions.lock();
        if sessions.contains_key(&id) {
            let text = "a session of that ID is open already";
            return Err(Refusal::new(Code::Busy, text));
        }
        let place = self.config.supplies.session(shared.peer)?;
        sessions.insert(id, shared);
        drop(sessions);
        self.session_opened.notify_waiters();
        Ok(Registered {
            site: self.clone(),
            id,
            _place: place,
        })
    }
}
