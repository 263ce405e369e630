//! Operations on an overlay that is not open: inspecting it and discarding it.

use std::io;
use std::sync::Arc;

use drover_core::BLOCK_SIZE_U64;

use super::redo::{Redo, epoch_of};
use super::states::Logged;
use super::{DATA, Identity, LOCK, OverlayError, STATES};
use crate::remote::Epoch;
use drover_storage::chunk_log::{ChunkLog, ChunkLogError};
use drover_storage::{Access, Directory, Lock};

/// The name of a discarded overlay's block map log, kept until everything else is removed.
const DISCARDED: &str = "discarded";
/// A block map log that was being rewritten.
const STATES_NEW: &str = "states.new";

/// The contents of an overlay, according to its log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The image it belongs to.
    pub identity: Identity,
    /// Bytes that differ from the image, including a committed epoch that is not copied yet.
    pub changed: u64,
    /// The last committed epoch, as in [`super::Overlay::committed`].
    pub committed: Epoch,
}

/// Summarizes the overlay in a directory, even while it is open elsewhere and may be changing. None if there is no
/// overlay.
///
/// # Errors
/// [`OverlayError::Log`] when its log cannot be read.
pub fn summary(directory: &Arc<dyn Directory>) -> Result<Option<Summary>, OverlayError> {
    let opened = match ChunkLog::open(Arc::clone(directory), STATES) {
        Err(error) if error.is_missing() => return Ok(None),
        result => result?,
    };
    let Some(identity) = Identity::decode(opened.header()) else {
        let file = directory.describe(STATES);
        return Err(ChunkLogError::NotALog { file }.into());
    };
    let mut logged = Logged::default();
    opened.read(|record| logged.take(record, identity.size))?;
    let (more, sealed) = waiting(directory.as_ref(), &logged, &identity);
    let blocks = logged.states.count() + more;
    Ok(Some(Summary {
        changed: (blocks * BLOCK_SIZE_U64).min(identity.size),
        identity,
        committed: sealed.unwrap_or(Epoch(logged.epoch)),
    }))
}

/// Blocks changed only by a committed epoch that is not copied yet, and that epoch. A process that has the overlay open may be copying
/// it right now: then the log may count them already, or will at the next call.
fn waiting(
    directory: &dyn Directory,
    logged: &Logged,
    identity: &Identity,
) -> (u64, Option<Epoch>) {
    let names = directory.list().unwrap_or_default();
    let epochs = names.iter().filter_map(|name| epoch_of(name));
    let (mut blocks, mut sealed) = (0, None);
    for epoch in epochs.filter(|epoch| epoch.0 > logged.epoch) {
        let found = Redo::skim(directory, epoch, &identity.base, identity.size);
        let Ok(Some(states)) = found else {
            continue;
        };
        sealed = sealed.max(Some(epoch));
        let changed = states.recorded().map(|run| run.0);
        blocks += changed
            .map(|run| logged.states.unrecorded(run))
            .sum::<u64>();
    }
    (blocks, sealed)
}

/// Discards the overlay in a directory: atomically there is none, also after a crash, and then its space is freed.
/// [`was_discarded`] reports it until [`forget_discarded`] is called. Needs no disk space. False when there was none.
///
/// # Errors
/// [`OverlayError::Busy`]; [`OverlayError::Io`].
pub fn discard(directory: &dyn Directory) -> Result<bool, OverlayError> {
    let _lock = take(directory)?;
    let there = match directory.rename(STATES, DISCARDED) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(failed(directory, "rename", STATES)(error)),
    };
    if there {
        directory.sync().map_err(failed(directory, "sync", ""))?;
    }
    if there || has_note(directory)? {
        sweep(directory)?;
    }
    Ok(there)
}

/// Whether an overlay was discarded and [`forget_discarded`] has not been called yet.
///
/// # Errors
/// [`OverlayError::Io`].
pub fn was_discarded(directory: &dyn Directory) -> Result<bool, OverlayError> {
    has_note(directory)
}

/// Completes [`discard`]: removes everything left of the overlay.
///
/// # Errors
/// [`OverlayError::Busy`]; [`OverlayError::Io`].
pub fn forget_discarded(directory: &dyn Directory) -> Result<(), OverlayError> {
    let _lock = take(directory)?;
    forget(directory)
}

/// The same for a caller that holds the lock. An overlay may be created once this returns.
pub(super) fn forget(directory: &dyn Directory) -> Result<(), OverlayError> {
    if !has_note(directory)? {
        return Ok(());
    }
    sweep(directory)?;
    remove(directory, DISCARDED)?;
    directory.sync().map_err(failed(directory, "sync", ""))
}

fn take(directory: &dyn Directory) -> Result<Box<dyn Send + Sync>, OverlayError> {
    directory
        .lock(LOCK, Lock::Exclusive)
        .map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => OverlayError::Busy {
                directory: directory.describe(""),
            },
            _ => failed(directory, "lock", LOCK)(error),
        })
}

fn has_note(directory: &dyn Directory) -> Result<bool, OverlayError> {
    match directory.open(DISCARDED, Access::Read) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(directory, "open", DISCARDED)(error)),
    }
}

/// Removes all but the discard marker. Epoch files must be gone durably before a new overlay could mistake them for its
/// own.
fn sweep(directory: &dyn Directory) -> Result<(), OverlayError> {
    let names = directory
        .list()
        .map_err(failed(directory, "list the files of", ""))?;
    for name in names {
        if epoch_of(&name).is_some() || name == DATA || name == STATES_NEW {
            remove(directory, &name)?;
        }
    }
    directory.sync().map_err(failed(directory, "sync", ""))
}

fn remove(directory: &dyn Directory, name: &str) -> Result<(), OverlayError> {
    match directory.remove(name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed(directory, "remove", name)(error))
        }
        _ => Ok(()),
    }
}

fn failed(
    directory: &dyn Directory,
    doing: &'static str,
    name: &str,
) -> impl Fn(io::Error) -> OverlayError + use<> {
    OverlayError::io(doing, &directory.describe(name))
}
