//! What of a machine's disks cannot be read, since it had not arrived when its source was given up as lost.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::DeviceError;

/// The file that says so, in the directory with the journal of a disk.
pub(super) fn mark_in(journal: &Path) -> PathBuf {
    journal.join("lost")
}

/// What a reader gets.
pub(super) fn error() -> DeviceError {
    let text = "it had not arrived when the site that the machine came from was given up as lost";
    DeviceError::Io(Arc::new(std::io::Error::other(text)))
}
