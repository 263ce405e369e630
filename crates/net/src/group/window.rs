//! The flow-control window: how many bytes may be in flight so that the link is full and no queue builds up in it.
//!
//! The paper set its number of concurrent pulls by hand, to between 4,096 and 16,384 (r3map §1.5). Here the window
//! sizes itself to bandwidth x round trip, from measurements of both, in the manner of BBR and Copa: the rate is the
//! highest seen in the last rounds, the round trip the minimum of the last seconds. The window is `rate x (round trip +
//! slack)`. The slack probes for more bandwidth: if there is some, a window above the link's bandwidth-delay product
//! raises the next rate, which raises the next window; if there is none, the slack becomes the queue, and the only one.
//! A flow that fills queues on the same link gets the larger share of it: background work gives way.
//!
//! At the start it grows with what arrives, ahead of TCP's slow start, which fills the link at its own pace.
//!
//! No clock: the caller passes times in.

use std::collections::VecDeque;
use std::time::Duration;

use super::recent::{RECENT, RecentMin};

/// What differs between the two directions.
#[derive(Clone, Copy, Debug)]
struct Direction {
    /// Initial window in bytes.
    first: u64,
    /// Minimum window in bytes.
    least: u64,
    /// Minimum and maximum slack.
    slack: (Duration, Duration),
    /// How much longer than the slack and two replies the queue may be.
    beyond: Duration,
    /// The other direction's queue is known for each sample, not only as a recent estimate.
    exact: bool,
}

/// It begins slightly above what TCP sends in its first round trip on two connections, and keeps a few frames in
/// flight. Two busy machines need a millisecond to schedule their turns; two are what a foreground read may have to
/// wait.
const RECEIVING: Direction = Direction {
    first: 64 << 10,
    least: 48 << 10,
    slack: (Duration::from_millis(1), Duration::from_millis(2)),
    beyond: Duration::from_millis(2),
    exact: false,
};

/// The link may be much slower: at least one minimum-size part is in flight. Arrival reports queue behind received data
/// for varying times, so there is more slack.
const SENDING: Direction = Direction {
    first: 32 << 10,
    least: 16 << 10,
    slack: (Duration::from_millis(3), Duration::from_millis(4)),
    beyond: Duration::ZERO,
    exact: true,
};

/// Until this multiple of the first window has arrived, late replies on all connections are due to TCP's slow start,
/// and not to a full link.
const SLOW_START: u64 = 16;

/// Maximum window in bytes.
pub const MAX_WINDOW: u64 = 256 << 20;

/// Rounds whose highest rate counts.
const RATE_ROUNDS: usize = 8;

/// The slack is this fraction (1/n) of the round trip, within bounds.
const SLACK_PART: u32 = 20;

/// The window covers at least this duration at the current rate. Where a round trip is much shorter, bursts of whole
/// chunks overflow a queue of one round trip whatever the window is; losses cost the more the less is in flight beside
/// them, and a window of less than two chunks cannot detect that it should grow.
const MIN_COVER: Duration = Duration::from_millis(3);

/// A round that is not faster than the best before by this factor does not count as growth.
const GROWTH: f64 = 1.25;

/// See [`Window::extra`]: it is at most this part of the window, or one reply, and found in so many steps.
const MAX_EXTRA: f64 = 0.03;
const EXTRA_STEPS: u64 = 4;

/// Consecutive rounds of growth without a queue after which the window grows as fast as at the start.
const GROWN_ROUNDS: u32 = 3;

/// Rounds without growth that end the start phase.
const FLAT_ROUNDS: u32 = 3;

/// Consecutive rounds with more queue than the slack explains after which the link is taken to have become slower.
const SLOWER_ROUNDS: u32 = 2;

/// The same after which its round trip is taken to have become longer: a smaller window did not help.
const LONGER_ROUNDS: u32 = 8;

/// What is left of a rate that was seen after a round, and the part of it that is much less.
const PEAK_DECAY: f64 = 0.995;
const DEGRADED_FRACTION: f64 = 0.75;

