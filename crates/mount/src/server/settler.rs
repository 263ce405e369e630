//! State of the thread that copies an image's committed epochs into place; at most one runs per image.

use drover_net::until;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Whether the thread runs, and whether there is an epoch to copy.
#[derive(Default)]
pub struct Settler {
    state: Mutex<SettlerState>,
    /// Notified when the thread ends.
    ended: Notify,
    /// Held by the one caller that waits for the end.
    waits: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct SettlerState {
    wanted: bool,
    runs: bool,
}

impl Settler {
    /// Requests a copy, after an epoch was committed.
    pub fn wanted(&self) {
        self.state.lock().wanted = true;
    }

    /// Whether the caller must start a thread for the requested copy; it counts as running from here on.
    pub fn begin(&self) -> bool {
        let mut state = self.state.lock();
        let begins = state.wanted && !state.runs;
        state.runs |= begins;
        begins
    }

    /// Whether the thread has another copy to make; if not it no longer counts as running.
    pub fn next(&self) -> bool {
        let mut state = self.state.lock();
        let more = std::mem::take(&mut state.wanted);
        state.runs = more;
        more
    }

    /// Records that the thread has ended.
    pub fn ended(&self) {
        self.state.lock().runs = false;
        self.ended.notify_waiters();
    }

    /// Waits until no thread runs; returns at once if another caller is waiting already. Cancel safe.
    pub async fn wait(&self) {
        let Ok(_only) = self.waits.try_lock() else {
            return;
        };
        until(&self.ended, || (!self.state.lock().runs).then_some(())).await;
    }
}

/// Guard of the thread: one that panics stops counting as running.
pub struct RunningGuard<'a>(pub &'a Settler);

impl Drop for RunningGuard<'_> {
    fn drop(&mut self) {
        match std::thread::panicking() {
            true => self.0.ended(),
            // Another thread may be running already.
            false => self.0.ended.notify_waiters(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_makes_all_copies_and_a_panic_ends_it() {
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
