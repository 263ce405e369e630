//! `/dev/ublk-control`: adds, starts, stops and deletes devices, one command at a time.
#![allow(unsafe_code)] // a ring's entries name memory by address

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;

use super::abi;

/// The driver's control node.
pub(super) const PATH: &str = "/dev/ublk-control";

/// An open control device.
pub(super) struct Control {
    device: File,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
}

impl Control {
    /// # Errors
    /// If the kernel's `io_uring` has no entries of 128 bytes or is disabled.
    pub(super) fn new(device: File) -> io::Result<Self> {
        let ring = IoUring::builder().build(2)?;
        Ok(Self { device, ring })
    }

    /// Runs one command to completion or the deadline. `buffer` is passed to the driver and returned as it left it.
    ///
    /// # Errors
    /// The driver's, or `ETIMEDOUT`: the command is then cancelled.
    pub(super) fn run(
        mut self,
        command: u32,
        device: u32,
        data: u64,
        mut buffer: Vec<u8>,
        deadline: Duration,
    ) -> io::Result<Vec<u8>> {
        let length = u16::try_from(buffer.len()).map_err(|_| Errno::TOOBIG)?;
        let address = if buffer.is_empty() {
            0
        } else {
            buffer.as_mut_ptr() as u64
        };
        let entry = opcode::UringCmd80::new(types::Fd(self.device.as_raw_fd()), command)
            .cmd(abi::control_command(device, address, length, data))
            .build();
        // SAFETY: the entry names `self.device`, open until this returns, and `buffer`, which is neither moved nor
        // read before its completion has come; where that does not come, it is given up for good below.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Errno::AGAIN)?;
        let end = Instant::now() + deadline;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let wait = types::Timespec::from(left);
            let arguments = types::SubmitArgs::new().timespec(&wait);
            let waited = self.ring.submitter().submit_with_args(1, &arguments);
            if let Some(completion) = self.ring.completion().next() {
                return match completion.result() {
                    0.. => Ok(buffer),
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
            match waited {
                Err(error) if error.kind() == io::ErrorKind::Interrupted && !left.is_zero() => {}
                Ok(_) if !left.is_zero() => {}
                Err(error) if error.raw_os_error() != Some(Errno::TIME.raw_os_error()) => {
                    std::mem::forget(buffer);
                    return Err(error);
                }
                _ => {
                    // The driver may still write to it.
                    std::mem::forget(buffer);
                    return Err(Errno::TIMEDOUT.into());
                }
            }
        }
    }
}
