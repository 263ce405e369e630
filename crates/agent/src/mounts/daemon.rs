//! The mount daemon: opens the disks of a mount, starts the front end, serves requests on the control socket, and shuts
//! down cleanly on an unmount or a signal.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drover_migrate::MoveReport;
use drover_net::service::{Exchange, Handler, Services};
use drover_net::{Code, DEFAULT_DOMAIN, Peer, Refusal};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

use super::control::{self, GetStatus, PrepareHandOver, StopHow};
use super::disk::Disk;
use super::front::Shown;
use super::holding::HoldDisk;
use super::lease;
use super::left::Left;
use super::moving::{self, AbortMove, MoveDisk, Moving};
use super::profiling::{Profiling, StartProfile, StopProfile};
use super::record::{Front, How, Kept, Place, Record};
use super::replicating::{Kept as Replicated, ReplicateDisk};
use super::standby;
use super::start::Ready;
use super::status::{MountState, Status};
use crate::error::{Context, Error, Result, bail, failed, one_line, refusal_of};
use crate::home::Home;
use crate::notice::{notice, tell_starter};
use crate::signals::{self, Stop};
use crate::text::{bytes, clean};

mod handing_over;
mod holding;
mod profiling;
mod replicating;

/// How long pushing dirty data may take after a signal.
const SIGNAL_PUSH_LIMIT: Duration = Duration::from_secs(20);

/// Interval of progress reports during an unmount.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// How long an unmount that does not push waits for one that pushes to give up.
const OVERTAKE_LIMIT: Duration = Duration::from_secs(5);

/// How long a move that is given up may take to end.
const ABORT_LIMIT: Duration = Duration::from_secs(20);

/// State shared by the request handlers and the shutdown.
struct Daemon {
    home: Home,
    /// The move of its disk, if it is being moved.
    moving: Mutex<Option<watch::Sender<bool>>>,
    /// The replication of its disk, held during a round, and during a move: both record what is written to the one device.
    replicating: tokio::sync::Mutex<Replicated>,
    place: Place,
    record: Mutex<Record>,
    /// Held while a recording begins or ends.
    profiling: Mutex<Profiling>,
    disks: Vec<Disk>,
    shown: Mutex<Option<Shown>>,
    ending: AtomicBool,
    /// An unmount that waits for a push has to fail, so that another can begin.
    overtaken: AtomicBool,
    /// Notified when the mount has ended and the reply to the client is sent.
    ended: Mutex<Option<oneshot::Sender<()>>>,
    /// The mount has ended: by a request, or with writes that may be lost.
    done: AtomicBool,
}

