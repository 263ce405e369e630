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
//! `sealed`, `states`. The base is read under `plain` and `ranges` when part of a block is written, so it should be local.

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
mod logged;
mod open;
mod ranges;
mod redo;
mod saving;
mod states;

pub use aside::{Summary, discard, forget_discarded, summary, was_discarded};
pub use error::OverlayError;

use ranges::Ranges;
use redo::Redo;
use states::{BlockState, States};

/// The largest device, in bytes: what bounds the states that are in memory.
pub const MAX_SIZE: u64 = 64 << 40;
/// The longest read or write, in bytes.
const LONGEST: u32 = 64 << 20;
/// The longest name of a base, in bytes.
const MAX_NAME: usize = 1024;

const DATA: &str = "data";
const STATES: &str = "states";
const LOCK: &str = "lock";

/// Of what image an overlay is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The digest of the image: the same bytes have the same.
    pub base: Digest,
    /// Bytes of the device.
    pub size: u64,
    /// What people call it; for messages, and kept as it was when the overlay was made. At most 1024 bytes count.
    pub name: String,
}

/// How an overlay is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Nothing is changed, not even to tidy up; others may have it open in the same way.
    pub read_only: bool,
    /// Bytes that a staged epoch may have on disk.
    pub stage_limit: u64,
    /// Which run of the machine this is: what was staged in the same one need not be compared with its checksums when the
    /// overlay is opened again. Zeros: not known.
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

/// A copy-on-write device over a base that is only read. Dropping it flushes it, as far as that can be done.
pub struct Overlay {
    base: Arc<dyn BlockDevice>,
    directory: Arc<dyn Directory>,
    data: Box<dyn File>,
    size: u64,
    identity: Identity,
    options: Options,

    /// The epoch that is being collected.
    staging: Mutex<Staging>,
    /// Held while one that counts is copied.
    settling: Mutex<Settling>,
    /// Shared by every plain change while it lasts; exclusive while an epoch is copied or the log rewritten.
    plain: RwLock<()>,
    saving: Mutex<Saving>,
    ranges: Ranges,
    /// The epoch that counts but is not copied yet; reads look here first.
    sealed: RwLock<Option<Arc<Redo>>>,
    states: RwLock<States>,

    /// The last epoch that counts.
    committed: AtomicU64,
    /// An epoch is being staged: plain changes are refused.
    staged: AtomicBool,
    /// `sealed` holds one: plain changes wait.
    unsettled: AtomicBool,
    /// A plain change has returned since the last flush began.
    unflushed: AtomicBool,
    /// The log says that plain changes may have been made.
    marked: AtomicBool,
    /// Why nothing can be made durable any more.
    broken: RwLock<Option<String>>,
    /// Held as long as the overlay is.
    _lock: Box<dyn Send + Sync>,
}

#[derive(Default)]
struct Staging {
    /// Not sealed; always of an epoch after the last that counts.
    redo: Option<Redo>,
}

#[derive(Default)]
struct Settling {
    /// When copying failed last, and why: plain changes do not try it more often than [`epochs::RETRY`].
    failed: Option<(Instant, DeviceError)>,
}

struct Saving {
    /// None when the overlay is open for reading only.
    log: Option<ChunkLog>,
}

impl Overlay {
    /// The last epoch that counts. It also grows by one with a flush of plain changes, and when an overlay is opened
    /// again that plain changes were made to and not flushed: whoever remembers an epoch and finds it again knows that
    /// the device is what it was.
    #[must_use]
    pub fn committed(&self) -> Epoch {
        Epoch(self.committed.load(Ordering::Acquire))
    }

    /// Bytes of the device that are not the base's any more: here, or zeroed.
    #[must_use]
    pub fn changed(&self) -> u64 {
        let sealed = self.sealed.read();
        let states = self.states.read();
        let count = |blocks: std::ops::Range<u64>| {
            let runs = states.runs(blocks).filter(|run| run.1 == BlockState::Base);
            runs.map(|run| run.0.end - run.0.start).sum::<u64>()
        };
        let pieces = sealed.iter().flat_map(|redo| redo.all());
        let more: u64 = pieces.map(|piece| count(piece.0)).sum();
        ((states.count() + more) * BLOCK_SIZE_U64).min(self.size)
    }

    /// Of what image this is an overlay, as it was said when it was made.
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
        // Nobody asked for it, so nobody is told: what was not flushed may be lost.
        if let Err(error) = self.save().and_then(|()| self.unmark()) {
            tracing::warn!(%error, "an overlay was not closed cleanly");
        }
    }
}

#[cfg(test)]
mod tests;
