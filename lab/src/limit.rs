//! The limit: the bytes sent by a deduplicator with unbounded memory and a good compressor.
//!
//! It is the size, after `zstd -3 --long=27`, of an image's nonzero 4 KiB blocks that occur neither in earlier images
//! nor earlier in the image itself. A method that sends whole blocks can hardly do better, so drover's bytes on the
//! wire are compared with it.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use drover_core::{BLOCK_SIZE, is_zero};
use drover_storage::atomic_replace;
use rustix::fs::SeekFrom;
use serde::{Deserialize, Serialize};
use zstd::stream::Encoder;

/// Compression level of the limit: `zstd -3 --long=27`.
const LEVEL: i32 = 3;
const WINDOW_LOG: u32 = 27;
/// Read size.
const READ: usize = 1 << 20;

/// The limit for one image.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Limit {
    /// The image's file name.
    pub name: String,
    /// Its size, holes included.
    pub size_bytes: u64,
    /// Nonzero blocks.
    pub data_blocks: u64,
    /// Blocks found in an earlier image.
    pub matched_blocks: u64,
    /// Blocks found earlier in this image.
    pub repeated_blocks: u64,
    /// New blocks.
    pub unique_blocks: u64,
    /// The limit: size of the new blocks, compressed.
    pub limit_bytes: u64,
}

/// The set of blocks seen so far, by the first half of their digests (false matches are unlikely below 2^60 blocks).
pub struct Known {
    /// Bytes of a block.
    block: usize,
    earlier: HashSet<u128>,
    current: HashSet<u128>,
}

impl Default for Known {
    fn default() -> Self {
        Self::in_blocks(BLOCK_SIZE)
    }
}

impl Known {
    /// Nothing yet, in blocks of so many bytes.
    fn in_blocks(block: usize) -> Self {
        Self {
            block,
            earlier: HashSet::new(),
            current: HashSet::new(),
        }
    }

    /// Adds an image, and returns the limit for sending it.
    ///
    /// # Errors
    /// When the image cannot be read.
    pub fn add(&mut self, path: &Path) -> Result<Limit> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let size_bytes = file.metadata()?.len();
        let mut limit = Limit {
            name,
            size_bytes,
            data_blocks: 0,
            matched_blocks: 0,
            repeated_blocks: 0,
            unique_blocks: 0,
            limit_bytes: 0,
        };
        let mut compressed = compressor()?;
        each_piece(&file, size_bytes, self.block, |_, block| {
            limit.data_blocks += 1;
            let key = key_of(block);
            if self.earlier.contains(&key) {
                limit.matched_blocks += 1;
            } else if self.current.insert(key) {
                limit.unique_blocks += 1;
                compressed.write_all(block)?;
            } else {
                limit.repeated_blocks += 1;
            }
            Ok(())
        })
        .with_context(|| format!("cannot read {}", path.display()))?;
        self.earlier.extend(self.current.drain());
        limit.limit_bytes = compressed.finish()?.0;
        Ok(limit)
    }

    /// Adds an image that the destination already has, without computing its limit.
    ///
    /// # Errors
    /// When the image cannot be read.
    pub fn learn(&mut self, path: &Path) -> Result<()> {
        self.earlier.extend(digests_of(path, self.block)?);
        Ok(())
    }
}

/// Its nonzero blocks, by the first half of their digests.
///
/// # Errors
/// When the image cannot be read.
pub fn digests(path: &Path) -> Result<HashSet<u128>> {
    digests_of(path, BLOCK_SIZE)
}

fn digests_of(path: &Path, block: usize) -> Result<HashSet<u128>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let size = file.metadata()?.len();
    let mut digests = HashSet::new();
    each_piece(&file, size, block, |_, block| {
        digests.insert(key_of(block));
        Ok(())
    })
    .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(digests)
}

/// Prints the limit of each image in order; `with` are images that the destination already has.
pub fn print(images: &[PathBuf], with: &[PathBuf], json: bool) -> Result<()> {
    let mut known = Known::default();
    for path in with {
        known.learn(path)?;
    }
    let limits = images
        .iter()
        .map(|path| known.add(path))
        .collect::<Result<Vec<_>>>()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&limits)?);
        return Ok(());
    }
    println!(
        "{:<24} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "image", "data MB", "matched", "repeated", "unique", "limit MB"
    );
    for limit in limits.iter().chain([&Limit::total(&limits)]) {
        let (data, bytes) = (
            limit.data_blocks as f64 * 4096e-6,
            limit.limit_bytes as f64 / 1e6,
        );
        let Limit {
            name,
            matched_blocks,
            repeated_blocks,
            unique_blocks,
            ..
        } = limit;
        println!(
            "{name:<24} {data:>10.1} {matched_blocks:>10} {repeated_blocks:>10} {unique_blocks:>10} {bytes:>10.2}"
        );
    }
    Ok(())
}

/// Bytes of the digest that announces a block.
const ANNOUNCED: u64 = 12;

