//! A directory tree as an ext4 image, without mounting anything.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::jail;
use crate::shell;

/// No image is "made" before this time (2026-01-01).
pub const EPOCH: u64 = 1_767_225_600;

/// When an image is "made": a time in the half year after [`EPOCH`] that its name determines.
///
/// A rebuild then differs only where the files do; and two machines differ as real ones do, that are never
/// installed in the same second (with one time for all, even their initial RAM disks would be equal).
pub fn time_of(name: &str) -> u64 {
    let hash = blake3::hash(format!("drover lab time {name}").as_bytes());
    let number = u32::from_le_bytes(hash.as_bytes()[..4].try_into().unwrap_or_default());
    EPOCH + u64::from(number) % (180 * 86_400)
}

/// The size of a disk for a tree: room for half as much again, in whole GiB, at least 2, like a small machine's.
///
/// # Errors
/// When the tree cannot be measured.
pub fn size_for(tree: &Path) -> Result<u64> {
    let used = shell::run(Command::new("du").args(["-s", "-B1", "-x"]).arg(tree))?;
    let used: u64 = String::from_utf8_lossy(&used.stdout)
        .split_whitespace()
        .next()
        .and_then(|n| n.parse().ok())
        .context("du printed no size")?;
    Ok((used + used / 2).div_ceil(1 << 30).max(2) << 30)
}

/// Writes `tree` into a sparse ext4 image at `out`. UUID and directory hash seed follow from the name, and so are
/// the same on every build.
///
/// # Errors
/// When `mke2fs` is not there or fails.
pub fn make(tree: &Path, out: &Path, name: &str) -> Result<()> {
    make_with(Command::new("mke2fs"), tree, out, name, size_for(tree)?)
}

/// As [`make`], through a command that runs `mke2fs` in another world (`fakeroot`).
///
/// # Errors
/// When it fails.
pub fn make_with(
    mut command: Command,
    tree: &Path,
    out: &Path,
    name: &str,
    size: u64,
) -> Result<()> {
    if !shell::have("mke2fs") {
        bail!("mke2fs is not installed (e2fsprogs)");
    }
    let (id, seed) = (uuid_of(name, "file system"), uuid_of(name, "hash seed"));
    let _ = std::fs::remove_file(out);
    command
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "1", "-U", &id])
        .args([
            "-E",
            &format!("hash_seed={seed},lazy_itable_init=1,root_owner=0:0"),
        ])
        .args(["-L", &name[..name.len().min(16)], "-d"])
        .arg(tree)
        .arg(out)
        .arg(format!("{}K", size >> 10))
        .env("E2FSPROGS_FAKE_TIME", time_of(name).to_string());
    jail::run("mke2fs", &mut command, None).map(drop)
}

/// A UUID that a name and a purpose determine.
pub fn uuid_of(name: &str, purpose: &str) -> String {
    let hex = blake3::hash(format!("drover lab {purpose} {name}").as_bytes()).to_hex();
    format!(
        "{}-{}-4{}-8{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..32]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_well_formed_stable_and_distinct() {
        let id = uuid_of("bookworm-plain", "file system");
        assert_eq!(id.len(), 36);
        assert_eq!(
            id.split('-').map(str::len).collect::<Vec<_>>(),
            [8, 4, 4, 4, 12]
        );
        assert_eq!(id, uuid_of("bookworm-plain", "file system"));
        assert_ne!(id, uuid_of("bookworm-plain", "hash seed"));
        assert_ne!(id, uuid_of("bookworm-app", "file system"));
    }

    #[test]
    fn machines_are_made_at_their_own_fixed_times() {
        let (one, two) = (time_of("bookworm-plain"), time_of("bookworm-app"));
        assert_ne!(one, two);
        assert_eq!(one, time_of("bookworm-plain"));
        assert!((EPOCH..EPOCH + 180 * 86_400).contains(&one));
    }

    #[test]
    fn a_tree_becomes_a_sound_file_system_with_the_identity_of_its_name() {
        if !shell::have("mke2fs") || !shell::have("e2fsck") {
            eprintln!(
                "SKIP a_tree_becomes_a_sound_file_system_with_the_identity_of_its_name: no e2fsprogs"
            );
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        std::fs::write(tree.join("file"), vec![7; 70_000]).unwrap();
        let image = dir.path().join("image");
        make(&tree, &image, "test").unwrap();
        assert_eq!(std::fs::metadata(&image).unwrap().len(), 2 << 30);
        shell::run(Command::new("e2fsck").args(["-f", "-n"]).arg(&image)).unwrap();
        let header = shell::run(Command::new("dumpe2fs").arg("-h").arg(&image)).unwrap();
        let header = String::from_utf8_lossy(&header.stdout).into_owned();
        assert!(header.contains(&uuid_of("test", "file system")), "{header}");
        assert!(header.contains(&uuid_of("test", "hash seed")), "{header}");
        let back = dir.path().join("back");
        let dump = format!("dump /file {}", back.display());
        shell::run(Command::new("debugfs").args(["-R", &dump]).arg(&image)).unwrap();
        assert_eq!(std::fs::read(back).unwrap(), vec![7; 70_000]);
    }
}
