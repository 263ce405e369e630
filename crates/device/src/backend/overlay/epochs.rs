//! Epochs: staged in a redo file, sealed at a commit, then copied into the data.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_core::{BLOCK_SIZE_U64, DeviceError};

use super::redo::{Redo, SLAB, SealError, is_whole};
use super::states::BlockState;
use super::{DATA, Overlay, OverlayError, Settling, Staging};
use crate::remote::{Change, Epoch};
use drover_storage::chunk_log::ChunkLog;
use drover_storage::read_exact_at;

/// After copying an epoch has failed: how long plain changes are refused before a retry.
pub(super) const RETRY: Duration = Duration::from_millis(500);

/// Log size allowed for an epoch beyond the share of each block of the device: a well-behaved sender sends no block
/// more than a few times.
const MIN_LOG: u64 = 1 << 20;
const LOG_OF_A_BLOCK: u64 = 128;

/// Runs whose states are logged at once.
const RUNS_AT_ONCE: usize = 1 << 16;

/// Maximum number of epochs that may be begun and abandoned between two commits.
const MAX_SKIPPED: u64 = 1 << 20;

impl Overlay {
    /// Stages changes that take effect when `epoch` is committed and are invisible before. Later changes win. A later
    /// epoch replaces the staged one. After a crash, whatever had reached the disk is still staged
    /// ([`Overlay::staged_runs`]). Until the epoch is committed or abandoned, plain changes are refused with
    /// [`DeviceError::Unavailable`]; unflushed ones are flushed now, which increments the committed epoch.
    ///
    /// # Errors
    /// [`OverlayError::WrongEpoch`] unless `epoch` is after the last committed one, or when a later one is being
    /// staged; [`OverlayError::BadChange`]; no space: [`OverlayError::TooLarge`], [`OverlayError::Io`]. The blocks
    /// covered by `changes` may or may not be staged then; other blocks are unaffected.
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
            // The sender has abandoned the earlier epoch.
            Some(staged) if staged < epoch => self.drop_staged(&mut staging)?,
            _ => {}
        }
        if staging.redo.is_none() {
            // Allowed while another epoch is being copied, but not if copying has failed.
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
            // The first error is the one to report.
            let _ = self.drop_staged(&mut staging);
        }
        taken
    }

    /// Begins an epoch. From here on plain changes are refused: a flush or crash of theirs would consume the number of
    /// the epoch being staged.
    fn begin(&self, epoch: Epoch) -> Result<Redo, OverlayError> {
        let beside = {
            // While an epoch waits to be copied there are no plain changes, nor were there since it was staged.
            let sealed = self.sealed.read();
            if sealed.is_some() {
                self.staged.store(true, Ordering::Release);
            }
            sealed.is_some()
        };
        if !beside {
            // Waits for plain changes in flight.
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
        // Bounds the jump, so that numbers never run out.
        let near = asked.count() <= committed.count() + MAX_SKIPPED;
        match asked > committed && near {
            true => Ok(()),
            false => Err(OverlayError::WrongEpoch { asked, committed }),
        }
    }

    /// Bytes staged, for limits and reporting.
    #[must_use]
    pub fn staged(&self) -> u64 {
        self.staging.lock().redo.as_ref().map_or(0, Redo::bytes)
    }

    /// The epoch being staged.
    #[must_use]
    pub fn staged_epoch(&self) -> Option<Epoch> {
        self.staging.lock().redo.as_ref().map(|redo| redo.epoch)
    }

    /// What is staged of an epoch, from byte `from` of the device on: at most `most` runs `(offset, length)`, in order,
    /// and the offset to continue at; the device size when complete.
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

    /// Commits a staged epoch: atomically for readers and crashes, and durably. Does nothing if the epoch is committed
    /// already. The same as [`Overlay::seal`] of everything staged and then [`Overlay::settle`], whose failure does not
    /// fail the commit: it is retried before the next change.
    ///
    /// # Errors
    /// As [`Overlay::seal`].
    pub fn commit(&self, epoch: Epoch) -> Result<(), OverlayError> {
        self.seal_staged(epoch, None, |_| Ok(()))?;
        if let Err(error) = self.settle() {
            tracing::warn!(%error, epoch = epoch.0, "a committed epoch is not copied into its overlay yet");
        }
        Ok(())
    }

    /// Commits a staged epoch and leaves copying it to [`Overlay::settle`], so that the reply to the commit need not
    /// wait for the copy. `covers` is the number of device bytes it should change: it detects an epoch that was dropped
    /// and begun again under the same number, hence is incomplete.
    ///
    /// # Errors
    /// [`OverlayError::WrongEpoch`]; [`OverlayError::NothingStaged`], also after [`Overlay::abandon`] or a crash;
    /// [`OverlayError::NotWhole`]: incomplete, and stays staged; [`OverlayError::Io`]: no space for the copy, the epoch
    /// is not committed and stays staged; or a sync failed and it must be staged again entirely.
    /// [`OverlayError::Broken`]: whether it is committed is unknown until the overlay is reopened.
    pub fn seal(&self, epoch: Epoch, covers: u64) -> Result<(), OverlayError> {
        self.seal_after(epoch, covers, |_| Ok(()))
    }

    /// As [`Overlay::seal`], but calls `before` with the runs `(offset, length)` of the device that the epoch changes, in order,
    /// before it is committed. What it returns is dropped when that is done. Not called for an epoch that is committed.
    ///
    /// # Errors
    /// As [`Overlay::seal`], and those of `before`: the epoch stays staged.
    pub fn seal_after<T>(
        &self,
        epoch: Epoch,
        covers: u64,
        before: impl FnOnce(&mut dyn Iterator<Item = (u64, u64)>) -> Result<T, DeviceError>,
    ) -> Result<(), OverlayError> {
        self.seal_staged(epoch, Some(covers), before)
    }

    fn seal_staged<T>(
        &self,
        epoch: Epoch,
        covers: Option<u64>,
        before: impl FnOnce(&mut dyn Iterator<Item = (u64, u64)>) -> Result<T, DeviceError>,
    ) -> Result<(), OverlayError> {
        self.writable()?;
        let mut staging = self.staging.lock();
        if epoch > self.committed() {
            // The previous epoch must be copied first.
            self.settle_now(&mut self.settling.lock())?;
        }
        // A staged epoch is always later than the last committed one.
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
        let whole = whole.and_then(|()| {
            let mut runs = redo.all().map(|piece| self.bytes_of(piece.0));
            before(&mut runs).map_err(OverlayError::Base)
        });
        let _before = match whole {
            Ok(kept) => kept,
            Err(error) => {
                staging.redo = Some(redo);
                return Err(error);
            }
        };
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
                // The first error is the one to report.
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

    /// Allocates space for the copy, so that a full disk is detected before the epoch is committed.
    fn reserve(&self, redo: &Redo) -> Result<(), OverlayError> {
        for (blocks, _) in redo.all().filter(|piece| piece.1.is_some()) {
            let runs: Vec<_> = self.states.read().runs(blocks).collect();
            for (run, _) in runs.into_iter().filter(|run| run.1 != BlockState::Here) {
                let (offset, length) = self.bytes_of(run.clone());
                match self.data.allocate(offset, length) {
                    Ok(()) => {}
                    // Then it is detected later, and the copy waits for space.
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

    /// Frees the space that was allocated for an epoch, up to a block.
    fn give_back(&self, redo: &Redo, upto: u64) {
        for (blocks, _) in redo.pieces(0..upto).filter(|piece| piece.1.is_some()) {
            let runs: Vec<_> = self.states.read().runs(blocks).collect();
            for (run, _) in runs.into_iter().filter(|run| run.1 != BlockState::Here) {
                let (offset, length) = self.bytes_of(run);
                // Best effort: leftover space is used when the blocks are written.
                let _ = self.data.punch_hole(offset, length);
            }
        }
    }

    /// Copies the committed epoch into the data, durably, and removes its redo file. Does nothing when there is none.
    /// Changes wait, readers do not.
    ///
    /// # Errors
    /// [`OverlayError`]: the epoch stays committed and is read from the redo file; nothing can be changed until this
    /// has succeeded, here or when the overlay is reopened.
    pub fn settle(&self) -> Result<(), OverlayError> {
        self.settle_now(&mut self.settling.lock())
    }

    /// [`Overlay::settle`], except that shortly after a failure the same error is returned at once.
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
                // Best effort: the redo file of an epoch that the log contains is removed on the next open.
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
                None => {
                    let runs = self.states.read().runs(blocks).collect();
                    self.punch(runs);
                }
            }
        }
        self.sync_data()?;
        let rewrite = saving.log.as_ref().is_some_and(ChunkLog::wants_rewrite);
        for (nth, (blocks, place)) in redo.all().enumerate() {
            let state = match place {
                Some(_) => BlockState::Here,
                None => BlockState::Zero,
            };
            // No reader consults these states while there is a sealed redo.
            self.states.write().set(blocks, state);
            if !rewrite && nth % RUNS_AT_ONCE == RUNS_AT_ONCE - 1 {
                // States logged early take effect only with the epoch's record: until then the redo file is
                // authoritative.
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

    /// Deallocates blocks that are not read from the data any more, of these runs.
    pub(super) fn punch(&self, runs: Vec<(Range<u64>, BlockState)>) {
        for run in runs.into_iter().filter(|run| run.1 == BlockState::Here) {
            let (offset, length) = self.bytes_of(run.0);
            if let Err(error) = self.data.punch_hole(offset, length) {
                // Only space is lost: nobody reads these blocks.
                tracing::debug!(%error, "cannot give room back");
            }
        }
    }

    /// Drops the staged epoch. A sealed one is kept.
    ///
    /// # Errors
    /// [`OverlayError::Io`] when the file cannot be removed; the epoch is dropped all the same.
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

    /// The byte range of blocks in the data; the device's last block may be short.
    pub(super) fn bytes_of(&self, blocks: Range<u64>) -> (u64, u64) {
        let offset = blocks.start * BLOCK_SIZE_U64;
        let end = (blocks.end * BLOCK_SIZE_U64).min(self.size);
        (offset, end.saturating_sub(offset))
    }
}
