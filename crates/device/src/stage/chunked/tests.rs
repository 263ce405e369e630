use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::backend::MemoryDevice;
use crate::stage::Operation;
use crate::testing::{Call, Delay, Errors, Fault, Probe, Strict, When, contract};

fn strict(size: u64, chunk: u32, longest: u32) -> Chunked<Strict<MemoryDevice>> {
    Chunked::new(Strict::new(MemoryDevice::new(size), chunk, longest), chunk)
}

fn probed(size: u64, chunk: u32) -> (Arc<Probe>, Chunked<Arc<Probe>>) {
    let probe = Arc::new(Probe::able(size));
    (Arc::clone(&probe), Chunked::new(probe, chunk))
}

/// Slow enough below for threads to get between the halves of a change.
fn slow(size: u64) -> Chunked<Delay<MemoryDevice>> {
    let micros = Duration::from_micros(20);
    let below = Delay::new(MemoryDevice::new(size), micros, Duration::ZERO);
    Chunked::new(below, 4096)
}

#[test]
fn it_keeps_the_contract() {
    contract(&|size| Box::new(strict(size, 4096, 64 << 10)));
    contract(&|size| Box::new(strict(size, 512, u32::MAX)));
    contract(&|size| Box::new(Chunked::new(MemoryDevice::new(size), 1 << 20)));
    // The device below takes less than a chunk at a time.
    contract(&|size| {
        let below = Strict::new(MemoryDevice::new(size), 512, 3000);
        Box::new(Chunked::new(below, 16 << 10))
    });
}

#[test]
fn whole_chunks_pass_in_one_request_and_unchanged() {
    let (probe, device) = probed(1 << 20, 4096);
    device.write(8192, &[1; 40960]).unwrap();
    device.read(8192, &mut [0; 40960]).unwrap();
    device.trim(0, 1 << 20).unwrap();
    let zeroes = Zeroes {
        keep_allocated: true,
        only_fast: true,
    };
    device.write_zeroes(4096, 8192, zeroes).unwrap();
    device.extents(4096, 8192).unwrap();
    device.prefetch(4096, 8192).unwrap();
    let _ = device.cost(4096, 8192);
    device.flush().unwrap();
    let expected = [
        Call::Write(8192, 40960),
        Call::Read(8192, 40960),
        Call::Trim(0, 1 << 20),
        Call::Zero(4096, 8192, zeroes),
        Call::Extents(4096, 8192),
        Call::Prefetch(4096, 8192),
        Call::Cost(4096, 8192),
        Call::Flush,
    ];
    assert_eq!(probe.calls(), expected);
}

#[test]
fn edges_are_read_changed_and_written_back() {
    let (probe, device) = probed(1 << 20, 4096);
    device.write(4000, &[1; 9000]).unwrap();
    let expected = [
        Call::Read(0, 4096),
        Call::Write(0, 4096),
        Call::Write(4096, 8192),
        Call::Read(12288, 4096),
        Call::Write(12288, 4096),
    ];
    assert_eq!(probe.calls(), expected);
    device.read(4000, &mut [0; 9000]).unwrap();
    assert_eq!(probe.calls(), [Call::Read(0, 16384)]);
    // Too long to be copied: in place, but for the edges.
    device.read(4095, &mut [0; 512 << 10]).unwrap();
    let expected = [
        Call::Read(0, 4096),
        Call::Read(4096, (512 << 10) - 4096),
        Call::Read(512 << 10, 4096),
    ];
    assert_eq!(probe.calls(), expected);
    device.prefetch(5000, 1).unwrap();
    let _ = device.cost(5000, 5000);
    assert_eq!(
        probe.calls(),
        [Call::Prefetch(4096, 4096), Call::Cost(4096, 8192)]
    );
}

