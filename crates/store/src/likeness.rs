//! What is noted of an image to choose similar ones without reading them: the operating system in it, a sketch of its packages, a
//! few blocks of its disk, and, once it was read, a sketch of its blocks (`docs/format/known-files.md`).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, ReadAt, is_zero};
use drover_image::guest::{self, FileSystem};
use drover_image::{Format, ImageError, ImageFile, Stamp, VirtualDisk};
use drover_index::{BLOCK_SKETCH, Sketch, digest_block};
use serde::{Deserialize, Serialize};

/// Values in the sketch of the packages.
const PACKAGE_SKETCH: usize = 64;

/// Fewer packages say nothing about two systems.
const MIN_PACKAGES: u32 = 16;

/// The first part of a disk from which blocks are taken ends here; each further part ends at twice the size.
const FIRST_PART_BLOCKS: u64 = 1 << 11;

/// Parts of a disk of the largest size, 2^32 blocks.
const PARTS: u16 = 22;

/// Blocks that are taken of each part.
const PER_PART: u16 = 8;

/// Fewer blocks at the same places say nothing about two disks.
const MIN_SAMPLES: usize = 4;

/// Upper bound on an encoded [`Likeness`].
pub const MAX_LIKENESS_BYTES: usize = 8 << 10;

/// Upper bound on a text in it.
const MAX_TEXT: usize = 128;

/// Two images below this similarity have too little in common.
pub const MIN_SIMILARITY: f64 = 0.15;

/// The similarity of two systems of the same name and version of which nothing else is known.
const SAME_VERSION: f64 = 0.3;

/// The same for systems of different versions.
const SAME_SYSTEM: f64 = 0.16;

/// The version of the encoding.
const VERSION: u8 = 1;

/// What is noted of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Likeness {
    /// The identifier of the operating system, as `debian`; empty when it is not known. The same for the next three.
    pub system: String,
    /// The version's identifier, as `12`.
    pub version: String,
    /// The system's name for people.
    pub system_name: String,
    /// The host name.
    pub host: String,
    /// The kind of the file system with the system, or of the largest one.
    pub file_system: Option<FileSystem>,
    /// The number of installed packages.
    pub packages: u32,
    /// A sketch of their names and versions.
    package_sketch: Vec<u64>,
    /// Blocks at fixed places of the disk: the number of the place, and the first bytes of the digest.
    samples: Vec<(u16, u32)>,
    /// A sketch of all blocks, once they were read.
    blocks: Option<Vec<u64>>,
}

/// The encoding of it, after its version.
#[derive(Serialize, Deserialize)]
struct Encoded {
    texts: [String; 4],
    file_system: String,
    packages: u32,
    package_sketch: Vec<u64>,
    samples: Vec<(u16, u32)>,
    blocks: Option<Vec<u64>>,
}

impl Likeness {
    /// Of a system of that name, of which nothing else is known.
    #[cfg(test)]
    pub(crate) fn of_system(name: &str) -> Self {
        Likeness {
            system: name.into(),
            ..Likeness::default()
        }
    }

    /// Looks at a disk; reads some of it.
    #[must_use]
    pub fn look(disk: &dyn ReadAt) -> Self {
        let found = guest::look(disk);
        let mut likeness = Likeness {
            file_system: found.file_system,
            samples: samples(disk),
            ..Likeness::default()
        };
        if let Some(system) = found.system {
            let mut sketch = Sketch::new(PACKAGE_SKETCH);
            for package in &system.packages {
                let text = format!("{}\n{}", package.name, package.version);
                let hash = blake3::hash(text.as_bytes());
                let first = hash.as_bytes().first_chunk().copied();
                sketch.add(u64::from_le_bytes(first.unwrap_or_default()));
            }
            likeness.packages = u32::try_from(system.packages.len()).unwrap_or(u32::MAX);
            likeness.package_sketch = sketch.values().to_vec();
            likeness.system = system.id;
            likeness.version = system.version;
            likeness.system_name = system.name;
            likeness.host = system.host;
        }
        likeness
    }

