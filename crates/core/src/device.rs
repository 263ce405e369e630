//! The block device interface that all parts share: a disk or memory region, addressed by byte offset.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use crate::Extent;

/// A block device, usable from many threads at once.
///
/// Calls block until done; to have many requests in flight, call from many threads (see [`BlockDevice::cost`] for when
/// that is worthwhile). Ranges are in bytes and need no alignment unless [`Capabilities::alignment`] says so.
///
/// Implementations MUST
/// - refuse a range outside of the device with [`DeviceError::OutOfRange`], without any effect;
/// - let a read that starts after a write has returned see that write;
/// - after a failed write, have each byte of its range either old or new;
/// - return from [`BlockDevice::flush`] only when every write that had returned before it began is where the device
///   promises it to be;
/// - implement every method: there are no defaults, so that no stage loses a capability by accident.
///
/// Administration (pulling, locking, closing) is not part of it: builders return typed handles for that.
pub trait BlockDevice: Send + Sync {
    /// Size in bytes. Constant.
    fn size(&self) -> u64;

    /// Its capabilities. Constant.
    fn capabilities(&self) -> Capabilities;

    /// Reads from `offset` into `buffer`.
    ///
    /// # Errors
    /// [`DeviceError`]; the content of `buffer` is then unspecified.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError>;

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// [`DeviceError`]; [`DeviceError::ReadOnly`] for a read-only device.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError>;

    /// Makes a range read as zeros; `zeroes` says whether it stays allocated.
    ///
    /// # Errors
    /// [`DeviceError`]; [`DeviceError::Unsupported`] when `zeroes` asks for a fast path and there is none.
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError>;

    /// Declares a range unused. Its content is then unspecified, but stable.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError>;

    /// Returns when every earlier write is where the device promises it to be.
    ///
    /// # Errors
    /// [`DeviceError`]; it is then unknown which writes were flushed.
    fn flush(&self) -> Result<(), DeviceError>;

    /// The allocation status of a range: contiguous runs from `offset` on, at least one, ending at or before `offset +
    /// length`. May stop early; may report zeros as data, never the reverse.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError>;

    /// Announces that a range will be read soon. A device that can prefetch does; returns without waiting.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError>;

    /// What a read of the range would wait for at this moment: a hint.
    fn cost(&self, offset: u64, length: u64) -> Cost;

    /// What a write, zeroing or trim of the range may have to wait for, including eviction that needs a network: a
    /// hint. Never less than the cost of a read that a partial write needs.
    fn write_cost(&self, offset: u64, length: u64) -> Cost;
}

/// The capabilities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Refuses writes, zeroing and trims.
    pub read_only: bool,
    /// [`BlockDevice::write_zeroes`] can be faster than writing zeros.
    pub fast_zeroes: bool,
    /// [`BlockDevice::trim`] frees space.
    pub trim: bool,
    /// [`BlockDevice::flush`] makes writes survive a crash or a power loss; otherwise it only orders them.
    pub durable: bool,
    /// [`BlockDevice::extents`] reports holes and zeros.
    pub extents: bool,
    /// Every offset and length must be a multiple of this (a power of two; 1 for none), except the length of a range
    /// that ends at the end of the device.
    pub alignment: u32,
    /// The most efficient request size (a power of two).
    pub preferred: u32,
    /// Upper bound on the length of a read or write.
    pub longest: u32,
}

/// Options of zeroing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeroes {
    /// Keep the space allocated: no hole.
    pub keep_allocated: bool,
    /// Only if faster than writing zeros; otherwise fail with [`DeviceError::Unsupported`] at once.
    pub only_fast: bool,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cost {
    /// Memory: not worth a thread switch.
    Memory,
    /// A local disk.
    Disk,
    /// A network.
    Network,
}

