//! Unfinished transfers of a site: list, remove, expire.

use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_index::ImageId;
use drover_net::Code;

use super::Site;
use super::arrived::{Arrived, unix_now};
use crate::TeleportError;
use crate::files::remove_dir;
use crate::log::is_closed;
use crate::transfer::{inspect, opening_of};
use crate::transfers::{REMOVED, TransferState, Unfinished, is_key, look, unfinished};

impl Site {
    /// The unfinished transfers, most recently active first.
    ///
    /// # Errors
    /// When their directory cannot be listed.
    pub fn unfinished(&self) -> Result<Vec<Unfinished>, TeleportError> {
        let mut all = unfinished(&self.config.work_dir)?;
        // A transfer that is just starting has no log yet.
        all.retain(|t| t.state != TransferState::Damaged || !self.active.has(&t.key));
        for transfer in &mut all {
            if !self.active.has(&transfer.key) {
                continue;
            }
            transfer.state = TransferState::UnderWay;
            if let Some(done) = self.done_blocks(transfer) {
                transfer.done_bytes = (done * BLOCK_SIZE_U64).min(transfer.total_bytes);
            }
        }
        Ok(all)
    }

    /// Bytes that the transfers in progress, except the one with this key, were promised and have not taken yet.
    pub(crate) fn promised_bytes(&self, key: &str) -> u64 {
        let others = self.active.keys().into_iter().filter(|other| other != key);
        let others = others.filter(|other| is_key(other));
        let transfers = self.config.work_dir.join("transfers");
        let looked = others.filter_map(|other| look(&transfers.join(other)));
        looked
            .map(|t| t.total_bytes.saturating_sub(t.room_bytes))
            .fold(0, u64::saturating_add)
    }

    fn done_blocks(&self, transfer: &Unfinished) -> Option<u64> {
        let sessions = self.sessions.lock();
        let mut of_peer = sessions.values().filter(|s| s.is_of(&transfer.sender));
        let status = of_peer.find_map(|s| s.status().filter(|t| t.name == transfer.name))?;
        Some(status.done_blocks)
    }

    /// Removes a stopped transfer and its data. Blocks the thread.
    ///
    /// # Errors
    /// When there is no transfer with that key, or it is in progress or complete.
    pub fn remove_transfer(&self, key: &str) -> Result<Unfinished, TeleportError> {
        self.remove_if(key, |_| true)?
            .ok_or_else(|| none_of_key(key))
    }

    /// Removes the transfers that have received nothing for `after`; returns them.
    ///
    /// # Errors
    /// When their directory cannot be listed.
    pub fn expire_transfers(&self, after: Duration) -> Result<Vec<Unfinished>, TeleportError> {
        let after = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
        let oldest = unix_now().saturating_sub(after);
        let expired = |t: &Unfinished| t.touched_unix < oldest;
        let mut out = Vec::new();
        for transfer in self.unfinished()?.into_iter().filter(expired) {
            // Transfers that have just been resumed, or are complete, stay.
            match self.remove_if(&transfer.key, expired) {
                Ok(removed) => out.extend(removed),
                Err(e) => tracing::debug!(image = transfer.name, error = %e, "does not expire"),
            }
        }
        out.extend(self.expire_of_others(expired));
        Ok(out)
    }

    /// Removes a transfer if, once it is locked against resumption, it is still in the required state.
    fn remove_if(
        &self,
        key: &str,
        wanted: impl FnOnce(&Unfinished) -> bool,
    ) -> Result<Option<Unfinished>, TeleportError> {
        if !is_key(key) {
            return Ok(None);
        }
        let refused = |message: String| TeleportError::refused(Code::Denied, message);
        let dir = self.transfer_dir(key);
        let claim = self.active.claim(key);
        let Some(transfer) = look(&dir) else {
            return Ok(None);
        };
        let Some(_claim) = claim else {
            return Err(refused(format!(
                "{} is being sent by {}; stop that transfer first",
                transfer.name, transfer.peer
            )));
        };
        if transfer.state == TransferState::Whole {
            return Err(refused(format!(
                "{} from {} is complete and is delivered when the site starts next",
                transfer.name, transfer.peer
            )));
        }
        if !wanted(&transfer) {
            return Ok(None);
        }
        if let Ok(name) = ImageName::new(transfer.name.as_str()) {
            self.check_not_launched_as(&name, key)?;
        }
        let image = opening_of(&dir).map(|o| ImageId(o.image));
        let gone = self.set_aside(&dir)?;
        if let Some(image) = image {
            self.forget_partial(image);
        }
        // The renamed directory is no longer found: a source that returns starts over in a new one.
        drop(_claim);
        remove_dir(&gone);
        Ok(Some(transfer))
    }

    /// Adds a complete file that already has its name, but whose catalog update failed, to the catalog. Otherwise the
    /// catalog would describe the previous file of that name.
    pub(crate) fn settle_renamed(&self, dir: &Path, name: &ImageName) -> Result<(), TeleportError> {
        self.finish_undoing(dir, name)?;
        if dir.join("image.part").exists() || !is_closed(&dir.join("log")) {
            return Ok(());
        }
        match inspect(dir)?.map(Arrived::of) {
            Some(Ok(arrived)) => self.settle(&arrived, None).map(drop),
            _ => Ok(()),
        }
    }

    /// Renames the directory of a transfer out of the way, atomically.
    fn set_aside(&self, dir: &Path) -> Result<PathBuf, TeleportError> {
        let gone = dir.with_extension(REMOVED);
        remove_dir(&gone);
        std::fs::rename(dir, &gone).map_err(TeleportError::file("rename", dir))?;
        Ok(gone)
    }
}

fn none_of_key(key: &str) -> TeleportError {
    let message = format!("there is no unfinished transfer {key:?} here");
    TeleportError::refused(Code::NotFound, message)
}
