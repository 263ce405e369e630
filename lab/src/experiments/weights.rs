//! What images weigh: their limits, and which of them are alike. Computed once and kept beside the results, since
//! it takes a minute for the library; a file that has changed is weighed again.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use drover_core::BLOCK_SIZE_U64;
use serde::{Deserialize, Serialize};

use super::lines::Line;
use crate::limit::{self, Known, Limit};
use crate::rivals::Weight;

/// Where weights are kept, below the directory of results.
const FILE: &str = "weights.json";
/// Kept under another number by a lab that weighs otherwise.
const VERSION: u32 = 1;

/// What has been computed, by what it was computed of.
#[derive(Default, Serialize, Deserialize)]
struct Cache {
    version: u32,
    limits: BTreeMap<String, Limit>,
    shared: BTreeMap<String, u64>,
}

/// The scales of a lab.
pub struct Scales {
    file: PathBuf,
}

impl Scales {
    /// Those that keep what they found in directory `out`.
    pub fn new(out: &Path) -> Self {
        Self {
            file: out.join(FILE),
        }
    }

    /// The limits of `images` in this order at a destination that has `with`.
    ///
    /// # Errors
    /// When an image cannot be read.
    pub fn limits(&self, with: &[PathBuf], images: &[PathBuf]) -> Result<Vec<Limit>> {
        let keys = keys(with, images)?;
        let cache = self.load();
        let have: Option<Vec<Limit>> = keys.iter().map(|k| cache.limits.get(k).cloned()).collect();
        if let Some(limits) = have {
            return Ok(limits);
        }
        eprintln!("weighing {} image(s), once", with.len() + images.len());
        let mut known = Known::default();
        for path in with {
            known.learn(path)?;
        }
        let limits: Vec<Limit> = images
            .iter()
            .map(|path| known.add(path))
            .collect::<Result<_>>()?;
        self.keep(|cache| {
            cache
                .limits
                .extend(keys.into_iter().zip(limits.iter().cloned()));
        });
        Ok(limits)
    }

    /// What the images weigh about, for plans: as [`Scales::limits`] where that is known already, else a guess
    /// from what their files take on disk.
    ///
    /// # Errors
    /// When an image is not there.
    pub fn guess(&self, with: &[PathBuf], images: &[PathBuf]) -> Result<Vec<Weight>> {
        let cache = self.load();
        let keys = keys(with, images)?;
        let mut alike = !with.is_empty();
        let mut weights = Vec::new();
        for (path, key) in images.iter().zip(keys) {
            let meta = stat(path)?;
            let data = (meta.blocks() * 512).min(meta.len());
            // Systems compress to a third or a quarter, and share most of what they have.
            let share = if alike { 10 } else { 4 };
            alike = true;
            weights.push(
                cache
                    .limits
                    .get(&key)
                    .map_or_else(|| guessed(meta.len(), data, share), weight),
            );
        }
        Ok(weights)
    }

