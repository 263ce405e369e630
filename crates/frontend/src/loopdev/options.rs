//! Options of a loop device.

use std::time::Duration;

/// How long attaching and detaching wait for the kernel.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Options for attaching a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Read-only.
    pub read_only: bool,
    /// Bypass the page cache of the backing file, if the file supports it: see `LoopDevice::has_direct_io`.
    pub direct_io: bool,
    /// Logical block size: 512 or 4096.
    pub block_size: u32,
    /// Let the kernel scan for partitions (`/dev/loopNp1`): its parsers, and what udev starts for each partition, then
    /// read a table that may be hostile.
    pub partitions: bool,
    /// Maximum read-ahead of the kernel (bytes, in whole KiB); 0: its default, often 128 KiB, which is too little for
    /// remote data.
    pub read_ahead: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            read_only: false,
            direct_io: true,
            block_size: 512,
            partitions: false,
            read_ahead: 4 << 20,
        }
    }
}
