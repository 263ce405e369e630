//! Rebuilds a damaged catalog.

use std::fs::{self, File};
use std::path::Path;

use drover_storage::{open_private, sync_parent};
use rusqlite::{Connection, TransactionBehavior};

use super::check::{DatabaseState, examine};
use super::upgrade::{self, First, FormerGrant};
use super::{schema, spare};
use crate::catalog::ImageRecord;
use crate::catalog_error::{CatalogError, Result};
use crate::site_catalog::rows::{ID_GAP_AFTER_LOSS, NEXT_ID, Peer, Setting};
use crate::site_catalog::seal::Seal;
use crate::site_catalog::table::{Row, RowError};

/// Lock that shows that this process has the database open: shared for users, exclusive for replacing the file.
pub struct Users(File);

impl Users {
    /// Registers this process as a user of the database at `path`.
    ///
    /// # Errors
    /// When the lock cannot be taken.
    pub fn join(path: &Path) -> Result<Users> {
        let users_path = path.with_extension("users");
        let users = open_private(&users_path).map_err(CatalogError::file("open", &users_path))?;
        let locked = CatalogError::file("lock", &users_path);
        users.lock_shared().map_err(locked)?;
        Ok(Users(users))
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        // A child that was just forked may have the file open too, and would keep the lock.
        let _ = self.0.unlock();
    }
}

/// Checks the catalog and its spare, and repairs the catalog if necessary. The caller holds the spare lock.
///
/// Order of preference: an intact catalog, unless the spare is newer (then the catalog's log lost changes); else the
/// spare; else the rows of either that have valid checksums.
pub fn ensure_sound(path: &Path, former: &FormerGrant<'_>) -> Result<(Users, Vec<String>)> {
    let spare_path = spare::path_of(path);
    let users_path = path.with_extension("users");
    let users = open_private(&users_path).map_err(CatalogError::file("open", &users_path))?;
    let locked = |e| CatalogError::file("lock", &users_path)(e);
    let alone = match users.try_lock() {
        Ok(()) => true,
        Err(fs::TryLockError::WouldBlock) => false,
        Err(fs::TryLockError::Error(e)) => return Err(locked(e)),
    };
    // The spare first: a change in between can only make the catalog the newer of the two.
    let spare = examine(&spare_path)?;
    let catalog = examine(path)?;
    let newer = |found| {
        Err(CatalogError::Newer {
            path: path.to_path_buf(),
            found,
        })
    };
    let mut repairs = Vec::new();
    let damage = match (&catalog, &spare) {
        (DatabaseState::Newer(v), _)
        | (DatabaseState::Damaged(_) | DatabaseState::Nothing, DatabaseState::Newer(v)) => {
            return newer(*v);
        }
        (DatabaseState::Good { revision }, DatabaseState::Good { revision: newer })
            if newer > revision =>
        {
            Some("its last changes are missing".to_string())
        }
        (DatabaseState::Good { .. }, DatabaseState::Damaged(what)) => {
            repairs.push(format!(
                "{} was damaged ({what}) and was recreated",
                spare_path.display()
            ));
            None
        }
        (DatabaseState::Good { .. }, _) | (DatabaseState::Nothing, DatabaseState::Nothing) => None,
        (DatabaseState::Nothing, _) => Some("it was missing".to_string()),
        (DatabaseState::Damaged(what), _) => Some(what.clone()),
    };
    if let Some(what) = damage {
        if !alone {
            return Err(CatalogError::Damaged {
                path: path.to_path_buf(),
                what,
            });
        }
        repairs.push(repair(
            path,
            &what,
            matches!(spare, DatabaseState::Good { .. }),
            former,
        )?);
    }
    if alone {
        users.unlock().map_err(locked)?;
    }
    users.lock_shared().map_err(locked)?;
    Ok((Users(users), repairs))
}

