//! Versions of machines, in the order in which they are stored.

use std::path::PathBuf;

use anyhow::Result;

/// A version of a machine.
pub struct Version {
    /// Of which.
    pub machine: String,
    /// The file.
    pub image: PathBuf,
}

/// Versions that come one after the other.
pub struct Series<'a> {
    /// The versions.
    pub versions: Vec<Version>,
    /// Sees to it that the file of a version is there, for each in order; versions of a machine may share one.
    pub ready: Box<dyn Fn(usize) -> Result<()> + 'a>,
}