#[test]
fn a_short_last_chunk_is_whole_and_no_byte_beyond_it_is_asked_for() {
    let (probe, device) = probed(10_000, 4096);
    device.write(8192, &[1; 1808]).unwrap();
    device.write(9999, &[2]).unwrap();
    device.read(9000, &mut [0; 1000]).unwrap();
    device.trim(4096, 5904).unwrap();
    device.prefetch(9999, 1).unwrap();
    let expected = [
        Call::Write(8192, 1808),
        Call::Read(8192, 1808),
        Call::Write(8192, 1808),
        Call::Read(8192, 1808),
        Call::Trim(4096, 5904),
        Call::Prefetch(8192, 1808),
    ];
    assert_eq!(probe.calls(), expected);
}

#[test]
fn a_trim_takes_whole_chunks_and_zeroes_the_rest() {
    let (probe, device) = probed(1 << 20, 4096);
    device.write(0, &[9; 16384]).unwrap();
    probe.calls();
    device.trim(4000, 9000).unwrap();
    let expected = [
        Call::Trim(4096, 8192),
        Call::Read(0, 4096),
        Call::Write(0, 4096),
        Call::Read(12288, 4096),
        Call::Write(12288, 4096),
    ];
    assert_eq!(probe.calls(), expected);
    let mut now = vec![0; 16384];
    device.read(0, &mut now).unwrap();
    assert!(now[..4000].iter().all(|b| *b == 9));
    assert!(now[4000..13000].iter().all(|b| *b == 0));
    assert!(now[13000..].iter().all(|b| *b == 9));
    // What is zero already is not written: a hole stays one.
    probe.calls();
    device.trim(4001, 10).unwrap();
    assert_eq!(probe.calls(), [Call::Read(0, 4096)]);
}

#[test]
fn zeroing_part_of_a_chunk_is_never_fast() {
    let (probe, device) = probed(1 << 20, 4096);
    let fast = Zeroes {
        keep_allocated: false,
        only_fast: true,
    };
    let refused = device.write_zeroes(100, 1000, fast);
    assert!(matches!(refused, Err(DeviceError::Unsupported(_))));
    assert_eq!(probe.calls(), []);
    device.write_zeroes(100, 10_000, fast).unwrap();
    assert!(probe.calls().contains(&Call::Zero(4096, 4096, fast)));
}

#[test]
fn a_read_only_device_is_not_even_read_to_be_changed() {
    let able = Probe::able(0).capabilities();
    let capabilities = Capabilities {
        read_only: true,
        ..able
    };
    let probe = Arc::new(Probe::new(1 << 20, capabilities, Cost::Disk));
    let device = Chunked::new(Arc::clone(&probe), 4096);
    for result in [
        device.write(1, &[1]),
        device.trim(1, 1),
        device.write_zeroes(1, 1, Zeroes::default()),
    ] {
        assert!(matches!(result, Err(DeviceError::ReadOnly)), "{result:?}");
    }
    assert_eq!(probe.calls(), []);
}

#[test]
fn a_failed_edge_fails_the_write_and_leaves_old_or_new_bytes() {
    let memory = Arc::new(MemoryDevice::from_bytes(&[5; 32 << 10]));
    for nth in 1..=3 {
        memory.write(0, &[5; 32 << 10]).unwrap();
        let fault = Fault {
            torn: true,
            ..Fault::on(Operation::Write, When::Nth(nth))
        };
        let (faulty, handle) = Errors::new(Arc::clone(&memory), nth, vec![fault]);
        let device = Chunked::new(faulty, 4096);
        let failed = device.write(1000, &[6; 20_000]);
        assert!(matches!(failed, Err(DeviceError::Io(_))), "{failed:?}");
        assert_eq!(handle.injected(), 1);
        let mut now = vec![0; 32 << 10];
        memory.read(0, &mut now).unwrap();
        for (at, byte) in now.iter().enumerate() {
            let inside = (1000..21_000).contains(&at);
            assert!(*byte == 5 || (inside && *byte == 6), "{byte} at {at}");
        }
    }
}

