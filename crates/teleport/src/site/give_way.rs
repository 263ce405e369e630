//! What is done in the background gives way to transfers whose batches wait to be matched.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// The batches of transfers that wait to be matched.
#[derive(Debug, Default)]
pub(crate) struct Matched {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    /// Who gives way to them right now.
    giving_way: usize,
}

/// A batch waits until this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting(Arc<Matched>);

impl Matched {
    /// A batch waits from now on.
    pub(crate) fn waiting(self: &Arc<Self>) -> Waiting {
        self.state.lock().waiting += 1;
        Waiting(self.clone())
    }

    /// Returns when no batch waits, or after `at_most`: who gives way gets on, however busy the site is.
    pub(crate) fn give_way(&self, at_most: Duration) {
        let mut state = self.state.lock();
        state.giving_way += 1;
        self.changed
            .wait_while_for(&mut state, |state| state.waiting > 0, at_most);
        state.giving_way -= 1;
    }

    /// How many give way right now.
    #[cfg(test)]
    pub(crate) fn giving_way(&self) -> usize {
        self.state.lock().giving_way
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.waiting -= 1;
        if state.waiting == 0 {
            self.0.changed.notify_all();
        }
    }
}
