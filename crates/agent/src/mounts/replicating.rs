//! Replicating the disk of a mount: rounds that the mount daemon makes when it is asked, because it has the device.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drover_core::{BLOCK_SIZE_U64, ImageName};
use drover_migrate::replica::{
    DeviceDisk, Disks, OnSend, ReplicaOptions, Replication, RoundReport,
};
use drover_migrate::{Commands, MigrateError, Movable};
use drover_net::{Code, DEFAULT_DOMAIN, NetError, PeerKey, RateLimit, request};
use drover_store::machine::Seed;
use drover_teleport::progress::{Counters, SendEvent};
use drover_teleport::{Effort, SendOptions};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use super::control::{self, ANSWER_LIMIT};
use super::moving::{failed, mounted};
use crate::error::{Error, Result, bail};
use crate::home::Home;
use crate::profiles;
use crate::site::{self, find_peer};
use crate::text::clean;

/// How often a round tells that it goes on; whoever asked for it is known to be there by that.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// Events that wait to be told.
pub const EVENTS: usize = 256;

/// Request: make a round of a replica of the disk of a mount.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReplicateDisk {
    /// The image of this site that is mounted.
    pub image: ImageName,
    /// Its domain; none for the default one.
    pub domain: Option<String>,
    /// The peer that keeps the replica.
    pub peer: String,
    /// The name of the replica there.
    pub name_there: ImageName,
    /// Identifies what it is a replica of.
    pub seed: Seed,
    /// The interval of rounds, if there are several.
    pub every: Option<Duration>,
    /// Command that brings its program into a state that is good to begin from.
    pub pause: Option<String>,
    /// Command that lets it go on.
    pub resume: Option<String>,
    /// Bytes a second.
    pub limit: Option<u64>,
    /// Compression of what is sent; none adapts it.
    pub compress: Option<Effort>,
    /// How long to retry a lost connection.
    pub give_up_after: Duration,
    /// Directory for what is overwritten while a round is sent; none for that of the mount.
    pub scratch: Option<PathBuf>,
}
request!(ReplicateDisk: "mount.replicate", Manage, Replicating => RoundDone);

/// How a round goes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Replicating {
    /// Bytes that are there.
    Sent(u64),
    /// The connection broke, and is made again: why.
    Reconnecting(String),
}

/// A complete round.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RoundDone {
    /// Disks.
    pub disks: usize,
    /// Bytes of them.
    pub size: u64,
    /// Bytes on the wire.
    pub wire_bytes: u64,
    /// Bytes that were not read, since they were not written since the round before.
    pub unread_bytes: u64,
    /// How long ago the disks were in this state, in milliseconds.
    pub age_ms: u64,
    /// How long the round took.
    pub seconds: f64,
}

impl From<RoundReport> for RoundDone {
    fn from(report: RoundReport) -> Self {
        let age = report.moment.map(|moment| moment.elapsed().as_millis());
        RoundDone {
            disks: report.disks,
            size: report.size,
            wire_bytes: report.wire_bytes,
            unread_bytes: report.unread_bytes,
            age_ms: age.unwrap_or_default() as u64,
            seconds: report.seconds,
        }
    }
}

/// What is recorded of a device: between the rounds of its replication, and between its snapshots. One of them goes on, the
/// other begins anew.
#[derive(Default)]
pub struct Kept {
    replica: Option<(PeerKey, ImageName, Seed, Replication)>,
    /// For snapshots.
    pub held: super::holding::Kept,
}

/// Makes a round. What was written between two rounds is known if they are of the same replica.
///
/// # Errors
/// When it is not complete.
pub async fn run(
    home: &Home,
    kept: &mut Kept,
    device: Arc<Movable>,
    scratch: PathBuf,
    order: &ReplicateDisk,
    told: mpsc::Sender<Replicating>,
    stop: watch::Receiver<bool>,
) -> Result<RoundDone> {
    let peer = find_peer(&site::open_catalog(home)?, &order.peer)?;
    if peer.addresses.is_empty() {
        bail!(
            "the address of {0} is unknown: pair again with a ticket from {0}",
            clean(&peer.name)
        );
    }
    let limit = order.limit.or(home.config.limit);
    let counters = Arc::<Counters>::default();
    let options = ReplicaOptions {
        send: SendOptions {
            limit: limit.map(|rate| Arc::new(RateLimit::new(rate))),
            compress: order.compress,
            give_up_after: order.give_up_after,
            profiles: Some(profiles::by_content(home)),
            ..SendOptions::to_peer(home.identity()?, &peer)
        },
        name_there: order.name_there.clone(),
        seed: order.seed,
        every: order.every,
        hooks: Arc::new(Commands {
            pause: order.pause.clone(),
            resume: order.resume.clone(),
        }),
        counters: Arc::clone(&counters),
        wire: Arc::default(),
    };
    let (key, name, seed) = (peer.key, &order.name_there, order.seed);
    let mut replication = match kept.replica.take() {
        Some((of, its, its_seed, known)) if (of, &its, its_seed) == (key, name, seed) => {
            known.with(options, scratch)
        }
        other => {
            if let Some((.., mut other)) = other {
                other.end().await;
            }
            let disk = DeviceDisk::new(device, scratch);
            Replication::new(Disks::Device(disk), options)
        }
    };
    let events = told.clone();
    let on_event: OnSend = Arc::new(move |event| {
        if let SendEvent::Reconnecting { error, .. } = event {
            let _ = events.try_send(Replicating::Reconnecting(error));
        }
    });
    let sampling = async {
        loop {
            tokio::time::sleep(REPORT_EVERY).await;
            let done = Counters::get(&counters.done_blocks) * BLOCK_SIZE_U64;
            let _ = told.try_send(Replicating::Sent(done));
        }
    };
    let round = tokio::select! {
        round = replication.round(on_event, stop) => round,
        () = sampling => Err(MigrateError::Stopped),
    };
    kept.replica = Some((key, name.clone(), seed, replication));
    Ok(round
        .map_err(|e| match e.code() {
            // It is told from others by its code.
            Some(code @ Code::Lost) => Error::coded(code, e.to_string()),
            _ => failed(e, &peer.name),
        })?
        .into())
}

/// Has the daemon that serves a disk make a round.
///
/// # Errors
/// When it is not complete, or no mount has the image open for writing.
pub async fn replicate_disk(
    home: &Home,
    order: &ReplicateDisk,
    told: impl FnMut(Replicating),
) -> Result<RoundDone> {
    let domain = order.domain.as_deref().unwrap_or(DEFAULT_DOMAIN);
    let Some((place, _)) = mounted(home, &order.image, domain)? else {
        return Err(Error::refused(format!(
            "{} is not in use here: no mount of this site has it open for writing; an image that is not in use is sent with `drover send`",
            order.image
        )));
    };
    let asked = control::ask(&place.socket(), order, ANSWER_LIMIT, told).await;
    asked.map_err(|e| match e {
        Error::Net(NetError::Refused(refusal)) => Error::Refused(refusal),
        e => e,
    })
}
