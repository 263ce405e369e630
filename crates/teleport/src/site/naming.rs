//! How a whole file gets its name: what had the name is kept until the catalog has taken the new image in, and gets
//! it back when that fails. So nobody finds a file under what the catalog says of another one.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use drover_core::ImageName;
use drover_storage::sync_parent;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::Site;
use crate::TeleportError;
use drover_store::ImageRecord;

/// What keeps the replaced file, beside the new one.
const REPLACED: &str = "replaced";

/// A file that has got its name, but is not entered yet.
pub(super) struct Named {
    part: PathBuf,
    target: PathBuf,
    before: Before,
}

/// What had the name before.
enum Before {
    Nothing,
    /// It is here meanwhile.
    Kept(PathBuf),
    /// It could not be kept: the file system knows no second names.
    Gone,
}

impl Named {
    /// Gives `part` the name `target`: only if nothing has it when `fresh`, else in place of what does. Durable when it
    /// returns; when it fails all is as it was.
    pub(super) fn new(part: &Path, target: &Path, fresh: bool) -> Result<Self, TeleportError> {
        let failed = TeleportError::file("rename to", target);
        let named = || {
            finish_undoing(part, target)?;
            let before = match fresh {
                true => Before::Nothing,
                false => keep(target, aside(part))?,
            };
            match fresh {
                true => renameat_with(CWD, part, CWD, target, RenameFlags::NOREPLACE)?,
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
            return Err(TeleportError::file("sync the directory of", target)(e));
        }
        Ok(named)
    }

    /// The image is entered: what it replaced goes.
    pub(super) fn entered(self) {
        if let Before::Kept(replaced) = self.before {
            super::remove_dir(&replaced);
        }
    }

    /// The image was not entered: what had the name gets it back, and the new file is where it was.
    pub(super) fn undo(self) {
        let undone = match &self.before {
            // Durable before the other is: no crash may leave the new file without a name.
            Before::Kept(replaced) => std::fs::hard_link(&self.target, &self.part)
                .and_then(|()| sync_parent(&self.part))
                .and_then(|()| std::fs::rename(replaced, &self.target)),
            Before::Nothing => std::fs::rename(&self.target, &self.part),
            Before::Gone => Err(io::ErrorKind::Unsupported.into()),
        };
        if let Err(e) = undone.and_then(|()| sync_parent(&self.target)) {
            tracing::error!(path = %self.target.display(), error = %e, "a file that is not in the catalog could not be put aside; send it again");
        }
    }
}

impl Site {
    /// A site that stopped while it undid a naming has left the new file under both names: what had the name before
    /// gets it back, since nothing may be written to the other then.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn finish_undoing(&self, dir: &Path, name: &ImageName) -> Result<(), TeleportError> {
        let (part, target) = (dir.join("image.part"), self.image_path(name));
        finish_undoing(&part, &target).map_err(TeleportError::file("rename to", &target))
    }

    /// Whether the catalog took an image in although it said that it failed.
    pub(super) fn is_entered(&self, record: &ImageRecord) -> bool {
        let now = self.catalog.by_name(&record.name);
        now.is_ok_and(|now| now.is_some_and(|now| now.id == record.id))
    }
}

fn finish_undoing(part: &Path, target: &Path) -> io::Result<()> {
    let aside = aside(part);
    if same_file(part, target) && aside.exists() {
        std::fs::rename(aside, target)?;
    }
    Ok(())
}

/// Keeps what is called `target` under another name too.
fn keep(target: &Path, aside: PathBuf) -> io::Result<Before> {
    match std::fs::remove_file(&aside) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    match std::fs::hard_link(target, &aside) {
        Ok(()) => Ok(Before::Kept(aside)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Before::Nothing),
        Err(e) => {
            tracing::debug!(path = %target.display(), error = %e, "cannot be kept until what replaces it is entered");
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
