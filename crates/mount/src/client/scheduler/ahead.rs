//! How much to request in the background, so that the site always has something to send.
//!
//! The window is in bytes on the link, requests are in bytes of chunks, and how well those compress is known only once
//! they have arrived. So about twice the window is requested, by the recent compression ratio: one window is in flight,
//! the other waits at the site. Where well compressible runs of chunks follow others, that is sometimes too little,
//! which shows before the link runs dry: the oldest outstanding request is younger than a round trip. Then more is
//! requested. Not from the start, because a reader's next request queues behind everything requested before.

use std::collections::VecDeque;
use std::time::Duration;

use crate::protocol::MAX_READ;

/// Maximum bytes of chunks requested in the background and not verified yet, whatever the window.
pub const MAX_AHEAD: u64 = 64 << 20;

/// Outstanding requests should take the link no longer than this even if incompressible: requests time out.
const MAX_SECONDS: f64 = 4.0;

/// The compression ratio is averaged over about this many bytes of chunks, and is at least this.
const SHARE_OVER: f64 = (2 << 20) as f64;
const MIN_SHARE: f64 = 1.0 / 64.0;

/// The maximum factor by which more is requested, the factor of each increase, and the share that is kept after a round
/// trip in which the site had enough.
const MAX_BOOST: f64 = 16.0;
const BOOST: f64 = 2.0;
const BOOST_KEPT: f64 = 0.99;

/// The site is about to run out of work when its oldest request is younger than this many round trips.
const YOUNG: f64 = 1.6;

/// How much background work to request; see the module's documentation.
#[derive(Debug)]
pub struct ReadAhead {
    share: f64,
    boost: f64,
    /// Background requests in the order sent, including some that were answered.
    sent: VecDeque<(u64, Duration)>,
    /// When the site was last seen to have enough work, and not to.
    enough: Duration,
    short: Duration,
}

impl ReadAhead {
    /// The initial state: nothing is known about the site.
    pub fn new() -> Self {
        Self {
            share: 1.0,
            boost: 1.0,
            sent: VecDeque::new(),
            enough: Duration::ZERO,
            short: Duration::ZERO,
        }
    }

    /// A background request was sent.
    pub fn sent(&mut self, id: u64, now: Duration) {
        self.sent.push_back((id, now));
    }

    /// All requests were lost with the link.
    pub fn link_down(&mut self) {
        self.sent.clear();
    }

    /// Chunks of this many bytes arrived, as `wire` bytes on the link.
    pub fn came(&mut self, bytes: u64, wire: u64) {
        let weight = (bytes as f64 / SHARE_OVER).min(1.0);
        let share = (wire as f64 / bytes as f64).clamp(MIN_SHARE, 1.0);
        self.share += weight * (share - self.share);
    }

    /// Checks whether the site has enough work, by the requests outstanding.
    pub fn look(&mut self, now: Duration, trip: Duration, outstanding: impl Fn(u64) -> bool) {
        while self.sent.front().is_some_and(|(id, _)| !outstanding(*id)) {
            self.sent.pop_front();
        }
        let since = |at: Duration| now.saturating_sub(at);
        let enough = match self.sent.front() {
            Some((_, at)) => since(*at) >= trip.mul_f64(YOUNG),
            None => false,
        };
        let (looked, boost) = match enough {
            true => (&mut self.enough, (self.boost * BOOST_KEPT).max(1.0)),
            false => (&mut self.short, (self.boost * BOOST).min(MAX_BOOST)),
        };
        // Once per round trip: the effect is not visible sooner.
        if since(*looked) >= trip {
            (*looked, self.boost) = (now, boost);
        }
    }

    /// Bytes of chunks that take `wire` bytes on the link, by the recent ratio.
    pub fn chunks(&self, wire: f64) -> f64 {
        wire / self.share
    }

    /// Bytes of chunks to have outstanding, with a window of `window` bytes and `rate` bytes per second.
    pub fn most(&self, window: u64, rate: f64) -> u64 {
        let least = (2 * window) as f64;
        let wanted = self.chunks(least * self.boost);
        let bounded = wanted.min((rate * MAX_SECONDS).max(least));
        (bounded as u64 + u64::from(MAX_READ)).min(MAX_AHEAD)
    }
}
