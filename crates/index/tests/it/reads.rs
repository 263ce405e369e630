//! Counts the hash pages read per block looked up.

use drover_core::{Digest, Head};
use drover_index::{ImageId, Layout, Matcher, MatcherConfig, MatcherStats};
use drover_storage::FakeDirectory;

use crate::library::digest;

/// Blocks of a batch.
const BATCH: usize = 2048;
/// Copies begin at one of so many stretches of a batch.
const STARTS: usize = 16;
/// Median and spread of lengths.
const COPIED: (f64, f64) = (5.0, 2.1);
const FRESH: (f64, f64) = (2.0, 2.1);

/// Lengths with a long tail, as files and changes to them have: most are a few blocks.
fn length(rng: &mut fastrand::Rng, (median, spread): (f64, f64)) -> usize {
    let normal: f64 = (0..12).map(|_| rng.f64()).sum::<f64>() - 6.0;
    ((median * (spread * normal).exp()).ceil() as usize).min(BATCH)
}

/// What images are made of: everything that was there before, and where copies of it begin.
struct World {
    rng: fastrand::Rng,
    blocks: Vec<u32>,
    starts: Vec<u32>,
    /// Whether a block, when it was new, began a stretch of such.
    begins: Vec<bool>,
}

impl World {
    fn new(seed: u64) -> Self {
        World {
            rng: fastrand::Rng::with_seed(seed),
            blocks: Vec::new(),
            starts: Vec::new(),
            begins: Vec::new(),
        }
    }

    /// The next batch: seven blocks in ten are copied from anywhere before.
    fn batch(&mut self) -> &[u32] {
        let base = self.blocks.len();
        let mut copied = self.rng.bool();
        let mut starts = Vec::new();
        while self.blocks.len() < base + BATCH {
            let left = base + BATCH - self.blocks.len();
            starts.push(self.blocks.len() as u32);
            if copied && base > 0 {
                let from = self.starts[self.rng.usize(..self.starts.len())] as usize;
                let n = length(&mut self.rng, COPIED).min(left).min(base - from);
                self.blocks.extend_from_within(from..from + n);
            } else {
                let n = length(&mut self.rng, FRESH).min(left);
                let fresh = self.begins.len();
                self.blocks.extend(fresh as u32..(fresh + n) as u32);
                self.begins.extend((0..n).map(|i| i == 0));
            }
            copied = !copied;
        }
        self.starts.extend(starts.iter().take(STARTS));
        &self.blocks[base..]
    }

    /// As often as in images of machines: 7 % strong heads, 26 % weak ones, in places more than in others.
    fn head(&self, block: u32) -> Head {
        let draw = |n: u64| u64::from_le_bytes(digest(n).0[..8].try_into().unwrap()) % 1000;
        let dense = draw(u64::from(block / 64) | 1 << 40) < 400;
        match (draw(u64::from(block) | 1 << 41), dense) {
            (0..400, _) if self.begins[block as usize] => Head::Strong,
            (0..140, true) | (0..24, false) => Head::Strong,
            (140..680, true) | (24..106, false) => Head::Weak,
            _ => Head::No,
        }
    }
}

/// What a walk over images came to.
struct Walked {
    stats: MatcherStats,
    exact: u64,
    images: Vec<f64>,
}

impl Walked {
    fn reads_per_100(&self) -> f64 {
        self.stats.pages_read as f64 * 100.0 / self.stats.blocks as f64
    }

    fn print(&self, what: &str) {
        let s = &self.stats;
        let per = |n: u64| n as f64 * 100.0 / s.blocks as f64;
        eprintln!(
            "{what}: reads {:.2} of 100 ({:.2?} an image), {:.1} KiB in all; matched {:.2} of 100, of exact {:.2} %; false C0 {:.2} C1 {:.2} C2 {:.2}; runs of {:.1}; stored {:.2} in pieces of {:.1}, evicted {}; lookups C2 {:.1} C0 {:.1} C1 {:.1}; full C0 {:.0} C1 {:.0} C2 {:.0} %; evictions C0 {} C1 {} C2 {}",
            self.reads_per_100(),
            self.images,
            s.bytes_read as f64 / 10.24 / s.blocks as f64,
            per(s.matched),
            s.matched as f64 * 100.0 / self.exact as f64,
            per(s.c0.false_matches),
            per(s.c1.false_matches),
            per(s.c2.false_matches),
            s.matched as f64 / s.runs as f64,
            per(s.sequence_blocks_stored),
            s.sequence_blocks_stored as f64 / s.sequences_stored.max(1) as f64,
            s.sequences_evicted,
            per(s.c2.lookups),
            per(s.c0.lookups),
            per(s.c1.lookups),
            s.c0.entries as f64 * 100.0 / s.c0.capacity as f64,
            s.c1.entries as f64 * 100.0 / s.c1.capacity as f64,
            s.c2.entries as f64 * 100.0 / s.c2.capacity as f64,
            s.c0.evictions,
            s.c1.evictions,
            s.c2.evictions,
        );
    }
}

