use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::*;
use drover_storage::{FakeDirectory, HostDirectory, Operation};

const CHUNK: u32 = 4096;

fn shape(size: u64) -> Shape {
    Shape { size, chunk: CHUNK }
}

fn few(most_open: usize) -> DirectoryOptions {
    DirectoryOptions {
        most_open,
        ..DirectoryOptions::default()
    }
}

fn create(fake: &FakeDirectory, size: u64) -> DirectoryDevice {
    DirectoryDevice::create(Arc::new(fake.clone()), shape(size), few(4)).unwrap()
}

fn open(fake: &FakeDirectory) -> Result<DirectoryDevice, DeviceError> {
    DirectoryDevice::open(Arc::new(fake.clone()), few(4))
}

fn read(device: &dyn BlockDevice, offset: u64, length: usize) -> Vec<u8> {
    let mut buffer = vec![0xA5; length];
    device.read(offset, &mut buffer).unwrap();
    buffer
}

/// A device in a directory of the host that goes with it.
struct OnHost {
    device: DirectoryDevice,
    _dir: tempfile::TempDir,
}

fn on_host(size: u64, most_open: usize) -> OnHost {
    let dir = tempfile::tempdir().unwrap();
    let directory = Arc::new(HostDirectory::open(dir.path()).unwrap());
    OnHost {
        device: DirectoryDevice::create(directory, shape(size), few(most_open)).unwrap(),
        _dir: dir,
    }
}

#[test]
fn it_keeps_the_contract() {
    crate::testing::contract(&|size| {
        // The fake takes time for every file that there is.
        let chunk = 64 << 10;
        let fake = Arc::new(FakeDirectory::default());
        Box::new(DirectoryDevice::create(fake, Shape { size, chunk }, few(4)).unwrap())
    });
    for (seed, size) in [(11, 70_001), (12, 8192)] {
        // As many as there are chunks, or nearly: a disk takes its time to sync each one that is closed.
        let host = on_host(size, 20);
        crate::testing::run(&host.device, seed);
        assert!(host.device.open_files() <= 20);
    }
}

#[test]
fn it_is_there_again_when_it_is_opened_again() {
    let fake = FakeDirectory::default();
    let device = create(&fake, 70_001);
    device.write(4000, &[7; 200]).unwrap();
    device.write(70_000, &[8]).unwrap();
    drop(device);
    let device = open(&fake).unwrap();
    assert_eq!(device.shape(), shape(70_001));
    assert_eq!(device.present(), 3);
    assert_eq!(read(&device, 4000, 200), [7; 200]);
    assert_eq!(read(&device, 69_999, 2), [0, 8]);
    assert_eq!(fake.bytes("00000011.chunk").unwrap().len(), 369);
    device.trim(0, 8192).unwrap();
    assert_eq!(device.present(), 1);
    assert_eq!(fake.bytes("00000000.chunk"), None);
}

#[test]
fn reads_make_no_files_and_zeros_take_them_away() {
    let device = create(&FakeDirectory::default(), 1 << 20);
    assert_eq!(read(&device, 100, 50_000), [0; 50_000]);
    assert_eq!(device.present(), 0);
    device.write(0, &[1; 16384]).unwrap();
    assert_eq!(device.present(), 4);
    device.write_zeroes(100, 8192, Zeroes::default()).unwrap();
    assert_eq!(device.present(), 3);
    let kept = Zeroes {
        keep_allocated: true,
        only_fast: false,
    };
    device.write_zeroes(20_480, 4096, kept).unwrap();
    assert_eq!(device.present(), 4);
    let fast = Zeroes {
        keep_allocated: true,
        only_fast: true,
    };
    let refused = device.write_zeroes(0, 4096, fast);
    assert!(matches!(refused, Err(DeviceError::Unsupported(_))));
}

#[test]
fn no_more_files_are_open_than_there_may_be_and_those_that_close_are_durable() {
    let fake = FakeDirectory::default();
    let device = create(&fake, 1 << 20);
    for round in 1..4u8 {
        for chunk in 0..64u64 {
            device.write(chunk * 4096, &[round; 100]).unwrap();
            assert!(device.open_files() <= 4);
        }
    }
    device.flush().unwrap();
    let after = open(&fake.after_crash(1)).unwrap();
    for chunk in 0..64u64 {
        assert_eq!(read(&after, chunk * 4096, 101)[..100], [3; 100]);
    }
}

