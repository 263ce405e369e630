//! Recovery of an earlier run's transfers: complete files get their names, the others wait to be resumed.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use drover_index::ImageId;
use drover_net::Code;
use drover_storage::make_private_dir;
use drover_store::{BlockMap, ImageRecord};

use super::Site;
use super::arrived::Arrived;
use super::watch::{SendEvent, SendStep};
use crate::TeleportError;
use crate::files::remove_dir;
use crate::log::is_closed;
use crate::partials::{MAX_STOPPED, Partials};
use crate::transfer::{inspect, opening_of, reopen_closed, transfer_key};
use crate::transfers::is_removed;

/// Why an image is not delivered that another has overtaken.
const OUTDATED: &str = "a newer image has its name by now";

impl Site {
    /// Gives files that were complete when the site stopped their names, unless that would replace a newer image or
    /// one that is held, or their senders may no longer deliver them.
    pub(super) fn recover(&self, mut whole: Vec<Arrived>, repairs: &mut Vec<String>) {
        // Files that already have their names first, before another takes the name; then oldest to newest, so that
        // the newest wins.
        whole.sort_by_key(|a| (a.part().exists(), a.closing.added_unix, a.opening.image));
        for arrived in whole {
            let name = &arrived.opening.offer.name;
            let said = match self.recover_one(&arrived) {
                Ok(said) => format!("{name}: {said}"),
                Err(e) => format!("{name}: could not be delivered: {e}"),
            };
            repairs.push(said);
        }
    }

    fn recover_one(&self, arrived: &Arrived) -> Result<String, TeleportError> {
        self.finish_undoing(&arrived.dir, &arrived.opening.offer.name)?;
        let waits = arrived.part().exists();
        let (name, peer) = (&arrived.opening.offer.name, &arrived.opening.peer);
        let entered = self.images.by_name(name);
        if waits && entered.is_some_and(|entered| self.is_outdated(arrived, &entered)) {
            return self.give_up_name(arrived, OUTDATED);
        }
        let may = self.check_sender(peer, self.images.by_name(name).as_ref());
        if waits
            && let Err(e) = may
            && e.refusal() == Some(Code::Denied)
        {
            return self.give_up_name(arrived, &e.to_string());
        }
        let held = self.why_held(name);
        if let Some(why) = held.filter(|_| waits) {
            self.keep_as_source(arrived);
            return Ok(format!(
                "is whole, and waits for its name ({why}); it gets that when the site is started after that, or when it is sent again"
            ));
        }
        let stays = |entered: &ImageRecord| self.is_outdated(arrived, entered);
        match self.settle_unless(arrived, None, stays) {
            Ok(true) => {
                self.watched(&SendEvent {
                    peer: arrived.opening.peer,
                    peer_name: arrived.opening.peer_name.clone(),
                    from: String::new(),
                    image: arrived.opening.offer.name.clone(),
                    bytes: arrived.opening.offer.file_bytes,
                    time: Duration::ZERO,
                    what: SendStep::Delivered,
                });
                Ok("was whole when the site stopped; delivered now".into())
            }
            Ok(false) => Ok("its transfer had ended; cleaned up".into()),
            Err(e) => {
                if arrived.part().exists() {
                    // Another node may have delivered it a moment ago.
                    if self.images.by_name(name).is_some_and(|e| stays(&e)) {
                        return self.give_up_name(arrived, OUTDATED);
                    }
                    self.keep_as_source(arrived);
                }
                Err(e)
            }
        }
    }

    /// Whether the image that has the name is newer. Of two delivered in the same second, the one begun later is newer. Clocks of
    /// nodes differ: among them an image is only older if it was begun earlier, too, by the catalog's numbers. Nobody was told that
    /// what is given up for it had arrived.
    fn is_outdated(&self, arrived: &Arrived, entered: &ImageRecord) -> bool {
        let mine = (arrived.closing.added_unix, arrived.opening.image);
        let its = (entered.added_unix, entered.id.0);
        its > mine || (self.config.shared.is_some() && its.1 > mine.1)
    }

    /// Turns a complete file into a stopped transfer: it can be resumed or removed, and it expires.
    fn give_up_name(&self, arrived: &Arrived, why: &str) -> Result<String, TeleportError> {
        let name = &arrived.opening.offer.name;
        tracing::warn!(image = %name, from = arrived.opening.peer_name, why, "a complete image is not delivered");
        self.keep_as_source(arrived);
        reopen_closed(&arrived.dir, &self.config.disk)?;
        let id = ImageId(arrived.opening.image);
        self.remove_map(id);
        Ok(format!(
            "is whole, but not delivered: {why}; `drover transfers rm {name}` removes it"
        ))
    }

    fn keep_as_source(&self, arrived: &Arrived) {
        self.partials.add_stopped(
            ImageId(arrived.opening.image),
            arrived.opening.peer,
            &arrived.part(),
            arrived.layout.clone(),
            (*arrived.blocks).clone(),
        );
    }
}

/// Scans the transfers of an earlier run: returns the complete ones; the newest of the resumable ones, which serve as
/// sources, are added to `partials`. Deletes those whose log is unreadable.
pub(super) fn transfers_found(
    dir: &Path,
    partials: &Partials,
    repairs: &mut Vec<String>,
) -> Result<Vec<Arrived>, TeleportError> {
    make_private_dir(dir).map_err(TeleportError::file("create", dir))?;
    let failed = |e| TeleportError::file("list", dir)(e);
    let (mut whole, mut waiting) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if is_removed(&path) {
            remove_dir(&path);
            continue;
        }
        let log = path.join("log");
        if is_closed(&log)
            && let Some(Ok(arrived)) = inspect(&path)?.map(Arrived::of)
        {
            whole.push(arrived);
            continue;
        }
        let written = std::fs::metadata(&log).and_then(|about| about.modified());
        waiting.push((written.unwrap_or(SystemTime::UNIX_EPOCH), path));
    }
    // Only a limited number serve as sources; the maps of the others need not be in memory.
    waiting.sort_by_key(|(written, _)| Reverse(*written));
    for (nth, (_, path)) in waiting.into_iter().enumerate() {
        let opening = match nth < MAX_STOPPED {
            true => inspect(&path)?.map(|left| (left.opening.clone(), Some(left))),
            false => opening_of(&path).map(|opening| (opening, None)),
        };
        let Some((opening, left)) = opening else {
            repairs.push(format!(
                "{}: a transfer without a usable log; removed",
                path.display()
            ));
            remove_dir(&path);
            continue;
        };
        let path = adopt(dir, &path, &opening);
        if let Some(left) = left {
            let (image, part) = (ImageId(opening.image), path.join("image.part"));
            let mut blocks = BlockMap::default();
            left.data.iter().for_each(|d| blocks.push(d));
            partials.add_stopped(image, opening.peer, &part, left.layout, blocks);
        }
    }
    Ok(whole)
}

/// Renames the directory of a transfer made by an earlier version to its current name, unless that exists.
fn adopt(transfers: &Path, path: &Path, opening: &crate::transfer::Opening) -> PathBuf {
    let wanted = transfers.join(transfer_key(&opening.peer, &opening.offer.name));
    if wanted == path || wanted.exists() {
        return path.into();
    }
    match std::fs::rename(path, &wanted) {
        Ok(()) => wanted,
        Err(e) => {
            tracing::warn!(path = %path.display(), error = %e, "cannot rename");
            path.into()
        }
    }
}
