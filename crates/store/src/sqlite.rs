//! The catalog on SQLite: peers, tickets, images and settings, shared by several processes at once;
//! `docs/format/catalog.md` describes the file format and what a crash leaves.
//!
//! Corruption is detected rather than passed on: every row has a checksum, the `seal` row has the sum of all of them,
//! and a spare copy (`catalog.bak`) is written after every change. A catalog found damaged on opening is rebuilt from
//! the spare, or else from its own intact rows, and the repair is reported.

mod check;
mod images;
mod peers;
mod repair;
mod rows;
mod schema;
mod seal;
mod spare;
#[cfg(test)]
mod tests;
mod tickets;
mod upgrade;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior};

pub use rows::Peer;
pub use tickets::{PairOutcome, TicketInfo, ticket_id};
pub use upgrade::FormerGrant;

use crate::catalog_error::Result;
use crate::grant::Grant;
use repair::Users;
use rows::{Row, Setting};
use seal::Seal;

/// Default lifetime of a ticket.
pub const TICKET_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// The catalog of a home. Usable from any thread, and by several processes at once.
pub struct SiteCatalog {
    path: PathBuf,
    connection: Mutex<Connection>,
    /// Lock that prevents others from replacing the database file.
    _users: Users,
}

impl SiteCatalog {
    /// Opens the catalog of the home in `dir`, creating or repairing it if needed. The strings describe repairs, for
    /// the user.
    ///
    /// # Errors
    /// When it cannot be used: no permission, no space, written by a newer drover, or damaged while another process
    /// uses it.
    pub fn open(dir: &Path) -> Result<(SiteCatalog, Vec<String>)> {
        SiteCatalog::open_with(dir, &|_| Grant::default())
    }

    /// The same, for a catalog that may be of a version without rights: `former` says what each of its peers and, with
    /// `None`, its tickets may do from now on. It is called while such a catalog is migrated and never again.
    ///
    /// # Errors
    /// As [`SiteCatalog::open`].
    pub fn open_with(dir: &Path, former: &FormerGrant<'_>) -> Result<(SiteCatalog, Vec<String>)> {
        let path = dir.join("catalog.db");
        // One process at a time examines and repairs the files.
        let mutex = spare::lock(dir)?;
        let (users, repairs) = repair::ensure_sound(&path, former)?;
        let connection = schema::open_for_use(&path, former)?;
        // The catalog itself is sound: failure to write the spare, on a full disk, must not prevent opening it.
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

    /// Opens the catalog of the home in `dir` read-only, when the disk is too full for the files that SQLite needs next
    /// to an open database. `None` when its log is not empty: the database file alone is then out of date. `former` as
    /// for [`SiteCatalog::open_with`].
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn open_on_full_disk(dir: &Path, former: &FormerGrant<'_>) -> Result<Option<SiteCatalog>> {
        let path = dir.join("catalog.db");
        let users = Users::join(&path)?;
        let log = path.with_extension("db-wal");
        if log.metadata().is_ok_and(|about| about.len() > 0) {
            return Ok(None);
        }
        let connection = schema::open_as_it_is(&path, former)?;
        Ok(Some(SiteCatalog {
            path,
            connection: Mutex::new(connection),
            _users: users,
        }))
    }

    /// The value stored under `key`.
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

    /// Numbers that change when the catalog has changed, by this process or another.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn version(&self) -> Result<(i64, u64)> {
        self.read("looking for changes", |c| {
            // It counts commits of other connections; those of this one change rows.
            let others: i64 = c.pragma_query_value(None, "data_version", |r| r.get(0))?;
            Ok((others, c.total_changes()))
        })
    }

    /// Runs `f` in a transaction, durable on return, and updates the spare copy.
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
            // The change itself is already durable; the spare is only a backup.
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
        // A panic inside a transaction rolled it back; the connection is still usable.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
