//! `catalog.bak`: a spare copy of the catalog as of the last change.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_storage::{open_private, sync_parent};
use rusqlite::Connection;
use rusqlite::backup::Backup;

use super::check::{DatabaseState, examine};
use crate::catalog_error::{CatalogError, Result};
use crate::site_catalog::seal::Seal;

/// Held while the files next to the database are examined or replaced; other processes wait.
pub struct SpareLock(
    #[expect(dead_code, reason = "the lock lasts as long as the file is open")] File,
);

/// Takes the lock of the catalog in `dir`, waiting if necessary.
pub fn lock(dir: &Path) -> Result<SpareLock> {
    let path = dir.join("catalog.lock");
    let file = open_private(&path).map_err(CatalogError::file("open", &path))?;
    file.lock().map_err(CatalogError::file("lock", &path))?;
    Ok(SpareLock(file))
}

/// The path of the spare of the catalog at `path`.
pub fn path_of(path: &Path) -> PathBuf {
    path.with_extension("bak")
}

/// Writes the spare after a change.
pub fn write(connection: &Connection, path: &Path) -> Result<()> {
    let lock = lock(path.parent().unwrap_or(Path::new(".")))?;
    copy(connection, path, &lock)
}

/// Writes the spare unless it is intact and of the same revision.
pub fn ensure(connection: &Connection, path: &Path, lock: &SpareLock) -> Result<()> {
    let seal = Seal::load(connection).map_err(|e| e.at("reading the seal", path))?;
    if examine(&path_of(path))?
        == (DatabaseState::Good {
            revision: seal.revision,
        })
    {
        return Ok(());
    }
    copy(connection, path, lock)
}

/// Copies the current catalog; the old spare stays until the new one is durable.
fn copy(connection: &Connection, path: &Path, _lock: &SpareLock) -> Result<()> {
    let spare = path_of(path);
    let temporary = path.with_extension("bak.tmp");
    remove_with_log(&temporary)?;
    open_private(&temporary).map_err(CatalogError::file("open", &temporary))?;
    let sql = |error| CatalogError::Sql {
        doing: "copying the catalog",
        path: spare.clone(),
        error,
    };
    let fill = || -> rusqlite::Result<()> {
        let mut to = Connection::open(&temporary)?;
        to.pragma_update(None, "synchronous", "off")?;
        let backup = Backup::new(connection, &mut to)?;
        backup.run_to_completion(256, Duration::from_millis(5), None)?;
        drop(backup);
        // A copy is a single file, without a log.
        to.pragma_update(None, "journal_mode", "delete")?;
        to.close().map_err(|(_, e)| e)
    };
    if let Err(e) = fill() {
        // A partial copy only wastes space.
        let _ = remove_with_log(&temporary);
        return Err(sql(e));
    }
    let io = |e| CatalogError::File {
        doing: "write",
        path: spare.clone(),
        error: e,
    };
    File::open(&temporary)
        .and_then(|f| f.sync_all())
        .map_err(io)?;
    fs::rename(&temporary, &spare).map_err(io)?;
    sync_parent(&spare).map_err(io)
}

/// Removes a database file and its log files.
pub fn remove_with_log(path: &Path) -> Result<()> {
    for suffix in ["-wal", "-shm", "-journal", ""] {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        match fs::remove_file(&name) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(CatalogError::file("remove", PathBuf::from(name))(e)),
        }
    }
    Ok(())
}
