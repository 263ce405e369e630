//! The catalog on a PostgreSQL server, or what speaks its protocol: the same tables in a schema for each domain.
//! `docs/format/catalog.md` describes them.
//!
//! A change is one transaction that first locks the row of the seal, so that changes happen one after the other, whichever
//! node makes them. A connection that is lost is made again when it is next needed; what fails meanwhile says that it can be
//! tried again.

mod link;
mod listen;
mod nodes;
mod open;
mod schema;
mod tls;
mod waits;
mod work;

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

pub use nodes::ServerTable;

/// Begins a transaction and waits for its turn to change something.
const BEGIN: &str = "BEGIN; SELECT 1 FROM seal WHERE id = 1 FOR UPDATE";

/// The catalog of a domain on a database server.
pub struct Postgres {
    server: Server,
    link: Mutex<Link>,
    /// The token of the node that this process is, if it is one.
    node: Mutex<Option<String>>,
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
            node: Mutex::default(),
        };
        Ok((catalog, filled))
    }

    /// See [`super::SiteCatalog::change_as`].
    pub fn change_as(&self, token: &str) {
        *self.node.lock() = Some(token.to_owned());
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
            if let Some(token) = self.node.lock().clone() {
                nodes::must_be_in(&open, &token)?;
            }
            let out = f(&open, &mut seal)?;
            if seal.changed() {
                seal.store(&open)?;
                // Delivered when it is committed.
                open.execute(&format!(
                    "NOTIFY {}, '{}'",
                    listen::CHANNEL,
                    self.server.schema
                ))?;
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
