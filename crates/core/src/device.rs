//! The one trait at which all parts meet: a disk, or a memory region, as bytes by position.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use crate::Extent;

/// A block device: reads, writes and what goes with them, from many threads at once.
///
/// Calls block until they are done; for many requests in flight, call from many threads (see
/// [`BlockDevice::cost`] for when that is worth it). Ranges are in bytes and need no alignment unless
/// [`Capabilities::alignment`] says so.
///
/// Implementations MUST
/// - refuse a range that leaves the device with [`DeviceError::OutOfRange`] and change nothing;
/// - let a read that starts after a write has returned see that write;
/// - make a range that a failed write touched hold, byte by byte, either the old or the new data;
/// - return from [`BlockDevice::flush`] only when every write that had returned before it began is where the
///   device promises it to be;
/// - implement every method themselves: there are no defaults, so that no stage loses a capability by accident.
///
/// Administration (pulling, locking, closing) is not here: builders hand out typed handles for it.
pub trait BlockDevice: Send + Sync {
    /// Bytes in all. Does not change.
    fn size(&self) -> u64;

    /// What it can do. Does not change.
    fn capabilities(&self) -> Capabilities;

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// [`DeviceError`]; `buffer` then holds nothing of meaning.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError>;

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// [`DeviceError`], [`DeviceError::ReadOnly`] for a device that takes no writes.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError>;

    /// Makes a range read as zeros; whether it stays allocated is for `zeroes` to say.
    ///
    /// # Errors
    /// [`DeviceError`]; [`DeviceError::Unsupported`] when `zeroes` asks for speed and it would be no faster than
    /// writing.
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError>;

    /// Declares a range unused. What it reads as afterwards is the device's choice, but the same
    /// each time.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError>;

    /// Returns when every write before it is where the device promises it to be.
    ///
    /// # Errors
    /// [`DeviceError`]; then it is not known what of it got there.
    fn flush(&self) -> Result<(), DeviceError>;

    /// What a range holds: runs in order without gaps or overlaps, from `offset` on, at least one, ending at or
    /// before `offset + length`. May stop early; may call data what is zero, never the reverse.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError>;

    /// Announces that a range will be read soon. A device that can fetch ahead does; returns without waiting for it.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError>;

    /// What a read of the range would wait for, at this moment: a hint.
    fn cost(&self, offset: u64, length: u64) -> Cost;

    /// What a write, zeroes or a trim of the range may have to wait for, room that only a network can make included: a
    /// hint. Never less than what it says of a range whose neighbours it has to read.
    fn write_cost(&self, offset: u64, length: u64) -> Cost;
}

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Takes no writes, zeroes or trims.
    pub read_only: bool,
    /// [`BlockDevice::write_zeroes`] can be faster than writing zeros.
    pub fast_zeroes: bool,
    /// [`BlockDevice::trim`] gives space back.
    pub trim: bool,
    /// [`BlockDevice::flush`] makes writes survive a crash or a power loss; without it, it only orders them.
    pub durable: bool,
    /// [`BlockDevice::extents`] knows holes and zeros.
    pub extents: bool,
    /// Every offset and length must be a multiple of this (a power of two; 1: any), but for the length of a range that
    /// ends with the device.
    pub alignment: u32,
    /// The unit in which requests cost least (a power of two).
    pub preferred: u32,
    /// The longest read or write that it takes.
    pub longest: u32,
}

/// How a range is zeroed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeroes {
    /// The space stays allocated: no hole.
    pub keep_allocated: bool,
    /// Only if it is faster than writing zeros; else [`DeviceError::Unsupported`], at once.
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

/// Why a device did not do what it was asked.
#[derive(Debug, Clone)]
pub enum DeviceError {
    /// The range is not inside the device.
    OutOfRange {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        length: u64,
        /// What there is.
        size: u64,
    },
    /// The range is not aligned or longer than [`Capabilities::longest`].
    Unaligned {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        length: u64,
        /// What [`Capabilities::alignment`] asks for.
        alignment: u32,
    },
    /// The device takes no writes.
    ReadOnly,
    /// The device cannot do this, or not in the way asked for.
    Unsupported(Cow<'static, str>),
    /// No room: a disk, a cache or a limit is full.
    NoSpace(String),
    /// What it needs cannot be reached now; a retry may succeed.
    Unavailable(String),
    /// The bytes are not what they must be; they are not handed out.
    Corrupt(String),
    /// The device has been closed.
    Closed,
    /// The medium reports an error.
    Io(Arc<io::Error>),
}

impl DeviceError {
    /// Whether the same request may succeed later without anybody's doing.
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

impl From<io::Error> for DeviceError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::NoSpace(error.to_string())
            }
            io::ErrorKind::ReadOnlyFilesystem => Self::ReadOnly,
            _ => Self::Io(Arc::new(error)),
        }
    }
}

/// Checks that a range lies inside a device of `size` bytes.
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
    fn a_full_disk_is_told_from_other_errors() {
        let full = DeviceError::from(io::Error::from(io::ErrorKind::StorageFull));
        assert!(matches!(full, DeviceError::NoSpace(_)), "{full}");
        assert!(!full.is_transient());
        assert!(DeviceError::Unavailable("the link is down".into()).is_transient());
        assert!(DeviceError::from(io::Error::from(io::ErrorKind::TimedOut)).is_transient());
    }
}
