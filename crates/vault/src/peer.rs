//! A vault at a peer: what travels, what the peer permits, and the store that it is to the other end. No I/O and no
//! clock of its own: connections are made by whoever uses it (`docs/format/vault-peer.md`).

mod client;
mod guard;
mod wire;

#[cfg(fuzzing)]
pub use client::asking_for_fuzzing;
pub use client::{Connect, Link, LinkError, Patience as PeerPatience, PeerObjects};
pub use guard::{Guard, Own};
pub use wire::{
    Answer, Ask, Frame, MAX_PUT_BYTES, MAX_READ_BYTES, Serving, Task, WireError, kind, refused,
    says_created,
};
