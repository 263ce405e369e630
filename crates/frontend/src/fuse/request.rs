//! One request to the device, and its reply to the kernel.

use std::cell::RefCell;

use drover_core::{BlockDevice, DeviceError, ExtentKind};
use fuser::{Errno, ReplyData, ReplyWrite};

/// The range of one search for data or a hole.
const LOOK: u64 = 1 << 30;
thread_local! {
    /// A per-thread read buffer, so that memory is not cleared for each read.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The errno for the program. Most errors are EIO: other numbers have a meaning to the kernel or to a file system on
/// top.
fn errno(error: &DeviceError) -> Errno {
    match error {
        DeviceError::OutOfRange { .. } | DeviceError::Unaligned { .. } => Errno::EINVAL,
        DeviceError::ReadOnly => Errno::EROFS,
        DeviceError::Unsupported(_) => Errno::EOPNOTSUPP,
        DeviceError::NoSpace(_) => Errno::ENOSPC,
        DeviceError::Unavailable(_)
        | DeviceError::Corrupt(_)
        | DeviceError::Closed
        | DeviceError::Io(_) => Errno::EIO,
    }
}

pub(super) fn reported(what: &str, offset: u64, length: u64, error: &DeviceError) -> Errno {
    // While a link is down there may be many identical ones.
    match error.is_transient() {
        true => tracing::debug!(what, offset, length, %error, "a request to the device failed"),
        false => tracing::warn!(what, offset, length, %error, "a request to the device failed"),
    }
    errno(error)
}

pub(super) fn read(
    device: &dyn BlockDevice,
    offset: u64,
    length: usize,
    longest: usize,
    reply: ReplyData,
) {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        let bytes = &mut buffer[..length];
        let mut at = offset;
        for piece in bytes.chunks_mut(longest) {
            if let Err(error) = device.read(at, piece) {
                return reply.error(reported("read", offset, length as u64, &error));
            }
            at += piece.len() as u64;
        }
        reply.data(bytes);
    });
}

pub(super) fn write(
    device: &dyn BlockDevice,
    offset: u64,
    data: &[u8],
    longest: usize,
    synced: bool,
    reply: ReplyWrite,
) {
    let mut at = offset;
    for piece in data.chunks(longest) {
        if let Err(error) = device.write(at, piece) {
            return reply.error(reported("write", offset, data.len() as u64, &error));
        }
        at += piece.len() as u64;
    }
    if synced && let Err(error) = device.flush() {
        return reply.error(reported("flush", 0, 0, &error));
    }
    reply.written(data.len() as u32);
}

/// The offset of the first byte at or after `from` that is data (or is not); [`None`] if there is none.
pub(super) fn seek(
    device: &dyn BlockDevice,
    from: u64,
    data: bool,
) -> Result<Option<u64>, DeviceError> {
    let size = device.size();
    let mut at = from;
    while at < size {
        let runs = device.extents(at, LOOK.min(size - at))?;
        for run in &runs {
            if (run.kind == ExtentKind::Data) == data {
                return Ok(Some(run.offset.max(at)));
            }
        }
        match runs.last() {
            Some(last) if last.end() > at => at = last.end(),
            _ => return Err(DeviceError::Unsupported("tell its extents".into())),
        }
    }
    Ok(None)
}
