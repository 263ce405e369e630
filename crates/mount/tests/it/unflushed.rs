//! What a direct mount has not flushed is repeated when the link is up again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, DeviceError, Zeroes};
use drover_mount::client::{Client, Options};
use drover_mount::direct::RemoteDevice;
use drover_net::{Code, Refusal};
use drover_store::lease::Access;
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use crate::blocked::{Gate, Opens};
use crate::killed::{Mortal, insist};
use crate::util::{Near, name, runtime};

/// Bytes of the disk that are written.
const PART: usize = 100_000;

fn open(runtime: &Runtime, near: &Arc<Near>) -> RemoteDevice {
    let options = Options::new(name("web"), Access::ReadWrite);
    let client = Client::open(runtime.handle(), near.clone(), options);
    RemoteDevice::new(Arc::new(runtime.block_on(client).unwrap()))
}

#[test]
fn writes_of_two_threads_to_one_range_keep_their_order() {
    const ROUNDS: usize = 25;
    let runtime = runtime();
    let _inside = runtime.enter();
    for seed in 0..4 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut site = Mortal::new(seed);
        let near = Near::new(site.server.clone());
        let device = open(&runtime, &near);
        let mut model = vec![0; PART];
        for round in 0..ROUNDS {
            let changes: [_; 2] = std::array::from_fn(|_| {
                let length = random.usize(1..60_000);
                let at = random.usize(0..PART - length);
                let mut bytes = vec![0; length];
                if random.u8(..4) > 0 {
                    random.fill(&mut bytes);
                }
                (at, bytes)
            });
            std::thread::scope(|scope| {
                for (at, bytes) in &changes {
                    let device = &device;
                    scope.spawn(move || {
                        let (offset, length) = (*at as u64, bytes.len() as u64);
                        let zeroes = Zeroes::default();
                        insist(seed, || match bytes.iter().all(|byte| *byte == 0) {
                            true => device.write_zeroes(offset, length, zeroes),
                            false => device.write(offset, bytes),
                        });
                    });
                }
                std::thread::sleep(Duration::from_micros(random.u64(..3000)));
                near.cut();
            });
            let mut found = vec![0; PART];
            insist(seed, || device.read(0, &mut found));
            let either = [[0, 1], [1, 0]].map(|order| {
                let mut model = model.clone();
                for n in order {
                    let (at, bytes) = &changes[n];
                    model[*at..at + bytes.len()].copy_from_slice(bytes);
                }
                model
            });
            assert!(either.contains(&found), "seed {seed}, round {round}");
            model = found;
            // Those of earlier rounds overlap, too.
            match random.u8(..6) {
                0 => site.ends(&near, None),
                1 => site.ends(&near, Some(random.u64(..))),
                2 => insist(seed, || device.flush()),
                _ => near.cut(),
            }
            let mut found = vec![0; PART];
            insist(seed, || device.read(0, &mut found));
            assert!(found == model, "seed {seed}, round {round}: another order");
        }
        device.close().unwrap();
    }
}

/// A site that refuses what its test wants it to refuse.
fn refusing(seed: u64) -> (Mortal, Arc<Mutex<Option<Refusal>>>) {
    let refusal: Arc<Mutex<Option<Refusal>>> = Arc::default();
    let shared = refusal.clone();
    let site = Mortal::asking(
        seed,
        // Logging what is zero takes little.
        Arc::new(move |bytes| match &*shared.lock() {
            Some(refusal) if bytes > 4096 => Err(refusal.clone()),
            _ => Ok(()),
        }),
    );
    (site, refusal)
}

#[test]
fn a_mount_whose_writes_are_refused_when_repeated_ends_and_says_why() {
    let runtime = runtime();
    let _inside = runtime.enter();
    for code in [Code::NoSpace, Code::Io] {
        let (mut site, refusal) = refusing(1);
        let near = Near::new(site.server.clone());
        let device = open(&runtime, &near);
        device.write(0, &[1; 5000]).unwrap();
        *refusal.lock() = Some(Refusal::new(code, "the disk is what it is"));
        site.ends(&near, None);
        let error = device.read(0, &mut [0; 10]).unwrap_err();
        assert!(matches!(error, DeviceError::Io(_)), "{error:?}");
        let text = error.to_string();
        let expected = "the link was lost before a flush, and the site refuses writes that it had accepted: the disk is what it is";
        assert!(text.contains(expected), "{text}");
        assert!(device.flush().is_err());
    }
}

#[test]
fn a_mount_whose_writes_cannot_be_repeated_yet_tries_again_and_says_why() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let (mut site, refusal) = refusing(1);
    let near = Near::new(site.server.clone());
    let device = open(&runtime, &near);
    device.write(0, &[1; 5000]).unwrap();
    *refusal.lock() = Some(Refusal::new(Code::Unavailable, "the disk is not there"));
    site.ends(&near, None);
    std::thread::scope(|scope| {
        let read = scope.spawn(|| {
            let mut found = [0; 10];
            device.read(0, &mut found).map(|()| found)
        });
        std::thread::sleep(Duration::from_secs(2));
        assert!(!read.is_finished());
        let tried = near.connects.load(Ordering::Relaxed);
        // Of all four connections, with growing pauses.
        assert!(tried <= 9 * 4, "{tried}");
        *refusal.lock() = None;
        assert_eq!(read.join().unwrap().unwrap(), [1; 10]);
    });
    device.flush().unwrap();
    device.close().unwrap();
}

