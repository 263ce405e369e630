//! Background work yields to transfers whose batches wait to be matched.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Tracks the batches of transfers that wait to be matched.
#[derive(Debug, Default)]
pub(crate) struct Matched {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Batches that are waiting, by the parity of the turn in which they began to wait.
    waiting: [usize; 2],
    /// Parity of the current turn.
    turn: usize,
    /// Number of threads that are yielding.
    giving_way: usize,
}

/// A batch counts as waiting until this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting(Arc<Matched>, usize);

impl Matched {
    /// Registers a waiting batch.
    pub(crate) fn waiting(self: &Arc<Self>) -> Waiting {
        let mut state = self.state.lock();
        let turn = state.turn;
        state.waiting[turn] += 1;
        Waiting(self.clone(), turn)
    }

    /// Waits until every batch that is waiting now has been matched, ignoring later ones; returns `false` after
    /// `at_most`.
    pub(crate) fn settled(&self, at_most: Duration) -> bool {
        let until = Instant::now() + at_most;
        let mut state = self.state.lock();
        let (ends, begins) = (state.turn, 1 - state.turn);
        // First those left over from an earlier call that timed out.
        if !self.none_waits(&mut state, begins, until) {
            return false;
        }
        state.turn = begins;
        self.none_waits(&mut state, ends, until)
    }

    fn none_waits(&self, state: &mut MutexGuard<'_, State>, turn: usize, until: Instant) -> bool {
        let waits = |state: &mut State| state.waiting[turn] > 0;
        let waited = self.changed.wait_while_until(state, waits, until);
        !waited.timed_out()
    }

    /// Returns when no batch is waiting, or after `at_most`, so that background work makes progress on a busy site.
    pub(crate) fn give_way(&self, at_most: Duration) {
        let mut state = self.state.lock();
        state.giving_way += 1;
        self.changed
            .wait_while_for(&mut state, |state| state.waiting != [0, 0], at_most);
        state.giving_way -= 1;
    }

    /// Number of threads that are yielding.
    #[cfg(test)]
    pub(crate) fn giving_way(&self) -> usize {
        self.state.lock().giving_way
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.waiting[self.1] -= 1;
        if state.waiting[self.1] == 0 {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_waited_for_and_what_comes_later_is_not() {
        let matched = Arc::<Matched>::default();
        assert!(matched.settled(Duration::ZERO));
        let mut before = matched.waiting();
        for _ in 0..3 {
            assert!(!matched.settled(Duration::ZERO));
            let next = matched.waiting();
            before = next;
        }
        let turn = matched.state.lock().turn;
        std::thread::scope(|threads| {
            let settled = threads.spawn(|| matched.settled(Duration::from_secs(60)));
            while matched.state.lock().turn == turn {
                std::thread::yield_now();
            }
            let _later = matched.waiting();
            drop(before);
            assert!(settled.join().unwrap());
        });
        assert!(matched.settled(Duration::ZERO));
    }
}
