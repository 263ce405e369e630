//! The one thread of an image that copies what was committed into its place.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::image::Image;

/// Who copies an image's epochs, and whether there is one to copy.
#[derive(Default)]
pub struct Settler {
    state: Mutex<State>,
    /// The thread has ended.
    ended: Notify,
    /// Held by whoever waits for the end.
    waits: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    wanted: bool,
    runs: bool,
}

impl Settler {
    /// An epoch counts that was not copied.
    pub fn wanted(&self) {
        self.state.lock().wanted = true;
    }

    /// Whether a thread is to be started for what is wanted. It counts as running from here on.
    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        let begins = state.wanted && !state.runs;
        state.runs |= begins;
        begins
    }

    /// Whether there is more to do; if not the thread does not run any more.
    fn next(&self) -> bool {
        let mut state = self.state.lock();
        let more = std::mem::take(&mut state.wanted);
        state.runs = more;
        more
    }

    fn ended(&self) {
        self.state.lock().runs = false;
        self.ended.notify_waiters();
    }
}

/// A thread that panics does not count as running for ever.
struct Runs<'a>(&'a Settler);

impl Drop for Runs<'_> {
    fn drop(&mut self) {
        match std::thread::panicking() {
            true => self.0.ended(),
            // Another may run already.
            false => self.0.ended.notify_waiters(),
        }
    }
}

impl Image {
    /// Copies what was committed into its place, on a thread of its own: the answer is on its way already, and a thread of
    /// the pool would be kept from the mount's next epoch. There is one such thread of an image at most.
    pub fn settle_aside(self: &Arc<Self>) {
        if !self.settler().begin() {
            return;
        }
        let image = Arc::clone(self);
        let settle = move || {
            let runs = Runs(image.settler());
            while runs.0.next() {
                image.settle();
            }
        };
        let thread = std::thread::Builder::new().name("mount-settle".into());
        if let Err(error) = thread.spawn(settle) {
            // It is done before the next commit.
            tracing::warn!(%error, image = %self.name(), "an epoch waits to be copied into its overlay");
            self.settler().ended();
        }
    }

    /// Waits until no thread copies what was committed; at once when somebody else does so already. Cancel safe.
    pub async fn settled(&self) {
        let settler = self.settler();
        let Ok(_only) = settler.waits.try_lock() else {
            return;
        };
        loop {
            let ended = settler.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if !settler.state.lock().runs {
                return;
            }
            ended.await;
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
                let _runs = Runs(&settler);
                panic!("a copy that panics");
            });
            assert!(copies.join().is_err());
        });
        assert!(settler.begin(), "what was wanted still is");
    }
}
