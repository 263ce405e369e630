//! Options, errors and counters of a region.

use std::time::Duration;

use rustix::io::Errno;

/// Maximum number of threads that serve faults.
pub const MAX_THREADS: usize = 256;
/// Maximum bytes that one fault brings in before its thread resumes, and again as read-ahead behind them.
pub const MAX_PREFETCH: usize = 16 << 20;
/// Minimum memory limit, in bytes.
pub const MIN_LIMIT: usize = 4 << 20;
/// Options of a region.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of threads that serve faults, one at a time each; 0: chosen by the device's read cost.
    pub threads: usize,
    /// Maximum bytes that a fault brings in on sequential access; 0: single pages.
    pub prefetch: usize,
    /// Allows writes, which are tracked and can be pushed.
    pub writable: bool,
    /// Brings everything in, in the background; faults take priority.
    pub populate: bool,
    /// How long a failing device is retried for a waiting thread, and how long a call waits for operations of others.
    pub timeout: Duration,
    /// Memory limit in bytes, beyond which the oldest pages are evicted; only for a read-only region.
    pub limit: Option<usize>,
}

impl Default for Options {
    /// Read-only, with prefetch of up to 1 MiB and a timeout of 30 s.
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

/// Why a region cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The kernel does not permit userfaultfd.
    #[error(
        "cannot create a userfaultfd: {0}; it needs CAP_SYS_PTRACE, access to /dev/userfaultfd or vm.unprivileged_userfaultfd=1"
    )]
    Open(Errno),
    /// The kernel's userfaultfd API is incompatible.
    #[error("the kernel refuses the handshake of its userfaultfd: {0}")]
    Handshake(Errno),
    /// Writes cannot be tracked.
    #[error(
        "cannot track writes: that needs UFFD_FEATURE_WP_ASYNC and PAGEMAP_SCAN (Linux 6.7) and /proc; make the region read-only"
    )]
    NoTracking,
    /// The device is read-only.
    #[error("the device is read-only; make the region read-only")]
    ReadOnly,
    /// The device's size cannot be mapped.
    #[error("a device of {0} bytes cannot be mapped")]
    Size(u64),
    /// The device's alignment is not supported.
    #[error(
        "a device of alignment {alignment} that reads at most {longest} bytes cannot be mapped; put a chunked stage on top of it"
    )]
    Alignment {
        /// The required alignment in bytes.
        alignment: u32,
        /// The device's maximum read in bytes.
        longest: u32,
    },
    /// Invalid options.
    #[error("{0}")]
    Options(&'static str),
    /// The kernel refuses to allocate the memory.
    #[error("cannot allocate {length} bytes for a region: {source}")]
    Memory {
        /// Size in bytes.
        length: usize,
        /// The cause.
        source: Errno,
    },
    /// A thread or a descriptor cannot be created.
    #[error("cannot start a region: {0}")]
    Start(#[from] std::io::Error),
}

/// Counters of a region. An event is counted before the thread it wakes can observe it, except in
/// [`Stats::resident_bytes`], which may lag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Faults reported by the kernel.
    pub faults: u64,
    /// Of those, faults on units already being fetched.
    pub shared_faults: u64,
    /// Reads of the device.
    pub device_reads: u64,
    /// Bytes of successful reads.
    pub bytes_read: u64,
    /// Bytes filled with zeros without a read.
    pub zero_bytes: u64,
    /// Bytes that are present, needing no fault.
    pub resident_bytes: u64,
    /// How often a page (or a unit, on an aligned device) failed permanently.
    pub failed_pages: u64,
    /// Bytes evicted from memory.
    pub evicted_bytes: u64,
}