#[test]
fn one_opens_it_for_writing_or_many_for_reading() {
    let fake = FakeDirectory::default();
    let device = create(&fake, 1 << 20);
    device.write(0, &[1; 10]).unwrap();
    let second = open(&fake);
    assert!(
        matches!(second, Err(DeviceError::Unavailable(_))),
        "{second:?}"
    );
    drop(device);
    let read_only = DirectoryOptions {
        read_only: true,
        ..few(4)
    };
    let one = DirectoryDevice::open(Arc::new(fake.clone()), read_only).unwrap();
    let two = DirectoryDevice::open(Arc::new(fake.clone()), read_only).unwrap();
    assert!(open(&fake).is_err());
    assert_eq!(read(&two, 0, 10), [1; 10]);
    for result in [
        one.write(0, &[1]),
        one.trim(0, 1),
        one.write_zeroes(0, 1, Zeroes::default()),
    ] {
        assert!(matches!(result, Err(DeviceError::ReadOnly)), "{result:?}");
    }
    one.flush().unwrap();
}

/// A directory's read-only view, taken away at the end.
struct ReadOnlyView(tempfile::TempDir);

impl ReadOnlyView {
    fn of(path: &std::path::Path) -> Option<Self> {
        let view = Self(tempfile::tempdir().unwrap());
        let mut mount = std::process::Command::new("mount");
        mount
            .args(["--bind", "-o", "ro"])
            .args([path, view.0.path()]);
        let mounted = mount.output().is_ok_and(|ran| ran.status.success());
        // An old `mount` needs two calls for a view that takes no writes.
        let read_only = std::fs::write(view.0.path().join("probe"), "").is_err();
        (mounted && read_only).then_some(view)
    }
}

impl Drop for ReadOnlyView {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg(self.0.path())
            .output();
    }
}

#[test]
fn a_read_only_file_system_is_enough_for_who_reads() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &std::path::Path, read_only| {
        let options = DirectoryOptions {
            read_only,
            ..DirectoryOptions::default()
        };
        DirectoryDevice::open(Arc::new(HostDirectory::open(path).unwrap()), options)
    };
    let made = HostDirectory::open(dir.path()).unwrap();
    let device = DirectoryDevice::create(Arc::new(made), shape(1 << 20), few(4)).unwrap();
    device.write(5000, &[7; 10]).unwrap();
    device.flush().unwrap();
    let Some(view) = ReadOnlyView::of(dir.path()) else {
        eprintln!(
            "SKIP a_read_only_file_system_is_enough_for_who_reads: no read-only bind mount here"
        );
        return;
    };
    // The lock is one and the same.
    let shut_out = open(view.0.path(), true).err();
    assert!(
        matches!(shut_out, Some(DeviceError::Unavailable(_))),
        "{shut_out:?}"
    );
    drop(device);
    let reader = open(view.0.path(), true).unwrap();
    assert_eq!(read(&reader, 5000, 10), [7; 10]);
    assert!(open(dir.path(), false).is_err());
    drop(reader);
    assert!(open(view.0.path(), false).is_err());
}

#[test]
fn damage_is_an_error_that_names_the_file() {
    let fake = FakeDirectory::default();
    let device = create(&fake, 20_000);
    device.write(0, &[1; 20_000]).unwrap();
    drop(device);
    fake.put("00000001.chunk", &[1; 4000]);
    let device = open(&fake).unwrap();
    let error = device.read(4096, &mut [0; 10]).unwrap_err();
    assert!(matches!(error, DeviceError::Corrupt(_)), "{error}");
    assert!(error.to_string().contains("00000001.chunk"), "{error}");
    assert!(matches!(
        device.write(4096, &[1]),
        Err(DeviceError::Corrupt(_))
    ));
    device.read(0, &mut [0; 10]).unwrap();
    // Trimming needs nothing of it.
    device.trim(4096, 4096).unwrap();
    assert_eq!(read(&device, 4096, 10), [0; 10]);
    drop(device);
    fake.put("notes.txt", b"nobody's");
    fake.put("7.chunk", b"not our spelling");
    drop(open(&fake).unwrap());
    fake.put("00000005.chunk", &[1; 4096]);
    let outside = open(&fake).unwrap_err();
    assert!(matches!(outside, DeviceError::Corrupt(_)), "{outside}");
    fake.remove("00000005.chunk").unwrap();
    let mut header = fake.bytes("header").unwrap();
    header[16] ^= 1;
    fake.put("header", &header);
    let bent = open(&fake).unwrap_err();
    assert!(matches!(bent, DeviceError::Corrupt(_)), "{bent}");
    fake.put("header", &[0; 100_000]);
    assert!(matches!(open(&fake), Err(DeviceError::Corrupt(_))));
    fake.remove("header").unwrap();
    assert!(matches!(open(&fake), Err(DeviceError::Io(_))));
}

