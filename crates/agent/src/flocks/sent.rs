//! The flocks that this site sends: what is known of each, so that they can be listed, and so that sending one again leaves out
//! what has not changed. The file's format is in `docs/format/flock.md`.

use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use drover_core::{Digest, ImageName};
use drover_net::PeerKey;
use drover_storage::{Envelope, make_private_dir, open_private};
use drover_store::Peer;
use drover_teleport::{FlockRecord, FlockState, ImageState, SendItem, source_stamp};
use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Result};
use crate::home::Home;
use crate::text::{clean, now_unix};

/// Maximum number of flocks that are remembered; beyond it the oldest that are not being sent are forgotten.
pub const MAX_SENT: usize = 256;

const FILE: Envelope = Envelope {
    magic: *b"DRVRFLS\0",
    version: 2,
    max_bytes: 2 << 20,
};

/// The longest path that is kept, in bytes.
const MAX_PATH: usize = 4096;

/// A flock that was sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentFlock {
    /// What the destination said of it, or, until it has, what is known here.
    pub record: FlockRecord,
    /// Where its images come from, in the order of the record.
    pub sources: Vec<Source>,
}

/// The source of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The file, for people.
    pub path: String,
    /// As it was before it was sent; none if its changes cannot be told by that.
    pub stamp: Option<Digest>,
}

impl SentFlock {
    /// Reads the bytes of its file; none if they are not one.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let sent: SentFlock = drover_net::decode(FILE.open(bytes).ok()?).ok()?;
        (sent.sources.len() == sent.record.images.len()).then_some(sent)
    }

    fn write(&self, path: &Path) -> Result<()> {
        let written = FILE.write(path, &drover_net::encode(self));
        written.with_context(|| format!("cannot write {}", path.display()))
    }
}

/// A flock that this process sends. No other process sends it to the same peer meanwhile.
pub struct Sending {
    path: PathBuf,
    _lock: File,
    before: Option<SentFlock>,
}

impl Sending {
    /// Prepares to send a flock to a peer.
    ///
    /// # Errors
    /// When another process sends it, or the directory cannot be used.
    pub fn begin(home: &Home, peer: &Peer, name: &ImageName) -> Result<Sending> {
        let dir = directory(home);
        make_private_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let path = dir.join(file_name(&peer.key, name));
        let lock_path = path.with_added_extension("lock");
        let cannot = || format!("cannot lock {}", lock_path.display());
        let lock = open_private(&lock_path).with_context(cannot)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let text = format!(
                    "flock {name} is being sent to {} by another process",
                    peer.name
                );
                return Err(Error::refused(text));
            }
            Err(TryLockError::Error(e)) => return Err(e).with_context(cannot),
        }
        let bytes = FILE.read(&path);
        let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
        forget_oldest(&dir, &path);
        Ok(Sending {
            before: bytes.as_deref().and_then(SentFlock::parse),
            path,
            _lock: lock,
        })
    }

    /// The digest of each image that need not be sent: its file is as it was when it was delivered, and the peer `has` an image of
    /// that name and digest.
    pub fn unchanged(
        &self,
        items: &[SendItem],
        stamps: &[Option<Digest>],
        has: &HashMap<String, Digest>,
    ) -> Vec<Option<Digest>> {
        let before = |name: &ImageName| {
            let before = self.before.as_ref()?;
            let mut images = before.record.images.iter().zip(&before.sources);
            images.find(|(image, _)| image.name == *name)
        };
        let of = |(item, stamp): (&SendItem, &Option<Digest>)| {
            let (image, source) = before(&item.name)?;
            let whole = matches!(image.state, ImageState::Delivered | ImageState::Unchanged);
            let same = stamp.is_some() && source.stamp == *stamp;
            let there = has.get(item.name.as_str()) == Some(&image.digest);
            (whole && same && there).then_some(image.digest)
        };
        items.iter().zip(stamps).map(of).collect()
    }

    /// Records how it stands.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn record(&self, sent: &SentFlock) -> Result<()> {
        sent.write(&self.path)
    }
}

/// The stamp of each image's file, as it is before it is sent. Reads headers only.
pub fn stamps(items: &[SendItem]) -> Vec<Option<Digest>> {
    let of = |item: &SendItem| source_stamp(item).ok().flatten();
    items.iter().map(of).collect()
}

/// The text of a path in a record.
#[must_use]
pub fn path_text(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let mut text = clean(&absolute.display().to_string());
    text.truncate(text.floor_char_boundary(MAX_PATH));
    text
}

/// The flocks that this site sends or has sent, those that changed last first, and whether each is being sent now.
///
/// # Errors
/// When the directory cannot be listed.
pub fn sent(home: &Home) -> Result<Vec<(SentFlock, bool)>> {
    let mut all: Vec<(SentFlock, bool)> = records(&directory(home))?
        .into_iter()
        .map(|(path, sent)| {
            let busy = is_locked(&path);
            (sent, busy)
        })
        .collect();
    all.sort_by(|(a, _), (b, _)| {
        let of = |sent: &SentFlock| sent.record.touched_unix;
        (of(b), &a.record.name).cmp(&(of(a), &b.record.name))
    });
    Ok(all)
}

fn directory(home: &Home) -> PathBuf {
    home.dir().join("flocks-sent")
}

fn file_name(peer: &PeerKey, name: &ImageName) -> String {
    let key: String = peer.0[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("{name}@{key}")
}

/// Records that can be read.
fn records(dir: &Path) -> Result<Vec<(PathBuf, SentFlock)>> {
    let cannot = || format!("cannot list {}", dir.display());
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(cannot)?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let path = entry.with_context(cannot)?.path();
        let is_lock = path.extension().is_some_and(|e| e == "lock");
        if let Ok(Some(bytes)) = FILE.read(&path)
            && let Some(sent) = SentFlock::parse(&bytes).filter(|_| !is_lock)
        {
            all.push((path, sent));
        }
    }
    Ok(all)
}

fn is_locked(path: &Path) -> bool {
    let lock = File::open(path.with_added_extension("lock"));
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Forgets the oldest so that there is room for one more.
fn forget_oldest(dir: &Path, but: &Path) {
    let Ok(mut all) = records(dir) else { return };
    all.retain(|(path, _)| path != but);
    all.sort_by_key(|(_, sent)| sent.record.touched_unix);
    let excess = (all.len() + 1).saturating_sub(MAX_SENT);
    for (path, _) in all.iter().filter(|(path, _)| !is_locked(path)).take(excess) {
        // Not the lock: another process may be about to take it.
        let _ = std::fs::remove_file(path);
    }
}

/// The record of a flock that begins: nothing of it is known yet at the destination.
#[must_use]
pub fn beginning(peer: &Peer, name: &ImageName, atomic: bool) -> FlockRecord {
    let now = now_unix();
    FlockRecord {
        name: name.clone(),
        id: [0; 16],
        peer: peer.key,
        peer_name: peer.name.clone(),
        atomic,
        state: FlockState::Open,
        begun_unix: now,
        touched_unix: now,
        images: Vec::new(),
        why: String::new(),
        nodes: Default::default(),
    }
}

#[cfg(test)]
mod tests;