/// Looks in a row without growth after which it is over, and the least time between two.
const FLAT_LOOKS: u32 = 2;
const MIN_LOOK: Duration = Duration::from_millis(8);

/// Consecutive replies late by more than [`START_QUEUE`] and a quarter of the round trip that end the start phase,
/// before the queue overflows.
const LATE_ANSWERS: u32 = 6;

/// See [`LATE_ANSWERS`].
const START_QUEUE: Duration = Duration::from_millis(6);

/// Consecutive late replies of a connection, and the time of the last reply.
#[derive(Clone, Copy, Debug)]
struct Late {
    connection: usize,
    answers: u32,
    at: Duration,
}

/// Whether the arrival rate still grows, measured by the clock: round trips are no measure while TCP is starting on one
/// connection and far ahead on another.
#[derive(Clone, Copy, Debug, Default)]
struct Ramp {
    since: Duration,
    arrived: u64,
    /// The highest rate that was growth, and the highest of all.
    best: f64,
    most: f64,
    /// Consecutive checks without growth.
    flat: u32,
    /// Something came since the last look that was not all there was to send.
    busy: bool,
}

impl Ramp {
    /// Looks, a round trip after the look before.
    fn look(&mut self, now: Duration, arrived: u64, trip: Duration) {
        self.busy = true;
        let took = now.saturating_sub(self.since);
        if took < trip.max(MIN_LOOK) {
            return;
        }
        let rate = (arrived - self.arrived) as f64 / took.as_secs_f64();
        self.most = self.most.max(rate);
        if rate >= self.best * GROWTH {
            self.best = rate;
            self.flat = 0;
        } else {
            self.flat += 1;
        }
        (self.since, self.arrived) = (now, arrived);
        self.busy = false;
    }

    /// There was nothing to send; that counts unless there was something since the last check.
    fn pause(&mut self, now: Duration, arrived: u64) {
        if self.busy {
            return;
        }
        (self.since, self.arrived) = (now, arrived);
    }
}

/// What had arrived when permission for more was given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    arrived: u64,
    at: Duration,
}

impl Mark {
    /// The time of the permission.
    #[must_use]
    pub fn at(&self) -> Duration {
        self.at
    }
}

/// What is known of a reply beside its length.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SampleContext {
    /// Nothing else was waiting to be sent.
    pub limited: bool,
    /// How much of its round trip was queueing in the other direction.
    pub other: Duration,
}

/// The window of one direction of a group.
#[derive(Clone, Debug)]
pub struct Window {
    fixed: Option<u64>,
    direction: Direction,
    size: u64,
    arrived: u64,
    /// What had arrived when the window last grew by it.
    grown_to: u64,
    phase: Phase,
    /// The highest rate of each of the last rounds, in bytes per second.
    rates: VecDeque<f64>,
    /// The longest reply of each of the last rounds: a reply is sent when all of it may be in flight.
    answers: VecDeque<u64>,
    /// The recent minimum round trip, with the bytes of its reply.
    trips: RecentMin<(Duration, u64)>,
    /// When the window was last small enough for the queue to be empty.
    drained_at: Duration,
    round: Round,
    /// Consecutive rounds whose queue was longer than the slack explains.
    queued_rounds: u32,
    /// The connections that delivered replies recently.
    connections: Vec<Late>,
    ramp: Ramp,
    /// Consecutive rounds faster than all before them, without a queue.
    grown_rounds: u32,
    /// The highest rate of the last seconds, decaying slowly.
    peak: f64,
    /// Bytes added to the window because the slack alone left no queue: arrival reports and whole replies occupy a part
    /// of the window that the link does not see. With less than two replies in flight a higher rate would never be
    /// detected.
    extra: u64,
    /// The shortest reply in bytes.
    answer: u64,
    /// The minimum that the other direction's queue added to the round trips of the last round: it is not a queue of
    /// this direction, and more has to be in flight meanwhile.
    other: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Growing by what arrives, which doubles it each round trip as TCP's own start does, so that it is TCP that waits
    /// for the link and not the link for the window; until the rate does not follow.
    Start { best: f64, flat: u32 },
    /// At its computed size.
    Steady,
    /// One round with a slightly smaller window, to measure the round trip without a queue.
    Drain,
}

