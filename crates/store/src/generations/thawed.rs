//! Generations whose copy here a person has thawed: if the file says again that it has them, it is not frozen again.

use std::io;
use std::path::Path;

use drover_net::{decode, encode};
use drover_storage::Envelope;

use super::Seed;
use crate::machine::Generation;

/// In the directory of the image's lease and changes.
const FILE_NAME: &str = "generations.thawed";

const FORMAT: Envelope = Envelope {
    magic: *b"DRVTHAWN",
    version: 1,
    max_bytes: 1 << 12,
};

/// The latest ones that are remembered.
const MAX: usize = 16;

type Known = Vec<([u8; 16], u64)>;

/// Remembers that a copy of this generation was thawed, in the directory of its image. Durable when it returns.
///
/// # Errors
/// Of the disk.
pub fn remember_thaw(directory: &Path, seed: Seed, generation: Generation) -> io::Result<()> {
    let mut known = known(directory);
    let new = (seed.0, generation.0);
    if known.contains(&new) {
        return Ok(());
    }
    known.push(new);
    let known = &known[known.len().saturating_sub(MAX)..];
    FORMAT.write(&directory.join(FILE_NAME), &encode(&known.to_vec()))
}

/// Whether a copy of this generation was thawed here.
#[must_use]
pub fn was_thawed(directory: &Path, seed: Seed, generation: Generation) -> bool {
    known(directory).contains(&(seed.0, generation.0))
}

/// A file that cannot be read says nothing: then the image is frozen again, which is safe.
fn known(directory: &Path) -> Known {
    let path = directory.join(FILE_NAME);
    let read = || -> Option<Known> {
        let bytes = FORMAT.read(&path).ok()??;
        decode(FORMAT.open(&bytes).ok()?).ok()
    };
    read().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_thaws_are_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let seed = |n: u64| Seed([n as u8; 16]);
        for n in 0..20 {
            assert!(!was_thawed(path, seed(n), Generation(1)));
            remember_thaw(path, seed(n), Generation(1)).unwrap();
            remember_thaw(path, seed(n), Generation(1)).unwrap();
            assert!(was_thawed(path, seed(n), Generation(1)));
        }
        assert!(!was_thawed(path, seed(3), Generation(1)));
        assert!(was_thawed(path, seed(4), Generation(1)));
        assert!(!was_thawed(path, seed(4), Generation(2)));
        std::fs::write(path.join(FILE_NAME), "x").unwrap();
        assert!(!was_thawed(path, seed(4), Generation(1)));
    }
}