    /// The one of `candidates` that shares the most blocks with `image`, the earliest of equals; none when none
    /// shares any.
    ///
    /// # Errors
    /// When an image cannot be read.
    pub fn most_similar<'a>(
        &self,
        image: &Path,
        candidates: &'a [PathBuf],
    ) -> Result<Option<&'a PathBuf>> {
        let mut cache = self.load();
        let mut own: Option<HashSet<u128>> = None;
        let mut best: Option<(u64, &PathBuf)> = None;
        for candidate in candidates {
            let key = digest_of(&[&stamp(image)?, &stamp(candidate)?]);
            let shared = if let Some(shared) = cache.shared.get(&key) {
                *shared
            } else {
                if own.is_none() {
                    own = Some(limit::digests(image)?);
                }
                let theirs = limit::digests(candidate)?;
                let own = own.as_ref().map(|own| own.intersection(&theirs).count());
                let shared = own.unwrap_or_default() as u64;
                self.keep(|cache| {
                    cache.shared.insert(key.clone(), shared);
                });
                cache.shared.insert(key, shared);
                shared
            };
            if shared > best.map_or(0, |(most, _)| most) {
                best = Some((shared, candidate));
            }
        }
        Ok(best.map(|(_, path)| path))
    }

    /// What is kept; nothing when it cannot be read, since it can be computed again.
    fn load(&self) -> Cache {
        fs::read(&self.file)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Cache>(&bytes).ok())
            .filter(|cache| cache.version == VERSION)
            .unwrap_or_default()
    }

    /// Adds to what is kept. A full disk costs a minute the next time, not this run.
    fn keep(&self, add: impl FnOnce(&mut Cache)) {
        let mut cache = self.load();
        cache.version = VERSION;
        add(&mut cache);
        let write = || -> Result<()> {
            fs::create_dir_all(self.file.parent().context("no directory")?)?;
            let part = self
                .file
                .with_extension(format!("json.{}", std::process::id()));
            fs::write(&part, serde_json::to_vec(&cache)?)?;
            Ok(fs::rename(&part, &self.file)?)
        };
        if let Err(error) = write() {
            eprintln!("{} is not kept: {error:#}", self.file.display());
        }
    }
}

/// What a limit says about weight.
pub fn weight(limit: &Limit) -> Weight {
    Weight {
        size_bytes: limit.size_bytes,
        data_bytes: limit.data_blocks * BLOCK_SIZE_U64,
        limit_bytes: limit.limit_bytes,
    }
}

fn guessed(size_bytes: u64, data_bytes: u64, share: u64) -> Weight {
    Weight {
        size_bytes,
        data_bytes,
        limit_bytes: data_bytes / share,
    }
}

/// Seconds that drover takes about for an image over `line`, with comparing the result; measured on two cores.
pub fn drover_seconds(weight: &Weight, line: Option<Line>) -> f64 {
    let sent = weight.limit_bytes as f64 * 1.1 + weight.data_bytes as f64 / 500.0;
    let work = weight.data_bytes as f64 / 250e6;
    let (wire, rtt) = line.map_or((0.0, 0.0), |line| {
        (sent / line.goodput(4), line.rtt_ms / 1000.0)
    });
    wire.max(work) + 10.0 * rtt + 0.2 + compare_seconds(weight)
}

/// Seconds that a rival takes about, which sends `bytes` over one connection and works on the file meanwhile, holes
/// included: most read and write them.
pub fn rival_seconds(weight: &Weight, bytes: u64, line: Option<Line>) -> f64 {
    let work = weight.size_bytes as f64 / 100e6;
    let wire = line.map_or(0.0, |line| bytes as f64 / line.goodput(1));
    wire.max(work) + 2.0 + compare_seconds(weight)
}

/// Seconds to compare a delivered image with its original.
fn compare_seconds(weight: &Weight) -> f64 {
    0.1 + weight.data_bytes as f64 / 500e6
}

/// A key for each of `images`: what it, what came before it and `with` are.
fn keys(with: &[PathBuf], images: &[PathBuf]) -> Result<Vec<String>> {
    let mut before: Vec<String> = with.iter().map(|p| stamp(p)).collect::<Result<_>>()?;
    let mut keys = Vec::new();
    for image in images {
        let own = stamp(image)?;
        before.sort();
        let mut parts: Vec<&str> = before.iter().map(String::as_str).collect();
        parts.push(&own);
        keys.push(digest_of(&parts));
        before.push(own);
    }
    Ok(keys)
}

/// What tells a file from another and from what it was before.
fn stamp(path: &Path) -> Result<String> {
    let meta = stat(path)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok(format!(
        "{name}:{}:{}:{}.{:09}",
        meta.len(),
        meta.blocks(),
        meta.mtime(),
        meta.mtime_nsec()
    ))
}

fn stat(path: &Path) -> Result<fs::Metadata> {
    fs::metadata(path).with_context(|| format!("no image {}", path.display()))
}

