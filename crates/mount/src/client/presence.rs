//! The chunks that a site reports as zero, collected page by page and bounded by what was requested.

use drover_device::remote::Chunks;

/// Maximum runs kept per query: 1 MiB of them. Further zeros are discovered when read.
pub const MAX_FOUND: usize = 1 << 16;

/// Maximum pages of a reply: enough for a well-behaved site, and it ends one that makes no progress.
pub const MAX_PAGES: u32 = 1 << 10;

/// The result collected so far.
#[derive(Debug)]
pub struct Pages {
    /// The part still to be examined.
    rest: Chunks,
    found: Vec<Chunks>,
    pages: u32,
}

impl Pages {
    /// An empty result for a run.
    pub fn of(asked: Chunks) -> Self {
        Self {
            rest: asked,
            found: Vec::new(),
            pages: 0,
        }
    }

    /// Adds a page: runs `(first, count)`, and the chunk after the last one examined. Returns the part left to query,
    /// if any. From the first run on that is out of order, or outside the examined part of the query, runs are ignored.
    pub fn page(&mut self, runs: &[(u64, u32)], end: u64) -> Option<Chunks> {
        let asked = self.rest;
        let most = asked.end().min(end);
        let mut at = asked.first;
        for &(first, count) in runs {
            let to = first.saturating_add(u64::from(count)).min(most);
            if first < at || to <= first {
                break;
            }
            at = to;
            let count = (to - first) as u32;
            let full = self.found.len() >= MAX_FOUND;
            match self.found.last_mut() {
                // Adjacent runs are merged: so there are at most half as many as chunks were requested.
                Some(last) if last.end() == first && last.count.checked_add(count).is_some() => {
                    last.count += count;
                }
                _ if full => return None,
                _ => self.found.push(Chunks { first, count }),
            }
        }
        self.pages += 1;
        if end <= asked.first || end >= asked.end() || self.pages >= MAX_PAGES {
            return None;
        }
        self.rest = Chunks {
            first: end,
            count: (asked.end() - end) as u32,
        };
        Some(self.rest)
    }

    /// The runs of zero chunks, in order.
    pub fn found(self) -> Vec<Chunks> {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_site_that_names_every_other_chunk_fills_a_mebibyte_and_no_more() {
        let mut pages = Pages::of(Chunks {
            first: 0,
            count: 1 << 28,
        });
        let mut next = Some(0);
        let mut asked = 0;
        while let Some(first) = next {
            asked += 1;
            let runs: Vec<_> = (0..2048).map(|n| (first + 2 * n, 1)).collect();
            next = pages.page(&runs, first + 4096).map(|rest| rest.first);
        }
        assert_eq!((asked, pages.found().len()), (33, MAX_FOUND));
    }

    #[test]
    fn a_site_that_crawls_is_not_followed_for_ever() {
        let mut pages = Pages::of(Chunks {
            first: 0,
            count: 1 << 28,
        });
        let mut asked = 1;
        while let Some(rest) = pages.page(&[], asked) {
            assert_eq!(rest.first, asked);
            asked += 1;
        }
        assert_eq!(asked, u64::from(MAX_PAGES));
    }

    #[test]
    fn a_run_that_goes_on_in_the_next_page_is_one() {
        let mut pages = Pages::of(Chunks {
            first: 5,
            count: 100,
        });
        let rest = pages.page(&[(5, 10), (15, 5), (30, 5)], 35).unwrap();
        assert_eq!((rest.first, rest.count), (35, 70));
        assert_eq!(pages.page(&[(35, 70), (104, 1), (9, 1)], 105), None);
        let found: Vec<_> = pages.found().iter().map(|c| (c.first, c.count)).collect();
        assert_eq!(found, [(5, 15), (30, 75)]);
    }

    proptest! {
        #[test]
        fn what_is_believed_is_in_order_and_inside(
            first in prop_oneof![0u64..50, Just(u64::MAX - 200)],
            count in 1u32..200,
            pages in prop::collection::vec((prop::collection::vec((prop_oneof![0u64..300, any::<u64>()], prop_oneof![0u32..20, any::<u32>()]), 0..8), prop_oneof![0u64..300, any::<u64>()]), 1..6),
        ) {
            let asked = Chunks { first, count };
            let mut found = Pages::of(asked);
            for (runs, end) in &pages {
                if found.page(runs, *end).is_none() {
                    break;
                }
            }
            let found = found.found();
            prop_assert!(found.len() as u64 <= u64::from(count).div_ceil(2));
            let mut at = first;
            for run in found {
                prop_assert!(run.count > 0 && run.first >= at && run.end() <= asked.end());
                at = run.end();
            }
        }
    }
}
