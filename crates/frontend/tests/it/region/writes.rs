//! Writes: tracked, pushed, evicted.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::DeviceError;
use drover_device::backend::MemoryDevice;
use drover_frontend::region::{Options, Region, RegionError};

use super::device::Probe;
use super::{PAGE, can, pattern, region, writable};

/// The bytes of pages.
fn pages(runs: &[Range<u64>]) -> Vec<Range<u64>> {
    runs.iter().cloned().flat_map(run).collect()
}

fn run(pages: Range<u64>) -> Vec<Range<u64>> {
    let page = PAGE as u64;
    std::iter::once(pages.start * page..pages.end * page).collect()
}

#[test]
fn writes_are_tracked_to_the_page() {
    if !can("writes_are_tracked_to_the_page") {
        return;
    }
    // Half of it data, half of it holes.
    let device = Arc::new(Probe::new(MemoryDevice::new(4 << 20)));
    device.inner_write(0, &pattern(2 << 20, 1));
    let mut region = region(&device, writable());
    assert_eq!(region.dirty_since_mark(true).unwrap(), []);
    // Reads leave no trace, of data and of holes.
    assert_eq!(
        region.hold().iter().filter(|byte| **byte == 0).count() >> 20,
        2
    );
    assert_eq!(region.dirty_since_mark(true).unwrap(), []);
    region.write_at(5 * PAGE as u64 + 17, &[1]).unwrap();
    region.write_at(8 * PAGE as u64 - 1, &[1, 2]).unwrap();
    region.write_at(700 * PAGE as u64, &[3]).unwrap();
    region.hold().bytes_mut().unwrap()[1000 * PAGE + 5] = 4;
    let written = pages(&[5..6, 7..9, 700..701, 1000..1001]);
    assert_eq!(region.dirty_since_mark(false).unwrap(), written);
    assert_eq!(region.dirty_since_mark(false).unwrap(), written);
    // A push has its own account.
    let pushed = region.push().unwrap();
    assert_eq!(pushed.bytes, 5 * PAGE as u64);
    assert_eq!(*device.writes.lock(), written);
    assert_eq!(device.flushes.load(Ordering::SeqCst), 1);
    assert_eq!(region.dirty_since_mark(true).unwrap(), written);
    assert_eq!(region.dirty_since_mark(true).unwrap(), []);
    assert_eq!(region.push().unwrap().bytes, 0);
    // Written again, seen again.
    region.write_at(700 * PAGE as u64, &[5]).unwrap();
    assert_eq!(region.dirty_since_mark(true).unwrap(), run(700..701));
    assert_eq!(region.push().unwrap().writes, 1);
    assert!(region.hold()[..] == device.content());
}

impl Probe {
    fn inner_write(&self, offset: u64, data: &[u8]) {
        drover_core::BlockDevice::write(&self.inner, offset, data).expect("a memory device");
    }
}

#[test]
fn pages_written_before_they_came_are_not_fetched() {
    if !can("pages_written_before_they_came_are_not_fetched") {
        return;
    }
    let device = Arc::new(Probe::of(&pattern(1 << 20, 2)));
    let region = region(&device, writable());
    let data = pattern(20 * PAGE, 3);
    region.write_at(10 * PAGE as u64, &data).unwrap();
    assert_eq!(device.read_count(), 0);
    assert_eq!(region.dirty_since_mark(false).unwrap(), run(10..30));
    // Half a page is.
    region.write_at(100 * PAGE as u64 + 1, &[1]).unwrap();
    assert_eq!(device.read_count(), 1);
    region.push().unwrap();
    assert!(device.content()[10 * PAGE..30 * PAGE] == data);
}

/// Random calls of several threads, each in pages of its own, against a vector.
#[test]
fn random_work_of_several_threads_ends_as_the_model() {
    if !can("random_work_of_several_threads_ends_as_the_model") {
        return;
    }
    for (seed, alignment) in [(1, 1), (2, 1), (3, 65536), (4, 512)] {
        let device = Arc::new(Probe::new(MemoryDevice::new(8 << 20)).aligned(alignment));
        let mut start = vec![0; 8 << 20];
        start[2 << 20..6 << 20].copy_from_slice(&pattern(4 << 20, seed));
        device.inner_write(2 << 20, &start[2 << 20..6 << 20]);
        let region = region(
            &device,
            Options {
                populate: seed % 2 == 0,
                ..writable()
            },
        );
        // Neighbours write different bytes of the same pages.
        let share = start.len() / 4 + 1;
        std::thread::scope(|scope| {
            for (number, model) in start.chunks_mut(share).enumerate() {
                let region = &region;
                scope.spawn(move || {
                    work(region, number * share, model, seed * 100 + number as u64);
                });
            }
        });
        let mut all = vec![0; start.len()];
        region.read_at(0, &mut all).unwrap();
        assert!(all == start, "seed {seed}: the region is not as the model");
        region.push().unwrap();
        assert!(
            device.content() == start,
            "seed {seed}: the device is not as the model"
        );
    }
}

