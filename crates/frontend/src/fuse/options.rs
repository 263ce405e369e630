//! Options of a file mount.

/// Maximum of [`Options::threads`].
pub const MAX_THREADS: usize = 1024;

/// Maximum number of threads on which reads wait for a network; as many again serve writes and flushes.
pub const MAX_WAITING_THREADS: usize = 128;

/// How a device is exposed as a file.
#[derive(Debug, Clone)]
pub struct Options {
    /// The file's name if the mount point is a directory; also the source in the mount table.
    pub name: String,
    /// Refuses writes, even if the device is writable.
    pub read_only: bool,
    /// Threads that read requests from the kernel.
    pub threads: usize,
    /// Allows users other than the mounting one: all may read the file and, unless it is read-only, write it, until
    /// chmod and chown restrict that. Otherwise no other user, not even root, has access.
    pub allow_other: bool,
    /// Enables the page cache and the kernel's read-ahead. Only for a device that is written through this file alone.
    /// Needed to read a distant device in small pieces: 128 KiB reads over 40 ms yield 76 instead of 3 MiB/s.
    pub page_cache: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "disk".into(),
            read_only: false,
            threads: 16,
            allow_other: false,
            page_cache: false,
        }
    }
}
