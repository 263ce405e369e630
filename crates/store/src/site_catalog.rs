//! The catalog of a site: peers, tickets, images and settings. The same tables in one of two databases: an SQLite file
//! in the home, or a PostgreSQL server that several nodes of a site share (feature `postgres`).
//!
//! - `table`, `rows`, `seal`: tables, rows with checksums, and the row that covers all others.
//! - `images`, `peers`, `tickets`: what is asked of them, whatever the database is.
//! - `sqlite`, `postgres`: the databases.

mod images;
mod peers;
#[cfg(feature = "postgres")]
mod postgres;
mod rows;
mod seal;
mod sqlite;
mod table;
#[cfg(test)]
mod tests;
mod tickets;
mod url;

use std::path::Path;
use std::time::Duration;

pub use rows::Peer;
pub use sqlite::FormerGrant;
pub use tickets::{PairOutcome, TicketInfo, ticket_id};
pub use url::CatalogUrl;

use crate::catalog_error::Result;
use crate::grant::Grant;
#[cfg(feature = "postgres")]
use postgres::Postgres;
#[cfg(feature = "postgres")]
pub(crate) use postgres::ServerTable;
use rows::Setting;
use seal::Seal;
use sqlite::Sqlite;
use table::{Row, RowError, Tables};

/// Default lifetime of a ticket.
pub const TICKET_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// The catalog of a site. Usable from any thread, and by several processes at once.
pub struct SiteCatalog {
    database: Database,
}

enum Database {
    Sqlite(Sqlite),
    #[cfg(feature = "postgres")]
    Postgres(Box<Postgres>),
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
        let (sqlite, repairs) = Sqlite::open(dir, former)?;
        let database = Database::Sqlite(sqlite);
        Ok((SiteCatalog { database }, repairs))
    }

    /// Opens the catalog of the home in `dir` read-only, when the disk is too full for the files that SQLite needs next
    /// to an open database. `None` when its log is not empty: the database file alone is then out of date. `former` as
    /// for [`SiteCatalog::open_with`].
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn open_on_full_disk(dir: &Path, former: &FormerGrant<'_>) -> Result<Option<SiteCatalog>> {
        let opened = Sqlite::open_on_full_disk(dir, former)?;
        Ok(opened.map(|sqlite| SiteCatalog {
            database: Database::Sqlite(sqlite),
        }))
    }

    /// Connects to the catalog of a domain of a site on a database server, creating its tables if there are none. New ones
    /// are filled from the catalog that `former` opens, if any; then the result is true. While the server cannot be reached,
    /// or is starting, tries again for as long as `patience`; `waiting` is told why, once.
    ///
    /// # Errors
    /// When it cannot be reached or used, or was made by a newer drover.
    #[cfg_attr(not(feature = "postgres"), expect(unused_variables))]
    pub fn connect(
        url: &CatalogUrl,
        domain: &str,
        former: &mut dyn FnMut() -> Result<Option<SiteCatalog>>,
        patience: Duration,
        waiting: &mut dyn FnMut(&str),
    ) -> Result<(SiteCatalog, bool)> {
        #[cfg(feature = "postgres")]
        {
            let mut rows = || former()?.map(|catalog| catalog.all_rows()).transpose();
            let (server, filled) = Postgres::open(url, domain, &mut rows, patience, waiting)?;
            let database = Database::Postgres(Box::new(server));
            Ok((SiteCatalog { database }, filled))
        }
        #[cfg(not(feature = "postgres"))]
        Err(without_postgres(url))
    }

    /// Makes the changes that follow those of the node with this token: when its term is over and another has taken over from
    /// it, they fail. Without a database server there are no other nodes.
    pub fn change_as(&self, token: &str) {
        match &self.database {
            Database::Sqlite(_) => {}
            #[cfg(feature = "postgres")]
            Database::Postgres(server) => server.change_as(token),
        }
        #[cfg(not(feature = "postgres"))]
        let _ = token;
    }

    /// All rows of all tables.
    #[cfg(feature = "postgres")]
    fn all_rows(&self) -> Result<rows::AllRows> {
        self.read("reading all tables", |c| {
            Ok(rows::AllRows {
                settings: Row::all(c)?,
                peers: Row::all(c)?,
                tickets: Row::all(c)?,
                images: Row::all(c)?,
            })
        })
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
        let doing = "looking for changes";
        match &self.database {
            Database::Sqlite(sqlite) => sqlite.version(doing),
            #[cfg(feature = "postgres")]
            Database::Postgres(server) => {
                let seal = server.read(doing, |c| Seal::load(c))?;
                Ok((seal.revision, 0))
            }
        }
    }

    /// Runs `f` in a transaction, durable on return.
    fn change<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&dyn Tables, &mut Seal) -> Result<T, RowError>,
    ) -> Result<T> {
        match &self.database {
            Database::Sqlite(sqlite) => sqlite.change(doing, f),
            #[cfg(feature = "postgres")]
            Database::Postgres(server) => server.change(doing, f),
        }
    }

    fn read<T>(
        &self,
        doing: &'static str,
        f: impl Fn(&dyn Tables) -> Result<T, RowError>,
    ) -> Result<T> {
        match &self.database {
            Database::Sqlite(sqlite) => sqlite.read(doing, f),
            #[cfg(feature = "postgres")]
            Database::Postgres(server) => server.read(doing, f),
        }
    }
}

#[cfg(not(feature = "postgres"))]
/// The error of a drover that was built without it.
pub(crate) fn without_postgres(url: &CatalogUrl) -> crate::CatalogError {
    crate::CatalogError::Conflict(format!(
        "cannot use the catalog at {url}: this drover was built without PostgreSQL (feature `postgres`)"
    ))
}
