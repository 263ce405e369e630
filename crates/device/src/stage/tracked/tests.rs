use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::backend::MemoryDevice;
use crate::stage::Operation;
use crate::testing::{Cut, CutHow, Delay, Errors, Fault, When};

fn runs(dirty: &Dirty) -> Vec<Range<u64>> {
    dirty.runs().collect()
}

#[test]
fn it_keeps_the_contract() {
    crate::testing::contract(&|size| Box::new(Tracked::new(MemoryDevice::new(size), 4096).0));
}

#[test]
fn exactly_the_changes_since_the_mark_are_reported() {
    let (device, track) = Tracked::new(MemoryDevice::new(100_000), 4096);
    assert!(track.dirty_since_mark().is_empty());
    device.write(0, &[1; 10]).unwrap();
    track.mark();
    assert_eq!(runs(&track.dirty_since_mark()), []);
    device.write(4095, &[1; 2]).unwrap();
    device.write(99_999, &[1]).unwrap();
    device.trim(20_000, 1).unwrap();
    device
        .write_zeroes(40_960, 4096, Zeroes::default())
        .unwrap();
    device.write(50_000, &[]).unwrap();
    device.read(60_000, &mut [0; 10]).unwrap();
    let dirty = track.dirty_since_mark();
    let expected = [0..8192, 16_384..20_480, 40_960..45_056, 98_304..100_000];
    assert_eq!(runs(&dirty), expected);
    assert_eq!(dirty.bytes(), 8192 + 4096 + 4096 + 1696);
    assert!(dirty.contains(0) && dirty.contains(99_999) && !dirty.contains(8192));
    let taken = track.take();
    assert_eq!(taken, dirty);
    assert!(track.dirty_since_mark().is_empty());
    device.write(8192, &[1]).unwrap();
    track.put_back(taken);
    assert_eq!(runs(&track.dirty_since_mark())[0], 0..12_288);
}

