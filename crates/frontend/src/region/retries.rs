//! Faults whose read failed, and when they are retried.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::{Duration, Instant};

/// The wait after the first failure; doubles with each.
const FIRST_BACKOFF: Duration = Duration::from_millis(5);
const MAX_BACKOFF: Duration = Duration::from_millis(500);
/// Faults waiting for a retry. At most as many as there are threads waiting for pages.
#[derive(Default)]
pub(super) struct Retries {
    failing: HashMap<usize, Failing>,
    due: BinaryHeap<Reverse<(Instant, usize)>>,
}

struct Failing {
    since: Instant,
    attempts: u32,
}

impl Retries {
    /// Records another failure of `unit`; returns since when it has been failing. Failures long past are forgotten.
    pub(super) fn failed(&mut self, unit: usize, now: Instant) -> (Instant, u32) {
        let failing = self.failing.entry(unit).or_insert(Failing {
            since: now,
            attempts: 0,
        });
        failing.attempts += 1;
        (failing.since, failing.attempts)
    }

    pub(super) fn forget(&mut self, unit: usize) {
        if !self.failing.is_empty() {
            self.failing.remove(&unit);
        }
    }

    pub(super) fn defer(&mut self, unit: usize, until: Instant) {
        self.due.push(Reverse((until, unit)));
    }

    /// The units due now, and the time until the next.
    pub(super) fn due(&mut self, now: Instant) -> (Vec<usize>, Option<Duration>) {
        let mut units = Vec::new();
        while let Some(Reverse((at, unit))) = self.due.peek().copied() {
            if at > now {
                return (units, Some(at - now));
            }
            self.due.pop();
            units.push(unit);
        }
        (units, None)
    }
}

pub(super) fn backoff(attempts: u32) -> Duration {
    let doublings = attempts.saturating_sub(1).min(10);
    (FIRST_BACKOFF * (1 << doublings)).min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_between_attempts_grows_to_a_limit() {
        assert_eq!(backoff(1), FIRST_BACKOFF);
        assert_eq!(backoff(2), FIRST_BACKOFF * 2);
        assert_eq!(backoff(u32::MAX), MAX_BACKOFF);
    }

    #[test]
    fn what_is_due_comes_in_order() {
        let (mut retries, now) = (Retries::default(), Instant::now());
        let second = Duration::from_secs(1);
        retries.defer(1, now + second);
        retries.defer(2, now);
        assert_eq!(retries.due(now), (vec![2], Some(second)));
        assert_eq!(retries.due(now + second), (vec![1], None));
        assert_eq!(retries.failed(5, now), (now, 1));
        assert_eq!(retries.failed(5, now + second), (now, 2));
        retries.forget(5);
        assert_eq!(retries.failed(5, now + second), (now + second, 1));
    }
}