fn work(region: &Region, base: usize, model: &mut [u8], seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for step in 0..250 {
        let offset = random.usize(0..model.len());
        let length = random.usize(0..=(model.len() - offset).min(100_000));
        let (at, range) = ((base + offset) as u64, offset..offset + length);
        match random.u8(0..10) {
            0..4 => {
                let data = pattern(length, random.u64(..));
                region.write_at(at, &data).unwrap();
                model[range].copy_from_slice(&data);
            }
            4..8 => {
                let mut into = vec![0; length];
                region.read_at(at, &mut into).unwrap();
                assert!(
                    into == model[range],
                    "seed {seed}, step {step}: {length} bytes at {at}"
                );
            }
            8 => drop(region.evict(at, length as u64).unwrap()),
            _ if step % 5 == 0 => drop(region.push().unwrap()),
            _ => drop(region.dirty_since_mark(random.bool()).unwrap()),
        }
    }
}

/// A writer through the pointer, which never stands still.
#[test]
fn a_push_beside_a_writer_loses_no_write() {
    if !can("a_push_beside_a_writer_loses_no_write") {
        return;
    }
    let device = Arc::new(Probe::of(&pattern(2 << 20, 5)));
    let region = region(&device, writable());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        let words = Words(region.as_mut_ptr().unwrap());
        let (region, stop) = (&region, &stop);
        scope.spawn(move || {
            let mut random = fastrand::Rng::with_seed(6);
            while !stop.load(Ordering::SeqCst) {
                words.set(random.usize(0..(2 << 20) / 8), random.u64(..));
            }
        });
        let until = Instant::now() + Duration::from_secs(60);
        let mut not_empty = 0;
        while not_empty < 30 && Instant::now() < until {
            not_empty += u64::from(region.push().unwrap().bytes > 0);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(not_empty > 5, "{not_empty}");
    });
    region.push().unwrap();
    let mut now = vec![0; 2 << 20];
    region.read_at(0, &mut now).unwrap();
    assert!(device.content() == now);
}

/// Ends what the other threads of a test do, also when it fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[derive(Clone, Copy)]
struct Words(*mut u8);
#[allow(unsafe_code)] // The pointer of a region is good in every thread.
// SAFETY: it is only used while its region lives, by atomic words.
unsafe impl Send for Words {}

impl Words {
    #[allow(unsafe_code)] // What a program does with a region.
    fn get(self, word: usize) -> u64 {
        // SAFETY: inside the region and aligned.
        unsafe { AtomicU64::from_ptr(self.0.add(word * 8).cast()).load(Ordering::Relaxed) }
    }

    #[allow(unsafe_code)] // What a program does with a region.
    fn set(self, word: usize, value: u64) {
        // SAFETY: inside the region and aligned; others read it as atomic words.
        unsafe { AtomicU64::from_ptr(self.0.add(word * 8).cast()).store(value, Ordering::Relaxed) }
    }
}

/// Pages leave memory and come back while a writer, who knows what it wrote, reads and writes them.
#[test]
fn eviction_beside_a_writer_loses_no_write() {
    if !can("eviction_beside_a_writer_loses_no_write") {
        return;
    }
    let device = Arc::new(Probe::of(&vec![0; 256 * PAGE]));
    let region = region(&device, writable());
    if !region.support().moves {
        eprintln!("SKIP eviction_beside_a_writer_loses_no_write: the kernel cannot move pages");
        return;
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        let words = Words(region.as_mut_ptr().unwrap());
        let stop = &stop;
        let writer = scope.spawn(move || {
            let mut random = fastrand::Rng::with_seed(8);
            let mut model = vec![0; 256 * PAGE / 8];
            while !stop.load(Ordering::SeqCst) {
                // Few words of many pages: most pages are clean at most times.
                let word = random.usize(0..256) * PAGE / 8 + random.usize(0..2);
                assert_eq!(words.get(word), model[word], "word {word}");
                if random.u8(..) < 64 {
                    model[word] = random.u64(..);
                    words.set(word, model[word]);
                }
            }
            model
        });
        let (few, many) = (20 * PAGE as u64, 20_000 * PAGE as u64);
        let begun = Instant::now();
        // A busy machine gets less far, and gets more time for the least.
        let goes_on = |evicted| match begun.elapsed().as_secs() {
            0..2 => evicted < many,
            2..60 => evicted <= few,
            _ => false,
        };
        let mut evicted = 0;
        while goes_on(evicted) && !writer.is_finished() {
            region.push().unwrap();
            evicted += region.evict(0, 256 * PAGE as u64).unwrap();
        }
        stop.store(true, Ordering::SeqCst);
        let model = writer.join().expect("the writer found what it had written");
        assert!(evicted > few, "{evicted}");
        region.push().unwrap();
        let content = device.content();
        let now = content
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
        assert!(now.eq(model));
    });
}

