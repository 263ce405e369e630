//! Adds a round trip to each request.

use std::time::Duration;

use drover_core::{BlockDevice, Cost, DeviceError};

use crate::stage::{Entry, Gate, Gated, Operation, Request};

/// A device far away: each request takes a fixed time, and a time for each of its bytes. Requests do not wait for each
/// other: what bounds them together is [`Rate`](super::Rate).
pub type Delay<D> = Gated<D, Latency>;

impl<D: BlockDevice> Delay<D> {
    /// Adds `request` to each request and `byte` to each byte that it carries. Advice (prefetches) is not delayed,
    /// as nobody waits for its answer.
    pub fn new(inner: D, request: Duration, byte: Duration) -> Self {
        Self::with_gate(inner, Latency { request, byte })
    }
}

/// The gate of [`Delay`].
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    request: Duration,
    byte: Duration,
}

/// The longest that a [`Delay`] or a [`Rate`](super::Rate) holds a request back.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(600);

impl Latency {
    fn wait(&self, bytes: u32) -> Duration {
        let wait = self.byte.saturating_mul(bytes).saturating_add(self.request);
        wait.min(MAX_WAIT)
    }
}

impl Gate for Latency {
    type Pass<'a> = ();

    fn enter(&self, request: &Request) -> Result<Entry<()>, DeviceError> {
        if request.operation != Operation::Prefetch {
            let bytes = u32::try_from(request.bytes()).unwrap_or(u32::MAX);
            std::thread::sleep(self.wait(bytes));
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
    use std::time::Instant;

    use super::*;
    use crate::backend::MemoryDevice;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn it_keeps_the_contract() {
        crate::testing::contract(&|size| {
            let micro = Duration::from_micros(1);
            Box::new(Delay::new(MemoryDevice::new(size), micro, Duration::ZERO))
        });
    }

    #[test]
    fn requests_take_their_time_but_not_each_others() {
        let device = Delay::new(MemoryDevice::new(1 << 20), 40 * MS, MS / 1000);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| device.read(0, &mut [0; 20_000]).unwrap());
            }
        });
        let took = start.elapsed();
        assert!(took >= 60 * MS, "{took:?}");
        assert!(took < 300 * MS, "they waited for each other: {took:?}");
    }

    #[test]
    fn no_delay_is_longer_than_the_longest() {
        let (request, byte) = (MS, Duration::MAX);
        assert_eq!(Latency { request, byte }.wait(2), MAX_WAIT);
        assert_eq!(Latency { request, byte }.wait(0), MS);
    }

    #[test]
    fn what_carries_no_bytes_or_is_refused_is_not_delayed_by_its_length() {
        let device = Delay::new(MemoryDevice::new(1 << 31), Duration::ZERO, 100 * MS);
        let start = Instant::now();
        device.trim(0, 1 << 30).unwrap();
        device.prefetch(0, 1 << 30).unwrap();
        assert!(device.read(1 << 31, &mut [0; 4096]).is_err());
        assert!(start.elapsed() < 100 * MS);
        assert_eq!(device.cost(0, 1), Cost::Network);
    }
}