fn digest_of(parts: &[&str]) -> String {
    blake3::hash(parts.join("\n").as_bytes()).to_hex()[..24].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::lines::REFERENCE;

    fn image(dir: &Path, name: &str, blocks: &[u8]) -> PathBuf {
        let bytes: Vec<u8> = blocks.iter().flat_map(|b| vec![*b; 4096]).collect();
        fs::write(dir.join(name), bytes).unwrap();
        dir.join(name)
    }

    #[test]
    fn limits_are_kept_until_an_image_changes() {
        let dir = tempfile::tempdir().unwrap();
        let scales = Scales::new(&dir.path().join("out"));
        let (a, b) = (
            image(dir.path(), "a", &[1, 2, 3]),
            image(dir.path(), "b", &[1, 2, 4]),
        );
        let both = [a.clone(), b.clone()];
        let before = scales.guess(&[], &both).unwrap();
        let limits = scales.limits(&[], &both).unwrap();
        assert_eq!((limits[0].unique_blocks, limits[1].unique_blocks), (3, 1));
        assert_ne!(before, scales.guess(&[], &both).unwrap());
        assert_eq!(
            scales.guess(&[], &both).unwrap()[1].limit_bytes,
            limits[1].limit_bytes
        );
        // What is there before counts: alone, `b` is three blocks; to a site with `a`, one.
        assert_eq!(
            scales.limits(&[], std::slice::from_ref(&b)).unwrap()[0].unique_blocks,
            3
        );
        let with = scales
            .limits(std::slice::from_ref(&a), std::slice::from_ref(&b))
            .unwrap();
        assert_eq!(with[0].unique_blocks, 1);

        // It is kept: what is in the file is what comes back.
        let kept = fs::read_to_string(dir.path().join("out").join(FILE)).unwrap();
        let changed = kept.replace("\"unique_blocks\":1", "\"unique_blocks\":77");
        fs::write(dir.path().join("out").join(FILE), changed).unwrap();
        assert_eq!(scales.limits(&[], &both).unwrap()[1].unique_blocks, 77);
        image(dir.path(), "b", &[1, 5, 6, 7]);
        assert_eq!(scales.limits(&[], &both).unwrap()[1].unique_blocks, 3);
        fs::write(dir.path().join("out").join(FILE), "{").unwrap();
        assert_eq!(scales.limits(&[], &both).unwrap()[1].unique_blocks, 3);
    }

    #[test]
    fn the_most_similar_shares_most() {
        let dir = tempfile::tempdir().unwrap();
        let scales = Scales::new(dir.path());
        let candidates = [
            image(dir.path(), "a", &[1, 9]),
            image(dir.path(), "b", &[1, 2, 3]),
            image(dir.path(), "c", &[1, 2, 4]),
        ];
        let one = image(dir.path(), "one", &[1, 2, 5]);
        for _ in 0..2 {
            assert_eq!(
                scales.most_similar(&one, &candidates).unwrap(),
                Some(&candidates[1])
            );
        }
        let other = image(dir.path(), "other", &[77]);
        assert_eq!(scales.most_similar(&other, &candidates).unwrap(), None);
        assert!(
            scales
                .most_similar(&dir.path().join("none"), &candidates)
                .is_err()
        );
    }

    #[test]
    fn estimates_are_near_what_was_measured() {
        // bookworm-plain at 100 Mbit/s and 40 ms: 17.6 s.
        let plain = Weight {
            size_bytes: 2 << 30,
            data_bytes: 808_214_528,
            limit_bytes: 207_237_330,
        };
        assert!((15.0..25.0).contains(&drover_seconds(&plain, Some(REFERENCE))));
        assert!((1.0..8.0).contains(&drover_seconds(&plain, None)));
        assert!((60.0..80.0).contains(&rival_seconds(&plain, plain.data_bytes, Some(REFERENCE))));
    }
}
