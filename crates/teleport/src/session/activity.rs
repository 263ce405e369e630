//! Whether anything of a session moves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// When a session last moved anything but keep-alives, or did work of its own.
#[derive(Debug)]
pub struct Activity {
    last: Mutex<Instant>,
    /// The image is complete and being delivered: the source has nothing to do.
    delivering: AtomicBool,
}

impl Default for Activity {
    fn default() -> Self {
        Activity {
            last: Mutex::new(Instant::now()),
            delivering: AtomicBool::new(false),
        }
    }
}

impl Activity {
    /// Something moved.
    pub fn touch(&self) {
        *self.last.lock() = Instant::now();
    }

    /// The site delivers the image, or is done with that.
    pub fn deliver(&self, now: bool) {
        self.touch();
        self.delivering.store(now, Ordering::Relaxed);
    }

    /// For how long nothing has moved.
    pub fn idle_for(&self) -> Duration {
        match self.delivering.load(Ordering::Relaxed) {
            true => Duration::ZERO,
            false => self.last.lock().elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_not_idle_while_the_site_delivers() {
        let activity = Activity::default();
        let short = Duration::from_millis(5);
        std::thread::sleep(short);
        assert!(activity.idle_for() >= short);
        activity.deliver(true);
        std::thread::sleep(short);
        assert_eq!(activity.idle_for(), Duration::ZERO);
        activity.deliver(false);
        std::thread::sleep(short);
        assert!(activity.idle_for() >= short);
    }
}
