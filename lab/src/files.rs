//! Files: comparing a delivered one with its original.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::SeekFrom;

/// Buffer size of comparisons.
const STEP: u64 = 1 << 20;

/// Whether two files are equal. Like `cmp`, but skips ranges that are holes in both: images are mostly holes.
///
/// # Errors
/// When one cannot be read.
pub fn identical(one: &Path, two: &Path) -> Result<bool> {
    let open =
        |path: &Path| File::open(path).with_context(|| format!("cannot open {}", path.display()));
    let (a, b) = (open(one)?, open(two)?);
    let size = a.metadata()?.len();
    if b.metadata()?.len() != size {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; STEP as usize], vec![0; STEP as usize]);
    let mut at = 0;
    while at < size {
        // Skip common holes: both read as zeros.
        at = next_data(&a, at, size)?.min(next_data(&b, at, size)?);
        let take = (size - at).min(STEP) as usize;
        a.read_exact_at(&mut left[..take], at)?;
        b.read_exact_at(&mut right[..take], at)?;
        if left[..take] != right[..take] {
            return Ok(false);
        }
        at += take as u64;
    }
    Ok(true)
}

/// The first offset at or after `at` that is not in a hole; `size` when there is none.
fn next_data(file: &File, at: u64, size: u64) -> Result<u64> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(offset) => Ok(offset.min(size)),
        Err(rustix::io::Errno::NXIO) => Ok(size),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_compared_to_the_last_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let make = |name: &str, size: u64, writes: &[(u64, u8)]| {
            let file = File::create(path(name)).unwrap();
            file.set_len(size).unwrap();
            for (at, byte) in writes {
                file.write_all_at(&[*byte], *at).unwrap();
            }
        };
        let size = 9 << 20;
        make("a", size, &[(5 << 20, 1)]);
        make("b", size, &[(5 << 20, 1), (7 << 20, 0)]);
        make("c", size, &[(5 << 20, 1), (size - 1, 1)]);
        make("d", size, &[(5 << 20, 2)]);
        make("e", size, &[]);
        make("f", size + 1, &[(5 << 20, 1)]);
        let same = |name: &str| identical(&path("a"), &path(name)).unwrap();
        // Written zeros equal a hole.
        assert!(same("a") && same("b"));
        assert!(!same("c") && !same("d") && !same("e") && !same("f"));
        assert!(identical(&path("a"), &path("none")).is_err());
    }
}
