//! The end of a mount: an unmount, as often as it takes, or a signal.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_net::service::{Exchange, Handler};
use drover_net::{Code, Peer, Refusal};
use tokio::sync::mpsc;

use super::{Daemon, REPORT_EVERY, Requests};
use crate::error::{Error, Result, bail, failed, one_line, refusal_of};
use crate::mounts::control::StopHow;
use crate::mounts::disk::Disk;
use crate::mounts::left::Left;
use crate::mounts::status::Status;
use crate::notice::notice;
use crate::text::{bytes, clean};

/// How long pushing dirty data may take after a signal.
pub(super) const SIGNAL_PUSH_LIMIT: Duration = Duration::from_secs(20);

/// How long an unmount that does not push waits for one that pushes to give up.
pub(super) const OVERTAKE_LIMIT: Duration = Duration::from_secs(5);

impl Handler<StopHow> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        how: StopHow,
        exchange: &mut Exchange<'_, StopHow>,
    ) -> Result<Left, Refusal> {
        if self.0.moving.lock().is_some() {
            let text = "its disk is being moved: wait, or give that up with `drover move --abort`";
            return Err(Refusal::new(Code::Held, text));
        }
        let (reports, mut pending) = mpsc::channel(1);
        let daemon = Arc::clone(&self.0);
        let end = tokio::task::spawn_blocking(move || {
            daemon.end(how, None, &mut |status| drop(reports.try_send(status)))
        });
        while let Some(status) = pending.recv().await {
            // The client may have disconnected; the unmount continues.
            let _ = exchange.report(&status).await;
        }
        let left = end.await.map_err(failed)?.map_err(refusal_of)?;
        self.0.done.store(true, Ordering::SeqCst);
        Ok(left)
    }

    fn reply_sent(&self) {
        self.0.reply_sent();
    }
}

impl Daemon {
    /// Unmounts as `how` says; returns what is left behind. After an error it can be called again: a front end in use
    /// stays up, one that was shut down stays down, and written data is in the cache or at the other site. Only if the
    /// last flush of a local disk fails does the mount end all the same: a retry would not recover the writes.
    ///
    /// `report` is called with the status at regular intervals, however long a step takes.
    pub(super) fn end(
        &self,
        how: StopHow,
        limit: Option<Duration>,
        report: &mut dyn FnMut(Status),
    ) -> Result<Left> {
        self.begin_end(how)?;
        let result = std::thread::scope(|scope| {
            let work = scope.spawn(|| self.end_once(how, limit));
            let mut reported = Instant::now();
            while !work.is_finished() {
                std::thread::sleep(Duration::from_millis(5));
                if reported.elapsed() >= REPORT_EVERY {
                    reported = Instant::now();
                    report(self.status());
                }
            }
            work.join()
                .unwrap_or_else(|_| bail!("the unmount panicked; see the log of the mount daemon"))
        });
        if result.is_err() && !self.done.load(Ordering::SeqCst) {
            self.ending.store(false, Ordering::SeqCst);
        }
        result
    }

    /// Makes the caller the one unmount in progress. One that does not push overtakes one that waits for a push.
    fn begin_end(&self, how: StopHow) -> Result<()> {
        let began = Instant::now();
        while self.ending.swap(true, Ordering::SeqCst) {
            if !how.offline && !how.discard {
                let left = self.disks.iter().map(Disk::dirty).sum();
                return Err(ending_already(left));
            }
            if began.elapsed() > OVERTAKE_LIMIT {
                bail!("it is already being unmounted");
            }
            self.overtaken.store(true, Ordering::Release);
            std::thread::sleep(Duration::from_millis(5));
        }
        self.overtaken.store(false, Ordering::Release);
        Ok(())
    }

    fn end_once(&self, how: StopHow, limit: Option<Duration>) -> Result<Left> {
        let to = how.hand_over.map(|to| self.may_hand_over(to)).transpose()?;
        // The front end first: nothing may be written once the last push has begun. It stays up when it is busy.
        let taken = self.shown.lock().take();
        if let Some(shown) = taken {
            if let Err(unended) = shown.end(how.lazy) {
                let (shown, why) = *unended;
                *self.shown.lock() = Some(shown);
                return Err(why);
            }
            self.forget_devices();
        }
        let unrecorded = self.end_profile();
        // A local disk has no cache to keep or to discard.
        let how = match self.disks.iter().all(Disk::is_local) {
            true => StopHow {
                lazy: how.lazy,
                ..StopHow::default()
            },
            false => how,
        };
        if !how.offline && !how.discard && !self.has_handed_over() {
            self.push_all(limit)?;
        }
        if let (Some(to), [disk]) = (how.hand_over, self.disks.as_slice()) {
            self.hand_over(disk, to)?;
        }
        let flushed: Vec<_> = self.disks.iter().map(Disk::flush_local).collect();
        let left: u64 = self.disks.iter().map(Disk::dirty).sum();
        // If there is nothing to push and no cache to keep, a failure to save it (disk full, say) does not matter.
        let keeps = left > 0 || how.keep_cache || how.offline;
        for disk in &self.disks {
            if how.discard {
                disk.discard();
            } else if let Err(e) = disk.close() {
                if keeps {
                    return Err(e);
                }
                tracing::warn!("{}: {e:#}", self.place.name());
            }
        }
        let mut left = self.clear_away(how, left);
        for why in unrecorded {
            left.here = match left.here.is_empty() {
                true => why,
                false => format!("{}; {why}", left.here),
            };
        }
        if let Some(to) = to.filter(|to| !to.is_empty()) {
            let handed_over = format!("its write lease was handed over to {}", clean(&to));
            left.here = match left.here.is_empty() {
                true => handed_over,
                false => format!("{handed_over}; {}", left.here),
            };
        }
        let lost: Vec<_> = flushed.iter().filter_map(|f| f.as_ref().err()).collect();
        if lost.is_empty() {
            return Ok(left);
        }
        self.done.store(true, Ordering::SeqCst);
        let lost = lost.into_iter().map(|e| one_line(e)).chain(left.lines());
        let lost = lost.collect::<Vec<_>>().join("; ");
        bail!("{} is unmounted, but {lost}", self.place.name())
    }

