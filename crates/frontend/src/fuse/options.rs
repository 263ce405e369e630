//! Options of a file mount.

/// As many threads of either kind as can be asked for.
pub const MAX_THREADS: usize = 1024;

/// How a device is shown as a file.
#[derive(Debug, Clone)]
pub struct Options {
    /// The file's name if the mount point is a directory; also the source that the mount table shows.
    pub name: String,
    /// No writes, even if the device would take them.
    pub read_only: bool,
    /// Threads that take requests.
    pub threads: usize,
    /// Threads, at most, on which reads wait for a network, and as many again for writes and flushes.
    pub waiting_threads: usize,
    /// Users other than the one who mounts may open it: all may read it and, unless it is read-only, write it, until
    /// chmod and chown say otherwise. Else no other user, not even root, sees it.
    pub allow_other: bool,
    /// The kernel keeps pages and reads ahead. Only for a device that is written through this file alone. Who reads a far
    /// device in small pieces needs it: 128 KiB at a time over 40 ms are 76 instead of 3 MiB/s.
    pub page_cache: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "disk".into(),
            read_only: false,
            threads: 16,
            waiting_threads: 128,
            allow_other: false,
            page_cache: false,
        }
    }
}
