//! Moving the disk of a mount to another site, while programs use it.
//!
//! The mount daemon does it, because it has the device: the seeder lives and dies with it. Without a daemon, a disk that was
//! being handed over is asked about by the command itself.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_migrate::protocol::Kind;
use drover_migrate::{
    Commands, MigrateError, Movable, MoveEvent, MoveOptions, MoveReport, OnMove, PostCopy, Step,
    estimate_device, move_device,
};
use drover_net::{DEFAULT_DOMAIN, NetError, RateLimit, request};
use drover_store::Catalog;
use drover_store::machine::{MachineRecord, Move, Owner};
use drover_teleport::SendOptions;
use drover_teleport::progress::{Counters, SendEvent, WireTotals};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use super::control::{self, ANSWER_LIMIT};
use super::record::{Place, Written};
use super::target::Target;
use crate::audit::{Event, Record};
use crate::error::{Error, Result, bail};
use crate::home::Home;
use crate::machines::{CloseMachine, RefuseMachine, disk_of, may_be_written};
use crate::profiles;
use crate::remote::Call;
use crate::signals::Stop;
use crate::site::{self, find_peer};
use crate::text::clean;

/// How often a move tells how it goes; whoever asked for it is known to be there by that.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// Events that wait to be told.
pub const EVENTS: usize = 256;

/// How long the mount daemon may take to exit after its last reply.
const GONE_LIMIT: Duration = Duration::from_secs(10);

/// Request: move the disk of a mount to another site.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MoveDisk {
    /// The image of this site that is mounted.
    pub image: ImageName,
    /// Its domain; none for the default one.
    pub domain: Option<String>,
    /// The peer that it goes to.
    pub peer: String,
    /// The name of the image there.
    pub name_there: ImageName,
    /// Command that pauses the program that uses it.
    pub pause: Option<String>,
    /// Command that lets it go on if the disk stays.
    pub resume: Option<String>,
    /// How long the last round may take.
    pub max_pause: Option<Duration>,
    /// Bytes a second.
    pub limit: Option<u64>,
    /// How long to retry a lost connection.
    pub give_up_after: Duration,
    /// Directory for what is overwritten while the state of the beginning is sent; none for that of the mount.
    pub scratch: Option<PathBuf>,
    /// Only estimate what would be sent.
    pub dry_run: bool,
}
request!(MoveDisk: "mount.move", Manage, Moving => MoveReport);

/// How a move goes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Moving {
    /// A step begins.
    Step(MoveStep),
    /// Bytes of the state of the beginning that are there, and all of them.
    Sent(u64, u64),
    /// A round ended: its number, and the bytes of it.
    Round(u32, u64),
    /// The connection broke, and is made again: why.
    Reconnecting(String),
}

/// A step of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MoveStep {
    /// The state of the beginning is sent.
    Image,
    /// What was written since follows.
    Rounds,
    /// Its program is paused, and it is handed over.
    Switch,
}

impl MoveDisk {
    fn options(&self, home: &Home, place: Option<&Place>) -> Result<MoveOptions> {
        let peer = find_peer(&site::open_catalog(home)?, &self.peer)?;
        if peer.addresses.is_empty() {
            bail!(
                "the address of {0} is unknown: pair again with a ticket from {0}",
                clean(&peer.name)
            );
        }
        let limit = self.limit.or(home.config.limit);
        let scratch = match (&self.scratch, place) {
            (Some(scratch), _) => scratch.clone(),
            (None, Some(place)) => place.dir().to_owned(),
            // Nothing is sent.
            (None, None) => home.dir().to_owned(),
        };
        Ok(MoveOptions {
            send: SendOptions {
                limit: limit.map(|rate| Arc::new(RateLimit::new(rate))),
                dry_run: self.dry_run,
                give_up_after: self.give_up_after,
                profiles: Some(profiles::by_content(&self.home(home)?)),
                ..SendOptions::to_peer(home.identity()?, &peer)
            },
            machine: self.image.clone(),
            name_there: self.name_there.clone(),
            hypervisor: self.known_as(home)?,
            work: scratch.clone(),
            scratch,
            generations: None,
            mounts: None,
            copy_mounts: true,
            max_pause: self.max_pause,
            post_copy: PostCopy::Never,
            trust_files: false,
            keep_source: false,
            counters: Arc::<Counters>::default(),
            wire: Arc::<WireTotals>::default(),
        })
    }

