//! Renames a complete file into place. The file it replaces is kept until the catalog has the new image, and is
//! restored if that fails. So a path never holds a file other than the one its catalog record describes.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use drover_storage::sync_parent;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::StoreError;

/// File name under which the replaced file is kept, next to the new one.
pub const REPLACED: &str = "replaced";

/// A file that has been renamed, but is not in the catalog yet.
pub struct Named {
    part: PathBuf,
    target: PathBuf,
    before: Before,
}

/// The file that had the name before.
enum Before {
    Nothing,
    /// It is kept at this path.
    Kept(PathBuf),
    /// It could not be kept: the file system has no hard links.
    Gone,
}

impl Named {
    /// Renames `part` to `target`: with `fresh` only if the name is free, else replacing the existing file. Durable on
    /// return; on failure nothing has changed.
    ///
    /// # Errors
    /// When the name is taken, or for a system error.
    pub fn new(part: &Path, target: &Path, fresh: bool) -> Result<Self, StoreError> {
        let failed = StoreError::file("rename to", target);
        let named = || {
            put_back(part, target)?;
            let before = match fresh {
                true => Before::Nothing,
                false => keep(target, aside(part))?,
            };
            match fresh {
                true => rename_new(part, target)?,
                false => std::fs::rename(part, target)?,
            }
            Ok(Named {
                part: part.into(),
                target: target.into(),
                before,
            })
        };
        let named: Named = named().map_err(failed)?;
        if let Err(e) = sync_parent(target) {
            named.undo();
            return Err(StoreError::file("sync the directory of", target)(e));
        }
        Ok(named)
    }

    /// The image is in the catalog: removes the replaced file.
    pub fn entered(self) {
        if let Before::Kept(replaced) = self.before
            && let Err(e) = std::fs::remove_file(&replaced)
        {
            tracing::warn!(path = %replaced.display(), error = %e, "cannot remove");
        }
    }

    /// The image did not get into the catalog: restores the replaced file, and moves the new one back.
    pub fn undo(self) {
        let undone = match &self.before {
            // Durable before the other step: no crash may leave the new file without a name.
            Before::Kept(replaced) => std::fs::hard_link(&self.target, &self.part)
                .and_then(|()| sync_parent(&self.part))
                .and_then(|()| std::fs::rename(replaced, &self.target)),
            Before::Nothing => std::fs::rename(&self.target, &self.part),
            Before::Gone => Err(io::ErrorKind::Unsupported.into()),
        };
        if let Err(e) = undone.and_then(|()| sync_parent(&self.target)) {
            tracing::error!(path = %self.target.display(), error = %e, "cannot undo the rename of a file that is not in the catalog; send it again");
        }
    }
}

/// Completes an undo, or undoes a rename, that was interrupted and left the new file under both names: restores the
/// replaced file, or frees the name, because writing to either name would change both.
///
/// # Errors
/// When it cannot be renamed.
pub fn finish_undoing(part: &Path, target: &Path) -> Result<(), StoreError> {
    put_back(part, target).map_err(StoreError::file("rename to", target))
}

fn put_back(part: &Path, target: &Path) -> io::Result<()> {
    let aside = aside(part);
    match (same_file(part, target), aside.exists()) {
        (true, true) => std::fs::rename(aside, target),
        (true, false) => std::fs::remove_file(target),
        (false, _) => Ok(()),
    }
}

/// Renames `part` to `target` in one step, unless there is a file of that name.
fn rename_new(part: &Path, target: &Path) -> io::Result<()> {
    match renameat_with(CWD, part, CWD, target, RenameFlags::NOREPLACE) {
        // Some file systems (NFS) cannot. A link does not replace a file either.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => link_new(part, target),
        renamed => Ok(renamed?),
    }
}

fn link_new(part: &Path, target: &Path) -> io::Result<()> {
    std::fs::hard_link(part, target)?;
    std::fs::remove_file(part)
}

/// Keeps the file `target` under a second name.
fn keep(target: &Path, aside: PathBuf) -> io::Result<Before> {
    match std::fs::remove_file(&aside) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    match std::fs::hard_link(target, &aside) {
        Ok(()) => Ok(Before::Kept(aside)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Before::Nothing),
        Err(e) => {
            tracing::debug!(path = %target.display(), error = %e, "cannot keep a hard link to the replaced file");
            Ok(Before::Gone)
        }
    }
}

fn aside(part: &Path) -> PathBuf {
    part.with_file_name(REPLACED)
}

fn same_file(a: &Path, b: &Path) -> bool {
    let (Ok(a), Ok(b)) = (std::fs::metadata(a), std::fs::metadata(b)) else {
        return false;
    };
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_name_replaces_no_file() {
        let tmp = tempfile::tempdir().unwrap();
        let (part, target) = (tmp.path().join("part"), tmp.path().join("web.img"));
        for rename in [rename_new, link_new] {
            std::fs::write(&part, "new").unwrap();
            std::fs::write(&target, "other").unwrap();
            let e = rename(&part, &target).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(std::fs::read(&target).unwrap(), b"other");
            std::fs::remove_file(&target).unwrap();
            // A link that leads nowhere is a file, too.
            std::os::unix::fs::symlink("nowhere", &target).unwrap();
            assert!(rename(&part, &target).is_err());
            std::fs::remove_file(&target).unwrap();
            rename(&part, &target).unwrap();
            assert!(!part.exists());
            assert_eq!(std::fs::read(&target).unwrap(), b"new");
        }
    }

    #[test]
    fn a_rename_that_was_cut_off_between_its_steps_is_undone() {
        let tmp = tempfile::tempdir().unwrap();
        let (part, target) = (tmp.path().join("part"), tmp.path().join("web.img"));
        std::fs::write(&part, "new").unwrap();
        std::fs::hard_link(&part, &target).unwrap();
        finish_undoing(&part, &target).unwrap();
        assert!(part.exists() && !target.exists());
        Named::new(&part, &target, true).unwrap().entered();
        assert!(!part.exists() && target.exists());
    }
}
