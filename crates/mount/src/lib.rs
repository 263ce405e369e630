//! Remote devices: the protocol that serves a device to another site, the client that is one, and direct and managed
//! mounts put together from `device` and `net`.
//!
//! What must not live here: how a device is shown to a kernel or a program (`frontend`), and what a person types
//! (`drover`).

pub mod client;
mod compress;
pub mod direct;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod protocol;
pub mod server;

pub use error::MountError;

#[cfg(test)]
mod simulation;
