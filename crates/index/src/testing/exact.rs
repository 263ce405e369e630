//! What a deduplicator with unbounded memory would match.

use std::collections::HashMap;

use drover_core::Digest;

/// Remembers every digest. Two `u64` of a digest stand for it.
#[derive(Debug, Clone, Default)]
pub struct ExactDedup {
    known: HashMap<(u64, u64), ()>,
}

impl ExactDedup {
    /// Knows nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the block was seen before; from now on it was.
    pub fn seen(&mut self, digest: &Digest) -> bool {
        let (w, _) = digest.0.as_chunks::<8>();
        let key = (u64::from_le_bytes(w[0]), u64::from_le_bytes(w[1]));
        self.known.insert(key, ()).is_some()
    }

    /// Different blocks seen.
    #[must_use]
    pub fn unique(&self) -> usize {
        self.known.len()
    }
}
