//! Injects errors on a schedule.

use std::ops::Range;
use std::sync::Arc;

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Extent, Zeroes, check_range};
use parking_lot::Mutex;

use crate::stage::{Operation, Request};

/// A device that fails as [`Fault`]s say. A fault of the device is one of many: all that match a request count it, the
/// first that is due fails it.
pub struct Errors<D> {
    inner: D,
    shared: Arc<Mutex<Script>>,
}

/// When and how requests fail.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The requests that it may hit.
    pub operations: Vec<Operation>,
    /// The bytes of the device that it may hit: a request must touch one of them. A flush touches all.
    pub range: Range<u64>,
    /// Which of those it hits.
    pub when: When,
    /// What they fail with.
    pub error: DeviceError,
    /// A write, zeroing or trim that fails has done a part of its work, from its start; a flush may have done it.
    pub torn: bool,
}

impl Fault {
    /// Fails requests of one kind, anywhere on the device, with an I/O error and without doing any of their work.
    #[must_use]
    pub fn on(operation: Operation, when: When) -> Self {
        Self {
            operations: vec![operation],
            range: 0..u64::MAX,
            when,
            error: std::io::Error::other("a fault was asked for").into(),
            torn: false,
        }
    }

    fn matches(&self, request: &Request) -> bool {
        let touches = request.operation == Operation::Flush
            || (request.offset < self.range.end
                && request.offset.saturating_add(request.length) > self.range.start);
        touches && self.operations.contains(&request.operation)
    }
}

/// Which of the requests that match a [`Fault`] it hits, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum When {
    /// All of them.
    Always,
    /// One.
    Nth(u64),
    /// One and all after it.
    From(u64),
    /// The nth, the 2nth and so on; 0 is none.
    Every(u64),
    /// Each with this probability.
    Chance(f64),
}

struct Script {
    /// With how many requests each matched.
    faults: Vec<(Fault, u64)>,
    random: fastrand::Rng,
    injected: u64,
}

/// What a request that fails has done before.
struct Failure {
    error: DeviceError,
    /// The share of its work, in `0.0..1.0`; none: not even begun.
    done: Option<f64>,
}

/// Changes the faults of an [`Errors`] while it is in use.
#[derive(Clone)]
pub struct ErrorsHandle {
    shared: Arc<Mutex<Script>>,
}

impl ErrorsHandle {
    /// Adds a fault, which counts requests from now on.
    pub fn add(&self, fault: Fault) {
        self.shared.lock().faults.push((fault, 0));
    }

    /// Takes all faults away.
    pub fn clear(&self) {
        self.shared.lock().faults.clear();
    }

    /// Requests that were made to fail so far.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.shared.lock().injected
    }
}

impl std::fmt::Debug for ErrorsHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let script = self.shared.lock();
        f.debug_struct("ErrorsHandle")
            .field("faults", &script.faults.len())
            .field("injected", &script.injected)
            .finish()
    }
}

impl Script {
    fn due(&mut self, request: &Request) -> Option<Failure> {
        let mut failure = None;
        for (fault, seen) in &mut self.faults {
            if !fault.matches(request) {
                continue;
            }
            *seen += 1;
            let hit = match fault.when {
                When::Always => true,
                When::Nth(n) => *seen == n,
                When::From(n) => *seen >= n,
                When::Every(n) => n > 0 && *seen % n == 0,
                When::Chance(p) => self.random.f64() < p,
            };
            if hit && failure.is_none() {
                self.injected += 1;
                failure = Some(Failure {
                    error: fault.error.clone(),
                    done: fault.torn.then(|| self.random.f64()),
                });
            }
        }
        failure
    }
}

impl<D: BlockDevice> Errors<D> {
    /// A device with these faults; `seed` decides chances and where writes are torn. The handle adds more.
    pub fn new(inner: D, seed: u64, faults: Vec<Fault>) -> (Self, ErrorsHandle) {
        let shared = Arc::new(Mutex::new(Script {
            faults: faults.into_iter().map(|fault| (fault, 0)).collect(),
            random: fastrand::Rng::with_seed(seed),
            injected: 0,
        }));
        let handle = ErrorsHandle {
            shared: Arc::clone(&shared),
        };
        (Self { inner, shared }, handle)
    }

    /// Does `work`, or `part` of it with the length of a prefix, and fails.
    fn ask<T>(
        &self,
        operation: Operation,
        (offset, length): (u64, u64),
        part: impl FnOnce(u64) -> Result<(), DeviceError>,
        work: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        check_range(offset, length, self.inner.size())?;
        let due = self.shared.lock().due(&Request {
            operation,
            offset,
            length,
        });
        let Some(Failure { error, done }) = due else {
            return work();
        };
        if let Some(share) = done {
            // A prefix that the device below takes.
            let unit = u64::from(self.inner.capabilities().alignment);
            let prefix = (length as f64 * share) as u64 / unit * unit;
            part(prefix.min(length))?;
        }
        Err(error)
    }
}

/// For requests of which no part can be done.
fn nothing(_: u64) -> Result<(), DeviceError> {
    Ok(())
}

