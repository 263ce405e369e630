mod kept;

use std::ops::Range;
use std::sync::mpsc;

use super::*;
use crate::backend::MemoryDevice;

fn device(size: u64) -> (Arc<Arriving<MemoryDevice>>, ArrivalHandle) {
    let below = MemoryDevice::from_bytes(&vec![1; size as usize]);
    let (device, handle) = Arriving::new(below, Duration::from_secs(5));
    (Arc::new(device), handle)
}

fn expect(handle: &ArrivalHandle, range: Range<u64>) -> Result<(), DeviceError> {
    handle.expect(&[range])
}

fn byte(device: &impl BlockDevice, offset: u64) -> u8 {
    let mut found = [0];
    device.read(offset, &mut found).unwrap();
    found[0]
}

#[test]
fn a_reader_waits_for_what_is_absent_and_asks_for_it() {
    let (device, handle) = device(10 * BLOCK);
    expect(&handle, 2 * BLOCK..5 * BLOCK).unwrap();
    let (asked, asks) = mpsc::channel();
    handle.on_wait(move |range| asked.send(range).unwrap());
    assert_eq!(byte(&*device, 2 * BLOCK - 1), 1);
    let reader = {
        let device = Arc::clone(&device);
        std::thread::spawn(move || byte(&*device, 3 * BLOCK + 9))
    };
    assert_eq!(asks.recv().unwrap(), 3 * BLOCK..4 * BLOCK);
    assert_eq!(
        device.arrive(3 * BLOCK, &[7; BLOCK as usize]).unwrap(),
        BLOCK
    );
    assert_eq!(reader.join().unwrap(), 7);
    // A second time it changes nothing.
    assert_eq!(device.arrive(3 * BLOCK, &[8; BLOCK as usize]).unwrap(), 0);
    assert_eq!(byte(&*device, 3 * BLOCK), 7);
    assert_eq!(handle.left(), 2 * BLOCK);
    assert_eq!(device.arrive_zeroes(0, 10 * BLOCK).unwrap(), 2 * BLOCK);
    assert_eq!(byte(&*device, 2 * BLOCK), 0);
    assert!(handle.wait(Duration::ZERO));
    assert!(device.arrive(1, &[1]).is_err());
}

#[test]
fn what_was_written_here_does_not_arrive() {
    let (device, handle) = device(4 * BLOCK + 100);
    expect(&handle, 0..4 * BLOCK + 100).unwrap();
    assert_eq!(handle.left(), 4 * BLOCK + 100);
    device.write(BLOCK, &[5; BLOCK as usize]).unwrap();
    device.trim(4 * BLOCK, 100).unwrap();
    assert_eq!(handle.left(), 3 * BLOCK);
    let writer = {
        let device = Arc::clone(&device);
        // Half of the blocks 2 and 3.
        std::thread::spawn(move || device.write(2 * BLOCK + 2048, &[6; BLOCK as usize]))
    };
    std::thread::sleep(Duration::from_millis(20));
    let arrived = device.arrive(0, &[9; 4 * BLOCK as usize]).unwrap();
    assert_eq!(arrived, 3 * BLOCK);
    writer.join().unwrap().unwrap();
    let found: Vec<u8> = [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 3 * BLOCK + 2048]
        .into_iter()
        .map(|offset| byte(&*device, offset))
        .collect();
    assert_eq!(found, [9, 5, 9, 6, 9]);
}

#[test]
fn absent_parts_are_data_and_the_others_as_below() {
    let below = MemoryDevice::new(64 * BLOCK);
    let (device, handle) = Arriving::new(below, Duration::from_millis(10));
    expect(&handle, 32 * BLOCK..33 * BLOCK).unwrap();
    let first = device.extents(0, 64 * BLOCK).unwrap();
    assert!(
        first
            .iter()
            .all(|e| e.end() <= 32 * BLOCK && e.kind != ExtentKind::Data)
    );
    let absent = device.extents(32 * BLOCK, 10 * BLOCK).unwrap();
    assert_eq!(
        (absent[0].length, absent[0].kind),
        (BLOCK, ExtentKind::Data)
    );
    let mut block = [0; 10];
    let late = device.read(32 * BLOCK, &mut block).unwrap_err();
    assert!(late.is_transient(), "{late}");
    handle.fail(DeviceError::Closed);
    let lost = device.read(32 * BLOCK, &mut block).unwrap_err();
    assert!(matches!(lost, DeviceError::Closed));
    assert!(expect(&handle, 0..65 * BLOCK).is_err());
}

