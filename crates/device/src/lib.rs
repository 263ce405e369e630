//! The block-device stack: backends that store bytes, stages that wrap a device, the managed device (a cache in front
//! of a remote one), and the builder that puts them together.
//!
//! Nothing here depends on networks or on front ends: a remote device is a [`BlockDevice`](drover_core::BlockDevice) or
//! a [`Remote`](remote::Remote) of another crate, and a front end serves the top of a stack.
//!
//! A file as a device whose changes are tracked:
//!
//! ```
//! use drover_device::backend::FileDevice;
//! use drover_device::builder::Stack;
//!
//! let file = tempfile::tempfile()?;
//! file.set_len(1 << 20)?;
//! let stack = Stack::over(FileDevice::new(file, false)?).tracked(4096).build()?;
//! stack.device.write(5000, b"some bytes")?;
//! stack.device.flush()?;
//! let changed = stack.track.expect("it was asked for").take();
//! assert_eq!(changed.bytes(), 4096);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod backend;
pub mod builder;
pub mod local_remote;
pub mod remote;
pub mod stage;
pub mod synced;
#[cfg(feature = "testing")]
pub mod testing;
