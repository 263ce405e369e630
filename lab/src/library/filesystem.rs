//! A directory tree as a file system in an image: by loop mount, or (ext4 only) without any rights.
//!
//! By loop mount the kernel lays the files out as it does on a machine that is being installed: package by
//! package in the order in which they were unpacked, then what their scripts made. There is no partition table: the
//! file system starts at the image's first byte.

use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::mount::Mounted;
use super::table::Fs;
use super::{ext4, jail};
use crate::shell;

const LIMIT: Duration = Duration::from_secs(1200);

/// What is written, and how.
pub struct Job<'a> {
    /// The image's name: UUID and label follow from it.
    pub name: &'a str,
    /// The file system.
    pub fs: Fs,
    /// Where to mount, and to keep lists.
    pub work: &'a Path,
    /// dpkg's log of the installation, if there is one.
    pub order: Option<&'a Path>,
    /// What `/etc/fstab` must say where the tree's own does not fit.
    pub fstab: Option<String>,
}

/// What was written.
pub struct Written {
    /// How, for the manifest.
    pub by: String,
    /// Over the files, as they are in the image where that was mounted.
    pub files_digest: String,
}

/// Writes a tree into a sparse image.
///
/// Without the rights for a loop mount an ext4 image is written by `mke2fs -d`, and that is said.
///
/// # Errors
/// When it can be done neither way.
pub fn write(tree: &Path, out: &Path, job: &Job<'_>) -> Result<Written> {
    let (name, fs) = (job.name, job.fs);
    match by_mount(tree, out, job) {
        Ok(files_digest) => Ok(Written {
            by: "loop mount, tar in the order of installation".to_owned(),
            files_digest,
        }),
        Err(error) if fs == Fs::Ext4 && cannot_mount(&error) => {
            eprintln!(
                "NOTE {name}: no loop mount here ({error:#}); written by mke2fs -d, whose layout is not that of an installed machine"
            );
            ext4::make(tree, out, name)?;
            Ok(Written {
                by: "mke2fs -d".to_owned(),
                files_digest: files_digest(tree)?,
            })
        }
        Err(error) if cannot_mount(&error) => {
            Err(error.context(format!("{fs} needs a loop mount")))
        }
        Err(error) => Err(error),
    }
}

/// Why there was no mount.
#[derive(Debug)]
struct NoMount(String);

impl std::fmt::Display for NoMount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoMount {}

fn cannot_mount(error: &anyhow::Error) -> bool {
    error.downcast_ref::<NoMount>().is_some()
}

fn by_mount(tree: &Path, out: &Path, job: &Job<'_>) -> Result<String> {
    let (name, work) = (job.name, job.work);
    if !jail::is_root() {
        bail!(NoMount("not root".to_owned()));
    }
    let _ = fs::remove_file(out);
    fs::File::create(out)?.set_len(ext4::size_for(tree)?)?;
    format(out, name, job.fs)?;
    let mounted = Mounted::new(out, work.join(format!("{name}.mnt")), job.fs, false)
        .map_err(|error| NoMount(format!("{error:#}")))?;
    copy(tree, job.order, &mounted.at, name, work)?;
    let files_digest = files_digest(&mounted.at)?;
    let fstab = mounted.at.join("etc/fstab");
    if let Some(line) = &job.fstab
        && fstab.exists()
    {
        fs::write(&fstab, format!("{line}\n")).context("cannot write /etc/fstab")?;
    }
    mounted.close()?;
    Ok(files_digest)
}

/// Makes an empty file system with the identity of its name.
fn format(out: &Path, name: &str, fs: Fs) -> Result<()> {
    let id = ext4::uuid_of(name, "file system");
    let label = |most: usize| name[..name.len().min(most)].to_owned();
    let mut command = match fs {
        Fs::Ext4 => {
            let seed = ext4::uuid_of(name, "hash seed");
            let mut c = Command::new("mke2fs");
            c.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "1", "-U", &id]);
            c.args(["-E", &format!("hash_seed={seed},lazy_itable_init=1")]);
            c.args(["-L", &label(16)]);
            c.env("E2FSPROGS_FAKE_TIME", ext4::time_of(name).to_string());
            c
        }
        Fs::Xfs => {
            let mut c = Command::new("mkfs.xfs");
            c.args(["-q", "-f", "-m", &format!("uuid={id}"), "-L", &label(12)]);
            c
        }
        Fs::Btrfs => {
            let mut c = Command::new("mkfs.btrfs");
            c.args(["-q", "-f", "-U", &id, "-L", &label(255)]);
            c
        }
    };
    let program = command.get_program().to_string_lossy().into_owned();
    if !shell::have(&program) {
        bail!("{program} is not installed (e2fsprogs, xfsprogs, btrfs-progs)");
    }
    jail::run(&program, command.arg(out), None).map(drop)
}

