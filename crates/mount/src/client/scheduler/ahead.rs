//! How much to ask for in the background, so that the site always has something to send.
//!
//! The window is in bytes of the link, what is asked for in bytes of chunks, and what those take of the link is known only
//! once they came. So about twice the window is asked for, by what chunks took lately: one window is on its way, the other
//! waits at the site. Where runs of chunks that take little follow such as take much, that is too little now and then, which
//! is seen before the link runs dry: no request was sent longer ago than a round trip. Then more is asked for. It is not from the
//! start, because what a reader will want next stands behind all that was asked for.

use std::collections::VecDeque;
use std::time::Duration;

use crate::protocol::MAX_READ;

/// Bytes of chunks that are asked for in the background and were not verified, at most, whatever the window.
pub const MAX_AHEAD: u64 = 64 << 20;

/// What is asked for should not take the link longer than this, were it not to shrink at all: requests are given up at some
/// time.
const MAX_SECONDS: f64 = 4.0;

/// The share of chunks that is left on the link is that of about so many bytes of them, and no less than this.
const SHARE_OVER: f64 = (2 << 20) as f64;
const MIN_SHARE: f64 = 1.0 / 64.0;

/// How much more is asked for at most, the step to it, and how much of it is left after a round trip in which the site had
/// enough.
const MAX_BOOST: f64 = 16.0;
const BOOST: f64 = 2.0;
const BOOST_KEPT: f64 = 0.99;

/// The site is about to have nothing left when its oldest request is younger than so many round trips.
const YOUNG: f64 = 1.6;

/// See the module.
#[derive(Debug)]
pub struct ReadAhead {
    share: f64,
    boost: f64,
    /// Background requests in the order in which they were sent, with some that were answered.
    sent: VecDeque<(u64, Duration)>,
    /// When it was last seen that the site has enough, and that it has not.
    enough: Duration,
    short: Duration,
}

impl ReadAhead {
    /// Nothing is known.
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

    /// All requests are gone with the link.
    pub fn link_down(&mut self) {
        self.sent.clear();
    }

    /// So many bytes of chunks came in so many of the link.
    pub fn came(&mut self, bytes: u64, wire: u64) {
        let weight = (bytes as f64 / SHARE_OVER).min(1.0);
        let share = (wire as f64 / bytes as f64).clamp(MIN_SHARE, 1.0);
        self.share += weight * (share - self.share);
    }

    /// Looks whether the site has enough, by what is outstanding still.
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
        // Once a round trip: sooner nothing is seen of it.
        if since(*looked) >= trip {
            (*looked, self.boost) = (now, boost);
        }
    }

    /// Bytes of chunks that take the link as long as `wire` bytes, by what came lately.
    pub fn chunks(&self, wire: f64) -> f64 {
        wire / self.share
    }

    /// Bytes of chunks to be asked for at once, with a window of `window` bytes and `rate` bytes a second.
    pub fn most(&self, window: u64, rate: f64) -> u64 {
        let least = (2 * window) as f64;
        let wanted = self.chunks(least * self.boost);
        let bounded = wanted.min((rate * MAX_SECONDS).max(least));
        (bounded as u64 + u64::from(MAX_READ)).min(MAX_AHEAD)
    }
}
