//! The schema, its migrations, and the setup of connections.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use drover_storage::open_private;
use rusqlite::limits::Limit;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::seal::Seal;
use crate::catalog_error::{CatalogError, Result};

/// How long a statement waits for another process's lock.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// `drov`: identifies the file as a drover catalog.
pub const APPLICATION_ID: i64 = 0x6472_6f76;

/// Migration `n` takes schema `n` to `n + 1`. Never change a released one; the `seal` table never changes.
const MIGRATIONS: &[&str] = &["
    CREATE TABLE seal (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        schema INTEGER NOT NULL,
        revision INTEGER NOT NULL,
        rows INTEGER NOT NULL,
        content INTEGER NOT NULL,
        sum INTEGER NOT NULL
    );
    CREATE TABLE settings (
        key TEXT PRIMARY KEY NOT NULL,
        value TEXT NOT NULL,
        sum INTEGER NOT NULL
    );
    CREATE TABLE peers (
        name TEXT PRIMARY KEY NOT NULL,
        key TEXT UNIQUE NOT NULL,
        addresses TEXT NOT NULL,
        paired_unix INTEGER NOT NULL,
        sum INTEGER NOT NULL
    );
    CREATE TABLE tickets (
        secret TEXT PRIMARY KEY NOT NULL,
        created_unix INTEGER NOT NULL,
        expires_unix INTEGER NOT NULL,
        used_by TEXT NOT NULL,
        sum INTEGER NOT NULL
    );
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
        sum INTEGER NOT NULL
    );
"];

/// The current schema version.
pub const VERSION: i64 = MIGRATIONS.len() as i64;

/// Opens the database for reading and writing; creates its tables or migrates them.
pub fn open_for_use(path: &Path) -> Result<Connection> {
    let doing = "opening the catalog";
    let sql = |error| CatalogError::Sql {
        doing,
        path: path.to_path_buf(),
        error,
    };
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
    migrate(&mut connection).map_err(sql)?;
    Ok(connection)
}

/// Opens a database read-only.
pub fn open_to_look(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    set_up(&connection)?;
    Ok(connection)
}

/// Opens a database that no process changes, without creating files next to it.
pub fn open_as_it_is(path: &Path) -> Result<Connection> {
    let mut uri = b"file:".to_vec();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b'?' | b'#' | b'%' => uri.extend(format!("%{byte:02X}").bytes()),
            _ => uri.push(byte),
        }
    }
    uri.extend(b"?immutable=1");
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
    let opened = Connection::open_with_flags(OsStr::from_bytes(&uri), flags)
        .and_then(|c| set_up(&c).map(|()| c));
    opened.map_err(|error| CatalogError::Sql {
        doing: "opening the catalog",
        path: path.to_path_buf(),
        error,
    })
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
fn migrate(connection: &mut Connection) -> rusqlite::Result<()> {
    let version: i64 = connection.pragma_query_value(None, "user_version", |r| r.get(0))?;
    if version >= VERSION {
        return Ok(());
    }
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let version: i64 = tx.pragma_query_value(None, "user_version", |r| r.get(0))?;
    for step in MIGRATIONS
        .iter()
        .skip(usize::try_from(version).unwrap_or(0))
    {
        tx.execute_batch(step)?;
    }
    tx.pragma_update(None, "application_id", APPLICATION_ID)?;
    tx.pragma_update(None, "user_version", VERSION)?;
    Seal::first(&tx, VERSION)?;
    tx.commit()
}

/// The definitions of tables and indices in the database.
pub fn described(connection: &Connection) -> rusqlite::Result<Vec<(String, String, String)>> {
    connection
        .prepare("SELECT type, name, coalesce(sql, '') FROM sqlite_schema ORDER BY type, name")?
        .query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))?
        .collect()
}

/// The expected result of [`described`] for schema `version`.
pub fn expected(version: i64) -> rusqlite::Result<Vec<(String, String, String)>> {
    let connection = Connection::open_in_memory()?;
    for step in MIGRATIONS
        .iter()
        .take(usize::try_from(version).unwrap_or(0))
    {
        connection.execute_batch(step)?;
    }
    described(&connection)
}
