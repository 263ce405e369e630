//! Making writes durable: first the data, then the log of the block map.

use std::sync::atomic::Ordering;

use super::{DATA, Overlay, OverlayError, Saving};
use crate::remote::Epoch;
use drover_storage::chunk_log::Record;

/// Records that are not about blocks: `first` holds the committed epoch.
pub(super) const EPOCH: u8 = 16;
/// Plain changes may follow.
pub(super) const PLAIN: u8 = 17;
/// All plain changes so far are durable.
pub(super) const SETTLED: u8 = 18;

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
            let log = saving.log.as_ref();
            if !log.is_some_and(|log| log.wants_rewrite() || log.is_broken()) {
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
        let mut records = self.states.write().take_changed();
        let result = self.log_records(saving, &mut records, epoch, rewrite);
        if result.is_err() {
            let mut states = self.states.write();
            for record in records.iter().filter(|record| record.count > 0) {
                states.mark(record.first..record.first + u64::from(record.count));
            }
        }
        result
    }

    fn log_records(
        &self,
        saving: &mut Saving,
        records: &mut Vec<Record>,
        epoch: Epoch,
        rewrite: bool,
    ) -> Result<(), OverlayError> {
        self.sync_data()?;
        let log = saving.log.as_mut().ok_or(OverlayError::ReadOnly)?;
        let epoch = note(EPOCH, epoch.0);
        if rewrite {
            let mark = self.marked.load(Ordering::Acquire).then(|| note(PLAIN, 0));
            let states = self.states.read();
            let notes = mark.into_iter().chain([epoch]);
            log.rewrite(&self.identity.encode(), notes.chain(states.snapshot()))?;
            return Ok(());
        }
        records.push(epoch);
        log.append(records)?;
        Ok(log.sync()?)
    }

    /// Logs the states of changed blocks whose data is durable, without making the log durable.
    pub(super) fn log_states(&self, saving: &mut Saving) -> Result<(), OverlayError> {
        let records = self.states.write().take_changed();
        let log = saving.log.as_mut().ok_or(OverlayError::ReadOnly)?;
        let result = log.append(&records);
        if result.is_err() {
            let mut states = self.states.write();
            for record in &records {
                states.mark(record.first..record.first + u64::from(record.count));
            }
        }
        Ok(result?)
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
        if self.marked.load(Ordering::Acquire) {
            return Ok(());
        }
        let log = saving.log.as_mut().ok_or(OverlayError::ReadOnly)?;
        log.append(&[note(PLAIN, 0)])?;
        log.sync()?;
        self.marked.store(true, Ordering::Release);
        Ok(())
    }

    /// Removes that record, if a crash could lose nothing. No changes may be in progress.
    pub(super) fn unmark(&self) -> Result<(), OverlayError> {
        if !self.marked.load(Ordering::Acquire) || self.unflushed.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut saving = self.saving.lock();
        let log = saving.log.as_mut().ok_or(OverlayError::ReadOnly)?;
        log.append(&[note(SETTLED, 0)])?;
        log.sync()?;
        self.marked.store(false, Ordering::Release);
        Ok(())
    }
}
