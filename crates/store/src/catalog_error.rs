//! What can go wrong with the catalog.

use std::io;
use std::path::PathBuf;

/// A result of the catalog.
pub(crate) type Result<T, E = CatalogError> = std::result::Result<T, E>;

/// Why the catalog could not be used.
#[derive(Debug)]
pub enum CatalogError {
    /// The database says no.
    Sql {
        /// What was being done.
        doing: &'static str,
        /// The database file.
        path: PathBuf,
        /// What SQLite said.
        error: rusqlite::Error,
    },
    /// Bytes are not what was written.
    Damaged {
        /// The database file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Made by a newer drover.
    Newer {
        /// The database file.
        path: PathBuf,
        /// Its schema.
        found: i64,
    },
    /// A file beside the database cannot be used.
    File {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// What was asked for does not go; a line for a person.
    Conflict(String),
}

impl CatalogError {
    /// Adds what was being done to which file.
    pub fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| CatalogError::File { doing, path, error }
    }

    /// Whether SQLite says that the disk is full.
    pub fn is_full(&self) -> bool {
        let CatalogError::Sql { error, .. } = self else {
            return false;
        };
        error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
    }
}

impl std::fmt::Display for CatalogError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CatalogError::Sql { doing, path, error } => {
                write!(f, "{}: {doing}: {error}", path.display())
            }
            CatalogError::Damaged { path, what } => write!(
                f,
                "{} is damaged ({what}); stop the drover processes of this home, the next one repairs it",
                path.display()
            ),
            CatalogError::Newer { path, found } => write!(
                f,
                "{} was made by a newer drover (schema {found}); upgrade this one",
                path.display()
            ),
            CatalogError::File { doing, path, error } => {
                write!(f, "cannot {doing} {}: {error}", path.display())
            }
            CatalogError::Conflict(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for CatalogError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            CatalogError::Sql { error, .. } => Some(error),
            CatalogError::File { error, .. } => Some(error),
            _ => None,
        }
    }
}
