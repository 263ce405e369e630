//! Synthetic images with a library's statistics, as digests only, and a storage that makes their hash files
//! anew whenever they are read: 8 TiB of images need no disk.
//!
//! An image is a row of *units* of 2048 blocks (a batch). A unit alternates stretches of new blocks and
//! stretches copied from an earlier unit, of that image or of any image before; their lengths are drawn from the
//! library's. A copy begins where a stretch of the earlier unit begins, and as often as in the library that is a
//! strong head. Which other blocks are heads is drawn from the library in cells of 64 blocks, so that
//! files are as long as they are there; a copy is a head where its original is one. Everything is a function of
//! the seed and the place, so any page can be made at any time.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use drover_core::{Digest, Head};
use drover_index::testing::{ExactDedup, hash_page};
use drover_index::{ImageId, Matcher, SEGMENT_SLOTS};
use drover_storage::{Access, Directory, Lock};
use serde::{Deserialize, Serialize};

use super::matching::{Image, cpu_time};

/// Blocks of a unit.
pub const UNIT: u32 = 2048;
/// Blocks of a cell.
const CELL: usize = 64;
/// Lengths and cells that are kept of a library.
const KEPT: usize = 1024;
/// Bytes of a hash page.
pub const PAGE_BYTES: u64 = 4096;
/// Synthetic images have numbers from here on.
const FIRST: u64 = 1 << 32;

/// What synthetic images have of a library.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Lengths of stretches that earlier blocks do not have, in blocks.
    fresh: Vec<u32>,
    /// Lengths of stretches that they have.
    copied: Vec<u32>,
    /// The share of these that begin with a strong head.
    strong: f64,
    /// Strong and weak heads of 64 neighbouring blocks.
    cells: Vec<(u64, u64)>,
}

