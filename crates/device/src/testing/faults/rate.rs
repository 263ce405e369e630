//! Limits the bytes per second of all requests together.

use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Cost, DeviceError};
use parking_lot::Mutex;

use super::delay::MAX_WAIT;
use crate::stage::{Entry, Gate, Gated, Request};

/// A device behind a narrow link: a token bucket for the bytes of all reads and writes.
pub type Rate<D> = Gated<D, Bucket>;

impl<D: BlockDevice> Rate<D> {
    /// Lets `per_second` bytes pass each second, and up to `burst` bytes at once after a pause.
    ///
    /// # Panics
    /// When `per_second` is 0.
    pub fn new(inner: D, per_second: u64, burst: u64) -> Self {
        Self::with_gate(inner, Bucket::new(per_second, burst))
    }
}

/// The gate of [`Rate`].
#[derive(Debug)]
pub struct Bucket {
    per_second: u64,
    /// How long it takes to fill the bucket.
    burst: Duration,
    /// When the link will have carried all that was admitted so far.
    idle_at: Mutex<Instant>,
}

impl Bucket {
    fn new(per_second: u64, burst: u64) -> Self {
        assert!(per_second > 0, "a rate is more than nothing");
        let mut bucket = Self {
            per_second,
            burst: Duration::ZERO,
            idle_at: Mutex::new(Instant::now()),
        };
        bucket.burst = bucket.time_for(burst);
        bucket
    }

    fn time_for(&self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.per_second);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(2 * MAX_WAIT)
    }

    /// How long a request of that many bytes has to wait from `now` on, in the order of asking.
    fn admit(&self, now: Instant, bytes: u64) -> Result<Duration, DeviceError> {
        let mut idle_at = self.idle_at.lock();
        let start = match now.checked_sub(self.burst) {
            Some(full) => full.max(*idle_at),
            None => *idle_at,
        };
        let done = start + self.time_for(bytes);
        let wait = done.saturating_duration_since(now);
        if wait > MAX_WAIT {
            return Err(DeviceError::Unavailable(format!(
                "{bytes} bytes would take longer than {MAX_WAIT:?} at {} bytes a second",
                self.per_second
            )));
        }
        *idle_at = done;
        Ok(wait)
    }
}

impl Gate for Bucket {
    type Pass<'a> = ();

    fn enter(&self, request: &Request) -> Result<Entry<()>, DeviceError> {
        let bytes = request.bytes();
        if bytes > 0 {
            std::thread::sleep(self.admit(Instant::now(), bytes)?);
        }
        Ok(Entry::Pass(()))
    }

    fn leave(&self, (): ()) -> Result<(), DeviceError> {
        Ok(())
    }

    fn cost(&self, _: Cost) -> Cost {
        Cost::Network
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryDevice;

    #[test]
    fn it_keeps_the_contract() {
        crate::testing::contract(&|size| Box::new(Rate::new(MemoryDevice::new(size), u64::MAX, 0)));
    }

    #[test]
    fn bytes_wait_in_line_and_a_pause_earns_a_burst() {
        let bucket = Bucket::new(1000, 500);
        let now = Instant::now() + Duration::from_secs(10);
        let ms = Duration::from_millis;
        // The bucket is full after the pause, but no fuller than its size.
        assert_eq!(bucket.admit(now, 400).unwrap(), ms(0));
        assert_eq!(bucket.admit(now, 400).unwrap(), ms(300));
        assert_eq!(bucket.admit(now, 1000).unwrap(), ms(1300));
        assert_eq!(bucket.admit(now + ms(1300), 100).unwrap(), ms(100));
    }

    #[test]
    fn an_endless_wait_is_refused_without_delaying_others() {
        let bucket = Bucket::new(1, 0);
        let now = Instant::now();
        let refused = bucket.admit(now, u64::MAX);
        assert!(
            matches!(refused, Err(DeviceError::Unavailable(_))),
            "{refused:?}"
        );
        assert!(bucket.admit(now, 1).unwrap() <= Duration::from_secs(1));
    }

    #[test]
    fn threads_share_the_rate() {
        let device = Rate::new(MemoryDevice::new(1 << 20), 1 << 20, 0);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| device.write(0, &[1; 32 << 10]).unwrap());
            }
        });
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(120), "{took:?}");
        // Zeros carry no bytes.
        let start = Instant::now();
        device
            .write_zeroes(0, 1 << 20, drover_core::Zeroes::default())
            .unwrap();
        assert!(start.elapsed() < Duration::from_millis(500));
    }
}
