//! How pages are loaded: by faults, by calls, in the background; and what happens when the device fails.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, DeviceError};
use drover_device::backend::MemoryDevice;
use drover_frontend::region::{Options, Region};

use super::device::Probe;
use super::{PAGE, can, pattern, region};

/// An address that a thread may have.
#[derive(Clone, Copy)]
struct At(*const u8);
#[allow(unsafe_code)] // The pointer of a region is good in every thread.
// SAFETY: it is only read, while its region lives.
unsafe impl Send for At {}

impl At {
    #[allow(unsafe_code)] // What a program does with a region.
    fn touch(self, offset: usize) -> u8 {
        // SAFETY: inside the region, which lives and is only read.
        unsafe { self.0.add(offset).read_volatile() }
    }

    /// Hands a page to the kernel, for which a lost page is an error and not a signal.
    #[allow(unsafe_code)] // What a program does with a region.
    fn hand_over(self, offset: usize) -> std::io::Result<()> {
        let (_reader, mut writer) = std::io::pipe()?;
        // SAFETY: inside the region; the slice is not read here, only the address is handed on.
        let page = unsafe { std::slice::from_raw_parts(self.0.add(offset), PAGE) };
        writer.write_all(page)
    }
}

fn single_pages() -> Options {
    Options {
        prefetch: 0,
        ..Options::default()
    }
}

#[test]
fn touches_and_calls_see_the_bytes_of_the_device() {
    if !can("touches_and_calls_see_the_bytes_of_the_device") {
        return;
    }
    for (size, alignment) in [
        (1, 1),
        (PAGE, 1),
        (1_000_001, 1),
        (3 << 20, 65536),
        (1 << 20, 512),
    ] {
        let bytes = pattern(size, 1);
        let device = Arc::new(Probe::of(&bytes).aligned(alignment));
        let mut by_touch = region(&device, Options::default());
        assert_eq!(by_touch.len(), size);
        assert!(by_touch.hold()[..] == bytes, "{size} bytes by touch");
        let by_call = region(&device, Options::default());
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..50 {
            let start = random.usize(0..=size);
            let mut into = vec![0; random.usize(0..=size - start)];
            by_call.read_at(start as u64, &mut into).unwrap();
            assert!(
                into == bytes[start..start + into.len()],
                "{size} bytes by call"
            );
        }
        let beyond = by_call.read_at(size as u64, &mut [0]);
        assert!(matches!(beyond, Err(DeviceError::OutOfRange { .. })));
    }
}

#[test]
fn many_threads_read_at_once() {
    if !can("many_threads_read_at_once") {
        return;
    }
    let bytes = pattern(8 << 20, 3);
    let device = Arc::new(Probe::of(&bytes));
    let region = region(&device, Options::default());
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let (region, bytes) = (&region, &bytes);
            scope.spawn(move || {
                let at = At(region.as_ptr());
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..2000 {
                    let offset = random.usize(0..bytes.len() - 100);
                    assert_eq!(at.touch(offset), bytes[offset]);
                    let mut into = [0; 100];
                    region.read_at(offset as u64, &mut into).unwrap();
                    assert_eq!(into, bytes[offset..offset + 100]);
                }
            });
        }
    });
    // Nothing is read twice.
    let mut reads = device.reads.lock().clone();
    reads.sort_by_key(|read| read.start);
    assert!(reads.windows(2).all(|pair| pair[0].end <= pair[1].start));
}

#[test]
fn threads_that_touch_one_page_share_one_read() {
    if !can("threads_that_touch_one_page_share_one_read") {
        return;
    }
    let bytes = pattern(1 << 20, 4);
    let device = Arc::new(Probe::of(&bytes));
    device.shut();
    let region = region(&device, Options::default());
    std::thread::scope(|scope| {
        let at = At(region.as_ptr());
        let threads: Vec<_> = (0..16)
            .map(|number| {
                let region = &region;
                scope.spawn(move || match number % 2 {
                    0 => { at }.touch(5 * PAGE + number),
                    _ => {
                        let mut byte = [0];
                        region
                            .read_at((5 * PAGE + number) as u64, &mut byte)
                            .unwrap();
                        byte[0]
                    }
                })
            })
            .collect();
        let until = Instant::now() + Duration::from_secs(60);
        while region.stats().faults < 8 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        device.open();
        for (number, thread) in threads.into_iter().enumerate() {
            assert_eq!(thread.join().unwrap(), bytes[5 * PAGE + number]);
        }
    });
    assert_eq!(device.read_count(), 1, "{:?}", device.reads.lock());
}

