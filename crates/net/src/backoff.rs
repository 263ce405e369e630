//! When to try again.

use std::time::Duration;

/// Delays that double up to a cap, each shortened at random by up to a half so that many
/// clients of one site do not come back at the same instant. Pure: it neither sleeps nor looks
/// at a clock.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    cap: Duration,
    attempts: u32,
    random: u64,
}

impl Backoff {
    /// Delays from `first` up to `cap`. Seeded from the system's randomness.
    #[must_use]
    pub fn new(first: Duration, cap: Duration) -> Self {
        let mut seed = [0u8; 8];
        // Without randomness the delays lose their jitter between processes, nothing else.
        let _ = aws_lc_rs::rand::fill(&mut seed);
        Self::with_seed(first, cap, u64::from_le_bytes(seed))
    }

    /// The same with a seed, for tests and simulations.
    #[must_use]
    pub fn with_seed(first: Duration, cap: Duration, seed: u64) -> Self {
        Backoff {
            first,
            cap,
            attempts: 0,
            random: seed,
        }
    }

    /// How long to wait before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        let full = self
            .first
            .saturating_mul(1u32.checked_shl(self.attempts.min(31)).unwrap_or(u32::MAX))
            .min(self.cap);
        self.attempts = self.attempts.saturating_add(1);
        let half = full / 2;
        half + (full - half).mul_f64(self.fraction())
    }

    /// How many delays were handed out since the start or the last reset.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Starts again with the first delay: progress was made.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }

    /// A number in 0..1 (splitmix64).
    fn fraction(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl Default for Backoff {
    /// From a quarter of a second to half a minute.
    fn default() -> Self {
        Backoff::new(Duration::from_millis(250), Duration::from_secs(30))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn delays_grow_to_the_cap_and_no_further(seed: u64, first in 1u64..5_000, cap in 1u64..60_000) {
            let (first, cap) = (Duration::from_millis(first), Duration::from_millis(cap));
            let mut b = Backoff::with_seed(first, cap, seed);
            for n in 0..80u32 {
                let full = first.saturating_mul(1 << n.min(31)).min(cap);
                let d = b.next_delay();
                prop_assert!(d >= full / 2 && d <= full, "{n}: {d:?} of {full:?}");
            }
            prop_assert_eq!(b.attempts(), 80);
            b.reset();
            prop_assert!(b.next_delay() <= first);
        }
    }

    #[test]
    fn two_clients_do_not_come_back_together() {
        let (a, b) = (Duration::from_secs(1), Duration::from_secs(60));
        let mut x = Backoff::with_seed(a, b, 1);
        let mut y = Backoff::with_seed(a, b, 2);
        assert!((0..8).any(|_| x.next_delay() != y.next_delay()));
    }
}
