//! How fast the frames of a teleport are made and read: batches, plans, literals, and their compression.
//!
//! `cargo bench -p drover-teleport`, 25 seconds.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use drover_core::{BLOCK_SIZE, CompactIndex, Digest, Head};
use drover_index::{ImageId, Origin, Plan, PlanRun, SequenceStore, Via};
use drover_store::DataBits;
use drover_teleport::protocol::{BATCH_BLOCKS, FRAME_BLOCKS};
use drover_teleport::testing::{
    Batch, Literal, LiteralHeader, Packing, decode_plan, encode_plan, proofs_of,
};
use drover_teleport::testing::{MAX_WINDOW_LOG, Pace, Packer, Unpacker};

fn digests(rng: &mut fastrand::Rng) -> Vec<Digest> {
    let mut digests = vec![Digest::default(); BATCH_BLOCKS as usize];
    digests.iter_mut().for_each(|d| rng.fill(&mut d.0));
    digests
}

fn batches(c: &mut Criterion) {
    let mut g = c.benchmark_group("batches");
    g.throughput(Throughput::Elements(BATCH_BLOCKS));
    let mut rng = fastrand::Rng::with_seed(1);
    let full = digests(&mut rng);
    let heads: Vec<Head> = full
        .iter()
        .map(|_| match rng.u32(..10) {
            0 => Head::Strong,
            1..4 => Head::Weak,
            _ => Head::No,
        })
        .collect();
    let mut data = DataBits::new(BATCH_BLOCKS);
    (0..BATCH_BLOCKS).for_each(|block| data.set(block));
    let batch = Batch::new(0, data, heads, &full);
    let encoded = batch.encode();
    g.bench_function("prove", |b| b.iter(|| proofs_of(black_box(&full))));
    g.bench_function("encode", |b| b.iter(|| black_box(&batch).encode()));
    g.bench_function("decode", |b| {
        b.iter(|| Batch::decode(black_box(&encoded)).expect("decodes"));
    });
    g.finish();
}

/// A batch that was matched in runs of forty blocks, with new blocks and stored sequences between.
fn plan() -> Plan {
    let mut plan = Plan::default();
    let (mut at, mut i) = (0u32, 0u64);
    while u64::from(at) < BATCH_BLOCKS {
        let count = if i.is_multiple_of(3) { 7 } else { 40 }.min(BATCH_BLOCKS as u32 - at);
        let (origin, via) = match i % 3 {
            0 => (Origin::Literal, Via::Literal),
            1 => (
                Origin::Image {
                    image: ImageId(5),
                    first: CompactIndex(1_000_000 + 977 * i),
                },
                Via::C1,
            ),
            _ => (Origin::Sequence { first: 128 * i }, Via::C2),
        };
        plan.runs.push(PlanRun { count, origin, via });
        if i % 3 == 1 {
            plan.stores.push(SequenceStore {
                first: 128 * i,
                from: CompactIndex(u64::from(at)),
                count,
            });
        }
        at += count;
        i += 1;
    }
    plan
}

fn plans(c: &mut Criterion) {
    let plan = plan();
    let encoded = encode_plan(&plan);
    let mut g = c.benchmark_group("plans");
    g.throughput(Throughput::Elements(plan.runs.len() as u64));
    g.bench_function("encode", |b| b.iter(|| encode_plan(black_box(&plan))));
    g.bench_function("decode", |b| {
        b.iter(|| decode_plan(black_box(&encoded), BATCH_BLOCKS).expect("decodes"));
    });
    g.finish();
}

/// A frame of literals that compresses to about a third, as blocks of systems do.
fn blocks(rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FRAME_BLOCKS * BLOCK_SIZE);
    while bytes.len() < FRAME_BLOCKS * BLOCK_SIZE {
        let n = rng.usize(4..40);
        if bytes.len() > 4096 && rng.u32(..3) > 0 {
            let from = bytes.len() - rng.usize(n..4096);
            bytes.extend_from_within(from..from + n);
        } else {
            (0..n).for_each(|_| bytes.push(rng.u8(..128)));
        }
    }
    bytes.truncate(FRAME_BLOCKS * BLOCK_SIZE);
    bytes
}

fn literals(c: &mut Criterion) {
    let mut rng = fastrand::Rng::with_seed(2);
    let header = LiteralHeader {
        slot: 3,
        packing: Packing::Plain,
        runs: (0..FRAME_BLOCKS as u64).map(|i| i * 8 + i % 3).collect(),
    };
    let mut frame = header.encode();
    let mut g = c.benchmark_group("literal headers");
    g.throughput(Throughput::Elements(FRAME_BLOCKS as u64));
    g.bench_function("encode", |b| b.iter(|| black_box(&header).encode()));
    frame.extend_from_slice(&[0; 100]);
    g.bench_function("decode", |b| {
        b.iter(|| {
            let literal = Literal::decode(black_box(&frame)).expect("decodes");
            assert_eq!(literal.packed.len(), 100);
        });
    });
    g.finish();

    let blocks = blocks(&mut rng);
    let mut g = c.benchmark_group("literals");
    g.throughput(Throughput::Bytes(blocks.len() as u64));
    for step in 0..Pace::STEPS {
        let effort = Pace::step(step).effort();
        let mut packer = Packer::new(MAX_WINDOW_LOG);
        let mut out = Vec::new();
        g.bench_function(format!("pack, {}", effort), |b| {
            b.iter(|| {
                // A stream of its own each time, or it would only refer to the frame before.
                packer = Packer::new(MAX_WINDOW_LOG);
                out.clear();
                packer
                    .pack(black_box(&blocks), effort, &mut out)
                    .expect("packs")
            });
        });
        let mut unpacked = vec![0; blocks.len()];
        let mut out = Vec::new();
        let packing = Packer::new(MAX_WINDOW_LOG)
            .pack(&blocks, effort, &mut out)
            .expect("packs");
        g.bench_function(format!("unpack, {}", effort), |b| {
            b.iter(|| {
                Unpacker::default()
                    .unpack(packing, black_box(&out), &mut unpacked)
                    .expect("unpacks");
            });
        });
        assert!(unpacked == blocks);
    }
    g.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(700));
    targets = batches, plans, literals
}
criterion_main!(benches);