#[test]
fn faults_are_served_at_the_same_time() {
    if !can("faults_are_served_at_the_same_time") {
        return;
    }
    let bytes = pattern(4 << 20, 5);
    let device = Arc::new(Probe::of(&bytes));
    device.shut();
    let region = region(&device, single_pages());
    std::thread::scope(|scope| {
        for number in 0..16 {
            let (at, bytes) = (At(region.as_ptr()), &bytes);
            let offset = number * 50 * PAGE;
            scope.spawn(move || assert_eq!({ at }.touch(offset), bytes[offset]));
        }
        let until = Instant::now() + Duration::from_secs(60);
        while device.read_count() < 16 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Before any of them was done.
        let together = device.read_count();
        device.open();
        assert_eq!(together, 16);
    });
    assert_eq!(device.read_count(), 16);
}

#[test]
fn holes_are_zeros_without_a_read_or_memory() {
    if !can("holes_are_zeros_without_a_read_or_memory") {
        return;
    }
    let device = Arc::new(Probe::new(MemoryDevice::new(64 << 20)));
    device.inner.write(32 << 20, &[9; 10]).unwrap();
    let mut region = region(&device, Options::default());
    let held = region.hold();
    // Prefetch would go on to where there is data.
    assert!(held[..16 << 20].iter().all(|byte| *byte == 0));
    assert!(device.reads.lock().is_empty());
    assert_eq!(held[32 << 20..][..11], [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 0]);
    assert_eq!(held[(64 << 20) - 1], 0);
    drop(held);
    let stats = region.stats();
    assert!(stats.zero_bytes >= 16 << 20, "{stats:?}");
    // What the device knows as data is 64 KiB.
    assert!(stats.bytes_read <= 64 << 10, "{stats:?}");
}

#[test]
fn what_a_touch_sees_is_counted_by_then() {
    if !can("what_a_touch_sees_is_counted_by_then") {
        return;
    }
    const PAGES: usize = 20_000;
    let holes = Arc::new(Probe::new(MemoryDevice::new((PAGES * PAGE) as u64)));
    let region_of_holes = region(&holes, single_pages());
    let at = At(region_of_holes.as_ptr());
    for page in 0..PAGES {
        assert_eq!(at.touch(page * PAGE), 0);
        let stats = region_of_holes.stats();
        assert_eq!(stats.zero_bytes, ((page + 1) * PAGE) as u64, "{stats:?}");
    }
    let bytes = pattern(1000 * PAGE, 14);
    let region_of_data = region(&Arc::new(Probe::of(&bytes)), single_pages());
    let at = At(region_of_data.as_ptr());
    for page in 0..1000 {
        assert_eq!(at.touch(page * PAGE), bytes[page * PAGE]);
        let stats = region_of_data.stats();
        assert_eq!(stats.bytes_read, ((page + 1) * PAGE) as u64, "{stats:?}");
        assert_eq!(stats.device_reads, page as u64 + 1, "{stats:?}");
        assert_eq!(stats.faults, page as u64 + 1, "{stats:?}");
    }
}

/// Touches of every page from `first` on, and the reads that they cost.
fn reads_of(options: Options, pages: impl Iterator<Item = usize>) -> (usize, u64) {
    let bytes = pattern(16 << 20, 6);
    let device = Arc::new(Probe::of(&bytes));
    let region = region(&device, options);
    let at = At(region.as_ptr());
    for page in pages {
        assert_eq!(at.touch(page * PAGE), bytes[page * PAGE]);
    }
    let stats = region.stats();
    assert_eq!(stats.device_reads as usize, device.read_count());
    (device.read_count(), stats.bytes_read)
}

#[test]
fn who_reads_on_is_fetched_for_and_who_jumps_is_not() {
    if !can("who_reads_on_is_fetched_for_and_who_jumps_is_not") {
        return;
    }
    assert_eq!(reads_of(single_pages(), 0..4096).0, 4096);
    let (reads, _) = reads_of(Options::default(), 0..4096);
    assert!(reads < 60, "{reads} reads of 16 MiB");
    let mut random = fastrand::Rng::with_seed(7);
    let mut seen = std::collections::BTreeSet::new();
    let pages: Vec<_> = (0..200)
        .map(|_| random.usize(0..4096))
        .filter(|page| seen.insert(*page))
        .collect();
    let count = pages.len();
    let (reads, read) = reads_of(Options::default(), pages.into_iter());
    assert!(reads >= count * 9 / 10, "{reads} reads for {count} pages");
    assert!(
        read < 2 * (count * PAGE) as u64,
        "{read} bytes for {count} pages"
    );
}

