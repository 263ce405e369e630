//! Splits a round trip's queueing delay into the way to the peer and the way back, using both ends' clocks.
//!
//! When bytes are sent and received at once, each direction's bytes delay the other's arrival reports. By round
//! trips alone, each direction mistakes the other's queue for its own, and backs off until one of them starves.
//!
//! The clocks need not agree: only the excess over the shortest recent one-way delay counts.

use std::time::Duration;

use super::recent::RecentMin;

/// A longer queue than this is not believed, and neither are clocks that differ by so much from what round trips say: one of
/// them stood still for a while.
const MAX_QUEUE: Duration = Duration::from_millis(100);

/// How long a body, and the word of its arrival, waited for others on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queues {
    /// To the peer.
    pub up: Duration,
    /// From it.
    pub down: Duration,
}

/// The least time of each way, in microseconds.
#[derive(Debug, Default)]
pub struct Clocks {
    up: RecentMin<i64>,
    down: RecentMin<i64>,
    trip: RecentMin<i64>,
}

impl Clocks {
    /// A body was sent at `sent`, came at `at` microseconds of the peer's clock, and word of it came `now`.
    pub fn note(&mut self, sent: Duration, at: u64, now: Duration) -> Queues {
        let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX / 8);
        // Whatever a peer says does not wrap.
        let at = i64::try_from(at).unwrap_or(i64::MAX).min(i64::MAX / 8);
        let (sent, came) = (micros(sent), micros(now));
        let (up, down) = (at - sent, came - at);
        self.trip.note(now, came - sent);
        let least =
            |lately: &RecentMin<i64>, took| lately.get().map_or(took, |least| least.min(took));
        if least(&self.trip, came - sent)
            > least(&self.up, up) + least(&self.down, down) + micros(MAX_QUEUE)
        {
            (self.up, self.down) = Default::default();
        }
        self.up.note(now, up);
        self.down.note(now, down);
        let queue = |took: i64, lately: &RecentMin<i64>| {
            let micros = u64::try_from(took - least(lately, took)).unwrap_or(0);
            Duration::from_micros(micros).min(MAX_QUEUE)
        };
        Queues {
            up: queue(up, &self.up),
            down: queue(down, &self.down),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn each_way_has_its_own_queue_whatever_the_clocks_say() {
        for offset in [0, 7_000_000_000] {
            let mut clocks = Clocks::default();
            let at = |ms: u64| offset + ms * 1000;
            let none = clocks.note(MS(1000), at(1005), MS(1010));
            assert_eq!(none, Queues::default());
            let both = clocks.note(MS(1100), at(1108), MS(1114));
            assert_eq!((both.up, both.down), (MS(3), MS(1)));
            // The other way was not empty then: that is learned when it is.
            let shorter = clocks.note(MS(1200), at(1209), MS(1213));
            assert_eq!((shorter.up, shorter.down), (MS(4), MS(0)));
        }
    }

    #[test]
    fn a_clock_that_stood_still_is_believed_anew() {
        let mut clocks = Clocks::default();
        clocks.note(MS(1000), 1_005_000, MS(1010));
        // Ten seconds are missing at the site.
        let after = clocks.note(MS(20_000), 10_005_000, MS(20_010));
        assert_eq!(after, Queues::default());
        let later = clocks.note(MS(20_100), 10_107_000, MS(20_112));
        assert_eq!((later.up, later.down), (MS(2), MS(0)));
    }

    #[test]
    fn lies_about_the_time_do_not_wrap_and_are_not_much() {
        let mut clocks = Clocks::default();
        for at in [0, u64::MAX, 1, i64::MAX as u64, u64::MAX / 2] {
            let seen = clocks.note(MS(10), at, MS(20));
            assert!(seen.up <= MAX_QUEUE && seen.down <= MAX_QUEUE);
        }
    }
}
