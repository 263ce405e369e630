//! Raw images as the matcher is told of them: the digests of their blocks that are not zero, and which are heads.

#![allow(dead_code, reason = "each example uses a part of it")]

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use drover_core::{BLOCK_SIZE_U64, Digest, Head};
use drover_index::{Scanner, digest_blocks};
use rustix::fs::{SeekFrom, seek};

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Bytes of image in a batch, as drover sends them.
const BATCH: u64 = 8 << 20;

/// One image.
pub struct Image {
    pub name: String,
    pub digests: Vec<Digest>,
    pub heads: Vec<Head>,
    /// Where each batch begins, and where the last one ends.
    batches: Vec<usize>,
}

impl Image {
    /// Reads an image; holes are skipped.
    pub fn load(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let len = file.metadata()?.len();
        let mut image = Self {
            name: path.file_stem().unwrap_or_default().display().to_string(),
            digests: Vec::new(),
            heads: Vec::new(),
            batches: vec![0],
        };
        let mut scanner = Scanner::new();
        let (mut at, mut bytes, mut digests) = (0, Vec::new(), Vec::new());
        while at < len {
            let data = match seek(&file, SeekFrom::Data(at)) {
                Ok(data) => data / BLOCK_SIZE_U64 * BLOCK_SIZE_U64,
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            if data > at {
                scanner.skip_zeros();
            }
            at = data.max(at);
            let end = ((at / BATCH + 1) * BATCH).min(len);
            bytes.clear();
            bytes.resize((end - at).next_multiple_of(BLOCK_SIZE_U64) as usize, 0);
            file.read_exact_at(&mut bytes[..(end - at) as usize], at)?;
            let scan = scanner.scan(&bytes);
            digests.clear();
            digest_blocks(&bytes, &mut digests);
            let data = digests
                .iter()
                .zip(scan.zero.iter())
                .filter(|(_, zero)| !zero);
            image.digests.extend(data.map(|(digest, _)| *digest));
            image.heads.extend(scan.heads);
            image.batches.push(image.digests.len());
            at = end;
        }
        image.batches.dedup();
        Ok(image)
    }

    /// Its batches.
    pub fn batches(&self) -> impl Iterator<Item = (&[Digest], &[Head])> {
        let pairs = self.batches.windows(2);
        pairs.map(|w| (&self.digests[w[0]..w[1]], &self.heads[w[0]..w[1]]))
    }
}

/// The images that the command line names.
pub fn all(paths: &[PathBuf]) -> Result<Vec<Image>> {
    if paths.is_empty() {
        return Err("name some raw images, in the order in which they are sent".into());
    }
    paths.iter().map(|path| Image::load(path)).collect()
}

/// A share in percent; 0 of nothing is 100 %.
pub fn percent(part: u64, of: u64) -> f64 {
    if of > 0 {
        100.0 * part as f64 / of as f64
    } else {
        100.0
    }
}