/// Serves a mount, whose lock this process holds, until a signal or a request ends it. `ready` is called once, when the
/// mount is up, with its paths or addresses and what the user should know; `waiting` before, now and then, with the bytes of
/// its disks that are here, and those that have to be.
///
/// # Errors
/// When the mount cannot be started; then nothing of it is left but a cache with dirty data.
pub async fn keep(
    home: &Home,
    place: Place,
    kept: Kept,
    mut record: Record,
    waiting: impl Fn(u64, u64) -> Result<()>,
    ready: impl FnOnce(&[String], &[String]) -> Result<()>,
) -> Result<()> {
    let stop = Stop::on_signals()?;
    let mut stopped = stop.watch();
    let (ended, mut end) = oneshot::channel();
    let mut ready = Some(ready);
    let early = if record.how.standby {
        let is_up = |shown: &Shown, record: &Record| match ready.take() {
            Some(ready) => ready(&shown.lines(record), &[]),
            None => Ok(()),
        };
        standby::stand_by(home, &place, &mut record, &waiting, is_up, &mut stopped).await?
    } else {
        standby::forget(&place)?;
        None
    };
    let opened = loop {
        match open_disks(home, &place, &record).await {
            // Its machine waits for it, and it has the lease.
            Err(e)
                if early.is_some() && lease::may_be_done(&e) && !*stopped.borrow_and_update() =>
            {
                tracing::info!("{}: {}", place.name(), one_line(&e));
                tokio::time::sleep(REPORT_EVERY).await;
            }
            opened => break opened,
        }
    };
    let disks = match opened {
        Ok(disks) => disks,
        Err(e) => {
            if let Some(early) = early {
                early.give_up();
            }
            return Err(e);
        }
    };
    if let Some(percent) = record.how.wait_local
        && let Err(e) = wait_local(&disks, &record.how, percent, &mut stopped, waiting).await
    {
        close_quietly(&disks, &place);
        return Err(e);
    }
    let how = record.how.clone();
    let records = how.profile || how.record.is_some();
    // Prefetching has begun; now expose the disks to readers.
    let _ = records && disks.iter().all(|disk| disk.profile().start());
    let made = match (early, disks.as_slice()) {
        (Some(early), [disk]) => early.arrive(disk.device()),
        _ => Shown::make(&record, &disks),
    };
    let shown = match made {
        Ok(shown) => shown,
        Err(e) => {
            close_quietly(&disks, &place);
            return Err(e);
        }
    };
    record.is_up(shown.devices());
    place.write(&record)?;
    let lines = shown.lines(&record);
    let notes = disks.iter().filter_map(|disk| disk.note(&record.how));
    let notes = Vec::from_iter(notes);
    let socket = place.socket();
    let daemon = Arc::new(Daemon {
        home: home.clone(),
        place,
        record: Mutex::new(record),
        moving: Mutex::default(),
        replicating: tokio::sync::Mutex::default(),
        profiling: Mutex::default(),
        disks,
        shown: Mutex::new(Some(shown)),
        ending: AtomicBool::new(false),
        overtaken: AtomicBool::new(false),
        ended: Mutex::new(Some(ended)),
        done: AtomicBool::new(false),
    });
    if records {
        daemon.profile_began(how.record, how.profile_for);
    }
    let mut services = Services::new(Refusal::new(
        Code::Unsupported,
        "the mount daemon does not support this request",
    ));
    services.handle::<GetStatus>(Requests(Arc::clone(&daemon)));
    services.handle::<StopHow>(Requests(Arc::clone(&daemon)));
    services.handle::<PrepareHandOver>(Requests(Arc::clone(&daemon)));
    services.handle::<MoveDisk>(Requests(Arc::clone(&daemon)));
    services.handle::<AbortMove>(Requests(Arc::clone(&daemon)));
    services.handle::<ReplicateDisk>(Requests(Arc::clone(&daemon)));
    services.handle::<HoldDisk>(Requests(Arc::clone(&daemon)));
    services.handle::<StartProfile>(Requests(Arc::clone(&daemon)));
    services.handle::<StopProfile>(Requests(Arc::clone(&daemon)));
    let announced = home
        .identity()
        .and_then(|own| control::listen(&socket, super::own(own.key(), DEFAULT_DOMAIN), services))
        .and_then(|_listens| match ready {
            Some(ready) => ready(&lines, &notes),
            None => Ok(()),
        });
    if let Err(e) = announced {
        // The caller was not notified and cannot unmount it: shut down as on a signal.
        tokio::task::spawn_blocking(move || daemon.end_by_signal()).await??;
        return Err(e);
    }
    tokio::select! {
        ended = &mut end => { ended.ok(); }
        () = signals::stopped(&mut stopped) => {
            let daemon = Arc::clone(&daemon);
            tokio::task::spawn_blocking(move || daemon.end_by_signal()).await??;
        }
    }
    drop(kept);
    Ok(())
}

/// Waits until this share of each disk is here.
async fn wait_local(
    disks: &[Disk],
    how: &How,
    percent: u8,
    stopped: &mut watch::Receiver<bool>,
    waiting: impl Fn(u64, u64) -> Result<()>,
) -> Result<()> {
    let share = |size: u64| size / 100 * u64::from(percent) + size % 100 * u64::from(percent) / 100;
    loop {
        let mut is_enough = true;
        let (mut local, mut wanted) = (0, 0);
        for status in disks.iter().map(Disk::status) {
            let share = share(status.size);
            if let Some(room) = how.cache_size
                && room < share
            {
                bail!(
                    "{}: its cache of {} cannot hold {percent}% of it",
                    status.image,
                    bytes(room)
                );
            }
            is_enough &= status.local >= share;
            local += status.local.min(share);
            wanted += share;
        }
        if is_enough {
            return Ok(());
        }
        waiting(local, wanted)?;
        tokio::select! {
            () = tokio::time::sleep(REPORT_EVERY) => {}
            () = signals::stopped(stopped) => {
                bail!("stopped when {} of {} were here", bytes(local), bytes(wanted))
            }
        }
    }
}

/// Opens every disk of the mount; if one fails, closes the others.
async fn open_disks(home: &Home, place: &Place, record: &Record) -> Result<Vec<Disk>> {
    let mut disks = Vec::new();
    for (index, image) in record.images.iter().enumerate() {
        match Disk::open(home, place, record, index, image, true).await {
            Ok(disk) => disks.push(disk),
            Err(e) => {
                close_quietly(&disks, place);
                let cannot = match record.front {
                    Front::File { .. } => "cannot mount",
                    Front::Nbd { .. } => "cannot export",
                    Front::Kernel { .. } => "cannot attach",
                };
                return Err(e).with_context(|| format!("{cannot} {image}"));
            }
        }
    }
    Ok(disks)
}