#[test]
fn a_device_is_made_whole_or_not_at_all() {
    let steps = {
        let fake = FakeDirectory::default();
        drop(create(&fake, 20_000));
        fake.steps()
    };
    for cut in 0..steps {
        for seed in 0..4 {
            let fake = FakeDirectory::default();
            fake.cut_power_at(cut);
            let made = DirectoryDevice::create(Arc::new(fake.clone()), shape(20_000), few(4));
            let after = fake.after_crash(seed);
            match open(&after) {
                Ok(device) => assert_eq!(device.shape(), shape(20_000)),
                Err(error) => {
                    assert!(made.is_err(), "a device is gone: {error}");
                    assert!(matches!(error, DeviceError::Io(_)), "{error}");
                    assert_eq!(create(&after, 20_000).size(), 20_000);
                }
            }
        }
    }
    let fake = FakeDirectory::default();
    drop(create(&fake, 20_000));
    let twice = DirectoryDevice::create(Arc::new(fake), shape(4096), few(4)).unwrap_err();
    assert!(twice.to_string().contains("already"), "{twice}");
}

#[test]
fn a_power_cut_loses_nothing_that_was_flushed() {
    const SIZE: usize = 50_000;
    for seed in 0..100u64 {
        let mut random = fastrand::Rng::with_seed(seed);
        let fake = FakeDirectory::new(512, seed);
        let device = create(&fake, SIZE as u64);
        fake.cut_power_at(fake.steps() + random.u64(1..120));
        // What each byte may be after a crash: as flushed, or as written since.
        let mut may: Vec<Vec<u8>> = vec![vec![0]; SIZE];
        for step in 0..200u8 {
            let at = random.usize(0..SIZE);
            let length = random.usize(1..=(SIZE - at).min(9000));
            let (range, byte) = (at..at + length, step + 1);
            let (offset, bytes) = (at as u64, length as u64);
            let (done, new) = match random.u8(0..8) {
                0 => (device.trim(offset, bytes), 0),
                1 => (device.write_zeroes(offset, bytes, Zeroes::default()), 0),
                2..4 => match device.flush() {
                    Ok(()) => {
                        for byte in &mut may {
                            byte.drain(..byte.len() - 1);
                        }
                        continue;
                    }
                    Err(error) => (Err(error), 0),
                },
                _ => (device.write(offset, &vec![byte; length]), byte),
            };
            for byte in &mut may[range] {
                byte.push(new);
            }
            if done.is_err() {
                assert!(fake.is_off(), "seed {seed}: {done:?}");
                break;
            }
        }
        let after = open(&fake.after_crash(seed)).unwrap();
        let now = read(&after, 0, SIZE);
        for (at, byte) in now.iter().enumerate() {
            assert!(
                may[at].contains(byte),
                "seed {seed}: {byte} at {at}, expected one of {:?}",
                may[at]
            );
        }
        if seed % 50 == 0 {
            crate::testing::run(zeroed(&after), seed);
        }
    }
}

/// The device again, all zeros: it must be usable after a crash.
fn zeroed(device: &DirectoryDevice) -> &DirectoryDevice {
    device.trim(0, device.size()).unwrap();
    device
}

#[test]
fn what_a_failed_sync_lost_is_never_flushed() {
    let fake = FakeDirectory::default();
    let device = create(&fake, 1 << 20);
    device.write(0, &[1; 4096]).unwrap();
    let once = AtomicBool::new(true);
    fake.set_faults(move |operation, name| {
        let hit = operation == Operation::Sync && name == "00000000.chunk";
        (hit && once.swap(false, Ordering::Relaxed)).then_some(std::io::ErrorKind::Other)
    });
    // The file is synced when it is closed to free a descriptor, and the sync fails there, outside any flush.
    for chunk in 1..10u64 {
        device.write(chunk * 4096, &[1; 10]).unwrap();
        assert!(device.open_files() <= 4);
    }
    fake.clear_faults();
    for _ in 0..2 {
        let error = device.flush().unwrap_err();
        assert!(error.to_string().contains("00000000.chunk"), "{error}");
    }
}

