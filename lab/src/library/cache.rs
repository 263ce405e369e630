//! Where a library lies, and what a killed build left there.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::manifest::Manifest;
use super::{jail, mount};
use crate::shell;

/// The parts of a cache, locked for building.
pub struct Cache {
    /// Finished images and manifests.
    pub images: PathBuf,
    /// Downloaded packages, a directory per suite.
    pub packages: PathBuf,
    /// Trees that are being built, and mount points.
    pub work: PathBuf,
    /// Held open: its lock keeps two builds out of the same cache.
    _lock: File,
}

impl Cache {
    /// Opens (and makes) the cache under `dir`, locks it for building, and removes what a killed build left.
    ///
    /// # Errors
    /// When it cannot be made, another build has it, or what is left cannot be removed.
    pub fn open(dir: &Path) -> Result<Self> {
        let at = |name: &str| -> Result<PathBuf> {
            let path = dir.join(name);
            fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
            Ok(path.canonicalize()?)
        };
        let (images, packages) = (at("images")?, at("packages")?);
        let work = work_of(&images);
        fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
        let lock = File::create(dir.join("lock"))
            .with_context(|| format!("cannot write in {}", dir.display()))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("another build uses {}", dir.display()))?;
        let cache = Self {
            images,
            packages,
            work,
            _lock: lock,
        };
        cache
            .sweep()
            .context("cannot remove what a killed build left")?;
        Ok(cache)
    }

    /// The lock is held, so whatever is unfinished is nobody's.
    fn sweep(&self) -> Result<()> {
        let mounts = mount::unmount_below(&self.work)?;
        let (mut loops, mut parts, mut trees) = (0, 0, 0);
        for entry in fs::read_dir(&self.images)?.flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|end| end == "part") {
                loops += mount::detach(&path)?;
                fs::remove_file(&path)?;
                parts += 1;
            }
        }
        for entry in fs::read_dir(&self.work)?.flatten() {
            remove_tree(&entry.path())?;
            trees += 1;
        }
        if mounts + loops + parts + trees > 0 {
            eprintln!(
                "removed what a killed build left: {parts} unfinished file(s), {trees} work tree(s), {mounts} mount(s), {loops} loop device(s)"
            );
        }
        Ok(())
    }

    /// Removes what a failed build left at work, mounts included.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn clear(&self) -> Result<()> {
        mount::unmount_below(&self.work)?;
        for entry in fs::read_dir(&self.work)?.flatten() {
            remove_tree(&entry.path())?;
        }
        Ok(())
    }

    /// The unfinished file of an image: only a finished one has its name.
    pub fn part(&self, file_name: &str) -> PathBuf {
        self.images.join(format!("{file_name}.part"))
    }

    /// Gives a finished image its name; its manifest is there first.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(&self, file_name: &str, manifest: &Manifest) -> Result<()> {
        let part = self.part(file_name);
        File::open(&part)?.sync_all()?;
        manifest.write(&self.images.join(format!("{}.json", manifest.name)))?;
        fs::rename(part, self.images.join(file_name))?;
        Ok(())
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // Empty when all went well.
        let _ = fs::remove_dir(&self.work);
    }
}

/// Where a cache's trees are built. Not in the cache: they have `/proc` mounted while packages are
/// installed, and tools that walk a checkout (cargo is one) would stumble over it.
pub fn work_of(images: &Path) -> PathBuf {
    let temporary = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
    let id = blake3::hash(images.as_os_str().as_encoded_bytes()).to_hex();
    temporary.join(format!("drover-lab-{}", &id[..12]))
}

/// Removes a tree or a file, unmounting what is mounted in it first.
///
/// # Errors
/// When it cannot be removed.
pub fn remove_tree(tree: &Path) -> Result<()> {
    let Ok(meta) = tree.symlink_metadata() else {
        return Ok(());
    };
    if !meta.is_dir() {
        return fs::remove_file(tree).with_context(|| format!("cannot remove {}", tree.display()));
    }
    mount::unmount_below(tree)?;
    let removed = fs::remove_dir_all(tree);
    if removed.is_err() && !jail::is_root() {
        // Owned by a subordinate user of ours, or without the right to look into it.
        let _ = shell::run(Command::new("chmod").args(["-R", "u+rwX"]).arg(tree));
        let mapped = ["--map-root-user", "--map-auto", "rm", "-rf", "--"];
        let _ = shell::run(Command::new("unshare").args(mapped).arg(tree));
        if !tree.exists() {
            return Ok(());
        }
        return fs::remove_dir_all(tree)
            .with_context(|| format!("cannot remove {}", tree.display()));
    }
    removed.with_context(|| format!("cannot remove {}", tree.display()))
}

/// Bytes that can still be written where `path` is or will be.
///
/// # Errors
/// When nothing of the path is there.
pub fn free_bytes(path: &Path) -> Result<(u64, u64)> {
    let there = path
        .ancestors()
        .map(|p| {
            if p.as_os_str().is_empty() {
                Path::new(".")
            } else {
                p
            }
        })
        .find(|p| p.exists())
        .context("no such place")?;
    let stat = rustix::fs::statvfs(there)?;
    Ok((stat.f_bavail * stat.f_frsize, fs::metadata(there)?.dev()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_build_left_is_gone_and_what_is_finished_stays() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path()).unwrap();
        fs::write(cache.images.join("a.raw"), b"whole").unwrap();
        fs::write(cache.part("b.raw"), b"half").unwrap();
        fs::write(cache.images.join("c.json.part"), b"{").unwrap();
        let work = cache.work.clone();
        fs::create_dir_all(work.join("b/etc")).unwrap();
        assert!(
            Cache::open(dir.path())
                .err()
                .unwrap()
                .to_string()
                .contains("another build")
        );
        drop(cache);
        let cache = Cache::open(dir.path()).unwrap();
        assert!(!work.join("b").exists());
        let names: Vec<_> = fs::read_dir(&cache.images)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names, ["a.raw"]);
    }

    #[test]
    fn an_image_has_its_name_only_with_its_manifest() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path()).unwrap();
        fs::write(cache.part("a.raw"), b"x").unwrap();
        let manifest = Manifest {
            name: "a".into(),
            ..Manifest::default()
        };
        cache.finish("a.raw", &manifest).unwrap();
        assert_eq!(fs::read(cache.images.join("a.raw")).unwrap(), b"x");
        assert!(
            Manifest::read(&cache.images.join("a.json"))
                .unwrap()
                .is_some()
        );
    }
}