#[test]
fn writes_to_parts_of_one_chunk_by_many_threads_are_all_kept() {
    const PART: usize = 512;
    const THREADS: usize = 8;
    const ROUNDS: u8 = 60;
    // Thread n owns the nth part of every chunk, so that all threads share each chunk.
    let device = slow(64 << 10);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let device = &device;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread as u64);
                let mut mine = [0u8; 16];
                for round in 1..=ROUNDS {
                    let chunk = random.usize(0..mine.len());
                    let at = (chunk * 4096 + thread * PART) as u64;
                    device.write(at, &[round; PART]).unwrap();
                    mine[chunk] = round;
                    let mut back = [0; PART];
                    device.read(at, &mut back).unwrap();
                    assert_eq!(back, [round; PART], "thread {thread}, round {round}");
                }
                for (chunk, expected) in mine.into_iter().enumerate() {
                    let mut back = [0; PART];
                    let at = (chunk * 4096 + thread * PART) as u64;
                    device.read(at, &mut back).unwrap();
                    assert_eq!(back, [expected; PART], "thread {thread}, chunk {chunk}");
                }
            });
        }
    });
}

#[test]
fn a_whole_chunk_that_was_written_is_not_undone_by_an_older_edge() {
    // One thread changes the first byte of chunks; the other writes them whole and must find the rest of them new.
    let device = slow(70 * 4096);
    std::thread::scope(|scope| {
        let edges = scope.spawn(|| {
            for n in 0..2_500u64 {
                device.write(n * 5 % 70 * 4096, &[1]).unwrap();
            }
        });
        let mut back = vec![0; 70 * 4096];
        let mut round = 0u8;
        while !edges.is_finished() {
            round = round.wrapping_add(1);
            device.write(0, &vec![round; 70 * 4096]).unwrap();
            device.read(0, &mut back).unwrap();
            let wrong = back
                .chunks(4096)
                .position(|chunk| chunk[1..].iter().any(|b| *b != round));
            assert_eq!(wrong, None, "round {round}");
        }
    });
}

#[test]
fn extents_are_clipped_to_the_range() {
    // A question in the middle of a chunk.
    let memory = MemoryDevice::new(1 << 20);
    memory.write(64 << 10, &[1; 64 << 10]).unwrap();
    let device = Chunked::new(memory, 256 << 10);
    let runs = device.extents((64 << 10) + 5, 100 << 10).unwrap();
    let expected = [
        Extent {
            offset: (64 << 10) + 5,
            length: (64 << 10) - 5,
            kind: ExtentKind::Data,
        },
        Extent {
            offset: 128 << 10,
            length: (36 << 10) + 5,
            kind: ExtentKind::Hole,
        },
    ];
    assert_eq!(runs, expected);
    assert!(device.extents(5, 0).unwrap().is_empty());
}

/// A device that tells of one run at a time, of at most 100 bytes.
struct Terse(MemoryDevice);

impl BlockDevice for Terse {
    fn size(&self) -> u64 {
        self.0.size()
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.0.read(offset, buffer)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.0.write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.0.write_zeroes(offset, length, zeroes)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.0.trim(offset, length)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        self.0.flush()
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        let mut runs = self.0.extents(offset, length)?;
        runs.truncate(1);
        runs[0].length = runs[0].length.min(100);
        Ok(runs)
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.0.prefetch(offset, length)
    }
    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.0.cost(offset, length)
    }
    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.0.write_cost(offset, length)
    }
}

#[test]
fn an_answer_about_extents_that_ends_before_the_range_is_not_passed_on() {
    let device = Chunked::new(Terse(MemoryDevice::new(10_000)), 4096);
    for (offset, length, expected) in [(50, 10, 10), (50, 4000, 50), (4000, 3000, 96)] {
        let runs = device.extents(offset, length).unwrap();
        assert_eq!(runs.len(), 1);
        assert_eq!((runs[0].offset, runs[0].length), (offset, expected));
    }
    crate::testing::run(&device, 9);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn it_is_a_vector(
        size in 1u64..100_000,
        chunk in 9u32..18,
        longest in 1u32..8,
        seed in any::<u64>(),
    ) {
        let chunk = 1 << chunk;
        crate::testing::run(&strict(size, chunk, chunk * longest), seed);
    }
}
