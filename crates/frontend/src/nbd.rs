//! An NBD server: block devices for QEMU, `nbdcopy`, the kernel and other clients of the NBD protocol (r3map §1.4.4.2;
//! the NBD project's `doc/proto.md`).
//!
//! - Fixed newstyle negotiation with several exports, `INFO`, `GO`, `LIST` and TLS; structured replies with holes,
//!   `base:allocation`, flush, FUA, trim, zeroes with `NO_HOLE` and `FAST_ZERO`, cache, several connections to one
//!   export.
//! - Each connection has one thread that receives requests. It serves requests that need not wait itself and hands the
//!   others to a pool of threads that grows and shrinks with the load (`pool`). A long write also goes to the pool if
//!   the client has sent more already: one thread copies it to the device while the other receives. A thread that
//!   completes a request sends all replies that are ready (`outbox`).
//! - Everything that a client can make grow has a limit: connections, options, requests and bytes in flight, the time
//!   of the handshake, the time in which it must receive its replies.
//!
//! Not in this module: sockets other than those of NBD clients, and where a device's bytes come from.
//!
//! Locks: the list of connections, a connection's budget, pool, outbox and threads. None is held while another is
//! taken, nor during device or socket I/O. Only TLS nests: the send or receive buffer before the TLS state; those
//! buffers are held during socket I/O, each by the one thread that sends or receives.

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
