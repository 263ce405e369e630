//! The cache of images, manifests and downloaded packages, locked during builds.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::filesystem;
use crate::shell;

/// The description stored with an image: what it is and how it was made, to identify and rebuild it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The image's name.
    pub name: String,
    /// Its recipe, as described by its line of the table.
    pub recipe: String,
    /// The file's length, and its allocated size.
    pub size_bytes: u64,
    pub allocated_bytes: u64,
    /// The BLAKE3 hash of the file.
    #[serde(default)]
    pub digest: String,
    /// How the files were written to the file system.
    #[serde(default)]
    pub written_by: String,
    /// What was done to it, with numbers, and what failed and why.
    #[serde(default)]
    pub notes: Vec<String>,
    /// `package version`, sorted; empty if it was not made from packages.
    #[serde(default)]
    pub packages: Vec<String>,
}

impl Manifest {
    /// Reads the manifest of an image in the cache `dir`; `None` if there is none.
    ///
    /// # Errors
    /// When it is not a valid manifest.
    pub fn read(dir: &Path, name: &str) -> Result<Option<Self>> {
        let path = dir.join("images").join(format!("{name}.json"));
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .with_context(|| format!("{} is no manifest", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }
}

/// The result of a recipe.
#[derive(Default)]
pub struct Built {
    /// `package version`, sorted.
    pub packages: Vec<String>,
    /// How the files were written.
    pub written_by: String,
    /// Deviations, and what was done.
    pub notes: Vec<String>,
}

/// The directories of a cache, locked for building.
pub struct Cache {
    /// The cache itself; finished images and manifests are in `images`.
    pub dir: PathBuf,
    /// Trees under construction, and mount points. Outside of the cache, because `/proc` is mounted in them while
    /// packages are installed, which would confuse tools that walk a checkout (such as cargo).
    pub work: PathBuf,
    /// Held open: its lock prevents concurrent builds in the same cache.
    _lock: File,
}

impl Cache {
    /// Opens (or creates) the cache under `dir`, locks it for building, and removes what a killed build left.
    ///
    /// # Errors
    /// When it cannot be created, another build holds the lock, or leftovers cannot be removed.
    pub fn open(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir.join("images"))
            .with_context(|| format!("cannot make {}", dir.display()))?;
        let dir = dir.canonicalize()?;
        let lock = File::create(dir.join("lock"))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("another build uses {}", dir.display()))?;
        let temporary = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
        let id = blake3::hash(dir.as_os_str().as_encoded_bytes()).to_hex();
        let work = temporary.join(format!("drover-lab-{}", &id[..12]));
        let cache = Self {
            dir,
            work,
            _lock: lock,
        };
        cache
            .clear()
            .context("cannot remove what a killed build left")?;
        Ok(cache)
    }

    /// Removes everything unfinished; safe, because this process holds the lock.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn clear(&self) -> Result<()> {
        filesystem::unmount_below(&self.work)?;
        for entry in fs::read_dir(self.dir.join("images"))?.flatten() {
            if entry.path().extension().is_some_and(|end| end == "part") {
                fs::remove_file(entry.path())?;
            }
        }
        remove_tree(&self.work)?;
        Ok(fs::create_dir_all(&self.work)?)
    }

    /// Directory for downloaded packages of a suite.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn packages(&self, suite: &str) -> Result<PathBuf> {
        let debs = self.dir.join("packages").join(suite);
        fs::create_dir_all(debs.join("partial"))?;
        Ok(debs)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // Empty after a successful build.
        let _ = fs::remove_dir(&self.work);
    }
}

/// Removes a tree if it exists, including files of subordinate users.
///
/// # Errors
/// When it cannot be removed.
pub fn remove_tree(tree: &Path) -> Result<()> {
    if tree.exists() && fs::remove_dir_all(tree).is_err() {
        let mut rm = Command::new("unshare");
        shell::run(
            rm.args(["--map-root-user", "--map-auto", "rm", "-rf", "--"])
                .arg(tree),
        )?;
    }
    Ok(())
}