fn walk(config: MatcherConfig, images: u64, blocks: usize) -> Walked {
    let (mut m, _) = Matcher::open(FakeDirectory::default(), config).unwrap();
    let mut world = World::new(7);
    let (mut exact, mut each) = (0, Vec::new());
    for id in 0..images {
        let before = m.stats();
        let mut cursor = m.begin(ImageId(id)).unwrap();
        for _ in 0..blocks / BATCH {
            let mut known = world.begins.len() as u32;
            let ids = world.batch().to_vec();
            for &id in &ids {
                exact += u64::from(id < known);
                known = known.max(id + 1);
            }
            let digests: Vec<Digest> = ids.iter().map(|&id| digest(u64::from(id))).collect();
            let heads: Vec<Head> = ids.iter().map(|&id| world.head(id)).collect();
            m.batch(&mut cursor, &digests, &heads).unwrap();
        }
        m.finish(cursor).unwrap();
        let after = m.stats();
        each.push((after.pages_read - before.pages_read) as f64 * 100.0 / blocks as f64);
    }
    assert_eq!(m.take_repairs(), []);
    Walked {
        stats: m.stats(),
        exact,
        images: each,
    }
}

/// Pages kept in memory, whatever the scale: as many as a few batches need.
const PAGES: usize = 256;

/// The defaults with the caches and what entries address a `2^shift`th.
fn scaled(shift: u8) -> MatcherConfig {
    let d = MatcherConfig::default();
    MatcherConfig {
        c0_bytes: d.c0_bytes >> shift,
        c1_bytes: d.c1_bytes >> shift,
        c2_bytes: d.c2_bytes >> shift,
        cached_pages: PAGES,
        sequence_limit: d.sequence_limit >> shift,
        recent_layout: Layout {
            address_bits: d.recent_layout.address_bits - shift,
            ..d.recent_layout
        },
        sequence_layout: Layout {
            address_bits: d.sequence_layout.address_bits - shift,
            ..d.sequence_layout
        },
        ..d
    }
}

#[test]
fn blocks_that_a_full_index_does_not_have_cost_next_to_no_read() {
    // A 64th of the caches, the entries as they are by default.
    let layouts = MatcherConfig::default();
    let config = MatcherConfig {
        recent_layout: layouts.recent_layout,
        sequence_layout: layouts.sequence_layout,
        ..scaled(6)
    };
    let (mut m, _) = Matcher::open(FakeDirectory::default(), config).unwrap();
    let mut world = World::new(7);
    for id in 0..4 {
        let mut cursor = m.begin(ImageId(id)).unwrap();
        for _ in 0..128 {
            let ids = world.batch().to_vec();
            let digests: Vec<Digest> = ids.iter().map(|&id| digest(u64::from(id))).collect();
            let heads: Vec<Head> = ids.iter().map(|&id| world.head(id)).collect();
            m.batch(&mut cursor, &digests, &heads).unwrap();
        }
        m.finish(cursor).unwrap();
    }
    let full = m.stats();
    assert!(full.c0.entries * 10 > full.c0.capacity * 9, "{full:?}");
    assert!(full.c1.entries * 10 > full.c1.capacity * 8, "{full:?}");
    let mut cursor = m.begin(ImageId(9)).unwrap();
    let blocks = 64 * BATCH as u64;
    for batch in 0..64 {
        let ids = (0..BATCH as u64).map(|i| (1 << 50) + batch * BATCH as u64 + i);
        let digests: Vec<Digest> = ids.map(digest).collect();
        let heads: Vec<Head> = (0..BATCH as u32).map(|i| world.head(i)).collect();
        m.batch(&mut cursor, &digests, &heads).unwrap();
    }
    let stats = m.stats();
    assert_eq!(stats.matched, full.matched);
    let reads = stats.pages_read - full.pages_read;
    let per_100 = reads as f64 * 100.0 / blocks as f64;
    assert!(per_100 < 0.2, "{per_100} page reads for 100 new blocks");
}

#[test]
#[ignore = "17 million blocks, for the figures of decision 0015: cargo test -p drover-index --test it reads -- --ignored --nocapture"]
fn a_tebibyte_in_a_sixteenth() {
    let tib = 1 << 28;
    for (what, share) in [("64 GiB", 16), ("1 TiB", 1)] {
        let walked = walk(scaled(4), 4, tib / share / 16 / 4);
        walked.print(what);
        assert!(walked.reads_per_100() < 4.5);
        assert!(walked.stats.matched * 100 > walked.exact * 97);
    }
}
