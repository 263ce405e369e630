//! What the experiments about matching share: images as the matcher is told of them, what exact
//! deduplication finds in them, and a matcher that they are sent through, here in this process.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, Digest, Head};
use drover_index::testing::{Destination, ExactDedup};
use drover_index::{ImageId, Matcher, MatcherConfig, MatcherStats, Plan, Scanner, digest_blocks};
use drover_storage::HostDirectory;
use rustix::fs::SeekFrom;
use rustix::time::ClockId;

use super::Lab;
use crate::bench::{Case, Need, Subject};
use crate::library;

/// Bytes of image in a batch, as drover sends them.
pub const BATCH: usize = 8 << 20;

/// One image as the matcher is told of it: its blocks that are not zero.
pub struct Image {
    /// Its name in the library.
    pub name: String,
    /// Its blocks' digests, in order.
    pub digests: Vec<Digest>,
    /// Whether they are heads.
    pub heads: Vec<Head>,
    /// Where each batch begins, and where the last one ends.
    batches: Vec<usize>,
}

impl Image {
    /// Its batches.
    pub fn batches(&self) -> impl Iterator<Item = (&[Digest], &[Head])> {
        self.batches
            .windows(2)
            .map(|w| (&self.digests[w[0]..w[1]], &self.heads[w[0]..w[1]]))
    }
}

/// The images to match, in order: those of the library that are built, or the small set.
///
/// # Errors
/// When there is none.
pub fn images(lab: &Lab) -> Result<Vec<PathBuf>> {
    let images: Vec<_> = if lab.small {
        vec![lab.image("small-one")?, lab.image("small-two")?]
    } else {
        library::images(&lab.common.dir, library::Set::Full)?
            .into_iter()
            .filter(|entry| entry.in_order && entry.built)
            .map(|entry| entry.path)
            .collect()
    };
    if images.is_empty() {
        bail!("no image in {}: lab library", lab.common.dir.display());
    }
    Ok(images)
}

/// The one case of an experiment that has all images go through so many matchers, which takes so many times what
/// loading them takes.
///
/// # Errors
/// When there is no list of images.
pub fn whole_library(lab: &Lab, matchers: usize, times: f64) -> Result<Case> {
    let images = images(lab)?;
    Ok(Case {
        id: "library".to_owned(),
        what: format!("{} images through {matchers} matchers", images.len()),
        seconds: times * seconds_to_load(&images),
        rank: 0,
        subject: Subject::Drover,
        needs: &[Need::Library],
    })
}

/// Seconds that reading, scanning and digesting them takes about.
pub fn seconds_to_load(images: &[PathBuf]) -> f64 {
    let bytes: u64 = images
        .iter()
        .filter_map(|path| path.metadata().ok())
        .map(|meta| meta.blocks() * 512)
        .sum();
    bytes as f64 / 400e6
}

/// Reads an image.
///
/// # Errors
/// When it cannot be read.
pub fn load(path: &Path) -> Result<Arc<Image>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let image = read(&file, file.metadata()?.len(), &name)
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Arc::new(image))
}

/// All of them.
///
/// # Errors
/// When one cannot be read.
pub fn load_all(paths: &[PathBuf]) -> Result<Vec<Arc<Image>>> {
    paths.iter().map(|path| load(path)).collect()
}

fn read(file: &File, len: u64, name: &str) -> Result<Image> {
    let mut image = Image {
        name: name.to_owned(),
        digests: Vec::new(),
        heads: Vec::new(),
        batches: vec![0],
    };
    let mut scanner = Scanner::new();
    let (mut at, mut bytes, mut digests) = (0, Vec::new(), Vec::new());
    while at < len {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data / BLOCK_SIZE_U64 * BLOCK_SIZE_U64,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        if data > at {
            scanner.skip_zeros();
        }
        at = data.max(at);
        let end = ((at / BATCH as u64 + 1) * BATCH as u64).min(len);
        bytes.resize((end - at).next_multiple_of(BLOCK_SIZE_U64) as usize, 0);
        let (have, padding) = bytes.split_at_mut((end - at) as usize);
        file.read_exact_at(have, at)?;
        padding.fill(0);
        let scan = scanner.scan(&bytes);
        digests.clear();
        digest_blocks(&bytes, &mut digests);
        debug_assert_eq!(digests.len(), bytes.len() / BLOCK_SIZE);
        let kept = digests.iter().zip(scan.zero.iter()).filter(|(_, z)| !z);
        image.digests.extend(kept.map(|(digest, _)| *digest));
        image.heads.extend(scan.heads);
        image.batches.push(image.digests.len());
        at = end;
    }
    image.batches.dedup();
    Ok(image)
}

/// Blocks of each image that exact deduplication with unbounded memory matches, when they come in this order.
pub fn exact(images: &[Arc<Image>]) -> Vec<u64> {
    let mut known = ExactDedup::new();
    images
        .iter()
        .map(|image| image.digests.iter().filter(|d| known.seen(d)).count() as u64)
        .collect()
}

