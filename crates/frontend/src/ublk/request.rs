//! One request, from the driver's descriptor to the device and back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use drover_core::{BlockDevice, Cost, DeviceError, Zeroes};
use rustix::io::Errno;

use super::abi::{self, Descriptor, Operation};

/// State shared by the threads of a device.
pub(super) struct Target {
    /// `/dev/ublkcN`, through which data is copied.
    pub(super) channel: File,
    pub(super) device: Arc<dyn BlockDevice>,
    /// Maximum read or write (bytes).
    pub(super) longest: u32,
}

/// The data of one request at a time; grows to the longest one so far.
pub(super) type Buffer = Vec<u8>;

impl Target {
    /// Whether a request is so fast that it is not worth a thread switch.
    pub(super) fn is_quick(&self, descriptor: &Descriptor) -> bool {
        match descriptor.operation {
            Operation::Read => {
                self.device.cost(descriptor.offset, descriptor.length) == Cost::Memory
            }
            Operation::Write { through: false } => {
                self.device.write_cost(descriptor.offset, descriptor.length) == Cost::Memory
            }
            Operation::Unknown => true,
            // A flush has no range; the others may take as long as they are large.
            _ => false,
        }
    }

    /// Whether it is a change that may wait for a network, or for cache space that only the network frees.
    pub(super) fn may_wait_long(&self, descriptor: &Descriptor) -> bool {
        match descriptor.operation {
            Operation::Read | Operation::Unknown => false,
            Operation::Flush | Operation::Write { through: true } => true,
            _ => {
                let cost = self.device.write_cost(descriptor.offset, descriptor.length);
                cost == Cost::Network
            }
        }
    }

    /// Executes it. The result for the driver: bytes for reads and writes, else 0, or a negative error number.
    pub(super) fn perform(
        &self,
        queue: u16,
        tag: u16,
        descriptor: &Descriptor,
        buffer: &mut Buffer,
    ) -> i32 {
        let work = || self.try_perform(queue, tag, descriptor, buffer);
        // A panic of the device fails one request; without a result its tag would hang forever.
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(errno)) => -errno.raw_os_error(),
            Err(_) => -Errno::IO.raw_os_error(),
        }
    }

    fn try_perform(
        &self,
        queue: u16,
        tag: u16,
        descriptor: &Descriptor,
        buffer: &mut Buffer,
    ) -> Result<i32, Errno> {
        let Descriptor {
            operation,
            offset,
            length,
        } = *descriptor;
        let checked = |result: Result<(), DeviceError>| {
            result.map_err(|error| {
                tracing::warn!(?operation, offset, length, %error, "a ublk request failed");
                errno(&error)
            })
        };
        match operation {
            Operation::Read => {
                let data = self.room(buffer, length)?;
                checked(self.device.read(offset, data))?;
                let copied = self.channel.write_all_at(data, abi::data_at(queue, tag));
                copied.map_err(|error| copy_failed(&error))?;
                i32::try_from(length).map_err(|_| Errno::INVAL)
            }
            Operation::Write { through } => {
                let data = self.room(buffer, length)?;
                let copied = self.channel.read_exact_at(data, abi::data_at(queue, tag));
                copied.map_err(|error| copy_failed(&error))?;
                checked(self.device.write(offset, data))?;
                if through {
                    checked(self.device.flush())?;
                }
                i32::try_from(length).map_err(|_| Errno::INVAL)
            }
            Operation::Flush => checked(self.device.flush()).map(|()| 0),
            Operation::Discard => checked(self.device.trim(offset, length)).map(|()| 0),
            Operation::WriteZeroes { keep_allocated } => {
                let zeroes = Zeroes {
                    keep_allocated,
                    only_fast: false,
                };
                checked(self.device.write_zeroes(offset, length, zeroes)).map(|()| 0)
            }
            Operation::Unknown => Err(Errno::OPNOTSUPP),
        }
    }

    fn room<'a>(&self, buffer: &'a mut Buffer, length: u64) -> Result<&'a mut [u8], Errno> {
        let length = u32::try_from(length).map_err(|_| Errno::INVAL)?;
        if length > self.longest {
            return Err(Errno::INVAL);
        }
        let length = usize::try_from(length).map_err(|_| Errno::INVAL)?;
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        Ok(&mut buffer[..length])
    }
}

fn copy_failed(error: &std::io::Error) -> Errno {
    tracing::warn!(%error, "the data of a ublk request cannot be copied");
    Errno::IO
}

/// The error number for a device's error.
pub(super) fn errno(error: &DeviceError) -> Errno {
    match error {
        DeviceError::NoSpace(_) => Errno::NOSPC,
        DeviceError::Unsupported(_) => Errno::OPNOTSUPP,
        DeviceError::OutOfRange { .. } | DeviceError::Unaligned { .. } => Errno::INVAL,
        DeviceError::ReadOnly => Errno::ROFS,
        DeviceError::Unavailable(_)
        | DeviceError::Corrupt(_)
        | DeviceError::Closed
        | DeviceError::Io(_) => Errno::IO,
    }
}
