//! The schema, its migrations, and the setup of connections.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use drover_storage::open_private;
use rusqlite::backup::Backup;
use rusqlite::limits::Limit;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::upgrade::{self, FormerGrant};
use crate::catalog_error::{CatalogError, Result};
use crate::site_catalog::rows::Setting;
use crate::site_catalog::seal::Seal;
use crate::site_catalog::table::{Row, RowError};

/// How long a statement waits for another process's lock.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// What is being done when a database cannot be opened.
const OPENING: &str = "opening the catalog";

/// `drov`: identifies the file as a drover catalog.
pub const APPLICATION_ID: i64 = 0x6472_6f76;

/// Migration `n` takes schema `n` to `n + 1`. Never change a released one; the `seal` table never changes. One that
/// changes tables makes them anew: [`migrate`] fills them. Tests make old catalogs of the first.
const MIGRATIONS: &[&str] = &[
    include_str!("schema/1.sql"),
    "
    DROP TABLE peers;
    CREATE TABLE peers (
        name TEXT PRIMARY KEY NOT NULL,
        key TEXT UNIQUE NOT NULL,
        addresses TEXT NOT NULL,
        paired_unix INTEGER NOT NULL,
        rights TEXT NOT NULL,
        domain TEXT NOT NULL,
        quota_bytes INTEGER NOT NULL,
        sum INTEGER NOT NULL
    );
    DROP TABLE tickets;
    CREATE TABLE tickets (
        secret TEXT PRIMARY KEY NOT NULL,
        created_unix INTEGER NOT NULL,
        expires_unix INTEGER NOT NULL,
        used_by TEXT NOT NULL,
        rights TEXT NOT NULL,
        domain TEXT NOT NULL,
        quota_bytes INTEGER NOT NULL,
        name TEXT NOT NULL,
        sum INTEGER NOT NULL
    );
    DROP TABLE images;
    CREATE TABLE images (
        name TEXT PRIMARY KEY NOT NULL,
        id INTEGER UNIQUE NOT NULL,
        path BLOB NOT NULL,
        format TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        data_bytes INTEGER NOT NULL,
        virtual_bytes INTEGER NOT NULL,
        digest TEXT NOT NULL,
        stamp TEXT NOT NULL,
        added_unix INTEGER NOT NULL,
        peer TEXT NOT NULL,
        external INTEGER NOT NULL,
        owner TEXT NOT NULL,
        shared TEXT NOT NULL,
        sum INTEGER NOT NULL
    );
",
];

/// The current schema version.
pub const VERSION: i64 = MIGRATIONS.len() as i64;

/// Opens the database for reading and writing; creates its tables or migrates them.
pub fn open_for_use(path: &Path, former: &FormerGrant<'_>) -> Result<Connection> {
    let sql = |error: rusqlite::Error| RowError::from(error).at(OPENING, path);
    // Create it private first: SQLite gives its other files the same mode.
    open_private(path).map_err(CatalogError::file("open", path))?;
    let mut connection = Connection::open(path).map_err(sql)?;
    set_up(&connection).map_err(sql)?;
    // WAL lets readers continue during a write; FULL makes a commit durable before it returns.
    connection
        .pragma_update(None, "journal_mode", "wal")
        .map_err(sql)?;
    connection
        .pragma_update(None, "synchronous", "full")
        .map_err(sql)?;
    migrate(&mut connection, former).map_err(|e| e.at("migrating the catalog", path))?;
    Ok(connection)
}

/// Opens a database read-only.
pub fn open_to_look(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    set_up(&connection)?;
    Ok(connection)
}

/// Opens a database that no process changes, read-only and without creating files next to it. One of an older schema is
/// migrated in memory.
pub fn open_as_it_is(path: &Path, former: &FormerGrant<'_>) -> Result<Connection> {
    let mut uri = b"file:".to_vec();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b'?' | b'#' | b'%' => uri.extend(format!("%{byte:02X}").bytes()),
            _ => uri.push(byte),
        }
    }
    uri.extend(b"?immutable=1");
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
    let open = || -> Result<Connection, RowError> {
        let connection = Connection::open_with_flags(OsStr::from_bytes(&uri), flags)?;
        set_up(&connection)?;
        if !(1..VERSION).contains(&version(&connection)?) {
            return Ok(connection);
        }
        let mut copy = Connection::open_in_memory()?;
        set_up(&copy)?;
        Backup::new(&connection, &mut copy)?.run_to_completion(256, Duration::ZERO, None)?;
        migrate(&mut copy, former)?;
        // What is changed here would be lost.
        copy.pragma_update(None, "query_only", true)?;
        Ok(copy)
    };
    open().map_err(|e| e.at(OPENING, path))
}

/// Settings of every connection: the busy timeout, and protection against a malicious file.
fn set_up(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    connection.pragma_update(None, "cell_size_check", true)?;
    connection.set_limit(Limit::SQLITE_LIMIT_LENGTH, 4 << 20)?;
    connection.set_limit(Limit::SQLITE_LIMIT_ATTACHED, 0)?;
    Ok(())
}

/// Runs the missing migrations in one transaction.
fn migrate(connection: &mut Connection, former: &FormerGrant<'_>) -> Result<(), RowError> {
    if version(connection)? >= VERSION {
        return Ok(());
    }
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let from = version(&tx)?;
    if from >= VERSION {
        return Ok(());
    }
    let mut seal = Seal::blank();
    let mut rows = upgrade::Rows::default();
    if from > 0 {
        seal.revision = Seal::load(&tx)?.revision;
        rows = upgrade::rows(&tx, former)?;
    }
    for step in MIGRATIONS.iter().skip(usize::try_from(from).unwrap_or(0)) {
        tx.execute_batch(step)?;
    }
    tx.pragma_update(None, "application_id", APPLICATION_ID)?;
    tx.pragma_update(None, "user_version", VERSION)?;
    seal.schema = VERSION;
    for setting in Setting::all(&tx)? {
        seal.add(setting.sum());
    }
    for peer in &rows.peers {
        seal.put(&tx, peer)?;
    }
    for ticket in &rows.tickets {
        seal.put(&tx, ticket)?;
    }
    for image in &rows.images {
        seal.put(&tx, image)?;
    }
    // A higher revision than that of a spare of the older schema.
    seal.store(&tx)?;
    Ok(tx.commit()?)
}

fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |r| r.get(0))
}

/// The definitions of tables and indices in the database.
pub fn described(connection: &Connection) -> rusqlite::Result<Vec<[String; 4]>> {
    // Whose an index is SQLite does not check, but goes by it when it drops a table.
    let query =
        "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema ORDER BY type, name";
    connection
        .prepare(query)?
        .query_map([], |r| Ok([r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?]))?
        .collect()
}

/// The expected result of [`described`] for schema `version`.
pub fn expected(version: i64) -> rusqlite::Result<Vec<[String; 4]>> {
    let connection = Connection::open_in_memory()?;
    for step in MIGRATIONS
        .iter()
        .take(usize::try_from(version).unwrap_or(0))
    {
        connection.execute_batch(step)?;
    }
    described(&connection)
}
