//! Unfinished transfers, as stored on disk.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use drover_core::BLOCK_SIZE_U64;
use drover_net::PeerKey;
use serde::{Deserialize, Serialize};

use crate::TeleportError;
use crate::log::is_closed;
use crate::transfer::opening_of;

/// Name of a transfer's directory while it is being removed.
pub(crate) const REMOVED: &str = "removed";

/// Sender shown for a transfer whose log cannot be read.
const UNKNOWN: &str = "unknown";

/// State of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransferState {
    /// Waiting for the source to resume it.
    Stopped,
    /// Being sent.
    UnderWay,
    /// The file is complete and gets its name at the next start of the site.
    Whole,
    /// The log cannot be read, so the sender is unknown. It is removed at the next start of the site.
    Damaged,
}

/// An unfinished transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unfinished {
    /// Unique key of the transfer.
    pub key: String,
    /// Name of the image to be delivered; for a damaged transfer, its key.
    pub name: String,
    /// The site's name for the sender; `unknown` for a damaged transfer.
    pub peer: String,
    /// The sender's public key; all zeros for a damaged transfer.
    pub sender: PeerKey,
    /// Its state.
    pub state: TransferState,
    /// Bytes that were received or found at the site.
    pub done_bytes: u64,
    /// Size of the image in bytes without holes.
    pub total_bytes: u64,
    /// Disk space used, in bytes.
    pub room_bytes: u64,
    /// When data last arrived, in seconds since 1970.
    pub touched_unix: i64,
}

/// The transfers in a work directory, most recently active first. Reads only the beginning of each log.
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

/// Describes the transfer in a directory; `None` when there is none, or it is being removed.
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

/// Describes a transfer whose log cannot be read; `None` when the site did not create the directory, or it is gone.
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

/// Whether this can be the key of a transfer. It comes from a caller, so it must not name any other file.
pub(crate) fn is_key(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether a directory under `transfers/` is already marked as removed.
pub(crate) fn is_removed(dir: &Path) -> bool {
    dir.extension().is_some_and(|e| e == REMOVED)
}