#[test]
fn a_write_under_way_at_the_mark_is_before_it_and_after_it() {
    let timeout = Duration::from_secs(60);
    let (below, cut) = Cut::new(MemoryDevice::new(1 << 20), timeout);
    let (device, track) = Tracked::new(below, 4096);
    device.write(0, &[1; 512]).unwrap();
    cut.cut(CutHow::Hang);
    std::thread::scope(|scope| {
        let write = scope.spawn(|| device.write(8192, &[1; 512]));
        let start = Instant::now();
        while cut.hanging() != 1 {
            assert!(start.elapsed() < timeout);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(runs(&track.take()), [0..4096, 8192..12_288]);
        assert_eq!(
            runs(&track.dirty_since_mark()),
            std::slice::from_ref(&(8192..12_288))
        );
        track.mark();
        cut.heal();
        write.join().unwrap().unwrap();
    });
    assert_eq!(runs(&track.take()), std::slice::from_ref(&(8192..12_288)));
    assert!(track.take().is_empty());
    assert!(track.shared.state.lock().under_way.is_empty());
}

#[test]
fn a_failed_write_counts_and_one_outside_does_not() {
    let fault = Fault::on(Operation::Write, When::Always);
    let (below, _) = Errors::new(MemoryDevice::new(8192), 1, vec![fault]);
    let (device, track) = Tracked::new(below, 4096);
    assert!(device.write(8192, &[1]).is_err());
    assert!(track.dirty_since_mark().is_empty());
    assert!(device.write(0, &[1]).is_err());
    assert_eq!(runs(&track.take()), std::slice::from_ref(&(0..4096)));
    assert!(track.take().is_empty());
}

#[test]
fn a_huge_device_is_tracked_in_larger_blocks() {
    assert_eq!(block_for(0, 4096), 4096);
    assert_eq!(block_for(1 << 40, 4096), 4096);
    assert_eq!(block_for((1 << 40) + 1, 4096), 8192);
    assert_eq!(block_for(16 << 40, 4096), 64 << 10);
    assert_eq!(block_for(16 << 40, 1 << 20), 1 << 20);
    for size in [u64::MAX, u64::MAX / 3, 1, MAX_BLOCKS * 4096] {
        assert!(size.div_ceil(block_for(size, 1)) <= MAX_BLOCKS);
    }
}

#[test]
fn the_end_of_the_largest_device_is_reported_without_overflow() {
    let (size, block) = (u64::MAX, block_for(u64::MAX, 4096));
    let of = |blocks: &[u32]| Dirty {
        blocks: blocks.iter().copied().collect(),
        block,
        size,
    };
    let last = (MAX_BLOCKS - 1) as u32;
    let dirty = of(&[0, last - 1, last]);
    assert_eq!(runs(&dirty), [0..block, size - (2 * block - 1)..size]);
    assert_eq!(dirty.bytes(), 3 * block - 1);
    assert!(dirty.contains(u64::MAX - 1));
    let mut all = of(&[]);
    all.blocks.insert_range(0..=last);
    assert_eq!(all.bytes(), size);
}

#[test]
fn a_copy_that_follows_the_marks_ends_up_equal() {
    const SIZE: u64 = 1 << 20;
    // Slow enough for marks to find writes under way.
    let micros = Duration::from_micros(50);
    let memory = std::sync::Arc::new(MemoryDevice::new(SIZE));
    let below = Delay::new(std::sync::Arc::clone(&memory), micros, Duration::ZERO);
    let (device, track) = Tracked::new(below, 4096);
    let mut copy = vec![0; SIZE as usize];
    let follow = |copy: &mut Vec<u8>| {
        let dirty = track.take();
        for run in dirty.runs() {
            let range = run.start as usize..run.end as usize;
            // At once, before a write under way is done.
            memory.read(run.start, &mut copy[range]).unwrap();
        }
    };
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (device, stop) = (&device, &stop);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                // An end also when the test has failed.
                while !stop.load(Ordering::Relaxed) && start.elapsed() < Duration::from_secs(10) {
                    let at = random.u64(0..SIZE - 10_000);
                    let data = vec![random.u8(..); random.usize(1..10_000)];
                    match random.u8(0..8) {
                        0 => device.trim(at, data.len() as u64).unwrap(),
                        _ => device.write(at, &data).unwrap(),
                    }
                }
            });
        }
        while start.elapsed() < Duration::from_millis(300) {
            follow(&mut copy);
        }
        stop.store(true, Ordering::Relaxed);
    });
    follow(&mut copy);
    let mut now = vec![0; SIZE as usize];
    device.read(0, &mut now).unwrap();
    assert!(now == copy, "a change was missed");
    assert!(track.take().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn it_is_a_set(
        size in 1u64..20_000,
        block in 0u32..14,
        steps in proptest::collection::vec((0u8..6, any::<u64>(), 0u64..4000), 1..25),
    ) {
        let block = 1u64 << block;
        let (device, track) = Tracked::new(MemoryDevice::new(size), block as u32);
        let mut model = BTreeSet::new();
        for (what, at, length) in steps {
            let at = at % size;
            let length = length.min(size - at);
            match what {
                0 => device.write(at, &vec![1; length as usize]).unwrap(),
                1 => device.trim(at, length).unwrap(),
                2 => device.write_zeroes(at, length, Zeroes::default()).unwrap(),
                3 => {
                    let taken: BTreeSet<u64> = track.take().runs().flatten().collect();
                    prop_assert_eq!(&taken, &model);
                    model.clear();
                }
                _ => device.flush().unwrap(),
            }
            if what < 3 && length > 0 {
                let end = (at + length).next_multiple_of(block).min(size);
                model.extend(at / block * block..end);
            }
        }
        let dirty = track.dirty_since_mark();
        prop_assert_eq!(dirty.bytes(), model.len() as u64);
        let runs: Vec<_> = dirty.runs().collect();
        prop_assert!(runs.windows(2).all(|two| two[0].end < two[1].start));
        prop_assert_eq!(runs.into_iter().flatten().collect::<BTreeSet<u64>>(), model);
    }
}