    /// Removes the devices, which are gone, from the record: their names may be reused, and a later cleanup must not
    /// detach them.
    fn forget_devices(&self) {
        let mut record = self.record.lock();
        if record.devices.is_empty() {
            return;
        }
        record.devices.clear();
        if let Err(e) = self.place.write(&record) {
            tracing::warn!("{e:#}");
        }
    }

    /// Waits until all dirty data is pushed.
    pub(super) fn push_all(&self, limit: Option<Duration>) -> Result<()> {
        let started = Instant::now();
        let pushed = std::thread::scope(|scope| {
            let push = |disk| scope.spawn(move || Disk::push(disk, limit, &self.overtaken));
            let pushes: Vec<_> = self.disks.iter().map(push).collect();
            let join = |push: std::thread::ScopedJoinHandle<'_, Result<()>>| {
                push.join().unwrap_or_else(|_| bail!("the push panicked"))
            };
            pushes.into_iter().map(join).collect::<Vec<_>>()
        });
        for (pushed, disk) in pushed.into_iter().zip(&self.disks) {
            if let Err(e) = pushed {
                return Err(Error::coded(
                    Code::Unavailable,
                    format!(
                        "{} not pushed after {:.0} s ({}); nothing is lost: unmount it again later",
                        bytes(disk.dirty()),
                        started.elapsed().as_secs_f64(),
                        one_line(&e)
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Removes what is no longer needed. Everything is closed by now, so a failure to remove it is only reported.
    fn clear_away(&self, how: StopHow, left: u64) -> Left {
        let _ = std::fs::remove_file(self.place.socket());
        // A front end that was detached while in use may have written after the last push.
        if left > 0 && !how.discard {
            self.note_unmounted();
            let then = match self.has_handed_over() {
                true => "it was written after the lease was handed over, and stays in the cache",
                false => "the next mount there pushes it",
            };
            return Left::here(format!("{} not pushed; {then}", bytes(left)));
        }
        if how.offline {
            self.note_unmounted();
            return Left::here("the cache is kept".into());
        }
        if !how.discard && self.disks.iter().any(Disk::is_lost) {
            self.note_unmounted();
            return Left::here("the store does not have it any more: the cache is kept".into());
        }
        let there = self.disks.iter().filter_map(Disk::unnotified).collect();
        let mut here = Vec::new();
        if left > 0 {
            here.push(format!("{} discarded", bytes(left)));
        }
        if how.keep_cache {
            self.note_unmounted();
            here.push("the cache is kept".into());
        } else if let Err(e) = self.place.remove() {
            here.push(one_line(&e));
        }
        Left {
            here: here.join("; "),
            there,
        }
    }

    /// Records that the mount was ended cleanly.
    fn note_unmounted(&self) {
        let mut record = self.record.lock();
        record.unmounted = true;
        if let Err(e) = self.place.write(&record) {
            tracing::warn!("{e:#}");
        }
    }

    /// Shuts down on a signal: ends the front end and pushes for a limited time; the rest stays in the cache for the
    /// next mount.
    pub(super) fn end_by_signal(&self) -> Result<()> {
        let mut quiet = |_| {};
        self.end_move();
        // A requested unmount may be in progress.
        let began = Instant::now();
        while self.ending.load(Ordering::SeqCst) {
            if began.elapsed() > SIGNAL_PUSH_LIMIT {
                self.disks.iter().try_for_each(Disk::close)?;
                return Ok(());
            }
            if self.ended.lock().is_none() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if self.is_of_machine() {
            return self.pause_by_signal();
        }
        let lazy = StopHow {
            lazy: true,
            ..StopHow::default()
        };
        let outcome = match self.end(lazy, Some(SIGNAL_PUSH_LIMIT), &mut quiet) {
            Ok(left) => Ok(left),
            Err(e) if self.done.load(Ordering::SeqCst) => Err(e),
            Err(e) => {
                tracing::warn!("{}", one_line(&e));
                let offline = StopHow {
                    offline: true,
                    lazy: true,
                    ..StopHow::default()
                };
                self.end(offline, None, &mut quiet)
            }
        }?;
        for line in outcome.lines() {
            notice(&format!("{}: {line}", self.place.name()));
        }
        Ok(())
    }
}

/// The error of a second unmount while the first still has `left` bytes to push.
fn ending_already(left: u64) -> Error {
    match left {
        // The first one waits for users of the mount, or for the site to close its connections.
        0 => Error::msg("it is already being unmounted"),
        left => Error::coded(
            Code::Unavailable,
            format!(
                "it is already being unmounted: {} are being pushed",
                bytes(left)
            ),
        ),
    }
}

#[cfg(test)]
mod tests;
