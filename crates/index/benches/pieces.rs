//! How fast one core digests, scans, looks up and matches.
//!
//! `cargo bench -p drover-index`, 40 seconds; the index is in `/dev/shm` where there is one, so that the
//! figures are of the matcher and not of a disk. Blocks are timed by the processor's time, the
//! kernel's for reading and writing hash pages included, so that a busy machine gives nearly the
//! same figures as an idle one.

use std::hint::black_box;
use std::path::Path;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use drover_core::{BLOCK_SIZE, Digest, Head};
use drover_index::testing::Cache;
use drover_index::{
    ImageId, Matcher, MatcherConfig, Scanner, digest_block, digest_blocks, is_strong_head,
};
use drover_storage::HostDirectory;

/// Blocks in a batch: 8 MiB of data.
const BATCH: usize = 2048;

fn storage() -> (tempfile::TempDir, HostDirectory) {
    let shm = Path::new("/dev/shm");
    let dir = if shm.is_dir() {
        tempfile::tempdir_in(shm)
    } else {
        tempfile::tempdir()
    };
    let dir = dir.expect("a directory");
    let storage = HostDirectory::open(dir.path()).expect("a directory");
    (dir, storage)
}

fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn random(rng: &mut fastrand::Rng, blocks: usize) -> (Vec<Digest>, Vec<Head>) {
    let mut digests = vec![Digest::default(); blocks];
    digests.iter_mut().for_each(|d| rng.fill(&mut d.0));
    // As in the paper: about 10 % of all blocks are heads.
    let heads = (0..blocks)
        .map(|_| match rng.u32(..20) {
            0 => Head::Strong,
            1 => Head::Weak,
            _ => Head::No,
        })
        .collect();
    (digests, heads)
}

fn bytes(c: &mut Criterion) {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut data = vec![0u8; 256 * BLOCK_SIZE];
    rng.fill(&mut data);
    let mut g = c.benchmark_group("bytes");
    g.throughput(Throughput::Bytes(data.len() as u64));
    let mut out = Vec::new();
    g.bench_function("digest, sixteen blocks together", |b| {
        b.iter(|| {
            out.clear();
            digest_blocks(black_box(&data), &mut out);
        });
    });
    g.bench_function("digest, one by one", |b| {
        b.iter(|| {
            out.clear();
            out.extend(black_box(&data).chunks(BLOCK_SIZE).map(digest_block));
        });
    });
    let zeros = vec![0u8; data.len()];
    g.bench_function("zero scan", |b| {
        b.iter(|| Scanner::new().scan(black_box(&zeros)));
    });
    g.finish();
    // Of a block that is not zero only the ends are looked at: bytes would say nothing.
    let mut g = c.benchmark_group("heads");
    g.throughput(Throughput::Elements((data.len() / BLOCK_SIZE) as u64));
    g.bench_function("head scan", |b| {
        b.iter(|| Scanner::new().scan(black_box(&data)));
    });
    g.bench_function("magic numbers", |b| {
        b.iter(|| {
            let blocks = black_box(&data).as_chunks::<BLOCK_SIZE>().0;
            blocks.iter().filter(|block| is_strong_head(*block)).count()
        });
    });
    g.finish();
}

/// One cache of 4 MiB, larger than what a core keeps near itself.
fn cuckoo(c: &mut Criterion) {
    let mut g = c.benchmark_group("cuckoo");
    g.throughput(Throughput::Elements(BATCH as u64));
    let mut rng = fastrand::Rng::with_seed(4);
    let new = |rng: &mut fastrand::Rng, n: usize| random(rng, n).0;
    let filled = |rng: &mut fastrand::Rng, percent: usize| {
        let mut cache = Cache::new(4 << 20);
        let known = new(rng, (1 << 20) * percent / 100);
        for (page, digest) in known.iter().enumerate() {
            cache.insert(digest, page as u32);
        }
        (cache, known)
    };
    let (half, known) = filled(&mut rng, 50);
    let mut batches = known[..64 * BATCH].chunks_exact(BATCH).cycle();
    g.bench_function("look up, there", |b| {
        b.iter(|| {
            let batch = batches.next().unwrap_or_default();
            batch
                .iter()
                .map(|d| half.look_up(black_box(d)).1)
                .sum::<usize>()
        });
    });
    let absent = new(&mut rng, 64 * BATCH);
    let mut batches = absent.chunks_exact(BATCH).cycle();
    g.bench_function("look up, not there", |b| {
        b.iter(|| {
            let batch = batches.next().unwrap_or_default();
            batch
                .iter()
                .map(|d| half.look_up(black_box(d)).1)
                .sum::<usize>()
        });
    });
    for (name, percent) in [("insert, half full", 50), ("insert, full", 110)] {
        let (mut cache, known) = filled(&mut rng, percent);
        let (capacity, begun) = cache.fill();
        g.bench_function(name, |b| {
            b.iter_custom(|times| {
                let mut spent = Duration::ZERO;
                for _ in 0..times {
                    // Half full stays so.
                    if percent < 100 && cache.fill().1 > begun + capacity / 20 {
                        cache = Cache::new(4 << 20);
                        for (page, digest) in known.iter().enumerate() {
                            cache.insert(digest, page as u32);
                        }
                    }
                    let batch = new(&mut rng, BATCH);
                    let start = cpu_time();
                    for digest in &batch {
                        black_box(cache.insert(digest, 7));
                    }
                    spent += cpu_time() - start;
                }
                spent
            });
        });
    }
    g.finish();
}

