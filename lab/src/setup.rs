//! The environment of experiments: the binary, the image library, working directories.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use serde::{Deserialize, Serialize};

use crate::files::identical;

/// Timeout for a case of a killed run to exit: longer than its own limit, since the machine may be busy.
const LEFTOVER: Duration = Duration::from_secs(60);

/// What every experiment takes.
#[derive(Args, Clone, Serialize, Deserialize)]
pub struct Common {
    /// The drover to measure: a release build.
    #[arg(long, default_value = "target/release/drover", value_name = "FILE")]
    pub drover: PathBuf,
    /// Where the image library is.
    #[arg(long, default_value = "lab/cache", value_name = "DIR")]
    pub dir: PathBuf,
    /// Where sites are while they run.
    #[arg(long, default_value = "lab/out", value_name = "DIR")]
    pub out: PathBuf,
}

/// The environment of experiments: paths, repetitions, and the set of images.
#[derive(Args, Clone, Serialize, Deserialize)]
pub struct Lab {
    /// How often to measure what varies.
    #[arg(long, default_value_t = 3, value_name = "TIMES", value_parser = RangedU64ValueParser::<usize>::new().range(1..=100))]
    pub repeat: usize,
    /// The small set of images instead of the library.
    #[arg(long)]
    pub small: bool,
    /// Paths.
    #[command(flatten)]
    pub common: Common,
}

impl Lab {
    /// The absolute path of the binary to measure.
    ///
    /// # Errors
    /// When it is not built.
    pub fn binary(&self) -> Result<PathBuf> {
        let drover = &self.common.drover;
        let build = || format!("no {}: cargo build --release -p drover", drover.display());
        drover.canonicalize().with_context(build)
    }

    /// Creates an empty directory for a run, removed when dropped. It is locked, so that [`Self::sweep`] skips it.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn work(&self, experiment: &str) -> Result<Work> {
        let name = format!("work-{experiment}-{}", std::process::id());
        let dir = self.common.out.join(name);
        let make = || -> std::io::Result<Work> {
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir_all(&dir)?;
            let lock = File::open(&dir)?;
            lock.lock()?;
            let path = dir.canonicalize()?;
            Ok(Work { path, _lock: lock })
        };
        make().with_context(|| format!("cannot make {}", dir.display()))
    }

    /// Removes the working directories of killed runs. A case of such a run may still be cleaning up: it holds the lock
    /// of its directory and is waited for, because it would distort measurements.
    ///
    /// # Errors
    /// When such a case does not exit.
    pub fn sweep(&self) -> Result<()> {
        let deadline = Instant::now() + LEFTOVER;
        for entry in std::fs::read_dir(&self.common.out)?.flatten() {
            if !entry.file_name().to_string_lossy().starts_with("work-") {
                continue;
            }
            let path = entry.path();
            // It may disappear meanwhile.
            let Ok(lock) = File::open(&path) else {
                continue;
            };
            while lock.try_lock().is_err() {
                if Instant::now() > deadline {
                    bail!("a case of a killed run still works in {}", path.display());
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            let _ = std::fs::remove_dir_all(&path);
        }
        Ok(())
    }

    /// The path of an image of the library (or of the small set).
    ///
    /// # Errors
    /// When it is not built.
    pub fn image(&self, name: &str) -> Result<PathBuf> {
        let images = self.common.dir.join("images");
        let files = [images.join(format!("{name}.raw")), images.join(name)];
        let found = files.into_iter().find(|file| file.is_file());
        found.with_context(|| format!("no image {name} in the library: lab library"))
    }

    /// Selects a value by the set of images.
    pub fn either<T>(&self, full: T, small: T) -> T {
        if self.small { small } else { full }
    }
}

/// A temporary directory.
pub struct Work {
    path: PathBuf,
    _lock: File,
}

impl Work {
    /// A path inside it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            eprintln!("{} stays behind: {error}", self.path.display());
        }
    }
}

/// The file name of an image, under which it is delivered.
pub fn file_name(image: &Path) -> String {
    image
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Fails when a file differs from the original.
pub fn must_be_same(image: &Path, copy: &Path) -> Result<()> {
    if !copy.is_file() || !identical(image, copy)? {
        bail!("the delivered file is not its original");
    }
    Ok(())
}
