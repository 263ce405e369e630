//! Transfers that were begun and are not finished, as they are on disk.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use drover_core::BLOCK_SIZE_U64;
use drover_net::PeerKey;
use serde::{Deserialize, Serialize};

use crate::TeleportError;
use crate::log::is_closed;
use crate::transfer::opening_of;

/// What the directory of a transfer is called while it is being removed.
pub(crate) const REMOVED: &str = "removed";

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
pub(crate) fn look(dir: &Path) -> Option<Unfinished> {
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
pub(crate) fn is_key(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether a directory under `transfers/` is only left to be removed.
pub(crate) fn is_removed(dir: &Path) -> bool {
    dir.extension().is_some_and(|e| e == REMOVED)
}