/// A destination that already has `known` blocks, none of them of what is asked for.
fn unmatched(c: &mut Criterion) {
    let mut g = c.benchmark_group("blocks");
    g.throughput(Throughput::Elements(BATCH as u64));
    for (name, known, config) in [
        ("unmatched, empty index", 0, MatcherConfig::default()),
        (
            "unmatched, a million known",
            1 << 20,
            MatcherConfig::default(),
        ),
        ("unmatched, caches full", 8 << 20, MatcherConfig::default()),
        ("unmatched, heads only", 1 << 20, MatcherConfig::paper()),
    ] {
        let (_dir, storage) = storage();
        let (mut m, _) = Matcher::open(storage, config).expect("opens");
        let mut rng = fastrand::Rng::with_seed(2);
        let mut cursor = m.begin(ImageId(0)).expect("begins");
        for _ in 0..known / BATCH {
            let (d, h) = random(&mut rng, BATCH);
            m.record(&mut cursor, &d, &h).expect("records");
        }
        m.finish(cursor).expect("finishes");
        let mut cursor = m.begin(ImageId(1)).expect("begins");
        g.bench_function(name, |b| {
            b.iter_custom(|times| {
                let mut spent = Duration::ZERO;
                for _ in 0..times {
                    let (d, h) = random(&mut rng, BATCH);
                    if cursor.blocks() > 1 << 20 {
                        m.forget(ImageId(1)).expect("forgets");
                        cursor = m.begin(ImageId(1)).expect("begins");
                    }
                    let start = cpu_time();
                    black_box(m.batch(&mut cursor, &d, &h).expect("matches"));
                    spent += cpu_time() - start;
                }
                spent
            });
        });
    }
    g.finish();
}

/// An image that is sent again: the second time through C0 and C1, after that through C2.
fn matched(c: &mut Criterion) {
    let mut g = c.benchmark_group("blocks");
    const BLOCKS: usize = 64 * BATCH;
    g.throughput(Throughput::Elements(BLOCKS as u64));
    g.sample_size(10);
    let mut rng = fastrand::Rng::with_seed(3);
    let (digests, heads) = random(&mut rng, BLOCKS);
    let send = |m: &mut Matcher, id: u64| {
        let mut cursor = m.begin(ImageId(id)).expect("begins");
        for (d, h) in digests.chunks(BATCH).zip(heads.chunks(BATCH)) {
            black_box(m.batch(&mut cursor, d, h).expect("matches"));
        }
        cursor
    };
    let fresh = || {
        let (dir, storage) = storage();
        let (mut m, _) = Matcher::open(storage, MatcherConfig::default()).expect("opens");
        let cursor = send(&mut m, 0);
        m.finish(cursor).expect("finishes");
        (dir, m)
    };
    // With sequences that are never long enough to be stored, only extension is left.
    g.bench_function("sequence extension", |b| {
        b.iter_custom(|times| {
            let extend = || {
                let (_dir, storage) = storage();
                let config = MatcherConfig {
                    min_sequence: u32::MAX,
                    ..MatcherConfig::default()
                };
                let (mut m, _) = Matcher::open(storage, config).expect("opens");
                let cursor = send(&mut m, 0);
                m.finish(cursor).expect("finishes");
                let start = cpu_time();
                send(&mut m, 1);
                let spent = cpu_time() - start;
                assert_eq!(m.stats().matched, BLOCKS as u64);
                spent
            };
            (0..times).map(|_| extend()).sum()
        });
    });
    let timed = |(_dir, mut m): (tempfile::TempDir, Matcher), id: u64| {
        let start = cpu_time();
        send(&mut m, id);
        cpu_time() - start
    };
    g.bench_function("matched in an image, sequences stored", |b| {
        b.iter_custom(|times| (0..times).map(|_| timed(fresh(), 1)).sum());
    });
    let again = || {
        let (dir, mut m) = fresh();
        let cursor = send(&mut m, 1);
        m.finish(cursor).expect("finishes");
        (dir, m)
    };
    g.bench_function("matched in the sequence cache", |b| {
        b.iter_custom(|times| (0..times).map(|_| timed(again(), 2)).sum());
    });
    g.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = bytes, cuckoo, unmatched, matched
}
criterion_main!(benches);
