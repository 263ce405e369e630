//! How much of a hypervisor's stream may stand between its socket and the link.
//!
//! The hypervisor pauses the machine when what it has left to send will take no longer than it was told. What it has sent, and the link
//! has not taken, it does not see: that makes the pause longer by the time for which it waits here. So as much is taken from its socket
//! as the link takes within [`SHORT`], by the waits of what passed before: little on a slow link, and on a fast one what keeps all threads
//! of the pipeline busy.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::protocol::MAX_MEMORY;

/// Pieces between the socket, the thread that packs or unpacks, and the connection.
pub const QUEUE: usize = 4;

/// How long a byte may wait here.
const SHORT: Duration = Duration::from_millis(20);

/// Bytes that may always wait here: less would cost more than it saves.
pub const MIN_WINDOW: usize = 32 << 10;

/// The most that may wait here: the queues are full.
const MAX_WINDOW: usize = (2 * QUEUE + 1) * MAX_MEMORY;

/// At first.
const FIRST_WINDOW: usize = 256 << 10;

/// Size that the hypervisor's socket is given for what nobody has read.
pub const HYPERVISOR_BUFFER: usize = 32 << 10;

/// What the kernel makes of that.
const IN_SOCKET: usize = 2 * HYPERVISOR_BUFFER;

/// The size of the window, and what it follows from. Without a clock.
#[derive(Debug)]
struct Size {
    bytes: usize,
    /// Bytes a second that the link takes, if that is known: while it takes what there is, it could take more.
    rate: Option<f64>,
}

impl Size {
    /// What came as the last of `ahead` bytes was taken by the link after `waited`.
    fn passed(&mut self, ahead: usize, waited: Duration) {
        let fits = ahead as f64 * SHORT.as_secs_f64() / waited.as_secs_f64().max(1e-9);
        if waited > SHORT {
            // What is waiting now says the same again: not all of it at once.
            self.bytes = (self.bytes / 2)
                .max(fits as usize)
                .max(MIN_WINDOW)
                .min(self.bytes);
        } else if waited < SHORT / 2 && ahead >= self.bytes / 2 {
            // Not when there was little to send.
            self.bytes = (self.bytes * 2).min(MAX_WINDOW);
        }
        self.rate = (waited > SHORT / 4).then(|| ahead as f64 / waited.as_secs_f64());
    }
}

/// A part of the stream that was taken from the hypervisor.
#[derive(Debug)]
pub struct Taken {
    bytes: usize,
    /// Bytes that waited when it came, itself included.
    ahead: usize,
    since: Instant,
    /// How long the window was full before it.
    pub blocked: Duration,
}

/// See the module documentation. One reads and fills it.
#[derive(Debug)]
pub struct Window {
    state: Mutex<State>,
    freed: Notify,
}

#[derive(Debug)]
struct State {
    size: Size,
    held: usize,
}

impl Default for Window {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                size: Size {
                    bytes: FIRST_WINDOW,
                    rate: None,
                },
                held: 0,
            }),
            freed: Notify::new(),
        }
    }
}

impl Window {
    /// Waits until there is room; bytes that may be taken at once, and how long it was full. Cancel safe.
    pub async fn room(&self) -> (usize, Duration) {
        let begun = Instant::now();
        loop {
            {
                let state = self.state.lock();
                let left = state.size.bytes.saturating_sub(state.held);
                // One half is packed while the other one is sent.
                let piece = (state.size.bytes / 2).min(MAX_MEMORY);
                if left >= piece {
                    return (piece, begun.elapsed());
                }
            }
            self.freed.notified().await;
        }
    }

    /// Something was taken from the hypervisor, for which there was room after `blocked`.
    pub fn take(&self, bytes: usize, blocked: Duration) -> Taken {
        let mut state = self.state.lock();
        state.held += bytes;
        Taken {
            bytes,
            ahead: state.held,
            since: Instant::now(),
            blocked,
        }
    }

    /// The link has it.
    pub fn passed(&self, taken: &Taken) {
        let mut state = self.state.lock();
        state.held = state.held.saturating_sub(taken.bytes);
        state.size.passed(taken.ahead, taken.since.elapsed());
        drop(state);
        self.freed.notify_one();
    }

    /// Bytes that wait here.
    #[cfg(test)]
    pub fn held(&self) -> usize {
        self.state.lock().held
    }

    /// How long what the hypervisor sends now waits for what it has sent before.
    pub fn behind(&self) -> Duration {
        let state = self.state.lock();
        match state.size.rate {
            Some(rate) => seconds(state.held + IN_SOCKET, rate),
            None => Duration::ZERO,
        }
    }
}