    /// Adds the sketch of all blocks.
    #[must_use]
    pub fn with_blocks(mut self, sketch: Option<&Sketch>) -> Self {
        self.blocks = sketch.map(|sketch| sketch.values().to_vec());
        self
    }

    /// The sketch of all blocks, if it was read.
    #[must_use]
    pub fn blocks(&self) -> Option<Sketch> {
        Sketch::of_values(BLOCK_SKETCH, self.blocks.clone()?)
    }

    /// About which part of this image's blocks the other one has, from 0 to 1: by all blocks, if both were read; else by the blocks at
    /// the same places, or by the packages, whichever is more, or by the system alone. A guess.
    #[must_use]
    pub fn similarity(&self, other: &Likeness) -> f64 {
        if let (Some(mine), Some(its)) = (self.blocks(), other.blocks()) {
            return mine.part_in(&its);
        }
        let system = match () {
            () if self.system.is_empty() || self.system != other.system => 0.0,
            () if self.version == other.version => SAME_VERSION,
            () => SAME_SYSTEM,
        };
        self.by_samples(other)
            .max(self.by_packages(other))
            .max(system)
    }

    fn by_packages(&self, other: &Likeness) -> f64 {
        if self.packages.min(other.packages) < MIN_PACKAGES || self.system != other.system {
            return 0.0;
        }
        let sketch = |l: &Likeness| Sketch::of_values(PACKAGE_SKETCH, l.package_sketch.clone());
        match (sketch(self), sketch(other)) {
            // Other files than those of packages are on the disk, too.
            (Some(mine), Some(its)) => 0.9 * mine.part_in(&its),
            _ => 0.0,
        }
    }

    fn by_samples(&self, other: &Likeness) -> f64 {
        let mut others = other.samples.iter().peekable();
        let (mut same, mut all) = (0usize, 0usize);
        for (place, digest) in &self.samples {
            while others.next_if(|(other, _)| other < place).is_some() {}
            if let Some((_, its)) = others.next_if(|(other, _)| other == place) {
                all += 1;
                same += usize::from(its == digest);
            }
        }
        match all >= MIN_SAMPLES {
            true => same as f64 / all as f64,
            false => 0.0,
        }
    }

    /// Its encoding, at most [`MAX_LIKENESS_BYTES`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let encoded = Encoded {
            texts: [&self.system, &self.version, &self.system_name, &self.host].map(|t| cut(t)),
            file_system: self.file_system.map_or_else(String::new, |f| f.to_string()),
            packages: self.packages,
            package_sketch: self.package_sketch.clone(),
            samples: self.samples.clone(),
            blocks: self.blocks.clone(),
        };
        [vec![VERSION], drover_net::encode(&encoded)].concat()
    }

    /// Decodes it. `None` when it is no valid one, or of another version.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (&version, rest) = bytes.split_first()?;
        if version != VERSION || bytes.len() > MAX_LIKENESS_BYTES {
            return None;
        }
        let found: Encoded = drover_net::decode(rest).ok()?;
        let clean = |text: &String| text.len() <= MAX_TEXT && !text.chars().any(char::is_control);
        let ascending = found.samples.windows(2).all(|w| w[0].0 < w[1].0);
        let last = found
            .samples
            .last()
            .is_none_or(|(place, _)| *place < PARTS * PER_PART);
        let blocks = match &found.blocks {
            Some(values) => Sketch::of_values(BLOCK_SKETCH, values.clone()).is_some(),
            None => true,
        };
        let packages = Sketch::of_values(PACKAGE_SKETCH, found.package_sketch.clone()).is_some();
        if !(found.texts.iter().all(clean) && ascending && last && blocks && packages) {
            return None;
        }
        let [system, version, system_name, host] = found.texts;
        Some(Likeness {
            system,
            version,
            system_name,
            host,
            file_system: match &*found.file_system {
                "" => None,
                name => Some(FileSystem::named(name)?),
            },
            packages: found.packages,
            package_sketch: found.package_sketch,
            samples: found.samples,
            blocks: found.blocks,
        })
    }
}

