//! What every experiment works with: the binary, the image library, working directories.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::files::identical;

/// How long to wait for a case of a killed run to end: longer than its own limit, since the machine may be busy.
const LEFTOVER: Duration = Duration::from_secs(60);

/// What every experiment takes.
#[derive(Args, Clone)]
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
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// What experiments work with: where things are, how often to measure, and which images.
pub struct Lab {
    /// Where things are.
    pub common: Common,
    /// How often a figure that varies is measured.
    pub repeat: usize,
    /// The small set instead of the library, for the smoke run: seconds, not minutes.
    pub small: bool,
}

impl Lab {
    /// The binary to measure, by an absolute path.
    ///
    /// # Errors
    /// When it is not built.
    pub fn binary(&self) -> Result<PathBuf> {
        let drover = &self.common.drover;
        let build = || format!("no {}: cargo build --release -p drover", drover.display());
        drover.canonicalize().with_context(build)
    }

    /// An empty directory for a run, removed with the guard. It is locked, so that [`Self::sweep`] leaves it alone.
    ///
    /// # Errors
    /// When it cannot be made.
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

    /// Removes the working directories that killed runs left. A case whose run was killed may still be cleaning up: its
    /// directory is locked until it has ended, and it is waited for, since it would distort what is measured meanwhile.
    ///
    /// # Errors
    /// When such a case does not end.
    pub fn sweep(&self) -> Result<()> {
        let deadline = Instant::now() + LEFTOVER;
        for entry in std::fs::read_dir(&self.common.out)?.flatten() {
            if !entry.file_name().to_string_lossy().starts_with("work-") {
                continue;
            }
            let path = entry.path();
            // It may go while it is looked at.
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

    /// An image of the library (or of the small set) by its name.
    ///
    /// # Errors
    /// When it is not built.
    pub fn image(&self, name: &str) -> Result<PathBuf> {
        let images = self.common.dir.join("images");
        let files = [images.join(format!("{name}.raw")), images.join(name)];
        let found = files.into_iter().find(|file| file.is_file());
        found.with_context(|| format!("no image {name} in the library: lab library"))
    }

    /// The one or the other, by the set.
    pub fn either<T>(&self, full: T, small: T) -> T {
        if self.small { small } else { full }
    }
}

/// A directory that goes away.
pub struct Work {
    path: PathBuf,
    _lock: File,
}

impl Work {
    /// A path inside.
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

/// The name under which an image is delivered.
pub fn file_name(image: &Path) -> String {
    image
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Fails when a file is not another's copy.
pub fn must_be_same(image: &Path, copy: &Path) -> Result<()> {
    if !copy.is_file() || !identical(image, copy)? {
        bail!("the delivered file is not its original");
    }
    Ok(())
}
