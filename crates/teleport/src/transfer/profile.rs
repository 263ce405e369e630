//! The profile that came with an image that is being received: a file `profile` beside the log. It is a hint, and lost when it is
//! damaged.

use std::io;
use std::path::Path;

use drover_store::profile::{Profile, ProfileError};

use crate::TeleportError;

/// The file's name.
pub(crate) const PROFILE: &str = "profile";

/// Keeps what came with the image that is received in `dir`; without one, an earlier one goes.
///
/// # Errors
/// When the file cannot be written.
pub fn keep_profile(dir: &Path, profile: Option<&Profile>) -> Result<(), TeleportError> {
    let path = dir.join(PROFILE);
    let kept = match profile {
        Some(profile) => profile.write(&path).map_err(|e| match e {
            ProfileError::File { why, .. } => why,
            other => io::Error::other(other),
        }),
        None => match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        },
    };
    kept.map_err(TeleportError::file("write", path))
}

/// What is kept in `dir`, if it can be used.
pub fn kept_profile(dir: &Path) -> Option<Profile> {
    let kept = Profile::read(&dir.join(PROFILE));
    let unusable = |e: &ProfileError| tracing::warn!(error = %e, "a profile is lost");
    kept.inspect_err(unusable).ok().flatten()
}
