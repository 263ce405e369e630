//! Errors of this crate.

use std::io;
use std::path::PathBuf;

use crate::catalog_error::CatalogError;

/// An error of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file operation failed.
    #[error("cannot {doing} {}: {error}", path.display())]
    File {
        /// What was being done, as in "cannot *read* x".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The catalog failed.
    #[error("catalog: {0}")]
    Catalog(#[from] CatalogError),
}

impl StoreError {
    /// Adds the file and the action to an I/O error.
    pub fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| StoreError::File { doing, path, error }
    }
}
