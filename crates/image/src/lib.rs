//! Disk image formats: raw, qcow2, vmdk, vhdx, vdi and vhd, detected by content and treated as untrusted.
//!
//! There are two views of an image. [`Layout`] is the order in which a *file*'s bytes are walked, so that guest data
//! comes in guest order whatever the container; [`VirtualDisk`] is the disk that the *guest* sees, assembled from all
//! files. [`open_for_sending`] combines them for a sender. [`guest`] looks inside such a disk.
//!
//! Parsers are total: sizes are checked before allocation, every loop is bounded by the file's size or a constant in
//! [`limits`], arithmetic is checked, and tables are read a page at a time. What must not live here: unsafe code,
//! async, writing, networking.
//!
//! ```
//! use std::sync::Arc;
//!
//! use drover_core::ReadAt;
//! use drover_image::{Format, VirtualDisk, parse};
//!
//! # fn main() -> Result<(), drover_image::ImageError> {
//! // Anything that implements `ReadAt` can be parsed.
//! let file = Arc::new(vec![0x55; 1 << 20]);
//! let parsed = parse(file.clone())?;
//! assert_eq!((parsed.format, parsed.virtual_size), (Format::Raw, 1 << 20));
//! assert!(parsed.backing.is_none());
//! let disk = VirtualDisk::from_content(file)?;
//! assert_eq!(disk.len(), 1 << 20);
//! # Ok(())
//! # }
//! ```

mod container;
mod disk;
mod error;
mod file;
mod follow;
mod format;
pub mod guest;
pub mod layout;
pub mod limits;
mod mapping;
mod names;
mod outgoing;
mod parse;
mod parts;
mod probe;
mod qcow2;
mod reader;
mod vdi;
mod vhd;
mod vhdx;
mod vmdk;

pub use disk::{Extents, Stored, VirtualDisk};
pub use error::ImageError;
pub use file::{ImageFile, Stamp};
pub use follow::{Known, Trust};
pub use format::{Format, ParseFormatError};
pub use layout::{GrainRange, Layout, LayoutError, LayoutLimits, Order, Piece, Pieces, RangeKind};
pub use outgoing::{Conversion, Outgoing, open_for_sending, open_for_sending_with, qcow2_of};
pub use parse::{Parsed, parse};
pub use parts::{Part, named_files, parts};
pub use qcow2::{Change, MAX_ATTACHED_BYTES, attach, attached, detach, qcow2_size};
