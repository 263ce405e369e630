//! How much sent data may be in flight. It shares the path to the peer with foreground requests: whatever is sent
//! beyond the link's capacity delays these in the network's queues, where nothing can overtake it.
//!
//! Bytes count until they have arrived, rather than until they are answered: the peer's disk is not part of the link.

use std::collections::VecDeque;
use std::time::Duration;

use super::clocks::Clocks;
use super::window::{Mark, SampleContext, Window};

/// Maximum body bytes in flight, whatever the window.
const MAX_UNDER_WAY: u64 = 16 << 20;

/// Maximum body bytes not answered by the peer.
pub const MAX_UNANSWERED: u64 = 24 << 20;

/// Target transmission time of a part in seconds, as a request may have to wait for one that was begun...
const PART_SECONDS: f64 = 0.002;

/// ...but is no shorter than this.
const MIN_PART: usize = 16 << 10;

/// Maximum length of a part, in bytes.
pub const MAX_PART: usize = 256 << 10;

/// Alignment of the offsets and lengths of parts.
const GRAIN: usize = 4096;

/// Bodies are sent no faster than this multiple of the measured rate, apart from bursts of so many parts. Arrival
/// reports come in bursts when they queue behind data in the other direction; bodies sent in bursts would in turn
/// queue.
const PACE: f64 = 1.1;
const BURST: u64 = 2;

/// Smoothing factor of the queue ahead of requests: one body changes it by this part of the difference.
const BEFORE_PART: u32 = 8;

/// The peer reports that more has arrived than was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more has arrived than was sent")]
pub struct NotSent;

/// See the module.
#[derive(Debug)]
pub struct Sending {
    window: Window,
    clocks: Clocks,
    /// Recent queueing delay of bodies on the path.
    before: Duration,
    /// When everything sent will have left at that pace.
    paced_to: Duration,
    under_way: u64,
    unanswered: u64,
}

/// Bodies in flight on a connection.
#[derive(Debug, Default)]
pub(super) struct Bodies {
    sent: u64,
    arrived: u64,
    /// Those that have not arrived, each with its state when sent.
    under_way: VecDeque<(u64, Sent)>,
}

/// The state when a body was sent.
#[derive(Debug)]
struct Sent {
    mark: Mark,
    bytes: u64,
    /// Nothing else could be sent.
    last: bool,
}

impl Sending {
    /// Initially nothing is known.
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

    /// The length into which bodies should be split.
    pub fn part(&self) -> usize {
        let bytes = (self.window.rate() * PART_SECONDS) as usize;
        (bytes / GRAIN * GRAIN).clamp(MIN_PART, MAX_PART)
    }

    /// Whether there is room for a body, apart from pacing. There always is for a single one, however long.
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

    /// The earliest time of the next body.
    pub fn ready_at(&self) -> Duration {
        self.paced_to
            .saturating_sub(self.paced(BURST * self.part() as u64))
    }

    /// A body is sent on a connection; `last`: no other is waiting. Returns the byte count at which the peer has
    /// received all of it.
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

    /// Approximate time that a request or a credit waits behind sent data, and the limit of that.
    pub(super) fn before(&self) -> Duration {
        match self.under_way {
            0 => Duration::ZERO,
            _ => self.before.min(self.window.queue()),
        }
    }

    /// The peer has received this many body bytes on a connection. With `at`: the last at that time of its clock, and
    /// received data delays such reports by no more than that.
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
                // The report of its arrival queued behind received data.
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

    /// All bodies were lost with their connections, as was the knowledge of the link.
    pub(super) fn close(&mut self) {
        *self = Self::new();
    }
}
