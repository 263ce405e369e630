//! The types that all crates share: units, [`Digest`], [`Extent`], [`ImageName`], head kinds
//! the traits [`ReadAt`] and [`BlockDevice`], and the bytes of the NBD protocol ([`nbd`]).
//!
//! No I/O, no async runtime and no unsafe code live here; a trait that describes I/O may.
//!
//! ```
//! use drover_core::{BLOCK_SIZE_U64, DeviceError, ImageName, blocks_for, check_range};
//!
//! // A name is one path component that needs no quoting.
//! assert!(ImageName::new("debian-12.qcow2").is_ok());
//! assert!(ImageName::new("../passwd").is_err());
//! assert_eq!(blocks_for(BLOCK_SIZE_U64 + 1), 2);
//! let outside = check_range(60, 10, 64);
//! assert!(matches!(outside, Err(DeviceError::OutOfRange { size: 64, .. })));
//! ```

mod device;
mod digest;
mod extent;
mod head;
mod name;
pub mod nbd;
mod read_at;
mod units;
mod varint;

pub use device::{BlockDevice, Capabilities, Cost, DeviceError, Zeroes, check_range, is_disk_full};
pub use digest::{Digest, ParseDigestError};
pub use extent::{Extent, ExtentKind};
pub use head::Head;
pub use name::{ImageName, NameError};
pub use read_at::ReadAt;
pub use units::{
    BLOCK_SIZE, BLOCK_SIZE_U64, BlockIndex, CompactIndex, blocks_for, is_zero, trailing_zeros,
};
pub use varint::{put_varint, take_varint};
