//! What is pushed, and how far it is.

/// What is pushed.
#[derive(Clone, Copy)]
pub struct Writes {
    /// Bytes a second towards the site.
    pub up: f64,
    /// Bytes on the link.
    pub bytes: u64,
    /// Seconds that the site takes to write a part, at most.
    pub takes: f64,
    /// Whether a pull goes on meanwhile.
    pub pulls: bool,
}

/// How far it is.
#[derive(Default)]
pub struct Pushing {
    pub asked: u64,
    pub came: u64,
    pub done: u64,
    /// Bytes that were written by tenths of seconds.
    pub tenths: Vec<u64>,
}

impl Pushing {
    pub fn is_done(&self, writes: &Writes) -> bool {
        self.done >= writes.bytes
    }

    /// The part of the link that was used from `from` seconds on until shortly before the end.
    pub fn used(&self, writes: &Writes, from: f64) -> f64 {
        let (first, last) = ((from * 10.0) as usize, self.tenths.len().saturating_sub(2));
        assert!(last > first + 3, "the run is too short: {last}");
        let bytes: u64 = self.tenths[first..last].iter().sum();
        bytes as f64 / (0.1 * (last - first) as f64 * writes.up)
    }
}
