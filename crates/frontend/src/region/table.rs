//! The state of every unit of a region: absent, busy, present or failed; and whether the device has data there.
//!
//! ```text
//!            claim                  settle
//!  absent ----------> busy ----------------------> present
//!    ^                 |  ^                           |
//!    |  settle         |  | claim_present (eviction)  |
//!    +-----------------+  +---------------------------+
//!                      |  ^
//!        (poisoned)    v  | claim_failed (another attempt)
//!                     failed
//! ```
//!
//! The thread that makes a unit busy is the only one that may fetch, remove or poison it, and must settle it.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

const STATE: u8 = 0b0011;
const ABSENT: u8 = 0;
const BUSY: u8 = 1;
const PRESENT: u8 = 2;
const FAILED: u8 = 3;
const CONTENT: u8 = 0b1100;
const ZERO: u8 = 0b0100;
const DATA: u8 = 0b1000;

/// The state of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageState {
    /// Not in memory; a touch faults.
    Absent,
    /// Claimed by a thread.
    Busy,
    /// In memory.
    Present,
    /// The device failed to provide it; a touch raises `SIGBUS`.
    Failed,
}

/// The kind of content that the device has there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Not queried yet.
    Unknown,
    /// All zeros.
    Zero,
    /// Must be read.
    Data,
}

/// One byte per unit.
pub(super) struct Table(Box<[AtomicU8]>);

impl Table {
    pub(super) fn new(units: usize) -> Self {
        let mut table = Vec::new();
        table.resize_with(units, || AtomicU8::new(ABSENT));
        Self(table.into())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn state(&self, unit: usize) -> PageState {
        match self.0[unit].load(Ordering::SeqCst) & STATE {
            ABSENT => PageState::Absent,
            BUSY => PageState::Busy,
            PRESENT => PageState::Present,
            _ => PageState::Failed,
        }
    }

    pub(super) fn content(&self, unit: usize) -> Content {
        match self.0[unit].load(Ordering::SeqCst) & CONTENT {
            ZERO => Content::Zero,
            DATA => Content::Data,
            _ => Content::Unknown,
        }
    }

    /// Records the device's reply for an unknown unit. A unit known to have data stays that way: a push may have begun
    /// since the query.
    pub(super) fn learn(&self, unit: usize, zero: bool) {
        let content = if zero { ZERO } else { DATA };
        self.change(unit, |now| (now & CONTENT == 0).then_some(now | content));
    }

    /// The device is about to have data there.
    pub(super) fn has_data(&self, unit: usize) {
        self.change(unit, |now| Some(now & !CONTENT | DATA));
    }

    /// Claims absent units from `first` on, at most `longest`, up to the first that is not absent.
    pub(super) fn claim(&self, first: usize, longest: usize) -> Range<usize> {
        let last = first.saturating_add(longest).min(self.0.len());
        let mut end = first;
        while end < last && self.turn(end, ABSENT, BUSY) {
            end += 1;
        }
        first..end
    }

    /// Claims a present unit.
    pub(super) fn claim_present(&self, unit: usize) -> bool {
        self.turn(unit, PRESENT, BUSY)
    }

    /// Claims a failed unit.
    pub(super) fn claim_failed(&self, unit: usize) -> bool {
        self.turn(unit, FAILED, BUSY)
    }

    /// Ends a claim. Only the claiming thread may.
    pub(super) fn settle(&self, units: Range<usize>, state: PageState) {
        let state = match state {
            PageState::Absent => ABSENT,
            PageState::Busy => BUSY,
            PageState::Present => PRESENT,
            PageState::Failed => FAILED,
        };
        for unit in units {
            let settled = self.turn(unit, BUSY, state);
            debug_assert!(settled, "unit {unit} was not busy");
        }
    }

    fn turn(&self, unit: usize, from: u8, to: u8) -> bool {
        self.change(unit, |now| {
            (now & STATE == from).then_some(now & !STATE | to)
        })
    }

    fn change(&self, unit: usize, how: impl FnMut(u8) -> Option<u8>) -> bool {
        self.0[unit]
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, how)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_claimed_once() {
        let table = Table::new(10);
        assert_eq!(table.claim(2, 3), 2..5);
        assert_eq!(table.claim(2, 3), 2..2);
        assert_eq!(table.claim(0, 9), 0..2);
        assert_eq!(table.claim(5, usize::MAX), 5..10);
        assert_eq!(table.state(7), PageState::Busy);
        table.settle(5..10, PageState::Present);
        assert!(table.claim_present(7));
        assert!(!table.claim_present(7));
        assert!(!table.claim_failed(7));
        table.settle(7..8, PageState::Failed);
        assert!(table.claim_failed(7));
    }

    #[test]
    fn what_a_push_wrote_is_not_a_hole_again() {
        let table = Table::new(2);
        assert_eq!(table.content(0), Content::Unknown);
        table.has_data(0);
        table.learn(0, true);
        assert_eq!(table.content(0), Content::Data);
        table.learn(1, true);
        assert_eq!(table.content(1), Content::Zero);
        assert_eq!(table.claim(1, 1), 1..2);
        assert_eq!(table.content(1), Content::Zero);
        table.has_data(1);
        assert_eq!(table.content(1), Content::Data);
        assert_eq!(table.state(1), PageState::Busy);
    }

    #[test]
    fn threads_share_the_units_between_them() {
        let table = Table::new(10_000);
        let claimed: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        (0..table.len())
                            .map(|unit| table.claim(unit, 3).len())
                            .sum::<usize>()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(claimed, table.len());
    }
}
