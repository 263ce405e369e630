//! The minimum of the values of the last seconds.

use std::collections::VecDeque;
use std::time::Duration;

/// How long something counts. A clock that is being set right may gain half a millisecond a second on another, so 5 ms in
/// that time; what is taken for a queue because of that is bounded by [`Window::queue`](super::Window::queue).
pub(super) const RECENT: Duration = Duration::from_secs(10);

/// The least of each of those seconds, with the second's beginning.
#[derive(Clone, Debug)]
pub(super) struct RecentMin<T>(VecDeque<(Duration, T)>);

impl<T> Default for RecentMin<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T: Copy + Ord> RecentMin<T> {
    /// Records a value.
    pub fn note(&mut self, now: Duration, value: T) {
        let second = Duration::from_secs(now.as_secs());
        match self.0.back_mut() {
            Some((at, least)) if *at == second => *least = (*least).min(value),
            _ => self.0.push_back((second, value)),
        }
        while self.0.front().is_some_and(|(at, _)| *at + RECENT < second) {
            self.0.pop_front();
        }
    }

    /// The least; none when nothing was seen.
    pub fn get(&self) -> Option<T> {
        self.0.iter().map(|(_, value)| *value).min()
    }
}
