//! The thread of an image that copies committed epochs into place; at most one runs.

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Whether that thread runs, and whether there is an epoch to copy.
#[derive(Default)]
pub struct Settler {
    state: Mutex<SettlerState>,
    /// The thread has ended.
    ended: Notify,
    /// Held while waiting for the end.
    waits: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct SettlerState {
    wanted: bool,
    runs: bool,
}

impl Settler {
    /// An epoch was committed and is to be copied.
    pub fn wanted(&self) {
        self.state.lock().wanted = true;
    }

    /// Whether a thread is to be started for what is wanted. It counts as running from here on.
    pub fn begin(&self) -> bool {
        let mut state = self.state.lock();
        let begins = state.wanted && !state.runs;
        state.runs |= begins;
        begins
    }

    /// Whether there is more to do; if not the thread does not run any more.
    pub fn next(&self) -> bool {
        let mut state = self.state.lock();
        let more = std::mem::take(&mut state.wanted);
        state.runs = more;
        more
    }

    /// The thread has ended.
    pub fn ended(&self) {
        self.state.lock().runs = false;
        self.ended.notify_waiters();
    }

    /// Waits until no thread runs; returns at once when another caller waits already. Cancel safe.
    pub async fn wait(&self) {
        let Ok(_only) = self.waits.try_lock() else {
            return;
        };
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if !self.state.lock().runs {
                return;
            }
            ended.await;
        }
    }
}

/// A thread that panics does not count as running for ever.
pub struct RunningGuard<'a>(pub &'a Settler);

impl Drop for RunningGuard<'_> {
    fn drop(&mut self) {
        match std::thread::panicking() {
            true => self.0.ended(),
            // Another may run already.
            false => self.0.ended.notify_waiters(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_runs_for_all_that_is_wanted_and_a_panic_ends_it() {
        let settler = Settler::default();
        assert!(!settler.begin(), "nothing is wanted");
        settler.wanted();
        assert!(settler.begin());
        assert!(!settler.begin(), "it runs");
        assert!(settler.next());
        settler.wanted();
        assert!(!settler.begin(), "the one that runs does it");
        assert!(settler.next());
        assert!(!settler.next());
        settler.wanted();
        assert!(settler.begin(), "it has ended");
        std::thread::scope(|scope| {
            let copies = scope.spawn(|| {
                let _runs = RunningGuard(&settler);
                panic!("a copy that panics");
            });
            assert!(copies.join().is_err());
        });
        assert!(settler.begin(), "what was wanted still is");
    }
}
