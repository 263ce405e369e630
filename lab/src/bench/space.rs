//! Room on disk: how much there is, and the name of the file system that has none left.

use std::path::Path;

use anyhow::{Context, Result, bail};

/// What a run needs beside its images: catalogs, caches, logs.
const SPARE_BYTES: u64 = 256 << 20;

/// Fails when there is no room for a copy of images that take `bytes` on disk.
///
/// # Errors
/// Without room; the file system is named.
pub fn check(out: &Path, bytes: u64) -> Result<()> {
    let stat =
        rustix::fs::statvfs(out).with_context(|| format!("no directory {}", out.display()))?;
    let (free, needed) = (stat.f_bavail * stat.f_frsize, bytes + SPARE_BYTES);
    if free < needed {
        bail!(
            "no room: {} MiB free and {} MiB needed on {}",
            free >> 20,
            needed >> 20,
            name_of(out)
        );
    }
    Ok(())
}

/// Adds the file system to the reason of a failure when it is that there was no room.
pub fn explain(why: String, out: &Path) -> String {
    let full = [
        "No space left on device",
        "os error 28",
        "Disk quota",
        "to spare",
    ];
    if full.iter().any(|words| why.contains(words)) {
        format!("{why} [{}]", name_of(out))
    } else {
        why
    }
}

/// `ext4 on /dev/vda`, the file system that `path` is on.
fn name_of(path: &Path) -> String {
    let found = path.canonicalize().ok().and_then(|path| {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        deepest(&mounts, &path)
    });
    found.unwrap_or_else(|| "its file system".to_owned())
}

/// The file system of the deepest mount above `path`; of several at one place, the last covers the others.
fn deepest(mountinfo: &str, path: &Path) -> Option<String> {
    let mut best: Option<(usize, String)> = None;
    for line in mountinfo.lines() {
        let (mount, kind) = line.split_once(" - ")?;
        let Some(at) = mount.split(' ').nth(4) else {
            continue;
        };
        let mut kind = kind.split(' ');
        let (Some(kind), Some(source)) = (kind.next(), kind.next()) else {
            continue;
        };
        if path.starts_with(at) && best.as_ref().is_none_or(|(length, _)| *length <= at.len()) {
            best = Some((at.len(), format!("{kind} on {source}")));
        }
    }
    Some(best?.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_system_without_room_is_named() {
        let dir = tempfile::tempdir().unwrap();
        check(dir.path(), 0).unwrap();
        let error = check(dir.path(), u64::MAX / 2).unwrap_err().to_string();
        assert!(
            error.contains("no room") && error.contains(" on "),
            "{error}"
        );
        assert!(check(&dir.path().join("none"), 0).is_err());
    }

    #[test]
    fn the_deepest_mount_counts() {
        let mounts =
            "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / /tmp rw shared:1 - tmpfs none rw\n";
        let of = |path: &str| deepest(mounts, Path::new(path)).unwrap();
        assert_eq!(of("/tmp/x"), "tmpfs on none");
        assert_eq!(of("/tmpx"), "ext4 on /dev/a");
    }

    #[test]
    fn only_a_full_disk_is_explained() {
        let dir = tempfile::tempdir().unwrap();
        let full = explain(
            "write: No space left on device (os error 28)".into(),
            dir.path(),
        );
        assert!(full.contains(" on "), "{full}");
        assert_eq!(explain("broken pipe".into(), dir.path()), "broken pipe");
    }
}
