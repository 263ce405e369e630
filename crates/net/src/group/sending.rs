//! How much of what is sent may be in flight. It shares the way to the peer with the requests of those who wait: what is
//! sent before there is room in the link stands before these, in the network's queues, where nothing overtakes it.
//!
//! What counts is what has not arrived, and not what was not answered: the peer's disk is no part of the link.

use std::collections::VecDeque;
use std::time::Duration;

use super::clocks::Clocks;
use super::window::{Mark, SampleContext, Window};

/// Bytes of bodies that are in flight at most, whatever the window.
const MAX_UNDER_WAY: u64 = 16 << 20;

/// Bytes of bodies that the peer has not answered, at most.
pub const MAX_UNANSWERED: u64 = 24 << 20;

/// A part takes the link about this long, as a request may have to wait for one that was begun...
const PART_SECONDS: f64 = 0.002;

/// ...but is no shorter than this.
const MIN_PART: usize = 16 << 10;

/// The longest part, in bytes.
pub const MAX_PART: usize = 256 << 10;

/// Offsets and lengths of parts are multiples of this.
const GRAIN: usize = 4096;

/// Bodies leave no faster than this many times the rate that was found, but for so many parts at once. Word of what arrived
/// comes in bursts where it stands behind what flows the other way; what left in bursts would be a queue for that.
const PACE: f64 = 1.1;
const BURST: u64 = 2;

/// The part of the difference by which one body changes what is held to be before requests.
const BEFORE_PART: u32 = 8;

/// The peer says that more has arrived than was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more has arrived than was sent")]
pub struct NotSent;

/// See the module.
#[derive(Debug)]
pub struct Sending {
    window: Window,
    clocks: Clocks,
    /// How long bodies waited in the way's queue lately.
    before: Duration,
    /// When all that was sent will have left at that pace.
    paced_to: Duration,
    under_way: u64,
    unanswered: u64,
}

/// Bodies on their way on a connection.
#[derive(Debug, Default)]
pub(super) struct Bodies {
    sent: u64,
    arrived: u64,
    /// Those that have not arrived, each with what had been sent with it.
    under_way: VecDeque<(u64, Sent)>,
}

/// What was known when a body was sent.
#[derive(Debug)]
struct Sent {
    mark: Mark,
    bytes: u64,
    /// Nothing else could be sent.
    last: bool,
}

impl Sending {
    /// Nothing is known.
    pub(super) fn new() -> Self {
        Self {
            window: Window::sending(),
            clocks: Clocks::default(),
            before: Duration::ZERO,
            paced_to: Duration::ZERO,
            under_way: 0,
            unanswered: 0,
        }
    }

    /// Bytes that may be in flight.
    pub fn window(&self) -> u64 {
        self.window.size().min(MAX_UNDER_WAY)
    }

    /// How long parts should be.
    pub fn part(&self) -> usize {
        let bytes = (self.window.rate() * PART_SECONDS) as usize;
        (bytes / GRAIN * GRAIN).clamp(MIN_PART, MAX_PART)
    }

    /// Whether there is room for a body, but for the pace. There always is for one, however long.
    pub fn allows(&self, bytes: u64) -> bool {
        (self.under_way == 0 || self.under_way + bytes <= self.window())
            && (self.unanswered == 0 || self.unanswered + bytes <= MAX_UNANSWERED)
    }

    fn paced(&self, bytes: u64) -> Duration {
        let rate = self.window.rate() * PACE;
        match self.window.has_started() && rate > 0.0 {
            true => Duration::from_secs_f64(bytes as f64 / rate),
            false => Duration::ZERO,
        }
    }

    /// When the next body may be sent.
    pub fn ready_at(&self) -> Duration {
        self.paced_to
            .saturating_sub(self.paced(BURST * self.part() as u64))
    }

    /// A body is sent on a connection; `last`: no other waits. Returned is what the peer has when it has all of it.
    pub(super) fn sent(&mut self, on: &mut Bodies, bytes: u64, last: bool, now: Duration) -> u64 {
        self.under_way += bytes;
        self.unanswered += bytes;
        self.paced_to = self.paced_to.max(now) + self.paced(bytes);
        on.sent += bytes;
        let full = self.unanswered + MAX_PART as u64 > MAX_UNANSWERED;
        let sent = Sent {
            mark: self.window.mark(now),
            bytes,
            last: last || full,
        };
        on.under_way.push_back((on.sent, sent));
        on.sent
    }

    /// How long a request or a credit waits for what is sent, about, and no longer than that may be.
    pub(super) fn before(&self) -> Duration {
        match self.under_way {
            0 => Duration::ZERO,
            _ => self.before.min(self.window.queue()),
        }
    }

    /// The peer has had so many bytes of bodies on a connection. With `at`: the last at that time of its clock, and what is
    /// received stands before words like this no longer than that.
    pub(super) fn arrived(
        &mut self,
        on: &mut Bodies,
        bytes: u64,
        at: Option<(u64, Duration)>,
        connection: usize,
        now: Duration,
    ) -> Result<(), NotSent> {
        if bytes > on.sent {
            return Err(NotSent);
        }
        self.under_way -= bytes.saturating_sub(on.arrived);
        self.window.arrived(bytes.saturating_sub(on.arrived));
        on.arrived = on.arrived.max(bytes);
        while on.under_way.front().is_some_and(|(at, _)| *at <= bytes) {
            let Some((_, sent)) = on.under_way.pop_front() else {
                break;
            };
            let mut seen = SampleContext {
                limited: sent.last,
                other: Duration::ZERO,
            };
            if let Some((at, most)) = at {
                // The word of its arrival stood behind what is received.
                let queues = self.clocks.note(sent.mark.at(), at, now);
                seen.other = queues.down.min(most);
                self.before = (self.before * (BEFORE_PART - 1) + queues.up) / BEFORE_PART;
            }
            self.window
                .sample(now, sent.mark, connection, sent.bytes, seen);
        }
        Ok(())
    }

    /// A body was answered, or will not be.
    pub(super) fn answered(&mut self, bytes: u64) {
        self.unanswered -= bytes;
    }

    /// All bodies are gone with their connections, and what was known of the link.
    pub(super) fn close(&mut self) {
        *self = Self::new();
    }
}
