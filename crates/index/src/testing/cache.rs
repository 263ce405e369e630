//! A single cache, for benchmarks.

use drover_core::Digest;

use crate::cuckoo::CuckooLru;

/// A cuckoo-LRU cache of 4-byte entries with fingerprints of eight bits, like C2.
pub struct Cache(CuckooLru);

impl Cache {
    /// Creates a cache of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Cache(CuckooLru::new(bytes, usize::MAX, 8))
    }

    /// Total slots and slots in use.
    #[must_use]
    pub fn fill(&self) -> (usize, usize) {
        (self.0.capacity(), self.0.len())
    }

    /// Inserts a digest with a page (below 2^24); returns whether another entry was evicted.
    pub fn insert(&mut self, digest: &Digest, page: u32) -> bool {
        self.0.insert(self.0.key(digest), page).is_some()
    }

    /// The pages that may contain the digest, and their number.
    #[must_use]
    pub fn look_up(&self, digest: &Digest) -> ([u32; 8], usize) {
        let mut pages = [0; 8];
        let key = self.0.key(digest);
        if !self.0.may_contain(key) {
            return (pages, 0);
        }
        let candidates = self.0.candidates(key);
        for (page, found) in pages.iter_mut().zip(candidates.as_slice()) {
            *page = found.payload;
        }
        (pages, candidates.as_slice().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_entered_is_found() {
        let mut cache = Cache::new(1 << 12);
        let digests: Vec<Digest> = (0..500u32)
            .map(|i| Digest(*blake3::hash(&i.to_le_bytes()).as_bytes()))
            .collect();
        for (page, digest) in digests.iter().enumerate() {
            assert!(!cache.insert(digest, page as u32));
        }
        assert_eq!(cache.fill(), (1024, 500));
        for (page, digest) in digests.iter().enumerate() {
            let (pages, n) = cache.look_up(digest);
            assert!(pages[..n].contains(&(page as u32)));
        }
    }
}
