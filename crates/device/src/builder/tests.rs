use drover_core::{Capabilities, Cost, DeviceError};

use super::*;
use crate::backend::{DirectoryDevice, DirectoryOptions, FileDevice, MemoryDevice};
use crate::local_remote::{Direct, LocalRemote};
use crate::remote::{Epoch, Shape};
use crate::stage::Operation;
use crate::testing::{Call, Cut, CutHow, Errors, Fault, Probe, Strict, When};
use drover_storage::FakeDirectory;

const LONG: Duration = Duration::from_secs(60);

fn managed(size: u64, cache: Arc<FakeDirectory>, identity: &[u8]) -> Stack {
    let far: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(size));
    let epochs = Arc::new(Direct::new(Arc::clone(&far), Epoch(0)));
    let remote = LocalRemote::new(far, 16 << 10, 2, Some(epochs)).unwrap();
    Stack::managed(SyncedOptions::new(cache, remote, identity))
}

#[test]
fn the_stages_are_in_their_order_whatever_the_order_of_the_calls() {
    let calls: [fn(Stack) -> Stack; 3] = [
        |stack| stack.lockable(LONG),
        |stack| stack.chunked(64 << 10),
        |stack| stack.tracked(4096),
    ];
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        let probe = Arc::new(Probe::able(1 << 20));
        let (failing, errors) = Errors::new(
            Arc::clone(&probe),
            1,
            vec![Fault::on(Operation::Flush, When::Always)],
        );
        let (far, cut) = Cut::new(failing, LONG);
        let below = Strict::new(far, 64 << 10, 64 << 10);
        let built = order
            .iter()
            .fold(Stack::over(below), |stack, n| calls[*n](stack))
            .build()
            .unwrap();
        let device = built.device;
        // Chunked is above what refuses a single byte, and tracked above chunked, which writes 64 KiB.
        device.write(5000, &[1]).unwrap();
        let expected = [Call::Read(0, 64 << 10), Call::Write(0, 64 << 10)];
        assert_eq!(probe.calls(), expected);
        assert_eq!(built.track.unwrap().take().bytes(), 4096);
        // What is longer than the device takes is cut by chunked.
        device.read(0, &mut [0; 128 << 10]).unwrap();
        let expected = [Call::Read(0, 64 << 10), Call::Read(64 << 10, 64 << 10)];
        assert_eq!(probe.calls(), expected);
        cut.cut(CutHow::Fail);
        assert!(matches!(device.flush(), Err(DeviceError::Unavailable(_))));
        assert_eq!(errors.injected(), 0);
        cut.heal();
        assert!(matches!(device.flush(), Err(DeviceError::Io(_))));
        assert_eq!(errors.injected(), 1);
        assert_eq!(probe.calls(), []);
        // The lock is above all: what hangs below is under way.
        cut.cut(CutHow::Hang);
        let lock = built.lock.unwrap();
        std::thread::scope(|scope| {
            let hung = scope.spawn(|| device.read(0, &mut [0; 10]));
            let start = std::time::Instant::now();
            while cut.hanging() != 1 && start.elapsed() < LONG {
                std::thread::sleep(Duration::from_millis(1));
            }
            let under_way = lock.requests();
            cut.heal();
            hung.join().unwrap().unwrap();
            assert_eq!(under_way, (1, 0));
        });
    }
}

#[test]
fn what_was_not_asked_for_is_not_there() {
    let built = Stack::over(MemoryDevice::new(4096)).build().unwrap();
    assert!(built.lock.is_none() && built.track.is_none() && built.managed.is_none());
}

#[test]
fn what_cannot_be_is_refused() {
    let memory = || Stack::over(MemoryDevice::new(1 << 20));
    for stack in [memory().tracked(0), memory().chunked(5000)] {
        let error = stack.build().map(drop).unwrap_err();
        assert!(matches!(error, BuildError::NoPowerOfTwo(..)), "{error}");
    }
    let blocks = Capabilities {
        alignment: 8192,
        longest: 64 << 10,
        ..Probe::able(0).capabilities()
    };
    let blocks = Stack::over(Probe::new(1 << 20, blocks, Cost::Disk));
    let error = blocks.chunked(4096).build().map(drop).unwrap_err();
    let expected = BuildError::ChunkTooSmall {
        chunk: 4096,
        alignment: 8192,
    };
    assert_eq!(error.to_string(), expected.to_string());
}

