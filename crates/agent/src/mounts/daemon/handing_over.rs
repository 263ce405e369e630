//! The write lease of the mount is handed over.

use std::sync::Arc;

use drover_net::Refusal;
use drover_net::service::{Exchange, Handler, Peer};

use super::super::control::{HandTo, PrepareHandOver};
use super::super::disk::Disk;
use super::super::lease;
use super::ending::SIGNAL_PUSH_LIMIT;
use super::{Daemon, Requests};
use crate::error::{Result, bail, failed, one_line, refusal_of};
use crate::text::bytes;

impl Handler<PrepareHandOver> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        PrepareHandOver { to }: PrepareHandOver,
        _: &mut Exchange<'_, PrepareHandOver>,
    ) -> Result<u64, Refusal> {
        let daemon = Arc::clone(&self.0);
        let prepare = move || -> Result<u64> {
            daemon.may_hand_over(to)?;
            daemon.push_all(None)?;
            Ok(daemon.disks.iter().map(Disk::dirty).sum())
        };
        let prepared = tokio::task::spawn_blocking(prepare).await;
        prepared.map_err(failed)?.map_err(refusal_of)
    }
}

impl Daemon {
    /// Checks, before anything happens, that the write lease can be handed over; returns to whom, if that is to come.
    pub(super) fn may_hand_over(&self, to: HandTo) -> Result<String> {
        match self.disks.as_slice() {
            [disk] => disk.hand_over(to, false),
            _ => bail!(
                "{} has several images: a lease is handed over alone",
                self.place.name()
            ),
        }
    }

    /// Hands the write lease of its disk over, which is pushed.
    pub(super) fn hand_over(&self, disk: &Disk, to: HandTo) -> Result<()> {
        // A front end that was detached while in use may have written since the last push.
        let held = disk.hold_writes();
        if disk.dirty() > 0 && !disk.was_handed_over() {
            bail!(
                "{} written after the last push, while it was being handed over; nothing is lost: end what uses it, and hand it over again",
                bytes(disk.dirty())
            );
        }
        self.note_handing_over(true)?;
        let handed = disk.hand_over(to, true);
        let stays = handed.as_ref().is_err_and(|e| !lease::may_be_done(e));
        if stays && let Err(e) = self.note_handing_over(false) {
            // Then the site is asked once more.
            tracing::warn!("{e:#}");
        }
        match held {
            Some(held) if !stays => held.for_good(),
            held => drop(held),
        }
        handed.map(drop)
    }

    pub(super) fn note_handing_over(&self, is_begun: bool) -> Result<()> {
        let mut record = self.record.lock();
        record.handing_over = is_begun;
        self.place.write(&record)
    }

    pub(super) fn has_handed_over(&self) -> bool {
        self.disks.iter().any(Disk::was_handed_over)
    }

    /// Whether a machine that is elsewhere depends on this mount, or one that is here and that its site looks after.
    pub(super) fn is_of_machine(&self) -> bool {
        let (name, is_heir) = {
            let record = self.record.lock();
            (record.name.clone(), record.how.heir_of.is_some())
        };
        let left = drover_migrate::left_mounts(&self.home.machines());
        is_heir || left.is_ok_and(|left| left.iter().any(|mounted| mounted.mount == name))
    }

    /// Ends on a signal as a crash would, but for a push: the lease stays, and whoever the mount is for goes on with it.
    pub(super) fn pause_by_signal(&self) -> Result<()> {
        if let Some(shown) = self.shown.lock().take() {
            // A hypervisor connects again; an answer it would believe.
            shown.cut();
            if let Err(unended) = shown.end(true) {
                tracing::warn!("{}", unended.1);
            }
        }
        if let Err(e) = self.push_all(Some(SIGNAL_PUSH_LIMIT)) {
            tracing::warn!("{}", one_line(&e));
        }
        Ok(())
    }
}