/// Copies a tree as it was installed: all that a file has, holes and links included.
fn copy(tree: &Path, order: Option<&Path>, to: &Path, name: &str, work: &Path) -> Result<()> {
    let list = work.join(format!("{name}.list"));
    fs::write(&list, ordered(tree, order)?)?;
    const COPY: &str = r#"
        set -o pipefail
        all="--numeric-owner --xattrs --xattrs-include=* --acls"
        tar -C "$1" --null --no-recursion --sparse $all -T "$2" -cf - | tar -C "$3" $all -xpf -
    "#;
    let mut command = jail::command(LIMIT, "bash");
    command
        .args(["-fec", COPY, "copy"])
        .arg(tree)
        .arg(&list)
        .arg(to);
    jail::run(&format!("{name}: copying the tree"), &mut command, None)?;
    fs::remove_file(list)?;
    Ok(())
}

/// All paths of a tree, each ended by a zero byte: files of packages in the order of installation, then the rest.
fn ordered(tree: &Path, order: Option<&Path>) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    walk(tree, tree, &mut all)?;
    all.sort();
    let rank = ranks(tree, order);
    let last = rank.len() + 1;
    // Directories first, or a file's directory would be made without its owner and mode.
    let mut keyed: Vec<(usize, PathBuf)> = all
        .into_iter()
        .map(|(path, is_dir)| {
            let at = rank.get(&path).copied().unwrap_or(last);
            (if is_dir { 0 } else { at }, path)
        })
        .collect();
    keyed.sort();
    let mut out = Vec::new();
    for (_, path) in keyed {
        out.extend_from_slice(b"./");
        out.extend_from_slice(path.as_os_str().as_bytes());
        out.push(0);
    }
    Ok(out)
}

fn walk(tree: &Path, dir: &Path, out: &mut Vec<(PathBuf, bool)>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        let path = entry.path();
        let is_dir = entry.file_type()?.is_dir();
        out.push((path.strip_prefix(tree)?.to_owned(), is_dir));
        if is_dir {
            walk(tree, &path, out)?;
        }
    }
    Ok(())
}

/// For each file that a package owns: when it was unpacked. Packages that the log does not name came first.
fn ranks(tree: &Path, order: Option<&Path>) -> HashMap<PathBuf, usize> {
    let log = order
        .and_then(|o| fs::read_to_string(o).ok())
        .unwrap_or_default();
    let installed: Vec<&str> = log
        .lines()
        .filter_map(|line| {
            line.split(' ')
                .nth(2)
                .filter(|w| *w == "install")
                .and(line.split(' ').nth(3))
        })
        .collect();
    let mut lists: Vec<(usize, String)> = Vec::new();
    let info = tree.join("var/lib/dpkg/info");
    for entry in fs::read_dir(&info).into_iter().flatten().flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        let Some(package) = file.strip_suffix(".list") else {
            continue;
        };
        let plain = package.split(':').next().unwrap_or(package);
        let at = installed
            .iter()
            .rposition(|p| p.split(':').next() == Some(plain))
            .map_or(0, |at| at + 1);
        lists.push((at, file));
    }
    lists.sort();
    let mut rank = HashMap::new();
    for (_, file) in lists {
        let text = fs::read_to_string(info.join(file)).unwrap_or_default();
        for path in text.lines() {
            let next = rank.len() + 1;
            let path = real(tree, Path::new(path.trim_start_matches('/')));
            rank.entry(path).or_insert(next);
        }
    }
    rank
}

/// Packages say `/bin/x` where the tree has `/usr/bin/x`.
fn real(tree: &Path, path: &Path) -> PathBuf {
    let mut parts = path.components();
    if let Some(first) = parts.next()
        && let Ok(target) = fs::read_link(tree.join(first))
        && target.is_relative()
    {
        return target.join(parts.as_path());
    }
    path.to_owned()
}

