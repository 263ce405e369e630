//! State shared by all parts of a matcher: storage reads and counters.

use super::stats::MAX_REPAIRS;
use super::{MatcherStats, Repair};
use crate::page::PageCache;

pub(crate) struct MatcherContext {
    pub pages: PageCache,
    pub stats: MatcherStats,
    repairs: Vec<Repair>,
}

impl MatcherContext {
    pub(crate) fn new(cached_pages: usize) -> Self {
        MatcherContext {
            pages: PageCache::new(cached_pages),
            stats: MatcherStats::default(),
            repairs: Vec::new(),
        }
    }

    /// Records a damaged page.
    pub(crate) fn damaged(&mut self, what: Repair) {
        self.stats.corrupt_pages += 1;
        self.report(what);
    }

    pub(crate) fn report(&mut self, what: Repair) {
        if self.repairs.len() < MAX_REPAIRS && self.repairs.last() != Some(&what) {
            self.repairs.push(what);
        }
    }

    pub(crate) fn take_repairs(&mut self) -> Vec<Repair> {
        std::mem::take(&mut self.repairs)
    }
}
