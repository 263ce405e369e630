//! Parameters for the driver: from the caller, and from the capabilities of the device.

use std::path::PathBuf;
use std::thread;

use drover_core::BlockDevice;

use super::abi::Params;
use crate::kernel::Error;

/// Maximum queues of a device.
pub const MAX_QUEUES: u16 = 16;
/// Maximum requests in flight per queue.
pub const MAX_QUEUE_DEPTH: u16 = 1024;
/// Maximum threads per device for requests that block, with half as many again for changes.
pub const MAX_WORKERS: usize = 256;
/// Maximum read or write of the kernel (bytes).
const MAX_REQUEST: u32 = 1 << 20;
/// Maximum discard, and zeroing request where zeroing is cheap (bytes).
const MAX_DISCARD: u32 = 1 << 30;
/// Maximum zeroing request where zeros are written out (bytes).
const MAX_SLOW_ZEROES: u32 = 16 << 20;
/// The kernel's limit for a logical block.
const PAGE: u32 = 4096;

/// The kernel's parameters of the device.
#[derive(Clone, Debug)]
pub struct Options {
    /// The node, `/dev/ublkbN`; `None` for the first free one.
    pub device: Option<PathBuf>,
    /// Logical block size: a power of two from 512 to 4096, at least the device's alignment.
    pub block_size: u32,
    /// Read-only, even if the device is writable.
    pub read_only: bool,
    /// Queues, 1 to [`MAX_QUEUES`]; the kernel creates at most one per CPU.
    pub queues: u16,
    /// Requests in flight in each, 1 to [`MAX_QUEUE_DEPTH`].
    pub depth: u16,
    /// Threads for requests that block, 1 to [`MAX_WORKERS`], and half as many again for changes that may wait for a
    /// network. Each has a buffer of up to 1 MiB.
    pub workers: usize,
    /// A name by which [`find`](super::find) recognizes the device; of one device at a time.
    pub identifier: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            device: None,
            block_size: 512,
            read_only: false,
            queues: u16::try_from(processors.min(4)).unwrap_or(1),
            depth: 64,
            workers: 64,
            identifier: None,
        }
    }
}

impl Options {
    pub(super) fn check(&self) -> Result<(), Error> {
        let wrong = |why: String| Err(Error::Options(why));
        if !self.block_size.is_power_of_two() || !(512..=PAGE).contains(&self.block_size) {
            return wrong(format!(
                "block size {}: must be a power of two from 512 to {PAGE}",
                self.block_size
            ));
        }
        if !(1..=MAX_QUEUES).contains(&self.queues) {
            return wrong(format!(
                "{} queues: must be from 1 to {MAX_QUEUES}",
                self.queues
            ));
        }
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.depth) {
            return wrong(format!(
                "queue depth {}: must be from 1 to {MAX_QUEUE_DEPTH}",
                self.depth
            ));
        }
        if !(1..=MAX_WORKERS).contains(&self.workers) {
            return wrong(format!(
                "{} workers: must be from 1 to {MAX_WORKERS}",
                self.workers
            ));
        }
        Ok(())
    }

    pub(super) fn params(&self, device: &dyn BlockDevice) -> Result<Params, Error> {
        let wrong = |why: String| Err(Error::Options(why));
        let can = device.capabilities();
        let size = device.size();
        if can.alignment > self.block_size {
            return wrong(format!(
                "block size {} is less than the alignment of the device, {}: use larger blocks or a chunked stage",
                self.block_size, can.alignment
            ));
        }
        if size == 0 || !size.is_multiple_of(u64::from(self.block_size)) {
            return wrong(format!(
                "size {size}: must be a non-zero multiple of the block size {}",
                self.block_size
            ));
        }
        let longest = can.longest.min(MAX_REQUEST) / PAGE * PAGE;
        if longest == 0 {
            return wrong(format!(
                "a device limited to {} bytes per request: ublk needs at least a page",
                can.longest
            ));
        }
        let read_only = self.read_only || can.read_only;
        let writable = |length: u32| if read_only { 0 } else { length };
        Ok(Params {
            read_only,
            logical_block: self.block_size,
            physical_block: self.block_size.max(PAGE),
            preferred: can.preferred.next_power_of_two().clamp(PAGE, MAX_REQUEST),
            longest,
            size,
            longest_discard: writable(if can.trim { MAX_DISCARD } else { 0 }),
            longest_zeroes: writable(if can.fast_zeroes {
                MAX_DISCARD
            } else {
                MAX_SLOW_ZEROES
            }),
        })
    }
}
