//! What recording generations costs a device that is written.
//!
//! `cargo bench -p drover-store`, 2 minutes, in `TMPDIR`, which should be on a disk. Each pass writes 256 MiB in a row, or
//! 16,384 blocks anywhere in 1 GiB, and flushes: to a file, to the same file with its generations recorded, and with a new
//! generation begun before each pass, so that all of it is recorded again.

use std::fs::File;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use drover_core::BlockDevice;
use drover_device::backend::{FileDevice, MemoryDevice};
use drover_storage::HostDirectory;
use drover_store::generations::{Contents, Generations, Recorded};

const SIZE: u64 = 1 << 30;

fn map(at: &std::path::Path) -> Arc<Generations> {
    let directory = HostDirectory::open(at).expect("a directory");
    let now = Contents::new(&[], 0, 0);
    let map = Generations::open(Arc::new(directory), SIZE, now).expect("a map");
    map.begin(now).expect("begins");
    Arc::new(map)
}

fn sequential(device: &dyn BlockDevice, at: &mut u64) {
    let data = vec![7; 1 << 20];
    for _ in 0..256 {
        device.write(*at, black_box(&data)).expect("writes");
        *at = (*at + (1 << 20)) % SIZE;
    }
    device.flush().expect("flushes");
}

fn random(device: &dyn BlockDevice, rng: &mut fastrand::Rng) {
    let data = vec![7; 4096];
    for _ in 0..16_384 {
        let offset = rng.u64(..SIZE / 4096) * 4096;
        device.write(offset, black_box(&data)).expect("writes");
    }
    device.flush().expect("flushes");
}

fn written(c: &mut Criterion) {
    let temporary = tempfile::tempdir().expect("a directory");
    let path = temporary.path().join("disk");
    let create = || {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).expect("a file");
        file.set_len(SIZE).expect("a length");
        FileDevice::new(file, false).expect("a device")
    };
    let map = map(temporary.path());
    let recorded = Recorded::new(create());
    recorded.record(map.clone());
    let plain = Recorded::new(create());
    // Blocks are allocated before the first pass.
    for _ in 0..4 {
        sequential(&plain, &mut 0);
    }
    let mut group = c.benchmark_group("written");
    group
        .sampling_mode(SamplingMode::Flat)
        .sample_size(20)
        .measurement_time(Duration::from_secs(15));
    for (way, device, track) in [
        ("file", &plain, false),
        ("recorded", &recorded, false),
        ("new generation", &recorded, true),
    ] {
        let begin = || {
            if track {
                map.track().expect("a generation");
            }
        };
        group.throughput(Throughput::Bytes(256 << 20));
        group.bench_function(BenchmarkId::new("sequential", way), |b| {
            let mut at = 0;
            b.iter(|| {
                begin();
                sequential(device, &mut at);
            });
        });
        group.throughput(Throughput::Bytes(16_384 * 4096));
        group.bench_function(BenchmarkId::new("random 4 KiB", way), |b| {
            let mut rng = fastrand::Rng::with_seed(1);
            b.iter(|| {
                begin();
                random(device, &mut rng);
            });
        });
    }
    group.finish();
}

/// The stage alone: a device in memory.
fn stage(c: &mut Criterion) {
    let temporary = tempfile::tempdir().expect("a directory");
    let plain = Recorded::new(MemoryDevice::new(SIZE));
    let recorded = Recorded::new(MemoryDevice::new(SIZE));
    recorded.record(map(temporary.path()));
    let data = vec![7; 4096];
    let mut group = c.benchmark_group("stage");
    for (way, device) in [("memory", &plain), ("recorded", &recorded)] {
        group.bench_function(BenchmarkId::new("random 4 KiB", way), |b| {
            let mut rng = fastrand::Rng::with_seed(1);
            b.iter(|| {
                let offset = rng.u64(..64 << 20) & !4095;
                device.write(offset, black_box(&data)).expect("writes");
            });
        });
    }
    group.finish();
}

criterion_group!(benches, stage, written);
criterion_main!(benches);