#[test]
fn threads_see_what_a_model_says() {
    const BLOCKS: u64 = 64;
    for seed in 0..20 {
        let (device, handle) = device(BLOCKS * BLOCK);
        expect(&handle, 0..BLOCKS * BLOCK).unwrap();
        let mut order: Vec<u64> = (0..BLOCKS).collect();
        let mut random = fastrand::Rng::with_seed(seed);
        random.shuffle(&mut order);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let device = &device;
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed * 10 + thread);
                    // Each thread has its own blocks.
                    let mut model = vec![None; BLOCKS as usize];
                    for _ in 0..200 {
                        let block = random.u64(0..BLOCKS / 4) * 4 + thread;
                        let at = random.u64(0..BLOCK);
                        if random.bool() {
                            let value = random.u8(..);
                            let whole = random.bool();
                            let (from, length) = if whole { (0, BLOCK) } else { (at, BLOCK - at) };
                            let data = vec![value; length as usize];
                            device.write(block * BLOCK + from, &data).unwrap();
                            if whole || model[block as usize].is_some() {
                                let old = model[block as usize].take().unwrap_or_default();
                                let mut new: Vec<u8> =
                                    if whole { vec![0; BLOCK as usize] } else { old };
                                new[from as usize..].copy_from_slice(&data);
                                model[block as usize] = Some(new);
                            } else {
                                let mut new = vec![9; BLOCK as usize];
                                new[from as usize..].copy_from_slice(&data);
                                model[block as usize] = Some(new);
                            }
                        } else {
                            let expected = match &model[block as usize] {
                                Some(content) => content[at as usize],
                                None => 9,
                            };
                            assert_eq!(
                                byte(&**device, block * BLOCK + at),
                                expected,
                                "seed {seed}"
                            );
                        }
                    }
                });
            }
            for block in order {
                device.arrive(block * BLOCK, &[9; BLOCK as usize]).unwrap();
            }
        });
        assert_eq!(handle.left(), 0);
    }
}

#[test]
fn what_arrives_gives_a_reader_more_time() {
    let begun = Instant::now();
    let second = Duration::from_secs(1);
    assert_eq!(deadline(begun, None, second), begun + second);
    let earlier = begun.checked_sub(second).unwrap();
    assert_eq!(deadline(begun, Some(earlier), second), begun + second);
    let later = begun + 5 * second;
    assert_eq!(deadline(begun, Some(later), second), later + second);
}

#[test]
fn what_was_said_to_fail_may_come_after_all() {
    let (device, handle) = Arriving::new(MemoryDevice::new(8192), Duration::ZERO);
    expect(&handle, 0..4096).unwrap();
    handle.fail(DeviceError::Closed);
    assert!(matches!(device.read(0, &mut [0]), Err(DeviceError::Closed)));
    handle.revive();
    assert!(matches!(
        device.read(0, &mut [0]),
        Err(DeviceError::Unavailable(_))
    ));
    device.arrive(0, &[1; 4096]).unwrap();
    device.read(0, &mut [0]).unwrap();
}

#[test]
fn who_waits_asks_anew_when_there_is_another_to_ask() {
    let (device, handle) = device(4 * BLOCK);
    expect(&handle, 0..BLOCK).unwrap();
    let (asked, asks) = mpsc::channel();
    handle.on_wait(move |range| asked.send(range).unwrap());
    let reader = {
        let device = Arc::clone(&device);
        std::thread::spawn(move || byte(&*device, 0))
    };
    let begun = Instant::now();
    assert_eq!(asks.recv().unwrap(), 0..BLOCK);
    for _ in 0..20 {
        handle.revive();
        assert_eq!(asks.recv().unwrap(), 0..BLOCK);
    }
    assert!(begun.elapsed() < 10 * ASK_AGAIN, "it asks at once");
    device.arrive(0, &[7; BLOCK as usize]).unwrap();
    assert_eq!(reader.join().unwrap(), 7);
}
