//! The traits of rivals.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::alike::Alike;
use crate::site::Where;

/// A tool that can transfer images between machines, with its best settings.
pub trait Rival: Sync {
    /// A short name, usable as a file name: `rsync-delta`.
    fn name(&self) -> &'static str;

    /// The commands with their options, for the document.
    fn settings(&self) -> String;

    /// Its version.
    ///
    /// # Errors
    /// What is missing here, so that it is skipped.
    fn version(&self) -> Result<String, String>;

    /// Sets up both ends, with all files of the far one below `dir`. Not timed.
    ///
    /// # Errors
    /// When an end does not start.
    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>>;
}

/// A rival that is set up at both ends. Images it has transferred stay at the far end and may help with later ones.
pub trait Carrier {
    /// Transfers `image` to the far end; returns the seconds from the command until the whole file is there and the
    /// tool has exited. `basis` is the most similar image at the far end, for tools that need it named.
    ///
    /// # Errors
    /// When a command fails; includes its output.
    fn carry(&mut self, image: &Path, basis: Option<&Path>) -> Result<f64>;

    /// Transfers several images, of one directory, as best it can; returns the seconds until all of them are there. The far end
    /// has those in `there`, which are named as at the near end.
    ///
    /// # Errors
    /// As [`Carrier::carry`].
    fn carry_all(&mut self, images: &[PathBuf], there: &[PathBuf]) -> Result<f64> {
        let mut alike = Alike::default();
        let mut here = there.to_vec();
        let mut seconds = 0.0;
        for image in images {
            // Which one is the most similar is a person's knowledge, and not timed.
            let basis = alike.most_similar(image, &here)?.map(Path::to_owned);
            seconds += self.carry(image, basis.as_deref())?;
            here.push(image.clone());
        }
        Ok(seconds)
    }

    /// The path of the image after [`Carrier::carry`].
    fn delivered(&self, image: &Path) -> PathBuf;
}
