//! The durable commit record of a merge, from which recovery finishes it after a crash. Layout: `docs/format/merge.md`.

use std::path::Path;

use drover_core::{Digest, ImageName};
use drover_net::{decode, encode};
use serde::{Deserialize, Serialize};

use drover_storage::Envelope;

use crate::error::{Context, Error, Result};

/// File name in the directory of the merge.
pub const NAME: &str = "merge";

const FORMAT: Envelope = Envelope {
    magic: *b"DRVRMRG\0",
    version: 1,
    max_bytes: 4096,
};

/// The commit record of an in-place merge whose new file is complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// The merged image.
    pub image: ImageName,
    /// The mount identifier under which the site holds the lease.
    pub mount: [u8; 16],
    /// The digest of the image being replaced.
    pub old: Digest,
    /// The digest of the new file.
    pub new: Digest,
    /// The peer that the image came from; empty when it was made here.
    pub from: String,
}

impl Decided {
    /// Writes the record durably.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let path = dir.join(NAME);
        let written = FORMAT.write(&path, &encode(self));
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads the record; `None` when there is none.
    ///
    /// # Errors
    /// When it cannot be read, is damaged or of another version.
    pub fn read(dir: &Path) -> Result<Option<Decided>> {
        let path = dir.join(NAME);
        let bytes = FORMAT.read(&path);
        let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
        let decided = bytes
            .map(|bytes| -> Result<_> { Ok(decode(FORMAT.open(&bytes).map_err(Error::msg)?)?) });
        decided.transpose().with_context(|| {
            format!(
                "{} cannot be used; `drover verify` tells whether the image is whole; then remove this directory and run `drover mounts break`",
                path.display()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_back_whole_or_not_at_all() {
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
            assert!(FORMAT.open(&bad).is_err(), "byte {at}");
            assert!(FORMAT.open(&good[..at]).is_err(), "cut at {at}");
        }
    }
}