    /// What its record calls the disk.
    fn known_as(&self, home: &Home) -> Result<String> {
        let of = self.home(home)?;
        let known = of.disks().load(&self.image).map_err(Error::Refused)?;
        if let Some(MachineRecord {
            under_way: Some(Move::Leaving(..) | Move::Committed(..)),
            hypervisor: Some(known),
            ..
        }) = known
        {
            return Ok(known);
        }
        let image = site::look_at_catalog(&of)?.by_name(&self.image)?;
        let image = image.ok_or_else(|| Error::no_image(None, &self.image))?;
        Ok(disk_of(&image))
    }

    fn home(&self, home: &Home) -> Result<Home> {
        home.domain(self.domain.as_deref().unwrap_or(DEFAULT_DOMAIN))
    }
}

/// Moves a disk, or asks what became of it: `device` is none where no process serves it. `told` hears how it goes; one that
/// does not listen misses something.
///
/// # Errors
/// When it stays here, with the reason, or when it is not known where it is.
pub async fn run(
    home: &Home,
    place: Option<&Place>,
    device: Option<Arc<Movable>>,
    order: &MoveDisk,
    told: mpsc::Sender<Moving>,
    stop: watch::Receiver<bool>,
) -> Result<MoveReport> {
    let of = order.home(home)?;
    let options = order.options(home, place)?;
    let (peer, key) = (options.send.peer_name.clone(), options.send.peer);
    let sent = Arc::new(Sent::default());
    let (counters, totals) = (Arc::clone(&options.counters), Arc::clone(&sent));
    let (events, tell) = (told.clone(), Arc::clone(&sent));
    let on_event: OnMove = Arc::new(move |event| {
        if let Some(moving) = tell.tell(event) {
            let _ = events.try_send(moving);
        }
    });
    let moving = async {
        match device {
            Some(device) if order.dry_run => estimate_device(device, options, on_event, stop).await,
            _ if order.dry_run => Ok(MoveReport::default()),
            device => {
                let hooks = Commands {
                    pause: order.pause.clone(),
                    resume: order.resume.clone(),
                };
                move_device(
                    device,
                    Arc::new(hooks),
                    &of.disks(),
                    options,
                    on_event,
                    stop,
                )
                .await
            }
        }
    };
    let sampling = async {
        loop {
            tokio::time::sleep(REPORT_EVERY).await;
            let done = Counters::get(&counters.done_blocks) * BLOCK_SIZE_U64;
            let _ = told.try_send(Moving::Sent(done, totals.total.load(Ordering::Relaxed)));
        }
    };
    let moved = tokio::select! {
        moved = moving => moved,
        () = sampling => Err(MigrateError::Stopped),
    };
    let mut report = moved.map_err(|e| failed(e, &peer))?;
    if order.dry_run {
        report.image_wire_bytes = sent.estimate.load(Ordering::Relaxed);
        return Ok(report);
    }
    let record = Record::new(Event::DiskLeft)
        .about(&peer, key)
        .in_domain(of.domain_name())
        .image(&order.image)
        .bytes(report.wire_bytes())
        .detail(format!("paused for {} ms", report.pause.total_ms));
    home.audit().write(record);
    Ok(report)
}

/// What is known of the state of the beginning.
#[derive(Default)]
struct Sent {
    /// Bytes of it.
    total: AtomicU64,
    /// Bytes that would be sent, of a dry run.
    estimate: AtomicU64,
}

