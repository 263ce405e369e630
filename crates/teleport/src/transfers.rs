//! Transfers that were begun and are not finished: what is left of them at a site, how far they
//! are, and how they go.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_index::ImageId;
use drover_net::{Code, PeerKey};
use serde::{Deserialize, Serialize};

use crate::TeleportError;
use crate::log::is_closed;
use crate::site::{Arrived, Site, remove_dir, unix_now};
use crate::transfer::{inspect, opening_of};

/// What the directory of a transfer is called while it is being removed.
const REMOVED: &str = "removed";

/// Who sends what cannot be read.
const UNKNOWN: &str = "unknown";

/// In what state a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransferState {
    /// It waits for the source to send again.
    Stopped,
    /// Its source is sending.
    UnderWay,
    /// The file is whole and gets its name when the site is started next.
    Whole,
    /// Its log cannot be read: who sends what is not known. It is removed when the site is started next.
    Damaged,
}

/// A transfer that is not finished.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unfinished {
    /// What names it, whatever else has the same name.
    pub key: String,
    /// What the image will be called; of a damaged one its key.
    pub name: String,
    /// Who sends it, as the site calls them; `unknown` of a damaged one.
    pub peer: String,
    /// Their key; all zeros of a damaged one.
    pub sender: PeerKey,
    /// In what state it is.
    pub state: TransferState,
    /// Bytes that have arrived, or were found at the site.
    pub done_bytes: u64,
    /// Bytes of the image that are not holes.
    pub total_bytes: u64,
    /// Bytes of disk that it takes.
    pub room_bytes: u64,
    /// When something arrived last, in seconds since 1970.
    pub touched_unix: i64,
}

/// What is in a work directory, the last touched first. Reads the front of each log, no more.
///
/// # Errors
/// When the directory cannot be listed.
pub fn unfinished(work_dir: &Path) -> Result<Vec<Unfinished>, TeleportError> {
    let dir = work_dir.join("transfers");
    let entries = match std::fs::read_dir(&dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(TeleportError::file("list", &dir))?,
    };
    let mut all: Vec<_> = entries
        .filter_map(|entry| look(&entry.ok()?.path()))
        .collect();
    all.sort_by(|a, b| (b.touched_unix, &a.name).cmp(&(a.touched_unix, &b.name)));
    Ok(all)
}

/// What a directory holds; `None` when it is no transfer, or is going.
fn look(dir: &Path) -> Option<Unfinished> {
    let key = dir.file_name()?.to_str().filter(|_| !is_removed(dir))?;
    let log = dir.join("log");
    let (Some(opening), Ok(logged)) = (opening_of(dir), std::fs::metadata(&log)) else {
        return look_at_damaged(dir, key);
    };
    let part = std::fs::metadata(dir.join("image.part")).ok();
    let room = part.as_ref().map_or(0, |p| p.blocks() * 512);
    let total = opening.offer.walk_blocks * BLOCK_SIZE_U64;
    let state = match is_closed(&log) {
        true => TransferState::Whole,
        false => TransferState::Stopped,
    };
    Some(Unfinished {
        key: key.into(),
        name: opening.offer.name.to_string(),
        peer: opening.peer_name,
        sender: opening.peer,
        state,
        done_bytes: room.min(total),
        total_bytes: total,
        room_bytes: room + logged.blocks() * 512,
        touched_unix: part.map_or(0, |p| p.mtime()).max(logged.mtime()),
    })
}

/// A directory of that key whose log says nothing; `None` when it is not one that a site made, or is gone.
fn look_at_damaged(dir: &Path, key: &str) -> Option<Unfinished> {
    let of_dir = std::fs::symlink_metadata(dir).ok()?;
    if !of_dir.is_dir() || !is_key(key) {
        return None;
    }
    let files = std::fs::read_dir(dir).ok()?.flatten();
    let about: Vec<_> = files.filter_map(|file| file.metadata().ok()).collect();
    let room = about.iter().map(|m| m.blocks() * 512).sum();
    let touched = about.iter().map(MetadataExt::mtime).max();
    Some(Unfinished {
        key: key.into(),
        name: key.into(),
        peer: UNKNOWN.into(),
        sender: PeerKey([0; 32]),
        state: TransferState::Damaged,
        done_bytes: 0,
        total_bytes: 0,
        room_bytes: room,
        touched_unix: touched.unwrap_or(of_dir.mtime()),
    })
}

