//! The tables on the server.

use std::sync::Arc;

use tokio_postgres::Client;

use super::link::Server;
use super::open::Open;
use crate::catalog_error::{CatalogError, Result};
use crate::site_catalog::rows::AllRows;
use crate::site_catalog::seal::Seal;
use crate::site_catalog::table::RowError;

/// Migration `n` takes schema `n` to `n + 1`. Never change a released one.
const MIGRATIONS: &[&str] = &[include_str!("schema/1.sql")];

/// The current schema version, which is not that of SQLite's tables.
const VERSION: i64 = MIGRATIONS.len() as i64;

/// Held by whoever creates or migrates tables (`drov`).
pub(super) const LOCK: &str = "SELECT pg_advisory_xact_lock(1685221238)";

/// What is being done when the tables cannot be used.
const DOING: &str = "opening the tables";

/// Fails if the tables were migrated by a newer drover since they were opened.
///
/// # Errors
/// A line that says so.
pub fn check(seal: &Seal, server: &Server) -> Result<(), RowError> {
    match seal.schema {
        VERSION => Ok(()),
        found => Err(RowError::Conflict(newer(server, found).to_string())),
    }
}

fn newer(server: &Server, found: i64) -> CatalogError {
    CatalogError::NewerServer {
        server: server.shown.clone(),
        found,
    }
}

/// Creates the tables if there are none, and fills them with what `former` returns; then the result is true. Migrates older
/// ones.
///
/// # Errors
/// When they were made by a newer drover, or the server refuses.
pub fn ensure(
    client: &Arc<Client>,
    server: &Server,
    former: &mut dyn FnMut() -> Result<Option<AllRows>>,
) -> Result<bool> {
    let error = |e: RowError| e.at_server(DOING, &server.shown);
    let open = Open::new(Arc::clone(client));
    // Most of the time everything is there, and nobody has to wait for a turn.
    if version(&open, server).map_err(error)? == VERSION {
        return Ok(false);
    }
    open.execute("BEGIN").map_err(error)?;
    open.execute(LOCK).map_err(error)?;
    let found = version(&open, server).map_err(error)?;
    if found > VERSION {
        return Err(newer(server, found));
    }
    if found == 0 {
        create_schema(&open, server).map_err(error)?;
    }
    for step in MIGRATIONS.iter().skip(usize::try_from(found).unwrap_or(0)) {
        open.execute(step).map_err(error)?;
    }
    let mut seal = Seal::blank();
    let mut filled = false;
    if found == 0 {
        if let Some(rows) = former()? {
            filled = !(rows.peers.is_empty() && rows.images.is_empty() && rows.tickets.is_empty());
            fill(&open, &mut seal, &rows).map_err(error)?;
        }
    } else {
        seal = Seal::load(&open).map_err(error)?;
    }
    seal.schema = VERSION;
    seal.store(&open).map_err(error)?;
    open.commit(true).map_err(error)?;
    Ok(filled)
}

/// The version of the tables; 0 when there are none.
fn version(open: &Open, server: &Server) -> Result<i64, RowError> {
    // `to_regclass` may know only what was there before this session waited for the lock.
    match open.is(format!(
        "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_tables WHERE schemaname = '{}' AND tablename = 'seal')",
        server.schema
    ))? {
        true => Ok(Seal::load(open)?.schema),
        false => Ok(0),
    }
}

/// Creates the schema of a domain, if it is not there.
///
/// # Errors
/// When the server refuses.
pub(super) fn create_schema(open: &Open, server: &Server) -> Result<(), RowError> {
    // Where somebody else has made it, this user may have no right to make one.
    match open.is(format!(
        "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = '{}')",
        server.schema
    ))? {
        true => Ok(()),
        false => open.execute(&format!("CREATE SCHEMA \"{}\"", server.schema)),
    }
}

fn fill(open: &Open, seal: &mut Seal, rows: &AllRows) -> Result<(), RowError> {
    for setting in &rows.settings {
        seal.put(open, setting)?;
    }
    for peer in &rows.peers {
        seal.put(open, peer)?;
    }
    for ticket in &rows.tickets {
        seal.put(open, ticket)?;
    }
    for image in &rows.images {
        seal.put(open, image)?;
    }
    Ok(())
}
