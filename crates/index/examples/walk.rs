//! Walks over the digests of a tebibyte of data with the statistics of real images, and says what memory it took, what it
//! still found and how many pages it read (decision 0023):
//!
//! ```text
//! cargo run --release -p drover-index --example walk -- [--gib N] IMAGE...
//! ```
//!
//! Four synthetic images, together of N GiB (1024), go through a matcher with the default caches; nothing is sampled. An
//! image is a row of *units* of 2048 blocks (a batch). A unit alternates stretches of new blocks and stretches copied from any
//! earlier unit of any image; their lengths are drawn from those of the named images. A copy begins where a
//! stretch of the earlier unit begins, and as often as in the named images that is a strong head. Which other blocks are heads is
//! drawn in cells of 64 blocks. Everything is a function of the seed and the place. The index takes 3.5 GiB below `TMPDIR`.

mod images;

use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

use drover_core::{BLOCK_SIZE_U64, Digest, Head};
use drover_index::testing::ExactDedup;
use drover_index::{ImageId, Matcher, MatcherConfig};
use drover_storage::HostDirectory;
use images::{Image, Result, percent};

/// Blocks of a unit, and of a cell.
const UNIT: u32 = 2048;
const CELL: usize = 64;
/// Lengths and cells that are kept of the images.
const KEPT: usize = 1024;
/// Copies begin at one of so many stretches of a unit.
const STARTS: u64 = 16;
const IMAGES: u64 = 4;
const SEED: u64 = 0x5eed_0ff5;

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1).peekable();
    let mut gib = 1024;
    if args.next_if(|arg| arg == "--gib").is_some() {
        let text = args.next().and_then(|n| n.into_string().ok());
        gib = text.ok_or("--gib wants a number")?.parse::<u64>()?;
    }
    let paths: Vec<PathBuf> = args.map(Into::into).collect();
    let statistics = Statistics::of(images::all(&paths)?)?;
    let model = Model {
        statistics,
        units: (gib << 30) / (u64::from(UNIT) * BLOCK_SIZE_U64) / IMAGES,
    };
    let dir = tempfile::tempdir()?;
    let (mut matcher, _) =
        Matcher::open(HostDirectory::open(dir.path())?, MatcherConfig::default())?;
    let start = Instant::now();
    let (mut copies, mut digests, mut heads) = (0, Vec::new(), Vec::new());
    for image in 0..IMAGES {
        let mut cursor = matcher.begin(ImageId(image))?;
        for unit in 0..model.units {
            digests.clear();
            heads.clear();
            copies += model.unit(image * model.units + unit, &mut digests, &mut heads);
            matcher.batch(&mut cursor, &digests, &heads)?;
        }
        matcher.finish(cursor)?;
        let stats = matcher.stats();
        let caches = [stats.c0, stats.c1, stats.c2];
        let sum = |of: fn(&drover_index::CacheStats) -> u64| caches.iter().map(of).sum::<u64>();
        println!(
            "{:.2} TiB: own count {:.1} MiB, peak {:.1} MiB, caches {:.1} % full, {:.2} % of exact, {:.2} reads for 100 blocks, {:.0} s",
            (stats.blocks * BLOCK_SIZE_U64) as f64 / (1u64 << 40) as f64,
            stats.memory as f64 / f64::from(1 << 20),
            peak_mib()?,
            percent(sum(|c| c.entries), sum(|c| c.capacity)),
            percent(stats.matched, copies),
            percent(stats.pages_read, stats.blocks),
            start.elapsed().as_secs_f64()
        );
    }
    let repairs = matcher.take_repairs();
    assert!(
        repairs.is_empty(),
        "the index had to be repaired: {repairs:?}"
    );
    Ok(())
}

/// The greatest resident set of this process so far: the images that the statistics were drawn from are in it, one at a time.
fn peak_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    Ok(kib.ok_or("no VmHWM")?.parse::<f64>()? / 1024.0)
}

/// What synthetic images have of real ones.
struct Statistics {
    /// Lengths, in blocks, of stretches that earlier blocks do not have, and of those that they have.
    fresh: Vec<u32>,
    copied: Vec<u32>,
    /// The share of the latter that begin with a strong head.
    strong: f64,
    /// Strong and weak heads of 64 neighbouring blocks.
    cells: Vec<(u64, u64)>,
}

impl Statistics {
    /// From the second image on: the first has hardly anything to copy.
    fn of(images: Vec<Image>) -> Result<Self> {
        let (mut fresh, mut copied, mut cells) = (Vec::new(), Vec::new(), Vec::new());
        let mut strong = 0;
        let mut known = ExactDedup::new();
        for (number, image) in images.into_iter().enumerate() {
            let seen: Vec<bool> = image.digests.iter().map(|d| known.seen(d)).collect();
            let mut at = 0;
            for stretch in seen.chunk_by(|a, b| a == b).filter(|_| number > 0) {
                let lengths = if stretch[0] { &mut copied } else { &mut fresh };
                lengths.push((stretch.len() as u32).min(UNIT));
                strong += u32::from(stretch[0] && image.heads[at] == Head::Strong);
                at += stretch.len();
            }
            cells.extend(image.heads.as_chunks::<CELL>().0.iter().map(|heads| {
                let bits = |which| (0..CELL).fold(0, |b, i| b | u64::from(heads[i] == which) << i);
                (bits(Head::Strong), bits(Head::Weak))
            }));
        }
        if fresh.is_empty() || copied.is_empty() || cells.is_empty() {
            return Err("the images have nothing in common, or nothing of their own".into());
        }
        fresh.sort_unstable();
        copied.sort_unstable();
        Ok(Self {
            fresh: sample(&fresh),
            strong: f64::from(strong) / copied.len() as f64,
            copied: sample(&copied),
            cells: sample(&cells),
        })
    }
}