fn cut(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].into()
}

/// Blocks at the places that are the same for every disk, by their numbers: as many in each part of a disk that ends at twice the size
/// of the part before. So two disks of different sizes are compared as far as the smaller one goes. Blocks of zeros are left out.
fn samples(disk: &dyn ReadAt) -> Vec<(u16, u32)> {
    let blocks = disk.len() / BLOCK_SIZE_U64;
    let mut places = Vec::new();
    for part in 0..PARTS {
        let end = FIRST_PART_BLOCKS << part;
        let start = if part == 0 { 0 } else { end / 2 };
        for i in 0..PER_PART {
            let number = part * PER_PART + i;
            let random = mixed(u64::from(number));
            places.push((start + random % (end - start), number));
        }
    }
    // In order of the disk, whose tables are read once then.
    places.sort_unstable();
    let mut found = Vec::new();
    let mut block = vec![0; BLOCK_SIZE];
    for (at, number) in places.into_iter().filter(|(at, _)| *at < blocks) {
        if disk.read_exact_at(&mut block, at * BLOCK_SIZE_U64).is_err() {
            break;
        }
        if !is_zero(&block) {
            let digest = digest_block(&block).0;
            let first = digest.first_chunk().copied().unwrap_or_default();
            found.push((number, u32::from_le_bytes(first)));
        }
    }
    found.sort_unstable();
    found
}

