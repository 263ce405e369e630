//! Services and calls: typed requests between processes.
//!
//! A connection is for one call. Its first frame after the hello names a service and carries the request. The service
//! answers with one reply or one [`Refusal`]; before that either end may send progress. A request may also open a
//! longer conversation: the service defines what follows its reply.
//!
//! A [`Request`] is a type that names its service, the right it needs, and what may come back. [`call()`] makes a call and
//! waits; [`open`] sends it without waiting, so that more can follow in the same flight. The other side
//! implements [`Handler`] for the request, or [`Service`] for a conversation, and dispatches by [`Services`].
//! The bytes are in `docs/format/services.md`.

mod call;
mod dispatch;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{NetError, Refusal, Right, Rights, decode, encode};

pub use call::{CallEvent, OutgoingCall, call, open, read_greeted_reply, read_reply, reply_in};
pub use dispatch::{BoxError, Exchange, Handler, IncomingCall, Service, ServiceFuture, Services};

/// Kinds of the frames of a call; services have those from 0x10 on.
pub mod kind {
    /// A service's id and the request.
    pub const CALL: u8 = 0x01;
    /// The answer.
    pub const REPLY: u8 = 0x02;
    /// Progress of either end.
    pub const PROGRESS: u8 = 0x03;
    /// A [`Refusal`](crate::Refusal) instead of an answer.
    pub const REFUSED: u8 = 0x04;
}

/// The longest id of a service, in bytes.
pub const MAX_ID: usize = 32;

/// What may be in a message of a call.
pub trait Message: Serialize + DeserializeOwned + Send + 'static {}

impl<T: Serialize + DeserializeOwned + Send + 'static> Message for T {}

/// A request to a service.
pub trait Request: Message + Sync {
    /// The id of the service that takes it: lower-case words joined by dots, at most [`MAX_ID`] bytes.
    const SERVICE: &'static str;
    /// The right that the caller must have.
    const RIGHT: Right;
    /// What either end may send before the reply; `()` for nothing.
    type Progress: Message + Sync;
    /// The reply.
    type Reply: Message + Sync;
}

/// Makes a type a [`Request`]: `request!(Type: "its.service", Right, Progress => Reply)`.
#[macro_export]
macro_rules! request {
    ($request:ty: $service:literal, $right:ident, $progress:ty => $reply:ty) => {
        impl $crate::service::Request for $request {
            const SERVICE: &'static str = $service;
            const RIGHT: $crate::Right = $crate::Right::$right;
            type Progress = $progress;
            type Reply = $reply;
        }
    };
}

/// The caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The key that it proved to have; on a Unix socket the site's own.
    pub key: crate::PeerKey,
    /// Its name, for messages.
    pub name: String,
    /// What it may do.
    pub rights: Rights,
    /// Where it may do it: other domains are out of its sight.
    pub domain: String,
}

/// The domain of peers and images for which none is named.
pub const DEFAULT_DOMAIN: &str = "default";

/// The payload of a [`kind::CALL`].
#[must_use]
pub fn encode_call<R: Request>(request: &R) -> Vec<u8> {
    let id = R::SERVICE.as_bytes();
    debug_assert!(id.len() <= MAX_ID && id.iter().all(|&b| is_id_byte(b)));
    let mut out = vec![id.len() as u8];
    out.extend_from_slice(id);
    out.extend(encode(request));
    out
}

/// The service that a [`kind::CALL`] names, and the request's bytes.
///
/// # Errors
/// [`NetError::Message`] for an id that cannot be one.
pub fn decode_call(payload: &[u8]) -> Result<(&str, &[u8]), NetError> {
    let id = payload.split_first().and_then(|(&length, rest)| {
        let (id, request) = rest.split_at_checked(usize::from(length))?;
        let good = (1..=MAX_ID).contains(&id.len()) && id.iter().all(|&b| is_id_byte(b));
        Some((std::str::from_utf8(id).ok().filter(|_| good)?, request))
    });
    id.ok_or_else(|| NetError::Message {
        what: "call",
        reason: "it names no service".into(),
    })
}

fn is_id_byte(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'.' | b'-')
}

/// The reply or refusal in a frame that ends a call; none when it is of another kind.
fn final_reply<R: Request>(frame: &crate::Frame) -> Option<Result<R::Reply, NetError>> {
    match frame.kind {
        kind::REPLY => Some(decode(&frame.payload)),
        kind::REFUSED => Some(Err(match decode::<Refusal>(&frame.payload) {
            Ok(refusal) => NetError::Refused(refusal.tidy()),
            Err(e) => e,
        })),
        _ => None,
    }
}