#[test]
fn what_was_written_and_trimmed_takes_no_space_when_repeated() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let (mut site, refusal) = refusing(1);
    let near = Near::new(site.server.clone());
    let device = open(&runtime, &near);
    device.write(0, &[1; 64 << 10]).unwrap();
    device.trim(0, 64 << 10).unwrap();
    *refusal.lock() = Some(Refusal::new(Code::NoSpace, "the disk is full"));
    site.ends(&near, None);
    insist(1, || device.flush());
    let mut found = [1; 64 << 10];
    device.read(0, &mut found).unwrap();
    assert!(found == [0; 64 << 10]);
    device.close().unwrap();
}

#[test]
fn a_range_stays_busy_until_all_parts_of_a_write_are_answered() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let gate = Arc::new(Gate::default());
    let passes = gate.clone();
    let ask = Arc::new(move |bytes: u64| {
        if bytes > 50_000 {
            return Err(Refusal::new(Code::NoSpace, "the disk is full"));
        }
        passes.pass();
        Ok(())
    });
    let site = Mortal::asking(1, ask);
    let near = Near::new(site.server.clone());
    let device = open(&runtime, &near);
    gate.set(true);
    std::thread::scope(|scope| {
        let opens = Opens(gate.clone());
        // The first part is refused, the second one waits.
        let write = scope.spawn(|| device.write(0, &vec![1; (1 << 20) + 4096]));
        gate.wait_for_a_request();
        std::thread::sleep(Duration::from_millis(300));
        assert!(!write.is_finished(), "a part is still being written");
        drop(opens);
        let error = write.join().unwrap().unwrap_err();
        assert!(matches!(error, DeviceError::NoSpace(_)), "{error:?}");
    });
}

/// A mount whose requests wait for a second.
fn impatient(runtime: &Runtime, near: &Arc<Near>) -> RemoteDevice {
    let options = Options {
        give_up: Duration::from_secs(1),
        ..Options::new(name("web"), Access::ReadWrite)
    };
    let client = Client::open(runtime.handle(), near.clone(), options);
    RemoteDevice::new(Arc::new(runtime.block_on(client).unwrap()))
}

#[test]
fn requests_wait_while_changes_are_being_repeated() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let slow = Arc::new(AtomicBool::new(false));
    let is_slow = slow.clone();
    let ask = Arc::new(move |_| {
        if is_slow.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(400));
        }
        Ok(())
    });
    let mut site = Mortal::asking(1, ask);
    let near = Near::new(site.server.clone());
    let device = impatient(&runtime, &near);
    for n in 0..6 {
        device.write(n * 8192, &[1; 100]).unwrap();
        // One after another: these overlap.
        device.write(n * 8192 + 50, &[2; 8192]).unwrap();
    }
    slow.store(true, Ordering::Relaxed);
    site.ends(&near, None);
    let begun = Instant::now();
    let mut found = [0; 200];
    device.read(0, &mut found).unwrap();
    assert!(found[..50] == [1; 50] && found[50..] == [2; 150]);
    assert!(begun.elapsed() > Duration::from_secs(1), "too fast a site");
    device.close().unwrap();
}

#[test]
fn a_link_on_which_nothing_is_repeated_is_cut() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let gate = Arc::new(Gate::default());
    let passes = gate.clone();
    let ask = Arc::new(move |_| {
        passes.pass();
        Ok(())
    });
    let mut site = Mortal::asking(1, ask);
    let near = Near::new(site.server.clone());
    let device = impatient(&runtime, &near);
    device.write(0, &[1; 100]).unwrap();
    gate.set(true);
    let opens = Opens(gate.clone());
    site.ends(&near, None);
    gate.wait_for_a_request();
    let before = near.connects.load(Ordering::Relaxed);
    let error = device.read(0, &mut [0; 100]).unwrap_err();
    assert!(matches!(error, DeviceError::Unavailable(_)), "{error:?}");
    let limit = Instant::now() + Duration::from_secs(30);
    while near.connects.load(Ordering::Relaxed) == before {
        assert!(Instant::now() < limit, "the link stays");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(opens);
    let mut found = [0; 100];
    insist(1, || device.read(0, &mut found));
    assert_eq!(found, [1; 100]);
    device.close().unwrap();
}

#[test]
fn writers_of_one_range_fail_together_while_the_site_is_away() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Mortal::new(1);
    let near = Near::new(site.server.clone());
    let device = impatient(&runtime, &near);
    near.down.store(true, Ordering::Relaxed);
    near.cut();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let error = device.write(0, &[1; 100]).unwrap_err();
                assert!(matches!(error, DeviceError::Unavailable(_)), "{error:?}");
            });
        }
    });
    assert!(
        begun.elapsed() < Duration::from_secs(4),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_device_ends_with_the_runtime_of_its_mount() {
    let runtime = runtime();
    let site = {
        let _inside = runtime.enter();
        Mortal::new(1)
    };
    let near = Near::new(site.server.clone());
    let device = open(&runtime, &near);
    device.write(0, &[1; 100]).unwrap();
    drop(runtime);
    assert!(device.write(0, &[1; 100]).is_err());
}
