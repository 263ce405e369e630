//! A copy-on-write device: writes go to files in a directory, the base image is never changed.
//!
//! Each block of 4096 bytes is read from the base, from the overlay's data (a sparse file, at the block's own offset),
//! or is zero. This block map is kept in memory and, durably, in a [chunk log](drover_storage::chunk_log). Files, and
//! what a crash leaves at each moment: `docs/format/overlay.md`.
//!
//! There are two ways to write. As any [`BlockDevice`]: a flush makes earlier writes durable; without one, any of
//! their sectors may be lost. And by epochs ([`Overlay::stage`], [`Overlay::commit`]), used by a remote cache's
//! write-back: an epoch is applied as a whole or not at all, for readers and after crashes.
//!
//! **Reads during a commit.** A commit first seals the epoch in its redo file, then atomically makes reads look into
//! the sealed redo before the block map. Only then is the epoch copied into the data; no reader sees that, since each
//! block being copied is still read from the redo. When data and block map are durable, reads switch back. The lock is
//! held only for the switches and by a request while it reads the overlay's own files (the base does not change), so
//! each request sees all of an epoch or none of it. If copying fails, for example because the disk is full, the epoch
//! is committed all the same and reads continue from the redo; writes fail until the copying succeeds.
//!
//! The next epoch may be staged meanwhile; it is sealed once the copying has finished.
//!
//! **Locks**, in the order in which they may be held together: `staging`, `settling`, `plain`, `saving`, `ranges`,
//! `sealed`, `states`. The base is read under `plain` and `ranges` when part of a block is written, so it should be
//! local.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use drover_core::{BLOCK_SIZE_U64, BlockDevice, DeviceError, Digest};
use parking_lot::{Mutex, RwLock};

use crate::remote::Epoch;
use drover_storage::chunk_log::ChunkLog;
use drover_storage::{Directory, File};

mod aside;
mod blocks;
mod epochs;
mod error;
mod open;
mod ranges;
mod redo;
mod saving;
mod space;
mod states;

pub use aside::{Summary, discard, forget_discarded, summary, was_discarded};
pub use error::OverlayError;

use ranges::Ranges;
use redo::Redo;
use states::States;

/// The largest device, in bytes: bounds the block map in memory.
pub const MAX_SIZE: u64 = 64 << 40;
/// The longest read or write, in bytes.
const MAX_REQUEST: u32 = 64 << 20;
/// The longest name of a base, in bytes.
const MAX_NAME: usize = 1024;

const DATA: &str = "data";
const STATES: &str = "states";
const LOCK: &str = "lock";

/// The image an overlay belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The digest of the image's contents.
    pub base: Digest,
    /// Size of the device in bytes.
    pub size: u64,
    /// A display name for messages, kept as it was when the overlay was created. Truncated to 1024 bytes.
    pub name: String,
}

/// How an overlay is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Nothing is changed, not even by recovery; others may have it open read-only too.
    pub read_only: bool,
    /// Limit of the bytes on disk for a staged epoch.
    pub stage_limit: u64,
    /// Identifies the current boot of the machine: data staged in the same boot need not be verified against checksums
    /// when the overlay is reopened. Zeros: unknown.
    pub boot: [u8; 16],
}

impl Default for Options {
    fn default() -> Self {
        Self {
            read_only: false,
            stage_limit: u64::MAX,
            boot: [0; 16],
        }
    }
}

/// A copy-on-write device over a read-only base. Dropping it flushes it, best effort.
pub struct Overlay {
    base: Arc<dyn BlockDevice>,
    directory: Arc<dyn Directory>,
    data: Box<dyn File>,
    size: u64,
    identity: Identity,
    options: Options,

    /// The epoch being staged.
    staging: Mutex<Staging>,
    /// Held while a committed epoch is copied.
    settling: Mutex<Settling>,
    /// Held shared by every plain change; exclusively while an epoch is copied or the log rewritten.
    plain: RwLock<()>,
    saving: Mutex<Saving>,
    ranges: Ranges,
    /// The committed epoch that is not copied yet; reads consult it first.
    sealed: RwLock<Option<Arc<Redo>>>,
    states: RwLock<States>,

    /// The last committed epoch.
    committed: AtomicU64,
    /// An epoch is being staged: plain changes are refused.
    staged: AtomicBool,
    /// `sealed` is occupied: plain changes wait.
    unsettled: AtomicBool,
    /// A plain change has returned since the last flush began.
    unflushed: AtomicBool,
    /// The log records that plain changes may have been made.
    marked: AtomicBool,
    /// Why nothing can be made durable any more.
    broken: RwLock<Option<String>>,
    /// The directory lock, held for the overlay's lifetime.
    _lock: Box<dyn Send + Sync>,
}

#[derive(Default)]
struct Staging {
    /// Not sealed; its epoch is always after the last committed one.
    redo: Option<Redo>,
}

#[derive(Default)]
struct Settling {
    /// When copying last failed, and why: plain changes retry it no more often than every [`epochs::RETRY`].
    failed: Option<(Instant, DeviceError)>,
}

struct Saving {
    /// None when the overlay is open read-only.
    log: Option<ChunkLog>,
}

impl Overlay {
    /// The last committed epoch. It also grows by one with each flush of plain changes (one that is not asked for after very many of them), and on reopening after plain
    /// changes that were not flushed: an unchanged epoch means unchanged contents.
    #[must_use]
    pub fn committed(&self) -> Epoch {
        Epoch(self.committed.load(Ordering::Acquire))
    }

    /// Bytes that differ from the base: written here, or zeroed.
    #[must_use]
    pub fn changed(&self) -> u64 {
        let sealed = self.sealed.read();
        let states = self.states.read();
        let pieces = sealed.iter().flat_map(|redo| redo.all());
        let more: u64 = pieces.map(|piece| states.unrecorded(piece.0)).sum();
        ((states.count() + more) * BLOCK_SIZE_U64).min(self.size)
    }

    /// The identity of the base image, as given at creation.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Fails when nothing can be changed (any more).
    fn writable(&self) -> Result<(), OverlayError> {
        if self.options.read_only {
            return Err(OverlayError::ReadOnly);
        }
        match &*self.broken.read() {
            None => Ok(()),
            Some(why) => Err(OverlayError::Broken {
                directory: self.directory.describe(""),
                why: why.clone(),
            }),
        }
    }

    fn io(
        &self,
        doing: &'static str,
        name: &str,
    ) -> impl Fn(std::io::Error) -> OverlayError + use<> {
        OverlayError::io(doing, &self.directory.describe(name))
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        if self.writable().is_err() {
            return;
        }
        // There is no caller to report to: unflushed changes may be lost.
        if let Err(error) = self.save().and_then(|()| self.unmark()) {
            tracing::warn!(%error, "an overlay was not closed cleanly");
        }
    }
}

#[cfg(test)]
mod tests;