impl Sent {
    fn tell(&self, event: MoveEvent) -> Option<Moving> {
        match event {
            MoveEvent::Step(step) => Some(Moving::Step(match step {
                Step::Images => MoveStep::Image,
                Step::Disks | Step::Memory => MoveStep::Rounds,
                Step::Switch | Step::Rest => MoveStep::Switch,
            })),
            MoveEvent::Round { round, bytes } => Some(Moving::Round(round, bytes)),
            MoveEvent::Reconnecting { error } => Some(Moving::Reconnecting(error)),
            MoveEvent::Send(SendEvent::Started { walk_blocks, .. }) => {
                self.total
                    .store(walk_blocks * BLOCK_SIZE_U64, Ordering::Relaxed);
                None
            }
            MoveEvent::Send(SendEvent::Estimated { wire_bytes, .. }) => {
                self.estimate.store(wire_bytes, Ordering::Relaxed);
                None
            }
            MoveEvent::Send(SendEvent::Reconnecting { error, .. }) => {
                Some(Moving::Reconnecting(error))
            }
            MoveEvent::Send(_) | MoveEvent::Memory(_) | MoveEvent::Left { .. } => None,
        }
    }
}

pub(super) fn failed(error: MigrateError, peer: &str) -> Error {
    if let MigrateError::Stayed {
        code: Some(code), ..
    } = &error
    {
        return Error::coded(*code, error.to_string());
    }
    match error {
        MigrateError::Refused(refusal) => Error::Refused(refusal),
        MigrateError::Net(NetError::Refused(refusal)) => Error::of_peer(peer, &refusal),
        MigrateError::Net(e) => e.into(),
        MigrateError::Teleport(e) => e.into(),
        e => Error::msg(e),
    }
}

/// The mount of this home that has an image of it open for writing.
pub(super) fn mounted(home: &Home, image: &ImageName, domain: &str) -> Result<Option<Written>> {
    let is_it = |(place, record): &Written| {
        let is_own = |target: &Target| {
            target.is_own()
                && target.image == image.as_str()
                && target.domain.as_deref().unwrap_or(DEFAULT_DOMAIN) == domain
        };
        !record.how.read_only && record.images.iter().any(is_own) && place.is_kept()
    };
    Ok(Place::list(home)?.into_iter().find(is_it))
}