impl Statistics {
    /// What a library is like, from its second image on: the first has hardly anything to copy.
    ///
    /// # Errors
    /// When no two images have anything in common.
    pub fn of(images: &[Arc<Image>]) -> Result<Self> {
        let (mut fresh, mut copied, mut cells) = (Vec::new(), Vec::new(), Vec::new());
        let mut strong = 0;
        let mut known = ExactDedup::new();
        for (number, image) in images.iter().enumerate() {
            let seen: Vec<bool> = image.digests.iter().map(|d| known.seen(d)).collect();
            if number > 0 {
                let mut at = 0;
                for stretch in seen.chunk_by(|a, b| a == b) {
                    let lengths = if stretch[0] { &mut copied } else { &mut fresh };
                    lengths.push((stretch.len() as u32).min(UNIT));
                    strong += u32::from(stretch[0] && image.heads[at] == Head::Strong);
                    at += stretch.len();
                }
            }
            cells.extend(image.heads.as_chunks::<CELL>().0.iter().map(cell));
        }
        if fresh.is_empty() || copied.is_empty() || cells.is_empty() {
            bail!("the images have nothing in common, or nothing of their own");
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

    /// The share of blocks that are heads.
    pub fn heads(&self) -> f64 {
        let heads: u32 = self.cells.iter().map(|c| (c.0 | c.1).count_ones()).sum();
        f64::from(heads) / (self.cells.len() * CELL) as f64
    }

    /// The share of blocks that are copies.
    pub fn copies(&self) -> f64 {
        let mean = |v: &[u32]| v.iter().map(|&n| f64::from(n)).sum::<f64>() / v.len() as f64;
        let (fresh, copied) = (mean(&self.fresh), mean(&self.copied));
        copied / (fresh + copied)
    }
}

fn cell(heads: &[Head; CELL]) -> (u64, u64) {
    let bits = |which| (0..CELL).fold(0, |bits, i| bits | u64::from(heads[i] == which) << i);
    (bits(Head::Strong), bits(Head::Weak))
}

/// At most [`KEPT`] of them, evenly.
fn sample<T: Copy>(all: &[T]) -> Vec<T> {
    let kept = all.len().min(KEPT);
    (0..kept)
        .map(|i| all[(2 * i + 1) * all.len() / (2 * kept)])
        .collect()
}

/// A series of synthetic images of one size.
#[derive(Debug)]
pub struct Model {
    statistics: Statistics,
    seed: u64,
    units: u64,
}

/// Where a block first was: its unit, counted over all images, and its place there.
type Origin = u64;

/// Blocks that first were in a row.
struct Found {
    first: Origin,
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

/// Copies begin at one of so many stretches of a unit.
const STARTS: u64 = 16;

impl Model {
    /// Images of `units` units each.
    pub fn new(statistics: Statistics, seed: u64, units: u64) -> Self {
        Self {
            statistics,
            seed,
            units,
        }
    }

    /// Blocks of an image.
    pub fn blocks(&self) -> u64 {
        self.units * u64::from(UNIT)
    }

    /// Units of an image.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// The number under which the matcher knows an image.
    pub fn id(image: u64) -> ImageId {
        ImageId(FIRST + image)
    }

    /// Adds a unit's digests and heads to `digests` and `heads`; returns how many of its blocks are copies.
    pub fn unit(
        &self,
        image: u64,
        unit: u64,
        digests: &mut Vec<Digest>,
        heads: &mut Vec<Head>,
    ) -> u64 {
        let unit = image * self.units + unit;
        let own = unit * u64::from(UNIT);
        let mut copies = 0;
        self.trace(unit, 0..UNIT, &mut |found: Found| {
            copies += if found.first < own {
                u64::from(found.blocks)
            } else {
                0
            };
            for block in found.first..found.first + u64::from(found.blocks) {
                digests.push(self.digest(block));
                heads.push(self.head(block, found.begins && block == found.first));
            }
        });
        copies
    }

    /// The hash pages of an image.
    pub fn pages(&self) -> u64 {
        self.blocks().div_ceil(SEGMENT_SLOTS)
    }

    /// The digests of a hash page, which may be of two units.
    fn page(&self, image: u64, page: u64) -> Vec<Digest> {
        let mut digests = Vec::with_capacity(SEGMENT_SLOTS as usize);
        let mut block = page * SEGMENT_SLOTS;
        let end = (block + SEGMENT_SLOTS).min(self.blocks());
        while block < end {
            let from = (block % u64::from(UNIT)) as u32;
            let to = u64::from(UNIT).min(u64::from(from) + end - block) as u32;
            let unit = image * self.units + block / u64::from(UNIT);
            self.trace(unit, from..to, &mut |found: Found| {
                let blocks = found.first..found.first + u64::from(found.blocks);
                digests.extend(blocks.map(|block| self.digest(block)));
            });
            block += u64::from(to - from);
        }
        digests
    }

    /// The stretches of a unit, counted over all images.
    fn stretches(&self, unit: u64) -> impl Iterator<Item = Stretch> {
        let mut draw = Draw(mix(self.seed ^ unit.wrapping_mul(0xd134_2543_de82_ef95)));
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
            let stretch = Stretch {
                at,
                length: drawn.min(UNIT - at),
                from,
            };
            at += stretch.length;
            copied = !copied;
            Some(stretch)
        })
    }

    /// Tells in order where the blocks in `range` of a unit first were.
    fn trace(&self, unit: u64, range: Range<u32>, found: &mut impl FnMut(Found)) {
        for stretch in self.stretches(unit) {
            let Stretch { at, length, from } = stretch;
            if at >= range.end {
                break;
            }
            let (first, end) = (range.start.max(at), range.end.min(at + length));
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

    fn digest(&self, block: Origin) -> Digest {
        let mut draw = Draw(mix(self.seed.rotate_left(17) ^ block));
        let mut digest = Digest::default();
        for word in digest.0.as_chunks_mut::<8>().0 {
            *word = draw.next().to_le_bytes();
        }
        digest
    }

    fn head(&self, block: Origin, begins: bool) -> Head {
        let chance = |salt: u32| mix(self.seed.rotate_left(salt) ^ block) as f64 / u64::MAX as f64;
        if begins && chance(43) < self.statistics.strong {
            return Head::Strong;
        }
        let cells = &self.statistics.cells;
        let drawn = mix(self.seed.rotate_left(31) ^ (block / CELL as u64));
        let (strong, weak) = cells[(drawn % cells.len() as u64) as usize];
        let bit = block % CELL as u64;
        if strong >> bit & 1 == 1 {
            Head::Strong
        } else if weak >> bit & 1 == 1 {
            Head::Weak
        } else {
            Head::No
        }
    }
}

/// What sending a synthetic image came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Walked {
    /// Blocks that are copies: what exact deduplication matches.
    pub copies: u64,
    /// Processor time in the matcher.
    pub spent: Duration,
}

/// Sends a synthetic image through a matcher whose storage is a [`Regrown`] one of this model.
///
/// # Errors
/// When the matcher fails.
pub fn send(matcher: &mut Matcher, model: &Model, image: u64) -> Result<Walked> {
    let mut cursor = matcher.begin(Model::id(image))?;
    let mut walked = Walked::default();
    let (mut digests, mut heads) = (Vec::new(), Vec::new());
    for unit in 0..model.units() {
        digests.clear();
        heads.clear();
        walked.copies += model.unit(image, unit, &mut digests, &mut heads);
        let start = cpu_time();
        matcher.batch(&mut cursor, &digests, &heads)?;
        walked.spent += cpu_time() - start;
    }
    matcher.finish(cursor)?;
    Ok(walked)
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

/// A directory that keeps every file but the hash files of synthetic images.
pub struct Regrown<D> {
    inner: D,
    model: Arc<Model>,
}

/// A synthetic image's hash file: what is written to it is what is read from it, so it is not kept.
struct RegrownFile(Arc<Model>, u64);

impl<D> Regrown<D> {
    /// Keeps in `inner` what is kept.
    pub fn new(inner: D, model: Arc<Model>) -> Self {
        Self { inner, model }
    }

    /// The hash file of a synthetic image, if it is one.
    fn regrown(&self, name: &str) -> Option<Box<dyn drover_storage::File>> {
        let id = name.strip_prefix("img-")?.strip_suffix(".hash")?;
        let image = u64::from_str_radix(id, 16).ok()?.checked_sub(FIRST)?;
        Some(Box::new(RegrownFile(Arc::clone(&self.model), image)))
    }
}

impl<D: Directory> Directory for Regrown<D> {
    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn drover_storage::File>> {
        let regrown = self.regrown(name);
        regrown.map_or_else(|| self.inner.open(name, access), Ok)
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn drover_storage::File>> {
        let regrown = self.regrown(name);
        regrown.map_or_else(|| self.inner.create(name), Ok)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.inner.list()
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn lock(&self, name: &str, lock: Lock) -> io::Result<Box<dyn Send + Sync>> {
        self.inner.lock(name, lock)
    }

    fn describe(&self, name: &str) -> String {
        self.inner.describe(name)
    }
}

impl drover_storage::File for RegrownFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let Self(model, image) = self;
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let no = at / PAGE_BYTES;
            if no >= model.pages() {
                break;
            }
            let page = hash_page(no, &model.page(*image, no));
            let bytes = &page[(at % PAGE_BYTES) as usize..];
            let n = bytes.len().min(buf.len() - done);
            buf[done..done + n].copy_from_slice(&bytes[..n]);
            done += n;
        }
        Ok(done)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.pages() * PAGE_BYTES)
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn punch_hole(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn allocate(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::matching::{self, images, load_all};
    use drover_index::MatcherConfig;
    use drover_storage::FakeDirectory;

    fn model(units: u64) -> (tempfile::TempDir, Arc<Model>) {
        let dir = tempfile::tempdir().unwrap();
        let paths = images(&matching::tests::lab(dir.path())).unwrap();
        let statistics = Statistics::of(&load_all(&paths).unwrap()).unwrap();
        (dir, Arc::new(Model::new(statistics, 5, units)))
    }

    #[test]
    fn images_are_like_the_library_and_copies_are_copies() {
        let (_dir, model) = model(8);
        let (mut known, mut seen, mut copies) = (ExactDedup::new(), 0, 0);
        let (mut digests, mut heads) = (Vec::new(), Vec::new());
        for place in 0..12 * 8 {
            let from = digests.len();
            let copied = model.unit(place / 8, place % 8, &mut digests, &mut heads);
            assert_eq!(digests.len() - from, UNIT as usize);
            copies += copied;
            seen += digests[from..].iter().filter(|d| known.seen(d)).count() as u64;
        }
        // What is a copy exact deduplication finds, and nothing else but blocks copied within their unit.
        assert_eq!(seen, copies);
        let share = |n: u64| n as f64 / digests.len() as f64;
        assert!((share(copies) - model.statistics.copies()).abs() < 0.1);
        let heads = heads.iter().filter(|h| **h != Head::No).count() as u64;
        assert!((share(heads) - model.statistics.heads()).abs() < 0.02);
        assert_eq!(model.statistics, {
            let text = serde_json::to_string(&model.statistics).unwrap();
            serde_json::from_str(&text).unwrap()
        });
    }

    #[test]
    fn what_is_read_is_what_was_written() {
        let (_dir, model) = model(3);
        let (mut digests, mut heads) = (Vec::new(), Vec::new());
        for unit in 0..3 {
            model.unit(2, unit, &mut digests, &mut heads);
        }
        let storage = Regrown::new(FakeDirectory::default(), Arc::clone(&model));
        let name = format!("img-{:016x}.hash", Model::id(2).0);
        let file = storage.open(&name, Access::Read).unwrap();
        // What a matcher writes.
        let plain = FakeDirectory::default();
        let (mut m, _) = Matcher::open(plain.clone(), MatcherConfig::default()).unwrap();
        let mut cursor = m.begin(Model::id(2)).unwrap();
        m.record(&mut cursor, &digests, &heads).unwrap();
        m.finish(cursor).unwrap();
        let bytes = plain.bytes(&name).unwrap();
        assert_eq!(file.len().unwrap(), bytes.len() as u64);
        let mut read = vec![0; bytes.len() + 100];
        assert_eq!(file.read_at(&mut read, 0).unwrap(), bytes.len());
        assert!(read.starts_with(&bytes));
        assert_eq!(file.read_at(&mut read[..5000], 4133).unwrap(), 5000);
        assert_eq!(read[..5000], bytes[4133..9133]);
        // The matcher finds an image that only the storage remembers.
        let (mut m, _) = Matcher::open(storage, MatcherConfig::default()).unwrap();
        let mut cursor = m.begin(Model::id(2)).unwrap();
        for (d, h) in digests.chunks(2048).zip(heads.chunks(2048)) {
            m.batch(&mut cursor, d, h).unwrap();
        }
        m.finish(cursor).unwrap();
        let mut cursor = m.begin(ImageId(1)).unwrap();
        let before = m.stats().matched;
        m.batch(&mut cursor, &digests[..2048], &heads[..2048])
            .unwrap();
        assert_eq!(m.stats().matched - before, 2048);
        assert_eq!(m.take_repairs(), []);
    }
}
