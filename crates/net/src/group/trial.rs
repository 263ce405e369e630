//! How many connections are worthwhile, determined by trying more. No clock: the caller passes samples in.
//!
//! One connection does not fill a long and fast link, whose window ends before the link does, nor
//! one that loses packets. Any other link it does fill, and then what another connection carries is only
//! compressed worse, for lack of what the first one carried. Which it is shows by trying, which
//! costs; so it is tried only where it can pay.
//!
//! A trial doubles the connections: where each carries what it can the whole doubles, which stands out
//! from the ups and downs of a lossy link. One that shows nothing is taken back and repeated, ever
//! more rarely: it may have fallen on a bad moment, and links change.

use std::time::{Duration, Instant};

/// Interval of the evaluations.
const JUDGE_EVERY: Duration = Duration::from_millis(1500);

/// The rate of the first moments says nothing of the link: so many round trips, within bounds.
const START_UP_ROUND_TRIPS: u32 = 8;
const START_UP: [Duration; 2] = [Duration::from_millis(500), Duration::from_millis(1000)];

/// A connection with this many bytes in flight may be limited by its TCP window (Linux limits it to 3 to 6 MB by
/// default).
const LONG_WINDOW_BYTES: f64 = 1e6;

/// With less than this left to send, a trial that shows nothing costs more than one that helps
/// would gain, unless it is the window that holds the connection back.
const WORTH_A_TRIAL_SECONDS: f64 = 8.0;

/// The same when the last trial helped: then the next one probably does, too.
const WORTH_ANOTHER_SECONDS: f64 = 2.0;

/// A trial helps if it raises the total rate by this factor; ideal would be 2.
const HELPS: f64 = 1.25;

/// The pause after a trial without effect; doubled by each further one.
const REST: Duration = Duration::from_secs(6);

/// A sample of a group's connections; counts and times are from the beginning of the session.
#[derive(Debug, Clone, Copy)]
pub struct TrialSample {
    /// The time of the sample.
    pub at: Instant,
    /// Bytes on the wire.
    pub sent: u64,
    /// Time that the connections' threads spent reading and compressing.
    pub busy: Duration,
    /// Time that they spent waiting for their sockets.
    pub waited: Duration,
    /// Estimated seconds to send the remaining blocks known to be needed.
    pub left: f64,
    /// Round-trip time of the first connection.
    pub round_trip: Duration,
}

/// Decides how many connections to use.
#[derive(Debug)]
pub struct ConnectionTrials {
    most: u16,
    working: u16,
    /// Start of the current evaluation interval; none while connections are starting.
    last: Option<TrialSample>,
    trial: Option<Trial>,
    /// The last trial helped.
    helped: bool,
    rest: Duration,
    rest_until: Option<Instant>,
}

/// A trial of more connections.
#[derive(Debug, Clone, Copy)]
struct Trial {
    /// Number of connections before.
    connections: u16,
    /// Their rate, in bytes per second.
    rate: f64,
}

impl ConnectionTrials {
    /// Starts with one connection; at most `most`.
    #[must_use]
    pub fn new(most: u16) -> Self {
        ConnectionTrials {
            most,
            working: 1,
            last: None,
            trial: None,
            helped: false,
            rest: REST,
            rest_until: None,
        }
    }

    /// How many connections should be working.
    #[must_use]
    pub fn working(&self) -> u16 {
        self.working
    }

    /// How long until the next sample.
    #[must_use]
    pub fn pause(&self, round_trip_ns: u64) -> Duration {
        match self.last {
            Some(_) => JUDGE_EVERY,
            None => Duration::from_nanos(round_trip_ns)
                .saturating_mul(START_UP_ROUND_TRIPS)
                .clamp(START_UP[0], START_UP[1]),
        }
    }

    /// Evaluates a sample; true when [`ConnectionTrials::working`] has changed.
    pub fn observe(&mut self, now: &TrialSample) -> bool {
        let Some(last) = self.last.replace(*now) else {
            return false;
        };
        let seconds = (now.at - last.at).as_secs_f64().max(1e-3);
        let rate = (now.sent - last.sent) as f64 / seconds;
        // Mostly waiting for the socket: either the link is full, which a trial will show, or its
        // connections cannot fill it.
        let (busy, waited) = (now.busy - last.busy, now.waited - last.waited);
        if waited < busy || waited.is_zero() {
            return false;
        }
        if let Some(trial) = self.trial.take() {
            self.helped = rate >= trial.rate * HELPS;
            if !self.helped {
                self.rest_until = Some(now.at + self.rest);
                self.rest *= 2;
                return self.change(trial.connections);
            }
        }
        if !self.may_try(now, rate) {
            return false;
        }
        self.trial = Some(Trial {
            connections: self.working,
            rate,
        });
        self.change((self.working * 2).min(self.most))
    }

