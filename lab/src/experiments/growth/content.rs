//! Images of any size whose content is made, not installed: from a seed, with the statistics of real ones.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64};
use fastrand::Rng;

use super::statistics::Statistics;

/// Blocks written at a time.
const PIECE: usize = 256;
/// Bytes of the text that files are made of.
const TEXT: usize = 256 << 10;
/// Files that a later one may repeat: as many as keeps memory the same for every size.
const REMEMBERED: usize = 4096;
/// Runs between holes that an image has at least, about.
const RUNS: f64 = 16.0;
/// One file in so many is followed by zeros.
const ZEROS_AFTER: usize = 16;
/// Strong heads begin with this.
const MAGIC: &[u8] = b"\x7fELF\x02\x01\x01\0";

/// Writes a sparse image of `size` bytes; returns the bytes of it that are not in holes.
///
/// # Errors
/// When it cannot be written.
pub fn write(path: &Path, size: u64, seed: u64, like: &Statistics) -> Result<u64> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    write_to(&file, size, seed, like).with_context(|| format!("cannot write {}", path.display()))
}

fn write_to(file: &File, size: u64, seed: u64, like: &Statistics) -> Result<u64> {
    file.set_len(size)?;
    let blocks = size / BLOCK_SIZE_U64;
    let mut rng = Rng::with_seed(seed);
    let mut files = Files::new(&mut rng, *like);
    let mut piece = vec![0; PIECE * BLOCK_SIZE];
    // Holes are as long as makes the share of what is between them right.
    let between = (like.data_share / (1.0 - like.zero_share)).clamp(0.001, 1.0);
    // A small image has shorter ones, so that it has several at all.
    let mean_run = like.run_blocks.min(blocks as f64 * between / RUNS);
    let (mut at, mut written) = (0, 0);
    while at < blocks {
        let run = about(&mut rng, mean_run).min(blocks - at);
        let mut left = run;
        while left > 0 {
            let take = left.min(PIECE as u64) as usize;
            let bytes = &mut piece[..take * BLOCK_SIZE];
            bytes
                .chunks_exact_mut(BLOCK_SIZE)
                .for_each(|block| files.next(&mut rng, block));
            file.write_all_at(bytes, at * BLOCK_SIZE_U64)?;
            (at, left) = (at + take as u64, left - take as u64);
            written += take as u64;
        }
        // What is missing or too much of the share so far, so that it comes out right for small images, too.
        at = at.max((written as f64 / between) as u64);
    }
    Ok(written * BLOCK_SIZE_U64)
}

/// A number of at least 1 around `mean`, often small and sometimes large, as the sizes of files are.
fn about(rng: &mut Rng, mean: f64) -> u64 {
    let drawn = -(1.0 - rng.f64()).ln() * (mean - 0.5).max(0.5);
    drawn.round().max(1.0) as u64
}

/// One file after the other, block by block.
struct Files {
    like: Statistics,
    text: Vec<u8>,
    /// What later files may repeat: seeds and lengths.
    remembered: Vec<(u64, u64)>,
    current: Rng,
    dense: bool,
    begins: bool,
    left: u64,
    zeros: u64,
}

impl Files {
    fn new(rng: &mut Rng, like: Statistics) -> Self {
        Self {
            text: text(rng),
            like,
            remembered: Vec::new(),
            current: Rng::with_seed(0),
            dense: false,
            begins: false,
            left: 0,
            zeros: 0,
        }
    }

    /// The next block.
    fn next(&mut self, rng: &mut Rng, block: &mut [u8]) {
        if self.zeros > 0 {
            self.zeros -= 1;
            block.fill(0);
            return;
        }
        if self.left == 0 {
            self.begin(rng);
        }
        self.left -= 1;
        self.fill(block);
        if std::mem::take(&mut self.begins) {
            block[..MAGIC.len()].copy_from_slice(MAGIC);
        }
        if self.left == 0 {
            let tail = self.current.usize(5..BLOCK_SIZE / 2);
            block[BLOCK_SIZE - tail..].fill(0);
            if rng.usize(..ZEROS_AFTER) == 0 {
                let share = self.like.zero_share;
                let mean = self.mean_blocks() * share / (1.0 - share) * ZEROS_AFTER as f64;
                self.zeros = about(rng, mean);
            }
        }
    }

