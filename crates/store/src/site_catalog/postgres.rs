//! The catalog on a PostgreSQL server, or what speaks its protocol: the same tables in a schema for each domain.
//! `docs/format/catalog.md` describes them.
//!
//! A change is one transaction that first locks the row of the seal, so that changes happen one after the other, whichever
//! node makes them. A connection that is lost is made again when it is next needed; what fails meanwhile says that it can be
//! tried again.

mod link;
mod open;
mod schema;
mod waits;

use std::time::Duration;

use parking_lot::Mutex;

use super::rows::AllRows;
use super::seal::Seal;
use super::table::{RowError, Tables};
use super::url::CatalogUrl;
use crate::catalog_error::Result;
use link::{Link, Server};
use open::Open;
use waits::in_place;

/// Begins a transaction and waits for its turn to change something.
const BEGIN: &str = "BEGIN; SELECT 1 FROM seal WHERE id = 1 FOR UPDATE";

/// The catalog of a domain on a database server.
pub struct Postgres {
    server: Server,
    link: Mutex<Link>,
    /// The connection of [`Postgres::claim`].
    claim: Mutex<Link>,
}

impl Postgres {
    /// See [`super::SiteCatalog::connect`].
    ///
    /// # Errors
    /// As there.
    pub fn open(
        url: &CatalogUrl,
        domain: &str,
        former: &mut dyn FnMut() -> Result<Option<AllRows>>,
        patience: Duration,
        waiting: &mut dyn FnMut(&str),
    ) -> Result<(Postgres, bool)> {
        let server = Server::new(url, domain)?;
        let mut link = Link::default();
        let filled = in_place(|| {
            let client = link.first(&server, patience, waiting)?;
            let filled = schema::ensure(&client, &server, former)?;
            link.put_back(client);
            Ok(filled)
        })?;
        let catalog = Postgres {
            server,
            link: Mutex::new(link),
            claim: Mutex::default(),
        };
        Ok((catalog, filled))
    }

    /// See [`super::SiteCatalog::claim`].
    ///
    /// # Errors
    /// As there.
    pub fn claim(&self) -> Result<bool> {
        let claimed = in_place(|| {
            let mut claim = self.claim.lock();
            // The lock is one of the session: it lasts as long as the connection, on which it is taken again and again.
            let open = Open::new(claim.client(&self.server)?.0);
            let sql = format!(
                "SELECT pg_try_advisory_lock(hashtextextended(current_database() || '{}', 0))",
                self.server.schema
            );
            let is_alone = open.is(sql)?;
            if is_alone {
                claim.client = open.sound();
            }
            Ok(is_alone)
        });
        claimed.map_err(|e: RowError| e.at_server("claiming it", &self.server.shown))
    }

    /// Runs `f` in a transaction, durable on return.
    ///
    /// # Errors
    /// Those of `f`, or when the server cannot be reached or refuses.
    pub fn change<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&dyn Tables, &mut Seal) -> Result<T, RowError>,
    ) -> Result<T> {
        let changed = in_place(|| {
            let mut link = self.link.lock();
            let open = Open::begin(&mut link, &self.server, BEGIN)?;
            let mut seal = Seal::load(&open)?;
            schema::check(&seal, &self.server)?;
            let out = f(&open, &mut seal)?;
            if seal.changed() {
                seal.store(&open)?;
            }
            let client = open.commit(seal.changed())?;
            link.put_back(client);
            Ok(out)
        });
        changed.map_err(|e: RowError| e.at_server(doing, &self.server.shown))
    }

    /// Runs `f`, which only reads; again if the connection was lost since it was last used.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn read<T>(
        &self,
        doing: &'static str,
        f: impl Fn(&dyn Tables) -> Result<T, RowError>,
    ) -> Result<T> {
        let read = in_place(|| {
            let mut link = self.link.lock();
            let (client, used_before) = link.client(&self.server)?;
            let open = Open::new(client);
            let mut out = f(&open);
            let mut client = open.sound();
            if client.is_none() && used_before {
                let open = Open::new(link.client(&self.server)?.0);
                out = f(&open);
                client = open.sound();
            }
            link.client = client;
            out
        });
        read.map_err(|e: RowError| e.at_server(doing, &self.server.shown))
    }
}

#[cfg(test)]
mod tests;
