//! The catalog as an SQLite file, shared by several processes at once; `docs/format/catalog.md` describes the file
//! format and what a crash leaves.
//!
//! Corruption is detected rather than passed on: every row has a checksum, the `seal` row has the sum of all of them,
//! and a spare copy (`catalog.bak`) is written after every change. A catalog found damaged on opening is rebuilt from
//! the spare, or else from its own intact rows, and the repair is reported.

mod check;
mod repair;
mod schema;
mod spare;
#[cfg(test)]
mod tests;
mod upgrade;

use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use rusqlite::types::Value;
use rusqlite::{Connection, Transaction, TransactionBehavior};

pub use upgrade::FormerGrant;

use super::seal::Seal;
use super::table::{RowError, Tables};
use crate::catalog_error::Result;
use repair::Users;

/// The catalog of the home in a directory.
pub struct Sqlite {
    path: PathBuf,
    connection: Mutex<Connection>,
    /// Lock that prevents others from replacing the database file.
    _users: Users,
}

impl Sqlite {
    /// Opens the catalog of the home in `dir`, creating or repairing it if needed. The strings describe repairs, for
    /// the user. `former` as for [`super::SiteCatalog::open_with`].
    ///
    /// # Errors
    /// When it cannot be used: no permission, no space, written by a newer drover, or damaged while another process
    /// uses it.
    pub fn open(dir: &Path, former: &FormerGrant<'_>) -> Result<(Sqlite, Vec<String>)> {
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
            Sqlite {
                path,
                connection: Mutex::new(connection),
                _users: users,
            },
            repairs,
        ))
    }

    /// Opens the catalog of the home in `dir` read-only, when the disk is too full for the files that SQLite needs next
    /// to an open database. `None` when its log is not empty: the database file alone is then out of date. `former` as
    /// for [`super::SiteCatalog::open_with`].
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn open_on_full_disk(dir: &Path, former: &FormerGrant<'_>) -> Result<Option<Sqlite>> {
        let path = dir.join("catalog.db");
        let users = Users::join(&path)?;
        let log = path.with_extension("db-wal");
        if log.metadata().is_ok_and(|about| about.len() > 0) {
            return Ok(None);
        }
        let connection = schema::open_as_it_is(&path, former)?;
        Ok(Some(Sqlite {
            path,
            connection: Mutex::new(connection),
            _users: users,
        }))
    }

    /// Numbers that change when the catalog has changed, by this process or another.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn version(&self, doing: &'static str) -> Result<(i64, u64)> {
        let c = self.connection();
        // It counts commits of other connections; those of this one change rows.
        let others = c.pragma_query_value(None, "data_version", |r| r.get(0));
        let others: i64 = others.map_err(|e| RowError::from(e).at(doing, &self.path))?;
        Ok((others, c.total_changes()))
    }

    /// Runs `f` in a transaction, durable on return, and updates the spare copy.
    ///
    /// # Errors
    /// Those of `f`, or when the database cannot be written.
    pub fn change<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&dyn Tables, &mut Seal) -> Result<T, RowError>,
    ) -> Result<T> {
        let error = |e: RowError| e.at(doing, &self.path);
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

    /// Runs `f`, which only reads.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn read<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&dyn Tables) -> Result<T, RowError>,
    ) -> Result<T> {
        f(&*self.connection()).map_err(|e| e.at(doing, &self.path))
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic inside a transaction rolled it back; the connection is still usable.
        self.connection.lock()
    }
}

impl Tables for Connection {
    fn select(
        &self,
        table: &'static str,
        columns: &[&'static str],
        only: Option<(&'static str, &Value)>,
    ) -> Result<Vec<Result<Vec<Value>, RowError>>, RowError> {
        let listed = columns.join(", ");
        let sql = match only {
            Some((column, _)) => format!("SELECT {listed} FROM {table} WHERE {column} = ?1"),
            None => format!("SELECT {listed} FROM {table} ORDER BY {}", columns[0]),
        };
        let mut statement = self.prepare_cached(&sql)?;
        let value = only.map(|(_, value)| value);
        let mut rows = statement.query(rusqlite::params_from_iter(value))?;
        let mut out = Vec::new();
        loop {
            match rows.next() {
                Ok(Some(row)) => {
                    let values = (0..columns.len()).map(|i| row.get(i));
                    let values = values.collect::<rusqlite::Result<Vec<Value>>>();
                    out.push(values.map_err(|_| {
                        RowError::Damaged(format!("a row of {table} has a wrong value"))
                    }));
                }
                Ok(None) => return Ok(out),
                Err(e) => {
                    out.push(Err(e.into()));
                    return Ok(out);
                }
            }
        }
    }

    fn replace(
        &self,
        table: &'static str,
        columns: &[&'static str],
        values: Vec<Value>,
    ) -> Result<(), RowError> {
        let marks = vec!["?"; columns.len()].join(", ");
        let listed = columns.join(", ");
        let key = columns[0];
        let sets = columns[1..].iter().map(|c| format!("{c} = excluded.{c}"));
        let sets = Vec::from_iter(sets).join(", ");
        let sql = format!(
            "INSERT INTO {table} ({listed}) VALUES ({marks}) ON CONFLICT ({key}) DO UPDATE SET {sets}"
        );
        self.prepare_cached(&sql)?
            .execute(rusqlite::params_from_iter(values))?;
        Ok(())
    }

    fn delete(
        &self,
        table: &'static str,
        key_column: &'static str,
        key: &Value,
    ) -> Result<(), RowError> {
        let sql = format!("DELETE FROM {table} WHERE {key_column} = ?1");
        self.prepare_cached(&sql)?.execute([key])?;
        Ok(())
    }
}

impl Tables for Transaction<'_> {
    fn select(
        &self,
        table: &'static str,
        columns: &[&'static str],
        only: Option<(&'static str, &Value)>,
    ) -> Result<Vec<Result<Vec<Value>, RowError>>, RowError> {
        (**self).select(table, columns, only)
    }

    fn replace(
        &self,
        table: &'static str,
        columns: &[&'static str],
        values: Vec<Value>,
    ) -> Result<(), RowError> {
        (**self).replace(table, columns, values)
    }

    fn delete(
        &self,
        table: &'static str,
        key_column: &'static str,
        key: &Value,
    ) -> Result<(), RowError> {
        (**self).delete(table, key_column, key)
    }
}
