//! The experiments: each drives the real `drover` and its rivals, compares every result file with its
//! original, and hands out rows.

pub mod boot;
pub mod compress;
pub mod frontends;
pub mod library;
mod lines;
pub mod link;
pub mod mount;
mod mover;
mod pictures;
pub mod pull;
pub mod push;
pub mod region;
pub mod resume;
mod shows;
pub mod similar;
pub mod throughput;
mod weights;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::bench::Experiment;
use crate::library as images;

/// What every experiment takes.
#[derive(Args, Clone)]
pub struct Common {
    /// The drover to measure: a release build.
    #[arg(long, default_value = "target/release/drover", value_name = "FILE")]
    pub drover: PathBuf,
    /// Where the image library is.
    #[arg(long, default_value = "lab/cache", value_name = "DIR")]
    pub dir: PathBuf,
    /// Where results go, and the sites while they run.
    #[arg(long, default_value = "lab/out", value_name = "DIR")]
    pub out: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl Common {
    /// The binary to measure, by an absolute path.
    fn binary(&self) -> Result<PathBuf> {
        self.drover.canonicalize().with_context(|| {
            format!(
                "no {}: cargo build --release -p drover",
                self.drover.display()
            )
        })
    }

    /// An empty directory for a run, removed with the guard.
    fn work(&self, experiment: &str) -> Result<Work> {
        self.remove_stale();
        let dir = self
            .out
            .join(format!("work-{experiment}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Work(dir.canonicalize()?))
    }

    /// Removes what killed runs left: directories named for a process that is gone.
    fn remove_stale(&self) {
        for entry in std::fs::read_dir(&self.out).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(pid) = name
                .strip_prefix("work-")
                .and_then(|n| n.rsplit('-').next())
            else {
                continue;
            };
            if pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists() {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    /// A path as it is, or the name of an image of the library.
    fn image(&self, named: &Path) -> Result<PathBuf> {
        let raw = self
            .dir
            .join("images")
            .join(format!("{}.raw", named.display()));
        let other_format = self.dir.join("images").join(named);
        match (named.is_file(), raw.exists(), other_format.is_file()) {
            (true, _, _) => Ok(named.to_owned()),
            (false, true, _) => Ok(raw),
            (false, false, true) => Ok(other_format),
            _ => bail!(
                "no image {}, neither as a file nor in the library",
                named.display()
            ),
        }
    }
}

/// A directory that goes away.
pub struct Work(PathBuf);

impl Work {
    /// A path inside.
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("{} stays behind: {error}", self.0.display());
        }
    }
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
        self.common.binary()
    }

    /// An empty directory for a run, removed with the guard.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn work(&self, experiment: &str) -> Result<Work> {
        self.common.work(experiment)
    }

    /// An image of the library (or of the small set) by its name, or a file by its path.
    ///
    /// # Errors
    /// When it is not built.
    pub fn image(&self, name: &str) -> Result<PathBuf> {
        self.common.image(Path::new(name))
    }
}

/// Every experiment, in the order of the document.
pub const ALL: &[&dyn Experiment] = &[
    &library::Library,
    &similar::Similar,
    &resume::Resume,
    &throughput::Throughput,
    &compress::Compress,
    &mount::Mount,
    &pull::Pull,
    &push::Push,
    &boot::Boot,
    &frontends::Frontends,
    &region::RegionCost,
    &link::LinkKeepsItsWord,
];

/// The name under which an image is delivered.
fn file_name(image: &Path) -> String {
    image
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod stand_in;
