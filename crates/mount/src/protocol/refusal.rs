//! Errors of devices as refusals, and back.

use drover_core::DeviceError;
use drover_net::{Code, Refusal};

/// A refusal as the error that the mount's request fails with.
#[must_use]
pub fn device_error(refusal: Refusal, offset: u64, length: u64, size: u64) -> DeviceError {
    let message = refusal.message;
    match refusal.code {
        Code::OutOfRange => DeviceError::OutOfRange {
            offset,
            length,
            size,
        },
        Code::ReadOnly => DeviceError::ReadOnly,
        Code::Unsupported => DeviceError::Unsupported(message.into()),
        Code::NoSpace => DeviceError::NoSpace(message),
        Code::Corrupt => DeviceError::Corrupt(message),
        Code::Unavailable | Code::Busy | Code::OutOfOrder => DeviceError::Unavailable(message),
        _ => DeviceError::Io(std::sync::Arc::new(std::io::Error::other(message))),
    }
}

/// A device's error as a refusal.
#[must_use]
pub fn refusal_of(error: DeviceError) -> Refusal {
    let code = match &error {
        DeviceError::OutOfRange { .. } => Code::OutOfRange,
        DeviceError::Unaligned { .. } => Code::Protocol,
        DeviceError::ReadOnly => Code::ReadOnly,
        DeviceError::Unsupported(_) => Code::Unsupported,
        DeviceError::NoSpace(_) => Code::NoSpace,
        DeviceError::Unavailable(_) | DeviceError::Closed => Code::Unavailable,
        DeviceError::Corrupt(_) => Code::Corrupt,
        DeviceError::Io(_) => Code::Io,
    };
    let message = match error {
        // The mount adds what the code stands for.
        DeviceError::NoSpace(what)
        | DeviceError::Corrupt(what)
        | DeviceError::Unavailable(what) => what,
        DeviceError::Unsupported(what) => what.into_owned(),
        error => error.to_string(),
    };
    Refusal::new(code, message)
}
