//! Blocks of a fixed size compared with chunks that the content cuts: what is stored, and how fast.

use std::collections::HashSet;
use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::vault::{corpora, versions_of};
use crate::bench::{Case, Column, Experiment, Need, Row};
use crate::limit::each_piece;
use crate::setup::Lab;

const MEAN: &str = "mean_bytes";
const UNIQUE: &str = "unique_mb";
const PACKED: &str = "packed_mb";
const SPEED: &str = "mb_per_second";

pub const EXPERIMENT: Experiment = Experiment {
    name: "chunks",
    title: "Blocks, or chunks cut by content",
    text: "All versions of the machines of `vault`, each different chunk once: of fixed size at fixed places, and cut where the content says (FastCDC with normalization level 2: a gear hash, least a quarter and most eight times \
the average that is asked for). Both begin anew at holes, and leave blocks of zeros out. *Compressed*: new chunks in the order in which they come, in groups of 128 KiB by `zstd -3`, as the vault does it. *Speed*: cutting and digesting (BLAKE3, chunk by chunk; \
fixed blocks sixteen at a time, as drover does it), one thread, from memory.",
    columns: &[
        Column::label("by", "by"),
        Column::figure(MEAN, "bytes a chunk", 0),
        Column::figure(UNIQUE, "MB of different chunks", 1),
        Column::figure(PACKED, "MB compressed", 1),
        Column::figure(SPEED, "MB/s cut and digested", 0),
    ],
    cases: |lab| {
        let case = |(id, corpus, rank): (&'static str, super::vault::Corpus, u8)| {
            let versions: usize = corpus.iter().map(|(_, versions)| versions.len()).sum();
            let what = format!("{versions} versions of {} machines", corpus.len());
            Case::new(id, what, rank, &[Need::Library])
        };
        Ok(corpora(lab).into_iter().map(case).collect())
    },
    run,
};

/// Bytes that are compressed together.
const GROUP: usize = 128 << 10;
/// What is read at once, and cut by itself.
const PIECE: usize = 8 << 20;

/// A way to cut.
#[derive(Clone, Copy)]
enum Cut {
    Fixed(usize),
    Content(usize),
}

const ALL: [Cut; 6] = [
    Cut::Fixed(4 << 10),
    Cut::Fixed(16 << 10),
    Cut::Content(4 << 10),
    Cut::Content(8 << 10),
    Cut::Content(16 << 10),
    Cut::Content(64 << 10),
];

impl Cut {
    fn name(self) -> String {
        match self {
            Cut::Fixed(bytes) => format!("fixed, {} KiB", bytes >> 10),
            Cut::Content(bytes) => format!("by content, {} KiB on average", bytes >> 10),
        }
    }
}

/// Random numbers by byte, from a seed.
fn gear() -> [u64; 256] {
    let mut rng = fastrand::Rng::with_seed(0x6765_6172);
    std::array::from_fn(|_| rng.u64(..))
}

/// The length of the first chunk of some bytes.
fn cut(gear: &[u64; 256], bytes: &[u8], average: usize) -> usize {
    let (least, most) = (average / 4, average * 8);
    if bytes.len() <= least {
        return bytes.len();
    }
    // Bits that must be zero: two more before the average, two fewer behind it. The upper ones depend on most bytes.
    let bits = average.ilog2();
    let mask = |bits: u32| !0u64 << (64 - bits);
    let (strict, loose) = (mask(bits + 2), mask(bits - 2));
    let end = bytes.len().min(most);
    let turn = end.min(average);
    let mut hash = 0u64;
    for (at, &byte) in bytes[..end].iter().enumerate().skip(least) {
        hash = (hash << 1).wrapping_add(gear[usize::from(byte)]);
        let mask = if at < turn { strict } else { loose };
        if hash & mask == 0 {
            return at + 1;
        }
    }
    end
}

/// What is stored of a corpus that is cut in one way.
struct Stored {
    cut: Cut,
    known: HashSet<[u8; 32]>,
    group: Vec<u8>,
    chunks: u64,
    unique: u64,
    packed: u64,
    bytes: u64,
    seconds: f64,
}

impl Stored {
    fn new(cut: Cut) -> Self {
        Stored {
            cut,
            known: HashSet::new(),
            group: Vec::new(),
            chunks: 0,
            unique: 0,
            packed: 0,
            bytes: 0,
            seconds: 0.0,
        }
    }

