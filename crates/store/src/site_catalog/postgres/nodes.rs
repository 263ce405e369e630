//! The table of the nodes of a site, beside the catalogs of its domains: read as a whole, changed by the rules of
//! [`Table`], and written back as far as it differs. It is small.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rusqlite::types::Value;
use tokio_postgres::Client;

use super::link::{Link, Server};
use super::listen::Ear;
use super::open::{Open, values_of};
use super::schema::{LOCK, create_schema};
use super::waits::in_place;
use crate::catalog_error::{CatalogError, Result};
use crate::nodes::{Held, NodeState, Row, Table, Use};
use crate::site_catalog::table::RowError;
use crate::site_catalog::url::CatalogUrl;

/// The tables. `site` has one row, locked by whoever changes something here: changes happen one after the other.
const TABLES: &str = include_str!("schema/nodes-1.sql");

/// The version of these tables.
const VERSION: i64 = 1;

/// The domain whose schema has them: its name is that of no domain.
const DOMAIN: &str = "";

/// The table of nodes on a database server.
pub struct ServerTable {
    server: Server,
    link: Mutex<Link>,
    /// For the term only: what waits for another call may cost it.
    of_term: Mutex<Link>,
    ear: Mutex<Ear>,
}

impl ServerTable {
    /// That of the site whose catalog is at this address; it was connected to before.
    ///
    /// # Errors
    /// When its tables cannot be used.
    pub fn open(url: &CatalogUrl) -> Result<ServerTable> {
        let table = ServerTable {
            server: Server::new(url, DOMAIN)?,
            link: Mutex::default(),
            of_term: Mutex::default(),
            ear: Mutex::default(),
        };
        let found = table.alone(&table.link, "opening the table of nodes", |link| {
            let (client, _) = link.client(&table.server)?;
            let open = Open::new(client);
            open.execute("BEGIN")?;
            open.execute(LOCK)?;
            create_schema(&open, &table.server)?;
            open.execute(TABLES)?;
            let found = rows(&open, "SELECT version FROM site")?;
            let found = found.first().map_or(0, |row| number(row, 0));
            Ok((open.commit(true)?, found))
        })?;
        match found > VERSION {
            true => Err(CatalogError::NewerServer {
                server: table.server.shown,
                found,
            }),
            false => Ok(table),
        }
    }

    /// Runs `f` in a transaction of its own, which is kept if it says so, in turn with the other calls.
    pub(super) fn alone_with<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&Open) -> Result<(bool, T), RowError>,
    ) -> Result<T> {
        self.alone(&self.link, doing, |link| {
            let open = Open::begin(link, &self.server, "BEGIN")?;
            let (keep, out) = f(&open)?;
            Ok((open.commit(keep)?, out))
        })
    }

    /// Runs `f` with a connection, which it returns.
    fn alone<T>(
        &self,
        link: &Mutex<Link>,
        doing: &'static str,
        f: impl FnOnce(&mut Link) -> Result<(Arc<Client>, T), RowError>,
    ) -> Result<T> {
        let done = in_place(|| {
            let mut link = link.lock();
            let (client, out) = f(&mut link)?;
            link.put_back(client);
            Ok(out)
        });
        done.map_err(|e: RowError| e.at_server(doing, &self.server.shown))
    }

    /// Runs `f` on the table, with the time by the database's clock, in a transaction that no other of these runs beside.
    ///
    /// # Errors
    /// Those of `f`, as conflicts; when the server cannot be reached or refuses.
    pub fn run<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&mut Table, i64) -> Result<T, String>,
    ) -> Result<T> {
        self.run_on(&self.link, doing, f)
    }

    /// The same for the term of this node, on a connection of its own.
    ///
    /// # Errors
    /// As above.
    pub fn run_for_term<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&mut Table, i64) -> Result<T, String>,
    ) -> Result<T> {
        self.run_on(&self.of_term, doing, f)
    }

    fn run_on<T>(
        &self,
        link: &Mutex<Link>,
        doing: &'static str,
        f: impl FnOnce(&mut Table, i64) -> Result<T, String>,
    ) -> Result<T> {
        const BEGIN: &str = "BEGIN; SELECT 1 FROM site WHERE id = 1 FOR UPDATE";
        self.alone(link, doing, |link| {
            let open = Open::begin(link, &self.server, BEGIN)?;
            let (before, now_ms) = load(&open)?;
            let mut after = before.clone();
            let out = f(&mut after, now_ms).map_err(RowError::Conflict)?;
            store(&open, &before, &after)?;
            Ok((open.commit(before != after)?, out))
        })
    }

    /// Runs `f` while the connection of all other calls is taken.
    #[cfg(test)]
    pub fn with_others_waiting<T>(&self, f: impl FnOnce() -> T) -> T {
        let _taken = self.link.lock();
        f()
    }

    /// See [`crate::nodes::Nodes::wait_for_change`].
    pub fn wait_for_change(&self, patience: Duration) {
        in_place(|| self.ear.lock().wait(&self.server, patience));
    }
}

