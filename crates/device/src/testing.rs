//! The contract that every device is held to, against a plain reference model: a vector of bytes.

#[cfg(feature = "cassandra")]
mod cassandra;
mod faults;
mod probe;
#[cfg(feature = "redis")]
mod redis;

#[cfg(feature = "cassandra")]
pub use cassandra::CassandraCluster;
pub use faults::{
    Bucket, Cut, CutHandle, CutHow, Delay, Errors, ErrorsHandle, Fault, Latency, Rate, Strict,
    When, Wire,
};
pub use probe::{Call, Probe};
#[cfg(feature = "redis")]
pub use redis::RedisProcess;

use drover_core::{BlockDevice, DeviceError, ExtentKind, Zeroes};

/// Steps of one run.
const STEPS: usize = 400;

/// Runs random requests against devices of several sizes and against a vector, and compares all that can be seen.
///
/// `make` makes a device of that many zero bytes. A failure names the seed.
///
/// # Panics
/// When the device breaks the contract of [`BlockDevice`].
pub fn contract(make: &dyn Fn(u64) -> Box<dyn BlockDevice>) {
    for (seed, size) in [(1, 0), (2, 4096), (3, 200_000), (4, 1 << 20), (5, 70_001)] {
        let device = make(size);
        assert_eq!(device.size(), size, "seed {seed}");
        let unit = u64::from(device.capabilities().alignment);
        // A device of whole chunks cannot be of any size.
        if size % unit == 0 {
            run(device.as_ref(), seed);
        }
    }
}

/// Runs random requests against `device`, which must read as zeros, and against a vector.
///
/// # Panics
/// When the device breaks the contract of [`BlockDevice`].
pub fn run(device: &dyn BlockDevice, seed: u64) {
    let size = device.size();
    let unit = u64::from(device.capabilities().alignment);
    let longest = u64::from(device.capabilities().longest).min(150_000) / unit * unit;
    let mut model = vec![0u8; usize::try_from(size).expect("a small device")];
    let mut random = fastrand::Rng::with_seed(seed);
    refuses_what_is_outside(device, seed);
    for step in 0..STEPS {
        let said = || format!("seed {seed}, step {step}");
        let offset = random.u64(0..=size) / unit * unit;
        let length = random.u64(0..=longest.min(size - offset)) / unit * unit;
        let range = offset as usize..(offset + length) as usize;
        match random.u8(0..8) {
            0..3 => {
                let data: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
                device
                    .write(offset, &data)
                    .unwrap_or_else(|e| panic!("{}: write: {e}", said()));
                model[range].copy_from_slice(&data);
            }
            3 => {
                let zeroes = Zeroes {
                    keep_allocated: random.bool(),
                    only_fast: random.bool(),
                };
                match device.write_zeroes(offset, length, zeroes) {
                    Ok(()) => model[range].fill(0),
                    Err(DeviceError::Unsupported(_)) if zeroes.only_fast => {}
                    Err(error) => panic!("{}: zeroes: {error}", said()),
                }
            }
            4 => {
                device
                    .trim(offset, length)
                    .unwrap_or_else(|e| panic!("{}: trim: {e}", said()));
                let mut now = vec![0; length as usize];
                device.read(offset, &mut now).expect("a read after a trim");
                // Its choice, but for good.
                model[range].copy_from_slice(&now);
            }
            5 => device
                .flush()
                .unwrap_or_else(|e| panic!("{}: flush: {e}", said())),
            6 => {
                device
                    .prefetch(offset, length)
                    .unwrap_or_else(|e| panic!("{}: prefetch: {e}", said()));
                let _ = device.cost(offset, length);
            }
            _ if length > 0 => extents_are_true(device, &model, offset, length, &said()),
            _ => {}
        }
        let offset = random.u64(0..=size) / unit * unit;
        let length = random.u64(0..=longest.min(size - offset)) / unit * unit;
        let mut buffer = vec![0xA5; length as usize];
        device
            .read(offset, &mut buffer)
            .unwrap_or_else(|e| panic!("{}: read: {e}", said()));
        assert!(
            buffer == model[offset as usize..(offset + length) as usize],
            "{}: {length} bytes at {offset} differ",
            said()
        );
    }
}

fn extents_are_true(device: &dyn BlockDevice, model: &[u8], offset: u64, length: u64, said: &str) {
    let runs = device
        .extents(offset, length)
        .unwrap_or_else(|e| panic!("{said}: extents: {e}"));
    assert!(!runs.is_empty(), "{said}: no extent");
    let mut at = offset;
    for run in runs {
        assert!(
            run.offset == at && run.length > 0 && run.end() <= offset + length,
            "{said}: extents are not in order: {run:?} at {at}"
        );
        if run.kind != ExtentKind::Data {
            let bytes = &model[run.offset as usize..run.end() as usize];
            assert!(
                bytes.iter().all(|b| *b == 0),
                "{said}: {run:?} holds what is not zero"
            );
        }
        at = run.end();
    }
}

fn refuses_what_is_outside(device: &dyn BlockDevice, seed: u64) {
    let size = device.size();
    let unit = u64::from(device.capabilities().alignment);
    let mut buffer = vec![0; unit as usize];
    for offset in [size, size + unit, u64::MAX / unit * unit] {
        let results = [
            device.read(offset, &mut buffer),
            device.write(offset, &buffer),
            device.write_zeroes(offset, unit, Zeroes::default()),
            device.trim(offset, unit),
            device.extents(offset, unit).map(drop),
            device.prefetch(offset, unit),
        ];
        for (which, result) in results.iter().enumerate() {
            assert!(
                matches!(result, Err(DeviceError::OutOfRange { .. })),
                "seed {seed}: request {which} at {offset} of {size}: {result:?}"
            );
        }
    }
}