/// Writers keep all words equal but for the moment of a round: what a paused push leaves on the device shows no
/// moment between.
#[test]
fn a_paused_push_is_one_moment() {
    if !can("a_paused_push_is_one_moment") {
        return;
    }
    let device = Arc::new(Probe::of(&vec![0; 100 * PAGE]));
    let region = region(&device, writable());
    let gate = parking_lot::Mutex::new(());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        let words = Words(region.as_mut_ptr().unwrap());
        let (gate, stop) = (&gate, &stop);
        scope.spawn(move || {
            let mut round = 0;
            while !stop.load(Ordering::SeqCst) {
                round += 1;
                let _round = gate.lock();
                (0..100).for_each(|page| words.set(page * PAGE / 8, round));
                drop(_round);
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        let mut last = 0;
        let until = Instant::now() + Duration::from_secs(60);
        let mut seen = std::collections::BTreeSet::new();
        while seen.len() < 20 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            let held = std::cell::Cell::new(None);
            let pause = || held.set(Some(gate.lock()));
            let resume = || drop(held.take());
            let pushed = region.push_with(pause, resume).unwrap();
            assert!(pushed.paused > Duration::ZERO);
            let content = device.content();
            let rounds: Vec<_> = (0..100)
                .map(|page| content[page * PAGE..][..8].try_into().unwrap())
                .map(u64::from_ne_bytes)
                .collect();
            assert!(rounds.iter().all(|round| *round == rounds[0]), "{rounds:?}");
            assert!(rounds[0] >= last, "{} after {last}", rounds[0]);
            last = rounds[0];
            seen.insert(last);
        }
        assert!(seen.len() > 5, "{seen:?}");
    });
}

#[test]
fn what_a_failed_push_left_the_next_one_writes() {
    if !can("what_a_failed_push_left_the_next_one_writes") {
        return;
    }
    let device = Arc::new(Probe::of(&pattern(1 << 20, 7)));
    let region = region(&device, writable());
    region.write_at(0, &[1; 3]).unwrap();
    region.write_at(500_000, &[2; 3]).unwrap();
    device.fail_writes.store(true, Ordering::SeqCst);
    assert!(matches!(region.push(), Err(DeviceError::Unavailable(_))));
    // What is not on the device stays in memory.
    region.evict(0, 1 << 20).unwrap();
    let (paused, resumed) = (AtomicU64::new(0), AtomicU64::new(0));
    let count = |counter: &AtomicU64| {
        counter.fetch_add(1, Ordering::SeqCst);
    };
    let result = region.push_with(|| count(&paused), || count(&resumed));
    assert!(result.is_err());
    assert_eq!(paused.into_inner(), resumed.into_inner());
    device.fail_writes.store(false, Ordering::SeqCst);
    assert_eq!(region.push().unwrap().bytes, 2 * PAGE as u64);
    let content = device.content();
    assert_eq!((content[2], content[500_002]), (1, 2));
    assert_eq!(region.evict(0, 1 << 20).unwrap() as usize % PAGE, 0);
    let mut now = [0; 3];
    region.read_at(500_000, &mut now).unwrap();
    assert_eq!(now, [2; 3]);
}

#[test]
fn what_was_a_hole_comes_back_as_what_was_pushed() {
    if !can("what_was_a_hole_comes_back_as_what_was_pushed") {
        return;
    }
    let device = Arc::new(Probe::new(MemoryDevice::new(1 << 20)));
    let region = region(&device, writable());
    let mut page = [1; PAGE];
    region.read_at(0, &mut page).unwrap();
    assert_eq!(page, [0; PAGE]);
    region.write_at(100, b"here").unwrap();
    region.push().unwrap();
    assert!(region.evict(0, 1 << 20).unwrap() >= PAGE as u64);
    region.read_at(0, &mut page).unwrap();
    assert_eq!(page[100..104], *b"here");
    assert_eq!(device.read_count(), 1);
}

#[test]
fn what_cannot_be_is_said() {
    if !can("what_cannot_be_is_said") {
        return;
    }
    let device = Arc::new(MemoryDevice::new(1 << 20));
    let only_read = region(&device, Options::default());
    assert!(matches!(
        only_read.write_at(0, &[1]),
        Err(DeviceError::ReadOnly)
    ));
    assert!(matches!(only_read.push(), Err(DeviceError::ReadOnly)));
    assert!(matches!(
        only_read.dirty_since_mark(true),
        Err(DeviceError::ReadOnly)
    ));
    assert!(only_read.as_mut_ptr().is_none());
    let empty = Region::new(Arc::new(MemoryDevice::new(0)), Options::default());
    assert!(matches!(empty, Err(RegionError::Size(0))));
    let coarse = Probe::new(MemoryDevice::new(1 << 30)).aligned(1 << 30);
    let coarse = Region::new(Arc::new(coarse), Options::default());
    assert!(matches!(coarse, Err(RegionError::Alignment { .. })));
    let tight = Options {
        limit: Some(1),
        ..Options::default()
    };
    assert!(matches!(
        Region::new(device, tight),
        Err(RegionError::Options(_))
    ));
}
