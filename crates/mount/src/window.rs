//! How many bytes may be under way, so that the link is full and no queue stands in it.
//!
//! The paper set its number of concurrent pulls by hand, to between 4,096 and 16,384 (r3map §1.5). Here it sizes itself to
//! bandwidth x round trip, from what is seen of both, in the manner of BBR and Copa: the rate is the
//! highest seen in the last rounds, the round trip the least seen in the last seconds. The window is
//! `rate x (round trip + slack)`. The slack is what finds more bandwidth: when there is some, a window that is
//! larger than the link's own store of bytes makes the next rate higher, which makes the next window larger; when there is none, the
//! slack stands in the queue, and that is all that ever does. A flow that fills queues on the same link gets the
//! larger share of it: background work gives way.
//!
//! Pure: it is told times.

use std::collections::VecDeque;
use std::time::Duration;

/// Where it begins.
const FIRST: u64 = 128 << 10;

/// The least it ever is: a few frames.
const LEAST: u64 = 48 << 10;

/// The most it ever is.
pub const MOST: u64 = 256 << 20;

/// Rounds over which the highest rate counts.
const RATE_ROUNDS: usize = 8;

/// How long the least round trip counts.
const ROUND_TRIP_FOR: Duration = Duration::from_secs(10);

/// The slack is this part of the round trip...
const SLACK_PART: u32 = 20;

/// ...but no less than what two busy machines need to take turns...
const LEAST_SLACK: Duration = Duration::from_millis(1);

/// ...and no more than what a waited-for read may be made to wait.
const MOST_SLACK: Duration = Duration::from_millis(2);

/// The window is worth at least this time of the rate. Where a round trip is much shorter, bursts of whole chunks overflow
/// a queue of one round trip whatever the window is; the losses cost the more the less is under way beside them, and a
/// window of less than two chunks cannot see that it should grow.
const LEAST_COVER: Duration = Duration::from_millis(4);

/// A round that brings less than this much more than the best before does not count as growth.
const GROWTH: f64 = 1.25;

/// Rounds of growth without a queue in a row after which the window grows as fast as at the start.
const GROWN_ROUNDS: u32 = 3;

/// Rounds without growth that end the start.
const FLAT_ROUNDS: u32 = 3;

/// Rounds in a row with more of a queue than the slack explains after which the link is held to be slower than it was.
const SLOWER_ROUNDS: u32 = 2;

/// The same after which it is held to be longer: a smaller window did not help.
const LONGER_ROUNDS: u32 = 8;

/// Answers in a row that were late by more than [`START_QUEUE`] and a quarter of the round trip: the start is over, before
/// the queue overflows.
const LATE_ANSWERS: u32 = 6;

/// See [`LATE_ANSWERS`].
const START_QUEUE: Duration = Duration::from_millis(6);

/// What arrived when permission for more was given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    arrived: u64,
    at: Duration,
}

impl Mark {
    /// When that was.
    #[must_use]
    pub fn at(&self) -> Duration {
        self.at
    }
}

/// The window of one mount and direction.
#[derive(Clone, Debug)]
pub struct Window {
    fixed: Option<u64>,
    size: u64,
    arrived: u64,
    phase: Phase,
    /// The highest rate of each of the last rounds, in bytes a second.
    rates: VecDeque<f64>,
    /// The least round trip of each of the last seconds, with the second's beginning.
    trips: VecDeque<(Duration, Duration)>,
    /// When the window was last small enough for the queue to be empty.
    drained_at: Duration,
    round: Round,
    /// Rounds in a row whose queue was longer than the slack explains.
    queued_rounds: u32,
    /// Answers in a row that were late.
    late: u32,
    /// Rounds in a row that were faster than all before them, without a queue.
    grown_rounds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Doubling, until the rate does not follow.
    Start { best: f64, flat: u32 },
    /// As large as it should be.
    Steady,
    /// One round of a little less, to see the round trip without a queue.
    Drain,
}

#[derive(Clone, Copy, Debug)]
struct Round {
    /// It ends when what was marked after this arrives.
    until: u64,
    rate: f64,
    trip: Option<Duration>,
    /// Whether there was always something to send.
    full: bool,
}

impl Round {
    fn begin(arrived: u64) -> Self {
        Self {
            until: arrived,
            rate: 0.0,
            trip: None,
            full: false,
        }
    }
}

impl Window {
    /// A window that finds its size, or has a fixed one.
    #[must_use]
    pub fn new(fixed: Option<u64>) -> Self {
        Self {
            fixed: fixed.map(|bytes| bytes.clamp(LEAST, MOST)),
            size: FIRST,
            arrived: 0,
            phase: Phase::Start { best: 0.0, flat: 0 },
            rates: VecDeque::new(),
            trips: VecDeque::new(),
            drained_at: Duration::ZERO,
            round: Round::begin(0),
            queued_rounds: 0,
            late: 0,
            grown_rounds: 0,
        }
    }