/// A matcher with a destination that carries out its plans.
pub struct Sending {
    /// The matcher.
    pub matcher: Matcher,
    destination: Destination,
    next: u64,
}

/// What sending one image came to.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    before: MatcherStats,
    after: MatcherStats,
    /// Processor time in the matcher.
    pub seconds: f64,
}

impl Sent {
    /// How much a counter grew.
    pub fn grew(&self, counter: impl Fn(&MatcherStats) -> u64) -> f64 {
        (counter(&self.after) - counter(&self.before)) as f64
    }

    /// From the start of the one to the end of the other.
    pub fn through(&self, later: &Sent) -> Sent {
        Sent {
            before: self.before,
            after: later.after,
            seconds: self.seconds + later.seconds,
        }
    }
}

impl Sending {
    /// Opens an index in `storage`.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(storage: HostDirectory, config: MatcherConfig) -> Result<Self> {
        Ok(Self {
            matcher: Matcher::open(storage, config)?.0,
            destination: Destination::new(),
            next: 0,
        })
    }

    /// Sends an image after those before it. Every plan is carried out and its blocks are compared; `each` sees it.
    ///
    /// # Errors
    /// When the matcher fails, or a plan is wrong.
    pub fn send(&mut self, image: &Image, mut each: impl FnMut(&Plan)) -> Result<Sent> {
        let id = ImageId(self.next);
        self.next += 1;
        let before = self.matcher.stats();
        let mut spent = Duration::ZERO;
        let mut cursor = self.matcher.begin(id)?;
        for (digests, heads) in image.batches() {
            let start = cpu_time();
            let plan = self.matcher.batch(&mut cursor, digests, heads)?;
            spent += cpu_time() - start;
            let applied = self
                .destination
                .apply(id, digests, &plan)
                .map_err(|why| anyhow!("{}: a plan that is none: {why}", image.name))?;
            if applied.refetched > 0 {
                bail!("{}: {} blocks planned wrong", image.name, applied.refetched);
            }
            each(&plan);
        }
        let start = cpu_time();
        self.matcher.finish(cursor)?;
        spent += cpu_time() - start;
        Ok(Sent {
            before,
            after: self.matcher.stats(),
            seconds: spent.as_secs_f64(),
        })
    }

    /// Deletes all images at the destination but the newest `keep`.
    ///
    /// # Errors
    /// When the index cannot forget one.
    pub fn keep_newest(&mut self, keep: u64) -> Result<()> {
        if let Some(old) = self.next.checked_sub(1).and_then(|n| n.checked_sub(keep)) {
            self.matcher.forget(ImageId(old))?;
            self.destination.delete(ImageId(old));
        }
        Ok(())
    }
}

/// Time that this thread has spent on a processor: what other programs do meanwhile does not count.
pub fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// A share in percent; 0 of nothing is 100 %.
pub fn percent(part: f64, of: f64) -> f64 {
    if of > 0.0 { 100.0 * part / of } else { 100.0 }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::experiments::Common;

    /// A lab with two small related images that a test made, in place of the small set's.
    pub fn lab(dir: &Path) -> Lab {
        let images = dir.join("images");
        std::fs::create_dir_all(&images).unwrap();
        let mut rng = fastrand::Rng::with_seed(7);
        let files: Vec<Vec<u8>> = (0..60)
            .map(|_| {
                let blocks = rng.usize(1..60);
                let mut file = vec![0; blocks * BLOCK_SIZE];
                rng.fill(&mut file);
                file[..4].copy_from_slice(b"\x7fELF");
                let len = file.len();
                file[len - 9..].fill(0);
                file
            })
            .collect();
        for (name, chosen) in [("small-one", 0..45), ("small-two", 15..60)] {
            let file = File::create(images.join(format!("{name}.raw"))).unwrap();
            let mut at = 3 * BLOCK_SIZE_U64;
            for content in &files[chosen] {
                file.write_all_at(content, at).unwrap();
                at += content.len() as u64 + 2 * BLOCK_SIZE_U64;
            }
            file.set_len(at + (1 << 20)).unwrap();
        }
        Lab {
            common: Common {
                drover: dir.join("drover"),
                dir: dir.to_owned(),
                out: dir.join("out"),
                json: false,
            },
            repeat: 1,
            small: true,
        }
    }

    #[test]
    fn an_image_is_what_the_limit_counts() {
        let dir = tempfile::tempdir().unwrap();
        let paths = images(&lab(dir.path())).unwrap();
        let loaded = load_all(&paths).unwrap();
        let mut known = crate::limit::Known::default();
        for ((path, image), exact) in paths.iter().zip(&loaded).zip(exact(&loaded)) {
            let limit = known.add(path).unwrap();
            assert_eq!(image.digests.len() as u64, limit.data_blocks);
            assert_eq!(exact, limit.matched_blocks + limit.repeated_blocks);
            assert_eq!(image.digests.len(), image.heads.len());
            let batched: usize = image.batches().map(|(d, _)| d.len()).sum();
            assert_eq!(batched, image.digests.len());
        }
        assert!(exact(&loaded)[1] > 300);
    }
}
