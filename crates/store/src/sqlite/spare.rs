//! `catalog.bak`: a copy of the catalog as it was after the last change.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_storage::sync_parent;
use rusqlite::Connection;
use rusqlite::backup::Backup;

use super::check::{Found, examine};
use super::private::open_private;
use super::seal::Seal;
use crate::catalog_error::{CatalogError, Result};

/// Held while the files beside the database are looked at or replaced; other processes wait.
pub struct SpareLock(
    #[expect(dead_code, reason = "the lock lasts as long as the file is open")] File,
);

/// Waits for the lock of the catalog in `dir`.
pub fn lock(dir: &Path) -> Result<SpareLock> {
    let path = dir.join("catalog.lock");
    let file = open_private(&path)?;
    file.lock().map_err(CatalogError::file("lock", &path))?;
    Ok(SpareLock(file))
}

/// Where the spare of the catalog at `path` is.
pub fn path_of(path: &Path) -> PathBuf {
    path.with_extension("bak")
}

/// Writes the spare after a change.
pub fn write(connection: &Connection, path: &Path) -> Result<()> {
    let lock = lock(path.parent().unwrap_or(Path::new(".")))?;
    copy(connection, path, &lock)
}

/// Writes the spare unless it is of the same revision and sound.
pub fn ensure(connection: &Connection, path: &Path, lock: &SpareLock) -> Result<()> {
    let seal = Seal::load(connection).map_err(|e| e.at("reading the seal", path))?;
    if examine(&path_of(path))?
        == (Found::Good {
            revision: seal.revision,
        })
    {
        return Ok(());
    }
    copy(connection, path, lock)
}

/// Copies the catalog as it is now; the old spare stays until the new one is durable.
fn copy(connection: &Connection, path: &Path, _lock: &SpareLock) -> Result<()> {
    let spare = path_of(path);
    let temporary = path.with_extension("bak.tmp");
    remove_with_log(&temporary)?;
    open_private(&temporary)?;
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
        // A copy is one file, without a log beside it.
        to.pragma_update(None, "journal_mode", "delete")?;
        to.close().map_err(|(_, e)| e)
    };
    if let Err(e) = fill() {
        // Half a copy only takes room.
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

/// Removes a database file and the log files that SQLite keeps beside it.
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
