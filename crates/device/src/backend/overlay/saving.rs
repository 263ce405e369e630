//! Making writes durable: first the data, then the log of the block map.

use std::sync::atomic::Ordering;

use super::states::{EPOCH, PLAIN, SETTLED};
use super::{DATA, Overlay, OverlayError, Saving};
use crate::remote::Epoch;
use drover_storage::chunk_log::{ChunkLog, Record};

/// A record that is not about blocks.
fn note(state: u8, first: u64) -> Record {
    Record {
        first,
        count: 0,
        state,
        mask: 0,
    }
}

impl Overlay {
    /// Flushes plain changes; increments the epoch if there were any.
    pub(super) fn save(&self) -> Result<(), OverlayError> {
        loop {
            let mut saving = self.saving.lock();
            if !self.unflushed.load(Ordering::Acquire) {
                return Ok(());
            }
            if self.unsettled.load(Ordering::Acquire) {
                // Otherwise the log would name a later epoch than a redo file that is still needed.
                drop(saving);
                self.settle()?;
                continue;
            }
            if !saving.log.as_ref().is_some_and(ChunkLog::wants_rewrite) {
                return self.save_as(&mut saving, false);
            }
            drop(saving);
            // The snapshot holds the current states, so nothing may change while the data is made durable.
            let _plain = self.plain.write();
            let mut saving = self.saving.lock();
            if !self.unsettled.load(Ordering::Acquire) {
                return self.save_as(&mut saving, true);
            }
        }
    }

    fn save_as(&self, saving: &mut Saving, rewrite: bool) -> Result<(), OverlayError> {
        if !self.unflushed.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let epoch = Epoch(self.committed().0 + 1);
        let result = self.log_changes(saving, epoch, rewrite);
        match result {
            Ok(()) => self.committed.store(epoch.0, Ordering::Release),
            Err(_) => self.unflushed.store(true, Ordering::Release),
        }
        result
    }

    /// Makes the data durable, then the states of all changed blocks, with `epoch`. With `rewrite` nobody may be making
    /// changes.
    pub(super) fn log_changes(
        &self,
        saving: &mut Saving,
        epoch: Epoch,
        rewrite: bool,
    ) -> Result<(), OverlayError> {
        self.writable()?;
        // Taken before the data is synced: later changes belong to the next run.
        self.with_changed(saving, |log, records| {
            self.sync_data()?;
            let epoch = note(EPOCH, epoch.0);
            if rewrite {
                let mark = self.marked.load(Ordering::Acquire).then(|| note(PLAIN, 0));
                let notes: Vec<_> = mark.into_iter().chain([epoch]).collect();
                return Ok(self.states.read().rewrite(log, &notes)?);
            }
            log.append(&[records, &[epoch]].concat())?;
            Ok(log.sync()?)
        })
    }

    /// Logs the states of changed blocks whose data is durable, without making the log durable.
    pub(super) fn log_states(&self, saving: &mut Saving) -> Result<(), OverlayError> {
        self.with_changed(saving, |log, records| Ok(log.append(records)?))
    }

    /// Takes the states of all changed blocks to log them; after an error they count as changed again.
    fn with_changed(
        &self,
        saving: &mut Saving,
        save: impl FnOnce(&mut ChunkLog, &[Record]) -> Result<(), OverlayError>,
    ) -> Result<(), OverlayError> {
        let log = saving.log.as_mut().ok_or(OverlayError::ReadOnly)?;
        let records = self.states.write().take_changed();
        save(log, &records).inspect_err(|_| self.states.write().mark_again(&records))
    }

    /// Syncs the data. After a failure it is unknown what is durable, permanently.
    pub(super) fn sync_data(&self) -> Result<(), OverlayError> {
        self.data.sync().map_err(|error| {
            *self.broken.write() = Some(error.to_string());
            self.io("sync", DATA)(error)
        })
    }

    /// Records durably, before the first plain change, that there may be some: a crash may preserve any part of them,
    /// so the next open increments the epoch.
    pub(super) fn mark(&self) -> Result<(), OverlayError> {
        if self.marked.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut saving = self.saving.lock();
        match self.marked.load(Ordering::Acquire) {
            true => Ok(()),
            false => self.set_marked(&mut saving, true),
        }
    }

    /// Removes that record, if a crash could lose nothing. No changes may be in progress.
    pub(super) fn unmark(&self) -> Result<(), OverlayError> {
        if !self.marked.load(Ordering::Acquire) || self.unflushed.load(Ordering::Acquire) {
            return Ok(());
        }
        self.set_marked(&mut self.saving.lock(), false)
    }

    fn set_marked(&self, saving: &mut Saving, marked: bool) -> Result<(), OverlayError> {
        let log = saving.log.as_mut().ok_or(OverlayError::ReadOnly)?;
        let state = if marked { PLAIN } else { SETTLED };
        log.append(&[note(state, 0)])?;
        log.sync()?;
        self.marked.store(marked, Ordering::Release);
        Ok(())
    }
}
