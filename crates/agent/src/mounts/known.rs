//! Image metadata from the other site, stored next to the cache, so that a mount can start while that site is
//! unreachable.
//! Layout: `docs/format/mount-known.md`.

use std::path::Path;

use drover_mount::protocol::{DirectCapabilities, Opened};
use drover_net::{decode, encode};

use drover_storage::Envelope;
use drover_store::lease::Identity;
use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Result};

const FORMAT: Envelope = Envelope {
    magic: *b"DRVRKNW\0",
    version: 1,
    max_bytes: 4096,
};

/// What of the site's reply is kept: the term of the lease is its own.
#[derive(Serialize, Deserialize)]
struct Known {
    size: u64,
    chunk: u32,
    identity: Identity,
    fresh: bool,
    read_only: bool,
    direct: DirectCapabilities,
}

impl From<&Opened> for Known {
    fn from(opened: &Opened) -> Known {
        Known {
            size: opened.size,
            chunk: opened.chunk,
            identity: opened.identity,
            fresh: opened.fresh,
            read_only: opened.read_only,
            direct: opened.direct,
        }
    }
}

impl From<Known> for Opened {
    fn from(known: Known) -> Opened {
        Opened {
            size: known.size,
            chunk: known.chunk,
            identity: known.identity,
            fresh: known.fresh,
            read_only: known.read_only,
            direct: known.direct,
            term: None,
        }
    }
}

/// Writes the metadata durably.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: &Path, opened: &Opened) -> Result<()> {
    let written = FORMAT.write(path, &encode(&Known::from(opened)));
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// Reads the metadata; `None` when the file does not exist.
///
/// # Errors
/// When the file cannot be read, is damaged or has another version.
pub fn read(path: &Path) -> Result<Option<Opened>> {
    let bytes = FORMAT.read(path);
    let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
    let opened = bytes.map(|bytes| -> Result<_> {
        let known: Known = decode(FORMAT.open(&bytes).map_err(Error::msg)?)?;
        Ok(Opened::from(known))
    });
    opened.transpose().with_context(|| {
        format!(
            "{} cannot be used; mount while the other site is reachable, which recreates it",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_core::Digest;

    #[test]
    fn metadata_is_read_back_intact_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("known");
        assert_eq!(read(&path).unwrap(), None);
        let opened = Opened {
            size: 1 << 30,
            chunk: 65536,
            identity: Identity {
                digest: Digest([7; 32]),
                edition: 3,
                epoch: 9 << 32,
            },
            fresh: true,
            read_only: false,
            direct: DirectCapabilities {
                fast_zeroes: true,
                durable: true,
                ..DirectCapabilities::default()
            },
            term: None,
        };
        write(&path, &opened).unwrap();
        assert_eq!(read(&path).unwrap(), Some(opened));
        let good = std::fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            assert!(read(&path).is_err(), "byte {at}");
            std::fs::write(&path, &good[..at]).unwrap();
            assert!(read(&path).is_err(), "cut at {at}");
        }
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        assert!(read(&path).is_err());
    }
}
