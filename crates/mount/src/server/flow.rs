//! How many bytes of a mount's answers are on their way.

use std::collections::HashMap;
use std::time::Duration;

use crate::protocol::MOST_UNTOLD;

/// Bytes that may be under way until the mount has said how many.
pub const FIRST_WINDOW: u64 = 64 << 10;

/// The most that a mount is believed when it says how many bytes may be under way.
pub const MAX_WINDOW: u64 = 256 << 20;

/// What left on each lane of a mount and what of it arrived, by the mount's own account.
#[derive(Debug)]
pub struct Flow {
    lanes: HashMap<u64, Lane>,
    window: u64,
    /// Of all lanes; kept so that nobody has to add.
    under_way: u64,
    round_trip: Option<Duration>,
}

#[derive(Debug, Default)]
struct Lane {
    sent: u64,
    received: u64,
    /// What had been sent when a clock was started, and when that was.
    timed: Option<(u64, Duration)>,
}

impl Default for Flow {
    fn default() -> Self {
        Self {
            lanes: HashMap::new(),
            window: FIRST_WINDOW,
            under_way: 0,
            round_trip: None,
        }
    }
}

impl Flow {
    /// Bytes leave on a lane.
    pub fn sent(&mut self, lane: u64, bytes: u64, now: Duration) {
        let lane = self.lanes.entry(lane).or_default();
        lane.sent += bytes;
        lane.timed.get_or_insert((lane.sent, now));
        self.under_way += bytes;
    }

    /// Bytes that left have not left after all; returned is how many of them, as some may have arrived. To be followed by
    /// [`Flow::sent`] when those have left.
    pub fn unsent(&mut self, lane: u64, bytes: u64) -> u64 {
        let Some(lane) = self.lanes.get_mut(&lane) else {
            return 0;
        };
        let back = bytes.min(lane.sent - lane.received);
        lane.sent -= back;
        if lane.timed.is_some_and(|(sent, _)| sent > lane.sent) {
            lane.timed = None;
        }
        self.under_way -= back;
        back
    }

    /// The mount says what has arrived on a lane. What it claims beyond what was sent, or takes back, is not believed.
    pub fn credit(&mut self, lane: u64, received: u64, window: u64, now: Duration) {
        let lane = self.lanes.entry(lane).or_default();
        let received = received.clamp(lane.received, lane.sent);
        self.under_way -= received - lane.received;
        lane.received = received;
        self.window = window.clamp(1, MAX_WINDOW);
        if let Some((sent, at)) = lane.timed
            && received >= sent
        {
            lane.timed = None;
            let took = now.saturating_sub(at);
            self.round_trip = Some(self.round_trip.map_or(took, |least| least.min(took)));
        }
    }

    /// The least time that an answer and the word of its arrival took, once one did.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// A lane is gone, and what was on it.
    pub fn gone(&mut self, lane: u64) {
        if let Some(lane) = self.lanes.remove(&lane) {
            self.under_way -= lane.sent - lane.received;
        }
    }

    /// Whether a background answer of so many bytes may leave now.
    pub fn allows(&self, bytes: u64) -> bool {
        self.under_way < MOST_UNTOLD || self.under_way.saturating_add(bytes) <= self.window
    }

    /// What a lane's credit last said.
    pub fn echo(&self, lane: u64) -> u64 {
        self.lanes.get(&lane).map_or(0, |lane| lane.received)
    }

    /// Bytes that may be under way.
    pub fn window(&self) -> u64 {
        self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn what_is_under_way_is_held_to_the_window() {
        let mut flow = Flow::default();
        flow.credit(1, 0, 100_000, at(5));
        assert!(flow.allows(1 << 20), "a link must never stand still");
        flow.sent(1, 60_000, at(0));
        flow.sent(2, 30_000, at(0));
        assert!(flow.allows(10_000) && !flow.allows(10_001));
        flow.credit(1, 50_000, 100_000, at(5));
        assert!(flow.allows(60_000) && !flow.allows(60_001));
        flow.gone(2);
        assert!(flow.allows(90_000));
        assert_eq!(
            flow.round_trip(),
            None,
            "not all of what was timed is there"
        );
        flow.credit(1, 60_000, 100_000, at(30));
        assert_eq!(flow.round_trip(), Some(at(30)));
    }

    #[test]
    fn what_a_lane_cannot_send_keeps_nothing_from_the_others() {
        let mut flow = Flow::default();
        flow.credit(1, 0, 100_000, at(5));
        flow.sent(1, 80_000, at(5));
        flow.sent(2, 20_000, at(5));
        assert!(!flow.allows(1000));
        flow.credit(1, 30_000, 100_000, at(9));
        assert_eq!(flow.unsent(1, 80_000), 50_000, "some of it has arrived");
        assert!(flow.allows(80_000) && !flow.allows(80_001));
        flow.sent(1, 50_000, at(20));
        assert!(flow.allows(30_000) && !flow.allows(30_001));
        assert_eq!(flow.unsent(3, 1), 0);
        flow.gone(1);
        assert_eq!(flow.unsent(1, 50_000), 0);
    }

    #[test]
    fn lies_about_what_arrived_do_not_wrap() {
        let mut flow = Flow::default();
        flow.sent(1, 1000, at(0));
        flow.credit(1, u64::MAX, u64::MAX, at(5));
        assert_eq!((flow.echo(1), flow.window()), (1000, MAX_WINDOW));
        flow.credit(1, 0, 0, at(5));
        assert_eq!((flow.echo(1), flow.window()), (1000, 1));
        flow.credit(9, u64::MAX, 5, at(5));
        flow.gone(9);
        flow.gone(1);
        flow.gone(1);
        assert!(flow.allows(u64::MAX));
    }
}