/// Why a request failed.
#[derive(Debug, Clone)]
pub enum DeviceError {
    /// The range is not within the device.
    OutOfRange {
        /// Its offset.
        offset: u64,
        /// Its length.
        length: u64,
        /// The size of the device.
        size: u64,
    },
    /// The range is unaligned, or longer than [`Capabilities::longest`].
    Unaligned {
        /// Its offset.
        offset: u64,
        /// Its length.
        length: u64,
        /// The required [`Capabilities::alignment`].
        alignment: u32,
    },
    /// The device is read-only.
    ReadOnly,
    /// The operation, or the requested variant, is not supported.
    Unsupported(Cow<'static, str>),
    /// No space: a disk, a cache or a limit is full.
    NoSpace(String),
    /// Temporarily unreachable; a retry may succeed.
    Unavailable(String),
    /// The data is corrupt, and is not returned.
    Corrupt(String),
    /// The device has been closed.
    Closed,
    /// I/O error of the medium.
    Io(Arc<io::Error>),
}

impl DeviceError {
    /// Whether the same request may succeed later without intervention.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unavailable(_) => true,
            Self::Io(error) => matches!(
                error.kind(),
                io::ErrorKind::Interrupted | io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
            ),
            _ => false,
        }
    }
}

impl std::fmt::Display for DeviceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OutOfRange {
                offset,
                length,
                size,
            } => write!(
                f,
                "{length} bytes at {offset} are not inside a device of {size} bytes"
            ),
            Self::Unaligned {
                offset,
                length,
                alignment,
            } => write!(
                f,
                "{length} bytes at {offset} are not aligned to {alignment} bytes, or too many"
            ),
            Self::ReadOnly => write!(f, "the device is read-only"),
            Self::Unsupported(what) => write!(f, "the device cannot {what}"),
            Self::NoSpace(what) => write!(f, "no space: {what}"),
            Self::Unavailable(why) => write!(f, "not reachable: {why}"),
            Self::Corrupt(what) => write!(f, "damaged: {what}"),
            Self::Closed => write!(f, "the device is closed"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error.as_ref()),
            _ => None,
        }
    }
}

/// Whether a disk or a quota is full.
#[must_use]
pub fn is_disk_full(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

impl From<io::Error> for DeviceError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            _ if is_disk_full(&error) => Self::NoSpace(error.to_string()),
            io::ErrorKind::ReadOnlyFilesystem => Self::ReadOnly,
            _ => Self::Io(Arc::new(error)),
        }
    }
}

/// Checks that a range lies within a device of `size` bytes.
///
/// # Errors
/// [`DeviceError::OutOfRange`].
pub fn check_range(offset: u64, length: u64, size: u64) -> Result<(), DeviceError> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(DeviceError::OutOfRange {
            offset,
            length,
            size,
        }),
    }
}

impl<T: BlockDevice + ?Sized> BlockDevice for Arc<T> {
    fn size(&self) -> u64 {
        (**self).size()
    }
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        (**self).read(offset, buffer)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        (**self).write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        (**self).write_zeroes(offset, length, zeroes)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        (**self).trim(offset, length)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        (**self).flush()
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        (**self).extents(offset, length)
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        (**self).prefetch(offset, length)
    }
    fn cost(&self, offset: u64, length: u64) -> Cost {
        (**self).cost(offset, length)
    }
    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        (**self).write_cost(offset, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked_without_overflow() {
        assert!(check_range(0, 10, 10).is_ok());
        assert!(check_range(10, 0, 10).is_ok());
        assert!(check_range(5, 6, 10).is_err());
        assert!(check_range(u64::MAX, 2, 10).is_err());
        assert!(check_range(11, 0, 10).is_err());
    }

    #[test]
    fn a_full_disk_is_distinguished_from_other_errors() {
        let full = DeviceError::from(io::Error::from(io::ErrorKind::StorageFull));
        assert!(matches!(full, DeviceError::NoSpace(_)), "{full}");
        assert!(!full.is_transient());
        assert!(DeviceError::Unavailable("the link is down".into()).is_transient());
        assert!(DeviceError::from(io::Error::from(io::ErrorKind::TimedOut)).is_transient());
    }
}
