//! The mount daemon: opens the disks of a mount, starts the front end, and serves requests on the control socket until
//! an unmount or a signal ends it.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drover_net::service::{Exchange, Handler, Services};
use drover_net::{Code, DEFAULT_DOMAIN, Peer, Refusal};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

use super::control::{self, GetStatus, PrepareHandOver, StopHow};
use super::disk::Disk;
use super::front::Shown;
use super::holding::HoldDisk;
use super::lease;
use super::moving::{AbortMove, MoveDisk};
use super::profiling::{Profiling, StartProfile, StopProfile};
use super::record::{Front, How, Kept, Place, Record};
use super::replicating::{Kept as Replicated, ReplicateDisk};
use super::standby;
use super::start::Ready;
use super::status::{MountState, Status};
use crate::error::{Context, Result, bail, failed, one_line};
use crate::home::Home;
use crate::notice::tell_starter;
use crate::signals::{self, Stop};
use crate::text::bytes;

mod ending;
mod handing_over;
mod holding;
mod moving;
mod profiling;
mod replicating;

/// Interval of progress reports during an unmount.
const REPORT_EVERY: Duration = Duration::from_millis(500);

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

impl Daemon {
    fn reply_sent(&self) {
        if self.done.load(Ordering::SeqCst)
            && let Some(ended) = self.ended.lock().take()
        {
            let _ = ended.send(());
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