/// Whether that can be the key of a transfer. It comes from a caller, and names no file but its own.
fn is_key(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether a directory under `transfers/` is only left to be removed.
pub(crate) fn is_removed(dir: &Path) -> bool {
    dir.extension().is_some_and(|e| e == REMOVED)
}

impl Site {
    /// The transfers that are not finished, the last touched first.
    ///
    /// # Errors
    /// When their directory cannot be listed.
    pub fn unfinished(&self) -> Result<Vec<Unfinished>, TeleportError> {
        let mut all = unfinished(&self.config.work_dir)?;
        // One that begins just now has no log yet.
        all.retain(|t| t.state != TransferState::Damaged || !self.active.has(&t.key));
        for transfer in &mut all {
            if !self.active.has(&transfer.key) {
                continue;
            }
            transfer.state = TransferState::UnderWay;
            if let Some(done) = self.done_blocks(transfer) {
                transfer.done_bytes = (done * BLOCK_SIZE_U64).min(transfer.total_bytes);
            }
        }
        Ok(all)
    }

    fn done_blocks(&self, transfer: &Unfinished) -> Option<u64> {
        let sessions = self.sessions.lock();
        let mut of_peer = sessions.values().filter(|s| s.is_of(&transfer.sender));
        let status = of_peer.find_map(|s| s.status().filter(|t| t.name == transfer.name))?;
        Some(status.done_blocks)
    }

    /// Removes what is left of a transfer that has stopped. Blocks the thread.
    ///
    /// # Errors
    /// When there is none of that key, or it is under way or whole.
    pub fn remove_transfer(&self, key: &str) -> Result<Unfinished, TeleportError> {
        self.remove_if(key, |_| true)?
            .ok_or_else(|| none_of_key(key))
    }

    /// Removes the transfers to which nothing has come for so long; returns them.
    ///
    /// # Errors
    /// When their directory cannot be listed.
    pub fn expire_transfers(&self, after: Duration) -> Result<Vec<Unfinished>, TeleportError> {
        let after = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
        let oldest = unix_now().saturating_sub(after);
        let expired = |t: &Unfinished| t.touched_unix < oldest;
        let mut out = Vec::new();
        for transfer in self.unfinished()?.into_iter().filter(expired) {
            // One that is resumed just now, or is whole, stays.
            match self.remove_if(&transfer.key, expired) {
                Ok(removed) => out.extend(removed),
                Err(e) => tracing::debug!(image = transfer.name, error = %e, "does not expire"),
            }
        }
        Ok(out)
    }

    /// Removes a transfer if it still is as it must be, now that nobody can take it up.
    fn remove_if(
        &self,
        key: &str,
        wanted: impl FnOnce(&Unfinished) -> bool,
    ) -> Result<Option<Unfinished>, TeleportError> {
        if !is_key(key) {
            return Ok(None);
        }
        let refused = |message: String| TeleportError::refused(Code::Denied, message);
        let dir = self.transfer_dir(key);
        let claim = self.active.claim(key);
        let Some(transfer) = look(&dir) else {
            return Ok(None);
        };
        let Some(_claim) = claim else {
            return Err(refused(format!(
                "{} is being sent by {} just now; stop that first",
                transfer.name, transfer.peer
            )));
        };
        if transfer.state == TransferState::Whole {
            return Err(refused(format!(
                "{} from {} is whole and gets its name when the site is started again",
                transfer.name, transfer.peer
            )));
        }
        if !wanted(&transfer) {
            return Ok(None);
        }
        let image = opening_of(&dir).map(|o| ImageId(o.image));
        let gone = self.set_aside(&dir)?;
        if let Some(image) = image {
            self.forget_partial(image);
        }
        // Nobody finds it any more: a source that comes back begins anew, beside this.
        drop(_claim);
        remove_dir(&gone);
        Ok(Some(transfer))
    }

    /// A whole file that has its name already, but could not be entered in the catalog, is entered now:
    /// else the file would be there under what the catalog says of the one before it.
    pub(crate) fn settle_renamed(&self, dir: &Path, name: &ImageName) -> Result<(), TeleportError> {
        self.finish_undoing(dir, name)?;
        if dir.join("image.part").exists() || !is_closed(&dir.join("log")) {
            return Ok(());
        }
        match inspect(dir)?.map(Arrived::of) {
            Some(Ok(arrived)) => self.settle(&arrived).map(drop),
            _ => Ok(()),
        }
    }

    /// Takes the directory of a transfer out of the way in one step.
    fn set_aside(&self, dir: &Path) -> Result<PathBuf, TeleportError> {
        let gone = dir.with_extension(REMOVED);
        remove_dir(&gone);
        std::fs::rename(dir, &gone).map_err(TeleportError::file("rename", dir))?;
        Ok(gone)
    }
}

fn none_of_key(key: &str) -> TeleportError {
    let message = format!("there is no unfinished transfer {key:?} here");
    TeleportError::refused(Code::NotFound, message)
}
