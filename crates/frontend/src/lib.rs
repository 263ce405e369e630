//! What a kernel, a hypervisor or a program sees of a [`BlockDevice`](drover_core::BlockDevice): an NBD server, a
//! file by FUSE (and a loop device on it), kernel NBD and ublk devices, and memory whose pages come from a device.
//!
//! All unsafe code of the project lives here, each block with its reason. What must not live here: anything that
//! knows where a device's bytes come from.

mod budget;
pub mod fuse;
mod kernel;
pub mod kernel_nbd;
pub mod loopdev;
pub mod nbd;
mod patience;
mod pool;
pub mod region;
pub mod ublk;

/// The page for programmers: its code is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/tasks/embed-a-device.md")]
struct EmbedADevice;
