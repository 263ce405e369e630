//! What was decided of a merge, so that a crash leaves it to be finished. Layout: `docs/format/merge.md`.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use drover_core::{Digest, ImageName};
use drover_net::{decode, encode};
use serde::{Deserialize, Serialize};

use drover_storage::atomic_replace;

use crate::error::{Context, Result, bail};

/// Its name, in the directory of the merge.
pub const NAME: &str = "merge";

const MAGIC: &[u8; 8] = b"DRVRMRG\0";
const VERSION: u32 = 1;
const HEAD: usize = 12;
const HASH: usize = 32;

/// Longer files are not read.
const MOST: u64 = 4096;

/// A merge in place whose file is whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// Of which image.
    pub image: ImageName,
    /// By what the site's lease is known.
    pub mount: [u8; 16],
    /// The digest of the image that was written over.
    pub old: Digest,
    /// The digest of the new file.
    pub new: Digest,
    /// The peer that the image came from; empty when it was made here.
    pub from: String,
}

impl Decided {
    /// Writes it down, durably.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let path = dir.join(NAME);
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&encode(self));
        let hash = blake3::hash(&bytes);
        bytes.extend_from_slice(hash.as_bytes());
        atomic_replace(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// What was written down; none when nothing was.
    ///
    /// # Errors
    /// When it cannot be read, is damaged or of another version.
    pub fn read(dir: &Path) -> Result<Option<Decided>> {
        let path = dir.join(NAME);
        let mut bytes = Vec::new();
        match File::open(&path).and_then(|file| file.take(MOST + 1).read_to_end(&mut bytes)) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        }
        parse(&bytes).map(Some).with_context(|| {
            format!(
                "{} cannot be used; `drover verify` tells whether the image is whole; then remove this directory and run `drover mounts break`",
                path.display()
            )
        })
    }
}

fn parse(bytes: &[u8]) -> Result<Decided> {
    if bytes.len() < HEAD + HASH || bytes.len() as u64 > MOST || bytes[..8] != *MAGIC {
        bail!("it is not what it should be");
    }
    if bytes[8..HEAD] != VERSION.to_le_bytes() {
        bail!("it is of another version");
    }
    let (body, hash) = bytes.split_at(bytes.len() - HASH);
    if blake3::hash(body).as_bytes() != hash {
        bail!("it is damaged");
    }
    Ok(decode(&body[HEAD..])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_back_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Decided::read(dir.path()).unwrap(), None);
        let decided = Decided {
            image: ImageName::new("web.raw").unwrap(),
            mount: [3; 16],
            old: Digest([1; 32]),
            new: Digest([2; 32]),
            from: "lyon".into(),
        };
        decided.write(dir.path()).unwrap();
        assert_eq!(Decided::read(dir.path()).unwrap(), Some(decided));
        let good = std::fs::read(dir.path().join(NAME)).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(parse(&bad).is_err(), "byte {at}");
            assert!(parse(&good[..at]).is_err(), "cut at {at}");
        }
    }
}
