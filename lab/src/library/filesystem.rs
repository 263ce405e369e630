//! Writes a directory tree to an image with a file system: by loop mount, or (ext4 only) by `mke2fs -d` without
//! privileges.
//!
//! With a loop mount, the kernel lays out the files as on a machine during installation: package by package in the
//! order in which they were unpacked, then the files created by their scripts. There is no partition table: the file
//! system starts at the image's first byte. UUIDs and timestamps are derived from the image's name.

use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};

use super::table::{Fs, Spec};
use crate::shell;

/// The earliest creation time of an image (2026-01-01).
pub const EPOCH: u64 = 1_767_225_600;

/// The creation time of an image: a time in the half year after [`EPOCH`] derived from its name. Thus a rebuild only
/// differs where the files do, and different machines have different times, as real ones do (with the same time, even
/// their initial RAM disks would be equal).
pub fn time_of(name: &str) -> SystemTime {
    let hash = blake3::hash(format!("drover lab time {name}").as_bytes());
    let number = u32::from_le_bytes(hash.as_bytes()[..4].try_into().unwrap_or_default());
    SystemTime::UNIX_EPOCH + Duration::from_secs(EPOCH + u64::from(number) % (180 * 86_400))
}

/// The same in seconds since 1970, for other programs.
pub fn seconds_of(name: &str) -> String {
    let since = time_of(name)
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    since.as_secs().to_string()
}

/// A UUID derived from a name and a purpose.
pub fn uuid_of(name: &str, purpose: &str) -> String {
    let hex = blake3::hash(format!("drover lab {purpose} {name}").as_bytes()).to_hex();
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..32],
    ];
    format!(
        "{}-{}-4{}-8{}-{}",
        parts[0], parts[1], parts[2], parts[3], parts[4]
    )
}

/// True for root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The disk size for a tree: half as much again, rounded up to whole GiB, at least 2, like a small machine's.
fn size_for(tree: &Path) -> Result<u64> {
    let used = shell::run(Command::new("du").args(["-s", "-B1", "-x"]).arg(tree))?.stdout;
    let used = String::from_utf8_lossy(&used)
        .split_whitespace()
        .next()
        .and_then(|n| n.parse::<u64>().ok());
    let used = used.context("du printed no size")?;
    Ok((used + used / 2).div_ceil(1 << 30).max(2) << 30)
}

/// Creates a file system in a sparse file: an empty one, or (ext4 only) with a tree.
fn make(out: &Path, name: &str, fs: Fs, size: u64, tree: Option<&Path>) -> Result<()> {
    let id = uuid_of(name, "file system");
    let label = |most: usize| name[..name.len().min(most)].to_owned();
    let _ = fs::remove_file(out);
    fs::File::create(out)?.set_len(size)?;
    let mut command = match fs {
        Fs::Ext4 => {
            let seed = uuid_of(name, "hash seed");
            let owner = if tree.is_some() {
                ",root_owner=0:0"
            } else {
                ""
            };
            let options = format!("hash_seed={seed},lazy_itable_init=1{owner}");
            let mut mke2fs = Command::new("mke2fs");
            mke2fs.args([
                "-q",
                "-F",
                "-t",
                "ext4",
                "-b",
                "4096",
                "-m",
                "1",
                "-U",
                &id,
                "-L",
                &label(16),
            ]);
            mke2fs
                .args(["-E", &options])
                .env("E2FSPROGS_FAKE_TIME", seconds_of(name));
            mke2fs
        }
        Fs::Xfs => {
            let mut mkfs = Command::new("mkfs.xfs");
            mkfs.args(["-q", "-f", "-m", &format!("uuid={id}"), "-L", &label(12)]);
            mkfs
        }
        Fs::Btrfs => {
            let mut mkfs = Command::new("mkfs.btrfs");
            mkfs.args(["-q", "-f", "-U", &id, "-L", &label(255)]);
            mkfs
        }
    };
    if let Some(tree) = tree {
        command.arg("-d").arg(tree);
    }
    shell::run(command.arg(out)).map(drop)
}

/// Writes a tree to a sparse ext4 image without privileges; returns the method, for the manifest.
///
/// # Errors
/// When `mke2fs` is not there or fails.
pub fn mke2fs(tree: &Path, out: &Path, name: &str) -> Result<String> {
    make(out, name, Fs::Ext4, size_for(tree)?, Some(tree))?;
    Ok("mke2fs -d".to_owned())
}

/// Writes a tree to a sparse image by loop mount; `log` is dpkg's log of the installation. Returns the method, for the
/// manifest. Copies all attributes of files, including holes and hard links; `fstab` replaces the root entry of
/// `/etc/fstab` if the tree's own does not fit.
///
/// # Errors
/// Without root, loop devices or the file system's tools.
pub fn write(
    tree: &Path,
    out: &Path,
    spec: &Spec,
    work: &Path,
    log: Option<&Path>,
    fstab: Option<&str>,
) -> Result<String> {
    const COPY: &str = r#"
        set -o pipefail
        all="--numeric-owner --xattrs --xattrs-include=* --acls"
        tar -C "$1" --null --no-recursion --sparse $all -T "$2" -cf - | tar -C "$3" $all -xpf -
    "#;
    if !is_root() {
        bail!("it needs a loop mount: not root");
    }
    make(out, &spec.name, spec.fs, size_for(tree)?, None)?;
    let mounted = Mounted::new(out, work.join("mnt"), spec.fs, false)?;
    let list = work.join("list");
    fs::write(&list, ordered(tree, log)?)?;
    shell::run(
        Command::new("bash")
            .args(["-fec", COPY, "copy"])
            .args([tree, &list, &mounted.at]),
    )?;
    fs::remove_file(list)?;
    if let Some(line) = fstab {
        fs::write(mounted.at.join("etc/fstab"), format!("{line}\n"))
            .context("cannot write /etc/fstab")?;
    }
    mounted.close()?;
    Ok("loop mount, tar in the order of installation".to_owned())
}

