//! A file of a disk.

use std::path::PathBuf;
use std::sync::Arc;

use super::Medium;
use crate::{ImageError, ImageFile, Stamp};

/// The files opened so far along the chain.
#[derive(Default)]
pub(super) struct OpenedFiles {
    pub(super) notes: Vec<String>,
    pub(super) stamps: Vec<(PathBuf, Stamp)>,
}

/// A file that its image uses as raw bytes.
pub(super) fn medium(file: ImageFile, found: &mut OpenedFiles) -> Result<Medium, ImageError> {
    let present = file.data_extents()?;
    found.stamps.push((file.path().to_owned(), file.stamp()));
    Ok(Medium {
        content: Arc::new(file),
        present,
    })
}