#[test]
fn the_device_gets_prefetch_hints() {
    if !can("the_device_gets_prefetch_hints") {
        return;
    }
    let device = Arc::new(Probe::of(&pattern(4 << 20, 13)));
    let region = region(&device, Options::default());
    let at = At(region.as_ptr());
    (0..1024).for_each(|page| _ = at.touch(page * PAGE));
    let advice = device.advice.lock();
    assert!(
        advice.windows(2).all(|pair| pair[0].start < pair[1].start),
        "{advice:?}"
    );
    assert!(
        advice.iter().all(|range| range.end <= 4 << 20),
        "{advice:?}"
    );
    // Each is announced before it is read.
    assert!(
        advice
            .first()
            .is_some_and(|range| range.start < 10 * PAGE as u64),
        "{advice:?}"
    );
    assert!(
        advice.last().is_some_and(|range| range.end == 4 << 20),
        "{advice:?}"
    );
}

#[test]
fn a_region_fills_itself_and_faults_overtake() {
    if !can("a_region_fills_itself_and_faults_overtake") {
        return;
    }
    let bytes = pattern(16 << 20, 8);
    let device = Arc::new(Probe::of(&bytes));
    device.shut();
    let options = Options {
        populate: true,
        ..Options::default()
    };
    let mut region = region(&device, options);
    let (at, last) = (At(region.as_ptr()), bytes.len() - 1);
    let touched = std::thread::spawn(move || { at }.touch(last));
    // The last page is requested while the populating thread waits for the first ones.
    let until = Instant::now() + Duration::from_secs(60);
    let is_last = |read: &Range<u64>| read.contains(&(last as u64));
    while !device.reads.lock().iter().any(is_last) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let reads = device.reads.lock().clone();
    device.open();
    assert_eq!(touched.join().unwrap(), bytes[last]);
    assert!(reads.iter().any(is_last), "{reads:?}");
    let before: u64 = reads.iter().map(|read| read.end - read.start).sum();
    assert!(before < 8 << 20, "{before} bytes were asked for first");
    let until = Instant::now() + Duration::from_secs(60);
    while region.stats().resident_bytes < bytes.len() as u64 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
    let (faults, reads) = (region.stats().faults, device.read_count());
    assert!(region.hold()[..] == bytes);
    assert_eq!(region.stats().faults, faults);
    assert_eq!(device.read_count(), reads);
}

#[test]
fn what_the_device_does_not_give_is_an_error_for_calls_and_a_lost_page_for_touches() {
    if !can("what_the_device_does_not_give_is_an_error_for_calls_and_a_lost_page_for_touches") {
        return;
    }
    let bytes = pattern(1 << 20, 9);
    let device = Arc::new(Probe::of(&bytes));
    let bad = 40 * PAGE as u64..41 * PAGE as u64;
    let corrupt = DeviceError::Corrupt("block 40".into());
    *device.bad.lock() = Some((bad, corrupt));
    let region = region(&device, Options::default());
    let at = At(region.as_ptr());
    let mut page = [0; PAGE];
    let result = region.read_at(40 * PAGE as u64, &mut page);
    assert!(
        matches!(&result, Err(DeviceError::Corrupt(what)) if what == "block 40"),
        "{result:?}"
    );
    // Its neighbours are not lost with it, whichever fetch they were in.
    for index in (30..40).chain(41..60) {
        assert_eq!(at.touch(index * PAGE), bytes[index * PAGE]);
    }
    let lost = at.hand_over(40 * PAGE).unwrap_err();
    assert_eq!(
        lost.raw_os_error(),
        Some(rustix::io::Errno::FAULT.raw_os_error())
    );
    assert_eq!(region.stats().failed_pages, 1);
    assert!(region.prefault(40 * PAGE as u64, 1).is_err());
    // The medium is well again: a call heals the page, for touches too.
    *device.bad.lock() = None;
    region.read_at(40 * PAGE as u64, &mut page).unwrap();
    assert_eq!(page, bytes[40 * PAGE..41 * PAGE]);
    at.hand_over(40 * PAGE).unwrap();
    assert_eq!(at.touch(40 * PAGE), bytes[40 * PAGE]);
}