/// The same on a link of which this is the rate, when the hypervisor sends all the time.
pub fn behind_at(rate: u64) -> Duration {
    let rate = rate.max(1) as f64;
    let window = ((rate * SHORT.as_secs_f64()) as usize).clamp(MIN_WINDOW, MAX_WINDOW);
    seconds(window + IN_SOCKET, rate)
}

fn seconds(bytes: usize, rate: f64) -> Duration {
    Duration::try_from_secs_f64(bytes as f64 / rate).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hypervisor that sends all the time over a link of this rate, that lets a burst pass and then waits for as long; bytes that waited
    /// at most when half of it had passed, and the fraction of the link's time that was used from then on.
    fn pass(rate: f64, burst: f64, total: usize, rng: &mut fastrand::Rng) -> (usize, f64) {
        let window = Window::default();
        let mut waiting = std::collections::VecDeque::new();
        let (mut now, mut free, mut sent) = (0.0f64, 0.0f64, 0usize);
        let (mut most, mut idle, mut half) = (0, 0.0, None);
        while sent < total {
            let mut state = window.state.lock();
            loop {
                let piece = (state.size.bytes / 2).min(MAX_MEMORY);
                let left = state.size.bytes.saturating_sub(state.held);
                if left < piece {
                    break;
                }
                let bytes = rng.usize(piece / 2..=piece);
                state.held += bytes;
                waiting.push_back((bytes, state.held, now));
            }
            if sent > total / 2 {
                half.get_or_insert(now);
                most = most.max(state.held);
            }
            let (bytes, ahead, since) = waiting.pop_front().unwrap();
            let begun = free.max(now);
            if half.is_some() {
                idle += begun - free;
            }
            // What a limit lets pass at once, it makes up for later.
            free = begun + bytes as f64 / rate;
            now = now.max(free - burst) + 5e-6;
            state.held -= bytes;
            let waited = Duration::from_secs_f64(now - since);
            state.size.passed(ahead, waited);
            sent += bytes;
        }
        let took = (now - half.unwrap_or(0.0)).max(1e-9);
        (most, 1.0 - idle / took)
    }

    #[test]
    fn what_waits_is_sent_in_a_short_time_and_the_link_is_busy() {
        for seed in 0..400 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let rate = 10f64.powf(5.0 + 4.0 * rng.f64());
            let burst = [0.0, 0.05][rng.usize(..2)];
            let total = ((rate * 3.0) as usize).max(16 << 20);
            let (most, used) = pass(rate, burst, total, &mut rng);
            let short = (rate * SHORT.as_secs_f64()) as usize;
            let allowed = MIN_WINDOW.max(2 * short).min(MAX_WINDOW);
            assert!(most <= allowed, "seed {seed}: {most} at {rate:.0}");
            assert!(used > 0.9, "seed {seed}: {used} of {rate:.0}");
        }
    }

    #[test]
    fn a_link_that_becomes_slow_is_believed_soon() {
        let mut size = Size {
            bytes: MAX_WINDOW,
            rate: None,
        };
        for _ in 0..8 {
            size.passed(MAX_WINDOW, Duration::from_secs(1));
        }
        assert!(size.bytes < 64 << 10, "{}", size.bytes);
        let rate = size.rate.unwrap();
        assert!((rate - MAX_WINDOW as f64).abs() < 1.0, "{rate}");
        let soon = Duration::from_micros(100);
        size.passed(1000, soon);
        assert!(size.bytes < 64 << 10, "what is little says nothing of more");
        for _ in 0..8 {
            size.passed(size.bytes, soon);
        }
        assert_eq!((size.bytes, size.rate), (MAX_WINDOW, None));
    }

    #[tokio::test(start_paused = true)]
    async fn who_fills_it_waits_for_who_empties_it() {
        let window = Window::default();
        let (piece, blocked) = window.room().await;
        assert_eq!((piece, blocked), (FIRST_WINDOW / 2, Duration::ZERO));
        let (first, second) = (window.take(piece, blocked), window.take(piece, blocked));
        assert_eq!(window.behind(), Duration::ZERO, "nobody knows");
        let (room, ()) = tokio::join!(window.room(), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            window.passed(&first);
            assert_eq!(window.held(), piece);
            assert!(window.behind() > Duration::from_millis(100));
            window.passed(&second);
        });
        assert_eq!(room, (piece / 4, Duration::from_millis(100)));
        assert_eq!(window.held(), 0);
    }

    #[test]
    fn a_slow_link_is_expected_to_keep_what_always_may_wait() {
        let at = |rate| behind_at(rate).as_millis();
        assert_eq!(at(2_000_000), 52);
        assert!(
            at(12_500_000) < 30 && at(u64::MAX) < 1,
            "{}",
            at(12_500_000)
        );
        assert!(behind_at(0) > Duration::from_secs(3600));
    }
}
