//! Locks on ranges of blocks.

use std::ops::Range;

use parking_lot::{Condvar, Mutex};

/// Locked ranges of blocks; as many as there are threads making changes.
#[derive(Default)]
pub(super) struct Ranges {
    taken: Mutex<Vec<Range<u64>>>,
    freed: Condvar,
}

/// A locked range, released on drop.
pub(super) struct Taken<'a> {
    ranges: &'a Ranges,
    blocks: Range<u64>,
}

impl Ranges {
    /// Waits until none of the blocks are locked, and locks them. A thread must not hold two ranges.
    pub fn take(&self, blocks: Range<u64>) -> Taken<'_> {
        let mut taken = self.taken.lock();
        let meets = |other: &Range<u64>| other.start < blocks.end && blocks.start < other.end;
        while taken.iter().any(meets) {
            self.freed.wait(&mut taken);
        }
        taken.push(blocks.clone());
        Taken {
            ranges: self,
            blocks,
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut taken = self.ranges.taken.lock();
        if let Some(nth) = taken.iter().position(|other| *other == self.blocks) {
            taken.swap_remove(nth);
        }
        drop(taken);
        self.ranges.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_block_has_one_holder() {
        let ranges = Ranges::default();
        let holders: Vec<AtomicU32> = (0..16).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let (ranges, holders) = (&ranges, &holders);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed);
                    for _ in 0..2000 {
                        let start = rng.usize(0..16);
                        let end = rng.usize(start + 1..17);
                        let _taken = ranges.take(start as u64..end as u64);
                        for holder in &holders[start..end] {
                            assert_eq!(holder.fetch_add(1, Ordering::SeqCst), 0);
                        }
                        std::hint::spin_loop();
                        for holder in &holders[start..end] {
                            holder.fetch_sub(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert!(ranges.taken.lock().is_empty());
    }
}
