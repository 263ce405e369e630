//! Reference: the matches of a deduplicator with unbounded memory.

use std::collections::HashMap;

use drover_core::Digest;

/// Stores every digest, represented by two `u64` of it.
#[derive(Debug, Clone, Default)]
pub struct ExactDedup {
    known: HashMap<(u64, u64), ()>,
}

impl ExactDedup {
    /// An empty deduplicator.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns whether the block was seen before, and records it.
    pub fn seen(&mut self, digest: &Digest) -> bool {
        let (w, _) = digest.0.as_chunks::<8>();
        let key = (u64::from_le_bytes(w[0]), u64::from_le_bytes(w[1]));
        self.known.insert(key, ()).is_some()
    }

    /// Number of distinct blocks seen.
    #[must_use]
    pub fn unique(&self) -> usize {
        self.known.len()
    }
}
