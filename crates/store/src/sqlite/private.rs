//! Files private to this user.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::catalog_error::{CatalogError, Result};

/// Opens a file; creates it, private to this user, if it does not exist.
pub fn open_private(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(CatalogError::file("open", path))
}