    fn add(&mut self, gear: &[u64; 256], bytes: &[u8]) -> std::io::Result<()> {
        let began = Instant::now();
        let mut chunks: Vec<([u8; 32], usize)> = Vec::new();
        let whole = bytes.len() / 4096 * 4096;
        match self.cut {
            Cut::Fixed(4096) => {
                let mut digests = Vec::new();
                drover_vault::Digester::default().blocks(&bytes[..whole], &mut digests);
                chunks.extend(digests.iter().map(|digest| (digest.0, 4096)));
                if whole < bytes.len() {
                    let digest = *blake3::hash(&bytes[whole..]).as_bytes();
                    chunks.push((digest, bytes.len() - whole));
                }
            }
            Cut::Fixed(size) => {
                let digested = bytes
                    .chunks(size)
                    .map(|c| (*blake3::hash(c).as_bytes(), c.len()));
                chunks.extend(digested);
            }
            Cut::Content(average) => {
                let mut at = 0;
                while at < bytes.len() {
                    let len = cut(gear, &bytes[at..], average);
                    chunks.push((*blake3::hash(&bytes[at..at + len]).as_bytes(), len));
                    at += len;
                }
            }
        }
        self.seconds += began.elapsed().as_secs_f64();
        self.bytes += bytes.len() as u64;
        let mut at = 0;
        for (digest, len) in chunks {
            self.chunks += 1;
            if self.known.insert(digest) {
                self.unique += len as u64;
                self.group.extend_from_slice(&bytes[at..at + len]);
                if self.group.len() >= GROUP {
                    self.pack()?;
                }
            }
            at += len;
        }
        Ok(())
    }

    fn pack(&mut self) -> std::io::Result<()> {
        let packed = zstd::bulk::compress(&self.group, 3)?;
        self.packed += packed.len().min(self.group.len()) as u64;
        self.group.clear();
        Ok(())
    }
}

/// Calls `f` with runs of data without a block of zeros, of 8 MiB at most.
fn each_run(image: &Path, mut f: impl FnMut(&[u8]) -> std::io::Result<()>) -> Result<()> {
    let file = File::open(image).with_context(|| format!("cannot open {}", image.display()))?;
    let size = file.metadata()?.len();
    let (mut run, mut end) = (Vec::new(), 0);
    each_piece(&file, size, 4096, |at, piece| {
        if at != end || run.len() >= PIECE {
            if !run.is_empty() {
                f(&run)?;
            }
            run.clear();
        }
        run.extend_from_slice(piece);
        end = at + piece.len() as u64;
        Ok(())
    })?;
    if !run.is_empty() {
        f(&run)?;
    }
    Ok(())
}

fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>> {
    let gear = gear();
    let mut all: Vec<Stored> = ALL.map(Stored::new).into();
    for version in versions_of(lab, &case.id)? {
        each_run(&version.image, |bytes| {
            all.iter_mut()
                .try_for_each(|stored| stored.add(&gear, bytes))
        })?;
    }
    let row = |mut stored: Stored| {
        stored.pack()?;
        let mut row = Row::new([("by", stored.cut.name())]);
        row.set(MEAN, stored.bytes as f64 / stored.chunks.max(1) as f64);
        row.set(UNIQUE, stored.unique as f64 / 1e6);
        row.set(PACKED, stored.packed as f64 / 1e6);
        row.set(SPEED, stored.bytes as f64 / 1e6 / stored.seconds.max(1e-6));
        Ok(row)
    };
    all.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_found_again_where_they_have_moved() {
        let mut rng = fastrand::Rng::with_seed(4);
        let mut bytes = vec![0; 1 << 20];
        rng.fill(&mut bytes);
        let gear = gear();
        let unique = |way: Cut, parts: &[&[u8]]| {
            let mut stored = Stored::new(way);
            parts
                .iter()
                .for_each(|part| stored.add(&gear, part).unwrap());
            assert_eq!(
                stored.bytes,
                parts.iter().map(|p| p.len() as u64).sum::<u64>()
            );
            (stored.unique, stored.bytes / stored.chunks)
        };
        // One byte more at the beginning.
        let moved = [&[7], &bytes[..]].concat();
        let (fixed, size) = unique(Cut::Fixed(4096), &[&bytes, &moved]);
        assert!(fixed > 2 << 20 && size <= 4096, "{fixed}");
        let (by_content, size) = unique(Cut::Content(4096), &[&bytes, &moved]);
        assert!(by_content < (1 << 20) + (64 << 10), "{by_content}");
        assert!((2500..7000).contains(&size), "{size}");
        assert_eq!(unique(Cut::Fixed(4096), &[&bytes, &bytes]).0, 1 << 20);
    }

    #[test]
    fn runs_leave_zeros_out() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let bytes = [vec![1; 4096], vec![0; 8192], vec![2; 8192], vec![3; 5]].concat();
        std::fs::write(&image, bytes).unwrap();
        let mut lens = Vec::new();
        each_run(&image, |run| {
            lens.push(run.len());
            Ok(())
        })
        .unwrap();
        assert_eq!(lens, [4096, 8197]);
    }
}
