//! Options of a loop device.

use std::time::Duration;

/// How long attaching and detaching wait for the kernel.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// How a file becomes a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// No writes.
    pub read_only: bool,
    /// Past the page cache of the backing file. Where the file cannot do that, the kernel goes through it: see
    /// `LoopDevice::has_direct_io`.
    pub direct_io: bool,
    /// Bytes in a logical block: 512 or 4096.
    pub block_size: u32,
    /// Partitions become devices (`/dev/loopNp1`).
    pub partitions: bool,
    /// Bytes that the kernel reads ahead at most, in whole KiB; 0: what it thinks best, with many kernels 128 KiB, a
    /// trickle where the bytes come from far away.
    pub read_ahead: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            read_only: false,
            direct_io: true,
            block_size: 512,
            partitions: true,
            read_ahead: 4 << 20,
        }
    }
}
