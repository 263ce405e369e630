use drover_core::{Capabilities, Cost, DeviceError};

use super::*;
use crate::backend::{DirectoryDevice, DirectoryOptions, FileDevice, MemoryDevice};
use crate::remote::{Direct, Epoch, LocalRemote, Shape};
use crate::stage::{CutHow, Operation, When};
use crate::testing::{Call, Probe};
use drover_storage::FakeDirectory;

const LONG: Duration = Duration::from_secs(60);
const NONE: Duration = Duration::ZERO;

/// Asks for one part, with values that do no harm.
fn ask(stack: Stack, part: Part) -> Stack {
    match part {
        Part::Lockable => stack.lockable(LONG),
        Part::Tracked => stack.tracked(4096),
        Part::Chunked => stack.chunked(16 << 10),
        Part::Strict => stack.strict(4096, 64 << 10),
        Part::Cut => stack.cut(LONG),
        Part::Rate => stack.rate(u64::MAX, 0),
        Part::Delay => stack.delay(NONE, NONE),
        Part::Errors => stack.errors(1, vec![]),
        Part::Managed | Part::Backend => stack,
    }
}

fn managed(size: u64) -> Stack {
    let far: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(size));
    let epochs = Arc::new(Direct::new(Arc::clone(&far), Epoch(0)));
    let remote = LocalRemote::new(far, 16 << 10, 2, Some(epochs)).unwrap();
    let cache = Arc::new(FakeDirectory::default());
    Stack::managed(SyncedOptions::new(cache, remote, b"a test"))
}

#[test]
fn the_order_of_the_calls_does_not_matter() {
    let mut random = fastrand::Rng::with_seed(4);
    for _ in 0..60 {
        let mut wanted: Vec<Part> = Part::ORDER[..8].to_vec();
        random.shuffle(&mut wanted);
        wanted.truncate(random.usize(0..=8));
        let stack = Stack::over(MemoryDevice::new(4096));
        let built = wanted
            .iter()
            .fold(stack, |s, part| ask(s, *part))
            .build()
            .unwrap();
        let mut expected = Part::ORDER[..8].to_vec();
        expected.retain(|part| wanted.contains(part));
        expected.push(Part::Backend);
        assert_eq!(built.parts, expected);
        assert_eq!(built.lock.is_some(), wanted.contains(&Part::Lockable));
        assert_eq!(built.track.is_some(), wanted.contains(&Part::Tracked));
        assert_eq!(built.cut.is_some(), wanted.contains(&Part::Cut));
        assert_eq!(built.errors.is_some(), wanted.contains(&Part::Errors));
        assert!(built.managed.is_none());
    }
}

