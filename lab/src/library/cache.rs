//! The cache: where images, their manifests and downloaded packages are, locked for building.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::filesystem;
use crate::shell;

/// What is written beside an image: what it is, from what it was made, so that it can be rebuilt and identified.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The image's name.
    pub name: String,
    /// What it was made of, as its line of the table says it in words.
    pub recipe: String,
    /// The size that the file has, and what it takes on disk.
    pub size_bytes: u64,
    pub allocated_bytes: u64,
    /// The BLAKE3 of the file.
    #[serde(default)]
    pub digest: String,
    /// How the files came onto the file system.
    #[serde(default)]
    pub written_by: String,
    /// What was done to it, with numbers, and what could not be done and why.
    #[serde(default)]
    pub notes: Vec<String>,
    /// `package version`, sorted; empty where it was not made of packages.
    #[serde(default)]
    pub packages: Vec<String>,
}

impl Manifest {
    /// Reads that of an image in the cache `dir`; `None` where there is none.
    ///
    /// # Errors
    /// When it is no manifest.
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

/// What a recipe says of what it has made.
#[derive(Default)]
pub struct Built {
    /// `package version`, sorted.
    pub packages: Vec<String>,
    /// By which means.
    pub written_by: String,
    /// What was not as it should be, and what was done.
    pub notes: Vec<String>,
}

/// The parts of a cache, locked for building.
pub struct Cache {
    /// The cache itself; finished images and manifests are in `images`.
    pub dir: PathBuf,
    /// Trees that are being built, and mount points. Not in the cache: they have `/proc` mounted while packages are
    /// installed, and tools that walk a checkout (cargo is one) would stumble over it.
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

    /// Removes all that is unfinished: the lock is held, so it is nobody's.
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

    /// Downloaded packages of a suite.
    ///
    /// # Errors
    /// When the directory cannot be made.
    pub fn packages(&self, suite: &str) -> Result<PathBuf> {
        let debs = self.dir.join("packages").join(suite);
        fs::create_dir_all(debs.join("partial"))?;
        Ok(debs)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // Empty when all went well.
        let _ = fs::remove_dir(&self.work);
    }
}

/// Removes a tree, if it is there; what a subordinate user of ours owns, too.
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
