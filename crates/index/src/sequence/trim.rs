//! Chooses and frees segments for a trim: first those in which the fewest blocks of the site's images are found.

use drover_core::Digest;

use super::SequenceCache;
use crate::matcher::MatcherContext;

/// How many of the examined blocks were found in each segment.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    found: Vec<u32>,
}

impl SequenceCache {
    /// Counts the segments for which C2 has entries of `digest`. Reads no page and moves no entry; false matches
    /// count too, equally likely for every segment.
    pub(crate) fn count_uses(&self, digest: &Digest, uses: &mut Uses) {
        let key = self.c2.key(digest);
        if !self.c2.may_contain(key) {
            return;
        }
        for found in self.c2.candidates(key).as_slice() {
            let no = found.payload as usize;
            if no >= uses.found.len() {
                uses.found.resize(no + 1, 0);
            }
            uses.found[no] = uses.found[no].saturating_add(1);
        }
    }

    /// The segments that are not empty, least used last; of equals, the one filled first is last.
    pub(crate) fn by_use(&self, uses: &Uses) -> Vec<u32> {
        let mut all: Vec<u32> = (0..self.file.segments())
            .filter(|no| !self.file.is_empty(*no))
            .collect();
        let count = |no: u32| uses.found.get(no as usize).copied().unwrap_or(0);
        all.sort_by_key(|&no| (std::cmp::Reverse(count(no)), std::cmp::Reverse(no)));
        all
    }

    /// The empty segments among the first `have`, the first one last.
    pub(crate) fn empty(&self, have: u32) -> Vec<u32> {
        let all = (0..self.file.limit().min(have)).rev();
        all.filter(|no| self.file.is_empty(*no)).collect()
    }

    /// Evicts the contents of these segments and writes that; `false` when it could not be written.
    pub(crate) fn free(&mut self, segments: &[u32], shared: &mut MatcherContext) -> bool {
        for &no in segments {
            if !self.file.is_empty(no) {
                self.recycle(no, shared);
            }
        }
        self.flush_or_forget(shared)
    }
}