#[derive(Clone, Copy, Debug)]
struct Round {
    /// It ends when a reply marked after this arrives.
    until: u64,
    rate: f64,
    trip: Option<(Duration, u64)>,
    /// The longest reply.
    answer: u64,
    /// The minimum queue of the other direction.
    other: Option<Duration>,
    /// Whether there was always something to send.
    full: bool,
}

impl Round {
    fn begin(arrived: u64) -> Self {
        Self {
            until: arrived,
            rate: 0.0,
            trip: None,
            answer: 0,
            other: None,
            full: false,
        }
    }
}

impl Window {
    /// A window that determines its size, or has a fixed one, for replies of at least `answer` bytes.
    #[must_use]
    pub fn receiving(fixed: Option<u64>, answer: u64) -> Self {
        let fixed = fixed.map(|bytes| bytes.clamp(RECEIVING.least, MAX_WINDOW));
        Self::from(fixed, RECEIVING, answer)
    }

    /// The same for the sending direction, where arrivals are reported by the peer.
    #[must_use]
    pub fn sending() -> Self {
        Self::from(None, SENDING, SENDING.least)
    }

    fn from(fixed: Option<u64>, direction: Direction, answer: u64) -> Self {
        Self {
            fixed,
            direction,
            size: direction.first,
            arrived: 0,
            grown_to: 0,
            phase: Phase::Start { best: 0.0, flat: 0 },
            rates: VecDeque::new(),
            answers: VecDeque::new(),
            trips: RecentMin::default(),
            drained_at: Duration::ZERO,
            round: Round::begin(0),
            queued_rounds: 0,
            connections: Vec::new(),
            ramp: Ramp::default(),
            grown_rounds: 0,
            peak: 0.0,
            extra: 0,
            answer,
            other: Duration::ZERO,
        }
    }

