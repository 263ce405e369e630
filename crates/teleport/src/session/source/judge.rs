//! Would another lane help? Pure: it is told the time and what the lanes did.
//!
//! One connection does not fill a long and fast link, whose window ends before the link does, nor
//! one that loses packets. Any other link it does fill, and then what another lane carries is only
//! compressed worse, for lack of what the first one carried. Which it is shows by trying, which
//! costs; so it is tried only where it can pay.

use std::time::{Duration, Instant};

/// How often it is judged.
const JUDGE_EVERY: Duration = Duration::from_millis(1500);

/// The rate of the first moments says nothing of the link: so many round trips, within bounds.
const START_UP_ROUND_TRIPS: u32 = 8;
const START_UP: [Duration; 2] = [Duration::from_millis(500), Duration::from_millis(1000)];

/// A connection with so many bytes under way may be at the end of its window (Linux ends at 3 to
/// 6 MB by default).
const LONG_WINDOW_BYTES: f64 = 1e6;

/// With less than this left to send, a trial that shows nothing costs more than one that helps
/// would gain, unless it is the window that holds the connection back.
const WORTH_A_TRIAL_SECONDS: f64 = 8.0;

/// The same when the last lane helped: then the next one likely does, too.
const WORTH_ANOTHER_SECONDS: f64 = 2.0;

/// A lane that helps makes the whole so much faster.
const HELPS: f64 = 1.1;

/// What can be seen at one moment; counts and times are from the beginning of the session.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    pub at: Instant,
    /// Bytes on the wire.
    pub sent: u64,
    /// What the lanes' threads spent reading and compressing.
    pub busy: Duration,
    /// What they spent waiting for their sockets.
    pub waited: Duration,
    /// Seconds that the blocks known to be needed will take.
    pub left: f64,
    /// The first lane's.
    pub round_trip: Duration,
    /// Lanes open.
    pub open: u16,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opinion {
    Wait,
    /// Open another lane.
    Open,
    /// The last one did not help: let it rest.
    Rest,
}

/// Judges whether the lanes wait for their sockets, and whether the last new one helped.
#[derive(Default)]
pub struct Judge {
    last: Option<Look>,
    /// The rate before the last lane was opened, in bytes a second.
    before: Option<f64>,
    settled: bool,
}

impl Judge {
    /// How long until the next look.
    pub fn pause(&self, round_trip_ns: u64) -> Duration {
        let start_up = Duration::from_nanos(round_trip_ns)
            .saturating_mul(START_UP_ROUND_TRIPS)
            .clamp(START_UP[0], START_UP[1]);
        match self.last {
            None => start_up,
            Some(_) if self.before.is_none() => JUDGE_EVERY - start_up,
            Some(_) => JUDGE_EVERY,
        }
    }

    /// Takes a look.
    pub fn look(&mut self, now: &Look) -> Opinion {
        let Some(last) = self.last.replace(*now) else {
            return Opinion::Wait;
        };
        let seconds = (now.at - last.at).as_secs_f64().max(1e-3);
        let rate = (now.sent - last.sent) as f64 / seconds;
        // Mostly waiting for the socket: either the link is full, which the next lane will show,
        // or one connection cannot fill it.
        let (busy, waited) = (now.busy - last.busy, now.waited - last.waited);
        if self.settled || waited < busy || waited.is_zero() {
            return Opinion::Wait;
        }
        if self.before.is_some_and(|before| rate < before * HELPS) {
            self.settled = true;
            return Opinion::Rest;
        }
        let under_way = rate * now.round_trip.as_secs_f64() / f64::from(now.open.max(1));
        let worth = match self.before {
            None => WORTH_A_TRIAL_SECONDS,
            Some(_) => WORTH_ANOTHER_SECONDS,
        };
        if under_way < LONG_WINDOW_BYTES && now.left < worth {
            return Opinion::Wait;
        }
        self.before = Some(rate);
        Opinion::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source whose lanes wait for their sockets, over a link where `rates` (bytes a second) is
    /// what one, two, three and four lanes make; answers how many are open in the end, and how
    /// many of those work.
    fn run(rates: [f64; 4], round_trip_ms: u64, bytes: f64) -> (u16, u16) {
        let (mut judge, start) = (Judge::default(), Instant::now());
        let round_trip = Duration::from_millis(round_trip_ms);
        let (mut at, mut sent) = (Duration::ZERO, 0.0);
        let (mut open, mut working) = (1, 1);
        while sent < bytes && open < 4 {
            let pause = judge.pause(round_trip.as_nanos() as u64);
            at += pause;
            // The first moments are slow.
            let full = if at == pause { 0.5 } else { 1.0 };
            let rate = rates[usize::from(working) - 1] * full;
            sent += rate * pause.as_secs_f64();
            let opinion = judge.look(&Look {
                at: start + at,
                sent: sent as u64,
                busy: at / 4,
                waited: at * 3 / 4,
                left: (bytes - sent) / rate,
                round_trip,
                open,
            });
            match opinion {
                Opinion::Wait => {}
                Opinion::Open => (open, working) = (open + 1, working + 1),
                Opinion::Rest => working -= 1,
            }
        }
        (open, working)
    }

    #[test]
    fn a_link_that_one_connection_fills_gets_one_trial_at_most_and_none_if_it_is_over_soon() {
        let full = [12e6; 4];
        assert_eq!(run(full, 40, 60e6), (1, 1));
        assert_eq!(run(full, 40, 600e6), (2, 1));
        assert_eq!(run([120e6; 4], 5, 500e6), (1, 1));
    }

    #[test]
    fn a_lossy_link_and_a_long_fast_one_get_more() {
        let lossy = [2e6, 4e6, 6e6, 8e6];
        assert_eq!(run(lossy, 40, 60e6), (4, 4));
        let windowed = [75e6, 120e6, 120e6, 120e6];
        assert_eq!(run(windowed, 40, 350e6), (3, 2));
        assert_eq!(run([20e6, 40e6, 60e6, 80e6], 150, 350e6), (4, 4));
    }

    #[test]
    fn lanes_that_are_busy_need_no_company() {
        let (mut judge, start) = (Judge::default(), Instant::now());
        for second in 1..20u32 {
            let at = Duration::from_secs(second.into());
            let look = Look {
                at: start + at,
                sent: u64::from(second) * 10_000_000,
                busy: at,
                waited: at / 10,
                left: 100.0,
                round_trip: Duration::from_millis(40),
                open: 1,
            };
            assert_eq!(judge.look(&look), Opinion::Wait);
        }
    }
}