/// All paths of a tree, NUL-terminated: files of packages in the order of installation, then the rest.
pub fn ordered(tree: &Path, log: Option<&Path>) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    walk(tree, tree, &mut all)?;
    let rank = ranks(tree, log);
    let last = rank.len() + 1;
    // Directories first: otherwise a file's directory would be created without its owner and mode.
    all.sort_by_cached_key(|(path, is_dir)| {
        let at = rank.get(path).copied().unwrap_or(last);
        (if *is_dir { 0 } else { at }, path.clone())
    });
    let line = |(path, _): (PathBuf, bool)| [b"./", path.as_os_str().as_bytes(), b"\0"].concat();
    Ok(all.into_iter().flat_map(line).collect())
}

fn walk(tree: &Path, dir: &Path, out: &mut Vec<(PathBuf, bool)>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        let is_dir = entry.file_type()?.is_dir();
        out.push((entry.path().strip_prefix(tree)?.to_owned(), is_dir));
        if is_dir {
            walk(tree, &entry.path(), out)?;
        }
    }
    Ok(())
}

/// The rank of each file that a package owns, by unpacking order. Packages missing from the log come first.
fn ranks(tree: &Path, log: Option<&Path>) -> HashMap<PathBuf, usize> {
    let log = log
        .and_then(|log| fs::read_to_string(log).ok())
        .unwrap_or_default();
    let plain = |package: &str| package.split(':').next().unwrap_or(package).to_owned();
    let package = |line: &str| {
        let mut words = line.split(' ').skip(2);
        words
            .next()
            .filter(|word| *word == "install")
            .and(words.next())
            .map(plain)
    };
    let installed: Vec<String> = log.lines().filter_map(package).collect();
    let info = tree.join("var/lib/dpkg/info");
    let names = fs::read_dir(&info)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned());
    let list = |file: String| {
        let package = plain(file.strip_suffix(".list")?);
        let at = installed
            .iter()
            .rposition(|p| *p == package)
            .map_or(0, |at| at + 1);
        Some((at, file))
    };
    let mut lists: Vec<(usize, String)> = names.filter_map(list).collect();
    lists.sort();
    let mut rank = HashMap::new();
    for (_, file) in lists {
        for path in fs::read_to_string(info.join(file))
            .unwrap_or_default()
            .lines()
        {
            let next = rank.len() + 1;
            rank.entry(real(tree, Path::new(path.trim_start_matches('/'))))
                .or_insert(next);
        }
    }
    rank
}

/// Maps a package's path `/bin/x` to `/usr/bin/x` in a merged-usr tree.
fn real(tree: &Path, path: &Path) -> PathBuf {
    let mut parts = path.components();
    let target = parts
        .next()
        .and_then(|first| fs::read_link(tree.join(first)).ok());
    match target.filter(|target| target.is_relative()) {
        Some(target) => target.join(parts.as_path()),
        None => path.to_owned(),
    }
}

/// How long an image may still be mounted in a mount namespace of another process, which copied all mounts.
const BUSY_LIMIT: Duration = Duration::from_secs(20);

/// A mounted image.
pub struct Mounted {
    /// The mount point.
    pub at: PathBuf,
}

impl Mounted {
    /// Mounts an image at a new directory.
    ///
    /// # Errors
    /// When it cannot be mounted: no root, no loop device, a file system that the kernel lacks.
    pub fn new(image: &Path, at: PathBuf, fs: Fs, read_only: bool) -> Result<Self> {
        fs::create_dir_all(&at)?;
        let options = match (read_only, fs) {
            (true, Fs::Ext4) => "ro,loop,noload",
            (true, Fs::Xfs) => "ro,loop,norecovery,nouuid",
            (true, Fs::Btrfs) => "ro,loop",
            // Disable background zeroing of inode tables, whose progress depends on timing.
            (false, Fs::Ext4) => "loop,noatime,noinit_itable",
            (false, Fs::Xfs) => "loop,noatime,nouuid",
            (false, Fs::Btrfs) => "loop,noatime",
        };
        let mut mount = Command::new("mount");
        mount.args(["-t", &fs.to_string(), "-o", options]);
        mount.arg(image).arg(&at);
        let start = Instant::now();
        loop {
            match shell::run(&mut mount) {
                Err(e) if e.to_string().contains("busy") && start.elapsed() < BUSY_LIMIT => {
                    thread::sleep(Duration::from_millis(100));
                }
                ran => return ran.map(|_| Self { at }),
            }
        }
    }

    /// Unmounts it: everything written is then in the image.
    ///
    /// # Errors
    /// When it is busy.
    pub fn close(self) -> Result<()> {
        shell::run(Command::new("umount").arg(&self.at)).map(drop)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // After a failure; the next build retries what cannot be unmounted.
        let _ = unmount_below(&self.at);
    }
}

/// Unmounts everything below a directory.
///
/// # Errors
/// When something cannot be unmounted.
pub fn unmount_below(dir: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let all = mounts
        .lines()
        .rev()
        .filter_map(|line| line.split(' ').nth(1));
    for at in all.filter(|at| Path::new(at).starts_with(dir)) {
        shell::run(Command::new("umount").arg("-l").arg(at))?;
    }
    Ok(())
}