/// Fails unless the node with this token may change what nodes share; until the end of the transaction, no other takes over
/// from it.
pub(super) fn must_be_in(open: &Open, token: &str) -> Result<(), RowError> {
    let sql = format!(
        "SELECT 1::BIGINT FROM \"drover/{DOMAIN}\".nodes WHERE token = $1 AND state IN ('{}', '{}') FOR SHARE",
        NodeState::Serving.as_str(),
        NodeState::Draining.as_str()
    );
    match open.query(sql, vec![text(token)])?.is_empty() {
        false => Ok(()),
        true => Err(RowError::Conflict(
            "this node was taken for dead, and another has taken over from it: start it again"
                .into(),
        )),
    }
}

fn rows(open: &Open, sql: &str) -> Result<Vec<Vec<Value>>, RowError> {
    rows_of(open, sql, Vec::new())
}

/// The rows that a statement returns.
pub(super) fn rows_of(
    open: &Open,
    sql: &str,
    values: Vec<Value>,
) -> Result<Vec<Vec<Value>>, RowError> {
    let found = open.query(sql.to_owned(), values)?;
    found.iter().map(|row| values_of("nodes", row)).collect()
}

pub(super) fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

pub(super) fn number(row: &[Value], column: usize) -> i64 {
    match row.get(column) {
        Some(Value::Integer(n)) => *n,
        _ => 0,
    }
}

pub(super) fn word(row: &[Value], column: usize) -> String {
    match row.get(column) {
        Some(Value::Text(text)) => text.clone(),
        _ => String::new(),
    }
}

fn load(open: &Open) -> Result<(Table, i64), RowError> {
    let mut table = Table::default();
    let mut now_ms = 0;
    let sql = "SELECT directory, path, CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT), version FROM site";
    for row in rows(open, sql)? {
        (table.directory, table.path, now_ms) = (word(&row, 0), word(&row, 1), number(&row, 2));
        if number(&row, 3) > VERSION {
            let text = "its tables of nodes were made by a newer drover; upgrade this one";
            return Err(RowError::Conflict(text.into()));
        }
    }
    let unknown = |what: &str| RowError::Damaged(format!("a node has an unknown {what}"));
    let sql = "SELECT name, token, place, state, addresses, version, started_ms, term_ms, ends_ms FROM nodes";
    for row in rows(open, sql)? {
        let node = Row {
            token: word(&row, 1),
            place: word(&row, 2),
            state: NodeState::of(&word(&row, 3)).ok_or_else(|| unknown("state"))?,
            addresses: word(&row, 4).lines().map(String::from).collect(),
            version: word(&row, 5),
            started_ms: number(&row, 6),
            term_ms: number(&row, 7),
            ends_ms: number(&row, 8),
        };
        table.nodes.insert(word(&row, 0), node);
    }
    for row in rows(open, "SELECT domain, image, what, token, key FROM held")? {
        let what = Use::of(&word(&row, 2)).ok_or_else(|| unknown("use of a name"))?;
        let held = Held {
            token: word(&row, 3),
            key: word(&row, 4),
        };
        table
            .held
            .insert((word(&row, 0), word(&row, 1), what), held);
    }
    for row in rows(open, "SELECT domain, image, node, writes FROM mounts")? {
        let at = (word(&row, 0), word(&row, 1), word(&row, 2));
        table.mounts.insert(at, number(&row, 3) != 0);
    }
    Ok((table, now_ms))
}