    /// Every file begins with a head.
    fn mean_blocks(&self) -> f64 {
        1.0 / (self.like.strong_share + self.like.weak_share)
    }

    fn begin(&mut self, rng: &mut Rng) {
        let again = rng.f64() < self.like.repeat_share && !self.remembered.is_empty();
        let (seed, length) = if again {
            self.remembered[rng.usize(..self.remembered.len())]
        } else {
            let file = (rng.u64(..), about(rng, self.mean_blocks()));
            if self.remembered.len() < REMEMBERED {
                self.remembered.push(file);
            } else {
                self.remembered[rng.usize(..REMEMBERED)] = file;
            }
            file
        };
        self.current = Rng::with_seed(seed);
        let heads = self.like.strong_share + self.like.weak_share;
        self.begins = self.current.f64() < self.like.strong_share / heads;
        self.dense = self.current.f64() < self.like.dense_share;
        self.left = length;
    }

    /// Phrases of the text with a little noise between them: the less noise, the more it shrinks.
    fn fill(&mut self, block: &mut [u8]) {
        let rng = &mut self.current;
        if self.dense {
            rng.fill(block);
            return;
        }
        let noise = noise_for(self.like.shrinks_times);
        let mut at = 0;
        while at < block.len() {
            let end = (at + rng.usize(8..64)).min(block.len());
            if rng.f64() < noise {
                rng.fill(&mut block[at..end]);
            } else {
                let from = phrase(rng);
                block[at..end].copy_from_slice(&self.text[from..from + end - at]);
            }
            at = end;
        }
    }
}

/// Where in the text a phrase is: some are much more common than others.
fn phrase(rng: &mut Rng) -> usize {
    let place = rng.f64();
    (place * place * place * (TEXT - 64) as f64) as usize
}

/// The share of noise with which phrases shrink so many times, by measuring.
fn noise_for(times: f64) -> f64 {
    (1.08 / times - 0.246).clamp(0.0, 1.0)
}

fn letter(rng: &mut Rng) -> u8 {
    let place = rng.f64();
    (place * place * 120.0) as u8
}

/// Words, whose letters are some more common than others.
fn text(rng: &mut Rng) -> Vec<u8> {
    let words: Vec<Vec<u8>> = (0..2000)
        .map(|_| (0..rng.usize(2..12)).map(|_| letter(rng)).collect())
        .collect();
    let mut out = Vec::with_capacity(TEXT + 16);
    while out.len() < TEXT {
        out.extend_from_slice(&words[rng.usize(..words.len())]);
    }
    out.truncate(TEXT);
    out
}

#[cfg(test)]
mod tests {
    use super::super::statistics::LIBRARY;
    use super::*;

    #[test]
    fn what_is_made_has_the_statistics_it_was_made_with() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let written = write(&path, 192 << 20, 7, &LIBRARY).unwrap();
        let made = Statistics::of(&path).unwrap();
        let near = |name: &str, made: f64, wanted: f64, factor: f64| {
            let off = made / wanted;
            assert!(
                off < factor && off > 1.0 / factor,
                "{name}: {made}, not {wanted}"
            );
        };
        near("data", made.data_share, LIBRARY.data_share, 1.1);
        near(
            "runs",
            made.run_blocks,
            made.data_share * 49152.0 / RUNS,
            2.0,
        );
        near("repeats", made.repeat_share, LIBRARY.repeat_share, 1.6);
        near("strong", made.strong_share, LIBRARY.strong_share, 1.3);
        near("weak", made.weak_share, LIBRARY.weak_share, 1.3);
        near("dense", made.dense_share, LIBRARY.dense_share, 1.8);
        near("shrinks", made.shrinks_times, LIBRARY.shrinks_times, 1.15);
        let blocks = made.data_share * f64::from(192 << 20) / (1.0 - made.zero_share);
        near("written", blocks, written as f64, 1.01);
    }

    #[test]
    fn the_same_seed_makes_the_same_image_and_another_another() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str, seed| {
            let path = dir.path().join(name);
            write(&path, 24 << 20, seed, &LIBRARY).unwrap();
            std::fs::read(path).unwrap()
        };
        let one = make("one", 1);
        assert!(one == make("again", 1));
        assert!(one != make("two", 2));
    }
}