/// Replaces the catalog, keeping the damaged file next to it, and describes the repair.
fn repair(
    path: &Path,
    what: &str,
    spare_is_good: bool,
    former: &FormerGrant<'_>,
) -> Result<String> {
    let spare_path = spare::path_of(path);
    let fresh = path.with_extension("new");
    spare::remove_with_log(&fresh)?;
    let shown = path.display();
    let report = if spare_is_good {
        fs::copy(&spare_path, &fresh).map_err(CatalogError::file("write", &fresh))?;
        format!(
            "{shown} was damaged ({what}) and was restored from {}",
            spare_path.display()
        )
    } else {
        let (peers, images) = salvage(&[path, &spare_path], &fresh, former)?;
        format!(
            "{shown} and its spare copy were damaged ({what}); saved from them: {peers} peers, {images} images. \
             Pair with peers that are missing, and index images that are missing with `drover index`"
        )
    };
    let io = |doing| CatalogError::file(doing, path);
    File::open(&fresh)
        .and_then(|f| f.sync_all())
        .map_err(io("sync"))?;
    // Delete the old log before renaming the new file into place: SQLite would replay it.
    let aside = path.with_extension("damaged");
    match fs::rename(path, &aside) {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(io("set aside")(e)),
    }
    spare::remove_with_log(path)?;
    sync_parent(path).map_err(io("sync"))?;
    fs::rename(&fresh, path).map_err(io("restore"))?;
    sync_parent(path).map_err(io("sync"))?;
    Ok(report)
}

/// Creates a database at `to` from the intact rows of the first of `from` that has any; tickets are omitted, so that
/// none can be used twice. Returns the number of peers and images.
fn salvage(from: &[&Path], to: &Path, former: &FormerGrant<'_>) -> Result<(usize, usize)> {
    let mut settings = Vec::new();
    let mut peers: Vec<Peer> = Vec::new();
    let mut images: Vec<ImageRecord> = Vec::new();
    for path in from {
        if let Ok(c) = schema::open_to_look(path) {
            settings = good(&c, |_| {});
            peers = good(&c, |peers| upgrade::give(peers, former));
            images = good(&c, |images| upgrade::own(images, &peers));
        }
        if !peers.is_empty() || !images.is_empty() {
            break;
        }
    }
    // A damaged index can yield a row twice.
    peers.sort_by(|a, b| a.name.cmp(&b.name));
    peers.dedup_by(|a, b| a.name == b.name || a.key == b.key);
    images.sort_by(|a, b| a.name.cmp(&b.name));
    images.dedup_by(|a, b| a.name == b.name || a.id == b.id);
    write(to, settings, &peers, &images, former).map_err(|e| e.at("saving rows", to))?;
    Ok((peers.len(), images.len()))
}

/// The intact rows of a table; `complete` adds what those of schema 1 do not have.
fn good<R: Row>(c: &Connection, complete: impl FnOnce(&mut [R])) -> Vec<R> {
    if let Ok(rows) = R::each(c) {
        return rows.into_iter().filter_map(Result::ok).collect();
    }
    let rows = First::<R>::each(c).unwrap_or_default();
    let rows = rows.into_iter().filter_map(Result::ok);
    let mut rows: Vec<R> = rows.map(|First(row)| row).collect();
    complete(&mut rows);
    rows
}

fn write(
    to: &Path,
    settings: Vec<Setting>,
    peers: &[Peer],
    images: &[ImageRecord],
    former: &FormerGrant<'_>,
) -> Result<(), RowError> {
    let mut connection =
        schema::open_for_use(to, former).map_err(|e| RowError::Conflict(e.to_string()))?;
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut seal = Seal::load(&tx)?;
    for setting in settings.iter().filter(|s| s.key != NEXT_ID) {
        seal.put(&tx, setting)?;
    }
    for peer in peers {
        seal.put(&tx, peer)?;
    }
    for image in images {
        seal.put(&tx, image)?;
    }
    // The counter may be lost: start well beyond every known ID.
    let counted = settings
        .iter()
        .find(|s| s.key == NEXT_ID)
        .and_then(|s| s.value.parse().ok());
    let highest = images
        .iter()
        .map(|i| i.id.0)
        .max()
        .unwrap_or(0)
        .max(counted.unwrap_or(0));
    let next = highest.saturating_add(ID_GAP_AFTER_LOSS);
    seal.put(
        &tx,
        &Setting {
            key: NEXT_ID.into(),
            value: next.to_string(),
        },
    )?;
    seal.store(&tx)?;
    tx.commit()?;
    // A single file, so that one rename moves everything.
    connection.pragma_update(None, "journal_mode", "delete")?;
    connection.close().map_err(|(_, e)| e.into())
}
