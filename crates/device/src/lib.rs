//! The block-device stack: backends that hold bytes, stages that wrap a device and are one, and the builder that
//! stacks them.
//!
//! What lives here knows nothing of networks and of who reads a device: a remote device is a
//! [`BlockDevice`](drover_core::BlockDevice) that another crate makes, a front end serves whatever is on top.

pub mod backend;
pub mod builder;
pub mod remote;
pub mod stage;
pub mod synced;
#[cfg(feature = "testing")]
pub mod testing;
