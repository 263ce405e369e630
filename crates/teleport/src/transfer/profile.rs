//! The profiles of an image that is being received: what came with it, a file `profile` beside the log, and what machines that run
//! from it have read here, a file `boots`. They are hints, and lost when they are damaged.

use std::io;
use std::path::Path;

use drover_store::profile::{Profile, ProfileError};

use crate::TeleportError;

/// The file of what came with the image.
pub(crate) const PROFILE: &str = "profile";

/// The file of what was recorded here.
pub(crate) const BOOTS: &str = "boots";

fn write(path: &Path, profile: &Profile) -> Result<(), TeleportError> {
    let written = profile.write(path).map_err(|e| match e {
        ProfileError::File { why, .. } => why,
        other => io::Error::other(other),
    });
    written.map_err(TeleportError::file("write", path))
}

fn read(path: &Path) -> Option<Profile> {
    let unusable = |e: &ProfileError| tracing::warn!(error = %e, "a profile is lost");
    Profile::read(path).inspect_err(unusable).ok().flatten()
}

/// Keeps what came with the image that is received in `dir`; without one, an earlier one goes.
///
/// # Errors
/// When the file cannot be written.
pub fn keep_profile(dir: &Path, profile: Option<&Profile>) -> Result<(), TeleportError> {
    let path = dir.join(PROFILE);
    let Some(profile) = profile else {
        return match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(TeleportError::file("remove", path)(e))
            }
            _ => Ok(()),
        };
    };
    write(&path, profile)
}

/// What is kept in `dir`, if it can be used.
pub fn kept_profile(dir: &Path) -> Option<Profile> {
    read(&dir.join(PROFILE))
}

/// Keeps what machines have read of the image that is received in `dir`.
///
/// # Errors
/// When the file cannot be written.
pub fn keep_boots(dir: &Path, boots: &Profile) -> Result<(), TeleportError> {
    write(&dir.join(BOOTS), boots)
}

/// What is kept of that in `dir`, if it can be used.
pub fn kept_boots(dir: &Path) -> Option<Profile> {
    read(&dir.join(BOOTS))
}
