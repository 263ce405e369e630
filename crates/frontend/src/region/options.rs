//! Options, errors and counters of a region.

use std::time::Duration;

use rustix::io::Errno;

/// The most threads that serve faults.
pub const MAX_THREADS: usize = 256;
/// The most bytes that one fault brings in before its thread goes on, and once more behind them.
pub const MAX_PREFETCH: usize = 16 << 20;
/// The least limit on memory, in bytes.
pub const MIN_LIMIT: usize = 4 << 20;
/// How a region works.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that serve faults, each one at a time; 0: by what a read of the device costs.
    pub threads: usize,
    /// Bytes that a fault brings in at most, where somebody reads on; 0: single pages.
    pub prefetch: usize,
    /// Writes are possible, tracked and pushed.
    pub writable: bool,
    /// Brings everything in, in the background; faults overtake it.
    pub populate: bool,
    /// How long a failing device is tried again for somebody who waits, and how long a call waits for what others
    /// have under way.
    pub timeout: Duration,
    /// Bytes in memory beyond which what came first is taken out again; only for a region that is not writable.
    pub limit: Option<usize>,
}

impl Default for Options {
    /// Read-only, with prefetch of up to 1 MiB, 30 s of timeout.
    fn default() -> Self {
        Self {
            threads: 0,
            prefetch: 1 << 20,
            writable: false,
            populate: false,
            timeout: Duration::from_secs(30),
            limit: None,
        }
    }
}

/// Why there is no region.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The kernel gives no userfaultfd.
    #[error(
        "no userfaultfd: {0}; it takes CAP_SYS_PTRACE, access to /dev/userfaultfd or vm.unprivileged_userfaultfd=1"
    )]
    Open(Errno),
    /// The kernel's userfaultfd is not one we know.
    #[error("the kernel refuses the handshake of its userfaultfd: {0}")]
    Handshake(Errno),
    /// Writes cannot be tracked.
    #[error(
        "writes cannot be tracked: that takes UFFD_FEATURE_WP_ASYNC and PAGEMAP_SCAN (Linux 6.7) and /proc; make the region read-only"
    )]
    NoTracking,
    /// The device takes no writes.
    #[error("the device is read-only; make the region read-only")]
    ReadOnly,
    /// The device's size cannot be mapped.
    #[error("a device of {0} bytes cannot be mapped")]
    Size(u64),
    /// The device's alignment cannot be kept.
    #[error(
        "a device of alignment {alignment} that reads at most {longest} bytes cannot be mapped; put a stage that cuts into chunks on it"
    )]
    Alignment {
        /// What the device asks for, in bytes.
        alignment: u32,
        /// Its longest read, in bytes.
        longest: u32,
    },
    /// Options that cannot be followed.
    #[error("{0}")]
    Options(&'static str),
    /// The kernel refuses the memory.
    #[error("{length} bytes of memory for a region: {source}")]
    Memory {
        /// Bytes.
        length: usize,
        /// Why.
        source: Errno,
    },
    /// A thread or a descriptor cannot be had.
    #[error("starting a region: {0}")]
    Start(#[from] std::io::Error),
}

/// What happened in a region so far. What somebody was woken for is counted before they see it, but for
/// [`Stats::resident_bytes`], which may come a moment later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Faults that the kernel told of.
    pub faults: u64,
    /// Of those, the ones that somebody was already at work for.
    pub shared_faults: u64,
    /// Reads of the device.
    pub device_reads: u64,
    /// Bytes of those reads that succeeded.
    pub bytes_read: u64,
    /// Bytes filled with zeros without a read.
    pub zero_bytes: u64,
    /// Bytes that need no fault now.
    pub resident_bytes: u64,
    /// How often a page (or unit, of an aligned device) was given up.
    pub failed_pages: u64,
    /// Bytes that were taken out of memory.
    pub evicted_bytes: u64,
}
