//! The side that serves calls.

use std::collections::BTreeMap;
use std::error::Error;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::timeout;

use super::call::next;
use super::{Peer, Request, decode_call, kind};
use crate::frame::corrupt;
use crate::{
    Code, Connection, FrameReader, FrameWriter, NetError, PeerKey, Refusal, Right, Role, decode,
    encode, greet,
};

/// Handles a request.
pub trait Handler<R: Request>: Send + Sync + 'static {
    /// Returns the reply.
    ///
    /// # Errors
    /// A refusal, which the caller gets.
    fn handle(
        &self,
        peer: &Peer,
        request: R,
        exchange: &mut Exchange<'_, R>,
    ) -> impl Future<Output = Result<R::Reply, Refusal>> + Send;

    /// Called when the reply has been sent, or cannot be.
    fn reply_sent(&self) {}
}

/// Refuses every call.
impl<R: Request> Handler<R> for Refusal {
    async fn handle(&self, _: &Peer, _: R, _: &mut Exchange<'_, R>) -> Result<R::Reply, Refusal> {
        Err(self.clone())
    }
}

/// Timeout of a caller's request.
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// The largest request, in bytes; a service may take more in what follows.
const MAX_CALL: usize = 64 << 10;

/// How long a caller may take to close after its reply.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// The error that ended a call, for the log.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// What [`Service::serve`] returns.
pub type ServiceFuture<'a> = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send + 'a>>;

/// A service of a process.
pub trait Service: Send + Sync + 'static {
    /// Its id; see [`Request::SERVICE`].
    fn id(&self) -> &'static str;

    /// The right that a caller must have.
    fn right(&self) -> Right;

    /// Serves one caller, to the end of the connection.
    fn serve(&self, peer: Peer, call: IncomingCall) -> ServiceFuture<'_>;
}

/// An incoming call: a connection, and its request.
#[derive(Debug)]
pub struct IncomingCall {
    /// The service's id; there need not be one of that id.
    pub service: String,
    /// The request's bytes.
    pub request: Bytes,
    /// From the caller.
    pub reader: FrameReader,
    /// To the caller.
    pub writer: FrameWriter,
    /// Set when the site is to stop.
    pub stop: watch::Receiver<bool>,
}

impl IncomingCall {
    /// Exchanges hellos with a caller and reads its request.
    ///
    /// # Errors
    /// As [`greet`] and [`IncomingCall::receive_after_hello`].
    pub async fn receive(
        connection: Connection,
        stop: watch::Receiver<bool>,
    ) -> Result<IncomingCall, NetError> {
        let (mut reader, mut writer) = connection.split();
        greet(&mut reader, &mut writer, Role::Server).await?;
        IncomingCall::receive_after_hello(reader, writer, stop).await
    }

    /// Reads the request of a caller after the hellos.
    ///
    /// # Errors
    /// When it takes longer than ten seconds, sends something else, or hangs up.
    pub async fn receive_after_hello(
        mut reader: FrameReader,
        writer: FrameWriter,
        stop: watch::Receiver<bool>,
    ) -> Result<IncomingCall, NetError> {
        reader.set_max_frame(reader.max_frame().min(MAX_CALL));
        let frame = match timeout(CALL_LIMIT, next(&mut reader)).await {
            Ok(frame) => frame?,
            Err(_) => {
                return Err(NetError::TimedOut {
                    peer: reader.peer_text().to_owned(),
                    what: "its request",
                    after: CALL_LIMIT,
                });
            }
        };
        if frame.kind != kind::CALL {
            return Err(corrupt(reader.peer_text(), "unexpected kind in a request"));
        }
        let (service, request) = decode_call(&frame.payload)?;
        Ok(IncomingCall {
            service: service.to_owned(),
            request: frame.payload.slice_ref(request),
            reader,
            writer,
            stop,
        })
    }

    /// The request.
    ///
    /// # Errors
    /// [`NetError::Message`] when it is not one.
    pub fn request<R: DeserializeOwned>(&self) -> Result<R, NetError> {
        decode(&self.request)
    }

    /// Sends the reply, so that the connection can be used for what the request opened. Not flushed.
    ///
    /// # Errors
    /// That the connection broke.
    pub async fn accept<R: Request>(&mut self, reply: &R::Reply) -> Result<(), NetError> {
        self.writer.send(kind::REPLY, &encode(reply)).await
    }

    /// Refuses the call and hangs up.
    ///
    /// # Errors
    /// That the connection broke.
    pub async fn refuse(self, refusal: &Refusal) -> Result<(), NetError> {
        self.end(kind::REFUSED, refusal).await
    }