#[test]
fn the_stages_are_where_the_parts_say() {
    let probe = Arc::new(Probe::able(1 << 20));
    let built = Stack::over(Arc::clone(&probe))
        .errors(1, vec![Fault::on(Operation::Flush, When::Always)])
        .cut(LONG)
        .strict(64 << 10, 64 << 10)
        .lockable(LONG)
        .chunked(64 << 10)
        .tracked(4096)
        .delay(NONE, NONE)
        .rate(u64::MAX, 0)
        .build()
        .unwrap();
    let (device, cut, errors) = (built.device, built.cut.unwrap(), built.errors.unwrap());
    // Chunked is above strict, which refuses a single byte, and tracked above chunked, which writes 64 KiB.
    device.write(5000, &[1]).unwrap();
    let expected = [Call::Read(0, 64 << 10), Call::Write(0, 64 << 10)];
    assert_eq!(probe.calls(), expected);
    assert_eq!(built.track.unwrap().take().bytes(), 4096);
    // What is longer than strict allows is cut by chunked.
    device.read(0, &mut [0; 128 << 10]).unwrap();
    let expected = [Call::Read(0, 64 << 10), Call::Read(64 << 10, 64 << 10)];
    assert_eq!(probe.calls(), expected);
    // The disk that fails is behind the link.
    cut.cut(CutHow::Fail);
    assert!(matches!(device.flush(), Err(DeviceError::Unavailable(_))));
    assert_eq!(errors.injected(), 0);
    cut.heal();
    assert!(matches!(device.flush(), Err(DeviceError::Io(_))));
    assert_eq!(errors.injected(), 1);
    assert_eq!(probe.calls(), []);
    // The lock is above the link: what hangs there is under way.
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

fn refused(stack: Stack) -> String {
    match stack.build() {
        Ok(built) => panic!("it was built: {built:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_does_not_go_together_is_refused_by_both_names() {
    let memory = || Stack::over(MemoryDevice::new(1 << 20));
    for part in [
        Part::Chunked,
        Part::Cut,
        Part::Rate,
        Part::Delay,
        Part::Errors,
    ] {
        let error = ask(managed(1 << 20), part).build().map(drop).unwrap_err();
        assert!(
            matches!(error, BuildError::Together { one, other: Part::Managed, .. } if one == part),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains(&part.to_string()) && text.contains("managed"),
            "{text}"
        );
    }
    let error = refused(memory().chunked(4096).strict(8192, 8192));
    assert!(error.contains("chunked and strict"), "{error}");
    let blocks = Capabilities {
        alignment: 8192,
        longest: 64 << 10,
        ..Probe::able(0).capabilities()
    };
    let blocks = || Stack::over(Probe::new(1 << 20, blocks, Cost::Disk));
    let error = refused(blocks().chunked(4096));
    assert!(error.contains("chunked and backend"), "{error}");
    let error = refused(blocks().strict(512, 4096));
    assert!(error.contains("strict and backend"), "{error}");
    let error = refused(blocks().strict(128 << 10, u32::MAX));
    assert!(error.contains("strict and backend"), "{error}");
    for part in &Part::ORDER[..8] {
        let twice = ask(ask(memory(), *part), *part)
            .build()
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(twice, BuildError::Twice(p) if p == *part),
            "{twice}"
        );
    }
    for (stack, part) in [
        (memory().tracked(0), Part::Tracked),
        (memory().chunked(5000), Part::Chunked),
        (memory().strict(3, 4), Part::Strict),
        (memory().strict(4096, 512), Part::Strict),
        (memory().rate(0, 1), Part::Rate),
    ] {
        let error = stack.build().map(drop).unwrap_err();
        assert!(
            matches!(error, BuildError::Value { part: p, .. } if p == part),
            "{error}"
        );
    }
}

#[test]
fn a_managed_device_is_below_the_lock_and_what_is_tracked() {
    let built = managed(1 << 20)
        .tracked(4096)
        .strict(512, 64 << 10)
        .lockable(LONG)
        .build()
        .unwrap();
    let expected = [Part::Lockable, Part::Tracked, Part::Strict, Part::Managed];
    assert_eq!(built.parts, expected);
    let managed = built.managed.unwrap();
    built.device.write(8192, &[7; 512]).unwrap();
    assert_eq!(built.track.unwrap().take().bytes(), 4096);
    assert!(managed.push.pending() > 0);
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
    let stack = |identity: &[u8]| {
        let far: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(1 << 20));
        let epochs = Arc::new(Direct::new(Arc::clone(&far), Epoch(0)));
        let remote = LocalRemote::new(far, 16 << 10, 2, Some(epochs)).unwrap();
        let cache = Arc::clone(&cache);
        Stack::managed(SyncedOptions::new(cache, remote, identity))
    };
    let built = stack(b"one").build().unwrap();
    built.managed.unwrap().synced.close(true).unwrap();
    let error = stack(b"two").build().map(drop).unwrap_err();
    assert!(
        matches!(error, BuildError::Managed(SyncedError::OtherImage { .. })),
        "{error}"
    );
}

/// A stack over a random backend, with random stages and values that fit.
fn random_stack(random: &mut fastrand::Rng, size: u64) -> (Stack, String) {
    let (mut stack, mut told) = match random.u8(0..4) {
        0 => {
            let file = tempfile::tempfile().unwrap();
            file.set_len(size).unwrap();
            let device = FileDevice::new(file, false).unwrap();
            (Stack::over(device), "file".to_owned())
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
            (Stack::over(device), format!("directory {shape:?}"))
        }
        2 => {
            // A stack under a stack.
            let chunk = 512 << random.u32(0..8);
            let lower = Stack::over(MemoryDevice::new(size)).strict(chunk, chunk * 3);
            let built = lower.chunked(chunk).tracked(512).build().unwrap();
            (Stack::over(built.device), format!("strict {chunk}"))
        }
        _ => (Stack::over(MemoryDevice::new(size)), "memory".to_owned()),
    };
    let chunk = 512u32 << random.u32(0..9);
    let alignment = chunk >> random.u32(0..4);
    let mut wanted: Vec<Part> = Part::ORDER[..8].to_vec();
    random.shuffle(&mut wanted);
    wanted.truncate(random.usize(0..=8));
    if !wanted.contains(&Part::Chunked) && !size.is_multiple_of(u64::from(alignment)) {
        // The contract has no test for a device that is both ragged and strict.
        wanted.retain(|part| *part != Part::Strict);
    }
    for part in wanted {
        stack = match part {
            Part::Chunked => stack.chunked(chunk),
            Part::Strict => stack.strict(alignment, alignment * random.u32(1..9)),
            Part::Tracked => stack.tracked(1 << random.u32(0..16)),
            part => ask(stack, part),
        };
        told += &format!(", {part}");
    }
    (
        stack,
        format!("{told} of chunk {chunk}, alignment {alignment}"),
    )
}

#[test]
fn random_stacks_keep_the_contract() {
    for seed in 0..30 {
        let mut random = fastrand::Rng::with_seed(seed);
        let size = random.u64(1..60_000);
        let (stack, told) = random_stack(&mut random, size);
        eprintln!("seed {seed}: {size} bytes, {told}");
        let built = stack.build().unwrap();
        assert_eq!(built.device.size(), size);
        crate::testing::run(built.device.as_ref(), seed);
        if let Some(lock) = built.lock {
            assert_eq!(lock.requests(), (0, 0));
        }
    }
}
