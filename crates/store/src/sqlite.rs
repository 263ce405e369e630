//! What a site remembers: peers, tickets, images, settings. An SQLite database used by several
//! processes at once; `docs/format/catalog.md` describes its bytes and what a crash leaves.
//!
//! Damage is noticed, never passed on: every row carries a checksum, the `seal` row the sum of all
//! of them, and a spare copy (`catalog.bak`) is written after every change. A catalog that is
//! found damaged when it is opened is put together again from the spare, or else from its own
//! good rows, and the repair is reported.

mod check;
mod images;
mod peers;
mod private;
mod repair;
mod rows;
mod schema;
mod seal;
mod spare;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior};

pub use peers::PairOutcome;
pub use rows::Peer;

use crate::catalog_error::Result;
use repair::Users;
use rows::{Row, Setting};
use seal::Seal;

/// How long a ticket is good when nothing else is said.
pub const TICKET_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// The catalog of a home. Safe from any thread and beside other processes.
pub struct SiteCatalog {
    path: PathBuf,
    connection: Mutex<Connection>,
    /// Says to others that the database file must not be replaced now.
    _users: Users,
}

impl SiteCatalog {
    /// Opens the catalog of the home in `dir`, making or repairing it when needed. The texts say
    /// what was repaired, for a person.
    ///
    /// # Errors
    /// When it cannot be used: no permission, no space, made by a newer drover, or damaged while
    /// another process uses it.
    pub fn open(dir: &Path) -> Result<(SiteCatalog, Vec<String>)> {
        let path = dir.join("catalog.db");
        // One process at a time decides what state the files are in.
        let mutex = spare::lock(dir)?;
        let (users, repairs) = repair::ensure_sound(&path)?;
        let connection = schema::open_for_use(&path)?;
        // The catalog itself is sound: a disk that is full for the second line must not close the first.
        if let Err(e) = spare::ensure(&connection, &path, &mutex) {
            tracing::warn!("{e}");
        }
        drop(mutex);
        Ok((
            SiteCatalog {
                path,
                connection: Mutex::new(connection),
                _users: users,
            },
            repairs,
        ))
    }

    /// Opens the catalog of the home in `dir` for reading only, on a disk too full for what SQLite keeps beside a
    /// database that is in use. `None` when that is not all that can be known of it: others may have changed it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn open_on_full_disk(dir: &Path) -> Result<Option<SiteCatalog>> {
        let path = dir.join("catalog.db");
        let users = Users::join(&path)?;
        let log = path.with_extension("db-wal");
        if log.metadata().is_ok_and(|about| about.len() > 0) {
            return Ok(None);
        }
        let connection = schema::open_as_it_is(&path)?;
        Ok(Some(SiteCatalog {
            path,
            connection: Mutex::new(connection),
            _users: users,
        }))
    }

    /// A value that was stored under `key`.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn setting(&self, key: &str) -> Result<Option<String>> {
        self.read("reading a setting", |c| {
            Ok(Setting::get(c, key)?.map(|s| s.value))
        })
    }

    /// Stores `value` under `key`.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub fn set_setting(&self, key: &str, value: &str) -> Result<()> {
        self.change("storing a setting", |tx, seal| {
            seal.put(
                tx,
                &Setting {
                    key: key.into(),
                    value: value.into(),
                },
            )?;
            Ok(())
        })
    }

    /// Runs `f` in one transaction, durable when this returns, and brings the spare copy up to date.
    fn change<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&Transaction<'_>, &mut Seal) -> Result<T, rows::RowError>,
    ) -> Result<T> {
        let error = |e: rows::RowError| e.at(doing, &self.path);
        let mut connection = self.connection();
        let tx = connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(|e| error(e.into()))?;
        let mut seal = Seal::load(&tx).map_err(error)?;
        let out = f(&tx, &mut seal).map_err(error)?;
        if seal.changed() {
            seal.store(&tx).map_err(error)?;
            tx.commit().map_err(|e| error(e.into()))?;
            // The change itself is durable already; the spare is the second line.
            if let Err(e) = spare::write(&connection, &self.path) {
                tracing::warn!("{e}");
            }
        }
        Ok(out)
    }

    fn read<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&Connection) -> Result<T, rows::RowError>,
    ) -> Result<T> {
        f(&self.connection()).map_err(|e| e.at(doing, &self.path))
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic inside a transaction rolled it back; the connection is sound.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