/// At most [`KEPT`] of them, evenly.
fn sample<T: Copy>(all: &[T]) -> Vec<T> {
    let kept = all.len().min(KEPT);
    let at = |i: usize| all[(2 * i + 1) * all.len() / (2 * kept)];
    (0..kept).map(at).collect()
}

/// Synthetic images of one size. Units are counted over all images.
struct Model {
    statistics: Statistics,
    units: u64,
}

/// Blocks that first were in a row, from the block `first` on, counted over all images.
struct Found {
    first: u64,
    blocks: u32,
    /// A stretch of new blocks began here.
    begins: bool,
}

/// A stretch of a unit.
struct Stretch {
    at: u32,
    length: u32,
    /// Which earlier unit it is copied from, and from the start of which of that one's stretches.
    from: Option<(u64, u64)>,
}

impl Model {
    /// Adds a unit's digests and heads; returns how many of its blocks are copies.
    fn unit(&self, unit: u64, digests: &mut Vec<Digest>, heads: &mut Vec<Head>) -> u64 {
        let own = unit * u64::from(UNIT);
        let mut copies = 0;
        self.trace(unit, 0..UNIT, &mut |found: Found| {
            if found.first < own {
                copies += u64::from(found.blocks);
            }
            for block in found.first..found.first + u64::from(found.blocks) {
                digests.push(digest(block));
                heads.push(self.head(block, found.begins && block == found.first));
            }
        });
        copies
    }

    fn stretches(&self, unit: u64) -> impl Iterator<Item = Stretch> {
        let mut draw = Draw(mix(SEED ^ unit.wrapping_mul(0xd134_2543_de82_ef95)));
        let mut copied = draw.below(2) == 1;
        let mut at = 0;
        std::iter::from_fn(move || {
            if at == UNIT {
                return None;
            }
            // A copy may go on in the unit after the one where it begins.
            let from = (copied && unit > 1).then(|| (draw.below(unit - 1), draw.below(STARTS)));
            let lengths = match from {
                Some(_) => &self.statistics.copied,
                None => &self.statistics.fresh,
            };
            let drawn = lengths[draw.below(lengths.len() as u64) as usize];
            let length = drawn.min(UNIT - at);
            let stretch = Stretch { at, length, from };
            at += length;
            copied = !copied;
            Some(stretch)
        })
    }

    /// Tells in order where the blocks in `range` of a unit first were.
    fn trace(&self, unit: u64, range: Range<u32>, found: &mut impl FnMut(Found)) {
        for Stretch { at, length, from } in self.stretches(unit) {
            let (first, end) = (range.start.max(at), range.end.min(at + length));
            if at >= range.end {
                break;
            }
            if first >= end {
                continue;
            }
            let Some((source, start)) = from else {
                found(Found {
                    first: unit * u64::from(UNIT) + u64::from(first),
                    blocks: end - first,
                    begins: first == at,
                });
                continue;
            };
            let start = self.stretches(source).take(start as usize + 1).last();
            let moved = |block: u32| block - at + start.as_ref().map_or(0, |s| s.at);
            let (first, end) = (moved(first), moved(end));
            if first < UNIT {
                self.trace(source, first..end.min(UNIT), found);
            }
            if end > UNIT {
                self.trace(source + 1, first.max(UNIT) - UNIT..end - UNIT, found);
            }
        }
    }

    fn head(&self, block: u64, begins: bool) -> Head {
        let chance = mix(SEED.rotate_left(43) ^ block) as f64 / u64::MAX as f64;
        if begins && chance < self.statistics.strong {
            return Head::Strong;
        }
        let cells = &self.statistics.cells;
        let drawn = mix(SEED.rotate_left(31) ^ (block / CELL as u64));
        let (strong, weak) = cells[(drawn % cells.len() as u64) as usize];
        match (
            strong >> (block % CELL as u64) & 1,
            weak >> (block % CELL as u64) & 1,
        ) {
            (1, _) => Head::Strong,
            (_, 1) => Head::Weak,
            _ => Head::No,
        }
    }
}

fn digest(block: u64) -> Digest {
    let mut draw = Draw(mix(SEED.rotate_left(17) ^ block));
    let mut digest = Digest::default();
    for word in digest.0.as_chunks_mut::<8>().0 {
        *word = draw.next().to_le_bytes();
    }
    digest
}

/// A row of pseudo-random numbers (splitmix64).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }
}

fn mix(v: u64) -> u64 {
    let z = (v ^ (v >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
