//! Errors of the catalog.

use std::io;
use std::path::PathBuf;

/// A result of the catalog.
pub(crate) type Result<T, E = CatalogError> = std::result::Result<T, E>;

/// Why the catalog could not be used.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// An SQLite error.
    #[error("{}: {doing}: {error}", path.display())]
    Sql {
        /// What was being done.
        doing: &'static str,
        /// The database file.
        path: PathBuf,
        /// SQLite's error.
        #[source]
        error: rusqlite::Error,
    },
    /// The content is corrupt.
    #[error(
        "{} is damaged ({what}); stop the drover processes of this home, the next one repairs it",
        path.display()
    )]
    Damaged {
        /// The database file.
        path: PathBuf,
        /// What is corrupt.
        what: String,
    },
    /// Written by a newer version of drover.
    #[error("{} was made by a newer drover (schema {found}); upgrade this one", path.display())]
    Newer {
        /// The database file.
        path: PathBuf,
        /// Its schema version.
        found: i64,
    },
    /// The database server cannot be reached or used.
    #[error("cannot use the catalog at {server} ({doing}): {why}")]
    Server {
        /// What was being done.
        doing: &'static str,
        /// The address of the database.
        server: String,
        /// The reason.
        why: String,
        /// Whether it can help to try again.
        retry: bool,
    },
    /// The content on a database server was not written by drover.
    #[error("the catalog at {server} was altered ({what}): restore that database from a backup")]
    Altered {
        /// The address of the database.
        server: String,
        /// What is wrong.
        what: String,
    },
    /// The catalog on a database server was made by a newer version of drover.
    #[error(
        "the catalog at {server} was made by a newer drover (schema {found}); upgrade this one"
    )]
    NewerServer {
        /// The address of the database.
        server: String,
        /// Its schema version.
        found: i64,
    },
    /// A file beside the database cannot be used.
    #[error("cannot {doing} {}: {error}", path.display())]
    File {
        /// What was being done.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The request conflicts with the catalog's content; a message for the user.
    #[error("{0}")]
    Conflict(String),
}

impl CatalogError {
    /// Adds the action and the file to an I/O error.
    pub fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| CatalogError::File { doing, path, error }
    }

    /// Whether it can help to try again: the database server is not there now.
    pub fn may_pass(&self) -> bool {
        matches!(self, CatalogError::Server { retry: true, .. })
    }

    /// Whether SQLite reports a full disk.
    pub fn is_full(&self) -> bool {
        let CatalogError::Sql { error, .. } = self else {
            return false;
        };
        error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
    }
}
