//! What recording generations costs a device that is written.
//!
//! `cargo bench -p drover-store`, 2 minutes, in `TMPDIR`, which should be on a disk. Each pass writes 256 MiB in a row, or
//! 16,384 blocks anywhere in 1 GiB, and flushes: to a file, to the same file with its generations recorded, and with a new
//! generation begun before each pass, so that all of it is recorded again. The median of the passes is shown.

use std::fs::File;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use drover_core::BlockDevice;
use drover_device::backend::{FileDevice, MemoryDevice};
use drover_storage::HostDirectory;
use drover_store::generations::{Contents, Generations, Recorded};

const SIZE: u64 = 1 << 30;
const ROUNDS: usize = 41;

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

type Write<'a> = &'a mut dyn FnMut(&dyn BlockDevice);

fn written(_: &mut Criterion) {
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
    // By turns, since a disk is not as fast at one moment as at the next; criterion measures one after the other.
    let turn = |device: &dyn BlockDevice, track: bool, write: Write<'_>| {
        let began = Instant::now();
        if track {
            map.track().expect("a generation");
        }
        write(device);
        began.elapsed()
    };
    let mut rng = fastrand::Rng::with_seed(1);
    let mut at = 0;
    let ways: [(&str, Write<'_>); 2] = [
        ("sequential", &mut |device| sequential(device, &mut at)),
        ("random 4 KiB", &mut |device| random(device, &mut rng)),
    ];
    for (name, write) in ways {
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            times[0].push(turn(&plain, false, write));
            times[1].push(turn(&recorded, false, write));
            times[2].push(turn(&recorded, true, write));
        }
        let medians = times.map(|mut times| {
            times.sort_unstable();
            times[ROUNDS / 2].as_secs_f64() * 1e3
        });
        let [file, recorded, new] = medians;
        let more = |time: f64| (time / file - 1.0) * 100.0;
        println!(
            "written/{name}: file {file:.1} ms, recorded {recorded:.1} ms ({:+.1} %), new generation {new:.1} ms ({:+.1} %)",
            more(recorded),
            more(new)
        );
    }
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