/// A number that looks random (SplitMix64); part of the format.
fn mixed(n: u64) -> u64 {
    let mut z = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A file that counts what is read of it.
struct Counted {
    file: ImageFile,
    bytes: AtomicU64,
}

impl ReadAt for Counted {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let n = self.file.read_at(buf, offset)?;
        self.bytes.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// What a look at an image file has found.
#[derive(Debug, Clone)]
pub struct Looked {
    /// Its stamp when it was opened.
    pub stamp: Stamp,
    /// Its format.
    pub format: Format,
    /// The virtual disk size in bytes.
    pub virtual_bytes: u64,
    /// What is noted of it.
    pub likeness: Likeness,
    /// Bytes that were read of the file.
    pub read_bytes: u64,
}

/// Looks at an image file.
///
/// # Errors
/// When it cannot be opened or read, is damaged, or needs other files.
pub fn look_at_file(path: &Path) -> Result<Looked, ImageError> {
    let counted = Arc::new(Counted {
        file: ImageFile::open(path)?,
        bytes: AtomicU64::new(0),
    });
    let disk = VirtualDisk::peek(counted.clone()).map_err(|e| e.in_file(path))?;
    Ok(Looked {
        stamp: counted.file.stamp(),
        format: disk.format(),
        virtual_bytes: disk.len(),
        likeness: Likeness::look(&disk),
        read_bytes: counted.bytes.load(Ordering::Relaxed),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(seed: u64, blocks: usize) -> Vec<u8> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut bytes = vec![0; blocks * BLOCK_SIZE];
        // The first bytes of a block are enough to make it another one.
        bytes
            .chunks_exact_mut(BLOCK_SIZE)
            .for_each(|block| block[..8].copy_from_slice(&rng.u64(1..).to_le_bytes()));
        bytes
    }

    fn looked(bytes: Vec<u8>) -> Likeness {
        Likeness::look(&bytes)
    }

    #[test]
    fn copies_that_were_changed_or_grown_are_similar_and_others_are_not() {
        let first = disk(1, 20_000);
        let mut changed = first.clone();
        // A third of the disk is another one.
        for i in (0..20_000).filter(|i| i % 3 == 0) {
            changed[i * BLOCK_SIZE] ^= 0xff;
        }
        changed.extend(disk(2, 20_000));
        let [a, b, c] = [first, changed, disk(3, 20_000)].map(looked);
        assert_eq!(a.similarity(&a), 1.0);
        let part = a.similarity(&b);
        assert!((0.35..0.95).contains(&part), "{part}");
        assert_eq!(b.similarity(&a), part);
        assert_eq!(a.similarity(&c), 0.0);
        // An empty disk is similar to none.
        let empty = looked(vec![0; 1 << 20]);
        assert_eq!(empty, Likeness::default());
        assert_eq!(empty.similarity(&empty), 0.0);
    }

    #[test]
    fn systems_and_packages_count_where_blocks_do_not() {
        let system = |version: &str, packages: std::ops::Range<u64>| {
            let mut sketch = Sketch::new(PACKAGE_SKETCH);
            packages.clone().for_each(|n| sketch.add(mixed(n)));
            Likeness {
                system: "debian".into(),
                version: version.into(),
                packages: (packages.end - packages.start) as u32,
                package_sketch: sketch.values().to_vec(),
                ..Likeness::default()
            }
        };
        let twelve = system("12", 0..400);
        assert!(twelve.similarity(&system("12", 0..500)) > 0.6);
        let few = twelve.similarity(&system("12", 350..800));
        assert!((few - SAME_VERSION).abs() < 0.2, "{few}");
        assert_eq!(twelve.similarity(&system("11", 1000..1400)), SAME_SYSTEM);
        let other = Likeness {
            system: "fedora".into(),
            ..twelve.clone()
        };
        assert_eq!(twelve.similarity(&other), 0.0);
        // What was read in whole is not guessed.
        let mut blocks = Sketch::new(BLOCK_SKETCH);
        (0..1000).for_each(|n| blocks.add(mixed(n)));
        let mut half = Sketch::new(BLOCK_SKETCH);
        (500..2000).for_each(|n| half.add(mixed(n)));
        let (a, b) = (
            twelve.clone().with_blocks(Some(&blocks)),
            twelve.with_blocks(Some(&half)),
        );
        assert!((a.similarity(&b) - 0.5).abs() < 0.2, "{}", a.similarity(&b));
    }

    #[test]
    fn what_is_encoded_is_decoded_and_anything_else_refused() {
        let mut sketch = Sketch::new(BLOCK_SKETCH);
        (0..10_000).for_each(|n| sketch.add(mixed(n)));
        let mut full = looked(disk(9, 20_000)).with_blocks(Some(&sketch));
        full.system = "x".repeat(MAX_TEXT);
        full.system_name = "é".repeat(MAX_TEXT);
        full.file_system = Some(FileSystem::Xfs);
        full.package_sketch = (0..PACKAGE_SKETCH as u64)
            .map(|n| u64::MAX - 100 + n)
            .collect();
        full.samples = (0..PARTS * PER_PART).map(|n| (n, u32::MAX)).collect();
        let bytes = full.encode();
        assert!(bytes.len() <= MAX_LIKENESS_BYTES, "{}", bytes.len());
        full.system_name = "é".repeat(MAX_TEXT / 2);
        assert_eq!(Likeness::decode(&bytes), Some(full.clone()));
        let wrong = |change: &dyn Fn(&mut Likeness)| {
            let mut likeness = full.clone();
            change(&mut likeness);
            Likeness::decode(&likeness.encode())
        };
        assert_eq!(wrong(&|l| l.samples.reverse()), None);
        assert_eq!(wrong(&|l| l.samples.push((PARTS * PER_PART, 0))), None);
        assert_eq!(wrong(&|l| l.package_sketch.push(u64::MAX)), None);
        assert_eq!(wrong(&|l| l.blocks = Some(vec![2, 1])), None);
        assert_eq!(wrong(&|l| l.host = "a\nb".into()), None);
        for n in 0..bytes.len() {
            assert_eq!(Likeness::decode(&bytes[..n]), None);
        }
        assert_eq!(Likeness::decode(&[&bytes[..], b"x"].concat()), None);
    }
}
