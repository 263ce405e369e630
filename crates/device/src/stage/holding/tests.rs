use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;
use crate::backend::MemoryDevice;
use crate::stage::{LockHandle, Lockable, Operation};
use crate::testing::{Errors, Fault, When};

const SIZE: usize = 1 << 20;

type Device = Lockable<Holding<Arc<dyn BlockDevice>>>;

fn device(content: &[u8]) -> (Device, LockHandle, HoldHandle<Arc<dyn BlockDevice>>) {
    let inner: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::from_bytes(content));
    let (holding, hold) = Holding::new(inner);
    let (device, lock) = Lockable::new(holding, Duration::from_secs(10));
    (device, lock, hold)
}

fn scratch() -> Arc<dyn BlockDevice> {
    Arc::new(MemoryDevice::from_bytes(&vec![0; SIZE]))
}

fn content(rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    rng.fill(&mut bytes[SIZE / 4..]);
    bytes
}

fn read(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    device.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_held_state_stays_while_writers_go_on() {
    let mut rng = fastrand::Rng::with_seed(11);
    let before = content(&mut rng);
    let (device, lock, hold) = device(&before);
    let held = hold.hold(&lock.lock().unwrap(), scratch());
    let mut after = before.clone();
    for _ in 0..300 {
        let start = rng.usize(..SIZE);
        let end = (start + rng.usize(..100_000)).min(SIZE);
        match rng.u8(..3) {
            0 => {
                rng.fill(&mut after[start..end]);
                device.write(start as u64, &after[start..end]).unwrap();
            }
            1 => {
                after[start..end].fill(0);
                let length = (end - start) as u64;
                device
                    .write_zeroes(start as u64, length, Zeroes::default())
                    .unwrap();
            }
            _ => {
                let mut part = vec![0; end - start];
                held.read(start as u64, &mut part).unwrap();
                assert!(part == before[start..end]);
            }
        }
    }
    assert!(read(&held) == before);
    assert!(read(&device) == after);
    for extent in held.extents(0, SIZE as u64).unwrap() {
        let range = extent.offset as usize..extent.end() as usize;
        assert!(extent.kind == ExtentKind::Data || is_zero(&before[range]));
    }
    hold.release();
    assert!(held.read(0, &mut [0; 9]).is_err());
    // The next one is of that moment.
    let next = hold.hold(&lock.lock().unwrap(), scratch());
    device.write(0, &[7; 99]).unwrap();
    assert!(read(&next) == after);
}

#[test]
fn a_held_state_stays_while_many_threads_write() {
    let before = content(&mut fastrand::Rng::with_seed(5));
    let (device, lock, hold) = device(&before);
    let held = hold.hold(&lock.lock().unwrap(), scratch());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (device, done) = (&device, &done);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed);
                while !done.load(Ordering::Relaxed) {
                    let start = rng.usize(..SIZE - 5000);
                    let bytes = vec![rng.u8(..); rng.usize(1..5000)];
                    device.write(start as u64, &bytes).unwrap();
                }
            });
        }
        for _ in 0..20 {
            assert!(read(&held) == before);
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(read(&held) == before);
}

#[test]
fn a_scratch_that_is_full_loses_the_state_and_no_write() {
    let before = content(&mut fastrand::Rng::with_seed(6));
    let (device, lock, hold) = device(&before);
    let fault = Fault::on(Operation::Write, When::Always);
    let (full, _) = Errors::new(scratch(), 1, vec![fault]);
    let held = hold.hold(&lock.lock().unwrap(), Arc::new(full));
    device.write(SIZE as u64 / 2, b"written").unwrap();
    let mut found = [0; 7];
    device.read(SIZE as u64 / 2, &mut found).unwrap();
    assert_eq!(&found, b"written");
    assert!(held.read(0, &mut found).is_err());
    hold.release();
    let held = hold.hold(&lock.lock().unwrap(), scratch());
    assert!(held.write(0, &[1]).is_err() && held.capabilities().read_only);
    held.read(SIZE as u64 / 2, &mut found).unwrap();
    assert_eq!(&found, b"written");
}
