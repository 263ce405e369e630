//! A limit on bytes a second, shared by everything that sends.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

/// A token bucket in bytes a second, shared by several writers through an `Arc`.
///
/// It keeps one number, the instant at which the bytes granted so far have been paid for (the
/// generic cell rate algorithm), so callers are served in the order in which they ask, and since
/// a writer asks for at most [`RateLimit::chunk`] at a time, several writers take turns. Unused
/// time is kept for at most 50 ms.
#[derive(Debug)]
pub struct RateLimit {
    state: Mutex<State>,
}

const YEAR: Duration = Duration::from_secs(365 * 86_400);

#[derive(Debug)]
struct State {
    bytes_per_second: u64,
    paid_until: Option<Instant>,
}

impl RateLimit {
    /// The longest burst, as time at the full rate.
    pub const BURST: Duration = Duration::from_millis(50);

    /// A limit of `bytes_per_second`; at least one.
    #[must_use]
    pub fn new(bytes_per_second: u64) -> Self {
        RateLimit {
            state: Mutex::new(State {
                bytes_per_second: bytes_per_second.max(1),
                paid_until: None,
            }),
        }
    }

    /// Bytes a second.
    #[must_use]
    pub fn bytes_per_second(&self) -> u64 {
        self.state.lock().bytes_per_second
    }

    /// How much to ask for at a time: half a burst's worth of bytes, between 1 KiB and 256 KiB.
    #[must_use]
    pub fn chunk(&self) -> usize {
        (self.bytes_per_second() / 40).clamp(1 << 10, 256 << 10) as usize
    }

    /// Waits until `bytes` more may be sent. What was granted stays granted when the caller goes
    /// away while waiting.
    pub async fn acquire(&self, bytes: u64) {
        let due = {
            let now = Instant::now();
            let mut state = self.state.lock();
            let due = state.advance(now, bytes);
            // The burst is what may be sent ahead of its time.
            due.checked_sub(Self::BURST).filter(|&due| due > now)
        };
        if let Some(due) = due {
            sleep_until(due).await;
        }
    }

    /// Counts bytes that were sent without asking (framing, encryption): later callers wait for
    /// them.
    pub fn charge(&self, bytes: u64) {
        self.state.lock().advance(Instant::now(), bytes);
    }
}

impl State {
    /// Adds the time that `bytes` take and returns when all are paid for.
    fn advance(&mut self, now: Instant, bytes: u64) -> Instant {
        let from = self.paid_until.map_or(now, |p| p.max(now));
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        // An absurd debt (a byte a second and gigabytes) must not overflow the clock.
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(YEAR);
        let until = from.checked_add(cost).unwrap_or(from);
        self.paid_until = Some(until);
        until
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Bytes granted by one greedy caller in `window`.
    async fn greedy(limit: &RateLimit, window: Duration) -> u64 {
        let end = Instant::now() + window;
        let mut got = 0;
        loop {
            let n = limit.chunk() as u64;
            limit.acquire(n).await;
            if Instant::now() > end {
                return got;
            }
            got += n;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_is_kept_and_the_burst_is_short() {
        for rate in [10_000u64, 1_000_000, 20_000_000, 5_000_000_000] {
            let limit = RateLimit::new(rate);
            // Idle time is not saved up.
            tokio::time::sleep(Duration::from_secs(30)).await;
            for window in [Duration::from_secs(1), Duration::from_secs(10)] {
                let got = greedy(&limit, window).await;
                let fair = rate * window.as_secs();
                let slack = rate / 20 + 2 * limit.chunk() as u64;
                assert!(
                    got <= fair + slack && got + slack >= fair,
                    "{rate} B/s for {window:?}: {got} bytes, expected {fair} ± {slack}"
                );
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn writers_share_evenly() {
        let limit = Arc::new(RateLimit::new(1_000_000));
        let tasks: Vec<_> = (0..4)
            .map(|_| {
                let limit = limit.clone();
                tokio::spawn(async move { greedy(&limit, Duration::from_secs(20)).await })
            })
            .collect();
        for t in tasks {
            let got = t.await.unwrap();
            assert!(
                (4_900_000..=5_150_000).contains(&got),
                "{got} bytes of 5,000,000"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn charged_bytes_are_waited_for() {
        let limit = RateLimit::new(1_000);
        let start = Instant::now();
        limit.charge(10_000);
        limit.acquire(1).await;
        let waited = start.elapsed();
        assert!(
            (9_900..=10_100).contains(&waited.as_millis()),
            "{waited:?} for 10,001 bytes at 1,000 B/s"
        );
        RateLimit::new(u64::MAX).charge(u64::MAX);
        RateLimit::new(0).charge(u64::MAX);
    }
}
