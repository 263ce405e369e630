//! An NBD server: block devices for QEMU, `nbdcopy`, the kernel and whoever else speaks the NBD protocol (r3map
//! §1.4.4.2; the NBD project's `doc/proto.md`).
//!
//! - Fixed newstyle negotiation with several exports, `INFO`, `GO`, `LIST` and TLS; structured replies with holes,
//!   `base:allocation`, flush, FUA, trim, zeroes with `NO_HOLE` and `FAST_ZERO`, cache, several connections to one
//!   export.
//! - A connection has one thread that reads requests. It answers by itself what waits for nothing; the rest goes to
//!   threads that come and go with the work (`pool`). So does a long write that waits for nothing, when the client has
//!   sent more already: one thread copies it to the device while the other receives what follows. Whoever has a reply
//!   ready sends everybody's (`outbox`).
//! - Everything that a client can make grow has a limit: connections, options, requests and bytes under way, the
//!   time of the handshake, the time in which it must take what it asked for.
//!
//! What must not live here: sockets to anything but NBD clients, and what a device is made of.
//!
//! Locks: the list of connections, a connection's budget, pool, outbox and threads. None is held while another is taken,
//! nor over a device or a socket. Only TLS nests: the sender's, or the receiver's, buffer before the TLS state; those
//! buffers are held over the socket, each by the one thread that sends or receives.

mod buffer;
mod check;
mod connection;
mod counters;
mod error;
mod execute;
#[cfg(fuzzing)]
pub mod fuzzing;
mod input;
mod negotiate;
mod options;
mod outbox;
mod server;
mod socket;
mod tls;
mod transport;
mod unix;
pub mod wire;

pub use check::Facts;
pub use counters::Counts;
pub use error::NbdError;
pub use options::{Export, ServerOptions};
pub use server::{Address, Connection, Listening, Negotiated, Server};
pub use tls::Tls;
