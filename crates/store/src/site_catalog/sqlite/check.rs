//! Integrity check of a database file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rusqlite::{Connection, ErrorCode};

use super::schema;
use super::upgrade::First;
use crate::catalog::ImageRecord;
use crate::catalog_error::{CatalogError, Result};
use crate::site_catalog::rows::{Peer, Setting, TicketRow};
use crate::site_catalog::seal::Seal;
use crate::site_catalog::table::{Row, RowError};

/// The state of a database file, as found by an integrity check.
#[derive(Debug, PartialEq, Eq)]
pub enum DatabaseState {
    /// There is no file, or an empty one.
    Nothing,
    /// It is intact.
    Good {
        /// Its revision.
        revision: i64,
    },
    /// It is damaged.
    Damaged(String),
    /// Written by a newer drover.
    Newer(i64),
}

/// Checks the whole database.
///
/// # Errors
/// When it cannot be checked for a reason other than damage: no permission, no memory.
pub fn examine(path: &Path) -> Result<DatabaseState> {
    match header(path).map_err(CatalogError::file("read", path))? {
        Header::None => return Ok(DatabaseState::Nothing),
        Header::Bad => {
            return Ok(DatabaseState::Damaged(
                "its header is not that of a database".into(),
            ));
        }
        Header::Good => {}
    }
    let examined = schema::open_to_look(path)
        .map_err(RowError::from)
        .and_then(|c| {
            // A single transaction, for a consistent snapshot despite other writers.
            let moment = c.unchecked_transaction()?;
            contents(&moment)
        });
    match examined {
        Ok(found) => Ok(found),
        Err(RowError::Damaged(what)) => Ok(DatabaseState::Damaged(what)),
        Err(RowError::Sql(error)) if means_trouble(&error) => Err(CatalogError::Sql {
            doing: "checking the catalog",
            path: path.into(),
            error,
        }),
        // Any other error that an intact database cannot cause.
        Err(RowError::Sql(error)) => Ok(DatabaseState::Damaged(error.to_string())),
        Err(RowError::Conflict(what) | RowError::Server(what, _)) => {
            Ok(DatabaseState::Damaged(what))
        }
    }
}

enum Header {
    None,
    Bad,
    Good,
}

/// SQLite reports some damage to the header as a read-only file, so check these bytes first.
fn header(path: &Path) -> std::io::Result<Header> {
    let mut head = [0u8; 100];
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Header::None),
        Err(e) => return Err(e),
    };
    if file.metadata()?.len() == 0 {
        return Ok(Header::None);
    }
    if file.read_exact(&mut head).is_err() {
        return Ok(Header::Bad);
    }
    let versions = (head[18], head[19]);
    let good = head.starts_with(b"SQLite format 3\0")
        && head[16..18] == [0x10, 0x00]
        && (versions == (1, 1) || versions == (2, 2))
        && head[20..24] == [0, 64, 32, 32];
    Ok(if good { Header::Good } else { Header::Bad })
}

/// Checks the tables and the rows.
fn contents(c: &Connection) -> Result<DatabaseState, RowError> {
    let version: i64 = c.pragma_query_value(None, "user_version", |r| r.get(0))?;
    let application: i64 = c.pragma_query_value(None, "application_id", |r| r.get(0))?;
    let described = schema::described(c)?;
    if version == 0 && application == 0 && described.is_empty() {
        // The first open was interrupted before it created the tables.
        return Ok(DatabaseState::Nothing);
    }
    let damaged = |what: &str| RowError::Damaged(what.into());
    if application != schema::APPLICATION_ID {
        return Err(damaged("it is not marked as a catalog"));
    }
    let seal = Seal::load(c)?;
    if seal.schema != version {
        return Err(damaged("its version is not the one it was sealed with"));
    }
    integrity(c)?;
    if version > schema::VERSION {
        return Ok(DatabaseState::Newer(version));
    }
    if version < 1 || described != schema::expected(version)? {
        return Err(damaged("its tables are not the ones that were made"));
    }
    let mut again = Seal::blank();
    let sums = match version {
        1 => all_sums::<First<Peer>, First<TicketRow>, First<ImageRecord>>(c)?,
        _ => all_sums::<Peer, TicketRow, ImageRecord>(c)?,
    };
    sums.into_iter().for_each(|sum| again.add(sum));
    if (again.rows, again.content) != (seal.rows, seal.content) {
        return Err(damaged("rows are missing or have come back"));
    }
    Ok(DatabaseState::Good {
        revision: seal.revision,
    })
}

fn all_sums<P: Row, T: Row, I: Row>(c: &Connection) -> Result<Vec<i64>, RowError> {
    let settings = sums::<Setting>(c)?;
    Ok([settings, sums::<P>(c)?, sums::<T>(c)?, sums::<I>(c)?].concat())
}

fn sums<R: Row>(c: &Connection) -> Result<Vec<i64>, RowError> {
    Ok(R::all(c)?.iter().map(Row::sum).collect())
}

fn integrity(c: &Connection) -> Result<(), RowError> {
    let first: String = c.query_row("PRAGMA integrity_check(1)", [], |r| r.get(0))?;
    if first == "ok" {
        return Ok(());
    }
    // SQLite's report has several lines; the last has the finding.
    Err(RowError::Damaged(
        first.lines().last().unwrap_or_default().to_string(),
    ))
}

/// Whether SQLite failed for a reason outside of the file's content.
fn means_trouble(e: &rusqlite::Error) -> bool {
    use ErrorCode as C;
    matches!(
        e.sqlite_error_code(),
        Some(
            C::PermissionDenied
                | C::DatabaseBusy
                | C::DatabaseLocked
                | C::OutOfMemory
                | C::ReadOnly
                | C::OperationInterrupted
                | C::SystemIoFailure
                | C::DiskFull
                | C::CannotOpen
                | C::FileLockingProtocolFailed
                | C::NoLargeFileSupport
                | C::AuthorizationForStatementDenied
        )
    )
}
