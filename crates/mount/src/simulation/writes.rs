//! The simulated writes, and the progress of their push.

/// The load of a push.
#[derive(Clone, Copy)]
pub struct Writes {
    /// Bytes per second towards the site.
    pub up: f64,
    /// Bytes on the link.
    pub bytes: u64,
    /// Maximum time in which the site writes a part, in seconds.
    pub takes: f64,
    /// Whether a pull runs at the same time.
    pub pulls: bool,
}

/// Its progress.
#[derive(Default)]
pub struct Pushing {
    pub asked: u64,
    pub came: u64,
    pub done: u64,
    /// Bytes written per 100 ms.
    pub tenths: Vec<u64>,
}

impl Pushing {
    pub fn is_done(&self, writes: &Writes) -> bool {
        self.done >= writes.bytes
    }

    /// Utilization of the link from `from` seconds until shortly before the end.
    pub fn used(&self, writes: &Writes, from: f64) -> f64 {
        let (first, last) = ((from * 10.0) as usize, self.tenths.len().saturating_sub(2));
        assert!(last > first + 3, "the run is too short: {last}");
        let bytes: u64 = self.tenths[first..last].iter().sum();
        bytes as f64 / (0.1 * (last - first) as f64 * writes.up)
    }
}
