//! How fast a layout answers where the bytes of its walk are.
//!
//! `cargo bench -p drover-image`, 15 seconds.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use drover_core::BLOCK_SIZE_U64;
use drover_image::{GrainRange, Layout, Order, RangeKind};

/// A container of 64 KiB grains that a guest filled in runs of `run` grains, every fourth of them backwards, which
/// lie in the file in another order than in the guest.
fn layout(ranges: u64, run: u64) -> Layout {
    const GRAIN: u64 = 64 << 10;
    let len = run * GRAIN;
    let place = |i: u64| (i * 7919) % ranges * len;
    let ranges = (0..ranges).map(|i| {
        let (file, order) = match i % 4 {
            3 => (place(i) + len - GRAIN, Order::Reverse),
            _ => (place(i), Order::Forward),
        };
        GrainRange {
            walk: i * len,
            file,
            grain: GRAIN as u32,
            count: run,
            order,
            kind: RangeKind::Data,
        }
    });
    let ranges: Vec<GrainRange> = ranges.collect();
    Layout::new(ranges.len() as u64 * len, GRAIN as u32, ranges).expect("a layout")
}

fn lookup(c: &mut Criterion) {
    let mut g = c.benchmark_group("layout");
    for (name, ranges) in [
        ("a hundred ranges", 100),
        ("a hundred thousand ranges", 100_000),
    ] {
        let layout = layout(ranges, 16);
        let blocks = layout.walk_blocks();
        let mut rng = fastrand::Rng::with_seed(1);
        g.throughput(Throughput::Elements(1024));
        g.bench_function(format!("look up blocks, {name}"), |b| {
            b.iter(|| {
                (0..1024).fold(0, |sum, _| {
                    let at = rng.u64(..blocks) * BLOCK_SIZE_U64;
                    let pieces = layout.pieces(black_box(at), BLOCK_SIZE_U64);
                    sum ^ pieces.fold(0, |sum, piece| sum ^ piece.file.unwrap_or(0))
                })
            });
        });
        let bytes = layout.walk_blocks().min(1 << 18) * BLOCK_SIZE_U64;
        g.throughput(Throughput::Elements(bytes.div_ceil(8 << 20)));
        g.bench_function(format!("look up batches in order, {name}"), |b| {
            b.iter(|| {
                let batches = (0..bytes).step_by(8 << 20);
                batches
                    .map(|at| layout.pieces(black_box(at), 8 << 20).count())
                    .sum::<usize>()
            });
        });
    }
    let layout = layout(100_000, 16);
    let encoded = layout.encode();
    g.throughput(Throughput::Elements(layout.ranges().len() as u64));
    g.bench_function("encode ranges", |b| b.iter(|| black_box(&layout).encode()));
    g.bench_function("decode ranges", |b| {
        b.iter(|| Layout::decode(black_box(&encoded), Default::default()).expect("decodes"));
    });
    g.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = lookup
}
criterion_main!(benches);
