//! How sites talk: identity, pairing tickets, TLS 1.3 connections between pinned keys, Unix
//! sockets, length-limited frames, the hello, services and calls, rate limits, shares of a limited
//! supply, reconnecting, and groups of connections with credit and priority ([`group`]).
//!
//! The services themselves are defined in the crates above; nothing here depends on images or devices. No round trip
//! per frame, and no background tasks: the owner of a [`FrameReader`] or [`FrameWriter`] drives it. The encoding is
//! described in `docs/format/wire.md`.
//!
//! # Ending a connection
//!
//! A direction ends with [`FrameWriter::finish`]; [`FrameReader::next`] then yields `None`, and any other end is
//! [`NetError::Truncated`]. Dropping a socket with unread bytes makes the kernel reset it, and a reset discards what
//! the peer has not read yet. So use [`close`] at the end, and acknowledge what matters by an explicit message.
//!
//! # Example
//!
//! A service that answers a request, and a call of it. Over a network both ends are authenticated first: [`Listener`]
//! and [`connect()`] take the place of [`Connection::pair`].
//!
//! ```
//! use drover_net::service::{Exchange, Handler, IncomingCall, Peer, Services, call};
//! use drover_net::{Code, Connection, Identity, Refusal, Rights, request};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Echo(String);
//! request!(Echo: "test.echo", List, () => String);
//!
//! struct EchoHandler;
//!
//! impl Handler<Echo> for EchoHandler {
//!     async fn handle(
//!         &self,
//!         peer: &Peer,
//!         request: Echo,
//!         _: &mut Exchange<'_, Echo>,
//!     ) -> Result<String, Refusal> {
//!         Ok(format!("{} to {}", request.0, peer.name))
//!     }
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut services = Services::new(Refusal::new(Code::Unsupported, "no such service"));
//! services.handle::<Echo>(EchoHandler);
//!
//! let (here, there) = Connection::pair()?;
//! let (_stop, stopped) = tokio::sync::watch::channel(false);
//! tokio::spawn(async move {
//!     let call = IncomingCall::receive(there, stopped).await?;
//!     let peer = Peer { key: Identity::generate().key(), name: "lyon".into(), rights: Rights::DEFAULT.of_peer(), domain: "default".into() };
//!     services.serve(peer, call).await
//! });
//! let reply = call(here, &Echo("hello".into()), |()| {}).await?;
//! assert_eq!(reply, "hello to lyon");
//! # Ok(())
//! # }
//! ```

mod backoff;
mod connect;
mod connection;
mod error;
mod frame;
pub mod group;
mod hello;
mod identity;
mod keep_alive;
mod key;
mod listen;
mod local;
mod messages;
mod rate;
mod refusal;
mod rights;
mod route;
pub mod service;
mod share;
mod stream;
mod ticket;
mod tls;
mod until;

pub use backoff::Backoff;
pub use connect::{
    ConnectOptions, MAX_ATTEMPTS, NoConnection, connect, connect_any, connect_or_tell,
};
pub use connection::Connection;
pub use error::NetError;
pub use frame::{
    Frame, FrameReader, FrameWriter, HEADER_LEN, MAX_FRAME, MAX_FRAME_BEFORE_TRUST, RESERVED_KINDS,
    WIRE_VERSION, close,
};
pub use hello::{
    GREET_TIMEOUT, Greeting, PROTOCOL_MAX, PROTOCOL_MIN, Role, greet, greet_as, read_hello,
    send_hello,
};
pub use identity::Identity;
pub use keep_alive::KeepAlive;
pub use key::{ParseKeyError, PeerKey};
pub use listen::{HANDSHAKE_TIMEOUT, Listener, MAX_PENDING, Pending, Slot, network_of};
pub use local::{LocalListener, connect_unix};
pub use messages::{decode, encode};
pub use rate::RateLimit;
pub use refusal::{Code, Refusal};
pub use rights::{Right, Rights, UnknownRight};
pub use route::Route;
pub use service::{DEFAULT_DOMAIN, Peer};
pub use share::{Share, ShareLimits, Shares};
pub use stream::WireCounters;
pub use ticket::{Ticket, TicketError, random_id, same_secret, warm_up};
pub use until::until;

/// The result type of this crate.
pub type Result<T, E = NetError> = std::result::Result<T, E>;
