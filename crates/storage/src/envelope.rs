//! A small state file with identification and integrity check: magic, version, body, BLAKE3 of all that.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::atomic_replace;

const HASH: usize = 32;

/// The format of such a file. Numbers are little-endian.
#[derive(Clone, Copy, Debug)]
pub struct Envelope {
    /// The magic number at the beginning.
    pub magic: [u8; 8],
    /// The version, in the next 4 bytes.
    pub version: u32,
    /// Maximum length of the file in bytes.
    pub max_bytes: u64,
}

/// Why a file cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// Another format, truncated, or too long.
    #[error("it is a file of another kind")]
    Foreign,
    /// Another version.
    #[error("its version is not known to this program")]
    Version,
    /// The hash does not match.
    #[error("it is damaged")]
    Damaged,
}

impl Envelope {
    /// Writes a file with that body, replacing what is at `path`, as [`atomic_replace`] does.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn write(&self, path: &Path, body: &[u8]) -> io::Result<()> {
        atomic_replace(path, &self.seal(body))
    }

    /// The bytes of a file with that body.
    #[must_use]
    pub fn seal(&self, body: &[u8]) -> Vec<u8> {
        let mut bytes = [&self.magic, &self.version.to_le_bytes()[..], body].concat();
        let hash = blake3::hash(&bytes);
        bytes.extend_from_slice(hash.as_bytes());
        bytes
    }

    /// Reads a file, up to slightly more than the limit; none if it does not exist.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn read(&self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        let limit = self.max_bytes + 1;
        match File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)) {
            Ok(_) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Checks a file's bytes and returns its body.
    ///
    /// # Errors
    /// [`EnvelopeError`].
    pub fn open<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], EnvelopeError> {
        let all = (bytes.len() as u64 <= self.max_bytes).then_some(bytes);
        let (sealed, hash) = all
            .and_then(|bytes| bytes.split_last_chunk::<HASH>())
            .ok_or(EnvelopeError::Foreign)?;
        let (version, body) = sealed
            .strip_prefix(&self.magic)
            .and_then(|rest| rest.split_first_chunk::<4>())
            .ok_or(EnvelopeError::Foreign)?;
        if *version != self.version.to_le_bytes() {
            return Err(EnvelopeError::Version);
        }
        match blake3::hash(sealed).as_bytes() == hash {
            true => Ok(body),
            false => Err(EnvelopeError::Damaged),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Envelope = Envelope {
        magic: *b"DRVRTST\0",
        version: 3,
        max_bytes: 100,
    };

    #[test]
    fn a_body_comes_back_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        assert_eq!(KIND.read(&path).unwrap(), None);
        KIND.write(&path, b"body").unwrap();
        let good = KIND.read(&path).unwrap().unwrap();
        assert_eq!(good[..16], *b"DRVRTST\0\x03\0\0\0body");
        assert_eq!(KIND.open(&good), Ok(&b"body"[..]));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(KIND.open(&bad).is_err(), "byte {at}");
            assert!(KIND.open(&good[..at]).is_err(), "cut at {at}");
        }
        let mut other = KIND;
        other.version = 4;
        assert_eq!(other.open(&good), Err(EnvelopeError::Version));
        KIND.write(&path, &[0; 1000]).unwrap();
        let long = KIND.read(&path).unwrap().unwrap();
        assert_eq!(long.len(), 101);
        assert_eq!(KIND.open(&long), Err(EnvelopeError::Foreign));
    }
}