    /// Bytes that may be under way.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.fixed.unwrap_or(self.size)
    }

    /// The rate that the link is held to have, in bytes a second; 0 while unknown.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    /// The least round trip lately, once one was seen.
    #[must_use]
    pub fn round_trip(&self) -> Option<Duration> {
        self.trips.iter().map(|(_, trip)| *trip).min()
    }

    /// Bytes arrived.
    pub fn arrived(&mut self, bytes: u64) {
        self.arrived += bytes;
    }

    /// To be kept with permission that is given now, for [`Window::sample`].
    #[must_use]
    pub fn mark(&self, now: Duration) -> Mark {
        Mark {
            arrived: self.arrived,
            at: now,
        }
    }

    /// What was sent with the permission of `mark` has arrived (and was counted). `limited`: it was all that there was to send.
    pub fn sample(&mut self, now: Duration, mark: Mark, limited: bool) {
        let took = now.saturating_sub(mark.at).max(Duration::from_micros(1));
        self.note_trip(now, took);
        let rate = self.arrived.saturating_sub(mark.arrived) as f64 / took.as_secs_f64();
        if !limited || rate > self.rate() {
            self.round.rate = self.round.rate.max(rate);
            self.round.full |= !limited;
        }
        self.round.trip = Some(self.round.trip.map_or(took, |least| least.min(took)));
        if mark.arrived >= self.round.until {
            self.end_round(now);
        } else if let Phase::Start { best, .. } = self.phase {
            let base = self.round_trip().unwrap_or_default();
            // What comes in bursts is late although the link is not full yet: then the rate still grows.
            let growing = best > 0.0 && self.round.rate >= best * GROWTH;
            let bound = if growing { base / 2 } else { base / 4 };
            let late = took > base + bound + START_QUEUE;
            self.late = if late { self.late + 1 } else { 0 };
            if self.late >= LATE_ANSWERS {
                self.late = 0;
                self.note_rate(self.round.rate);
                self.round = Round::begin(self.arrived);
                self.phase = Phase::Drain;
                self.resize();
            }
        }
    }

    fn note_rate(&mut self, rate: f64) {
        if rate > 0.0 {
            self.rates.push_back(rate);
            while self.rates.len() > RATE_ROUNDS {
                self.rates.pop_front();
            }
        }
    }

    /// The link came up anew: what is known of it may no longer be so.
    pub fn reset(&mut self) {
        *self = Self::new(self.fixed);
    }

    fn note_trip(&mut self, now: Duration, trip: Duration) {
        let second = Duration::from_secs(now.as_secs());
        match self.trips.back_mut() {
            Some((at, least)) if *at == second => *least = (*least).min(trip),
            _ => self.trips.push_back((second, trip)),
        }
        while self
            .trips
            .front()
            .is_some_and(|(at, _)| *at + ROUND_TRIP_FOR < second)
        {
            self.trips.pop_front();
        }
    }

    fn slack(&self) -> Duration {
        let part = self.round_trip().unwrap_or_default() / SLACK_PART;
        part.clamp(LEAST_SLACK, MOST_SLACK)
    }

    fn end_round(&mut self, now: Duration) {
        let round = std::mem::replace(&mut self.round, Round::begin(self.arrived));
        let best = self.rate();
        self.note_rate(round.rate);
        let base = self.round_trip().unwrap_or_default();
        let queue = round.trip.unwrap_or(base).saturating_sub(base);
        let grown = round.rate > best * 1.02 && queue < self.slack() / 2;
        self.grown_rounds = if grown { self.grown_rounds + 1 } else { 0 };
        match self.phase {
            Phase::Start { best, flat } => {
                // A round in which there was little to send says nothing about the link.
                if !round.full {
                    return;
                }
                let grew = round.rate >= best * GROWTH;
                let flat = if grew { 0 } else { flat + 1 };
                let best = best.max(round.rate);
                let queued = queue > (base / 8).max(2 * MOST_SLACK);
                if flat >= FLAT_ROUNDS || queued {
                    self.phase = Phase::Drain;
                    self.resize();
                } else {
                    self.phase = Phase::Start { best, flat };
                    self.size = (self.size * 2).min(MOST);
                }
                return;
            }
            Phase::Drain => {
                self.phase = Phase::Steady;
                self.drained_at = now;
            }
            Phase::Steady => {
                if now.saturating_sub(self.drained_at) >= ROUND_TRIP_FOR {
                    self.phase = Phase::Drain;
                }
            }
        }
        self.queued_rounds = if queue > 3 * self.slack() {
            self.queued_rounds + 1
        } else {
            0
        };
        if self.queued_rounds == SLOWER_ROUNDS && round.rate > 0.0 {
            self.rates.clear();
            self.rates.push_back(round.rate);
        } else if self.queued_rounds >= LONGER_ROUNDS {
            self.trips.clear();
            if let Some(trip) = round.trip {
                self.note_trip(now, trip);
            }
            self.queued_rounds = 0;
            self.phase = Phase::Start { best: 0.0, flat: 0 };
        }
        self.resize();
    }

    fn resize(&mut self) {
        let trip = self.round_trip().unwrap_or_default();
        let seconds = match self.phase {
            Phase::Drain => trip.as_secs_f64() * 0.75,
            // The start ended too soon, or the link has more than it had.
            _ if self.grown_rounds >= GROWN_ROUNDS => trip.as_secs_f64() * GROWTH,
            _ => (trip + self.slack()).max(LEAST_COVER).as_secs_f64(),
        };
        self.size = ((self.rate() * seconds) as u64).clamp(LEAST, MOST);
    }
}

#[cfg(test)]
mod tests;