#[test]
fn a_touch_waits_for_a_device_that_is_away() {
    if !can("a_touch_waits_for_a_device_that_is_away") {
        return;
    }
    let bytes = pattern(1 << 20, 10);
    let device = Arc::new(Probe::of(&bytes));
    let away = DeviceError::Unavailable("the link is down".into());
    *device.bad.lock() = Some((0..u64::MAX, away));
    let patient = |timeout| {
        let options = Options {
            timeout,
            ..Options::default()
        };
        region(&device, options)
    };
    let waiting = patient(Duration::from_secs(120));
    let at = At(waiting.as_ptr());
    let waits = std::thread::spawn(move || { at }.touch(3 * PAGE));
    let until = Instant::now() + Duration::from_secs(60);
    while device.read_count() < 2 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!waits.is_finished());
    assert!(device.read_count() > 1, "it is tried again");
    *device.bad.lock() = None;
    assert_eq!(waits.join().unwrap(), bytes[3 * PAGE]);
    drop(waiting);
    // But not for ever.
    let away = DeviceError::Unavailable("the link is down".into());
    *device.bad.lock() = Some((0..u64::MAX, away));
    let timeout = Duration::from_millis(400);
    let gives_up = patient(timeout);
    let began = Instant::now();
    assert!(At(gives_up.as_ptr()).hand_over(100 * PAGE).is_err());
    let waited = began.elapsed();
    assert!(waited >= timeout, "{waited:?}");
}

#[test]
fn a_region_that_goes_away_lets_go_of_who_waits() {
    if !can("a_region_that_goes_away_lets_go_of_who_waits") {
        return;
    }
    let device = Arc::new(Probe::of(&pattern(1 << 20, 11)));
    device.shut();
    let region = Arc::new(region(&device, Options::default()));
    let at = At(region.as_ptr());
    let touches = std::thread::spawn(move || { at }.hand_over(9 * PAGE));
    let waited_for = |count| {
        let until = Instant::now() + Duration::from_secs(60);
        while device.read_count() < count && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    waited_for(1);
    let calls = {
        let region: Arc<Region> = region.clone();
        std::thread::spawn(move || region.read_at(9 * PAGE as u64, &mut [0; 10]))
    };
    std::thread::sleep(Duration::from_millis(50));
    region.close();
    // The device does not answer yet.
    assert!(touches.join().unwrap().is_err());
    assert!(matches!(calls.join().unwrap(), Err(DeviceError::Closed)));
    assert!(matches!(
        region.read_at(0, &mut [0]),
        Err(DeviceError::Closed)
    ));
    // A thread is still inside the device: dropping the region waits for it, but has an end.
    let open = device.clone();
    let opens = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        open.open();
    });
    drop(region);
    opens.join().unwrap();
}

#[test]
fn a_region_keeps_to_its_limit() {
    if !can("a_region_keeps_to_its_limit") {
        return;
    }
    let bytes = pattern(32 << 20, 12);
    let device = Arc::new(Probe::of(&bytes));
    let options = Options {
        limit: Some(4 << 20),
        ..Options::default()
    };
    let region = region(&device, options);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = 0;
            while !stop.load(Ordering::SeqCst) {
                most = most.max(region.stats().resident_bytes);
                std::thread::sleep(Duration::from_micros(100));
            }
            most
        });
        let readers: Vec<_> = (0..3)
            .map(|seed| {
                let (region, bytes) = (&region, &bytes);
                scope.spawn(move || {
                    let at = At(region.as_ptr());
                    let mut random = fastrand::Rng::with_seed(seed);
                    let mut into = vec![0; 300_000];
                    for _ in 0..60 {
                        let offset = random.usize(0..bytes.len() - into.len());
                        region.read_at(offset as u64, &mut into).unwrap();
                        assert!(into == bytes[offset..offset + into.len()]);
                        let offset = random.usize(0..bytes.len());
                        assert_eq!(at.touch(offset), bytes[offset]);
                    }
                })
            })
            .collect();
        for reader in readers {
            reader.join().unwrap();
        }
        stop.store(true, Ordering::SeqCst);
        let most = watcher.join().unwrap();
        // What is under way may stand above it.
        assert!(most < 10 << 20, "{most} bytes in memory");
    });
    assert!(region.stats().evicted_bytes > 4 << 20);
}
