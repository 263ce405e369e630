//! Front ends: they serve a [`BlockDevice`](drover_core::BlockDevice) to kernels, hypervisors and programs, as an NBD
//! export, as a file by FUSE (with a loop device on it), as a kernel NBD or ublk device, or as memory whose pages come
//! from the device.
//!
//! All unsafe code of the project lives here, each block with its justification. Nothing here depends on where a
//! device's bytes come from.
//!
//! A device in memory as an NBD export on a Unix socket:
//!
//! ```
//! use std::sync::Arc;
//!
//! use drover_device::backend::MemoryDevice;
//! use drover_frontend::nbd::{Export, Server, ServerOptions};
//!
//! let directory = tempfile::tempdir()?;
//! let socket = directory.path().join("disk.sock");
//! let export = Export {
//!     name: "disk".into(),
//!     description: "a device in memory".into(),
//!     read_only: false,
//!     device: Arc::new(MemoryDevice::new(1 << 20)),
//! };
//! let server = Server::new(vec![export], ServerOptions::default())?;
//! let listening = server.listen_unix(&socket)?;
//! // Now: qemu-img info nbd+unix:///disk?socket=...
//! assert!(socket.exists());
//! listening.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod budget;
pub mod fuse;
mod kernel;
pub mod kernel_nbd;
pub mod loopdev;
pub mod nbd;
mod pool;
pub mod region;
mod retry;
pub mod ublk;

/// The programmers' guide, whose code is compiled and run as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/tasks/embed-a-device.md")]
struct EmbedADevice;