#[test]
fn a_flush_waits_for_one_that_is_under_way() {
    let fake = FakeDirectory::default();
    drop(create(&fake, 1 << 20));
    // The first flush is stuck in its sync of the names.
    let (stuck, go) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicBool::new(false)),
    );
    let second_done = AtomicBool::new(false);
    let until = |what: &AtomicBool| {
        let start = Instant::now();
        while !what.load(Ordering::SeqCst) && start.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
    };
    let slow = SlowSync {
        inner: fake.clone(),
        stuck: Arc::clone(&stuck),
        go: Arc::clone(&go),
    };
    let device = DirectoryDevice::open(Arc::new(slow), few(4)).unwrap();
    device.write(0, &[2; 4096]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| device.flush().unwrap());
        until(&stuck);
        scope.spawn(|| {
            device.flush().unwrap();
            second_done.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(Duration::from_millis(30));
        let early = second_done.load(Ordering::SeqCst);
        go.store(true, Ordering::SeqCst);
        assert!(stuck.load(Ordering::SeqCst), "the first flush never synced");
        assert!(!early, "it did not wait for what is not durable yet");
    });
    assert!(second_done.load(Ordering::SeqCst));
}

/// A directory whose names take until `go` to be synced.
struct SlowSync {
    inner: FakeDirectory,
    stuck: Arc<AtomicBool>,
    go: Arc<AtomicBool>,
}

impl Directory for SlowSync {
    fn create(&self, name: &str) -> std::io::Result<Box<dyn File>> {
        self.inner.create(name)
    }
    fn open(&self, name: &str, access: Access) -> std::io::Result<Box<dyn File>> {
        self.inner.open(name, access)
    }
    fn rename(&self, from: &str, to: &str) -> std::io::Result<()> {
        self.inner.rename(from, to)
    }
    fn remove(&self, name: &str) -> std::io::Result<()> {
        self.inner.remove(name)
    }
    fn list(&self) -> std::io::Result<Vec<String>> {
        self.inner.list()
    }
    fn sync(&self) -> std::io::Result<()> {
        self.stuck.store(true, Ordering::SeqCst);
        let start = Instant::now();
        while !self.go.load(Ordering::SeqCst) && start.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.inner.sync()
    }
    fn lock(&self, name: &str, lock: Lock) -> std::io::Result<Box<dyn Send + Sync>> {
        self.inner.lock(name, lock)
    }
    fn describe(&self, name: &str) -> String {
        self.inner.describe(name)
    }
}

#[test]
fn a_full_disk_is_reported_and_the_device_still_works() {
    let fake = FakeDirectory::default();
    let device = create(&fake, 1 << 20);
    device.write(0, &[1; 4096]).unwrap();
    fake.set_capacity(Some(fake.used() + 2048));
    let full = device.write(4096, &[2; 8192]).unwrap_err();
    assert!(matches!(full, DeviceError::NoSpace(_)), "{full}");
    assert!(full.to_string().contains(".chunk"), "{full}");
    fake.set_capacity(None);
    device.write(4096, &[2; 8192]).unwrap();
    device.flush().unwrap();
    assert_eq!(read(&device, 4096, 8192), [2; 8192]);
}

#[test]
fn threads_share_few_open_files_and_lose_nothing() {
    let host = on_host(64 * 4096, 3);
    let device = &host.device;
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                // A quarter of every chunk is this thread's.
                let mut mine = [0u8; 64];
                for round in 1..=250u8 {
                    let chunk = random.usize(0..64);
                    let at = chunk as u64 * 4096 + thread * 1024;
                    match random.u8(0..6) {
                        0 => device.flush().unwrap(),
                        1 => {
                            device.trim(at, 1024).unwrap();
                            mine[chunk] = 0;
                        }
                        _ => {
                            device.write(at, &[round; 1024]).unwrap();
                            mine[chunk] = round;
                        }
                    }
                    let chunk = random.usize(0..64);
                    let at = chunk as u64 * 4096 + thread * 1024;
                    assert_eq!(read(device, at, 1024), [mine[chunk]; 1024]);
                }
            });
        }
    });
    assert!(device.open_files() <= 4 + 3, "{}", device.open_files());
}

#[test]
fn a_shape_with_too_many_chunks_is_refused() {
    for (size, chunk) in [(1u64 << 40, 4096u32), (1 << 20, 1000), (1 << 20, 512)] {
        let fake = Arc::new(FakeDirectory::default());
        let refused = DirectoryDevice::create(fake, Shape { size, chunk }, few(4));
        assert!(
            matches!(refused, Err(DeviceError::Unsupported(_))),
            "{refused:?}"
        );
    }
}