fn store(open: &Open, before: &Table, after: &Table) -> Result<(), RowError> {
    if (&before.directory, &before.path) != (&after.directory, &after.path) {
        let values = vec![text(&after.directory), text(&after.path)];
        let sql = "UPDATE site SET directory = $1, path = $2";
        open.query(sql.into(), values)?;
    }
    let run = |sql: &str, values| open.query(sql.to_owned(), values).map(drop);
    differ(
        &before.nodes,
        &after.nodes,
        |name| run("DELETE FROM nodes WHERE name = $1", vec![text(name)]),
        |name, row| {
            let values = vec![
                text(name),
                text(&row.token),
                text(&row.place),
                text(row.state.as_str()),
                text(&row.addresses.join("\n")),
                text(&row.version),
                Value::Integer(row.started_ms),
                Value::Integer(row.term_ms),
                Value::Integer(row.ends_ms),
            ];
            let columns = "token place state addresses version started_ms term_ms ends_ms";
            let sets = columns.split(' ').map(|c| format!("{c} = excluded.{c}"));
            let sql = format!(
                "INSERT INTO nodes VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (name) DO UPDATE SET {}",
                Vec::from_iter(sets).join(", ")
            );
            run(&sql, values)
        },
    )?;
    let key = |(domain, image, what): &(String, String, Use)| {
        vec![text(domain), text(image), text(what.as_str())]
    };
    differ(
        &before.held,
        &after.held,
        |at| {
            run(
                "DELETE FROM held WHERE domain = $1 AND image = $2 AND what = $3",
                key(at),
            )
        },
        |at, held| {
            let values = [key(at), vec![text(&held.token), text(&held.key)]].concat();
            run(
                "INSERT INTO held VALUES ($1, $2, $3, $4, $5) ON CONFLICT (domain, image, what)
                 DO UPDATE SET token = excluded.token, key = excluded.key",
                values,
            )
        },
    )?;
    let key = |(domain, image, node): &(String, String, String)| {
        vec![text(domain), text(image), text(node)]
    };
    differ(
        &before.mounts,
        &after.mounts,
        |at| {
            run(
                "DELETE FROM mounts WHERE domain = $1 AND image = $2 AND node = $3",
                key(at),
            )
        },
        |at, writes| {
            let values = [key(at), vec![Value::Integer(i64::from(*writes))]].concat();
            run(
                "INSERT INTO mounts VALUES ($1, $2, $3, $4) ON CONFLICT (domain, image, node)
                 DO UPDATE SET writes = excluded.writes",
                values,
            )
        },
    )
}

/// Deletes what is not in `after`, and puts what was not in `before` as it is now. A row that stays is updated, so that whoever waits
/// for its lock sees it.
fn differ<K: Ord, V: PartialEq>(
    before: &BTreeMap<K, V>,
    after: &BTreeMap<K, V>,
    delete: impl Fn(&K) -> Result<(), RowError>,
    put: impl Fn(&K, &V) -> Result<(), RowError>,
) -> Result<(), RowError> {
    for key in before.keys().filter(|key| !after.contains_key(key)) {
        delete(key)?;
    }
    for (key, value) in after {
        if before.get(key) != Some(value) {
            put(key, value)?;
        }
    }
    Ok(())
}
