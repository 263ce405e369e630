//! What a tool must be able to do to be measured.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::site::Where;

/// A tool that can carry images from one machine to another, with its best settings.
pub trait Rival: Sync {
    /// A short name, fit for a file name: `rsync-delta`.
    fn name(&self) -> &'static str;

    /// How it is called, for the document: the commands with their options.
    fn settings(&self) -> String;

    /// Its version, or what is missing here.
    ///
    /// # Errors
    /// The reason why it is skipped, in words.
    fn version(&self) -> Result<String, String>;

    /// Sets up both ends, everything of the far one below `dir`. Not timed.
    ///
    /// # Errors
    /// When an end does not come up.
    fn start<'a>(&self, place: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>>;
}

/// A rival that is set up at both ends. What it has carried stays at the far end and may serve later images.
pub trait Carrier {
    /// Carries `image` to the far end; returns the seconds from the command until the whole file is there and the
    /// tool has said so. `basis` is the most similar of the images that the far end has, for tools that take one.
    ///
    /// # Errors
    /// When a command fails; what it said is in the error.
    fn carry(&mut self, image: &Path, basis: Option<&Path>) -> Result<f64>;

    /// Where the image is after [`Carrier::carry`].
    fn delivered(&self, image: &Path) -> PathBuf;
}