/// The BLAKE3 over all files' names, contents and targets, but for those that are random by their nature or hold a
/// time of day. Devices are left out (a tree that was unpacked without root has none).
///
/// # Errors
/// When a file cannot be read.
pub fn files_digest(tree: &Path) -> Result<String> {
    let mut all = Vec::new();
    walk(tree, tree, &mut all)?;
    all.sort();
    let mut hasher = blake3::Hasher::new();
    for (path, is_dir) in all {
        if is_dir || random(&path) {
            continue;
        }
        let full = tree.join(&path);
        let meta = full.symlink_metadata()?;
        let content = if meta.is_symlink() {
            blake3::hash(fs::read_link(&full)?.as_os_str().as_bytes())
        } else if meta.is_file() {
            match fs::read(&full) {
                Ok(bytes) => blake3::hash(&bytes),
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot read {}", full.display()));
                }
            }
        } else {
            continue;
        };
        hasher.update(path.as_os_str().as_bytes());
        hasher.update(&[0]);
        hasher.update(content.as_bytes());
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Files that no two installations have alike.
fn random(path: &Path) -> bool {
    const BELOW: &[&str] = &[
        "dev",
        "var/lib/mysql",
        "var/lib/postgresql",
        "var/log",
        "var/cache",
    ];
    let text = path.to_string_lossy();
    BELOW.iter().any(|dir| path.starts_with(dir))
        || text.starts_with("etc/ssh/ssh_host_")
        || text.contains("snakeoil")
        || text.starts_with("etc/ssl/certs/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(dir: &Path) -> PathBuf {
        let tree = dir.join("tree");
        let info = tree.join("var/lib/dpkg/info");
        fs::create_dir_all(&info).unwrap();
        fs::create_dir_all(tree.join("usr/bin")).unwrap();
        std::os::unix::fs::symlink("usr/bin", tree.join("bin")).unwrap();
        for name in ["a", "b", "c"] {
            fs::write(
                tree.join("usr/bin").join(name),
                vec![name.as_bytes()[0]; 70_000],
            )
            .unwrap();
        }
        fs::hard_link(tree.join("usr/bin/a"), tree.join("usr/bin/again")).unwrap();
        fs::write(info.join("one:amd64.list"), "/.\n/bin/b\n").unwrap();
        fs::write(info.join("two.list"), "/usr/bin/a\n").unwrap();
        tree
    }

    #[test]
    fn files_come_in_the_order_of_installation() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tree(dir.path());
        let log = dir.path().join("log");
        fs::write(
            &log,
            "d t install two:all <none> 1\nd t install one:amd64 <none> 1\n",
        )
        .unwrap();
        let list = String::from_utf8(ordered(&tree, Some(&log)).unwrap()).unwrap();
        let at = |name: &str| list.split('\0').position(|p| p == name).unwrap();
        assert!(at("./usr/bin") < at("./usr/bin/a"));
        assert!(at("./usr/bin/a") < at("./usr/bin/b") && at("./usr/bin/b") < at("./usr/bin/c"));
        let other = String::from_utf8(ordered(&tree, None).unwrap()).unwrap();
        let at = |name: &str| other.split('\0').position(|p| p == name).unwrap();
        assert!(at("./usr/bin/b") < at("./usr/bin/a"));
    }

    #[test]
    fn a_tree_is_on_each_file_system_what_it_was() {
        if !jail::is_root() || !Path::new("/dev/loop-control").exists() {
            eprintln!("SKIP a_tree_is_on_each_file_system_what_it_was: no root or no loop devices");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let tree = tree(dir.path());
        let before = files_digest(&tree).unwrap();
        for fs in [Fs::Ext4, Fs::Xfs, Fs::Btrfs] {
            let image = dir.path().join(format!("{fs}.raw"));
            let name = format!("test-{fs}");
            let job = Job {
                name: &name,
                fs,
                work: dir.path(),
                order: None,
                fstab: None,
            };
            if let Err(error) = write(&tree, &image, &job) {
                assert!(
                    format!("{error:#}").contains("loop mount")
                        || error.to_string().contains("not installed"),
                    "{error:#}"
                );
                eprintln!("SKIP {fs}: {error:#}");
                continue;
            }
            let mounted = Mounted::new(&image, dir.path().join("mnt"), fs, true).unwrap();
            let after = files_digest(&mounted.at).unwrap();
            let links = std::os::unix::fs::MetadataExt::nlink(
                &mounted.at.join("usr/bin/a").metadata().unwrap(),
            );
            mounted.close().unwrap();
            assert_eq!((after, links), (before.clone(), 2), "{fs}");
            assert!(
                super::super::mount::writable_loop(&image)
                    .unwrap()
                    .is_none()
            );
        }
    }
}
