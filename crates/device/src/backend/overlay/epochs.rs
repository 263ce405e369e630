//! Epochs: staged in a redo file, sealed at a commit, then copied into the data.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::{BLOCK_SIZE_U64, DeviceError};

use super::redo::{Redo, SLAB, SealError, is_whole};
use super::states::BlockState;
use super::{DATA, Overlay, OverlayError, Settling, Staging};
use crate::remote::{Change, Epoch};
use drover_storage::read_exact_at;

/// How long plain changes are refused after copying an epoch has failed, before it is tried again.
pub(super) const RETRY: Duration = Duration::from_millis(500);

/// Bytes that the log of an epoch may have, beside those for each block of the device: who keeps to the rules sends no block
/// more than a few times.
const MIN_LOG: u64 = 1 << 20;
const LOG_OF_A_BLOCK: u64 = 128;

/// Runs whose states are written down at once.
const RUNS_AT_ONCE: usize = 1 << 16;

/// How many epochs may be chosen and given up before one is committed.
const MAX_SKIPPED: u64 = 1 << 20;

impl Overlay {
    /// Collects changes that count once `epoch` is committed, and are not seen before. Later ones win. A later epoch takes
    /// the place of this one. After a crash those stay staged that had come to the disk ([`Overlay::staged_runs`]). Until the epoch is committed or abandoned, plain changes are refused as [`DeviceError::Unavailable`]; those
    /// that were not flushed are flushed now, which makes the next epoch another one.
    ///
    /// # Errors
    /// [`OverlayError::WrongEpoch`] unless `epoch` is after the last that counts, or when a later one is being staged;
    /// [`OverlayError::BadChange`]; no room:
    /// [`OverlayError::TooLarge`], [`OverlayError::Io`]. Of the blocks that `changes` cover none need be staged then; the
    /// others are as they were.
    pub fn stage(&self, epoch: Epoch, changes: &[Change]) -> Result<(), OverlayError> {
        self.writable()?;
        for change in changes {
            let (offset, length) = (change.offset(), change.covers());
            if !is_whole(offset, length, self.size) {
                return Err(OverlayError::BadChange {
                    offset,
                    length,
                    size: self.size,
                });
            }
        }
        let mut staging = self.staging.lock();
        self.check_next(epoch)?;
        match staging.redo.as_ref().map(|redo| redo.epoch) {
            Some(staged) if staged > epoch => {
                return Err(OverlayError::WrongEpoch {
                    asked: epoch,
                    committed: staged,
                });
            }
            // Whoever stages has given that one up.
            Some(staged) if staged < epoch => self.drop_staged(&mut staging)?,
            _ => {}
        }
        if staging.redo.is_none() {
            // Beside one that is being copied, but not when that cannot be done.
            if let Some(mut settling) = self.settling.try_lock() {
                self.settle_now(&mut settling)?;
            }
            staging.redo = Some(self.begin(epoch)?);
        }
        let Some(redo) = &mut staging.redo else {
            return Err(OverlayError::NothingStaged(epoch));
        };
        let limit = self.options.stage_limit;
        if redo.bytes().saturating_add(Redo::bytes_of(changes)) > limit {
            return Err(OverlayError::TooLarge { epoch, limit });
        }
        if redo.log_bytes() > MIN_LOG + self.size / BLOCK_SIZE_U64 * LOG_OF_A_BLOCK {
            self.drop_staged(&mut staging)?;
            return Err(OverlayError::NothingStaged(epoch));
        }
        let taken = redo.append(changes).map_err(self.io("write", &redo.name));
        if redo.is_broken() {
            // The error that matters is the first.
            let _ = self.drop_staged(&mut staging);
        }
        taken
    }

