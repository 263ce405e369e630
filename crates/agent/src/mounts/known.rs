//! What the other site said of an image, kept beside the cache so that the mount can begin while that site cannot be
//! reached. Layout: `docs/format/mount-known.md`.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use drover_mount::protocol::Opened;
use drover_net::{decode, encode};

use drover_storage::atomic_replace;

use crate::error::{Context, Result, bail};

const MAGIC: &[u8; 8] = b"DRVRKNW\0";
const VERSION: u32 = 1;
const HEAD: usize = 12;
const HASH: usize = 32;

/// Longer files are not read.
const MOST: u64 = 4096;

/// Writes it down, durably.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: &Path, opened: &Opened) -> Result<()> {
    atomic_replace(path, &bytes_of(opened))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// What was written down; none when nothing was.
///
/// # Errors
/// When it cannot be read, is damaged or of another version.
pub fn read(path: &Path) -> Result<Option<Opened>> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(MOST + 1).read_to_end(&mut bytes)) {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
    }
    let opened = parse(&bytes).with_context(|| {
        format!(
            "{} cannot be used; mount while the other site can be reached to have it written anew",
            path.display()
        )
    })?;
    Ok(Some(opened))
}

fn bytes_of(opened: &Opened) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&encode(opened));
    let hash = blake3::hash(&bytes);
    bytes.extend_from_slice(hash.as_bytes());
    bytes
}

fn parse(bytes: &[u8]) -> Result<Opened> {
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
    use drover_core::Digest;
    use drover_store::lease::Identity;

    #[test]
    fn it_comes_back_whole_or_not_at_all() {
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
            can: [true, false, true, false],
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