/// The limit of all images with blocks of each of these sizes (`vmflock` §4.2.3, figure 5).
#[derive(Debug, Serialize)]
struct OfSize {
    block_bytes: u64,
    /// Nonzero blocks, and those that are found nowhere before.
    data_blocks: u64,
    unique_blocks: u64,
    /// Size of the new blocks, compressed.
    limit_bytes: u64,
    /// A digest of 12 bytes for each nonzero block.
    digest_bytes: u64,
}

/// Prints the limit of all images for each size of blocks, in KiB; `with` are images that the destination already has.
///
/// # Errors
/// When an image cannot be read, or a size is no power of two from 1 to 1024.
pub fn print_sizes(images: &[PathBuf], with: &[PathBuf], kib: &[u64], json: bool) -> Result<()> {
    let mut sizes = Vec::new();
    for kib in kib {
        let allowed = kib.is_power_of_two() && *kib <= READ as u64 >> 10;
        ensure!(
            allowed,
            "blocks of {kib} KiB: it must be a power of two from 1 to 1024"
        );
        let mut known = Known::in_blocks((*kib as usize) << 10);
        with.iter().try_for_each(|path| known.learn(path))?;
        let limits = images.iter().map(|path| known.add(path));
        let all = Limit::total(&limits.collect::<Result<Vec<_>>>()?);
        sizes.push(OfSize {
            block_bytes: kib << 10,
            data_blocks: all.data_blocks,
            unique_blocks: all.unique_blocks,
            limit_bytes: all.limit_bytes,
            digest_bytes: all.data_blocks * ANNOUNCED,
        });
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&sizes)?);
        return Ok(());
    }
    println!(
        "{:>8} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "KiB", "blocks", "unique", "limit MB", "digests MB", "sum MB"
    );
    for of in &sizes {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        println!(
            "{:>8} {:>10} {:>10} {:>10.2} {:>10.2} {:>10.2}",
            of.block_bytes >> 10,
            of.data_blocks,
            of.unique_blocks,
            mb(of.limit_bytes),
            mb(of.digest_bytes),
            mb(of.limit_bytes + of.digest_bytes)
        );
    }
    Ok(())
}

/// The limits of `images` in this order, for a destination that has `with`. Cached in `file`, because computing them
/// takes a minute for the library. Recomputed when an image has changed.
///
/// # Errors
/// When an image cannot be read.
pub fn kept(file: &Path, with: &[PathBuf], images: &[PathBuf]) -> Result<Vec<Limit>> {
    let stamp = |path: &PathBuf| {
        let meta = path
            .metadata()
            .with_context(|| format!("no image {}", path.display()))?;
        anyhow::Ok(format!(
            "{} {} {}.{}\n",
            path.display(),
            meta.len(),
            meta.mtime(),
            meta.mtime_nsec()
        ))
    };
    let with_stamps = with.iter().map(stamp).collect::<Result<String>>()?;
    let key = format!(
        "{with_stamps}\n{}",
        images.iter().map(stamp).collect::<Result<String>>()?
    );
    let key = blake3::hash(key.as_bytes()).to_hex()[..24].to_owned();
    let text = std::fs::read(file).unwrap_or_default();
    let mut all: BTreeMap<String, Vec<Limit>> = serde_json::from_slice(&text).unwrap_or_default();
    if let Some(limits) = all.remove(&key) {
        return Ok(limits);
    }
    eprintln!(
        "computing the limit of {} image(s); the result is cached",
        with.len() + images.len()
    );
    let mut known = Known::default();
    with.iter().try_for_each(|path| known.learn(path))?;
    let limits = images
        .iter()
        .map(|path| known.add(path))
        .collect::<Result<Vec<_>>>()?;
    all.insert(key, limits.clone());
    atomic_replace(file, &serde_json::to_vec(&all)?)
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(limits)
}

impl Limit {
    /// The sum of several limits.
    pub fn total(limits: &[Self]) -> Self {
        let sum = |of: fn(&Self) -> u64| limits.iter().map(of).sum();
        Self {
            name: "all".to_owned(),
            size_bytes: sum(|l| l.size_bytes),
            data_blocks: sum(|l| l.data_blocks),
            matched_blocks: sum(|l| l.matched_blocks),
            repeated_blocks: sum(|l| l.repeated_blocks),
            unique_blocks: sum(|l| l.unique_blocks),
            limit_bytes: sum(|l| l.limit_bytes),
        }
    }
}

/// A writer that counts bytes and discards them.
struct Count(u64);

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `zstd -3 --long=27` that only counts its output.
///
/// # Errors
/// When the compressor cannot be created.
fn compressor() -> io::Result<Encoder<'static, Count>> {
    let mut encoder = Encoder::new(Count(0), LEVEL)?;
    encoder.window_log(WINDOW_LOG)?;
    encoder.long_distance_matching(true)?;
    // Like the command without `--single-thread`; it saves up to 11 % on these images.
    encoder.multithread(1)?;
    Ok(encoder)
}

/// The key of a block: the first half of its digest.
fn key_of(block: &[u8]) -> u128 {
    let mut half = [0; 16];
    half.copy_from_slice(&blake3::hash(block).as_bytes()[..16]);
    u128::from_le_bytes(half)
}