    /// Begins an epoch. From here on plain changes are refused: a flush, or a crash, of theirs would count as the epoch
    /// that is being staged.
    fn begin(&self, epoch: Epoch) -> Result<Redo, OverlayError> {
        let beside = {
            // While one waits to be copied there are no plain changes, nor were there since it was staged.
            let sealed = self.sealed.read();
            if sealed.is_some() {
                self.staged.store(true, Ordering::Release);
            }
            sealed.is_some()
        };
        if !beside {
            // Waits for those under way.
            let _plain = self.plain.write();
            self.staged.store(true, Ordering::Release);
        }
        let begin = || {
            if !beside {
                self.save()?;
                self.unmark()?;
            }
            self.check_next(epoch)?;
            Redo::create(self.directory.as_ref(), epoch, self.redo_of())
        };
        let result = begin();
        if result.is_err() {
            self.staged.store(false, Ordering::Release);
        }
        result
    }

    fn check_next(&self, asked: Epoch) -> Result<(), OverlayError> {
        let committed = self.committed();
        // Not so far that the numbers run out.
        let near = asked.count() <= committed.count() + MAX_SKIPPED;
        match asked > committed && near {
            true => Ok(()),
            false => Err(OverlayError::WrongEpoch { asked, committed }),
        }
    }

    /// Bytes that are staged, for limits and for people.
    #[must_use]
    pub fn staged(&self) -> u64 {
        self.staging.lock().redo.as_ref().map_or(0, Redo::bytes)
    }

    /// The epoch that is being staged.
    #[must_use]
    pub fn staged_epoch(&self) -> Option<Epoch> {
        self.staging.lock().redo.as_ref().map(|redo| redo.epoch)
    }

    /// What is staged of an epoch, from byte `from` of the device on: at most `most` runs `(offset, length)`, in order, and
    /// where to go on; the end of the device when that was all.
    #[must_use]
    pub fn staged_runs(&self, epoch: Epoch, from: u64, most: usize) -> (Vec<(u64, u64)>, u64) {
        let staging = self.staging.lock();
        let Some(redo) = staging.redo.as_ref().filter(|redo| redo.epoch == epoch) else {
            return (Vec::new(), self.size);
        };
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let end = self.size.div_ceil(BLOCK_SIZE_U64);
        for (blocks, _) in redo.pieces(from.min(self.size) / BLOCK_SIZE_U64..end) {
            let (offset, length) = self.bytes_of(blocks);
            let full = runs.len() >= most;
            match runs.last_mut() {
                Some(last) if last.0 + last.1 == offset => last.1 += length,
                Some(_) if full => return (runs, offset),
                _ => runs.push((offset, length)),
            }
        }
        (runs, self.size)
    }

    /// Makes what was staged for an epoch count, for readers and for crashes at once, durably. Does nothing when the
    /// epoch counts already. The same as [`Overlay::seal`] of whatever is staged and then [`Overlay::settle`], whose
    /// failure is none of the commit's: it is tried again before the next change.
    ///
    /// # Errors
    /// As [`Overlay::seal`].
    pub fn commit(&self, epoch: Epoch) -> Result<(), OverlayError> {
        self.seal_staged(epoch, None)?;
        if let Err(error) = self.settle() {
            tracing::warn!(%error, epoch = epoch.0, "a committed epoch is not copied into its overlay yet");
        }
        Ok(())
    }

    /// Makes what was staged for an epoch count, and leaves copying it to [`Overlay::settle`]: whoever waits for the
    /// commit can be answered in between. `covers` is how many bytes of the device it should change: an epoch that was
    /// dropped meanwhile and begun again under its number is not all there.
    ///
    /// # Errors
    /// [`OverlayError::WrongEpoch`]; [`OverlayError::NothingStaged`], also after [`Overlay::abandon`] or a crash;
    /// [`OverlayError::NotWhole`]: it has not what it should, and stays staged;
    /// [`OverlayError::Io`]: no room for the copy, the epoch does not count and stays staged; or a sync failed, it must be
    /// staged whole again. [`OverlayError::Broken`]: it is not known whether it counts until the overlay is opened again.
    pub fn seal(&self, epoch: Epoch, covers: u64) -> Result<(), OverlayError> {
        self.seal_staged(epoch, Some(covers))
    }