/// Moves a disk by the daemon that serves it; without one, asks the other site what became of a move.
///
/// # Errors
/// When it stays here, with the reason, or when it is not known where it is.
pub async fn move_disk(
    home: &Home,
    order: &MoveDisk,
    mut told: impl FnMut(Moving),
) -> Result<MoveReport> {
    let of = order.home(home)?;
    let known = of.disks().load(&order.image).map_err(Error::Refused)?;
    let is_committed = known.as_ref().is_some_and(MachineRecord::is_committed);
    let domain = order.domain.as_deref().unwrap_or(DEFAULT_DOMAIN);
    let report = match mounted(home, &order.image, domain)? {
        Some((place, _)) => {
            let asked = control::ask(&place.socket(), order, ANSWER_LIMIT, told).await;
            let report = asked.map_err(|e| match e {
                Error::Net(NetError::Refused(refusal)) => Error::Refused(refusal),
                e => e,
            })?;
            // It holds the mount's lock until it exits.
            let begun = Instant::now();
            while !order.dry_run && place.is_kept() && begun.elapsed() < GONE_LIMIT {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            report
        }
        None if is_committed => {
            let (events, mut heard) = mpsc::channel(EVENTS);
            let stop = Stop::on_signals()?;
            let asking = run(home, None, None, order, events, stop.watch());
            tokio::pin!(asking);
            let report = loop {
                tokio::select! {
                    report = &mut asking => break report?,
                    Some(moving) = heard.recv() => told(moving),
                }
            };
            if !order.dry_run {
                settle(&of, &order.image).await;
            }
            report
        }
        None => {
            let has_left = |known: &MachineRecord| !known.may_run() && known.under_way.is_none();
            if known.as_ref().is_some_and(has_left) {
                // Whoever moved it may not have come to that.
                settle(&of, &order.image).await;
            }
            return Err(not_in_use(&of, order, known.as_ref()));
        }
    };
    Ok(report)
}

fn not_in_use(of: &Home, order: &MoveDisk, known: Option<&MachineRecord>) -> Error {
    let image = &order.image;
    if let Err(refusal) = may_be_written(&of.disks(), image, None)
        && known.is_some()
    {
        return Error::Refused(refusal);
    }
    let catalog = site::look_at_catalog(of);
    match catalog.map(|catalog| catalog.by_name(image)) {
        Ok(Ok(None)) => Error::no_image(None, image),
        _ => Error::refused(format!(
            "{image} is not in use here: no mount of this site has it open for writing; an image that is not in use is sent, not moved"
        )),
    }
}

/// As [`settle`], of a disk that this mount has moved.
pub async fn settle_moved(home: &Home, order: &MoveDisk) -> Result<()> {
    settle(&order.home(home)?, &order.image).await;
    Ok(())
}

/// Has the running site make what was written here part of the image, and freeze it.
async fn settle(of: &Home, image: &ImageName) {
    let close = CloseMachine {
        kind: Kind::Disk,
        name: image.clone(),
    };
    let closed = async {
        match Call::local(of).await? {
            Some(call) => call.ask(&close, |()| {}).await,
            // It does so when it starts.
            None => Ok(()),
        }
    };
    if let Err(e) = closed.await {
        tracing::warn!("{image}: the copy that is left here is not frozen yet: {e:#}");
    }
}

/// Request: give up the move of this image of this domain, if this mount's disk is that.
#[derive(Debug, Serialize, Deserialize)]
pub struct AbortMove {
    /// The image, as in [`MoveDisk::image`].
    pub image: ImageName,
    /// Its domain.
    pub domain: String,
}
request!(AbortMove: "mount.move.abort", Manage, () => ());

/// Gives up a move from this site or to it. Whether the disk is here after that.
///
/// # Errors
/// When there is none, or it can no longer be given up.
pub async fn abort_move(home: &Home, domain: Option<&str>, image: &ImageName) -> Result<bool> {
    let of = home.domain(domain.unwrap_or(DEFAULT_DOMAIN))?;
    let records = of.disks();
    let known = records.load(image).map_err(Error::Refused)?;
    match known.and_then(|known| known.under_way) {
        Some(Move::Leaving(..) | Move::Committed(..)) => {
            for (place, _) in Place::list(home)? {
                if place.is_kept() {
                    // Those that do not move it have nothing to do.
                    let (image, domain) = (image.clone(), of.domain_name().to_owned());
                    let abort = AbortMove { image, domain };
                    let socket = place.socket();
                    let asked = control::ask(&socket, &abort, ANSWER_LIMIT, |()| {});
                    asked.await.ok();
                }
            }
            let left = records.load(image).map_err(Error::Refused)?;
            if left.is_some_and(|left| left.under_way.is_some()) {
                let given_up = drover_migrate::give_up(None, &records, image, of.dir());
                given_up.await.map_err(|e| failed(e, ""))?;
            }
            // The other site may have taken it in the meantime.
            match records
                .load(image)
                .map_err(Error::Refused)?
                .map(|left| left.owner)
            {
                Some(Owner::There(at)) => Err(Error::refused(format!(
                    "{image} is at {} already",
                    clean(&at.name)
                ))),
                _ => Ok(true),
            }
        }
        Some(Move::Coming(..)) => {
            let name = image.clone();
            let refuse = RefuseMachine {
                kind: Kind::Disk,
                name,
            };
            match Call::local(&of).await? {
                Some(call) => call.ask(&refuse, |()| {}).await?,
                None => drover_migrate::give_up(None, &records, image, of.dir())
                    .await
                    .map_err(|e| failed(e, ""))?,
            }
            Ok(false)
        }
        _ => Err(Error::refused(format!(
            "{image} is not being moved from this site or to it"
        ))),
    }
}