    /// Sends the last frame of the call and hangs up.
    async fn end(mut self, kind: u8, message: &impl Serialize) -> Result<(), NetError> {
        self.writer.send(kind, &encode(message)).await?;
        self.writer.flush().await?;
        // The caller has its reply; errors while closing do not matter.
        let _ = crate::close(self.reader, self.writer, CLOSE_LIMIT).await;
        Ok(())
    }
}

/// The exchange of progress between a request and its reply.
#[derive(Debug)]
pub struct Exchange<'a, R> {
    call: &'a mut IncomingCall,
    caller: PeerKey,
    request: PhantomData<fn(R)>,
}

impl<R: Request> Exchange<'_, R> {
    /// Set when the site is to stop; it waits only a few seconds for a slow reply.
    #[must_use]
    pub fn stop(&self) -> watch::Receiver<bool> {
        self.call.stop.clone()
    }

    /// The key of the caller; on a Unix socket the site's own.
    #[must_use]
    pub fn caller(&self) -> PeerKey {
        self.caller
    }

    /// The caller's end of the connection, for messages: its address, except on a Unix socket.
    #[must_use]
    pub fn remote(&self) -> &str {
        self.call.reader.peer_text()
    }

    /// Sends progress.
    ///
    /// # Errors
    /// That the connection broke.
    pub async fn report(&mut self, progress: &R::Progress) -> Result<(), NetError> {
        let writer = &mut self.call.writer;
        writer.send(kind::PROGRESS, &encode(progress)).await?;
        writer.flush().await
    }

    /// The caller's next progress message. Cancel safe.
    ///
    /// # Errors
    /// That the caller has gone, or broke the protocol.
    pub async fn next_progress(&mut self) -> Result<R::Progress, NetError> {
        let frame = next(&mut self.call.reader).await?;
        if frame.kind != kind::PROGRESS {
            let peer = self.call.reader.peer_text();
            return Err(corrupt(peer, "unexpected kind in a call"));
        }
        decode(&frame.payload)
    }
}

/// A service that gives one answer to a request.
struct HandlerService<R, H>(H, PhantomData<fn(R)>);

impl<R: Request, H: Handler<R>> Service for HandlerService<R, H> {
    fn id(&self) -> &'static str {
        R::SERVICE
    }

    fn right(&self) -> Right {
        R::RIGHT
    }

    fn serve(&self, peer: Peer, mut call: IncomingCall) -> ServiceFuture<'_> {
        Box::pin(async move {
            let request = call.request()?;
            let mut exchange = Exchange {
                call: &mut call,
                caller: peer.key,
                request: PhantomData,
            };
            let sent = match self.0.handle(&peer, request, &mut exchange).await {
                Ok(reply) => call.end(kind::REPLY, &reply).await,
                Err(refusal) => call.refuse(&refusal).await,
            };
            self.0.reply_sent();
            Ok(sent?)
        })
    }
}

/// The services of a process, by their ids.
pub struct Services {
    by_id: BTreeMap<&'static str, Arc<dyn Service>>,
    refused: BTreeMap<&'static str, Refusal>,
    unknown: Refusal,
}

impl Services {
    /// No services yet. `unknown` is the refusal of calls for a service that is not there.
    #[must_use]
    pub fn new(unknown: Refusal) -> Self {
        Services {
            by_id: BTreeMap::new(),
            refused: BTreeMap::new(),
            unknown,
        }
    }

    /// Adds a service; it replaces one of the same id.
    pub fn add(&mut self, service: impl Service) {
        self.by_id.insert(service.id(), Arc::new(service));
    }

    /// Adds a handler of a request.
    pub fn handle<R: Request>(&mut self, handler: impl Handler<R>) {
        self.add(HandlerService(handler, PhantomData));
    }

    /// Refuses a request that a process of this kind never serves, whatever rights the caller has.
    pub fn refuse<R: Request>(&mut self, why: Refusal) {
        self.refused.insert(R::SERVICE, why);
    }

    /// The right that the service of that id requires; none when there is no such service.
    #[must_use]
    pub fn right(&self, id: &str) -> Option<Right> {
        self.by_id.get(id).map(|service| service.right())
    }

    /// Serves one call to its end. A call for an unknown service, or without the right, is refused.
    ///
    /// # Errors
    /// What ended the conversation before its time.
    pub async fn serve(&self, peer: Peer, call: IncomingCall) -> Result<(), BoxError> {
        let Some(service) = self.by_id.get(call.service.as_str()) else {
            let why = self.refused.get(call.service.as_str());
            return Ok(call.refuse(why.unwrap_or(&self.unknown)).await?);
        };
        let right = service.right();
        if !peer.rights.has(right) {
            let text = format!("the right {} is needed", right.name());
            return Ok(call.refuse(&Refusal::new(Code::Denied, text)).await?);
        }
        service.serve(peer, call).await
    }
}

impl std::fmt::Debug for Services {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.by_id.keys()).finish()
    }
}