    fn seal_staged(&self, epoch: Epoch, covers: Option<u64>) -> Result<(), OverlayError> {
        self.writable()?;
        let mut staging = self.staging.lock();
        if epoch > self.committed() {
            // The one before must be in its place.
            self.settle_now(&mut self.settling.lock())?;
        }
        // What is staged is always the next epoch to count.
        let Some(mut redo) = staging.redo.take_if(|redo| redo.epoch == epoch) else {
            return match epoch <= self.committed() {
                true => Ok(()),
                false => self
                    .check_next(epoch)
                    .and(Err(OverlayError::NothingStaged(epoch))),
            };
        };
        let whole = match (covers, redo.covers()) {
            (Some(asked), staged) if asked != staged => Err(OverlayError::NotWhole {
                epoch,
                asked,
                staged,
            }),
            _ => self.reserve(&redo),
        };
        if let Err(error) = whole {
            staging.redo = Some(redo);
            return Err(error);
        }
        let result = self.seal_redo(&mut redo);
        match result {
            Ok(()) => {
                let mut sealed = self.sealed.write();
                *sealed = Some(Arc::new(redo));
                self.unsettled.store(true, Ordering::Release);
                self.committed.store(epoch.0, Ordering::Release);
                self.staged.store(false, Ordering::Release);
            }
            Err(_) => {
                staging.redo = Some(redo);
                // The error that matters is the first.
                let _ = self.drop_staged(&mut staging);
            }
        }
        result
    }

    fn seal_redo(&self, redo: &mut Redo) -> Result<(), OverlayError> {
        match redo.seal() {
            Ok(()) => Ok(()),
            Err(SealError::Not(error)) => Err(self.io("sync", &redo.name)(error)),
            Err(SealError::Unknown(error)) => {
                *self.broken.write() = Some(error.to_string());
                self.writable()
            }
        }
    }

    /// Takes the room for the copy, so that a full disk is found before the epoch counts.
    fn reserve(&self, redo: &Redo) -> Result<(), OverlayError> {
        for (blocks, _) in redo.all().filter(|piece| piece.1.is_some()) {
            let runs: Vec<_> = self.states.read().runs(blocks).collect();
            for (run, _) in runs.into_iter().filter(|run| run.1 != BlockState::Here) {
                let (offset, length) = self.bytes_of(run.clone());
                match self.data.allocate(offset, length) {
                    Ok(()) => {}
                    // Then it is found later, and the copy waits for room.
                    Err(error) if error.kind() == std::io::ErrorKind::Unsupported => return Ok(()),
                    Err(error) => {
                        self.give_back(redo, run.end);
                        return Err(self.io("take room in", DATA)(error));
                    }
                }
            }
        }
        Ok(())
    }

    /// Gives back the room that was taken for an epoch, up to a block.
    fn give_back(&self, redo: &Redo, upto: u64) {
        for (blocks, _) in redo.pieces(0..upto).filter(|piece| piece.1.is_some()) {
            let runs: Vec<_> = self.states.read().runs(blocks).collect();
            for (run, _) in runs.into_iter().filter(|run| run.1 != BlockState::Here) {
                let (offset, length) = self.bytes_of(run);
                // Best effort: what stays is used when the blocks are written.
                let _ = self.data.punch_hole(offset, length);
            }
        }
    }

    /// Copies the epoch that counts into its place, durably, and removes its redo file. Does nothing when there is
    /// none. Changes wait, readers do not.
    ///
    /// # Errors
    /// [`OverlayError`]: it counts all the same and is read from the redo file; nothing can be changed until this has
    /// succeeded, here or when the overlay is opened again.
    pub fn settle(&self) -> Result<(), OverlayError> {
        self.settle_now(&mut self.settling.lock())
    }

    /// [`Overlay::settle`], but soon after a failure the same error at once.
    pub(super) fn settle_for_a_change(&self) -> Result<(), DeviceError> {
        let mut settling = self.settling.lock();
        if let Some((when, error)) = &settling.failed
            && when.elapsed() < RETRY
        {
            return Err(error.clone());
        }
        Ok(self.settle_now(&mut settling)?)
    }