impl<D: BlockDevice> BlockDevice for Errors<D> {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let range = (offset, buffer.len() as u64);
        self.ask(Operation::Read, range, nothing, || {
            self.inner.read(offset, buffer)
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.ask(
            Operation::Write,
            (offset, data.len() as u64),
            |part| self.inner.write(offset, &data[..part as usize]),
            || self.inner.write(offset, data),
        )
    }

    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.ask(
            Operation::WriteZeroes,
            (offset, length),
            |part| self.inner.write_zeroes(offset, part, zeroes),
            || self.inner.write_zeroes(offset, length, zeroes),
        )
    }

    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.ask(
            Operation::Trim,
            (offset, length),
            |part| self.inner.trim(offset, part),
            || self.inner.trim(offset, length),
        )
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.ask(
            Operation::Flush,
            (0, 0),
            |_| self.inner.flush(),
            || self.inner.flush(),
        )
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        self.ask(Operation::Extents, (offset, length), nothing, || {
            self.inner.extents(offset, length)
        })
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.ask(Operation::Prefetch, (offset, length), nothing, || {
            self.inner.prefetch(offset, length)
        })
    }

    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.cost(offset, length)
    }

    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.write_cost(offset, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryDevice;
    use crate::testing::Strict;

    fn fails(device: &impl BlockDevice, count: usize) -> Vec<bool> {
        (0..count)
            .map(|_| device.read(4096, &mut [0; 512]).is_err())
            .collect()
    }

    #[test]
    fn it_keeps_the_contract() {
        crate::testing::contract(&|size| {
            Box::new(Errors::new(MemoryDevice::new(size), 1, vec![]).0)
        });
    }

    #[test]
    fn faults_hit_the_requests_that_they_name() {
        let memory = Arc::new(MemoryDevice::new(1 << 20));
        let with = |when| {
            let fault = Fault::on(Operation::Read, when);
            fails(&Errors::new(memory.clone(), 1, vec![fault]).0, 6)
        };
        assert_eq!(with(When::Always), [true; 6]);
        assert_eq!(
            with(When::Nth(2)),
            [false, true, false, false, false, false]
        );
        assert_eq!(
            with(When::From(5)),
            [false, false, false, false, true, true]
        );
        assert_eq!(
            with(When::Every(3)),
            [false, false, true, false, false, true]
        );
        assert_eq!(with(When::Every(0)), [false; 6]);
        assert_eq!(with(When::Chance(0.0)), [false; 6]);
        assert_eq!(with(When::Chance(1.0)), [true; 6]);
    }

    #[test]
    fn chance_is_what_the_seed_says() {
        let run = |seed| {
            let fault = Fault::on(Operation::Read, When::Chance(0.3));
            fails(
                &Errors::new(MemoryDevice::new(8192), seed, vec![fault]).0,
                200,
            )
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
        let hit = run(7).into_iter().filter(|hit| *hit).count();
        assert!((30..=90).contains(&hit), "{hit} of 200");
    }

    #[test]
    fn only_what_touches_the_range_is_hit_and_a_flush_always() {
        let fault = Fault {
            operations: Operation::ALL.to_vec(),
            range: 4096..8192,
            error: DeviceError::NoSpace("the disk is full".into()),
            ..Fault::on(Operation::Read, When::Always)
        };
        let (device, handle) = Errors::new(MemoryDevice::new(1 << 20), 1, vec![fault]);
        device.write(0, &[1; 4096]).unwrap();
        device.read(8192, &mut [0; 4096]).unwrap();
        device.write(4096, &[]).unwrap();
        assert_eq!(handle.injected(), 0);
        let hit = [
            device.write(0, &[1; 4097]),
            device.read(8191, &mut [0; 1]),
            device.write_zeroes(0, 1 << 20, Zeroes::default()),
            device.trim(4096, 1),
            device.flush(),
            device.extents(0, 8192).map(drop),
            device.prefetch(5000, 1),
        ];
        for (which, result) in hit.iter().enumerate() {
            assert!(
                matches!(result, Err(DeviceError::NoSpace(_))),
                "{which}: {result:?}"
            );
        }
        assert_eq!(handle.injected(), 7);
        handle.clear();
        device.flush().unwrap();
        handle.add(Fault::on(Operation::Flush, When::Nth(1)));
        assert!(matches!(device.flush(), Err(DeviceError::Io(_))));
        device.flush().unwrap();
        // What is refused anyway is not counted.
        handle.add(Fault::on(Operation::Read, When::Nth(1)));
        let outside = device.read(1 << 20, &mut [0]);
        assert!(matches!(outside, Err(DeviceError::OutOfRange { .. })));
        assert!(matches!(device.read(0, &mut [0]), Err(DeviceError::Io(_))));
    }

    #[test]
    fn a_torn_write_leaves_an_aligned_prefix() {
        let memory = Arc::new(MemoryDevice::new(64 << 10));
        let fault = Fault {
            torn: true,
            ..Fault::on(Operation::Write, When::Always)
        };
        let below = Strict::new(Arc::clone(&memory), 512, u32::MAX);
        let (device, _) = Errors::new(below, 3, vec![fault]);
        let mut lengths = Vec::new();
        for _ in 0..20 {
            memory.write(0, &[0; 64 << 10]).unwrap();
            let result = device.write(0, &[7; 64 << 10]);
            assert!(matches!(result, Err(DeviceError::Io(_))));
            let mut now = vec![0; 64 << 10];
            memory.read(0, &mut now).unwrap();
            let prefix = now.iter().take_while(|b| **b == 7).count();
            assert!(now[prefix..].iter().all(|b| *b == 0));
            assert_eq!(prefix % 512, 0);
            lengths.push(prefix);
        }
        lengths.sort_unstable();
        lengths.dedup();
        assert!(lengths.len() > 10, "{lengths:?}");
    }
}