    /// Bytes that may be in flight.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.fixed.unwrap_or(self.size)
    }

    /// Whether the link's rate is known.
    #[must_use]
    pub fn has_started(&self) -> bool {
        !matches!(self.phase, Phase::Start { .. })
    }

    /// Whether the rate is much lower than in the last seconds: the link is slower now, or TCP is behind on it.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        self.rate() < self.peak * DEGRADED_FRACTION
    }

    /// The estimated rate of the link, in bytes per second; 0 while unknown.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    /// The recent minimum round trip, once one was measured.
    #[must_use]
    pub fn round_trip(&self) -> Option<Duration> {
        self.trips.get().map(|(trip, _)| trip)
    }

    /// Bytes arrived.
    pub fn arrived(&mut self, bytes: u64) {
        self.arrived += bytes;
    }

    /// To be stored with permission given now, for [`Window::sample`].
    #[must_use]
    pub fn mark(&self, now: Duration) -> Mark {
        Mark {
            arrived: self.arrived,
            at: now,
        }
    }

    /// A reply of this many bytes, sent under the permission of `mark`, has arrived on a connection (and was counted).
    pub fn sample(
        &mut self,
        now: Duration,
        mark: Mark,
        connection: usize,
        bytes: u64,
        seen: SampleContext,
    ) {
        let SampleContext { limited, other } = seen;
        let took = now.saturating_sub(mark.at).max(Duration::from_micros(1));
        let own = took.saturating_sub(other).max(Duration::from_micros(1));
        // What is known of the other queue only about would make the least round trip too short, and that for seconds.
        let trip = if self.direction.exact { own } else { took };
        self.trips.note(now, (trip, bytes));
        self.round.other = Some(self.round.other.map_or(other, |least| least.min(other)));
        let rate = self.arrived.saturating_sub(mark.arrived) as f64 / took.as_secs_f64();
        if !limited || rate > self.rate() {
            self.round.rate = self.round.rate.max(rate);
            self.round.full |= !limited;
        }
        let trip = (own, bytes);
        self.round.trip = Some(self.round.trip.map_or(trip, |least| least.min(trip)));
        self.round.answer = self.round.answer.max(bytes);
        let new = self.arrived - std::mem::replace(&mut self.grown_to, self.arrived);
        if matches!(self.phase, Phase::Start { .. }) {
            let trip = self.round_trip().unwrap_or_default();
            if !limited {
                self.size = (self.size + new).min(MAX_WINDOW);
                self.ramp.look(now, self.arrived, trip);
            } else {
                self.ramp.pause(now, self.arrived);
            }
        }
        if mark.arrived >= self.round.until {
            self.end_round(now);
        } else if let Phase::Start { .. } = self.phase {
            let base = self.round_trip().unwrap_or_default();
            let late = own > base + base / 4 + START_QUEUE;
            let all_late = self.all_late(now, connection, late);
            let enough = match self.arrived < SLOW_START * self.direction.first {
                true => FLAT_LOOKS,
                false => 1,
            };
            if all_late && self.ramp.flat >= enough {
                self.note_rate(self.round);
                self.round = Round::begin(self.arrived);
                self.end_start();
            }
        }
    }

    /// How much longer the link takes for a reply than for that of the minimum round trip: long replies after short
    /// ones must not be mistaken for a queue.
    fn longer(&self, bytes: u64) -> Duration {
        let least = self.trips.get().map_or(0, |(_, bytes)| bytes);
        let more = bytes.saturating_sub(least) as f64;
        // A rate that is too low makes this too long, and then the window is the larger for it.
        Duration::from_secs_f64((more / self.rate().max(1.0)).min(1.0))
    }

    fn end_start(&mut self) {
        // After a loss, data that arrived long before is delivered at once: no round trip's rate is trusted beyond the
        // clock's.
        let most = self.ramp.most * 1.05;
        for rate in &mut self.rates {
            *rate = rate.min(most);
        }
        self.phase = Phase::Drain;
        self.resize();
    }

    /// Records whether a reply was late; returns whether those of all connections are now: a queue in the link delays
    /// every connection, while TCP may be starting on one and far ahead on another.
    fn all_late(&mut self, now: Duration, connection: usize, late: bool) -> bool {
        let lately = now.saturating_sub(2 * self.round_trip().unwrap_or_default());
        self.connections.retain(|l| l.at >= lately);
        let at = self
            .connections
            .iter()
            .position(|l| l.connection == connection);
        let before = at.map_or(0, |n| self.connections.swap_remove(n).answers);
        let answers = if late { before + 1 } else { 0 };
        self.connections.push(Late {
            connection,
            answers,
            at: now,
        });
        self.connections.iter().map(|l| l.answers).sum::<u32>() >= LATE_ANSWERS
            && self.connections.iter().all(|l| l.answers > 0)
    }

    fn note_rate(&mut self, round: Round) {
        self.answers.push_back(round.answer);
        while self.answers.len() > RATE_ROUNDS {
            self.answers.pop_front();
        }
        if round.rate > 0.0 {
            self.rates.push_back(round.rate);
            while self.rates.len() > RATE_ROUNDS {
                self.rates.pop_front();
            }
        }
    }

    /// The link was reestablished: measurements may be outdated.
    pub fn reset(&mut self) {
        *self = Self::from(self.fixed, self.direction, self.answer);
    }

    /// The longest queue it normally builds: what it may add to the other direction's round trips. Larger values are
    /// not trusted, or two windows that allow for each other's queue would make both longer.
    #[must_use]
    pub fn queue(&self) -> Duration {
        let longest = self.answers.iter().copied().max().unwrap_or(0);
        let two = Duration::from_secs_f64((2.0 * longest as f64 / self.rate().max(1.0)).min(1.0));
        self.slack() + two + self.direction.beyond
    }

    fn slack(&self) -> Duration {
        let trip = self.round_trip().unwrap_or_default();
        let part = (trip / SLACK_PART).clamp(self.direction.slack.0, self.direction.slack.1);
        part.max(MIN_COVER.saturating_sub(trip))
    }

    fn end_round(&mut self, now: Duration) {
        let round = std::mem::replace(&mut self.round, Round::begin(self.arrived));
        let best = self.rate();
        self.note_rate(round);
        self.other = round.other.unwrap_or_default();
        let base = self.round_trip().unwrap_or_default();
        let queue = round.trip.map_or(Duration::ZERO, |(trip, bytes)| {
            trip.saturating_sub(base + self.longer(bytes))
        });
        let grown = round.rate > best * 1.02 && queue < self.slack() / 2;
        self.grown_rounds = if grown { self.grown_rounds + 1 } else { 0 };
        self.peak = (self.peak * PEAK_DECAY).max(self.rate());
        match self.phase {
            Phase::Start { best, flat } => {
                // A round in which there was little to send says nothing about the link.
                if !round.full {
                    return;
                }
                let grew = round.rate >= best * GROWTH;
                let flat = if grew { 0 } else { flat + 1 };
                let best = best.max(round.rate);
                let queued = queue > (base / 8).max(2 * self.direction.slack.1);
                if self.ramp.flat >= FLAT_LOOKS && (flat >= FLAT_ROUNDS || queued) {
                    self.end_start();
                } else {
                    self.phase = Phase::Start { best, flat };
                }
                return;
            }
            Phase::Drain => {
                self.phase = Phase::Steady;
                self.drained_at = now;
            }
            Phase::Steady => {
                if now.saturating_sub(self.drained_at) >= RECENT {
                    self.phase = Phase::Drain;
                }
            }
        }
        // On a slow link one reply takes longer than the slack, and to wait for one is no queue.
        let one = self.answer as f64 / self.rate().max(1.0);
        let queue_of_one = self.slack().max(Duration::from_secs_f64(one.min(1.0)));
        let most = ((self.size as f64 * MAX_EXTRA) as u64).max(self.answer);
        let step = most / EXTRA_STEPS;
        self.extra = self.extra.min(most);
        if self.phase != Phase::Steady || queue > queue_of_one * 5 / 4 {
            self.extra = self.extra.saturating_sub(step);
        } else if round.full && round.rate <= best * 1.02 && queue < queue_of_one / 2 {
            self.extra = (self.extra + step).min(most);
        }
        self.queued_rounds = if queue > 3 * queue_of_one {
            self.queued_rounds + 1
        } else {
            0
        };
        if self.queued_rounds == SLOWER_ROUNDS && round.rate > 0.0 {
            self.rates.clear();
            self.rates.push_back(round.rate);
            self.extra = 0;
        } else if self.queued_rounds >= LONGER_ROUNDS {
            self.trips = RecentMin::default();
            // Without the other direction's queue, although a pull knows that only approximately: kept for seconds as
            // part of the round trip, it made the pull's window too large, and starved the push beside it.
            if let Some(trip) = round.trip {
                self.trips.note(now, trip);
            }
            self.queued_rounds = 0;
            self.phase = Phase::Drain;
        }
        self.resize();
    }

    fn resize(&mut self) {
        let trip = self.round_trip().unwrap_or_default();
        let seconds = match self.phase {
            Phase::Drain => trip.as_secs_f64() * 0.75,
            // The start ended too soon, or the link has more than it had.
            _ if self.grown_rounds >= GROWN_ROUNDS => trip.as_secs_f64() * GROWTH,
            _ => (trip + self.slack()).as_secs_f64(),
        };
        let seconds = seconds + self.other.as_secs_f64();
        let extra = if self.phase == Phase::Steady {
            self.extra
        } else {
            0
        };
        let longest = self.answers.iter().copied().max().unwrap_or(0);
        // A reply leaves when all of it may be in flight. The round trip has what the shortest takes of that.
        let least = self.trips.get().map_or(0, |(_, bytes)| bytes);
        let more = longest.saturating_sub(least);
        self.size =
            ((self.rate() * seconds) as u64 + more + extra).clamp(self.direction.least, MAX_WINDOW);
    }
}

#[cfg(test)]
mod tests;