    fn settle_now(&self, settling: &mut Settling) -> Result<(), OverlayError> {
        let Some(redo) = self.sealed.read().clone() else {
            return Ok(());
        };
        let result = self.copy(&redo);
        match &result {
            Ok(()) => {
                settling.failed = None;
                // Best effort: a redo of an epoch that is in the log is removed when the overlay is opened.
                if let Err(error) = self.directory.remove(&redo.name) {
                    tracing::warn!(%error, file = redo.name, "cannot remove a redo file");
                }
            }
            Err(error) => {
                let full = matches!(error, OverlayError::Io { source, .. }
                    if source.kind() == std::io::ErrorKind::StorageFull);
                let said = format!("an epoch cannot be copied into its overlay: {error}");
                let error = match full {
                    true => DeviceError::NoSpace(said),
                    false => DeviceError::Io(Arc::new(std::io::Error::other(said))),
                };
                settling.failed = Some((Instant::now(), error));
            }
        }
        result
    }

    fn copy(&self, redo: &Redo) -> Result<(), OverlayError> {
        self.writable()?;
        let _plain = self.plain.write();
        let mut saving = self.saving.lock();
        let mut slab = Vec::new();
        for (blocks, place) in redo.all() {
            let (offset, length) = self.bytes_of(blocks.clone());
            match place {
                Some(place) => self.copy_bytes(redo, place, offset, length, &mut slab)?,
                None => self.punch(blocks),
            }
        }
        self.sync_data()?;
        let log = saving.log.as_ref();
        let rewrite = log.is_some_and(|log| log.wants_rewrite() || log.is_broken());
        for (nth, (blocks, place)) in redo.all().enumerate() {
            let state = match place {
                Some(_) => BlockState::Here,
                None => BlockState::Zero,
            };
            // No reader looks at these states while there is a sealed redo.
            self.states.write().set(blocks, state);
            if !rewrite && nth % RUNS_AT_ONCE == RUNS_AT_ONCE - 1 {
                // What is written down early counts only once the epoch does: until then there is the redo.
                self.log_states(&mut saving)?;
            }
        }
        self.log_changes(&mut saving, redo.epoch, rewrite)?;
        let mut sealed = self.sealed.write();
        *sealed = None;
        self.unsettled.store(false, Ordering::Release);
        Ok(())
    }

    fn copy_bytes(
        &self,
        redo: &Redo,
        place: u64,
        offset: u64,
        length: u64,
        slab: &mut Vec<u8>,
    ) -> Result<(), OverlayError> {
        let mut done = 0;
        while done < length {
            slab.resize((length - done).min(SLAB as u64) as usize, 0);
            read_exact_at(redo.file.as_ref(), slab, place + done)
                .map_err(self.io("read", &redo.name))?;
            self.data
                .write_at(slab, offset + done)
                .map_err(self.io("write", DATA))?;
            done += slab.len() as u64;
        }
        Ok(())
    }

    /// Gives the room of blocks back that are here and are not needed any more.
    pub(super) fn punch(&self, blocks: std::ops::Range<u64>) {
        let runs: Vec<_> = self.states.read().runs(blocks).collect();
        for run in runs.into_iter().filter(|run| run.1 == BlockState::Here) {
            let (offset, length) = self.bytes_of(run.0);
            if let Err(error) = self.data.punch_hole(offset, length) {
                // It is only about room: nobody reads them.
                tracing::debug!(%error, "cannot give room back");
            }
        }
    }

    /// Drops what is staged. What is sealed stays.
    ///
    /// # Errors
    /// [`OverlayError::Io`] when the file cannot be removed; it is dropped all the same.
    pub fn abandon(&self) -> Result<(), OverlayError> {
        self.drop_staged(&mut self.staging.lock())
    }

    fn drop_staged(&self, staging: &mut Staging) -> Result<(), OverlayError> {
        match staging.redo.take() {
            None => Ok(()),
            Some(redo) => {
                self.staged.store(false, Ordering::Release);
                self.directory
                    .remove(&redo.name)
                    .map_err(self.io("remove", &redo.name))
            }
        }
    }

    /// Where blocks are in the data; the device's last one may be short.
    pub(super) fn bytes_of(&self, blocks: std::ops::Range<u64>) -> (u64, u64) {
        let offset = blocks.start * BLOCK_SIZE_U64;
        let end = (blocks.end * BLOCK_SIZE_U64).min(self.size);
        (offset, end.saturating_sub(offset))
    }
}