#[test]
fn a_managed_device_is_below_the_lock_and_what_is_tracked() {
    let built = managed(1 << 20, Arc::default(), b"a test")
        .tracked(4096)
        .chunked(64 << 10)
        .lockable(LONG)
        .build()
        .unwrap();
    let managed = built.managed.unwrap();
    // Not chunked: it is written as it comes.
    built.device.write(8192, &[7; 512]).unwrap();
    assert_eq!(built.track.unwrap().take().bytes(), 4096);
    let pending = managed.push.pending();
    assert!(pending > 0 && pending < 64 << 10, "{pending}");
    let guard = built.lock.unwrap().lock().unwrap();
    managed.push.sync().unwrap();
    assert_eq!(managed.push.pending(), 0);
    assert!(managed.pull.wait(LONG).unwrap());
    managed.synced.close(true).unwrap();
    guard.close();
    let late = built.device.read(0, &mut [0; 512]);
    assert!(matches!(late, Err(DeviceError::Closed)), "{late:?}");
}

#[test]
fn a_managed_device_that_cannot_be_opened_says_why() {
    let cache = Arc::new(FakeDirectory::default());
    let stack = |identity| managed(1 << 20, Arc::clone(&cache), identity);
    let built = stack(b"one").build().unwrap();
    built.managed.unwrap().synced.close(true).unwrap();
    let error = stack(b"two").build().map(drop).unwrap_err();
    assert!(
        matches!(error, BuildError::Managed(SyncedError::OtherImage { .. })),
        "{error}"
    );
}

/// A random backend.
fn backend(random: &mut fastrand::Rng, size: u64) -> (Arc<dyn BlockDevice>, String) {
    match random.u8(0..4) {
        0 => {
            let file = tempfile::tempfile().unwrap();
            file.set_len(size).unwrap();
            let device = FileDevice::new(file, false).unwrap();
            (Arc::new(device), "file".to_owned())
        }
        1 => {
            let directory = Arc::new(FakeDirectory::default());
            let shape = Shape {
                size,
                chunk: 4096 << random.u32(0..4),
            };
            let options = DirectoryOptions {
                most_open: random.usize(1..20),
                ..DirectoryOptions::default()
            };
            let device = DirectoryDevice::create(directory, shape, options).unwrap();
            (Arc::new(device), format!("directory {shape:?}"))
        }
        2 => {
            // A stack under a stack.
            let chunk = 512 << random.u32(0..8);
            let strict = Strict::new(MemoryDevice::new(size), chunk, chunk * 3);
            let built = Stack::over(strict).chunked(chunk).tracked(512).build();
            (built.unwrap().device, format!("strict {chunk}"))
        }
        _ => (Arc::new(MemoryDevice::new(size)), "memory".to_owned()),
    }
}

#[test]
fn random_stacks_keep_the_contract() {
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let size = random.u64(1..60_000);
        let (mut below, mut text) = backend(&mut random, size);
        let chunk = 512u32 << random.u32(0..9);
        let chunked = random.bool();
        if chunked && random.bool() {
            let alignment = chunk >> random.u32(0..4);
            text += &format!(", strict {alignment}");
            below = Arc::new(Strict::new(below, alignment, alignment * random.u32(1..9)));
        }
        let mut stack = Stack::over(below);
        if chunked {
            text += &format!(", chunked {chunk}");
            stack = stack.chunked(chunk);
        }
        if random.bool() {
            let granularity = 1 << random.u32(0..16);
            text += &format!(", tracked {granularity}");
            stack = stack.tracked(granularity);
        }
        if random.bool() {
            text += ", lockable";
            stack = stack.lockable(LONG);
        }
        eprintln!("seed {seed}: {size} bytes, {text}");
        let built = stack.build().unwrap();
        assert_eq!(built.device.size(), size);
        crate::testing::run(built.device.as_ref(), seed);
        if let Some(lock) = built.lock {
            assert_eq!(lock.requests(), (0, 0));
        }
    }
}
