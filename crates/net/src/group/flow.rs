//! The bytes of replies in flight to a peer that grants credit for them.

use std::collections::HashMap;
use std::time::Duration;

use super::window::MAX_WINDOW;

/// Maximum bytes that a peer may have received without reporting them, on all connections together. This much in flight
/// is ignored, or the link would stall for bytes that are never reported.
pub const MAX_UNREPORTED: u64 = 16 << 10;

/// Bytes that may be in flight until the peer has granted a window.
const FIRST_WINDOW: u64 = 64 << 10;

/// What was sent on each connection to a peer, and what of it arrived according to the peer.
#[derive(Debug)]
pub struct Flow {
    connections: HashMap<u64, Connection>,
    window: u64,
    /// The sum over all connections.
    under_way: u64,
    round_trip: Option<Duration>,
}

#[derive(Debug, Default)]
struct Connection {
    sent: u64,
    received: u64,
    /// Total bytes sent when a round-trip measurement was started, and when that was.
    timed: Option<(u64, Duration)>,
}

impl Default for Flow {
    fn default() -> Self {
        Self {
            connections: HashMap::new(),
            window: FIRST_WINDOW,
            under_way: 0,
            round_trip: None,
        }
    }
}

impl Flow {
    /// Bytes are sent on a connection.
    pub fn sent(&mut self, connection: u64, bytes: u64, now: Duration) {
        let on = self.connections.entry(connection).or_default();
        on.sent += bytes;
        on.timed.get_or_insert((on.sent, now));
        self.under_way += bytes;
    }

    /// Bytes counted as sent have not left after all; returns how many of them, as some may have arrived. To be
    /// followed by [`Flow::sent`] when they have left.
    pub fn unsent(&mut self, connection: u64, bytes: u64) -> u64 {
        let Some(on) = self.connections.get_mut(&connection) else {
            return 0;
        };
        let back = bytes.min(on.sent - on.received);
        on.sent -= back;
        if on.timed.is_some_and(|(sent, _)| sent > on.sent) {
            on.timed = None;
        }
        self.under_way -= back;
        back
    }

    /// The peer reports what has arrived on a connection. Claims beyond what was sent, or below earlier ones, are
    /// ignored.
    pub fn credit(&mut self, connection: u64, received: u64, window: u64, now: Duration) {
        let on = self.connections.entry(connection).or_default();
        let received = received.clamp(on.received, on.sent);
        self.under_way -= received - on.received;
        on.received = received;
        self.window = window.clamp(1, MAX_WINDOW);
        if let Some((sent, at)) = on.timed
            && received >= sent
        {
            on.timed = None;
            let took = now.saturating_sub(at);
            self.round_trip = Some(self.round_trip.map_or(took, |least| least.min(took)));
        }
    }

    /// The minimum time between sending a reply and the report of its arrival, once measured.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// A connection is closed; its bytes are no longer in flight.
    pub fn gone(&mut self, connection: u64) {
        if let Some(on) = self.connections.remove(&connection) {
            self.under_way -= on.sent - on.received;
        }
    }

    /// Whether a background reply of this many bytes may be sent now.
    pub fn allows(&self, bytes: u64) -> bool {
        self.under_way < MAX_UNREPORTED || self.under_way.saturating_add(bytes) <= self.window
    }

    /// The `received` of a connection's last credit.
    pub fn echo(&self, connection: u64) -> u64 {
        self.connections
            .get(&connection)
            .map_or(0, |on| on.received)
    }

    /// Bytes that may be in flight.
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
    fn what_a_connection_cannot_send_keeps_nothing_from_the_others() {
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