/// Calls `f` for every aligned, nonzero piece of `piece` bytes (a power of two, at most 1 MiB) with its offset, skipping holes;
/// the last one may be short.
///
/// # Errors
/// Read errors, or those of `f`.
pub fn each_piece(
    file: &File,
    size: u64,
    piece: usize,
    mut f: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; READ];
    let mut at = 0;
    while at < size {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(offset) => offset,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let hole = rustix::fs::seek(file, SeekFrom::Hole(data))?;
        let end = hole.next_multiple_of(piece as u64).min(size);
        at = at.max(data / piece as u64 * piece as u64);
        while at < end {
            let take = (end - at).min(READ as u64) as usize;
            file.read_exact_at(&mut buffer[..take], at)?;
            for (nth, bytes) in buffer[..take].chunks(piece).enumerate() {
                if !is_zero(bytes) {
                    f(at + (nth * piece) as u64, bytes)?;
                }
            }
            at += take as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_core::BLOCK_SIZE_U64;

    fn block(seed: u64) -> Vec<u8> {
        let mut rng = fastrand::Rng::with_seed(seed);
        (0..BLOCK_SIZE).map(|_| rng.u8(1..)).collect()
    }

    fn image(dir: &Path, name: &str, blocks: &[Option<u64>]) -> PathBuf {
        let path = dir.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(blocks.len() as u64 * BLOCK_SIZE_U64).unwrap();
        for (index, seed) in blocks.iter().enumerate() {
            if let Some(seed) = seed {
                file.write_all_at(&block(*seed), index as u64 * BLOCK_SIZE_U64)
                    .unwrap();
            }
        }
        path
    }

    #[test]
    fn larger_blocks_have_less_in_common() {
        let dir = tempfile::tempdir().unwrap();
        let one = image(dir.path(), "one", &[Some(1), Some(2), Some(3), Some(4)]);
        let two = image(dir.path(), "two", &[Some(1), Some(2), Some(4), Some(3)]);
        let unique = |block: usize| {
            let mut known = Known::in_blocks(block);
            known.learn(&one).unwrap();
            known.add(&two).unwrap().unique_blocks
        };
        let unique: Vec<u64> = [1024, 4096, 8192, 16384].map(unique).into();
        assert_eq!(unique, [0, 0, 1, 1]);
        let none: &[PathBuf] = &[];
        print_sizes(std::slice::from_ref(&one), none, &[1, 128], true).unwrap();
        assert!(print_sizes(&[one], none, &[3], true).is_err());
    }

    #[test]
    fn blocks_are_counted_once_over_all_images() {
        let dir = tempfile::tempdir().unwrap();
        let one = image(
            dir.path(),
            "one",
            &[Some(1), None, Some(2), Some(1), None, None],
        );
        let two = image(
            dir.path(),
            "two",
            &[None, None, Some(2), Some(3), Some(3), Some(1)],
        );
        let mut known = Known::default();
        let first = known.add(&one).unwrap();
        assert_eq!((first.data_blocks, first.unique_blocks), (3, 2));
        assert_eq!((first.matched_blocks, first.repeated_blocks), (0, 1));
        let second = known.add(&two).unwrap();
        assert_eq!((second.data_blocks, second.unique_blocks), (4, 1));
        assert_eq!((second.matched_blocks, second.repeated_blocks), (2, 1));
        // Random bytes do not compress: the limit is slightly above the size of the blocks.
        assert!(
            (8192..8500).contains(&first.limit_bytes),
            "{}",
            first.limit_bytes
        );
        assert!(
            (4000..4300).contains(&second.limit_bytes),
            "{}",
            second.limit_bytes
        );
        assert_eq!(known.add(&two).unwrap().unique_blocks, 0);
    }

    #[test]
    fn a_short_last_block_and_an_empty_image_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let odd = dir.path().join("odd");
        std::fs::write(&odd, vec![9; BLOCK_SIZE + 7]).unwrap();
        let empty = image(dir.path(), "empty", &[]);
        let hole = image(dir.path(), "hole", &[None; 9]);
        let mut known = Known::default();
        assert_eq!(known.add(&odd).unwrap().unique_blocks, 2);
        assert_eq!(known.add(&empty).unwrap().data_blocks, 0);
        assert_eq!(known.add(&hole).unwrap().data_blocks, 0);
    }

    #[test]
    fn pieces_larger_than_extents_are_read_whole_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut blocks = vec![None; 600];
        for (seed, at) in [1, 33, 34, 70, 515].into_iter().enumerate() {
            blocks[at] = Some(seed as u64);
        }
        let path = image(dir.path(), "sparse", &blocks);
        let (file, size) = (File::open(&path).unwrap(), 600 * BLOCK_SIZE_U64);
        let whole = std::fs::read(&path).unwrap();
        for bytes in [512, 4 << 10, 64 << 10, 128 << 10, 1 << 20] {
            let mut pieces = Vec::new();
            each_piece(&file, size, bytes, |_, piece| {
                pieces.push(piece.to_vec());
                Ok(())
            })
            .unwrap();
            let expected = whole.chunks(bytes).filter(|piece| !is_zero(piece));
            assert!(pieces.iter().eq(expected), "{bytes}");
        }
    }
}