    fn may_try(&self, now: &TrialSample, rate: f64) -> bool {
        if self.working >= self.most || self.rest_until.is_some_and(|until| now.at < until) {
            return false;
        }
        let under_way = rate * now.round_trip.as_secs_f64() / f64::from(self.working);
        let worth = match self.helped {
            true => WORTH_ANOTHER_SECONDS,
            false => WORTH_A_TRIAL_SECONDS,
        };
        under_way >= LONG_WINDOW_BYTES || now.left >= worth
    }

    fn change(&mut self, working: u16) -> bool {
        self.working = working;
        // The rate of connections that are still starting says little.
        self.last = None;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source whose connections wait for their sockets, over a link where so many connections make so many
    /// bytes a second (and `noise` of that more or less), until `bytes` are sent; answers the most
    /// connections that worked, how many work in the end, and the seconds it took.
    fn run(
        rate_of: &dyn Fn(u16) -> f64,
        noise: f64,
        round_trip_ms: u64,
        bytes: f64,
    ) -> (u16, u16, f64) {
        let (mut trials, start) = (ConnectionTrials::new(8), Instant::now());
        let mut random = fastrand::Rng::with_seed(7);
        let round_trip = Duration::from_millis(round_trip_ms);
        let (mut at, mut sent, mut most) = (Duration::ZERO, 0.0, 1);
        while sent < bytes {
            let pause = trials.pause(round_trip.as_nanos() as u64);
            at += pause;
            let rate = rate_of(trials.working()) * (1.0 + noise * (2.0 * random.f64() - 1.0));
            sent += rate * pause.as_secs_f64();
            trials.observe(&TrialSample {
                at: start + at,
                sent: sent as u64,
                busy: at / 4,
                waited: at * 3 / 4,
                left: ((bytes - sent) / rate).min(10.0),
                round_trip,
            });
            most = most.max(trials.working());
        }
        (most, trials.working(), at.as_secs_f64())
    }

    #[test]
    fn a_link_that_one_connection_fills_gets_few_trials_and_none_if_it_is_over_soon() {
        let full = |_| 12e6;
        assert_eq!(run(&full, 0.0, 40, 60e6).0, 1);
        let (most, working, _) = run(&full, 0.0, 40, 600e6);
        assert_eq!((most, working), (2, 1));
        assert_eq!(run(&|_| 120e6, 0.0, 5, 500e6).0, 1);
    }

    #[test]
    fn a_lossy_link_gets_as_many_as_it_takes_however_its_rate_swings() {
        let lossy = |connections: u16| (f64::from(connections) * 2e6).min(12e6);
        let (most, working, seconds) = run(&lossy, 0.0, 40, 300e6);
        assert_eq!((most, working), (8, 8));
        assert!(seconds < 36.0, "{seconds}");
        let (_, working, seconds) = run(&lossy, 0.4, 40, 300e6);
        assert!(working >= 4 && seconds < 55.0, "{working} {seconds}");
    }

    #[test]
    fn a_window_that_ends_before_the_link_does_is_seen_and_not_overdone() {
        let windowed = |connections: u16| (f64::from(connections) * 75e6).min(120e6);
        assert_eq!(
            run(&windowed, 0.0, 40, 700e6),
            (4, 2, run(&windowed, 0.0, 40, 700e6).2)
        );
        let (most, working, _) = run(
            &|connections| f64::from(connections) * 20e6,
            0.0,
            150,
            900e6,
        );
        assert_eq!((most, working), (8, 8));
    }

    #[test]
    fn a_trial_that_showed_nothing_is_repeated_ever_more_rarely() {
        let mut trials = ConnectionTrials::new(8);
        let start = Instant::now();
        let mut begun = Vec::new();
        let mut at = Duration::ZERO;
        while at < Duration::from_secs(120) {
            at += trials.pause(40_000_000);
            let before = trials.working();
            trials.observe(&TrialSample {
                at: start + at,
                sent: (at.as_secs_f64() * 12e6) as u64,
                busy: Duration::ZERO,
                waited: at,
                left: 10.0,
                round_trip: Duration::from_millis(40),
            });
            if trials.working() > before {
                begun.push(at.as_secs());
            }
        }
        assert!((3..=5).contains(&begun.len()), "{begun:?}");
        let gaps: Vec<u64> = begun.windows(2).map(|t| t[1] - t[0]).collect();
        assert!(gaps.windows(2).all(|g| g[1] > g[0]), "{begun:?}");
    }

    #[test]
    fn connections_that_are_busy_need_no_company() {
        let (mut trials, start) = (ConnectionTrials::new(8), Instant::now());
        for second in 1..20u32 {
            let at = Duration::from_secs(second.into());
            let look = TrialSample {
                at: start + at,
                sent: u64::from(second) * 10_000_000,
                busy: at,
                waited: at / 10,
                left: 100.0,
                round_trip: Duration::from_millis(40),
            };
            assert!(!trials.observe(&look));
        }
        assert_eq!(trials.working(), 1);
    }
}
