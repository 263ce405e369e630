use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;
use crate::backend::MemoryDevice;
use crate::testing::{Cut, CutHandle, CutHow};

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(60);

/// Until `what` is so.
fn until(what: impl Fn() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < LONG, "it never was so");
        std::thread::sleep(MS);
    }
}

/// A device whose requests hang on demand, under a lock.
fn hanging(timeout: Duration) -> (Arc<Lockable<Cut<MemoryDevice>>>, LockHandle, CutHandle) {
    let (below, cut) = Cut::new(MemoryDevice::new(8192), timeout);
    let (device, lock) = Lockable::new(below, timeout);
    (Arc::new(device), lock, cut)
}

fn unavailable<T: std::fmt::Debug>(result: &Result<T, DeviceError>) -> bool {
    matches!(result, Err(DeviceError::Unavailable(_)))
}

#[test]
fn it_keeps_the_contract() {
    crate::testing::contract(&|size| Box::new(Lockable::new(MemoryDevice::new(size), LONG).0));
}

#[test]
fn a_lock_waits_for_what_is_under_way_and_holds_back_what_comes() {
    let (device, lock, cut) = hanging(LONG);
    cut.cut(CutHow::Hang);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| device.write(0, &[1; 512]));
        until(|| cut.hanging() == 1);
        let locked = scope.spawn(|| lock.lock());
        until(|| device.cost(0, 1) == Cost::Network && lock.shared.state.lock().locked);
        let second = scope.spawn(|| device.write(0, &[2; 512]));
        until(|| lock.requests() == (1, 1));
        assert!(!locked.is_finished() && !first.is_finished());
        cut.heal();
        let guard = locked.join().unwrap().unwrap();
        first.join().unwrap().unwrap();
        assert_eq!(lock.requests(), (0, 1));
        // Advice is dropped, but not outside the device.
        device.prefetch(0, 512).unwrap();
        assert!(device.prefetch(8192, 1).is_err());
        let mut now = [0; 512];
        device.inner().read(0, &mut now).unwrap();
        assert_eq!(now, [1; 512]);
        assert!(!second.is_finished());
        drop(guard);
        second.join().unwrap().unwrap();
        device.read(0, &mut now).unwrap();
        assert_eq!(now, [2; 512]);
    });
}

#[test]
fn a_lock_that_comes_too_late_leaves_the_device_unlocked() {
    let (device, lock, cut) = hanging(LONG);
    cut.cut(CutHow::Hang);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| device.flush());
        until(|| cut.hanging() == 1);
        let late = lock.lock_until(Instant::now() + 10 * MS);
        assert!(unavailable(&late), "{late:?}");
        cut.heal();
        slow.join().unwrap().unwrap();
    });
    device.flush().unwrap();
    let guard = lock.lock().unwrap();
    let second = lock.lock_until(Instant::now() + 10 * MS);
    assert!(unavailable(&second), "{second:?}");
    drop(guard);
    drop(lock.lock().unwrap());
    device.flush().unwrap();
}

#[test]
fn what_is_held_back_gives_up_in_time() {
    let (device, lock, _) = hanging(30 * MS);
    let guard = lock.lock().unwrap();
    let start = Instant::now();
    let held = device.read(0, &mut [0; 512]);
    assert!(unavailable(&held), "{held:?}");
    assert!(start.elapsed() >= 30 * MS);
    assert_eq!(lock.requests(), (0, 0));
    drop(guard);
    device.read(0, &mut [0; 512]).unwrap();
}

#[test]
fn a_timeout_longer_than_there_is_time_is_a_day() {
    let (device, lock, cut) = hanging(Duration::MAX);
    std::thread::scope(|scope| {
        let guard = lock.lock().unwrap();
        let held = scope.spawn(|| device.flush());
        until(|| lock.requests() == (0, 1));
        cut.cut(CutHow::Hang);
        drop(guard);
        until(|| cut.hanging() == 1);
        cut.heal();
        held.join().unwrap().unwrap();
    });
}

#[test]
fn a_closed_device_answers_nothing_more() {
    let (device, lock, _) = hanging(LONG);
    std::thread::scope(|scope| {
        let guard = lock.lock().unwrap();
        let held = scope.spawn(|| device.write(0, &[1]));
        let waiting = scope.spawn(|| lock.lock());
        until(|| lock.requests() == (0, 1));
        guard.close();
        assert!(matches!(held.join().unwrap(), Err(DeviceError::Closed)));
        assert!(matches!(waiting.join().unwrap(), Err(DeviceError::Closed)));
    });
    assert!(lock.is_closed());
    for result in [
        device.read(0, &mut [0]),
        device.write(0, &[1]),
        device.write_zeroes(0, 1, Default::default()),
        device.trim(0, 1),
        device.flush(),
        device.extents(0, 1).map(drop),
        device.prefetch(0, 1),
    ] {
        assert!(matches!(result, Err(DeviceError::Closed)), "{result:?}");
    }
    assert_eq!(device.size(), 8192);
}

#[test]
fn a_request_that_panics_is_no_longer_under_way() {
    struct Panics;
    impl Gate for Panics {
        type Pass<'a> = ();
        fn enter(&self, _: &Request) -> Result<Entry<()>, DeviceError> {
            panic!("on purpose")
        }
        fn leave(&self, (): ()) -> Result<(), DeviceError> {
            Ok(())
        }
        fn cost(&self, inner: Cost) -> Cost {
            inner
        }
    }
    let (device, lock) = Lockable::new(Gated::with_gate(MemoryDevice::new(512), Panics), LONG);
    std::thread::scope(|scope| assert!(scope.spawn(|| device.flush()).join().is_err()));
    assert_eq!(lock.requests(), (0, 0));
    drop(lock.lock().unwrap());
}

#[test]
fn nothing_moves_below_a_locked_device() {
    let below = Arc::new(MemoryDevice::new(64 << 10));
    let (device, lock) = Lockable::new(Arc::clone(&below), LONG);
    let (written, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (device, written, stop) = (&device, &written, &stop);
            scope.spawn(move || {
                let mut n = 0u64;
                // An end also when the test has failed.
                while !stop.load(Ordering::Relaxed) && start.elapsed() < LONG {
                    n += 1;
                    device
                        .write(thread * 4096, &n.to_le_bytes().repeat(512))
                        .unwrap();
                    written.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let (mut one, mut two) = (vec![0; 64 << 10], vec![0; 64 << 10]);
        for _ in 0..100 {
            let guard = lock.lock().unwrap();
            below.read(0, &mut one).unwrap();
            std::thread::sleep(MS / 10);
            below.read(0, &mut two).unwrap();
            drop(guard);
            assert!(one == two, "it moved under the lock");
            for page in one.chunks(4096) {
                let first = &page[..8];
                assert!(page.chunks(8).all(|word| word == first), "a torn write");
            }
            // Until the next write.
            let before = written.load(Ordering::Relaxed);
            until(|| written.load(Ordering::Relaxed) > before);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(written.into_inner() >= 100);
}
