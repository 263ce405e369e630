//! Moving the disk of the mount to another site, on request of its own user.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drover_migrate::MoveReport;
use drover_net::service::{Exchange, Handler};
use drover_net::{Code, DEFAULT_DOMAIN, Peer, Refusal};
use tokio::sync::{mpsc, watch};

use super::ending::OVERTAKE_LIMIT;
use super::{Daemon, Requests};
use crate::error::{Error, Result, bail, failed, one_line, refusal_of};
use crate::mounts::control::StopHow;
use crate::mounts::disk::Disk;
use crate::mounts::moving::{self, AbortMove, MoveDisk, Moving};

/// How long a move that is given up may take to end.
const ABORT_LIMIT: Duration = Duration::from_secs(20);

/// The move of a mount's disk is over when this is dropped.
struct UntilDropped<'a>(&'a Daemon);

impl Drop for UntilDropped<'_> {
    fn drop(&mut self) {
        *self.0.moving.lock() = None;
    }
}

impl Handler<MoveDisk> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        order: MoveDisk,
        exchange: &mut Exchange<'_, MoveDisk>,
    ) -> Result<MoveReport, Refusal> {
        let (daemon, stop) = (Arc::clone(&self.0), watch::Sender::new(false));
        let (events, mut heard) = mpsc::channel(moving::EVENTS);
        let moving = {
            let (daemon, stop) = (Arc::clone(&daemon), stop.clone());
            // It goes on to a good end, whatever becomes of whoever asked for it.
            tokio::spawn(async move { daemon.move_disk(&order, events, stop).await })
        };
        while let Some(moving) = heard.recv().await {
            if exchange.report(&moving).await.is_err() {
                stop.send_replace(true);
            }
        }
        moving.await.map_err(failed)?.map_err(refusal_of)
    }

    fn reply_sent(&self) {
        self.0.reply_sent();
    }
}

impl Handler<AbortMove> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        AbortMove { image, domain }: AbortMove,
        _: &mut Exchange<'_, AbortMove>,
    ) -> Result<(), Refusal> {
        let is_it = |disk: &Disk| {
            let target = disk.target();
            let of = target.domain.as_deref().unwrap_or(DEFAULT_DOMAIN);
            target.is_own() && target.image == image.as_str() && of == domain
        };
        if !self.0.disks.iter().any(is_it) {
            return Ok(());
        }
        let stop = self.0.moving.lock().clone();
        if let Some(stop) = stop {
            stop.send_replace(true);
            // Until it is over, one way or the other.
            let over = tokio::time::timeout(ABORT_LIMIT, stop.closed()).await;
            over.map_err(|_| {
                let text = "it is being handed over, and can no longer be stopped";
                Refusal::new(Code::Held, text)
            })?;
        }
        Ok(())
    }
}

impl Daemon {
    /// Moves the disk of the mount to another site; when it is there, the mount ends.
    async fn move_disk(
        self: &Arc<Self>,
        order: &MoveDisk,
        events: mpsc::Sender<Moving>,
        stop: watch::Sender<bool>,
    ) -> Result<MoveReport> {
        let [disk] = self.disks.as_slice() else {
            return Err(Error::refused(format!(
                "{} is served together with other images: a disk moves alone",
                order.image
            )));
        };
        let Some(movable) = disk.movable() else {
            bail!("{} cannot be moved", disk.target());
        };
        if disk.target().image != order.image.as_str() {
            bail!("{} is not served by this mount", order.image);
        }
        let Ok(_none_replicates) = self.replicating.try_lock() else {
            return Err(self.in_use(&order.image));
        };
        let receiver = stop.subscribe();
        let _moving = {
            let mut moving = self.moving.lock();
            if self.ending.load(Ordering::SeqCst) {
                bail!("{} is being unmounted", order.image);
            }
            *moving = Some(stop);
            UntilDropped(self)
        };
        let place = Some(&self.place);
        let report = moving::run(&self.home, place, Some(movable), order, events, receiver).await?;
        if order.dry_run {
            return Ok(report);
        }
        // It answers nothing any more, and may be elsewhere already.
        let lazy = StopHow {
            lazy: true,
            ..StopHow::default()
        };
        let daemon = Arc::clone(self);
        let ended = tokio::task::spawn_blocking(move || daemon.end(lazy, None, &mut |_| {}));
        if let Err(e) = ended.await? {
            tracing::warn!("{}: {}", self.place.name(), one_line(&e));
        }
        // Here, because whoever asked for the move may be gone.
        moving::settle_moved(&self.home, order).await?;
        self.done.store(true, Ordering::SeqCst);
        Ok(report)
    }

    /// Gives up the move of its disk, if there is one; one that is too far is cut off, and goes on when it is asked for again.
    pub(super) fn end_move(&self) {
        let stop = self.moving.lock().clone();
        let Some(stop) = stop else { return };
        stop.send_replace(true);
        let began = Instant::now();
        while stop.receiver_count() > 0 && began.elapsed() < OVERTAKE_LIMIT {
            std::thread::sleep(Duration::from_millis(5));
        }
        if stop.receiver_count() > 0 {
            let movable = self.disks.iter().filter_map(Disk::movable);
            movable.for_each(|movable| movable.close());
        }
    }
}