/// Closes the disks of a mount that failed to start.
fn close_quietly(disks: &[Disk], place: &Place) {
    for disk in disks {
        if let Err(e) = disk.close() {
            tracing::warn!("{}: {e:#}", place.name());
        }
    }
}

/// The move of a mount's disk is over when this is dropped.
struct UntilDropped<'a>(&'a Daemon);

impl Drop for UntilDropped<'_> {
    fn drop(&mut self) {
        *self.0.moving.lock() = None;
    }
}

/// Handles requests on the control socket.
struct Requests(Arc<Daemon>);

impl Handler<GetStatus> for Requests {
    async fn handle(
        &self,
        _: &Peer,
        _: GetStatus,
        _: &mut Exchange<'_, GetStatus>,
    ) -> Result<Status, Refusal> {
        // It may wait for what is being pushed.
        let daemon = Arc::clone(&self.0);
        let status = tokio::task::spawn_blocking(move || daemon.status());
        status.await.map_err(failed)
    }
}

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
    fn reply_sent(&self) {
        if self.done.load(Ordering::SeqCst)
            && let Some(ended) = self.ended.lock().take()
        {
            let _ = ended.send(());
        }
    }

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
    fn end_move(&self) {
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

    fn status(&self) -> Status {
        // After a failed unmount, the front end may be gone while there is still dirty data to push.
        let ending = self.ending.load(Ordering::Relaxed) || self.shown.lock().is_none();
        let record = self.record.lock();
        Status {
            name: record.name.clone(),
            place: record.front.place(),
            devices: record.devices.clone(),
            process: record.process,
            since_unix: record.since_unix,
            state: match ending {
                true => MountState::Ending,
                false => MountState::Up,
            },
            disks: self.disks.iter().map(Disk::status).collect(),
        }
    }

    /// Unmounts as `how` says; returns what is left behind. After an error it can be called again: a front end in use
    /// stays up, one that was shut down stays down, and written data is in the cache or at the other site. Only if the
    /// last flush of a local disk fails does the mount end all the same: a retry would not recover the writes.
    ///
    /// `report` is called with the status at regular intervals, however long a step takes.
    fn end(
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
    fn push_all(&self, limit: Option<Duration>) -> Result<()> {
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
    fn end_by_signal(&self) -> Result<()> {
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

/// `drover mount-daemon`: serves a recorded mount for the process that started this one.
///
/// # Errors
/// As `keep()`; they are also reported on stdout.
pub async fn run_daemon(home: &Home, name: &str) -> Result<()> {
    // A session of its own, so that signals and hang-ups of the terminal do not reach it.
    rustix::process::setsid().ok();
    let mut announced = false;
    // One that is gone has nothing to hear.
    tell_starter(Some(|text| {
        let _ = send(&Ready::Note(text.to_owned()));
    }));
    let waiting = |local, wanted| send(&Ready::Waiting(local, wanted));
    let result = keep_recorded(home, name, waiting, |lines, notes| {
        announced = true;
        tell_starter(None);
        send_ready(&Ready::There(lines.to_vec(), notes.to_vec()))
    })
    .await;
    if let Err(e) = &result
        && !announced
    {
        tell_starter(None);
        send_ready(&Ready::Failed(e.kind() as u8, one_line(e)))?;
    }
    result
}

async fn keep_recorded(
    home: &Home,
    name: &str,
    waiting: impl Fn(u64, u64) -> Result<()>,
    ready: impl FnOnce(&[String], &[String]) -> Result<()>,
) -> Result<()> {
    let Some((place, record)) = Place::list(home)?
        .into_iter()
        .find(|(_, record)| record.name == name)
    else {
        bail!("no mount is called {name}");
    };
    let Some(kept) = place.keep()? else {
        bail!("{name} is served by another process");
    };
    keep(home, place, kept, record, waiting, ready).await
}

/// Writes one line to stdout.
fn send(ready: &Ready) -> Result<()> {
    let mut line = serde_json::to_vec(ready)?;
    line.push(b'\n');
    let mut stdout = std::io::stdout();
    let written = stdout.write_all(&line).and_then(|()| stdout.flush());
    written.context("cannot write to stdout")
}

/// Writes one line to stdout, and then closes stdout, so that its reader gets end of file.
fn send_ready(ready: &Ready) -> Result<()> {
    send(ready)?;
    let null = std::fs::File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&null).context("cannot close stdout")?;
    Ok(())
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
